"""Support for Numba on the process's allocator: `NUMBA_CUDA_MEMORY_MANAGER=symmalloc.numba`, or `symmalloc.numba.install()`.

Numba allocates memory without a stream. By default, freed memory stays in Numba's list of pending deallocations until the
device is idle, as with Numba's own manager. `use_stream()` declares the stream of the program's arrays, which avoids this wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from numba import cuda

from .allocator import Allocator
from .errors import OutOfMemory
from .library import call, encoded

# The stream on which the program uses new arrays; None: any stream.
_stream: int | None = None


def install(conf: str | None = None) -> None:
    """Makes Numba allocate device arrays from the process's allocator. Call it before Numba uses CUDA.

    conf  configuration text; None: the current configuration, or `SYMMALLOC_CONF`

    Raises `InvalidSettings`, and `InvalidState` for a text after the first allocation.
    """
    if conf is not None:
        call("torch_configure", encoded(conf))
    cuda.set_memory_manager(MemoryManager)


def use_stream(stream: int | None) -> None:
    """Declares that the program uses new arrays on this stream only: a handle, or 0 for the default stream.

    Later work on that stream can then reuse a freed array immediately. None: any stream; freed arrays wait for the device.
    """
    global _stream
    _stream = stream


class MemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """A memory manager with device memory from symmalloc, and Numba's own host memory."""

    def initialize(self) -> None:
        # Numba limits pending deallocations to a share of this capacity.
        self.deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size: int) -> Any:
        allocator, stream = Allocator.shared(self.context.device.id), _stream
        if stream is None:
            try:
                pointer = allocator.allocate_unordered(size)
            except OutOfMemory:
                self.deallocations.clear()
                pointer = allocator.allocate_unordered(size)
            finalizer = _free_later(self.deallocations, allocator.free_unordered, pointer, size)
        else:
            pointer = allocator.allocate(size, stream=stream)
            finalizer = _free_now(allocator.free, pointer)
        return cuda.MemoryPointer(self.context, ctypes.c_void_p(pointer), size, finalizer=finalizer)

    def get_memory_info(self) -> Any:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if status := ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
            raise RuntimeError(f"cuMemGetInfo failed with {status}")
        return cuda.MemoryInfo(free.value, total.value)

    def get_ipc_handle(self, memory: Any) -> Any:
        raise NotImplementedError(
            "memory of symmalloc is mapped in pieces, which CUDA's IPC handles cannot name: copy what another process needs"
        )

    @property
    def interface_version(self) -> int:
        return 1


def _free_later(pending: Any, free: Callable[[int], None], pointer: int, size: int) -> Callable[[], None]:
    # The finalizer must not hold a reference to the memory pointer that calls it.
    return lambda: pending.add_item(free, pointer, size)


def _free_now(free: Callable[[int], None], pointer: int) -> Callable[[], None]:
    return lambda: free(pointer)


_numba_memory_manager = MemoryManager
