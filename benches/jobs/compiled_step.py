"""torch.compile: a training step through Inductor and Triton has the same losses as on PyTorch's own allocator."""

from __future__ import annotations

from job import Job, report


def main() -> None:
    job = Job.from_command_line("compiled_step", __doc__)
    import torch
    from torch import nn

    with torch.device(job.device):
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model)

    def step(_number: int) -> torch.Tensor:
        loss = compiled(torch.randn(256, 512, device=job.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    report(job.measure(10, step))


if __name__ == "__main__":
    main()
