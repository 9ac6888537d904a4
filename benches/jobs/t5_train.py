"""Training of an encoder and decoder such as T5: both lengths vary from batch to batch."""

from __future__ import annotations

import random

from job import Job, report


def main() -> None:
    job = Job.from_command_line("t5_train", __doc__)
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, heads, width, vocabulary, batch = (2, 2, 32, 128, 2) if job.is_tiny else (6, 8, 512, 32128, 24)
    lengths_most, period = (32, 3) if job.is_tiny else (512, 20)

    with torch.device(job.device):
        tokens = nn.Embedding(vocabulary, width)
        model = nn.Transformer(width, heads, layers, layers, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        head = nn.Linear(width, vocabulary, bias=False)
    parts = nn.ModuleList([tokens, model, head])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-4)

    def step(number: int) -> torch.Tensor:
        draw = random.Random(number)
        source, target = draw.randrange(lengths_most // 8, lengths_most), draw.randrange(lengths_most // 8, lengths_most)
        text = torch.randint(vocabulary, (batch, source), device=job.device)
        answer = torch.randint(vocabulary, (batch, target + 1), device=job.device)
        mask = nn.Transformer.generate_square_subsequent_mask(target, device=job.device)
        with torch.autocast(job.device, torch.bfloat16):
            logits = head(model(tokens(text), tokens(answer[:, :-1]), tgt_mask=mask, tgt_is_causal=True))
            loss = F.cross_entropy(logits.flatten(0, 1), answer[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    report(job.measure(period, step))
    job.end_trace()


if __name__ == "__main__":
    main()
