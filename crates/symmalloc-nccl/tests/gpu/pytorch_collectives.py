"""Times PyTorch's collectives, for comparison.

Sizes and method are those of the test `collectives::the_cost_of_all_reduces_on_windows_and_on_plain_buffers`.

python3 pytorch_collectives.py        one process per GPU, plain buffers from PyTorch's own allocator

Microseconds per collective, back to back, best of three.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 16 << 20, 64 << 20, 256 << 20]


def microseconds(size, collective):
    count = min(max(-(-(200 << 20) // size), 10), 500)
    for _ in range(min(count, 30)):
        collective()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            collective()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begun) * 1e6 / count)
    return best


def run(rank, world):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    send = torch.zeros(SIZES[-1] // 4, device="cuda")
    receive = torch.zeros(world * SIZES[-1] // 4, device="cuda")
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"PyTorch {torch.__version__}, NCCL {nccl}, {world} ranks, us per collective: all-reduce, all-gather, all-to-all-v", flush=True)
    for size in SIZES:
        length = size // 4
        # In place, because PyTorch's all-reduce is always in place.
        reduce = microseconds(size, lambda: dist.all_reduce(send[:length]))
        gather = microseconds(size, lambda: dist.all_gather_into_tensor(receive[: world * length], send[:length]))
        parts = sum(range(1, world + 1))
        rows = [length // parts * (to + 1) for to in range(world)]
        received = [rows[rank]] * world
        source, target = send[: sum(rows)], receive[: sum(received)]
        exchange = microseconds(size, lambda: dist.all_to_all_single(target, source, received, rows))
        if rank == 0:
            print(f"{size >> 10:>9} KiB {reduce:>9.1f}  {gather:>9.1f}  {exchange:>9.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
