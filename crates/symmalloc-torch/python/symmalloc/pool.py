"""Pools of their own, above all for symmetric memory: places equal on all ranks, in NCCL windows.

    pool = symmalloc.MemPool(reserve=1 << 30)        one segment, obtained now; one window for ever
    with symmalloc.use_mem_pool(pool):
        buffer = torch.empty(...)                    lies in the pool, on every rank at the same place
    pool.register()                                  collective: windows on the group's NCCL communicator
    torch.distributed.all_reduce(buffer)             NCCL takes its symmetric kernels

An engine that owns its communicators registers on them, and its scopes end with what is new registered:

    pool.register(comm=pynccl.comm, rank=pynccl.rank, world=pynccl.world_size, mode=symmalloc.Mode.OFF)
    with symmalloc.use_mem_pool(pool, register=True):
        hidden = torch.empty(...)
"""

from __future__ import annotations

import enum
import weakref
from contextlib import suppress
from ctypes import byref, c_char_p, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .allocator import Allocator, Contents, Phase, Slept, Woken
from .communicators import Communicator, Member, check_raw, rendezvous
from .devices import Device, device_index
from .errors import Error, InvalidArgument, InvalidState
from .installation import allocator
from .library import RegistrarOptionsStruct, call, encoded
from .scopes import Scope, ScopeCalls

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

GRANULE_BYTES = 2 << 20
DEADLINE_SECONDS = 60.0
BY_HAND = 0xFFFF_FFFF


class Registration(enum.Enum):
    """How a pool's memory is registered on a communicator."""

    WINDOWS = 0
    """A symmetric window over each segment, made by all ranks together. For symmetric pools."""
    BUFFERS = 1
    """`ncclCommRegister` for each piece of memory: this rank's own matter. For any pool, also one whose segments grow."""


class Mode(enum.Enum):
    """When the ranks of a communicator compare what they allocated in the pool."""

    AT_SYNC = "at_sync"
    """At every sync, in one small collective for which the host waits."""
    OFF = "off"
    """When `agree()` is called, and at every n-th sync with `agree_every=n`. Other syncs talk only when something is new: a
    sync that finds nothing new returns at once. Ranks that differ in *whether* something is new are noticed by the deadline."""


@dataclass(frozen=True)
class Window:
    """A place in an NCCL window: what device code addresses a peer's memory by."""

    handle: int
    """The `ncclWindow_t`."""
    offset_bytes: int
    """From the window's first byte, equal on all ranks."""


@dataclass(eq=False)
class Registered:
    """A pool on a communicator."""

    member: Member
    registrar: c_void_p
    ranks: int
    # What was made on it, by options: given up before the registrar.
    exchanges: dict[int, c_void_p] = field(default_factory=dict)
    is_ended: bool = False

    def end(self) -> None:
        self.is_ended = True
        for all_to_all in self.exchanges.values():
            call("all_to_all_destroy", all_to_all)
        self.exchanges.clear()
        call("registrar_destroy", self.registrar)


# Pools with windows, in the order of registration, which is the same on every rank: NCCL goes on using their memory when the
# program lets go of them.
_registered: dict[MemPool, None] = {}

# The pools of the program, by device and number, and the devices on which it made one with a tag.
_pools: weakref.WeakValueDictionary[tuple[int, int], MemPool] = weakref.WeakValueDictionary()
_tagged_devices: set[int] = set()


class MemPool:
    """A pool of device memory on one device.

    symmetric  all ranks must make the same allocations in it, and get the same places; `assert_aligned` compares it
    reserve    bytes to obtain now, as one segment for the current stream; None: segments come as they are needed
    graphs     its memory is that of CUDA graphs: taken in captures alone, so that what a graph has captured is never given to
               anything else, and freed tensors are taken again by the next capture. Needs `reserve`: nothing can be
               registered in a capture
    stream     what `reserve` is for: a pool has segments of its own for each stream. None: the current one, and for graphs
               the one on which `torch.cuda.graph` captures by itself
    quota      address space for the most that it will ever hold, in bytes: the pool holds what `resize` says, and nothing at first.
               Allocations that find no room in that raise, and nothing but `resize` makes it grow or shrink
    tag        what it is for, 1 to 24 lower-case letters, digits, `_` and `-`: `symmalloc.sleep(tag)` puts pools of a tag to sleep
    conf       further configuration of the pool, as `limit_mb:4096` or `streams:shared`
    device     None: the current one

    When the pool is closed or collected and its tensors are gone, its memory goes back with the next `empty_cache()`. A pool
    with windows is not collected before it is deregistered: NCCL uses its memory. Raises `NotInstalled`, `InvalidSettings`,
    `OutOfMemory`, and `InvalidArgument` for a graph pool without memory, and for one with both `reserve` and `quota`.
    """

    def __init__(
        self,
        *,
        symmetric: bool = True,
        reserve: int | None = None,
        graphs: bool = False,
        stream: torch.cuda.Stream | None = None,
        quota: int | None = None,
        tag: str | None = None,
        conf: str | None = None,
        device: Device = None,
    ) -> None:
        if graphs and reserve is None:
            raise InvalidArgument("a pool for graphs needs its memory before the capture: give reserve")
        if quota is not None and reserve is not None:
            raise InvalidArgument("a pool with a quota holds what resize() says: give quota or reserve")
        self.device = device_index(device)
        self.graphs = graphs
        self._allocator = allocator(self.device)
        self.id = self._allocator.create_pool(_pool_conf(symmetric, reserve, quota, tag, conf))
        self._on: list[Registered] = []
        # Those of them that PyTorch may destroy.
        self._groups: list[Member] = []
        self._calls = ScopeCalls()
        self._finalizer = weakref.finalize(self, _destroy, self._allocator, self.id)
        self._finalizer.atexit = False  # the process gives everything back
        _pools[self.device, self.id] = self
        if tag is not None:
            _tagged_devices.add(self.device)
        if reserve is not None:
            self.reserve(reserve, _capture_stream() if graphs and stream is None else stream)

    def reserve(self, size_bytes: int, stream: torch.cuda.Stream | None = None) -> None:
        """Obtains memory for later allocations on a stream; None: the current one. `sync()` then makes its windows.

        Windows are made before a capture: reserve what it will allocate, and sync. Raises `OutOfMemory`.
        """
        self._allocator.reserve(size_bytes, self._raw_stream(stream), self.id)

    def resize(self, size_bytes: int, stream: torch.cuda.Stream | None = None) -> int:
        """Makes a pool with a `quota` hold so many bytes, rounded up to granules (2 MiB): no more and no less, until the next call.

        Tensors stay where they are. A pool that gets smaller waits for the streams that used its free memory. With
        `SYMMALLOC_CONF=chunk_mb:2` what is given up goes back to the device exactly, otherwise in chunks of up to 32 MiB, larger
        ones in pools beyond 2 GiB. Call it at the same point on every rank. Returns the bytes that the pool holds.

        Raises `InvalidState` when live tensors need more than that, when the pool has no quota, sleeps, or is registered and
        would get smaller; `InvalidArgument` beyond `quota`: it is as it was then. `OutOfMemory` when there is no memory for all of
        it: call it again.
        """
        return self._allocator.resize(size_bytes, self.id, self._raw_stream(stream))

    def _raw_stream(self, stream: torch.cuda.Stream | None) -> int:
        if stream is None:
            import torch

            stream = torch.cuda.current_stream(self.device)
        return int(stream.cuda_stream)

    def sleep(self, contents: Contents = Contents.KEEP) -> Slept:
        """Puts the pool to sleep: its memory goes back to the device, its tensors keep their addresses.

        Until it wakes no kernel may use its tensors, and no graph that uses them may be replayed. Where it has windows this is
        collective: they are taken away first, on every group, and one of the groups must have all ranks of all others.
        Raises as `symmalloc.sleep`.
        """
        self._check_groups()
        return self._allocator.sleep(self.id, contents)

    def wake(self) -> Woken:
        """Wakes the pool, on all ranks of its groups or on none; its windows are made again. Raises as `symmalloc.wake`."""
        self._check_groups()
        return self._allocator.wake(self.id)

    @property
    def phase(self) -> Phase:
        """Whether the pool is awake."""
        return self._allocator.phase(self.id)

    def digest(self) -> int:
        """64 bits over the pool's history: equal on all ranks exactly when ops and placements are."""
        return self._allocator.digest(self.id)

    def snapshot(self) -> list[dict[str, Any]]:
        """The pool's segments now, in the form of `torch.cuda.MemPool.snapshot()`: `address`, `total_size`, and `blocks` with
        their `address`, `size` and `state`."""
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

        comm          a raw `ncclComm_t`, in place of the group's. It lives until `deregister(comm=...)` or `close()`, and no
                      other thread uses it while a call of this pool does
        rank, world   what the program takes `comm` for: an error when NCCL says otherwise
        registration  windows, or plain buffers
        mode          when the ranks compare what they did
        agree_every   with `Mode.OFF`: also at every so many syncs
        meet          with `comm`: "host:port", a free port of rank 0's machine, where the ranks meet to learn which of them died.
                      None: by the store of `group`, if that is given beside `comm`; else a dead rank is noticed by the
                      deadline, without its number
        name          in errors and flight records; None: the group's. With several raw communicators each needs one for the pool to
                      sleep: the same on all of its ranks, and another one than that of any communicator of the job

        Collective: every rank calls it at the same point, with the same arguments. A pool may be registered on many groups.
        Segments that come later are registered at the next `sync()`, or at the end of a scope of
        `use_mem_pool(pool, register=True)`.
        Returns how many windows were made. Raises `MisalignedError` on every rank alike when the ranks placed differently,
        `NcclError` when a rank does not come within the deadline, `TorchError` for a group without NCCL.
        """
        check_raw(group, comm, rank, world)
        if agree_every is not None and (mode is not Mode.OFF or not 0 < agree_every < BY_HAND):
            raise InvalidArgument("agree_every goes with Mode.OFF, and is a number of syncs above 0")
        member = Member(group, comm, self.device)
        if any(member.same(other.member) for other in self._on):
            raise InvalidState("the pool is registered on this group already: sync() registers what is new")
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
        """Registers new segments and deregisters dead ones, on every group in the order of registration.

        Collective. Returns how many windows were made and how many went. When one group fails the others are synced all the
        same, and the first error is raised: as `register`, and `InvalidState` when a group was destroyed.
        """
        self._check_groups()
        return _counts("pool_sync", self._allocator._handle, self.id)

    def agree(self) -> tuple[int, int]:
        """As `sync`, and the ranks of every group compare what they allocated in the pool, whatever the mode."""
        self._check_groups()
        return _counts("pool_agree", self._allocator._handle, self.id)

    def window(
        self, tensor: torch.Tensor, group: ProcessGroup | None = None, *, comm: Communicator | None = None
    ) -> Window:
        """The window of the group's communicator that a tensor's bytes lie in, and where.

        Raises `InvalidState` when they lie in none, and when the pool is not registered there.
        """
        registered = self._registered_on(Member(group, comm, self.device))
        handle, offset = c_void_p(), c_uint64()
        bytes_of = tensor.numel() * tensor.element_size()
        call("registrar_window", registered.registrar, tensor.data_ptr(), bytes_of, byref(handle), byref(offset))
        return Window(handle.value or 0, offset.value)

    def deregister(self, group: ProcessGroup | None = None, *, comm: Communicator | None = None) -> None:
        """Takes the pool's windows off the group's communicator. On every rank, once no collective in them is running.

        Raises `InvalidState` when the pool is not registered there, or the group was destroyed.
        """
        registered = self._registered_on(Member(group, comm, self.device))
        registered.member.check_alive()
        self._end(registered)

    def close(self) -> None:
        """Deregisters everywhere (collective, as `deregister`), then gives the pool up; its tensors stay valid.

        Raises `InvalidState` when a group was destroyed before.
        """
        self._check_groups()
        for registered in reversed(list(self._on)):
            self._end(registered)
        if self._finalizer.detach():
            self._allocator.destroy_pool(self.id)

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


def use_mem_pool(pool: MemPool, *, register: bool = False) -> Scope:
    """This thread's allocations on the pool's device go to the pool. Scopes nest. Threads started inside are not in it.

    register  when the scope ends, what is new in the pool is registered, as by `pool.sync()`: on every group that the pool
              was registered on. Collective then: every rank ends the scope at the same point. With `Mode.OFF` an end that
              finds nothing new costs about a microsecond

    In a capture nothing can be registered: an end that finds nothing new is quiet, and another is an error (`InvalidState`).
    Reserve for the stream that captures, and sync, before the capture. An end with an error inside is a sync as well, since
    the other ranks come to it; the error goes on. Raises `InvalidState` when `register` is asked for and the pool was
    registered nowhere, and outside of a capture for a pool of graphs.
    """
    if register and not pool._on:
        raise InvalidState(
            "the pool is registered nowhere: MemPool.register() comes before use_mem_pool(register=True)"
        )
    return Scope(pool, register)


def known(device: int, pool: int) -> MemPool | None:
    """The program's pool of this number, unless it has let go of it."""
    return _pools.get((device, pool))


def tagged_devices() -> list[int]:
    """The devices on which the program made a pool with a tag."""
    return sorted(_tagged_devices)


def registered_first(member: Member) -> Registered:
    """What was registered on the group first, which is the same pool on every rank."""
    for pool in _registered:
        for registered in pool._on:
            if pool.device == member.device and member.same(registered.member):
                return registered
    raise InvalidState("no pool is registered on this group: MemPool.register() comes first")


def _pool_conf(symmetric: bool, reserve: int | None, quota: int | None, tag: str | None, conf: str | None) -> str:
    keys = ["symmetric:true"] if symmetric else []
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
    """The one that `torch.cuda.graph` takes where the program names none, made as it makes it."""
    import torch

    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    return torch.cuda.graph.default_capture_stream


def _destroy(allocator: Allocator, pool: int) -> None:
    with suppress(Error):  # the process ends, or is a fork
        allocator.destroy_pool(pool)


def _counts(name: str, *arguments: Any) -> tuple[int, int]:
    made, gone = c_uint64(), c_uint64()
    call(name, *arguments, byref(made), byref(gone))
    return made.value, gone.value
