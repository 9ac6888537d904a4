"""A captured all-reduce in windows that is replayed after each sleep, with the communicator suspended meanwhile.

    torchrun --nproc-per-node 2 sleep_windows.py --cycles 20              the windows and their memory are released
    torchrun --nproc-per-node 2 sleep_windows.py --cycles 20 --suspend    also NCCL's memory (NCCL 2.29.7 or later)

PyTorch loads its own NCCL. To use a newer one, preload it: LD_PRELOAD=FOLDER/libnccl.so.2. Each cycle checks every element of a
replay and of an eager all-reduce. If windows have new handles, the script captures again and counts it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from dataclasses import asdict
from typing import Any

from job import report

TENSORS, MIB = 3, 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--mib", type=int, default=64, help="MiB of each tensor")
    parser.add_argument("--suspend", action="store_true", help="suspend the communicator, too")
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    import symmalloc

    symmalloc.install()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    pool = symmalloc.MemPool(tag="weights")
    pool.register()
    with symmalloc.use_mem_pool(pool, register=True):
        tensors = [torch.zeros(options.mib * MIB // 4, device=device) for _ in range(TENSORS)]

    def reduce_all() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def pattern(factor: int, summand: int) -> torch.Tensor:
        numbers = torch.arange(options.mib * MIB // 4, device=device) % 251
        return (numbers * factor + summand).float()

    def is_right(cycle: int, reduce: Any) -> bool:
        for number, tensor in enumerate(tensors):
            tensor.copy_(pattern(rank + 1, number + cycle))
        reduce()
        ranks = world * (world + 1) // 2
        right = [
            torch.equal(tensor, pattern(ranks, world * (number + cycle))) for number, tensor in enumerate(tensors)
        ]
        return all(right)

    def captured() -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reduce_all()
        return graph

    assert is_right(0, reduce_all)
    graph = captured()
    assert is_right(0, graph.replay)
    before = symmalloc.device_memory()
    wrong, recaptured, suspended, asleep, awake, during = 0, 0, 0, 0.0, 0.0, before
    for cycle in range(1, options.cycles + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        slept = symmalloc.sleep("weights", keep=cycle % 2 == 0, suspend=options.suspend)
        asleep += time.perf_counter() - begun
        suspended, during = slept.suspended_bytes, symmalloc.device_memory()
        begun = time.perf_counter()
        woken = symmalloc.wake("weights")
        awake += time.perf_counter() - begun
        assert woken.lost == 0 and woken.resumed == (1 if options.suspend else 0), woken
        if woken.changed:
            recaptured, graph = recaptured + 1, captured()
        wrong += not is_right(cycle, graph.replay)
        wrong += not is_right(cycle, reduce_all)
    wrongs: list[int] = [0] * world
    dist.all_gather_object(wrongs, wrong)
    if rank == 0:
        report(
            {
                "job": "sleep_windows", "cycles": options.cycles, "suspend": options.suspend, "wrong": sum(wrongs),
                "recaptured": recaptured, "suspended_bytes": suspended, "nccl": nccl_version(),
                "sleep_ms": round(1e3 * asleep / options.cycles, 1), "wake_ms": round(1e3 * awake / options.cycles, 1),
                "awake": asdict(before), "asleep": asdict(during),
            }
        )  # fmt: skip
    del graph
    pool.close()
    dist.destroy_process_group()
    assert sum(wrongs) == 0


def nccl_version() -> str:
    """Returns the version of the loaded NCCL. `torch.cuda.nccl.version()` is that of the headers."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


if __name__ == "__main__":
    main()
