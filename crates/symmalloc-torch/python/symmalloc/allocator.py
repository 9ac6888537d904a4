"""One device's allocator: the C interface as an object. Knows nothing of PyTorch."""

from __future__ import annotations

import ctypes
import enum
import json
import os
import pickle
from collections.abc import Callable
from ctypes import byref, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgument
from .library import (
    GatherFunction,
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
"""Takes this rank's bytes; returns all ranks' bytes, each as many, in rank order."""


@dataclass(frozen=True)
class Placement:
    """Where an allocation lies. Equal on all ranks that ran the same program."""

    pool: int
    stream: int | None
    """The number of its stream in the order of first use; None where the pool's streams share."""
    segment: int
    """The birth ordinal of its segment in its heap."""
    offset_bytes: int
    size_bytes: int
    """Bytes that may be used: the request, rounded up."""
    requested_bytes: int


@dataclass(frozen=True)
class StepReport:
    """What became of a step."""

    allocations: int
    planned: int
    """How many of them went where a plan says."""
    plan_bytes: int
    """Bytes of memory that the pool's plans hold."""
    differs_at: int | None
    """The number of the first allocation that was not as planned; None when all were, or there is no plan."""


class Contents(enum.Enum):
    """What becomes of the bytes in live allocations of a pool that sleeps."""

    KEEP = 0
    """They are copied to pinned host memory, and back when it wakes."""
    DROP = 1
    """They are gone, and undefined after waking."""
    ZERO = 2
    """They are zero after waking."""


class Phase(enum.Enum):
    """Whether a pool is awake."""

    AWAKE = 0
    """It has its memory."""
    ASLEEP = 1
    """It has no memory, and all of its addresses."""
    FAILED = 2
    """It sleeps, but the driver or a window holds some of its memory: another sleep tries to give that back, a wake uses it."""


@dataclass(frozen=True)
class Slept:
    """What a sleep did, of one pool or of several together."""

    released_bytes: int = 0
    """Bytes that went back to the device."""
    kept_bytes: int = 0
    """Bytes that were copied to the host."""
    deregistered: int = 0
    """Windows and buffers that were taken away."""

    def __add__(self, other: Slept) -> Slept:
        return Slept(
            self.released_bytes + other.released_bytes,
            self.kept_bytes + other.kept_bytes,
            self.deregistered + other.deregistered,
        )


@dataclass(frozen=True)
class Woken:
    """What a wake did, of one pool or of several together."""

    remapped_bytes: int = 0
    """Bytes that have memory again."""
    registered: int = 0
    """Windows and buffers that were made again."""
    changed: int = 0
    """Windows that have another handle than before, on any rank: capture again what uses them."""
    lost: int = 0
    """Groups that died since: register on new ones."""

    def __add__(self, other: Woken) -> Woken:
        return Woken(
            self.remapped_bytes + other.remapped_bytes,
            self.registered + other.registered,
            self.changed + other.changed,
            self.lost + other.lost,
        )


class Allocator:
    """A deterministic caching allocator of one device.

    `conf` is a text as in `SYMMALLOC_CONF`; None: the defaults. Streams are raw handles (`cudaStream_t` as an int), 0 the
    default stream. All methods but `close` are thread-safe. Those of a closed allocator raise `InvalidArgument`.

    PyTorch's own is `symmalloc.allocator(device)`.
    """

    def __init__(self, device: int = 0, conf: str | None = None) -> None:
        self._handle, self._is_owned = c_void_p(), True
        call("create", device, encoded(conf), byref(self._handle))

    @classmethod
    def shared(cls, device: int) -> Allocator:
        """The process's allocator of a device, made at its first use with `SYMMALLOC_CONF`. It lives as long as the process.

        PyTorch has it where `install()` was called, and so have the other runtimes that this package has hooks for.
        """
        self = cls.__new__(cls)
        self._handle, self._is_owned = c_void_p(), False
        call("torch_allocator", device, byref(self._handle))
        return self

    @property
    def handle(self) -> c_void_p:
        """The allocator as the C interface has it."""
        return self._handle

    def close(self) -> None:
        """Gives all memory back to the device. Does nothing the second time."""
        handle, self._handle = self._handle, c_void_p()
        if self._is_owned and handle:
            call("destroy", handle)

    def __enter__(self) -> Allocator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, size_bytes: int, stream: int = 0, pool: int = DEFAULT_POOL, name: str | None = None) -> int:
        """Returns a device address. Raises `OutOfMemory`, `UnknownPool`."""
        out = c_void_p()
        if name is None:
            call("allocate", self._handle, pool, size_bytes, stream, byref(out))
        else:
            call("allocate_named", self._handle, pool, size_bytes, stream, name.encode(), byref(out))
        return out.value or 0

    def free(self, pointer: int) -> None:
        """Frees at once: the next user waits on the device for those of other streams. Raises `UnknownPointer`."""
        call("free", self._handle, pointer)

    def allocate_unordered(self, size_bytes: int) -> int:
        """Allocates for work on any stream, where the stream is not known. Free it with `free_unordered`.

        Raises `OutOfMemory`.
        """
        out = c_void_p()
        call("allocate_unordered", self._handle, size_bytes, byref(out))
        return out.value or 0

    def free_unordered(self, pointer: int) -> None:
        """Frees when all work of the device is done, and blocks until then. Raises `UnknownPointer`.

        Raises `CudaError` while a stream is captured; the memory is still allocated then.
        """
        call("free_unordered", self._handle, pointer)

    def record_use(self, pointer: int, stream: int) -> None:
        """Says that another stream uses a block. Raises `UnknownPointer`."""
        call("record_use", self._handle, pointer, stream)

    def create_pool(self, conf: str | None = None) -> int:
        """Returns the new pool's number. Raises `InvalidSettings`."""
        out = c_uint32()
        call("pool_create", self._handle, encoded(conf), byref(out))
        return out.value

    def destroy_pool(self, pool: int) -> None:
        """Gives a pool up. Its memory goes back with the first trim after its last allocation was freed."""
        call("pool_destroy", self._handle, pool)

    def reserve(self, size_bytes: int, stream: int = 0, pool: int = DEFAULT_POOL) -> None:
        """Obtains memory for later allocations of a pool on a stream. Raises `OutOfMemory`."""
        call("reserve", self._handle, pool, stream, size_bytes)

    def sleep(self, pool: int = DEFAULT_POOL, contents: Contents = Contents.KEEP) -> Slept:
        """Puts a pool to sleep: its memory goes back to the device, its addresses and allocations stay. Waits for the device.

        Until it wakes nothing may use its memory. Raises `InvalidState` while a stream is captured or a step is open,
        `CudaError` when the host has no memory for what is kept; it is as it was then. A pool with registrars sleeps on all
        ranks together, and raises `MisalignedError` and `NcclError` as a sync.
        """
        out = SleptStruct()
        call("sleep", self._handle, pool, contents.value, byref(out))
        return Slept(out.released_bytes, out.kept_bytes, out.deregistered)

    def wake(self, pool: int = DEFAULT_POOL) -> Woken:
        """Wakes a pool, at the addresses that it had, with what was kept.

        Raises `OutOfMemory` where the device has no room: it sleeps on, nothing is lost, and another call may succeed.
        """
        out = WokenStruct()
        call("wake", self._handle, pool, byref(out))
        return Woken(out.remapped_bytes, out.registered, out.changed, out.lost)

    def phase(self, pool: int = DEFAULT_POOL) -> Phase:
        """Whether a pool is awake."""
        out = c_uint32()
        call("phase", self._handle, pool, byref(out))
        return Phase(out.value)

    def resize(self, size_bytes: int, pool: int, stream: int = 0) -> int:
        """Makes a pool with a quota (`growth_mb:0,streams:shared`) hold so many bytes, rounded up to granules, no more and no less.

        Live allocations stay where they are. Returns the bytes that it holds. Raises `InvalidState` when live allocations need
        more, or the pool has no quota; `InvalidArgument` beyond its `range_mb`: it is as it was then. `OutOfMemory` when there is
        no memory for all of it: call it again.
        """
        if size_bytes < 0:
            raise InvalidArgument(f"a pool cannot hold {size_bytes} bytes")
        out = c_uint64()
        call("resize", self._handle, pool, stream, size_bytes, byref(out))
        return out.value

    def reserve_host_memory(self, size_bytes: int) -> None:
        """Obtains pinned memory for what pools will keep, so that the first sleep does not. Raises `CudaError`."""
        call("reserve_host_memory", self._handle, size_bytes)

    def release_host_memory(self) -> int:
        """Gives pinned memory back that no sleeping pool needs. Returns its bytes."""
        out = c_uint64()
        call("release_host_memory", self._handle, byref(out))
        return out.value

    def begin_step(self, key: int = 0, pool: int = DEFAULT_POOL) -> None:
        """A step begins: what the program repeats. Raises `InvalidState` when one is open.

        In a pool with `plan:learn` a step that comes twice alike is planned when it ends, and later ones follow the plan.
        """
        call("step_begin", self._handle, pool, key)

    def end_step(self, pool: int = DEFAULT_POOL) -> StepReport:
        """The step ends. Raises `InvalidState` when none is open."""
        out = StepReportStruct()
        call("step_end", self._handle, pool, byref(out))
        differs_at = None if out.differs_at == NOWHERE else out.differs_at
        return StepReport(out.allocations, out.planned, out.plan_bytes, differs_at)

    def adopt_plans(self, path: str | os.PathLike[str], pool: int = DEFAULT_POOL) -> int:
        """Adopts the plans that a file of `symmalloc plan -o FILE` has for a pool. Returns how many.

        Streams have the numbers of their first use: use each stream once before. Raises `InvalidSettings` for a file that is no
        plan or a plan that does not fit, `OutOfMemory`, `InvalidState` while a step is open.
        """
        count = c_uint32()
        call("plans_adopt", self._handle, pool, os.fspath(path).encode(), byref(count))
        return count.value

    def drop_plans(self, pool: int = DEFAULT_POOL) -> None:
        """Gives the plans of a pool up. What they placed stays where it is."""
        call("plans_drop", self._handle, pool)

    def trim(self) -> int:
        """Gives free memory back to the device, but not that of graphs in use. Returns how many bytes."""
        out = c_uint64()
        call("trim", self._handle, byref(out))
        return out.value

    def grant_access(self, peer: int) -> None:
        """Lets another device read and write the memory, what there is and what will be. Raises `CudaError`."""
        call("grant_access", self._handle, peer)

    def placement_of(self, pointer: int) -> Placement:
        """Raises `UnknownPointer`."""
        out = PlacementStruct()
        call("placement_of", self._handle, pointer, byref(out))
        found = {name: getattr(out, name) for name in Placement.__dataclass_fields__}
        return Placement(**found | {"stream": None if out.stream == SHARED_STREAMS else out.stream})

    def stats(self) -> dict[str, Any]:
        """Counters: `total`, and `stats` for each of `pools`, as in `torch.cuda.memory_stats_as_nested_dict`, and more."""
        stats: dict[str, Any] = json.loads(text("stats_json", self._handle))
        return stats

    def reset_peaks(self) -> None:
        """Sets every peak to the current value."""
        call("reset_peaks", self._handle)

    def digest(self, pool: int = DEFAULT_POOL) -> int:
        """64 bits over the pool's history: equal on ranks exactly when the ops and their placements are."""
        out = c_uint64()
        call("digest", self._handle, pool, byref(out))
        return out.value

    def snapshot(self) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot()` returns, for this device. PyTorch's viewer reads it."""
        snapshot: dict[str, Any] = pickle.loads(data("snapshot", self._handle))
        return snapshot

    def leak_report(self) -> str:
        """What is allocated now, by pool and name."""
        return text("leak_report", self._handle)

    def config(self) -> str:
        """The configuration's canonical text: every value, defaults too."""
        return text("config", self._handle)

    def start_trace(self, path: str | os.PathLike[str]) -> None:
        """Records every op to a file that `symmalloc replay` and `symmalloc diff` read, zstd by the name's ending.

        Raises `InvalidState` after the first allocation: a recording begins before it.
        """
        call("trace_start", self._handle, os.fsencode(path))

    def stop_trace(self) -> None:
        """Ends the recording. What was recorded is on disk afterwards."""
        call("trace_stop", self._handle)

    def agree(self, rank: int, world: int, gather: Gather, *, symmetric_only: bool = False) -> None:
        """Compares the histories of all pools, or of symmetric ones, over all ranks, which all call this at the same point.

        Raises `MisalignedError` on every rank alike, and what `gather` raised.
        """
        failures: list[BaseException] = []

        def gather_bytes(_context: int, mine: Any, length: int, everyone: Any) -> int:
            try:
                gathered = gather(ctypes.string_at(mine, length))
                if len(gathered) != world * length:
                    raise ValueError(f"gather returned {len(gathered)} bytes for {world} ranks of {length}")
                ctypes.memmove(everyone, gathered, len(gathered))
                return 0
            except BaseException as error:  # it must not pass through the library; raised below
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
