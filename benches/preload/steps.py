"""Measures the time of a training step, to determine the cost of `symmalloc run --record`: fastest tenth and median of 300 steps.

    for turn in 1 2 3 4 5; do for under in "" "symmalloc run --record job.trace.zst --"; do
        PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync $under python3 benches/preload/steps.py
    done; done

The variation between runs exceeds the measured cost, so compare the fastest tenth, and alternate the runs.
"""

import time

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    milliseconds = []
    for step in range(340):
        start = time.perf_counter()
        x = torch.randn(16, 128 + 32 * (step % 5), 768, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= 40:
            milliseconds.append(1e3 * (time.perf_counter() - start))
    milliseconds.sort()
    print(f"ms a step: fastest tenth {milliseconds[len(milliseconds) // 10]:.3f}, median {milliseconds[len(milliseconds) // 2]:.3f}, loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
