"""A DataLoader whose workers are forked after CUDA was used, with pinned memory and a clean process exit."""

from __future__ import annotations

from job import Job, report

KEPT: list[object] = []


def main() -> None:
    job = Job.from_command_line("loader_workers", __doc__)
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 256

        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.full((1000,), float(number))

    is_cuda = job.device == "cuda"
    held = torch.ones(1 << 20, device=job.device)
    total = 0.0
    for _ in range(2):
        for batch in DataLoader(
            Numbers(), batch_size=16, num_workers=4, pin_memory=is_cuda, multiprocessing_context="fork"
        ):
            total += float(batch.to(job.device, non_blocking=True).sum()) / 1000
    report({"job": job.name, "allocator": job.allocator, "right": int(total == 2 * sum(range(256))), "of": 1})
    # The tensor lives until the interpreter is destroyed, and freeing it then must not fail.
    KEPT.append(held)


if __name__ == "__main__":
    main()
