"""The subset of cuda.core that symmalloc.cuda_core uses, for machines without it."""

from __future__ import annotations


class MemoryResource:
    pass


class Stream:
    @staticmethod
    def from_handle(handle):
        stream = Stream()
        stream.handle = handle
        return stream


class Buffer:
    @staticmethod
    def from_handle(ptr, size, mr=None, *, stream=None):
        buffer = Buffer()
        buffer.handle, buffer.size, buffer.memory_resource, buffer._stream = ptr, size, mr, stream
        return buffer

    @property
    def device_id(self):
        return self.memory_resource.device_id

    def close(self, stream=None):
        if self.handle:
            self.memory_resource.deallocate(self.handle, self.size, stream=stream or self._stream)
            self.handle = 0

    def __del__(self):
        self.close()
