"""Shared beginning of the tests' programs: an engine's communicators on the stub of libnccl, without PyTorch. Each of two
ranks has a thread and a device."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from ctypes import CDLL, Structure, byref, c_byte, c_int, c_void_p
from typing import Any

import symmalloc
from symmalloc import state
from symmalloc.library import library

RANKS = 2


class UniqueId(Structure):
    _fields_ = [("internal", c_byte * 128)]


nccl = CDLL("libnccl.so.2")
nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]
nccl.ncclCommAbort.argtypes = [c_void_p]
nccl.stub_nccl_calls.restype = nccl.stub_nccl_live.restype = ctypes.c_uint64
driver = CDLL("libcuda.so.1")


def allocate(size_bytes: int, device: int, stream: int | None) -> int:
    """Allocates as PyTorch does, in the pool of the innermost scope."""
    pointer, size, inherited = c_void_p(), ctypes.c_size_t(size_bytes), ctypes.c_uint64(0)
    arguments = (c_void_p(stream), size, inherited, None, byref(pointer))
    assert library().symmalloc_torch_allocate(device, *arguments) == 0, library().symmalloc_error_message()
    return pointer.value or 0


def free(pointer: int, device: int) -> None:
    assert library().symmalloc_torch_deallocate(device, c_void_p(pointer), None) == 0, library().symmalloc_error_message()


class Rank:
    """One rank. Its device has the same number."""

    def __init__(self, number: int, barrier: threading.Barrier) -> None:
        self.number, self.wait = number, barrier.wait

    def connect(self, unique_id: UniqueId) -> c_void_p:
        comm = c_void_p()
        library().symmalloc_process_allocator(self.number, byref(c_void_p()))
        context = c_void_p()
        driver.cuDevicePrimaryCtxRetain(byref(context), self.number)
        driver.cuCtxSetCurrent(context)
        assert nccl.ncclCommInitRank(byref(comm), RANKS, unique_id, self.number) == 0
        return comm

    def allocate(self, size_bytes: int) -> int:
        return allocate(size_bytes, self.number, None)

    def free(self, pointer: int) -> None:
        free(pointer, self.number)


def unique_id() -> UniqueId:
    made = UniqueId()
    assert nccl.ncclGetUniqueId(byref(made)) == 0
    return made


def calls(name: str) -> int:
    return int(nccl.stub_nccl_calls(name.encode()))


def on_ranks(program: Callable[[Rank], Any]) -> None:
    """Runs a program on every rank. Exits if one of them fails."""
    state.installed_with = (None, None, True)
    barrier, failures = threading.Barrier(RANKS, timeout=60), []

    def run(number: int) -> None:
        try:
            program(Rank(number, barrier))
        except BaseException as error:
            failures.append(error)
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        sys.exit(1)


__all__ = ["RANKS", "Rank", "UniqueId", "allocate", "calls", "free", "nccl", "on_ranks", "symmalloc", "unique_id"]
