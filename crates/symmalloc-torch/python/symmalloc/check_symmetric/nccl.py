"""NCCL and the CUDA driver through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_byte, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

FLOAT32, SUM, SYMMETRIC = 7, 0, 1
WINDOWS_MINIMUM = 22700


class NcclError(RuntimeError):
    """NCCL returned an error."""


class UniqueId(Structure):
    _fields_ = [("internal", c_byte * 128)]


@cache
def nccl() -> Any:
    """Returns the NCCL library that PyTorch has loaded. Raises `OSError`."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [c_int], c_char_p
    library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = [c_void_p], c_char_p
    library.ncclGetVersion.argtypes = [c_void_p]
    library.ncclGetUniqueId.argtypes = [c_void_p]
    library.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]
    library.ncclAllReduce.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
    library.ncclCommDestroy.argtypes = [c_void_p]
    library.ncclCommAbort.argtypes = [c_void_p]
    if hasattr(library, "ncclCommWindowRegister"):
        library.ncclCommWindowRegister.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p, c_int]
        library.ncclCommWindowDeregister.argtypes = [c_void_p, c_void_p]
    return library


def version() -> int:
    """Returns NCCL's version as one number, such as 22809."""
    number = c_int()
    nccl().ncclGetVersion(byref(number))
    return number.value


def unique_id() -> bytes:
    identity = UniqueId()
    _check(nccl().ncclGetUniqueId(byref(identity)), "ncclGetUniqueId", None)
    return bytes(identity)


class Communicator:
    """A communicator that this program owns, or that it borrows from a library."""

    def __init__(self, comm: c_void_p) -> None:
        self.comm = comm

    @staticmethod
    def connect(identity: bytes, rank: int, world: int) -> Communicator:
        """Creates a communicator on the current device. Collective."""
        comm = c_void_p()
        code = nccl().ncclCommInitRank(byref(comm), world, UniqueId.from_buffer_copy(identity), rank)
        _check(code, "ncclCommInitRank", None)
        return Communicator(comm)

    def all_reduce(self, address: int, elements: int, stream: int) -> None:
        """Sums float32 values in place."""
        code = nccl().ncclAllReduce(address, address, elements, FLOAT32, SUM, self.comm, stream)
        _check(code, "ncclAllReduce", self.comm)

    def register(self, address: int, size_bytes: int) -> int:
        """Creates a symmetric window, and returns its handle. Collective."""
        window = c_void_p()
        code = nccl().ncclCommWindowRegister(self.comm, address, size_bytes, byref(window), SYMMETRIC)
        _check(code, f"ncclCommWindowRegister of {size_bytes} bytes", self.comm)
        if not window.value:
            raise NcclError("ncclCommWindowRegister returned no window: NCCL cannot make symmetric windows here")
        return window.value

    def deregister(self, window: int) -> None:
        _check(nccl().ncclCommWindowDeregister(self.comm, window), "ncclCommWindowDeregister", self.comm)

    def abort(self) -> None:
        _check(nccl().ncclCommAbort(self.comm), "ncclCommAbort", None)

    def destroy(self) -> None:
        _check(nccl().ncclCommDestroy(self.comm), "ncclCommDestroy", None)


def _check(code: int, call: str, comm: c_void_p | None) -> None:
    if code != 0:
        last = (nccl().ncclGetLastError(comm) or b"").decode(errors="replace").strip()
        text = nccl().ncclGetErrorString(code).decode(errors="replace")
        raise NcclError(f"{call}: {text} ({code}){': ' + last if last else ''}")


@cache
def driver() -> Any:
    """Returns the CUDA driver library. Raises `OSError`."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.POINTER(c_uint64)
    library.cuMemAddressReserve.argtypes = [pointer, c_size_t, c_size_t, c_uint64, c_uint64]
    library.cuMemAddressFree.argtypes = [c_uint64, c_size_t]
    library.cuMemAlloc_v2.argtypes = [pointer, c_size_t]
    library.cuMemFree_v2.argtypes = [c_uint64]
    library.cuMemGetAddressRange_v2.argtypes = [pointer, ctypes.POINTER(c_size_t), c_uint64]
    return library


def address_range(address: int) -> tuple[int, int]:
    """Returns the base and the size of the driver's allocation that contains an address."""
    base, size = c_uint64(), c_size_t()
    if code := driver().cuMemGetAddressRange_v2(byref(base), byref(size), address):
        raise RuntimeError(f"cuMemGetAddressRange failed with {code}")
    return base.value, size.value


class Holes:
    """Adjacent ranges of addresses. Freeing one makes the driver place the next reservation of that size there."""

    def __init__(self, count: int, size_bytes: int, *, ascending: bool) -> None:
        self._size_bytes = size_bytes
        self._bases = sorted((self._reserved() for _ in range(count)), reverse=not ascending)

    def open(self) -> None:
        """Frees the next range."""
        if self._bases:
            driver().cuMemAddressFree(self._bases.pop(0), self._size_bytes)

    def _reserved(self) -> int:
        base = c_uint64()
        if code := driver().cuMemAddressReserve(byref(base), self._size_bytes, 0, 0, 0):
            raise RuntimeError(f"cuMemAddressReserve failed with {code}")
        return base.value


class Filler:
    """Allocations of the driver that occupy nearly all free memory of the current device."""

    def __init__(self, leave_bytes: int) -> None:
        self._blocks: list[int] = []
        self._fill(leave_bytes)

    def _fill(self, leave_bytes: int) -> None:
        import torch

        size_bytes = 1 << 34
        while size_bytes >= 1 << 25:
            block = c_uint64()
            free, _ = torch.cuda.mem_get_info()
            if free - size_bytes > leave_bytes and driver().cuMemAlloc_v2(byref(block), size_bytes) == 0:
                self._blocks.append(block.value)
            else:
                size_bytes >>= 1

    def free(self) -> None:
        for block in self._blocks:
            driver().cuMemFree_v2(block)
        self._blocks.clear()
