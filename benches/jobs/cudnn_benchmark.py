"""`torch.backends.cudnn.benchmark = True`: cuDNN tries algorithms in workspaces, and results are correct."""

from __future__ import annotations

from job import Job, report


def main() -> None:
    job = Job.from_command_line("cudnn_benchmark", __doc__)
    import torch

    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    right = 0
    shapes = [(8, 32, 56, 3), (4, 64, 28, 5), (2, 16, 112, 7)]
    for batch, channels, side, size in shapes:
        images, weights = torch.randn(batch, channels, side, side), torch.randn(channels, channels, size, size)
        expected = torch.nn.functional.conv2d(images, weights, padding=size // 2)
        convolved = torch.nn.functional.conv2d(images.to(job.device), weights.to(job.device), padding=size // 2)
        right += bool((convolved.cpu() - expected).norm() < 1e-4 * expected.norm())
    report({"job": job.name, "allocator": job.allocator, "right": right, "of": len(shapes)})


if __name__ == "__main__":
    main()
