"""A vision transformer that serves batches of different sizes on five streams.

Each batch waits for the one before, on another stream. With `--large` it does not, so that batches run concurrently.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

from job import Job, report


def main() -> None:
    job = Job.from_command_line("vit_serving", __doc__)
    import torch
    from torch import nn

    layers, heads, width, patch = (2, 2, 32, 16) if job.is_tiny else (12, 12, 768, 16)
    batch_most, period = (3, 5) if job.is_tiny else (768, 40) if job.is_large else (96, 40)

    torch.set_default_dtype(torch.float32 if job.is_tiny else torch.bfloat16)
    with torch.device(job.device):
        patches = nn.Conv2d(3, width, patch, patch)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        head = nn.Linear(width, 1000)
    for part in (patches, encoder, head):
        part.eval()
    streams = [torch.cuda.Stream() for _ in range(5)] if job.device == "cuda" else [None] * 5

    job.synchronize()  # the weights are complete

    @torch.inference_mode()
    def step(number: int) -> torch.Tensor:
        draw = random.Random(number % period)
        batch, side = draw.randrange(1, batch_most), 16 * draw.randrange(8, 20)
        stream = streams[number % len(streams)]
        if stream is not None and not job.is_large:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            images = torch.randn(batch, 3, side, side, device=job.device)
            x = patches(images).flatten(2).transpose(1, 2)
            answer = head(encoder(x).mean(1)).float().square().mean()
        if stream is not None:
            if not job.is_large:  # otherwise, the host waits for the device before it reads the answers
                torch.cuda.current_stream().wait_stream(stream)
            answer.record_stream(torch.cuda.current_stream())
        return answer

    report(job.measure(period, step, periods=2))
    job.end_trace()


if __name__ == "__main__":
    main()
