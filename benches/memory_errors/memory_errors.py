"""Makes one planted memory error under PyTorch. See `run` in this folder.

    python3 memory_errors.py ERROR [--native]

Writes through pointers outside of tensors with `cuMemsetD32Async`, so no compiler is needed. Prints one line, as `memory_errors.rs` does.
"""

import ctypes
import os
import sys

import torch

error = sys.argv[1]
native = "--native" in sys.argv
if not native:
    import symmalloc

    symmalloc.install()

driver = ctypes.CDLL("libcuda.so.1")


def poke(address, words=1, stream=None):
    """Writes words at an address, in the order of a stream."""
    raw = (stream or torch.cuda.current_stream()).cuda_stream
    code = driver.cuMemsetD32Async(ctypes.c_uint64(address), ctypes.c_uint(7), ctypes.c_size_t(words), ctypes.c_void_p(raw))
    if code:
        raise RuntimeError(f"cuMemsetD32Async returned {code}")


def peek(address):
    """Returns the float at an address."""
    torch.cuda.synchronize()
    value = ctypes.c_float()
    code = driver.cuMemcpyDtoH_v2(ctypes.byref(value), ctypes.c_uint64(address), ctypes.c_size_t(4))
    return f"fault {code}" if code else f"NaN {value.value}" if value.value != value.value else f"silent, the value is {value.value}"


def check():
    """Checks all memory."""
    torch.cuda.synchronize()
    if not native:
        symmalloc.check_memory()
    return "silent"


def plant():
    large = 4 << 20
    first, second, third = (torch.ones(large, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    address = second.data_ptr()
    if error == "overrun":
        poke(first.data_ptr() + 4 * large)
        return check()
    if error == "overrun_page":
        poke(first.data_ptr() + 4 * large, 1024)
        return check()
    if error == "underrun":
        poke(address - 4)
        return check()
    if error == "read_after_free":
        del second
        return peek(address)
    if error == "write_after_free":
        del second
        poke(address)
        for _ in range(16):
            torch.ones(large, device="cuda")
        return check()
    if error == "other_stream":
        other = torch.cuda.Stream()
        out = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(300_000_000)
            out.copy_(second[:1])
        del second
        other.synchronize()
        value = out.item()
        return f"NaN {value}" if value != value else f"silent, the value is {value}"
    if error in ("read_after_sleep", "write_after_sleep"):
        if native:
            return "skip"
        symmalloc.sleep()
        if error == "write_after_sleep":
            poke(address)
            torch.cuda.synchronize()
            return "silent"
        return peek(address)
    if error == "graph_pool":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = torch.ones(large, device="cuda") * 2
        graph.replay()
        torch.cuda.synchronize()
        address = inside.data_ptr()
        del inside, graph
        torch.cuda.empty_cache()
        return peek(address)
    if error in ("double_free", "inner_free"):
        raw = torch.cuda.caching_allocator_alloc(4096)
        torch.cuda.caching_allocator_delete(raw + 16 if error == "inner_free" else raw)
        if error == "double_free":
            torch.cuda.caching_allocator_delete(raw)
        return "silent"
    raise SystemExit(f"unknown error {error}")


try:
    print(plant(), flush=True)
except Exception as failure:  # noqa: BLE001
    text = " ".join(str(failure).split())
    word = "found" if "overrun" in text or "written after" in text else "error"
    print(word, text[:400], flush=True)

os._exit(0)
