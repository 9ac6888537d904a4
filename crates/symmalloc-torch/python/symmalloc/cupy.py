"""CuPy on the process's allocator: `symmalloc.cupy.install()`.

Memory is ordered by the stream that is current where it is allocated, as in CuPy's own pool. Keep streams alive: the allocator
knows a stream by its handle.
"""

from __future__ import annotations

from typing import Any

from .allocator import Allocator
from .library import call, encoded


def install(conf: str | None = None) -> None:
    """Makes all arrays of CuPy come from the process's allocator, which PyTorch shares where `symmalloc.install()` was called.

    conf  configuration text; None: `SYMMALLOC_CONF`, or what is set already

    Raises `ImportError` without CuPy, `InvalidSettings`, and `InvalidState` for a text after the first allocation.
    """
    import cupy

    if conf is not None:
        call("torch_configure", encoded(conf))
    # A function of C could not raise when memory is short: CuPy does not look at the pointer.
    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(_allocate, _free).malloc)


def record_use(array: Any, stream: Any) -> None:
    """Says that another stream uses an array too: whoever takes its memory waits for it. Raises `UnknownPointer`."""
    Allocator.shared(array.device.id).record_use(array.data.mem.ptr, stream.ptr)


def _allocate(size_bytes: int, device: int) -> int:
    import cupy

    return Allocator.shared(device).allocate(size_bytes, cupy.cuda.get_current_stream(device).ptr)


def _free(pointer: int, device: int) -> None:
    Allocator.shared(device).free(pointer)
