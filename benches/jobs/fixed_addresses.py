"""Tensors whose addresses are equal in every process: `install("base:slot:0")`, and a pool with a base of its own.

    python fixed_addresses.py --processes 20     compares the addresses of 20 processes; lines start with PASS or FAIL
    python fixed_addresses.py --busy 60          uses the GPU and NCCL for a minute, as a neighbor of other programs

Each process trains a small model for a few steps: forward, backward on the autograd thread, optimizer, and a side stream. It prints a
hash of the address of every tensor that it looks at.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from typing import Any

STEPS = 12
BASE, POOL_BASE = 0x1000_0000_0000, 0x1200_0000_0000
SLOT_BYTES = 1 << 40


def one_process(is_busy: bool, seconds: float) -> None:
    import torch

    import symmalloc

    symmalloc.install("base:slot:0" if not is_busy else None)
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if is_busy:
        neighbor(torch, device, seconds)
        return
    pool = symmalloc.MemPool(symmetric=False, base="slot:2", device=0)
    seen: list[int] = []
    outside: list[str] = []

    def look(name: str, tensor: Any, base: int = BASE) -> None:
        pointer = tensor.data_ptr()
        seen.append(pointer)
        if not base <= pointer < base + SLOT_BYTES:
            outside.append(f"{name} at {pointer:#x}")

    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 16)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        look("a parameter", parameter)
    side = torch.cuda.Stream()
    for step in range(STEPS):
        inputs = torch.randn(32 + 16 * (step % 3), 512, device=device)
        look("an input", inputs)
        loss = model(inputs).square().mean()
        loss.backward()
        for parameter in model.parameters():
            look("a gradient", parameter.grad)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            look("a copy on a side stream", copy)
        torch.cuda.current_stream().wait_stream(side)
        with symmalloc.use_mem_pool(pool):
            kept = torch.full((3 << 20,), step, device=device)
        look("a tensor of the pool", kept, POOL_BASE)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del copy, kept
    torch.cuda.synchronize()
    digest = hashlib.sha256(" ".join(map(str, seen)).encode()).hexdigest()[:16]
    print(f"ADDRESSES {digest} {len(seen)} tensors, loss {loss.item():.6f}, outside: {outside[:3]}", flush=True)


def neighbor(torch: Any, device: Any, seconds: float) -> None:
    """Keeps the GPU busy, with all-reduces of a process group of one rank."""
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    tensor = torch.ones(4 << 20, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    print("READY", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        large = torch.randn(2048, 2048, device=device)
        tensor[: 2048 * 2048] = (large @ large).flatten()
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    dist.destroy_process_group()


def compare(processes: int) -> int:
    lines = []
    for _ in range(processes):
        command = [sys.executable, __file__, "--one"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        found = [line for line in done.stdout.splitlines() if line.startswith("ADDRESSES ")]
        if done.returncode != 0 or not found:
            print(f"FAIL a process ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            return 1
        lines += found
    is_equal = len({line.split()[1] for line in lines}) == 1
    is_inside = all(line.endswith("outside: []") for line in lines)
    print(f"{'PASS' if is_equal else 'FAIL'} {processes} processes of PyTorch have equal addresses: {lines[0]}")
    print(f"{'PASS' if is_inside else 'FAIL'} all addresses are in their slots")
    if not is_equal:
        print("\n".join(sorted(set(lines))))
    taken = "import torch, symmalloc\nsymmalloc.install('base:0x1000')\n"
    done = subprocess.run([sys.executable, "-c", taken], capture_output=True, text=True, timeout=120, check=False)
    error = (done.stderr.strip().splitlines() or ["no error"])[-1]
    print(f"{'PASS' if 'InvalidSettings' in error else 'FAIL'} a wrong base raises: {error}")
    second = (
        "import torch, symmalloc\nsymmalloc.install('base:slot:0')\ntorch.ones(1, device='cuda')\n"
        "symmalloc.MemPool(symmetric=False, base='slot:0')\n"
    )
    done = subprocess.run([sys.executable, "-c", second], capture_output=True, text=True, timeout=120, check=False)
    error = (done.stderr.strip().splitlines() or ["no error"])[-1]
    is_right = "InvalidState" in error and "is occupied" in error
    print(f"{'PASS' if is_right else 'FAIL'} two pools with one slot raise: {error}")
    return 0 if is_equal and is_inside else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--busy", type=float, help="seconds of work as a neighbor")
    parser.add_argument("--one", action="store_true", help="one process, which prints its hash")
    options = parser.parse_args()
    if options.busy is not None:
        one_process(True, options.busy)
        return 0
    if options.one:
        one_process(False, 0)
        return 0
    return compare(options.processes)


if __name__ == "__main__":
    sys.exit(main())
