"""External memory managers, as Numba documents and numba-cuda 0.30 implements them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import namedtuple

MemoryInfo = namedtuple("MemoryInfo", "free,total")
PENDING_MAX, PENDING_SHARE = 10, 0.2
manager_class = None


class MemoryPointer:
    def __init__(self, context, pointer, size, owner=None, finalizer=None):
        self.context, self.device_pointer, self.size = context, pointer, size
        self._finalizer = weakref.finalize(self, finalizer)

    def free(self):
        self._finalizer()


class PendingDeallocations:
    def __init__(self):
        self.items, self.size, self.memory_capacity = [], 0, 0

    def add_item(self, dtor, handle, size=0):
        assert dtor.__name__
        self.items.append((dtor, handle))
        self.size += size
        if len(self.items) > PENDING_MAX or self.size > int(self.memory_capacity * PENDING_SHARE):
            self.clear()

    def clear(self):
        while self.items:
            dtor, handle = self.items.pop(0)
            dtor(handle)
        self.size = 0

    def __len__(self):
        return len(self.items)


class HostOnlyCUDAMemoryManager(ABC):
    def __init__(self, *, context):
        self.context, self.allocations, self.deallocations = context, {}, PendingDeallocations()

    @abstractmethod
    def memalloc(self, size): ...

    @abstractmethod
    def initialize(self): ...

    @abstractmethod
    def get_ipc_handle(self, memory): ...

    @abstractmethod
    def get_memory_info(self): ...

    @property
    @abstractmethod
    def interface_version(self): ...


def set_memory_manager(plugin):
    global manager_class
    assert plugin(context=None).interface_version == 1
    manager_class = plugin
