"""`symmalloc.all_to_all_single` compared with PyTorch's all-to-all, and many calls with changing splits and shapes (`torchrun
--nproc-per-node N all_to_all.py`).

    sizes    from 64 KiB to 256 MiB of each rank's input, equal splits, alternating: microseconds until the device is done
    calls    --calls calls with different splits, into outputs of different shapes that a scope of a pool without a reserve
             registers: memory must not grow after the first tenth
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import start
from job import report

MIB, HIDDEN, ROWS_MAX, OUTPUTS, MATRICES = 1 << 20, 512, 1024, 4, 10_007
SIZES = [64 << 10 << (2 * power) for power in range(7)]


def microseconds(call: Callable[[], Any], calls: int) -> float:
    import torch
    import torch.distributed as dist

    call()
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / calls * 1e6


def sizes(world: int, device: Any, turns: int) -> dict[str, list[float]]:
    """Measures the minimum microseconds per size, for symmalloc and PyTorch. Both send the same input to separate outputs."""
    import symmalloc
    import torch
    import torch.distributed as dist

    pool = symmalloc.MemPool(reserve=3 * SIZES[-1])
    pool.register(mode=symmalloc.Mode.OFF)
    found = {}
    for size in SIZES:
        with symmalloc.use_mem_pool(pool, register=True):
            source, target = (torch.empty(size // 4, device=device) for _ in range(2))
        plain_source, theirs = torch.empty_like(source), torch.empty_like(source)
        source.copy_(torch.arange(size // 4, device=device) % 4096).add_(4096 * dist.get_rank())
        plain_source.copy_(source)
        calls = max(20, min(400, (1024 * MIB) // size))
        both = (
            lambda: symmalloc.all_to_all_single(target, source),
            lambda: dist.all_to_all_single(theirs, plain_source),
        )
        best = [float("inf")] * 2
        for turn in range(turns):
            # The first call alternates.
            for which in (turn % 2, 1 - turn % 2):
                best[which] = min(best[which], microseconds(both[which], calls))
        assert torch.equal(target, theirs), size
        found[f"{size >> 10} KiB"] = [round(us, 1) for us in best]
        del source, target, plain_source, theirs
    pool.close()
    return found


def taken(pool: Any) -> dict[str, int]:
    """Returns the quantities that must not grow."""
    import torch

    torch.cuda.synchronize()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "segments": len(pool.snapshot()),
        "reserved_mib": torch.cuda.memory_reserved() // MIB,
        "driver_mib": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) // MIB,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_mib": resident // MIB,
    }


def calls(rank: int, world: int, device: Any, count: int) -> dict[str, Any]:
    """Checks results, and compares memory after the first tenth of the calls with memory at the end."""
    import symmalloc
    import torch

    draw = random.Random(5)
    matrices = [[[draw.randrange(ROWS_MAX) for _ in range(world)] for _ in range(world)] for _ in range(MATRICES)]
    # Every rank allocates the largest share, because allocations in a symmetric pool are equal on all ranks.
    rooms = [max(sum(row[receiver] for row in matrix) for receiver in range(world)) for matrix in matrices]
    pool = symmalloc.MemPool()
    pool.register(mode=symmalloc.Mode.OFF)
    with symmalloc.use_mem_pool(pool, register=True):
        source = torch.empty(ROWS_MAX * world, HIDDEN, device=device)
    # Each row contains its rank and its number.
    source.copy_((torch.arange(len(source), device=device) + rank * len(source)).view(-1, 1).expand_as(source))
    outputs: deque[Any] = deque(maxlen=OUTPUTS)
    right = checked = 0
    before: dict[str, int] = {}
    begun = time.perf_counter()
    for number in range(count):
        matrix = matrices[number % MATRICES]
        sent, received = matrix[rank], [row[rank] for row in matrix]
        with symmalloc.use_mem_pool(pool, register=True):
            output = torch.empty(rooms[number % MATRICES], HIDDEN, device=device)
        symmalloc.all_to_all_single(output, source, received, sent)
        if number % 1000 == 999:
            expected = [
                sender * len(source) + sum(matrix[sender][:rank]) + row
                for sender in range(world)
                for row in range(matrix[sender][rank])
            ]
            # A variable for a part of the output would keep it alive, and exceed the available memory.
            wanted = torch.tensor(expected, device=device, dtype=output.dtype).view(-1, 1)
            right += bool((output[: sum(received)] == wanted).all())
            checked += 1
        if number == max(count // 10, MATRICES) - 1:
            before = taken(pool)
        outputs.append(output)
    torch.cuda.synchronize()
    microseconds_each = (time.perf_counter() - begun) / count * 1e6
    after = taken(pool)
    del output, outputs, source
    pool.close()
    grown = {key: after[key] - before[key] for key in before}
    return {"right": right, "of": checked, "each_us": round(microseconds_each, 1), "at_the_end": after, "grown": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=("native", "symmalloc"), default="symmalloc")
    parser.add_argument("--turns", type=int, default=20, help="number of measurements per size")
    parser.add_argument("--calls", type=int, default=100_000)
    options = parser.parse_args()
    if options.allocator == "native":
        report({"job": "all_to_all", "allocator": "native", "skipped": "requires symmalloc's pools"})
        return
    import symmalloc
    import torch
    import torch.distributed as dist

    symmalloc.install()
    rank, world, device = start("cpu:gloo,cuda:nccl")
    times = sizes(world, device, options.turns)
    figures = calls(rank, world, device, options.calls)
    everyone = torch.tensor([figures["right"]])
    dist.all_reduce(everyone, dist.ReduceOp.MIN)
    if rank == 0:
        report({"job": "all_to_all", "allocator": "symmalloc", **figures, "right": int(everyone), "ranks": world, "us_ours_pytorch": times})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
