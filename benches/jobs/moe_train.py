"""Training of a mixture of experts: how many tokens each expert gets differs from step to step and from layer to layer."""

from __future__ import annotations

import random

from job import Job, report


def main() -> None:
    job = Job.from_command_line("moe_train", __doc__)
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, heads, width, hidden, experts, vocabulary, batch = (
        (2, 2, 32, 48, 4, 128, 2) if job.is_tiny else (6, 8, 512, 1024, 8, 32000, 12)
    )
    chosen_experts, (length_max, period) = 2, (32, 3) if job.is_tiny else (1024, 20)

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_attention, self.norm_experts = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.router = nn.Linear(width, experts, bias=False)
            self.experts = nn.ModuleList(Expert() for _ in range(experts))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = self.qkv(self.norm_attention(x)).view(*x.shape[:2], 3, heads, width // heads)
            q, k, v = split.permute(2, 0, 3, 1, 4)
            attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(attention.transpose(1, 2).reshape(x.shape))
            tokens = self.norm_experts(x).flatten(0, 1)
            weights, chosen = self.router(tokens).float().softmax(-1).topk(chosen_experts)
            mixed = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                place, rank = (chosen == number).nonzero(as_tuple=True)
                answer = expert(tokens[place]) * weights[place, rank, None]
                mixed = mixed.index_add(0, place, answer.to(mixed.dtype))
            return x + mixed.view(x.shape)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            x = self.tokens(text)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    with torch.device(job.device):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(number: int) -> torch.Tensor:
        length = random.Random(number).randrange(length_max // 8, length_max)
        text = torch.randint(vocabulary, (batch, length + 1), device=job.device)
        with torch.autocast(job.device, torch.bfloat16):
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    report(job.measure(period, step))
    job.end_trace()


if __name__ == "__main__":
    main()
