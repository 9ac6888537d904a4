"""The failure that symmalloc prevents: an all-reduce through NCCL's symmetric windows after tensors were freed and reallocated.

    torchrun --nproc-per-node 2 symmetric_windows.py --allocator native       8 of 8 correct, then 0 of 8 (PyTorch 2.11)
    torchrun --nproc-per-node 2 symmetric_windows.py --allocator symmalloc    8 of 8 correct, then 8 of 8

Eight tensors of 1 MiB are in four segments of 2 MiB, each a window. NCCL finds a peer's buffer at (window, own offset) without
a check. Even ranks get their segments at ascending addresses and odd ranks at descending ones, which can happen in any program.
PyTorch up to 2.11 orders free blocks by (size, address). Later versions order them by (size, age of the segment, address), and pass.
To cause it, the script reserves address ranges and frees them one by one in that order, while the pool creates its segments.

first round     t0 t1 | t2 t3 | t4 t5 | t6 t7      the segments in order of creation, on every rank
freed, again    by (size, address):                rank 0 begins in the oldest segment, rank 1 in the newest
                by (size, birth, offset):          all begin in the oldest segment
"""

from __future__ import annotations

import argparse
import ctypes
import os
from contextlib import AbstractContextManager
from typing import Any

from job import report

TENSORS, MIB = 8, 1 << 20
SEGMENT_BYTES = 2 * MIB


class Holes:
    """Adjacent address ranges of one segment each. Freeing one of them makes the driver place the next segment there."""

    def __init__(self, count: int, *, ascending: bool) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        address, size = ctypes.c_uint64, ctypes.c_size_t
        self._driver.cuMemAddressReserve.argtypes = [ctypes.POINTER(address), size, size, address, ctypes.c_uint64]
        self._driver.cuMemAddressFree.argtypes = [address, size]
        bases = [self._reserved() for _ in range(count)]
        self._bases = sorted(bases, reverse=not ascending)

    def open(self) -> None:
        """Frees the next range."""
        if self._bases:
            self._driver.cuMemAddressFree(self._bases.pop(0), SEGMENT_BYTES)

    def _reserved(self) -> int:
        base = ctypes.c_uint64()
        assert self._driver.cuMemAddressReserve(ctypes.byref(base), SEGMENT_BYTES, 0, 0, 0) == 0
        return base.value


class NativePool:
    """PyTorch's pool: memory of ncclMemAlloc in a torch.cuda.MemPool, registered with the process group."""

    def __init__(self, backend: Any) -> None:
        import torch

        self._backend, self._pool = backend, torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self._pool, symm=True)

    def scope(self) -> AbstractContextManager[None]:
        import torch

        return torch.cuda.use_mem_pool(self._pool)

    def sync(self) -> None:
        """Does nothing: PyTorch registers each segment at its creation."""

    def close(self) -> None:
        self._backend.deregister_mem_pool(self._pool)
        del self._pool


class OurPool:
    def __init__(self, _backend: Any, reserve: int | None = None) -> None:
        import symmalloc

        self._pool = symmalloc.MemPool(reserve=reserve)
        self._pool.register()

    def scope(self) -> AbstractContextManager[None]:
        import symmalloc

        return symmalloc.use_mem_pool(self._pool)

    def sync(self) -> None:
        self._pool.sync()

    def close(self) -> None:
        import symmalloc

        symmalloc.assert_aligned(symmetric_only=True)
        self._pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=("native", "symmalloc"), default="symmalloc")
    allocator = parser.parse_args().allocator
    import torch
    import torch.distributed as dist

    if allocator == "symmalloc":
        import symmalloc

        symmalloc.install()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    backend = dist.group.WORLD._get_backend(device)
    pool = NativePool(backend) if allocator == "native" else OurPool(backend)
    holes = Holes(TENSORS // 2, ascending=rank % 2 == 0)
    elements = torch.arange(MIB // 4, device=device, dtype=torch.float32) % 1024
    ranks = world * (world + 1) // 2
    expected = [world * elements + ranks * (number + 1) for number in range(TENSORS)]

    def round_of_tensors(pool: NativePool | OurPool) -> tuple[int, list[int]]:
        """Allocates, fills, reduces and checks the tensors. Returns the number of correct ones, and their positions."""
        tensors = []
        with pool.scope():
            for number in range(TENSORS):
                if number % 2 == 0:
                    holes.open()
                tensors.append(torch.empty(MIB // 4, device=device))
        pool.sync()
        for number, tensor in enumerate(tensors):
            tensor.copy_(elements).add_((rank + 1) * (number + 1))
            dist.all_reduce(tensor)
        right = [torch.equal(tensor, their) for tensor, their in zip(tensors, expected, strict=True)]
        # A tensor is correct if it is correct on every rank.
        everyone = torch.tensor(right, device=device, dtype=torch.int32)
        dist.all_reduce(everyone, dist.ReduceOp.MIN)
        torch.cuda.synchronize()
        return int(everyone.sum()), [tensor.data_ptr() for tensor in tensors]

    rounds = [round_of_tensors(pool) for _ in range(2)]
    segments = rounds[0][1][::2]
    order = (
        "ascending" if segments == sorted(segments) else "descending" if segments == sorted(segments)[::-1] else "mixed"
    )
    orders: list[str] = [""] * world
    dist.all_gather_object(orders, order)
    if rank == 0:
        right = [count for count, _ in rounds]
        report({"job": "symmetric_windows", "allocator": allocator, "right": right, "of": TENSORS, "orders": orders})
    pool.close()
    if allocator == "symmalloc":
        # As docs/pytorch.md recommends, the pool has one segment from the start, so the rounds register nothing.
        reserved = OurPool(backend, reserve=TENSORS * MIB)
        assert [round_of_tensors(reserved)[0] for _ in range(2)] == [TENSORS] * 2
        reserved.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
