"""Every way to create a process group on NCCL, with a pool that is registered on it.

    torchrun --nproc-per-node 2 process_groups.py           communicators are created with their groups
    torchrun --nproc-per-node 2 process_groups.py --lazy    and at their first use

Both also accept `--allocator native`. PyTorch 2.15 and later use `ProcessGroupNCCL2`; set TORCH_DIST_USE_NCCL2=0 for the older
`ProcessGroupNCCL`.

The checks reduce tensors in the registered memory and compare every element. A check that this PyTorch does not support is skipped,
with the reason. A failure ends the job.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from typing import Any

from engine import start
from job import report

TENSORS, MIB = 4, 1 << 20
ELEMENTS = MIB // 4


class Skipped(Exception):
    """This PyTorch or NCCL does not support the call. The text states why."""


class Checks:
    def __init__(self, allocator: str, is_lazy: bool) -> None:
        import torch.distributed as dist

        self.rank, self.world, self.device = start("nccl", binds_device=not is_lazy)
        self.is_ours, self.is_lazy = allocator == "symmalloc", is_lazy
        self.default = dist.group.WORLD

    def all(self) -> dict[str, Callable[[], None]]:
        return {
            "the default group": self.default_group,
            "a new group": self.new_group,
            "a group from split_group()": self.split,
            "two groups": self.two_groups,
            "PyTorch's MemPool, register_mem_pool(symm=True)": self.pytorch_pool,
            "suspend() and resume()": self.suspended,
            "a group with nccl-lazy": self.lazy_pairs,
            "a group that was destroyed with windows": self.destroyed,
        }

    def default_group(self) -> None:
        self.reduces_in_windows(self.default)

    def new_group(self) -> None:
        import torch.distributed as dist

        self.needs_symmalloc()
        group = dist.new_group(backend="nccl")
        self.reduces_in_windows(group)
        dist.destroy_process_group(group)

    def split(self) -> None:
        import torch.distributed as dist

        self.needs_symmalloc()
        if self.is_lazy:
            raise Skipped("only groups with a device can be split")
        group = dist.split_group(self.default, [list(range(self.world))])
        self.reduces_in_windows(group)
        dist.destroy_process_group(group)

    def two_groups(self) -> None:
        """One pool, with windows on both groups."""
        import torch.distributed as dist

        self.needs_symmalloc()
        other = dist.new_group(backend="nccl")
        pool = self.pool()
        tensors = self.tensors(pool)
        assert min(pool.register(group) for group in (self.default, other)) > 0, "a group has no window"
        for group in (self.default, other, self.default):
            self.reduce(tensors, group)
        pool.close()
        dist.destroy_process_group(other)

    def pytorch_pool(self) -> None:
        """PyTorch's own interface, twice: the second round uses freed memory again."""
        import torch

        # NCCL registers memory only on a connected group.
        self.reduce(self.tensors(None), self.default)
        backend = self.default._get_backend(self.device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        for _ in range(2):
            with torch.cuda.use_mem_pool(pool):
                tensors = [torch.empty(ELEMENTS, device=self.device) for _ in range(TENSORS)]
            backend.register_mem_pool(pool, symm=True)
            self.reduce(tensors, self.default)
            backend.deregister_mem_pool(pool)
            del tensors
        del pool
        gc.collect()
        torch.cuda.empty_cache()

    def suspended(self) -> None:
        """NCCL releases its memory between two collectives, while a pool has windows on the group."""
        import torch
        import torch.distributed as dist

        if not hasattr(self.default._get_backend(self.device), "suspend"):
            raise Skipped("this PyTorch has no Backend.suspend")
        group = dist.new_group(backend="nccl")
        backend = group._get_backend(self.device)
        pool = self.pool() if self.is_ours else None
        tensors = self.tensors(pool)
        if pool is not None:
            assert pool.register(group) > 0, "the group has no window"
        self.reduce(tensors, group)
        for _ in range(3):
            torch.cuda.synchronize()
            dist.barrier()
            backend.suspend()
            backend.resume()
            self.reduce(tensors, group)
        if pool is not None:
            pool.close()
        dist.destroy_process_group(group)

    def lazy_pairs(self) -> None:
        """Either the group has a communicator of all ranks, or `register` raises an error that names the backend to use."""
        import symmalloc
        import torch.distributed as dist

        self.needs_symmalloc()
        if not dist.is_backend_available("nccl-lazy"):
            raise Skipped("this PyTorch has no backend nccl-lazy")
        try:
            group = dist.new_group(backend="nccl-lazy")
        except AssertionError as error:
            if "split_from" not in str(error):
                raise
            raise Skipped(
                "this PyTorch does not create such a group from a default group with nccl and a device"
            ) from error
        try:
            self.reduces_in_windows(group)
        except symmalloc.TorchError as error:
            assert "use the backend nccl" in str(error), error
            raise Skipped(f"refused: {error}") from error
        finally:
            dist.destroy_process_group(group)

    def destroyed(self) -> None:
        """A typed error states what to call first. The windows ended with the communicator."""
        import symmalloc
        import torch.distributed as dist

        self.needs_symmalloc()
        group = dist.new_group(backend="nccl")
        pool = self.pool()
        assert pool.register(group) > 0, "the group has no window"
        dist.destroy_process_group(group)
        try:
            pool.sync()
        except symmalloc.InvalidState as error:
            assert "before destroy_process_group()" in str(error), error
        else:
            raise AssertionError("sync() of a pool on a destroyed group did not raise")

    def reduces_in_windows(self, group: Any) -> None:
        """Allocates, registers, reduces and frees, twice. The second round reuses the windows of the first one."""
        self.needs_symmalloc()
        pool = self.pool()
        assert pool.register(group) > 0, "the group has no window"
        for _ in range(2):
            tensors = self.tensors(pool)
            assert pool.sync()[0] == 0, "the reserved segment did not suffice"
            window = pool.window(tensors[0], group)
            assert window.handle != 0 and window.offset_bytes == 0, window
            self.reduce(tensors, group)
            del tensors
        pool.close()

    def pool(self) -> Any:
        import symmalloc

        return symmalloc.MemPool(reserve=TENSORS * MIB)

    def tensors(self, pool: Any) -> list[Any]:
        import torch

        if pool is None:
            return [torch.empty(ELEMENTS, device=self.device) for _ in range(TENSORS)]
        import symmalloc

        with symmalloc.use_mem_pool(pool):
            return [torch.empty(ELEMENTS, device=self.device) for _ in range(TENSORS)]

    def reduce(self, tensors: list[Any], group: Any) -> None:
        """Raises `AssertionError` on every rank if an element is wrong on any rank."""
        import torch
        import torch.distributed as dist

        values = torch.arange(ELEMENTS, device=self.device, dtype=torch.float32) % 1024
        ranks = self.world * (self.world + 1) // 2
        for number, tensor in enumerate(tensors):
            tensor.copy_(values).add_((self.rank + 1) * (number + 1))
            dist.all_reduce(tensor, group=group)
        right = [
            torch.equal(tensor, self.world * values + ranks * (number + 1)) for number, tensor in enumerate(tensors)
        ]
        everywhere = torch.tensor(right, device=self.device, dtype=torch.int32)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        assert bool(everywhere.all()), f"{int(everywhere.sum())} of {len(tensors)} tensors are correct on every rank"

    def needs_symmalloc(self) -> None:
        if not self.is_ours:
            raise Skipped("symmalloc only")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=("native", "symmalloc"), default="symmalloc")
    parser.add_argument("--lazy", action="store_true", help="groups have no device before their first use")
    options = parser.parse_args()
    allocator = options.allocator
    import torch
    import torch.distributed as dist

    if allocator == "symmalloc":
        import symmalloc

        symmalloc.install()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        if os.environ["RANK"] == "0":
            report({"job": "process_groups", "allocator": allocator, "skipped": "windows need a GPU for each rank"})
        return
    checks = Checks(allocator, options.lazy)
    outcomes = {}
    for name, run in checks.all().items():
        try:
            run()
            outcomes[name] = "works"
        except Skipped as reason:
            outcomes[name] = f"skipped: {reason}"
        if checks.rank == 0:
            print(f"{allocator}: {name}: {outcomes[name]}", flush=True)
    if allocator == "symmalloc":
        symmalloc.assert_aligned()
    if checks.rank == 0:
        backend = type(checks.default._get_backend(checks.device)).__name__
        works = sum(outcome == "works" for outcome in outcomes.values())
        skipped = len(outcomes) - works
        report(
            {
                "job": "process_groups",
                "backend": backend,
                "right": works,
                "of": works,
                "skipped_checks": skipped,
                "checks": outcomes,
            }
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
