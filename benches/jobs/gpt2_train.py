"""GPT-2 (124M) training: batches of 16 sequences of varying lengths, bf16 autocast, AdamW."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from job import Job, report


def training(
    job: Job, batch: int, lengths_max: int, length: Callable[[int], int], compiled: Callable[[Any], Any] | None = None
) -> Callable[[int], Any]:
    """Returns a training step on sequences whose length depends on the step."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, heads, width, vocabulary = (2, 2, 32, 128) if job.is_tiny else (12, 12, 768, 50304)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = self.qkv(self.norm_attention(x)).view(*x.shape[:2], 3, heads, width // heads)
            q, k, v = split.permute(2, 0, 3, 1, 4)
            attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(attention.transpose(1, 2).reshape(x.shape))
            return x + self.mlp(self.norm_mlp(x))

    class Gpt2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(lengths_max, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    with torch.device(job.device):
        model = Gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    run = model if compiled is None else compiled(model)

    def step(number: int) -> torch.Tensor:
        text = torch.randint(vocabulary, (batch, length(number) + 1), device=job.device)
        with torch.autocast(job.device, torch.bfloat16):
            logits = run(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main() -> None:
    job = Job.from_command_line("gpt2_train", __doc__)
    batch, lengths_max, period = (2, 64, 4) if job.is_tiny else (16, 1024, 24)
    lengths = [random.Random(number).randrange(lengths_max // 16, lengths_max) for number in range(period)]
    step = training(job, batch, lengths_max, lambda number: lengths[number % period])
    report(job.measure(period, step, periods=2))
    job.end_trace()


if __name__ == "__main__":
    main()
