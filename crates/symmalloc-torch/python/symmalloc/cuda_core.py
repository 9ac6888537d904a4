"""Support for cuda.core on the process's allocator: `symmalloc.cuda_core.MemoryResource(device)`.

Memory is ordered by the stream that cuda.core passes to each call. Keep streams alive: the allocator identifies a stream by its
handle.
"""

from __future__ import annotations

from typing import Any

from cuda import core

from .allocator import Allocator
from .library import call, encoded


class MemoryResource(core.MemoryResource):  # type: ignore[misc]
    """A memory resource of cuda.core, with device memory of the allocator that PyTorch shares after `symmalloc.install()`.

    device  the device's number
    conf    configuration text; None: the current configuration, or `SYMMALLOC_CONF`

    Raises `InvalidSettings`, and `InvalidState` for a text after the first allocation.
    """

    def __init__(self, device: int = 0, conf: str | None = None) -> None:
        if conf is not None:
            call("torch_configure", encoded(conf))
        self._device, self._allocator = device, Allocator.shared(device)

    def allocate(self, size: int, *, stream: Any) -> core.Buffer:
        """Allocates a buffer for work on a stream. Raises `OutOfMemory`."""
        pointer = self._allocator.allocate(size, stream=int(stream.handle))
        return core.Buffer.from_handle(pointer, size, mr=self, stream=stream)

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        """Frees a buffer after the work of a stream, without blocking. Its next user waits on the device."""
        call("free_on", self._allocator.handle, int(ptr), int(stream.handle))

    @property
    def is_device_accessible(self) -> bool:
        return True

    @property
    def is_host_accessible(self) -> bool:
        return False

    @property
    def device_id(self) -> int:
        return self._device


def record_use(buffer: core.Buffer, stream: Any) -> None:
    """Records that another stream uses a buffer, so that its memory's next user waits for it. Raises `UnknownPointer`."""
    Allocator.shared(buffer.device_id).record_use(int(buffer.handle), int(stream.handle))
