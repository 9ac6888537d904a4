"""The functions of PyTorch that the plug-in calls. `streams` has the current stream of each thread, and whether it captures."""

import ctypes
import threading
from contextlib import contextmanager
from types import SimpleNamespace

streams = threading.local()


class Stream:
    def __init__(self, number):
        self.cuda_stream = number


def _current_stream(device=None):
    return Stream(getattr(streams, "number", 0))


class _OnDevice:
    def __init__(self, device):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


uint8 = "uint8"


def _library():
    from symmalloc.library import library

    return library()


class MemPool:
    """A mempool of PyTorch's allocator class."""

    count = 0

    def __init__(self):
        MemPool.count += 1
        self.id = (0, MemPool.count)
        assert _library().symmalloc_torch_retain_pool(0, *map(ctypes.c_uint64, self.id), None) == 0

    def __del__(self):
        assert _library().symmalloc_torch_release_use(0, *map(ctypes.c_uint64, self.id)) == 0


@contextmanager
def use_mem_pool(pool):
    """Directs allocations to a mempool, as a capture into it does."""
    number, words = ctypes.c_uint64(), [ctypes.c_uint64(word) for word in pool.id]
    assert _library().symmalloc_torch_begin_scope(0, *words, None, None, None, ctypes.byref(number)) == 0
    try:
        yield
    finally:
        assert _library().symmalloc_torch_end_scope(0, *words) == 0
        assert _library().symmalloc_torch_release_use(0, *words) == 0


class Tensor:
    """A tensor with its own storage."""

    is_cuda = True

    def __init__(self, pointer, device=0):
        self.pointer, self.device = pointer, device

    def data_ptr(self):
        return self.pointer

    def untyped_storage(self):
        return self


class Empty(Tensor):
    def __del__(self):
        from engine_ranks import free

        free(self.pointer, 0)


def empty(count, dtype, device):
    from engine_ranks import allocate

    return Empty(allocate(count, 0, None))


cuda = SimpleNamespace(
    MemPool=MemPool,
    use_mem_pool=use_mem_pool,
    current_stream=_current_stream,
    is_current_stream_capturing=lambda: getattr(streams, "is_capturing", False),
    empty_cache=lambda: None,
    current_device=lambda: 0,
    is_initialized=lambda: False,
    device=_OnDevice,
)
