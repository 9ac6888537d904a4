"""A captured all-gather on plain memory, before and after a sleep, with and without NCCL's registration of captured buffers.

    NCCL_GRAPH_REGISTER=1 torchrun --standalone --nproc-per-node 2 benches/jobs/captured_buffers.py     wrong elements
    NCCL_GRAPH_REGISTER=0 torchrun --standalone --nproc-per-node 2 benches/jobs/captured_buffers.py     none

With the registration, symmalloc refuses the sleep of a plain pool. This job turns the check off, to show what it prevents: the
graph reads or writes the memory that the buffers had at the capture. Each cycle sleeps, gives the released memory to another
tensor, wakes, and replays. A rank prints the wrong elements of each cycle, and the memory that the sleep returned. Exits with 1
if an element is wrong.
"""

from __future__ import annotations

import os
import sys

import symmalloc
import torch
import torch.distributed as dist
from symmalloc import Contents, captured_buffers

CYCLES = 4
ELEMENTS = 2 << 20
"""Elements for each rank: 8 MiB. The input and the output on two ranks are within one chunk of the pool."""
MIB = 1 << 20


def main() -> int:
    captured_buffers.check_off = lambda: None
    symmalloc.install()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # LL and LL128 copy through NCCL's own buffers, so they never register the user's.
    os.environ["NCCL_PROTO"] = "Simple"
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    pool = symmalloc.MemPool(symmetric=False, conf="segments:expandable")
    with symmalloc.use_mem_pool(pool):
        sent = torch.full((ELEMENTS,), float(rank + 1), device="cuda")
        received = torch.zeros(ranks * ELEMENTS, device="cuda")
    dist.all_gather_into_tensor(received, sent)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_gather_into_tensor(received, sent)
    wrong, returned = [], []
    for cycle in range(CYCLES):
        together()
        before = torch.cuda.mem_get_info()[0]
        pool.sleep(Contents.DROP)
        returned.append((torch.cuda.mem_get_info()[0] - before) // MIB)
        other = torch.full((16 * MIB,), 7.0, device="cuda")
        pool.wake()
        sent.fill_(10 * cycle + rank + 1)
        received.zero_()
        together()
        graph.replay()
        together()
        expected = torch.cat([torch.full_like(sent, 10.0 * cycle + peer + 1) for peer in range(ranks)])
        wrong.append(int((received != expected).sum()) + int((other != 7).sum()))
        del other
    version, setting = ".".join(map(str, torch.cuda.nccl.version())), os.environ.get("NCCL_GRAPH_REGISTER", "not set")
    print(f"rank {rank}, NCCL {version}, NCCL_GRAPH_REGISTER {setting}: {wrong} of {received.numel()} elements are wrong,"
          f" {returned} MiB were returned", flush=True)
    together()
    # A communicator whose buffers are gone may not end.
    sys.stdout.flush()
    os._exit(int(any(wrong)))


def together() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
