"""ResNet-50 training: image and batch sizes vary, bf16 autocast, SGD with momentum."""

from __future__ import annotations

import random

from job import Job, report


def main() -> None:
    job = Job.from_command_line("resnet50_multiscale", __doc__)
    import torch
    from torch import nn
    from torch.nn import functional as F

    depths = (1, 1) if job.is_tiny else (3, 4, 6, 3)
    base = 8 if job.is_tiny else 64
    period = 3 if job.is_tiny else 16

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
        layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs))

    class Bottleneck(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            self.squeeze = convolution(inputs, width, 1)
            self.spread = convolution(width, width, 3, stride)
            self.expand = convolution(width, 4 * width, 1)
            is_same = inputs == 4 * width and stride == 1
            self.shortcut = nn.Identity() if is_same else convolution(inputs, 4 * width, 1, stride)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.relu(self.squeeze(x), inplace=True)
            y = F.relu(self.spread(y), inplace=True)
            return F.relu(self.expand(y) + self.shortcut(x), inplace=True)

    def resnet() -> nn.Sequential:
        stages: list[nn.Module] = [convolution(3, base, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        inputs = base
        for stage, depth in enumerate(depths):
            width = base << stage
            for block in range(depth):
                stages.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
                inputs = 4 * width
        return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))

    with torch.device(job.device):
        model = resnet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = random.Random(1)
    sides, batches = ((32, 48), (2, 4)) if job.is_tiny else (range(128, 321, 32), range(32, 129, 16))
    shapes = [(draw.choice(batches), draw.choice(sides)) for _ in range(period)]

    def step(number: int) -> torch.Tensor:
        batch, side = shapes[number % period]
        images = torch.randn(batch, 3, side, side, device=job.device).to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=job.device)
        with torch.autocast(job.device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    report(job.measure(period, step, periods=3))
    job.end_trace()


if __name__ == "__main__":
    main()
