"""PyTorch's calls to an allocator: each works on PyTorch's own allocator and on symmalloc, with bitwise equal results.

    benches/jobs/pytorch_calls.py                      both allocators, and a table
    benches/jobs/pytorch_calls.py --allocator native   one allocator, for `run`

A call whose requirements are missing (a second GPU, NCCL, a compiler) is skipped, and the reason is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHECKS: dict[str, Callable[[], Any]] = {}
MIB = 1 << 20


class Skipped(Exception):
    """The call cannot be tested here. The text states why."""


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Adds a check, which returns one or more tensors whose bits must be equal on all allocators, or None."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS[name] = function
        return function

    return add


def bits(result: Any) -> str:
    tensors = result if isinstance(result, (list, tuple)) else [result]
    parts = hashlib.sha256()
    for tensor in tensors:
        parts.update(b"" if tensor is None else tensor.detach().double().cpu().numpy().tobytes())
    return parts.hexdigest()[:8]


def is_in(pool: Any, tensor: Any) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in pool.snapshot())


@check("statistics, as C++ queries them")
def statistics() -> Any:
    import torch

    assert type(torch._C._cuda_memoryStats).__name__ == "builtin_function_or_method", "PyTorch's function was replaced"
    before = torch.cuda.memory_allocated()
    held = torch.ones(3 * MIB, device="cuda")
    assert torch.cuda.memory_allocated() - before == held.nbytes
    assert torch.cuda.memory_reserved() >= held.nbytes <= torch.cuda.max_memory_allocated()
    del held
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == before
    return None


@check("_record_memory_history: the line of Python that allocated")
def history_of_python() -> Any:
    import torch

    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)
    held = torch.ones(2 * MIB, device="cuda")  # this line
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    made = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc" and entry["size"] == held.nbytes]
    lines = Path(__file__).read_text().splitlines()
    frames = [frame for frame in made[0]["frames"] if frame["filename"].endswith("pytorch_calls.py")]
    assert "# this line" in lines[frames[0]["line"] - 1], frames
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert any(block["frames"] for block in blocks if block["address"] == held.data_ptr())
    return held


@check("_record_memory_history: C++ frames, frees, segments")
def history_of_cxx() -> Any:
    import torch

    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(context="all", stacks="all", max_entries=1000)
    held = torch.ones(300 * MIB, device="cuda", dtype=torch.uint8)
    result = held[:8].clone()
    del held
    torch.cuda.empty_cache()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    actions = {entry["action"] for entry in entries}
    assert {"alloc", "free_requested", "free_completed"} <= actions, actions
    assert actions & {"segment_alloc", "segment_map"} and actions & {"segment_free", "segment_unmap"}, actions
    frames = {frame["name"] for entry in entries if entry["action"] == "alloc" for frame in entry["frames"]}
    assert any("::" in name for name in frames), "the history has no C++ frame"
    assert not torch.cuda.memory._snapshot()["device_traces"][0], "the history is still recorded"
    return result


@check("annotations and metadata in snapshots")
def annotations() -> Any:
    import torch

    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=100, global_record_annotations=True)
    if hasattr(memory, "_set_memory_metadata"):
        memory._set_memory_metadata("layer 3")
    with torch.profiler.record_function("## forward ##"):
        held = torch.ones(MIB, device="cuda")
    snapshot = memory._snapshot()
    if hasattr(memory, "_set_memory_metadata"):
        memory._set_memory_metadata("")
        assert any(e.get("user_metadata") == "layer 3" for e in snapshot["device_traces"][0])
    memory._record_memory_history(enabled=None)
    assert any("forward" in str(annotation) for annotation in snapshot["external_annotations"])
    return held


@check("MemPool, use_mem_pool, MemPool.snapshot, use_count")
def mem_pool() -> Any:
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.arange(MIB, device="cuda")
        assert pool.use_count() == 2
    outside = torch.arange(MIB, device="cuda")
    assert is_in(pool, inside) and not is_in(pool, outside) and pool.use_count() == 1
    result = inside.sum() + outside.sum()
    del inside
    reserved = torch.cuda.memory_reserved()
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved, "the pool's memory was not released"
    return result


@check("use_mem_pool in the backward pass (symmalloc only)")
def mem_pool_backward() -> Any:
    import torch

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            Kept.thread, Kept.tensor = threading.get_ident(), gradient.repeat(1024)
            return gradient

    pool = torch.cuda.MemPool()
    x = torch.ones(1024, device="cuda", requires_grad=True)
    with torch.cuda.use_mem_pool(pool):
        Kept.apply(x).sum().backward()
    assert Kept.thread != threading.get_ident(), "the backward pass did not run on another thread"
    if ALLOCATOR == "symmalloc":
        assert is_in(pool, Kept.tensor), "a tensor of the backward pass is not in the pool"
    Kept.apply(x).sum().backward()
    assert not is_in(pool, Kept.tensor)
    result = Kept.tensor.sum()
    Kept.tensor = None
    return result


@check("MemPool with a custom allocator")
def mem_pool_of_functions() -> Any:
    import torch

    library = compiled("""
        #include <stddef.h>
        extern int cudaMalloc(void**, size_t);
        extern int cudaFree(void*);
        static int calls[2];
        void* own_alloc(ptrdiff_t bytes, int device, void* stream) { void* p = 0; calls[0]++; cudaMalloc(&p, bytes); return p; }
        void own_free(void* p, ptrdiff_t bytes, int device, void* stream) { calls[1]++; cudaFree(p); }
        int own_calls(int which) { return calls[which]; }
    """)
    counted = ctypes.CDLL(library).own_calls
    own = torch.cuda.memory.CUDAPluggableAllocator(library, "own_alloc", "own_free")
    pool = torch.cuda.MemPool(own.allocator())
    side = torch.cuda.Stream()
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((256, 1024), float(number), device="cuda") for number in range(8)]
    assert counted(0) >= 1 and all(is_in(pool, tensor) for tensor in tensors)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = sum(tensor.sum() for tensor in tensors)
    for tensor in tensors:
        tensor.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    calls = counted(0)
    del tensors, tensor
    gc.collect()
    with torch.cuda.use_mem_pool(pool):
        again = torch.ones(256, 1024, device="cuda")
    # PyTorch's own allocator does not query its events while a pool is in use.
    assert ALLOCATOR == "native" or counted(0) == calls, "the pool did not reuse its free memory"
    del again, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert counted(1) == counted(0), f"{counted(0)} segments were allocated and {counted(1)} freed"
    return result


@check("MemPool(no_split), MemPool(use_on_oom)")
def mem_pool_wishes() -> Any:
    import torch

    try:
        pool = torch.cuda.MemPool(no_split=True)
    except TypeError as error:
        raise Skipped(f"this PyTorch does not support it: {error}") from error
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((3 * MIB,), number, dtype=torch.uint8, device="cuda") for number in range(3)]
    assert len(pool.snapshot()) == 3 and all(len(segment["blocks"]) == 1 for segment in pool.snapshot())
    result = sum(tensor.sum() for tensor in tensors)
    del tensors, pool
    gc.collect()
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        spare = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del spare
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * MIB) / total)
    try:
        helped = torch.ones(60 * MIB, dtype=torch.uint8, device="cuda")
        assert is_in(pool, helped)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return result, helped.sum()


@check("memory fraction, out-of-memory observers, OutOfMemoryError")
def out_of_memory() -> Any:
    import torch

    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: seen.append(what))
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert torch.cuda.get_per_process_memory_fraction() == 0.25
    total = torch.cuda.mem_get_info()[1]
    wanted = total // 2
    try:
        torch.empty(wanted, dtype=torch.uint8, device="cuda")
        raise AssertionError("the allocation beyond the limit succeeded")
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory." in str(error), error
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    device, size, limit, free = seen[-1]
    assert device == 0 and 0 <= size - wanted < 2 * MIB and abs(limit - total // 4) < 2 * MIB and free > 0, seen
    assert torch.cuda.memory_stats()["num_ooms"] >= 1
    return torch.ones(8, device="cuda")


@check("begin/endAllocateToPool: graphs, a shared pool, make_graphed_callables")
def graphs() -> Any:
    import torch

    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    x = torch.arange(4096.0, device="cuda")
    with torch.cuda.graph(first):
        y = (x * 2).cumsum(0)
    with torch.cuda.graph(second, pool=first.pool()):
        z = y.flip(0) + x
    results = []
    for number in range(3):
        x.copy_(torch.arange(4096.0, device="cuda") + number)
        torch.cuda.empty_cache()
        torch.randn(MIB, device="cuda")
        first.replay()
        second.replay()
        results.append(z.clone())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(16, 64, device="cuda"),))
    graphed(torch.ones(16, 64, device="cuda")).sum().backward()
    return [*results, model[0].weight.grad]


@check("checkpoints of private pools: a tree of graphs (reduce-overhead)")
def graph_tree() -> Any:
    import torch
    from torch._inductor import cudagraph_trees

    @torch.compile(mode="reduce-overhead")
    def trunk(x: Any) -> Any:
        return torch.sin(x) @ x

    @torch.compile(mode="reduce-overhead")
    def left(x: Any) -> Any:
        return (x * 3).cos() @ x

    @torch.compile(mode="reduce-overhead")
    def right(x: Any) -> Any:
        return torch.cat([x, x + 1]).tanh() @ x

    results = []
    x = torch.randn(256, 256, device="cuda")
    for number in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        stem = trunk(x)
        # The other branch is captured after a replay of the stem, so the pool must be restored to its state at the stem's capture.
        results.append((left if number < 4 or number % 2 else right)(stem).clone())
    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is not None and manager.debug_checkpointing_counter > 0, "no checkpoint was restored"
    return results


@check("tensors to other processes and back (torch.multiprocessing)")
def other_processes() -> Any:
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    child = context.Process(target=answer, args=(ALLOCATOR, there, back))
    child.start()
    large, small = torch.arange(30.0 * MIB, device="cuda"), torch.ones(100, device="cuda")
    try:
        there.put(large)
        there.put(small)
        returned = back.get(timeout=120).clone()
        back.get(timeout=120)
        there.put("seen")
    finally:
        child.join(60)
    assert child.exitcode == 0 and small.sum() == 200, (child.exitcode, small.sum())
    torch.cuda.ipc_collect()
    return returned, large.sum(), small


def answer(allocator: str, there: Any, back: Any) -> None:
    """Runs in the other process."""
    put_under(allocator)
    import torch

    large, small = there.get(timeout=120), there.get(timeout=120)
    small += 1
    own = large[::1024] * 2 + small[0]
    torch.cuda.synchronize()
    back.put(own)
    back.put("done")
    there.get(timeout=120)
    del large, small, own
    gc.collect()


@check("cacheInfo: torch.backends.cudnn.benchmark")
def cudnn_benchmark() -> Any:
    import torch

    torch.backends.cudnn.benchmark = True
    layer = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    x = torch.randn(4, 16, 64, 64, device="cuda")
    layer(x).sum().backward()
    torch.backends.cudnn.benchmark = False
    assert layer.weight.grad is not None
    # The fastest algorithm may differ from run to run.
    return None


@check("enablePeerAccess: copies between GPUs")
def peers() -> Any:
    import torch

    if torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    x = torch.arange(2.0 * MIB, device="cuda:0")
    y = x.to("cuda:1")
    return y, y[::3].to("cuda:0")


@check("record_stream, caching_allocator_alloc, without a cache")
def streams() -> Any:
    import torch

    side = torch.cuda.Stream()
    results = []
    for number in range(4):
        x = torch.full((MIB,), float(number), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results.append(x.sum())
        x.record_stream(side)
        del x
    torch.cuda.synchronize()
    pointer = torch.cuda.caching_allocator_alloc(1000)
    torch.cuda.caching_allocator_delete(pointer)
    torch.cuda.caching_allocator_enable(False)
    try:
        before = torch.cuda.memory_allocated()
        results.append(torch.arange(10.0, device="cuda"))
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.caching_allocator_enable(True)
    return results


@check("memory in torch.profiler")
def profiler() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiled:
        held = torch.ones(5 * MIB, device="cuda")
    used = {event.key: event.self_device_memory_usage for event in profiled.key_averages()}
    assert used.get("aten::empty") == held.nbytes, used
    return held[:8]


@contextmanager
def nccl_group() -> Iterator[Any]:
    """Returns a group with only this process, and its backend."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        raise Skipped("needs NCCL")
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda", 0)
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", rank=0, world_size=1, store=store, device_id=device)
        try:
            yield dist.group.WORLD._get_backend(device)
        finally:
            dist.destroy_process_group()


@check("process groups before and after memory is released (NCCL)")
def groups_around_a_release() -> Any:
    """NCCL's backend registers the present segments with each new group."""
    import torch
    import torch.distributed as dist

    def tensors() -> list[Any]:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            private = torch.ones(33 * MIB, device="cuda")
        return [torch.ones(MIB, device="cuda"), torch.ones(65 * MIB, device="cuda"), private]

    results = []
    for _ in range(3):
        before = tensors()
        with nccl_group():
            during = tensors()
            for tensor in before + during:
                dist.all_reduce(tensor)
            results += [tensor.sum() for tensor in before + during]
            torch.cuda.synchronize()
            del before, tensor
            gc.collect()
            torch.cuda.empty_cache()
        del during
        gc.collect()
        torch.cuda.empty_cache()
    return results


@check("register_mem_pool (NCCL)")
def registered_pool() -> Any:
    import torch
    import torch.distributed as dist

    with nccl_group() as backend:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.ones(MIB, device="cuda")
        backend.register_mem_pool(pool)
        dist.all_reduce(tensor)
        result = tensor.sum()
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)
        del tensor, pool
        gc.collect()
    return result


@check("trace trackers (NCCL registers new segments)")
def trackers() -> Any:
    import torch
    import torch.distributed as dist

    gc.collect()
    torch.cuda.empty_cache()
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "1"
    with nccl_group():
        large = torch.ones(400 * MIB, dtype=torch.uint8, device="cuda")
        dist.all_reduce(large[:1024])
        result = large[:1024].sum()
        torch.cuda.synchronize()
        del large
        torch.cuda.empty_cache()
    return result


def compiled(source: str) -> str:
    """Compiles a C library. The process has loaded CUDA's runtime already."""
    folder = tempfile.mkdtemp()
    file = Path(folder) / "own.c"
    file.write_text(source)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", str(file), "-o", str(file.with_suffix(".so"))]
    with open("/proc/self/maps") as maps:
        command += sorted({line.split()[-1] for line in maps if "libcudart.so" in line})[:1]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Skipped("needs a C compiler") from error
    return str(file.with_suffix(".so"))


ALLOCATOR = "native"


def put_under(allocator: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    if allocator == "symmalloc":
        import symmalloc

        symmalloc.install()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def carried_out(allocator: str, only: str | None) -> dict[str, dict[str, str]]:
    global ALLOCATOR
    ALLOCATOR = allocator
    put_under(allocator)
    import torch

    outcomes = {}
    for name, function in CHECKS.items():
        if only and only not in name:
            continue
        torch.manual_seed(1)
        try:
            result = function()
            torch.cuda.synchronize()
            outcomes[name] = {"outcome": "works", "bits": bits(result)}
        except Skipped as reason:
            outcomes[name] = {"outcome": f"skipped: {reason}", "bits": ""}
        except Exception as error:
            traceback.print_exc()
            first = (traceback.format_exception_only(error)[-1].strip().splitlines() or [""])[0]
            outcomes[name] = {"outcome": f"RAISES {first[:100]}", "bits": ""}
        gc.collect()
        print(f"{allocator}: {name}: {outcomes[name]['outcome']}", flush=True)
        print(f"check {json.dumps({name: outcomes[name]})}", flush=True)
    return outcomes


def both(only: str | None) -> int:
    outcomes = {}
    for allocator in ("native", "symmalloc"):
        command = [sys.executable, __file__, "--allocator", allocator, *(["--only", only] if only else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        outcomes[allocator] = {}
        for line in re.findall(r"^check (\{.*\})$", done.stdout, re.MULTILINE):
            outcomes[allocator] |= json.loads(line)
    holds = True
    print("\n| call | native | symmalloc | bits |\n|---|---|---|---|")
    ended = {"outcome": "no result: the process ended", "bits": ""}
    for name in (name for name in CHECKS if not only or only in name):
        native, ours = (outcomes[allocator].get(name, ended) for allocator in ("native", "symmalloc"))
        same = "equal" if native["bits"] == ours["bits"] else "DIFFER"
        holds &= ours["outcome"].startswith(("works", "skipped")) and (same == "equal" or native["outcome"] != "works")
        print(f"| {name} | {native['outcome']} | {ours['outcome']} | {same if native['bits'] else ''} |")
    return 0 if holds else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allocator", choices=("native", "symmalloc"))
    parser.add_argument("--only", help="run only calls whose name contains this text")
    parser.add_argument("--windows", type=int, help="ignored; `run` passes it")
    options = parser.parse_args()
    if options.allocator is None:
        return both(options.only)
    warnings.simplefilter("ignore", UserWarning)
    checks = carried_out(options.allocator, options.only)
    worked = [name for name, outcome in checks.items() if not outcome["outcome"].startswith("RAISES")]
    from job import report

    report({"right": len(worked), "of": len(checks), "checks": checks})
    return 0


if __name__ == "__main__":
    sys.exit(main())
