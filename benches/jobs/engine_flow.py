"""The calls that vLLM and SGLang make for symmetric memory, in their order, on an engine's own communicator.

vLLM: a `torch.cuda.MemPool` over an allocator in C, a scope around symmetric allocations, and after each scope a window for every
new segment of `pool.snapshot()`. SGLang: a pool for each group, whose allocator registers a segment at its creation. In a
capture, both leave the graph's pool for the scope and return to it afterwards.

`torchrun --nproc-per-node N engine_flow.py` runs the same code on PyTorch's own allocator and with symmalloc installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from engine import Communicator, start
from job import report

TENSORS, ELEMENTS, REPLAYS = 8, 1 << 18, 100
COMMUNICATOR = "ENGINE_FLOW_COMMUNICATOR"

SOURCE = f"""
#include <stddef.h>
#include <stdlib.h>
extern int ncclMemAlloc(void **pointer, size_t size);
extern int ncclMemFree(void *pointer);
extern int ncclCommWindowRegister(void *comm, void *base, size_t size, void **window, int flags);

void *take(size_t size, int device, void *stream) {{
  void *pointer;
  return ncclMemAlloc(&pointer, size) ? NULL : pointer;
}}

void *take_and_register(size_t size, int device, void *stream) {{
  void *pointer = take(size, device, stream), *window;
  void *comm = (void *)strtoull(getenv("{COMMUNICATOR}"), NULL, 0);
  return pointer && ncclCommWindowRegister(comm, pointer, size, &window, 1) ? NULL : pointer;
}}

void give_back(void *pointer, size_t size, int device, void *stream) {{
  ncclMemFree(pointer);
}}
"""


def compiled(folder: Path) -> Path:
    """Compiles the allocator in C against the NCCL that PyTorch has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    nccl = next(Path(line.split(maxsplit=5)[5]) for line in maps if "libnccl.so" in line)
    (folder / "allocator.c").write_text(SOURCE)
    library = folder / "allocator.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", folder / "allocator.c", nccl, f"-Wl,-rpath,{nccl.parent}", "-o", library], check=True
    )
    return library


class Scope:
    """Allocates from the pool inside the block. In a capture, it replaces the graph's pool."""

    def __init__(self, pool: Any, graph_pool: Any) -> None:
        import torch

        self._pool, self._graph_pool, self._scope = pool, graph_pool, torch.cuda.use_mem_pool(pool)
        self._is_capturing, self._device = torch.cuda.is_current_stream_capturing(), torch.cuda.current_device()

    def __enter__(self) -> None:
        import torch

        if self._is_capturing:
            torch._C._cuda_endAllocateToPool(self._device, self._graph_pool)
        self._scope.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        import torch

        self._scope.__exit__(kind, error, at)
        self.left()
        if self._is_capturing:
            torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, self._graph_pool)

    def left(self) -> None:
        """Registers new segments at the end of the scope."""


class SnapshotScope(Scope):
    """The calls of vLLM."""

    def __init__(self, pool: Any, graph_pool: Any, communicator: Communicator, registered: set[int]) -> None:
        super().__init__(pool, graph_pool)
        self._communicator, self._registered = communicator, registered

    def left(self) -> None:
        for segment in self._pool.snapshot():
            if segment["address"] not in self._registered:
                self._communicator.register_window(segment["address"], segment["total_size"])
                self._registered.add(segment["address"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=("native", "symmalloc"), default="symmalloc")
    allocator = parser.parse_args().allocator
    import torch
    import torch.distributed as dist

    if allocator == "symmalloc":
        import symmalloc

        symmalloc.install()
    rank, world, device = start("gloo")
    with tempfile.TemporaryDirectory() as folder:
        library = str(compiled(Path(folder)))
        right, of = 0, 0
        for function, is_snapshot in (("take", True), ("take_and_register", False)):
            communicator = Communicator(rank, world)
            os.environ[COMMUNICATOR] = str(communicator.comm.value)
            plugged = torch.cuda.memory.CUDAPluggableAllocator(library, function, "give_back")
            pool, graph_pool = torch.cuda.MemPool(plugged.allocator()), torch.cuda.graph_pool_handle()
            registered: set[int] = set()

            def scope(
                pool: Any = pool,
                graph_pool: Any = graph_pool,
                communicator: Communicator = communicator,
                registered: set[int] = registered,
                is_snapshot: bool = is_snapshot,
            ) -> Scope:
                if is_snapshot:
                    return SnapshotScope(pool, graph_pool, communicator, registered)
                return Scope(pool, graph_pool)

            flow = Flow(communicator, scope, device)
            # Warm-ups run on the capturing stream, so that its memory is registered before the capture.
            with torch.cuda.stream(torch.cuda.Stream()):
                counts = [flow.rounds(), flow.replays(graph_pool)]
                if is_snapshot:
                    counts.append(flow.is_in_pool(pool))
            right, of = right + sum(count for count, _ in counts), of + sum(total for _, total in counts)
            torch.cuda.synchronize()
            del flow
            communicator.destroy()
    everyone = torch.tensor([right])
    dist.all_reduce(everyone, dist.ReduceOp.MIN)
    if rank == 0:
        report({"job": "engine_flow", "allocator": allocator, "right": int(everyone), "of": of, "ranks": world})
    dist.destroy_process_group()


class Flow:
    """An engine's steps with tensors in scopes. Each check returns the number of correct results, and the total."""

    def __init__(self, communicator: Communicator, scope: Any, device: Any) -> None:
        self._communicator, self._scope, self._device = communicator, scope, device
        self._ranks = communicator.world * (communicator.world + 1) // 2

    def rounds(self) -> tuple[int, int]:
        """Allocates, reduces and frees tensors repeatedly."""
        import torch

        right = 0
        for _ in range(2):
            tensors = []
            for number in range(TENSORS):
                with self._scope():
                    tensors.append(torch.empty(ELEMENTS, device=self._device))
                tensors[-1].fill_((self._communicator.rank + 1) * (number + 1))
                self._communicator.all_reduce(tensors[-1])
            right += sum(bool((tensor == self._ranks * (at + 1)).all()) for at, tensor in enumerate(tensors))
            del tensors
        return right, 2 * TENSORS

    def replays(self, graph_pool: Any) -> tuple[int, int]:
        """Captures a graph whose reduced tensor is in the pool, and whose other tensors are in the graph's pool."""
        import torch

        inputs, outputs = (torch.zeros(ELEMENTS, device=self._device) for _ in range(2))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graph_pool, stream=torch.cuda.current_stream()):
            doubled = inputs * 2
            with self._scope():
                reduced = torch.empty(ELEMENTS, device=self._device)
            reduced.copy_(doubled)
            self._communicator.all_reduce(reduced)
            outputs.copy_(reduced + 1)
        right = 0
        for number in range(REPLAYS):
            inputs.fill_((self._communicator.rank + 1) * number)
            graph.replay()
            right += bool((outputs == 2 * self._ranks * number + 1).all())
        del reduced, doubled
        torch.cuda.synchronize()
        graph.reset()
        return right, REPLAYS

    def is_in_pool(self, pool: Any) -> tuple[int, int]:
        """Checks that the pool's snapshot identifies its tensors, as vLLM does before it reduces one."""
        import torch

        with self._scope():
            inside = torch.empty(ELEMENTS, device=self._device)
        outside = torch.empty(ELEMENTS, device=self._device)
        blocks = {block["address"] for segment in pool.snapshot() for block in segment["blocks"]}
        return (inside.data_ptr() in blocks) + (outside.data_ptr() not in blocks), 2


if __name__ == "__main__":
    main()
