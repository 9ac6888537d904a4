"""Makes one planted memory error under PyTorch. See `run` in this folder.

    python3 memory_errors.py ERROR [--native]

Kernels of PyTorch access tensors that lie outside of other tensors, or in freed memory. Prints one line, as `memory_errors.rs` does.
"""

import os
import sys

import torch

error = sys.argv[1]
native = "--native" in sys.argv
if not native:
    import symmalloc

    symmalloc.install()



class Words:
    """Memory at an address, as floats that nobody owns."""

    def __init__(self, address, words):
        self.__cuda_array_interface__ = {"shape": (words,), "typestr": "<f4", "data": (address, False), "version": 3}


def view(address, words=1):
    """Returns a tensor at an address, which must be mapped now. Kernels access its memory later, whatever has become of it."""
    return torch.as_tensor(Words(address, words), device="cuda")


def poke(tensor):
    """Writes to a tensor in a kernel."""
    tensor.fill_(7.0)
    torch.cuda.synchronize()


def peek(tensor, out):
    """Reads the first element of a tensor in a kernel, and returns what it is."""
    torch.add(tensor[:1], 0.0, out=out)
    value = out.item()
    return f"NaN {value}" if value != value else f"silent, the value is {value}"


def check():
    """Checks all memory."""
    torch.cuda.synchronize()
    if not native:
        symmalloc.check_memory()
    return "silent"


def plant():
    large = 4 << 20
    first, second, third = (torch.ones(large, device="cuda") for _ in range(3))
    out = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    address = second.data_ptr()
    if error in ("overrun", "overrun_page"):
        extra = 1024 if error == "overrun_page" else 1
        poke(view(first.data_ptr(), large + extra)[large:])
        return check()
    if error == "underrun":
        poke(view(address - 4))
        return check()
    if error in ("read_after_free", "write_after_free"):
        freed = view(address, large)
        del second
        # Freed memory is poisoned at its stream's next allocation.
        torch.empty(2 * large, device="cuda")
        if error == "read_after_free":
            return peek(freed, out)
        poke(freed)
        for _ in range(16):
            torch.ones(large, device="cuda")
        return check()
    if error == "other_stream":
        other = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(300_000_000)
            torch.add(second[:1], 0.0, out=out)
        del second
        torch.empty(2 * large, device="cuda")
        other.synchronize()
        value = out.item()
        return f"NaN {value}" if value != value else f"silent, the value is {value}"
    if error in ("read_after_sleep", "write_after_sleep"):
        if native:
            return "skip"
        with symmalloc.region("weights"):
            sleeper = torch.ones(large, device="cuda")
        asleep = view(sleeper.data_ptr(), large)
        symmalloc.pause("weights")
        if error == "write_after_sleep":
            poke(asleep)
            return "silent"
        return peek(asleep, out)
    if error == "graph_pool":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = torch.ones(large, device="cuda") * 2
        graph.replay()
        torch.cuda.synchronize()
        freed = view(inside.data_ptr(), large)
        del inside, graph
        torch.cuda.empty_cache()
        return peek(freed, out)
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
    found = "overrun" in text or "written after" in text
    word = "found" if found else "fault" if "illegal memory access" in text else "error"
    print(word, text[:400], flush=True)

os._exit(0)
