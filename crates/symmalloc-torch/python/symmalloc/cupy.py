"""Support for CuPy on the process's allocator: `symmalloc.cupy.install()`.

Memory is ordered by the stream that is current at its allocation, as in CuPy's own pool. Keep streams alive: the allocator
identifies a stream by its handle.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from .allocator import DEFAULT_POOL, Allocator
from .library import call, encoded, failure, library


def install(conf: str | None = None) -> None:
    """Makes CuPy allocate all arrays from the process's allocator, which PyTorch shares after `symmalloc.install()`.

    conf  configuration text; None: the current configuration, or `SYMMALLOC_CONF`

    Raises `ImportError` without CuPy, `InvalidSettings`, and `InvalidState` for a text after the first allocation.
    """
    import cupy

    if conf is not None:
        call("torch_configure", encoded(conf))
    get_current_stream, out = cupy.cuda.get_current_stream, ctypes.c_void_p

    # CuPy calls these two for every array, so they call the library directly.
    allocate, free = library().symmalloc_allocate, library().symmalloc_free

    def malloc(size_bytes: int, device: int) -> int:
        pointer = out()
        status = allocate(
            _handle(device), DEFAULT_POOL, get_current_stream(device).ptr, size_bytes, ctypes.byref(pointer)
        )
        if status:
            raise failure("allocate", status)
        return pointer.value or 0

    def release(pointer: int, device: int) -> None:
        status = free(_handle(device), pointer)
        if status:
            raise failure("free", status)

    # CuPy does not check the pointer, so a C function could not report that memory is exhausted.
    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(malloc, release).malloc)


def record_use(array: Any, stream: Any) -> None:
    """Records that another stream uses an array, so that the memory's next user waits for it. Raises `UnknownPointer`."""
    Allocator.shared(array.device.id).record_use(array.data.mem.ptr, stream.ptr)


@cache
def _handle(device: int) -> ctypes.c_void_p:
    return Allocator.shared(device).handle
