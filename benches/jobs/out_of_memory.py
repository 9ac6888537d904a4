"""A step that does not fit raises torch.OutOfMemoryError, in the forward and the backward pass, and training continues."""

from __future__ import annotations

from job import Job, report


def main() -> None:
    job = Job.from_command_line("out_of_memory", __doc__)
    import torch
    from torch import nn

    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    with torch.device(job.device):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class HungryBackward(torch.autograd.Function):
        """Allocates too much in the backward pass, on autograd's thread."""

        @staticmethod
        def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
            torch.empty(8 << 30, dtype=torch.uint8, device=job.device)
            return gradient

    def step(rows: int, is_hungry: bool = False) -> bool:
        optimizer.zero_grad(set_to_none=True)
        try:
            y = model(torch.ones(rows, 4096, device=job.device))
            (HungryBackward.apply(y) if is_hungry else y).square().mean().backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            return False
        return True

    outcomes = [step(64), step(1 << 20), step(64), step(64, is_hungry=True), step(64)]
    is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    expected = [True, False, True, False, True]
    right = sum(is_so == should for is_so, should in zip(outcomes, expected, strict=True)) + is_finite
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device=job.device)
        text = "no error was raised"
    except torch.OutOfMemoryError as error:
        text = str(error).splitlines()[0]
    report({"job": job.name, "allocator": job.allocator, "right": right, "of": 6, "message": text})


if __name__ == "__main__":
    main()
