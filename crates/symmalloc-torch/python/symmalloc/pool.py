"""Memory pools, mainly for symmetric memory: equal placements on all ranks, inside NCCL windows.

pool = symmalloc.MemPool(reserve=1 << 30)        reserves one segment now, for one permanent window
with symmalloc.use_mem_pool(pool):
    buffer = torch.empty(...)                    in the pool, at the same offset on every rank
pool.register()                                  collective: windows on the group's NCCL communicator
torch.distributed.all_reduce(buffer)             NCCL uses its symmetric kernels

An engine that owns its communicators registers on these, and its scopes register new memory when they end:

    pool.register(comm=pynccl.comm, rank=pynccl.rank, world=pynccl.world_size, mode=symmalloc.Mode.OFF)
    with symmalloc.use_mem_pool(pool, register=True):
        hidden = torch.empty(...)
"""

from __future__ import annotations

import enum
import weakref
from contextlib import suppress
from ctypes import PyDLL, byref, c_char_p, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import captured_buffers
from .allocator import Allocator, Contents, Phase, Slept, Woken
from .communicators import Communicator, Member, check_raw, rendezvous
from .descriptors import withdraw_exports
from .devices import Device, device_index
from .errors import Error, InvalidArgument, InvalidState
from .library import RegistrarOptionsStruct, call, encoded, library, library_path
from .state import allocator

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

GRANULE_BYTES = 2 << 20
DEADLINE_SECONDS = 60.0
BY_HAND = 0xFFFF_FFFF


class Registration(enum.Enum):
    """The kind of registration of a pool's memory on a communicator."""

    WINDOWS = 0
    """All ranks together create a symmetric window over each segment. For symmetric pools."""
    BUFFERS = 1
    """This rank alone calls `ncclCommRegister` for each piece of memory. For any pool, including pools whose segments grow."""


class Mode(enum.Enum):
    """The syncs at which the ranks of a communicator compare their allocations in the pool."""

    AT_SYNC = "at_sync"
    """Every sync compares, in one small collective that blocks the host."""
    OFF = "off"
    """Only `agree()` compares, and every n-th sync with `agree_every=n`. Any other sync communicates only if the pool has new
    segments, and returns immediately otherwise. If only some ranks have new segments, these ranks fail at the deadline."""


@dataclass(frozen=True)
class Window:
    """A position in an NCCL window. Device code addresses a peer's memory by it."""

    handle: int
    """The `ncclWindow_t`."""
    offset_bytes: int
    """The offset from the window's first byte, equal on all ranks."""


@dataclass(eq=False)
class Registered:
    """The registration of a pool on a communicator."""

    member: Member
    registrar: c_void_p
    ranks: int
    # The all-to-alls created on this registration, by options. They are destroyed before the registrar.
    exchanges: dict[int, c_void_p] = field(default_factory=dict)
    is_ended: bool = False

    def end(self) -> None:
        self.is_ended = True
        for all_to_all in self.exchanges.values():
            call("all_to_all_destroy", all_to_all)
        self.exchanges.clear()
        call("registrar_destroy", self.registrar)


# The pools with windows, in order of registration, which is equal on every rank. The list keeps pools alive when the program
# drops its references, because NCCL still uses their memory.
_registered: dict[MemPool, None] = {}

# The program's pools by device and number, and the devices that have a tagged pool.
_pools: weakref.WeakValueDictionary[tuple[int, int], MemPool] = weakref.WeakValueDictionary()
_tagged_devices: set[int] = set()


class ScopeCalls:
    """The library functions of a scope, without argument types: ctypes would take longer to convert them than the calls take.

    A begin, and an end without registration, never block. They keep the interpreter's lock, because releasing and reacquiring
    it costs more than the calls, and far more under contention. An end with registration waits for other ranks and releases it.
    """

    __slots__ = ("begin", "end", "leave")

    def __init__(self) -> None:
        self.end = library()["symmalloc_scope_end"]
        locked = PyDLL(str(library_path()))
        self.begin = locked["symmalloc_scope_begin"]
        self.leave = locked["symmalloc_torch_pop_pool"]


class MemPool:
    """A pool of memory on one device.

    symmetric  all ranks must make the same allocations in the pool, and get the same placements; `assert_aligned` compares them
    reserve    bytes to reserve now, as one segment for `stream`; None: segments are created on demand
    graphs     the memory belongs to CUDA graphs. Only captures can allocate it, so nothing else reuses captured memory. A
               later capture reuses the memory of freed tensors. Requires `reserve`, because a capture cannot register memory
    stream     the stream of `reserve`, since a pool has separate segments for each stream. None: the current stream, or for
               graphs the default capture stream of `torch.cuda.graph`
    quota      maximum size in bytes, for which the pool reserves address space. The pool starts empty, and only `resize`
               changes its size. Allocations beyond the current size raise
    base       first address of the pool's memory, equal in every process: `"slot:0"` to `"slot:63"`, or a multiple of 1 GiB. No
               other pool of the process may use any of the 1 TiB from there on
    tag        label for `symmalloc.sleep(tag)`: 1 to 24 lower-case letters, digits, `_` and `-`
    conf       further configuration of the pool, such as `limit_mb:4096` or `streams:shared`
    device     None: the current one

    After the pool was closed or garbage-collected and its tensors were freed, the next `empty_cache()` releases its memory. A
    pool with windows is not garbage-collected until it is deregistered, because NCCL uses its memory. Raises `NotInstalled`,
    `InvalidSettings`, `OutOfMemory`, `InvalidState` if something else uses addresses of the `base`, and
    `InvalidArgument` for a graph pool without `reserve`, or for both `reserve` and `quota`.
    """

    def __init__(
        self,
        *,
        symmetric: bool = True,
        reserve: int | None = None,
        graphs: bool = False,
        stream: torch.cuda.Stream | None = None,
        quota: int | None = None,
        base: str | int | None = None,
        tag: str | None = None,
        conf: str | None = None,
        device: Device = None,
    ) -> None:
        if graphs and reserve is None:
            raise InvalidArgument("a pool for graphs needs its memory before the capture: give reserve")
        if quota is not None and reserve is not None:
            raise InvalidArgument("resize() sets the size of a pool with a quota: give quota or reserve")
        self.device = device_index(device)
        self.graphs = graphs
        self._allocator = allocator(self.device)
        self.id = self._allocator.create_pool(_pool_conf(symmetric, reserve, quota, base, tag, conf))
        self._on: list[Registered] = []
        # The members of `_on` whose communicator PyTorch may destroy.
        self._groups: list[Member] = []
        self._calls = ScopeCalls()
        self._finalizer = weakref.finalize(self, _destroy, self._allocator, self.id)
        self._finalizer.atexit = False  # the exit of the process releases everything
        _pools[self.device, self.id] = self
        if tag is not None:
            _tagged_devices.add(self.device)
            captured_buffers.turn_off()
        if reserve is not None:
            self.reserve(reserve, _capture_stream() if graphs and stream is None else stream)

    def reserve(self, size_bytes: int, stream: torch.cuda.Stream | None = None) -> None:
        """Reserves memory for later allocations on a stream; None: the current one. The next `sync()` creates its windows.

        A capture cannot create windows: before it, reserve the memory that it will allocate, and sync. Raises `OutOfMemory`.
        """
        self._allocator.reserve(size_bytes, pool=self.id, stream=self._raw_stream(stream))

    def resize(self, size_bytes: int, stream: torch.cuda.Stream | None = None) -> int:
        """Sets the size in bytes of a pool with a `quota`, rounded up to granules (2 MiB). The size is fixed until the next call.

        Tensors stay in place. A shrinking pool waits for the streams that used its free memory. With `SYMMALLOC_CONF=chunk_mb:2`
        it releases memory by granule. Otherwise it releases chunks of up to 32 MiB, and larger ones in pools beyond 2 GiB. Call
        it at the same point on every rank. Returns the bytes that the pool now holds.

        Raises `InvalidState` if live tensors need more, if the pool has no quota, sleeps, or is registered and would shrink; and
        `InvalidArgument` for a size beyond `quota`. The pool is unchanged after these two. Raises `OutOfMemory` if there is no
        memory for the full size; call it again to retry.
        """
        return self._allocator.resize(size_bytes, pool=self.id, stream=self._raw_stream(stream))

    def _raw_stream(self, stream: torch.cuda.Stream | None) -> int:
        if stream is None:
            import torch

            stream = torch.cuda.current_stream(self.device)
        return int(stream.cuda_stream)

    def sleep(self, contents: Contents = Contents.KEEP, *, suspend: bool = False) -> Slept:
        """Puts the pool to sleep: releases its memory to the device. Its tensors keep their addresses.

        suspend   also suspend the communicators of its groups: NCCL releases their memory until the pool wakes, and no collective
                  may run on them until then. See `Allocator.sleep_and_suspend`

        Until the pool wakes, no kernel may use its tensors, and no graph that uses them may be replayed. For a pool with windows
        this is collective: it first deregisters them on every group, and one of these groups must contain the ranks of all
        others. Raises the same errors as `symmalloc.sleep`.
        """
        if not self._on:
            captured_buffers.check_off()
        self._check_groups()
        withdraw_exports(self.device, self.id)
        if suspend:
            return self._allocator.sleep_and_suspend(self.id, contents)
        return self._allocator.sleep(self.id, contents)

    def wake(self) -> Woken:
        """Wakes the pool on all ranks of its groups or on none, and restores its windows. Raises as `symmalloc.wake` does."""
        self._check_groups()
        return self._allocator.wake(self.id)

    @property
    def phase(self) -> Phase:
        """The sleep state of the pool."""
        return self._allocator.phase(self.id)

    def digest(self) -> int:
        """Returns the 64-bit digest of the pool's history.

        Ranks have equal digests exactly when their ops and placements are equal.
        """
        return self._allocator.digest(self.id)

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns the pool's current segments in the format of `torch.cuda.MemPool.snapshot()`.

        A segment has `address`, `total_size`, and `blocks` with their `address`, `size` and `state`.
        """
        segments: list[dict[str, Any]] = self._allocator.snapshot()["segments"]
        return [segment for segment in segments if segment["segment_pool_id"] == (0, self.id)]

    def register(
        self,
        group: ProcessGroup | None = None,
        *,
        comm: Communicator | None = None,
        rank: int | None = None,
        world: int | None = None,
        registration: Registration = Registration.WINDOWS,
        mode: Mode = Mode.AT_SYNC,
        agree_every: int | None = None,
        meet: str | None = None,
        name: str | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> int:
        """Registers the pool's memory on the group's NCCL communicator (None: the default group), or on the program's own.

        comm              a raw `ncclComm_t` instead of the group's. It must stay alive until `deregister(comm=...)` or `close()`,
                          and no other thread may use it during a call of this pool
        rank, world       the expected rank and size of `comm`: a mismatch with NCCL's values is an error
        registration      windows, or plain buffers
        mode              the syncs at which ranks compare their allocations
        agree_every       with `Mode.OFF`: also compare at every n-th sync
        meet              with `comm`: "host:port", a free port of rank 0's machine. The ranks connect there to detect dead peers.
                          None: the ranks use the store of `group` if both `group` and `comm` are given. Otherwise only the
                          deadline detects a dead rank, and does not identify it
        name              the communicator's name in errors and flight records; None: the group's. To sleep, a pool on several raw
                          communicators needs a name for each: equal on all of its ranks, and unique in the job
        deadline_seconds  the time limit for a rank to join a collective

        Collective: every rank calls it at the same point with the same arguments. A pool can be registered on many groups. The
        next `sync()`, or the end of a scope of `use_mem_pool(pool, register=True)`, registers later segments. Returns the number of
        windows created. Raises the same `MisalignedError` on every rank if placements differ, `NcclError` if a rank does not join
        within the deadline, and `TorchError` for a group without NCCL.
        """
        check_raw(group, comm, rank, world)
        if agree_every is not None and (mode is not Mode.OFF or not 0 < agree_every < BY_HAND):
            raise InvalidArgument("agree_every needs Mode.OFF and a number of syncs above 0")
        member = Member(group, comm, self.device)
        if any(member.same(other.member) for other in self._on):
            raise InvalidState("the pool is registered on this group already: sync() registers new segments")
        pointer = member.pointer()
        if any(pointer == other.member.pointer() for other in self._on):
            raise InvalidState("the pool is registered on this communicator already, by its group or its pointer")
        if meet is not None:
            place: bytes | None = meet.encode()
        else:
            place = rendezvous(group) if comm is None or group is not None else None
        options = RegistrarOptionsStruct(
            deadline_ms=int(deadline_seconds * 1000),
            registration=registration.value,
            agree_every=1 if mode is Mode.AT_SYNC else agree_every or BY_HAND,
            rank=rank or 0,
            world=world or 0,
            rendezvous=c_char_p(place),
            name=c_char_p(encoded(name if name is not None else member.name)),
        )
        registrar = c_void_p()
        call("registrar_create_with", self._allocator._handle, self.id, pointer, byref(options), byref(registrar))
        rank_there, ranks = c_uint32(), c_uint32()
        call("registrar_rank", registrar, byref(rank_there), byref(ranks))
        self._on.append(Registered(member, registrar, ranks.value))
        self._note_groups()
        _registered[self] = None
        return _counts("registrar_sync", registrar)[0]

    def sync(self) -> tuple[int, int]:
        """Registers new segments and deregisters dead ones, on every group in order of registration.

        Collective. Returns the numbers of windows created and deregistered. If a group fails, the remaining groups are still
        synced, and the first error is raised: one of `register`'s errors, or `InvalidState` if a group was destroyed.
        """
        self._check_groups()
        return _counts("pool_sync", self._allocator._handle, self.id)

    def agree(self) -> tuple[int, int]:
        """Syncs, and compares the allocations of all ranks of every group, regardless of the mode. Raises as `sync` does."""
        self._check_groups()
        return _counts("pool_agree", self._allocator._handle, self.id)

    def window(
        self, tensor: torch.Tensor, group: ProcessGroup | None = None, *, comm: Communicator | None = None
    ) -> Window:
        """Returns the window on the group's communicator that contains a tensor's bytes, and the offset in it.

        Raises `InvalidState` if no window contains them, or if the pool is not registered there.
        """
        registered = self._registered_on(Member(group, comm, self.device))
        handle, offset = c_void_p(), c_uint64()
        bytes_of = tensor.numel() * tensor.element_size()
        call("registrar_window", registered.registrar, tensor.data_ptr(), bytes_of, byref(handle), byref(offset))
        return Window(handle.value or 0, offset.value)

    def deregister(self, group: ProcessGroup | None = None, *, comm: Communicator | None = None) -> None:
        """Deregisters the pool's windows on the group's communicator.

        Collective: every rank calls it when no collective in the windows is running. Raises `InvalidState` if the pool is not
        registered there, or if the group was destroyed.
        """
        registered = self._registered_on(Member(group, comm, self.device))
        registered.member.check_alive()
        self._end(registered)

    def close(self) -> None:
        """Deregisters the pool on all groups (collective, as `deregister`) and destroys it. Its tensors stay valid.

        Raises `InvalidState` if a group was destroyed before.
        """
        self._check_groups()
        for registered in reversed(list(self._on)):
            self._end(registered)
        if self._finalizer.detach():
            self._allocator.destroy_pool(self.id)

    def is_registered(self) -> bool:
        """Returns `True` if the pool is registered on a communicator."""
        return bool(self._on)

    def _registered_on(self, member: Member) -> Registered:
        for registered in self._on:
            if member.same(registered.member):
                return registered
        raise InvalidState("the pool is not registered on this group")

    def _check_groups(self) -> None:
        for registered in self._on:
            registered.member.check_alive()

    def _note_groups(self) -> None:
        self._groups = [registered.member for registered in self._on if registered.member.backend is not None]

    def _end(self, registered: Registered) -> None:
        self._on.remove(registered)
        self._note_groups()
        if not self._on:
            _registered.pop(self, None)
        registered.end()


def known(device: int, pool: int) -> MemPool | None:
    """Returns the program's pool with this number, or None if it no longer exists."""
    return _pools.get((device, pool))


def add_tagged_device(device: int) -> None:
    """Records that a pool of the device has a tag."""
    _tagged_devices.add(device)


def tagged_devices() -> list[int]:
    """Returns the devices on which the program created a pool with a tag."""
    return sorted(_tagged_devices)


def registered_first(member: Member) -> Registered:
    """Returns the first registration on the group. It belongs to the same pool on every rank."""
    for pool in _registered:
        for registered in pool._on:
            if pool.device == member.device and member.same(registered.member):
                return registered
    raise InvalidState("no pool is registered on this group: call MemPool.register() first")


def _pool_conf(
    symmetric: bool, reserve: int | None, quota: int | None, base: str | int | None, tag: str | None, conf: str | None
) -> str:
    keys = ["symmetric:true"] if symmetric else []
    if base is not None:
        keys += [f"base:{base:#x}" if isinstance(base, int) else f"base:{base}"]
    if tag is not None:
        keys += [f"tag:{tag}"]
    if quota is not None:
        range_bytes = -(-quota // GRANULE_BYTES) * GRANULE_BYTES
        keys += ["segments:expandable", "growth_bytes:0", "streams:shared", f"range_bytes:{range_bytes}"]
    elif reserve is not None:
        segment_bytes = -(-reserve // GRANULE_BYTES) * GRANULE_BYTES
        keys += ["segments:reserved", f"segment_bytes:{segment_bytes}"]
    elif "segments" not in (conf or ""):
        # A window covers a whole segment, and NCCL before 2.30.3 cannot register one that grows.
        keys += ["segments:fixed"]
    return ",".join(keys + ([conf] if conf else []))


def _capture_stream() -> torch.cuda.Stream:
    """Returns the default capture stream of `torch.cuda.graph`, and creates it as that does."""
    import torch

    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    return torch.cuda.graph.default_capture_stream


def _destroy(allocator: Allocator, pool: int) -> None:
    with suppress(Error):  # the process is exiting, or is a fork
        allocator.destroy_pool(pool)


def _counts(name: str, *arguments: Any) -> tuple[int, int]:
    made, gone = c_uint64(), c_uint64()
    call(name, *arguments, byref(made), byref(gone))
    return made.value, gone.value
