"""Training of a graph network on sampled graphs: few large tensors, with different sizes in every step."""

from __future__ import annotations

import random

from job import Job, report


def main() -> None:
    job = Job.from_command_line("gnn_sampled", __doc__)
    import torch
    from torch import nn
    from torch.nn import functional as F

    inputs, width, classes = (8, 8, 4) if job.is_tiny else (256, 256, 64)
    nodes_most, period = (200, 2) if job.is_tiny else (900_000, 16)

    class Convolution(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

        def forward(self, x: torch.Tensor, neighbors: torch.Tensor) -> torch.Tensor:
            return self.own(x) + self.others(x[neighbors].mean(1))

    with torch.device(job.device):
        layers = nn.ModuleList([Convolution(inputs, width), Convolution(width, width), Convolution(width, classes)])
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)

    def step(number: int) -> torch.Tensor:
        draw = random.Random(number)
        nodes, degree = draw.randrange(nodes_most // 3, nodes_most), draw.choice((2, 3, 4))
        x = torch.randn(nodes, inputs, device=job.device)
        labels = torch.randint(classes, (nodes,), device=job.device)
        for place, layer in enumerate(layers):
            # A node's neighbors precede it, so sums have a fixed order, and results are bitwise equal from run to run.
            shift = torch.arange(1, degree + 1, device=job.device)
            neighbors = (torch.arange(nodes, device=job.device)[:, None] - shift).clamp_(min=0)
            x = layer(x, neighbors)
            if place < 2:
                x = F.relu(x)
        loss = F.cross_entropy(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    report(job.measure(period, step))
    job.end_trace()


if __name__ == "__main__":
    main()
