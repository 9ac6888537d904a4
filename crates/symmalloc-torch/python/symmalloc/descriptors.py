"""Device memory of another process, by file descriptors of the driver. For `symmalloc.colocate`.

    exporter                                                    importer
    chunk of physical memory ── file descriptor, over a socket ──►  mapped at an address that the importer keeps

Works for any memory that was created by `cuMemCreate` with file descriptors as handle type: symmalloc's, and that of PyTorch's
expandable segments. Memory of `cudaMalloc` has no descriptors. A mapping keeps the physical memory alive, so an importer's kernel never
faults, whatever the exporter does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from functools import cache
from typing import Any, Protocol

from . import forks
from .errors import CudaError, InvalidArgument, InvalidState, OutOfMemory
from .write_signals import without_signals

DEVICE_LOCATION, FILE_DESCRIPTOR, READ, READ_WRITE = 1, 1, 1, 3
OUT_OF_MEMORY = 2

Chunk = tuple[int, int]
"""The address of the first byte, and the size in bytes."""


class Descriptors(Protocol):
    """Memory that processes share by descriptors."""

    identity: str
    """Equal in two processes exactly if they use the same device."""

    def chunks(self, address: int, size_bytes: int) -> list[Chunk]: ...
    def hold(self, chunk: Chunk) -> int: ...
    def export(self, handle: int) -> int: ...
    def drop(self, handle: int) -> None: ...
    def reserve(self, size_bytes: int) -> int: ...
    def release(self, address: int, size_bytes: int) -> None: ...
    def map(self, address: int, size_bytes: int, descriptor: int) -> None: ...
    def allow(self, address: int, size_bytes: int, *, is_writable: bool) -> None: ...
    def unmap(self, address: int, size_bytes: int) -> None: ...
    def synchronize(self) -> None: ...


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [("kind", c_int), ("handles", c_int), ("location", c_int), ("device", c_int), ("rest", c_uint64 * 4)]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", c_int), ("device", c_int), ("flags", c_int)]


class CudaDescriptors:
    """The memory of one CUDA device. Raises `CudaError` if a call of the driver fails."""

    def __init__(self, device: int) -> None:
        self._driver = _driver()
        self._context: c_void_p | None = None
        self._call("cuInit", 0)
        handle, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(handle), device)
        self._device = handle.value
        uuid = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", uuid, handle)
        self.identity = bytes(uuid).hex()
        # Retained for the rest of the process, as by PyTorch.
        self._call("cuDevicePrimaryCtxRetain", byref(context), handle)
        self._context = context
        granularity, properties = (
            c_size_t(),
            _Properties(kind=1, handles=FILE_DESCRIPTOR, location=DEVICE_LOCATION, device=self._device),
        )
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), 0)
        self._granule = granularity.value
        # The sizes of chunks that were found before, by their first byte. They are verified on every use.
        self._known: dict[int, int] = {}

    def chunks(self, address: int, size_bytes: int) -> list[Chunk]:
        """Returns the chunks of physical memory behind a range, in order. Raises `InvalidArgument` if it has memory without a handle."""
        found, at = [], address
        while at < address + size_bytes:
            first, size = self._chunk(at)
            found.append((first, size))
            at = first + size
        return found

    def _chunk(self, address: int) -> Chunk:
        # The driver returns the same handle for every address of a chunk. Chunks consist of whole granules.
        at = address - address % self._granule
        if (handle := self._handle(at)) is None:
            raise InvalidArgument(
                f"the memory at {address:#x} has no handle that can be exported: allocate it in a pool of symmalloc"
                " (`symmalloc.install()`), not with cudaMalloc"
            )
        first, end = at, at + self._granule
        if (known := self._known.get(first)) is not None and self._is_whole(handle, first, known):
            return first, known
        while self._handle(first - self._granule) == handle:
            first -= self._granule
        while self._handle(end) == handle:
            end += self._granule
        self._known[first] = end - first
        return first, end - first

    def _is_whole(self, handle: int, first: int, size_bytes: int) -> bool:
        granule = self._granule
        before, last, after = (self._handle(at) for at in (first - granule, first + size_bytes - granule, first + size_bytes))
        return last == handle and handle not in (before, after)

    def _handle(self, address: int) -> int | None:
        handle = c_ulonglong()
        if self._code("cuMemRetainAllocationHandle", byref(handle), c_void_p(address)):
            return None
        self._call("cuMemRelease", handle)
        return handle.value

    def hold(self, chunk: Chunk) -> int:
        """Returns the handle of a chunk's memory, and keeps the memory until `drop`. Until then, no other memory has this handle."""
        handle = c_ulonglong()
        self._call("cuMemRetainAllocationHandle", byref(handle), c_void_p(chunk[0]))
        return handle.value

    def drop(self, handle: int) -> None:
        """Ends a `hold`."""
        self._call("cuMemRelease", c_ulonglong(handle))

    def export(self, handle: int) -> int:
        """Returns a descriptor of the memory of a handle, which the caller closes."""
        descriptor = c_int(-1)
        try:
            self._call("cuMemExportToShareableHandle", byref(descriptor), c_ulonglong(handle), FILE_DESCRIPTOR, c_ulonglong(0))
        except CudaError:
            # The driver does not state why it has no descriptor. This raises an OSError if the process may open no more files.
            os.close(os.memfd_create("symmalloc-probe", os.MFD_CLOEXEC))
            raise
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def reserve(self, size_bytes: int) -> int:
        """Reserves addresses."""
        address = c_ulonglong()
        self._call("cuMemAddressReserve", byref(address), c_size_t(size_bytes), c_size_t(0), c_ulonglong(0), c_ulonglong(0))
        return address.value

    def release(self, address: int, size_bytes: int) -> None:
        """Releases reserved addresses, of which none is mapped."""
        self._call("cuMemAddressFree", c_ulonglong(address), c_size_t(size_bytes))

    def map(self, address: int, size_bytes: int, descriptor: int) -> None:
        """Maps the chunk of a descriptor, which stays open. Nothing can access it before `allow`."""
        handle = c_ulonglong()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), FILE_DESCRIPTOR)
        try:
            self._call("cuMemMap", c_ulonglong(address), c_size_t(size_bytes), c_size_t(0), handle, c_ulonglong(0))
        finally:
            # The mapping keeps the memory.
            self._call("cuMemRelease", handle)

    def allow(self, address: int, size_bytes: int, *, is_writable: bool) -> None:
        """Lets the device access mapped memory."""
        access = _Access(DEVICE_LOCATION, self._device, READ_WRITE if is_writable else READ)
        self._call("cuMemSetAccess", c_ulonglong(address), c_size_t(size_bytes), byref(access), c_size_t(1))

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmaps a chunk. No work of the device may use it."""
        self._call("cuMemUnmap", c_ulonglong(address), c_size_t(size_bytes))

    def synchronize(self) -> None:
        """Waits for all work of this process on the device."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        if code := self._code(name, *arguments):
            raise (OutOfMemory if code == OUT_OF_MEMORY else CudaError)(f"{name} failed with {code}")

    def _code(self, name: str, *arguments: Any) -> int:
        """Calls the driver in this device's context, whatever context the thread uses. Returns the status."""
        if self._context is not None and (code := self._driver.cuCtxPushCurrent_v2(self._context)):
            raise CudaError(f"cuCtxPushCurrent failed with {code}")
        try:
            return int(getattr(self._driver, name)(*arguments))
        finally:
            if self._context is not None:
                self._driver.cuCtxPopCurrent_v2(byref(c_void_p()))


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"libcuda cannot be loaded: {error}") from error


LIVE, STALE = 1, 2
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Without them, the owner could shrink the file of a page, and the importer's next check would end its process with SIGBUS."""


class StatePage:
    """A page of host memory that states whether exported memory still has its contents. A check costs one load.

    A closed page, such as that of a parent in its forked child, is not live, and `renew` and `withdraw` have no effect on it.
    """

    def __init__(self, descriptor: int, *, is_owner: bool) -> None:
        """Takes the descriptor. Raises `ValueError` or `OSError` if it is no sealed page."""
        self._descriptor = descriptor
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ValueError("the size of the page is not sealed")
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_owner else 0))
        except BaseException:
            os.close(descriptor)
            raise
        forks.register(self)

    @classmethod
    def create(cls) -> StatePage:
        with forks.lock:
            descriptor = os.memfd_create("symmalloc-turn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                with without_signals():
                    os.ftruncate(descriptor, mmap.PAGESIZE)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            except BaseException as why:
                os.close(descriptor)
                if isinstance(why, OSError) and why.errno == errno.EFBIG:
                    raise InvalidState(
                        f"the limit of file sizes is below {mmap.PAGESIZE} bytes, the size of a page of memory that processes share:"
                        " raise it, for example with `ulimit -f unlimited`"
                    ) from why
                raise
            page = cls(descriptor, is_owner=True)
        page.renew()
        return page

    def fileno(self) -> int:
        return self._descriptor

    @property
    def is_live(self) -> bool:
        return not self._page.closed and self._page[0] == LIVE

    def renew(self) -> None:
        self._set(LIVE)

    def withdraw(self) -> None:
        self._set(STALE)

    def _set(self, state: int) -> None:
        if not self._page.closed:
            self._page[0] = state

    def close(self) -> None:
        """Closes the page. No effect in further calls."""
        with forks.lock:
            if not self._page.closed:
                self._page.close()
                os.close(self._descriptor)


# The pages of exported pools, by device and pool.
_exported: dict[tuple[int, int], list[StatePage]] = {}


def note_export(device: int, pool: int, page: StatePage) -> None:
    """Lets the next sleep of a pool withdraw an export."""
    pages = _exported.setdefault((device, pool), [])
    if page not in pages:
        pages.append(page)


def forget_export(page: StatePage) -> None:
    for key in [key for key, pages in _exported.items() if page in pages]:
        _exported[key].remove(page)
        if not _exported[key]:
            del _exported[key]


def withdraw_exports(device: int, pool: int) -> None:
    """Tells importers that a pool is about to release its memory."""
    for page in _exported.pop((device, pool), []):
        page.withdraw()
