"""Copies between two GPUs of one process: contiguous ones, strided ones (a kernel that reads the peer), and both ways."""

from __future__ import annotations

from job import Job, report


def main() -> None:
    job = Job.from_command_line("peer_copy", __doc__)
    import torch

    if torch.cuda.device_count() < 2:
        report({"job": job.name, "allocator": job.allocator, "skipped": "needs two GPUs"})
        return
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    right = {}
    source = torch.randn(2048, 2048, device=first)
    right["contiguous"] = torch.equal(source.to(second).cpu(), source.cpu())
    right["back"] = torch.equal(source.to(second).to(first), source)
    right["strided"] = torch.equal(source[:, ::2].t().to(second).cpu(), source[:, ::2].t().cpu())
    target = torch.zeros(2048, 2048, device=second)
    target[::2].copy_(source[::2])
    right["into a stride"] = torch.equal(target[::2].cpu(), source[::2].cpu())
    report(
        {"job": job.name, "allocator": job.allocator, "right": sum(right.values()), "of": len(right), "cases": right}
    )


if __name__ == "__main__":
    main()
