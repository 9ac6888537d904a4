"""CuPy's allocators from Python functions, and its current stream."""

from __future__ import annotations

from types import SimpleNamespace

current = {0: 0, 1: 0}
alloc = None


class PythonFunctionAllocator:
    def __init__(self, malloc_func, free_func):
        self._malloc, self._free = malloc_func, free_func

    def malloc(self, size):
        return Memory(self._malloc(size, 0), self._free)


class Memory:
    def __init__(self, ptr, free):
        self.ptr, self._free = ptr, free

    def __del__(self):
        if self.ptr:
            self._free(self.ptr, 0)


def set_allocator(allocator):
    global alloc
    alloc = allocator


def get_current_stream(device_id=-1):
    return SimpleNamespace(ptr=current[device_id])
