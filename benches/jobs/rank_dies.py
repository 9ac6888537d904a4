"""A process dies in a scope of a registered pool: the other process gets an error that names it, within the deadline.

    benches/jobs/rank_dies.py          starts both ranks, on two GPUs or on one
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import subprocess
import sys
import time

from job import report

DEADLINE_SECONDS, MARGIN_SECONDS, LIMIT_SECONDS = 5.0, 5.0, 120
DIED = 9


def rank_of_two(mode: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS / 2, exit=True)  # shows the position of a hang
    import symmalloc
    import torch
    from engine import start

    symmalloc.install()
    rank, _, device = start("nccl")
    pool = symmalloc.MemPool()
    with symmalloc.use_mem_pool(pool):
        tensor = torch.ones(1 << 20, device=device)
    pool.register(mode=symmalloc.Mode[mode], deadline_seconds=DEADLINE_SECONDS)
    torch.distributed.all_reduce(tensor)
    # The first launch of a kernel loads it and waits for the device, so it must not follow a collective that never ends.
    assert float(tensor.sum()) == 2 * tensor.numel()
    begun = time.monotonic()
    try:
        with symmalloc.use_mem_pool(pool, register=True):
            # The allocation needs a new segment, so that the scope's end registers one.
            second = torch.ones(64 << 20, device=device)
            if rank == 1:
                os._exit(DIED)
    except symmalloc.NcclError as error:
        elapsed = time.monotonic() - begun
        assert elapsed < DEADLINE_SECONDS + MARGIN_SECONDS and "rank 1" in str(error), (elapsed, error)
        assert float(second.sum()) == second.numel()
        # The process continues outside the scope, in the default pool.
        assert float(torch.ones(1024, device=device).sum()) == 1024
        print(f"error after {elapsed:.2f} s: {str(error).splitlines()[0]}", flush=True)
        os._exit(0)
    raise AssertionError("no error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=("native", "symmalloc"), default="symmalloc")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.allocator == "native":
        report({"job": "rank_dies", "allocator": "native", "skipped": "requires symmalloc's pools"})
        return
    if options.rank is not None:
        rank_of_two(options.rank)
        return
    right, told = 0, {}
    for mode in ("AT_SYNC", "OFF"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in ("0", "1"):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [sys.executable, __file__, "--rank", mode]
            ranks.append(subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, text=True))
        output = ranks[0].communicate(timeout=LIMIT_SECONDS)[0]
        ranks[1].communicate(timeout=LIMIT_SECONDS)
        right += ranks[0].returncode == 0 and ranks[1].returncode == DIED
        told[mode] = output.strip().splitlines()[-1:]
    report({"job": "rank_dies", "allocator": "symmalloc", "right": right, "of": 2, "told": told})


if __name__ == "__main__":
    main()
