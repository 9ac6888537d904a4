"""Numba on the process's allocator: `NUMBA_CUDA_MEMORY_MANAGER=symmalloc.numba`, or `symmalloc.numba.install()`.

Numba asks for memory without a stream. Until `use_stream()` says on which stream its arrays are used, freed memory waits in
Numba's list of pending deallocations, and goes back when the device is idle, as with Numba's own manager.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from numba import cuda

from .allocator import Allocator
from .errors import OutOfMemory
from .library import call, encoded

# The stream that all arrays are used on; None: any.
_stream: int | None = None


def install(conf: str | None = None) -> None:
    """Makes Numba's device arrays come from the process's allocator. Call it before Numba uses CUDA.

    conf  configuration text; None: `SYMMALLOC_CONF`, or what is set already

    Raises `InvalidSettings`, and `InvalidState` for a text after the first allocation.
    """
    if conf is not None:
        call("torch_configure", encoded(conf))
    cuda.set_memory_manager(MemoryManager)


def use_stream(stream: int | None) -> None:
    """Says that arrays made from now on are used on this stream alone: 0 for the default one, or its handle.

    They are free at once then, for later work on that stream, and nothing waits. None: on any stream.
    """
    global _stream
    _stream = stream


class MemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Device memory from symmalloc, host memory as Numba has it."""

    def initialize(self) -> None:
        # How much may wait to be freed is a share of this.
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
            pointer = allocator.allocate(size, stream)
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
    # It must not refer to the manager's memory pointer, whose end calls it.
    return lambda: pending.add_item(free, pointer, size)


def _free_now(free: Callable[[int], None], pointer: int) -> Callable[[], None]:
    return lambda: free(pointer)


_numba_memory_manager = MemoryManager
