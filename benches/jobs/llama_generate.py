"""Llama-style generation (1.1B): the KV cache grows by one token at a time, prompts and batches vary."""

from __future__ import annotations

import random

from job import Job, report


def main() -> None:
    job = Job.from_command_line("llama_generate", __doc__)
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, heads, kv_heads, width, hidden, vocabulary = (
        (2, 4, 2, 32, 64, 128) if job.is_tiny else (22, 32, 4, 2048, 5632, 32000)
    )
    head_width = width // heads
    prompt_max, new_tokens, period = (16, 4, 2) if job.is_tiny else (768, 32, 4)
    cache = list[tuple[torch.Tensor, torch.Tensor]]

    def rotated(x: torch.Tensor, first: int) -> torch.Tensor:
        places = torch.arange(first, first + x.shape[2], device=x.device, dtype=torch.float32)
        rates = 10000 ** -(torch.arange(0, head_width, 2, device=x.device) / head_width)
        angles = torch.outer(places, rates)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
            self.kv = nn.Linear(width, 2 * kv_heads * head_width, bias=False)
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x: torch.Tensor, caches: cache, number: int) -> torch.Tensor:
            batch, length, _ = x.shape
            y = self.norm_attention(x)
            q = self.q(y).view(batch, length, heads, head_width).transpose(1, 2)
            k, v = self.kv(y).view(batch, length, 2, kv_heads, head_width).permute(2, 0, 3, 1, 4)
            first = caches[number][0].shape[2] if number < len(caches) else 0
            q, k = rotated(q, first), rotated(k, first)
            if first:
                k, v = torch.cat((caches[number][0], k), 2), torch.cat((caches[number][1], v), 2)
                caches[number] = k, v
            else:
                caches.append((k, v))
            attention = F.scaled_dot_product_attention(q, k, v, is_causal=not first, enable_gqa=True)
            x = x + self.o(attention.transpose(1, 2).reshape(batch, length, width))
            y = self.norm_mlp(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: torch.Tensor, caches: cache) -> torch.Tensor:
            x = self.tokens(tokens)
            for number, layer in enumerate(self.layers):
                x = layer(x, caches, number)
            return self.head(self.norm(x[:, -1])).float()

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(job.device):
        model = Llama().eval()
    draw = random.Random(1)
    prompts = [(draw.choice((4, 8, 12, 16)), draw.randrange(prompt_max // 8, prompt_max)) for _ in range(period)]

    @torch.inference_mode()
    def step(number: int) -> torch.Tensor:
        """Answers one batch of prompts. Its "loss" depends on every chosen token."""
        tokens = torch.randint(vocabulary, prompts[number % period], device=job.device)
        caches: cache = []
        total = torch.zeros((), dtype=torch.float64, device=job.device)
        for place in range(new_tokens):
            best, tokens = model(tokens, caches).max(-1, keepdim=True)
            total += (best.double() + tokens.double() * (place + 1)).sum()
        return total

    report(job.measure(period, step))
    job.end_trace()


if __name__ == "__main__":
    main()
