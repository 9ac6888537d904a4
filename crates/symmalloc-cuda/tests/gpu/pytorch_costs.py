"""Measures the cost of PyTorch's expandable and fixed segments per MiB, for comparison with costs.rs."""
import os
import sys
import time

mode = sys.argv[1]  # expandable or fixed
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{mode == 'expandable'}"
os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"]
import torch

MIB = 1 << 20
torch.empty(1, device="cuda")
for step in (2, 20, 64):
    best = [1e9, 1e9]
    for _ in range(3):
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        start = time.perf_counter()
        held = [torch.empty(step * MIB, dtype=torch.uint8, device="cuda") for _ in range(1280 // step)]
        best[0] = min(best[0], time.perf_counter() - start)
        held.clear()
        start = time.perf_counter()
        torch.cuda.empty_cache()
        best[1] = min(best[1], time.perf_counter() - start)
    grown, back = (seconds * 1e6 / 1280 for seconds in best)
    print(f"PyTorch {torch.__version__}, {mode} segments, steps of {step} MiB: {grown:.2f} us per MiB ({back:.2f} back)")
