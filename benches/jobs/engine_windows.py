"""An engine on symmalloc's pools (`torchrun --nproc-per-node N engine_windows.py`): a pool on the engine's communicator and on a
PyTorch group, scopes that end in a sync, all-to-all with changing splits compared with PyTorch's, and graphs with all-reduces
in windows.

If ranks share a GPU, NCCL uses sockets, and makes plain registrations instead of windows.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from engine import Communicator, start
from job import report

ELEMENTS, MIB, REPLAYS, STEPS, HIDDEN, ROWS = 1 << 18, 1 << 20, 1000, 24, 512, 96


class Nothing:
    """A scope that does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def scope_nanoseconds(make: Callable[[], AbstractContextManager[None]], rounds: int, count: int) -> float:
    """Returns the minimum of several rounds."""
    least = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter_ns()
        for _ in range(count):
            with make():
                pass
        least = min(least, (time.perf_counter_ns() - begun) / count)
    return least


class Engine:
    def __init__(self) -> None:
        import symmalloc
        import torch

        self.rank, self.world, self.device = start("cpu:gloo,cuda:nccl")
        self.own = Communicator(self.rank, self.world)
        self.ranks = self.world * (self.world + 1) // 2
        self.pool = symmalloc.MemPool(reserve=256 * MIB)
        off = symmalloc.Mode.OFF
        self.windows = self.pool.register(comm=self.own.comm, rank=self.rank, world=self.world, mode=off, name="own")
        self.windows += self.pool.register(mode=off, agree_every=100)
        self.values = torch.arange(ELEMENTS, device=self.device, dtype=torch.float32) % 1024

    def scope(self) -> AbstractContextManager[None]:
        import symmalloc

        return symmalloc.use_mem_pool(self.pool, register=True)

    def tensors_in_scopes(self) -> tuple[int, int]:
        """Allocates tensors in scopes, reduces them on both communicators, and frees them, repeatedly."""
        import torch
        import torch.distributed as dist

        right = 0
        for round_number in range(4):
            tensors = []
            for number in range(8):
                with self.scope():
                    tensors.append(torch.empty(ELEMENTS, device=self.device))
                tensors[-1].copy_(self.values).mul_(self.rank + 1)
                if (number + round_number) % 2:
                    self.own.all_reduce(tensors[-1])
                else:
                    dist.all_reduce(tensors[-1])
            right += sum(torch.equal(tensor, self.values * self.ranks) for tensor in tensors)
            del tensors
        self.pool.agree()
        return right, 32

    def all_to_all(self) -> tuple[int, int, dict[str, float]]:
        """Compares with PyTorch's all-to-all, with splits that change at each step, and measures both with constant splits."""
        import symmalloc
        import torch
        import torch.distributed as dist

        with self.scope():
            source, target = (torch.empty(ROWS * self.world, HIDDEN, device=self.device) for _ in range(2))
        source.copy_(torch.arange(source.numel(), device=self.device).view_as(source) % 4096).add_(4096 * self.rank)
        # PyTorch's tensors are outside the windows: on NCCL 2.30.7, its call never returns if only the input is in a window.
        plain, theirs = source.clone(), torch.empty_like(target)
        right = 0
        sent: list[int] = []
        received: list[int] = []
        for step in range(STEPS):
            draw = random.Random(step)
            matrix = [[draw.randrange(ROWS) for _ in range(self.world)] for _ in range(self.world)]
            sent = matrix[self.rank]
            received = symmalloc.exchange_splits(sent)
            target.zero_()
            theirs.zero_()
            # Alternates between the group and the engine's communicator.
            comm = self.own.comm if step % 2 else None
            work = symmalloc.all_to_all_single(target, source, received, sent, comm=comm, async_op=step % 3 == 0)
            if work is not None:
                work.wait()
            dist.all_to_all_single(theirs[: sum(received)], plain[: sum(sent)], received, sent)
            expected = [row[self.rank] for row in matrix]
            right += received == expected and torch.equal(target, theirs)
        symmalloc.all_to_all_single(target, source)
        dist.all_to_all_single(theirs, plain)
        right += torch.equal(target, theirs)

        def microseconds(call: Callable[[], Any]) -> tuple[float, float]:
            """Measures submission and completion: the minimum of three rounds, alternating."""
            for _ in range(10):
                call()
            torch.cuda.synchronize()
            best = [float("inf")] * 2
            for _ in range(3):
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(50):
                    call()
                submitted = time.perf_counter()
                torch.cuda.synchronize()
                best = [min(best[0], submitted - begun), min(best[1], time.perf_counter() - begun)]
            return best[0] / 50 * 1e6, best[1] / 50 * 1e6

        sends, receives = plain[: sum(sent)], theirs[: sum(received)]
        figures: dict[str, float] = {}
        for name, call in (
            ("ours", lambda: symmalloc.all_to_all_single(target, source, received, sent)),
            ("pytorch", lambda: dist.all_to_all_single(receives, sends, received, sent)),
            ("ours_again", lambda: symmalloc.all_to_all_single(target, source, received, sent)),
            ("pytorch_again", lambda: dist.all_to_all_single(receives, sends, received, sent)),
        ):
            figures[f"{name}_submit_us"], figures[f"{name}_done_us"] = microseconds(call)
        return right, STEPS + 1, figures

    def graphs(self) -> tuple[int, int, dict[str, bool]]:
        """Captures two graphs in one pool. The second reuses memory that the first has freed. Between replays, tensors of the
        other pool are allocated and freed."""
        import symmalloc
        import torch
        import torch.distributed as dist

        pool = symmalloc.MemPool(reserve=32 * MIB, graphs=True)
        pool.register(mode=symmalloc.Mode.OFF)
        inputs = torch.zeros(ELEMENTS, device=self.device)
        outputs = [torch.zeros(ELEMENTS, device=self.device) for _ in range(2)]
        dist.all_reduce(inputs)  # NCCL connects at the first call
        torch.cuda.synchronize()
        graphs, places = [], []
        for number in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), symmalloc.use_mem_pool(pool, register=True):
                first = inputs * (number + 2)
                dist.all_reduce(first)
                second = first + 1
                places.append([first.data_ptr(), second.data_ptr()])
                del first
                again = second * 2  # has the address of the first
                places[-1].append(again.data_ptr())
                dist.all_reduce(again)
                outputs[number].copy_(again)
                del second, again
            graphs.append(graph)
        segments = [(segment["address"], segment["total_size"]) for segment in pool.snapshot()]
        told = {
            "taken_again_within": places[0][0] == places[0][2],
            "taken_again_by_the_next": places[0] == places[1],
            "in_the_pool": all(any(base <= place < base + size for base, size in segments) for place in places[0]),
        }
        right = 0
        wrong = torch.zeros((), device=self.device, dtype=torch.int64)
        for replay in range(REPLAYS):
            number = replay % 2
            with self.scope():
                others = torch.full((ELEMENTS * (1 + replay % 3),), -1.0, device=self.device)
            inputs.fill_((self.rank + 1) * (replay % 97))
            graphs[number].replay()
            expected = 2 * (self.ranks * (replay % 97) * (number + 2) + 1) * self.world
            is_right = (outputs[number] == expected).all() & (others == -1).all()
            wrong += ~is_right
            if replay % 250 == 249:
                torch.cuda.empty_cache()
                right += 250 - int(wrong)
                wrong.zero_()
        torch.cuda.synchronize()
        for graph in graphs:
            graph.reset()
        pool.close()
        return right, REPLAYS, told

    def costs(self) -> dict[str, float]:
        """Measures scopes, in nanoseconds."""
        import symmalloc
        import torch.distributed as dist

        figures = {"nothing_ns": scope_nanoseconds(Nothing, 20, 2000)}
        figures["use_mem_pool_ns"] = scope_nanoseconds(lambda: symmalloc.use_mem_pool(self.pool), 20, 2000)
        dist.barrier()
        own = symmalloc.MemPool(reserve=2 * MIB)
        own.register(comm=self.own.comm, mode=symmalloc.Mode.OFF)
        figures["quiet_scope_ns"] = scope_nanoseconds(lambda: symmalloc.use_mem_pool(own, register=True), 20, 2000)
        own.register(mode=symmalloc.Mode.OFF)
        both = scope_nanoseconds(lambda: symmalloc.use_mem_pool(own, register=True), 20, 2000)
        figures["quiet_scope_of_two_communicators_ns"] = both
        own.close()
        dist.barrier()
        compared = symmalloc.MemPool(reserve=2 * MIB)
        compared.register()
        scope = scope_nanoseconds(lambda: symmalloc.use_mem_pool(compared, register=True), 3, 50)
        figures["compared_scope_ns"] = scope
        compared.close()
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=("native", "symmalloc"), default="symmalloc")
    if parser.parse_args().allocator == "native":
        report({"job": "engine_windows", "allocator": "native", "skipped": "requires symmalloc's pools"})
        return
    import symmalloc
    import torch
    import torch.distributed as dist

    symmalloc.install()
    engine = Engine()
    assert engine.windows == 2, engine.windows
    scopes = engine.tensors_in_scopes()
    *exchanged, times = engine.all_to_all()
    *graphs, told = engine.graphs()
    costs = engine.costs()
    engine.pool.close()
    torch.cuda.synchronize()
    engine.own.destroy()
    everyone = torch.tensor([scopes[0] + exchanged[0] + graphs[0]])
    dist.all_reduce(everyone, dist.ReduceOp.MIN)
    if engine.rank == 0:
        of = scopes[1] + exchanged[1] + graphs[1]
        report({"job": "engine_windows", "allocator": "symmalloc", "right": int(everyone), "of": of, "ranks": engine.world,
                "scopes": scopes[0], "all_to_all": exchanged[0], "replays": graphs[0], **told, **times, **costs})  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
