"""The allocator of one device: an object over the C interface, independent of PyTorch."""

from __future__ import annotations

import ctypes
import enum
import json
import os
import pickle
from collections.abc import Callable
from ctypes import byref, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, fields
from typing import Any

from . import forks
from .errors import InvalidArgument, InvalidState
from .library import (
    GatherFunction,
    MemoryStruct,
    PlacementStruct,
    SleptStruct,
    StepReportStruct,
    WokenStruct,
    call,
    data,
    encoded,
    text,
)

DEFAULT_POOL = 0
SHARED_STREAMS = 0xFFFF_FFFF
NOWHERE = 0xFFFF_FFFF_FFFF_FFFF

Gather = Callable[[bytes], bytes]
"""A function that takes this rank's bytes and returns the bytes of all ranks, in rank order. All ranks pass equally many."""


@dataclass(frozen=True)
class Placement:
    """The position of an allocation. Equal on all ranks that ran the same program."""

    pool: int
    stream: int | None
    """The number of the stream, in order of first use. For a heap of a group, the number of the group's first stream plus 65,536; None
    if all streams of the pool do."""
    segment: int
    """The birth ordinal of the segment in its heap."""
    offset_bytes: int
    size_bytes: int
    """Usable bytes: the requested size, rounded up."""
    requested_bytes: int


@dataclass(frozen=True)
class StepReport:
    """The result of a step."""

    allocations: int
    planned: int
    """The number of allocations that were placed by a plan."""
    plan_bytes: int
    """Bytes of memory reserved for the pool's plans."""
    differs_at: int | None
    """The number of the first allocation that differed from the plan; None if there was none, or no plan."""


class Contents(enum.Enum):
    """The treatment of the contents of live allocations when a pool sleeps."""

    KEEP = 0
    """Copied to pinned host memory, and restored on wake."""
    DROP = 1
    """Discarded, and undefined after wake."""
    ZERO = 2
    """Discarded, and zero after wake."""


class Storage(enum.Enum):
    """The storage for a sleeping pool's kept contents."""

    PINNED = 0
    """Pinned host memory: the fastest copies. It is reused by later sleeps."""
    PAGEABLE = 1
    """Pageable host memory: it returns to the system when the pool wakes."""
    FOLDER = 2
    """A file without a name. It disappears with the process, and is verified when it is read."""


class Phase(enum.Enum):
    """The sleep state of a pool."""

    AWAKE = 0
    """The pool has its memory."""
    ASLEEP = 1
    """The pool has no memory, but keeps its addresses."""
    HELD = 2
    """The pool sleeps, but the driver or a window holds some memory. Another sleep tries to release it. A wake reuses it, but a
    registered pool must sleep again before it wakes."""


@dataclass(frozen=True)
class Slept:
    """The result of a sleep, for one pool or summed over several."""

    released_bytes: int = 0
    """Bytes released to the device."""
    kept_bytes: int = 0
    """Bytes copied to the host."""
    deregistrations: int = 0
    """Windows and buffers that were deregistered."""
    suspended_bytes: int = 0
    """Bytes that NCCL released because communicators were suspended."""

    def __add__(self, other: Slept) -> Slept:
        return Slept(
            self.released_bytes + other.released_bytes,
            self.kept_bytes + other.kept_bytes,
            self.deregistrations + other.deregistrations,
            self.suspended_bytes + other.suspended_bytes,
        )


@dataclass(frozen=True)
class Woken:
    """The result of a wake, for one pool or summed over several."""

    remapped_bytes: int = 0
    """Bytes that were mapped to memory again."""
    registrations: int = 0
    """Windows and buffers that were registered again."""
    changed: int = 0
    """Windows whose handle changed on any rank: recapture graphs that use them."""
    lost: int = 0
    """Groups that failed during the sleep: register on new ones."""
    resumed: int = 0
    """Communicators that were resumed."""

    def __add__(self, other: Woken) -> Woken:
        return Woken(
            self.remapped_bytes + other.remapped_bytes,
            self.registrations + other.registrations,
            self.changed + other.changed,
            self.lost + other.lost,
            self.resumed + other.resumed,
        )


@dataclass(frozen=True)
class DeviceMemory:
    """The used memory of a device in bytes, by owner: what remains on it while pools sleep."""

    used_bytes: int
    """In use by all processes, as the driver reports it. The sum of all others."""
    awake_bytes: int
    """Pools that are awake, including their free blocks, without those of graphs."""
    graph_bytes: int
    """Pools of graphs that are awake."""
    asleep_bytes: int
    """Memory that sleeping pools still hold, because the driver or a window did not release it."""
    exported_bytes: int
    """Memory of sleeping pools that other processes have mapped, or that a dma-buf holds."""
    idle_bytes: int
    """Idle chunks and prefetched memory."""
    communicators_bytes: int
    """Memory of NCCL for the communicators of registered pools; 0 before NCCL 2.29.7."""
    other_bytes: int
    """All else: contexts and their modules, other libraries and other processes."""


class DmaBuf:
    """A file descriptor of device memory, for libraries that register memory with network cards (`ibv_reg_dmabuf_mr`).

    Until `close`, the memory does not return to the device, even if its pool is trimmed, sleeps or is destroyed. `with` closes it.
    Deregister the memory before it is freed, because the allocator reuses freed memory immediately.

    A forked child (`os.fork`, `multiprocessing`) closes its copy of the descriptor before its own code runs, because the copy would hold
    the memory. A fork waits while another thread opens or closes a dma-buf.
    """

    def __init__(self, allocator: Allocator, pointer: int, size_bytes: int) -> None:
        self._handle, self._process = c_void_p(), os.getpid()
        fd, offset = c_int32(), c_uint64()

        def open_one() -> int:
            call("dma_buf_open", allocator.handle, pointer, size_bytes, byref(fd), byref(offset), byref(self._handle))
            return fd.value

        self._fd = forks.open_descriptor(open_one)
        self.offset_bytes = offset.value
        """The position of the first requested byte in the dma-buf, which consists of whole host pages."""

    def fileno(self) -> int:
        """Returns the file descriptor, which `close` closes.

        Raises `InvalidArgument` if the dma-buf is closed, and `InvalidState` in a forked child.
        """
        if not self._handle:
            raise InvalidArgument("the dma-buf is closed")
        if self._is_forked():
            raise InvalidState("the dma-buf belongs to the parent of this process")
        return self._fd

    @property
    def is_current(self) -> bool:
        """True until the pool releases this memory. Its addresses may then have other memory: create a new dma-buf.

        A pool releases memory when it is trimmed, sleeps or is destroyed. Frees are not detected.
        """
        out = c_uint32()
        call("dma_buf_is_current", self._handle, byref(out))
        return out.value != 0

    def close(self) -> None:
        """Closes the descriptor, and returns memory that the pool no longer uses to the device.

        Further calls, and calls in a forked child, have no effect.
        """
        if self._is_forked():  # another file may have the number by now
            self._handle = c_void_p()
            return
        with forks.lock:
            handle, self._handle = self._handle, c_void_p()
            if handle:
                call("dma_buf_close", handle)
                forks.forget_descriptor(self._fd)

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def __enter__(self) -> DmaBuf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Allocator:
    """A deterministic caching allocator for one device.

    device  the device's number
    conf    a configuration text, with the syntax of `SYMMALLOC_CONF`; None: the defaults, which stitch large blocks

    Streams are raw handles (`cudaStream_t` as an int); 0 is the default stream. All methods except `close` are thread-safe.
    Methods of a closed allocator raise `InvalidArgument`. PyTorch's allocator is `symmalloc.allocator(device)`.
    """

    def __init__(self, device: int = 0, conf: str | None = None) -> None:
        self._handle, self._is_owned = c_void_p(), True
        call("create", device, encoded(conf), byref(self._handle))

    @classmethod
    def shared(cls, device: int) -> Allocator:
        """Returns the process's allocator for a device, and creates it on first use, configured by `SYMMALLOC_CONF`.

        The allocator lives until the process ends. PyTorch uses it after `install()`. The other supported runtimes use it, too.
        """
        self = cls.__new__(cls)
        self._handle, self._is_owned = c_void_p(), False
        call("process_allocator", device, byref(self._handle))
        return self

    @property
    def handle(self) -> c_void_p:
        """The allocator's handle in the C interface."""
        return self._handle

    def close(self) -> None:
        """Releases all memory to the device. Further calls have no effect."""
        handle, self._handle = self._handle, c_void_p()
        if self._is_owned and handle:
            call("destroy", handle)

    def __enter__(self) -> Allocator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register_stream(self, stream: int, *, group: int | None = None) -> None:
        """Registers a stream before its first use: in the group of the stream `group`, or in a new group.

        In pools with `streams:grouped`, the streams of a group share memory. Without this call, the streams that the main thread or
        autograd's threads use first form one group of PyTorch's allocator, and every other stream forms its own. Raises `InvalidArgument`
        if the stream has another group already.
        """
        if group is None:
            call("register_stream", self._handle, stream)
        else:
            call("register_stream_in", self._handle, stream, group)

    def allocate(self, size_bytes: int, *, pool: int = DEFAULT_POOL, stream: int = 0, name: str | None = None) -> int:
        """Allocates memory for use on a stream, and returns its device address. Raises `OutOfMemory` and `UnknownPool`."""
        out = c_void_p()
        if name is None:
            call("allocate", self._handle, pool, stream, size_bytes, byref(out))
        else:
            call("allocate_named", self._handle, pool, stream, size_bytes, name.encode(), byref(out))
        return out.value or 0

    def free(self, pointer: int) -> None:
        """Frees an allocation without blocking. Its next user waits on the device for other streams. Raises `UnknownPointer`."""
        call("free", self._handle, pointer)

    def allocate_unordered(self, size_bytes: int) -> int:
        """Allocates memory whose stream is unknown, for work on any stream. Free it with `free_unordered`.

        Raises `OutOfMemory`.
        """
        out = c_void_p()
        call("allocate_unordered", self._handle, size_bytes, byref(out))
        return out.value or 0

    def free_unordered(self, pointer: int) -> None:
        """Blocks until all work of the device is done, and frees an allocation.

        Raises `UnknownPointer`, and `CudaError` during a stream capture. The memory then stays allocated.
        """
        call("free_unordered", self._handle, pointer)

    def record_use(self, pointer: int, stream: int) -> None:
        """Records that another stream uses a block. Raises `UnknownPointer`."""
        call("record_use", self._handle, pointer, stream)

    def create_pool(self, conf: str | None = None, *, key: int | None = None) -> int:
        """Creates a pool and returns its number. Raises `InvalidSettings`.

        With a key from 1 to 65535, the number is the key, whatever the timing of threads that create pools. Raises `InvalidArgument`
        if the key was used before. Without a key, the number is the one after the highest so far.
        """
        if key is not None:
            call("pool_create_with_key", self._handle, key, encoded(conf))
            return key
        out = c_uint32()
        call("pool_create", self._handle, encoded(conf), byref(out))
        return out.value

    def reset_pool(self, pool: int) -> int:
        """Frees all allocations of a pool at once, and keeps its memory. Returns their number.

        Nothing may use or free them afterwards: do not reset a pool with live tensors or buffers of other libraries.
        """
        out = c_uint64()
        call("pool_reset", self._handle, pool, byref(out))
        return out.value

    def destroy_pool(self, pool: int) -> None:
        """Destroys a pool. The first trim after its last allocation was freed releases its memory."""
        call("pool_destroy", self._handle, pool)

    def reserve(self, size_bytes: int, *, pool: int = DEFAULT_POOL, stream: int = 0) -> None:
        """Reserves memory for later allocations of a pool on a stream. Raises `OutOfMemory`."""
        call("reserve", self._handle, pool, stream, size_bytes)

    def sleep(self, pool: int = DEFAULT_POOL, contents: Contents = Contents.KEEP) -> Slept:
        """Puts a pool to sleep: releases its memory to the device, and keeps its addresses and allocations.

        Blocks until the device is idle. Until the pool wakes, no work may use its memory. A registered pool sleeps on all ranks
        together, and raises `MisalignedError` and `NcclError` as a sync does. Raises `InvalidState` during a stream capture or an
        open step, and `CudaError` if the host lacks memory for the kept contents. The pool is unchanged after these two. Also
        raises `CudaError` if the driver keeps some of the memory: the pool then sleeps (`Phase.HELD`), and another call releases the rest.
        """
        return self._sleep("sleep", pool, contents)

    def sleep_and_suspend(self, pool: int = DEFAULT_POOL, contents: Contents = Contents.KEEP) -> Slept:
        """Puts a pool to sleep like `sleep`, and then suspends the communicators that it is registered on.

        NCCL releases their memory until the next sleep or wake of the pool. Until then, no collective may run on these
        communicators, and no graph with such collectives may be replayed. Wake the pool before they are destroyed. Raises
        `InvalidState`, and leaves the pool awake, before NCCL 2.29.7 or if a pool that is awake is registered on one of them.
        """
        return self._sleep("sleep_and_suspend", pool, contents)

    def _sleep(self, function: str, pool: int, contents: Contents) -> Slept:
        out = SleptStruct()
        call(function, self._handle, pool, contents.value, byref(out))
        return Slept(out.released_bytes, out.kept_bytes, out.deregistrations, out.suspended_bytes)

    def suspend(self) -> int:
        """Suspends the communicators of all registered pools that sleep. Returns the bytes that NCCL released.

        Leaves alone the communicators of a pool that shares one with a pool that is awake, and those that are suspended. All ranks
        call it at the same point. Raises `InvalidState` before NCCL 2.29.7.
        """
        out = c_uint64()
        call("suspend", self._handle, byref(out))
        return out.value

    def device_memory(self) -> DeviceMemory:
        """Returns the used memory of the device by owner: what remains on it while pools sleep.

        Waits for NCCL calls of other threads. Raises `CudaError`.
        """
        out = MemoryStruct()
        call("device_memory", self._handle, byref(out))
        return DeviceMemory(*(getattr(out, field.name) for field in fields(DeviceMemory)))

    def wake(self, pool: int = DEFAULT_POOL) -> Woken:
        """Wakes a pool at its previous addresses, and restores the kept contents.

        Raises `OutOfMemory` if the device lacks memory. The pool then stays asleep and keeps its contents. Call again to retry.
        """
        out = WokenStruct()
        call("wake", self._handle, pool, byref(out))
        return Woken(out.remapped_bytes, out.registrations, out.changed, out.lost, out.resumed)

    def phase(self, pool: int = DEFAULT_POOL) -> Phase:
        """Returns the sleep state of a pool."""
        out = c_uint32()
        call("phase", self._handle, pool, byref(out))
        return Phase(out.value)

    def save_in(self, storage: Storage, folder: str | None = None, pool: int = DEFAULT_POOL) -> None:
        """Sets the storage for a pool's kept contents, from its next sleep on. `folder` is for `Storage.FOLDER` only.

        A sleep raises `FileError` if the folder is missing or its disk is full, and the pool stays awake. A wake raises it if the
        file was modified, and the pool stays asleep.
        """
        call("save_in", self._handle, pool, storage.value, encoded(folder))

    def retain_saved(self, retain: bool, pool: int = DEFAULT_POOL) -> None:
        """Sets whether a pool's kept contents stay on the host after its next wake. The next sleep then reuses their memory.

        Files are never retained.
        """
        call("retain_saved", self._handle, pool, int(retain))

    def saved_pointer(self, pointer: int, size_bytes: int) -> int:
        """Returns the host address of the kept contents of device memory, or 0 if there are none.

        The address is valid until the pool sleeps, wakes or is destroyed. Raises `InvalidState` if the contents are in a file, or
        in several pieces: pinned memory has pieces of 32 MiB.
        """
        out = c_void_p()
        call("saved_pointer", self._handle, pointer, size_bytes, byref(out))
        return out.value or 0

    def saved_copy(self, pointer: int, size_bytes: int, to: int) -> bool:
        """Copies the kept contents of device memory to a host address. Returns `False` if there are none. Raises `FileError`."""
        found = c_uint32()
        call("saved_copy", self._handle, pointer, size_bytes, to, byref(found))
        return found.value != 0

    def resize(self, size_bytes: int, *, pool: int, stream: int = 0) -> int:
        """Sets the memory of a pool with a quota (`growth_mb:0,streams:shared`) to a size in bytes, rounded up to granules.

        Live allocations stay in place. Returns the bytes that the pool now holds. Raises `InvalidState` if live allocations need
        more or the pool has no quota, and `InvalidArgument` for a size beyond its `range_mb`. The pool is unchanged after these
        two. Raises `OutOfMemory` if there is no memory for the full size; call it again to retry.
        """
        if size_bytes < 0:
            raise InvalidArgument(f"a pool cannot hold {size_bytes} bytes")
        out = c_uint64()
        call("resize", self._handle, pool, stream, size_bytes, byref(out))
        return out.value

    def reserve_host_memory(self, size_bytes: int) -> None:
        """Reserves pinned host memory for kept contents, so that the first sleep does not have to. Raises `CudaError`."""
        call("reserve_host_memory", self._handle, size_bytes)

    def release_host_memory(self) -> int:
        """Releases pinned host memory that contains no saved contents, and returns its size in bytes."""
        out = c_uint64()
        call("release_host_memory", self._handle, byref(out))
        return out.value

    def begin_step(self, key: int = 0, pool: int = DEFAULT_POOL) -> None:
        """Begins a step: a repeated part of the program. Raises `InvalidState` if a step is open.

        A pool with `plan:learn` plans a step after two equal runs, when the second ends. Later runs follow the plan.
        """
        call("step_begin", self._handle, pool, key)

    def end_step(self, pool: int = DEFAULT_POOL) -> StepReport:
        """Ends the open step and returns its report. Raises `InvalidState` if no step is open."""
        out = StepReportStruct()
        call("step_end", self._handle, pool, byref(out))
        differs_at = None if out.differs_at == NOWHERE else out.differs_at
        return StepReport(out.allocations, out.planned, out.plan_bytes, differs_at)

    def adopt_plans(self, path: str | os.PathLike[str], pool: int = DEFAULT_POOL) -> int:
        """Loads the plans for a pool from a file that `symmalloc plan -o FILE` wrote, and returns their number.

        Streams are numbered in order of first use, so use each stream once before this call. Raises `InvalidSettings` for a file
        that is not a plan or does not fit, `OutOfMemory`, and `InvalidState` if a step is open.
        """
        count = c_uint32()
        call("plans_adopt", self._handle, pool, os.fspath(path).encode(), byref(count))
        return count.value

    def drop_plans(self, pool: int = DEFAULT_POOL) -> None:
        """Drops the plans of a pool. Their live allocations stay in place."""
        call("plans_drop", self._handle, pool)

    def dma_buf(self, pointer: int, size_bytes: int) -> DmaBuf:
        """Creates a dma-buf of an allocation of any pool, of a part of one, or of any part of one segment.

        Raises `InvalidState` if the device has no dma-bufs, or if the driver refuses a range of several physical chunks: use a pool
        with `segments:reserved` or `segments:fixed`. Raises `UnknownPointer` if an address has no memory, and `CudaError`.
        """
        return DmaBuf(self, pointer, size_bytes)

    def trim(self) -> int:
        """Releases free memory to the device, except that of graphs in use. Returns the number of released bytes.

        Call it at the same point on every rank if a symmetric pool is awake. One rank alone calls `trim_private`.
        """
        out = c_uint64()
        call("trim", self._handle, byref(out))
        return out.value

    def trim_private(self) -> int:
        """Releases the free memory of pools that are neither symmetric nor a graph's. Returns the number of released bytes.

        It is an op of no symmetric pool, so one rank alone may call it.
        """
        out = c_uint64()
        call("trim_private", self._handle, byref(out))
        return out.value

    def grant_access(self, peer: int) -> None:
        """Grants another device read and write access to present and future memory. Raises `CudaError`."""
        call("grant_access", self._handle, peer)

    def placement_of(self, pointer: int) -> Placement:
        """Returns the position of an allocation. Raises `UnknownPointer`."""
        out = PlacementStruct()
        call("placement_of", self._handle, pointer, byref(out))
        found = {name: getattr(out, name) for name in Placement.__dataclass_fields__}
        return Placement(**found | {"stream": None if out.stream == SHARED_STREAMS else out.stream})

    def stats(self) -> dict[str, Any]:
        """Returns the counters of the device (`total`) and of each pool (`pools`, under `stats`).

        The counters have the keys of `torch.cuda.memory_stats_as_nested_dict`, and additional ones.
        """
        stats: dict[str, Any] = json.loads(text("stats_json", self._handle))
        return stats

    def reset_peaks(self) -> None:
        """Sets every peak to the current value."""
        call("reset_peaks", self._handle)

    def digest(self, pool: int = DEFAULT_POOL) -> int:
        """Returns the 64-bit digest of a pool's history.

        Ranks have equal digests exactly when their ops and placements are equal.
        """
        out = c_uint64()
        call("digest", self._handle, pool, byref(out))
        return out.value

    def snapshot(self) -> dict[str, Any]:
        """Returns a snapshot of this device in the format of `torch.cuda.memory._snapshot()`, for PyTorch's viewer."""
        snapshot: dict[str, Any] = pickle.loads(data("snapshot", self._handle))
        return snapshot

    def check_memory(self) -> int:
        """Checks the memory of pools with `debug:canary` or `debug:poison`, and returns the number of checked guards.

        Waits for the streams of their allocations. Raises `InvalidState` if memory was damaged; the message names the allocation.
        Each damage is raised once.
        """
        checked = c_uint64()
        call("check_memory", self._handle, byref(checked))
        return checked.value

    def explain_address(self, address: int) -> str:
        """Returns what the allocator knows about a device address, such as that of a fault.

        The text names the allocation that contains it, its neighbors, and, in pools with a debugging option, the freed
        allocations that contained it.
        """
        return text("explain_address", self._handle, address)

    def memory_record(self) -> list[dict[str, Any]]:
        """Returns the live allocations, and those that were freed in pools with a debugging option, oldest first.

        This is the key `memory` of a flight record, which `symmalloc address` reads.
        """
        record: list[dict[str, Any]] = json.loads(text("memory_record", self._handle))
        return record

    def leak_report(self) -> str:
        """Returns a list of the live allocations, by pool and name."""
        return text("leak_report", self._handle)

    def config(self) -> str:
        """Returns the canonical text of the configuration, which includes default values."""
        return text("config", self._handle)

    def start_trace(self, path: str | os.PathLike[str]) -> None:
        """Records every op to a file, for `symmalloc replay` and `symmalloc diff`. A name in `.zst` or `.gz` selects compression.

        Raises `InvalidState` after the first allocation: a recording must begin before it.
        """
        call("trace_start", self._handle, os.fsencode(path))

    def stop_trace(self) -> None:
        """Ends the recording and writes the rest of it to disk."""
        call("trace_stop", self._handle)

    def agree(self, rank: int, world: int, gather: Gather, *, symmetric_only: bool = False) -> None:
        """Compares the histories of all pools, or of symmetric pools only, between all ranks.

        rank    this rank's number
        world   the number of ranks
        gather  an all-gather of bytes over all ranks

        Collective: all ranks call it at the same point. Raises the same `MisalignedError` on every rank, and any error that
        `gather` raises.
        """
        failures: list[BaseException] = []

        def gather_bytes(_context: int, mine: Any, length: int, everyone: Any) -> int:
            try:
                gathered = gather(ctypes.string_at(mine, length))
                if len(gathered) != world * length:
                    raise ValueError(f"gather returned {len(gathered)} bytes for {world} ranks of {length}")
                ctypes.memmove(everyone, gathered, len(gathered))
                return 0
            except BaseException as error:  # an exception must not unwind through the library, so it is raised below
                failures.append(error)
                return 1

        try:
            call(
                "agree" if symmetric_only else "agree_all",
                self._handle,
                rank,
                world,
                GatherFunction(gather_bytes),
                None,
            )
        except Exception:
            if failures:
                raise failures[0] from None
            raise
