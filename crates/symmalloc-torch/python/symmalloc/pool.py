"""Pools of their own, above all for symmetric memory: places equal on all ranks, in NCCL windows.

PyTorch's `torch.cuda.MemPool` needs calls that its class for pluggable allocators lacks. These pools are symmalloc's:

    pool = symmalloc.MemPool(reserve=1 << 30)        one segment, obtained now; one window for ever
    with symmalloc.use_mem_pool(pool):
        buffer = torch.empty(...)                    lies in the pool, on every rank at the same place
    pool.register()                                  collective: windows on the group's NCCL communicator
    torch.distributed.all_reduce(buffer)             NCCL takes its symmetric kernels
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from .allocator import Allocator
from .devices import Device, device_index
from .errors import Error, InvalidState, TorchError
from .installation import allocator
from .library import call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GRANULE_BYTES = 2 << 20
DEADLINE_SECONDS = 60.0


# Pools with windows, in the order of registration, which is the same on every rank: NCCL goes on using their memory when the program
# lets go of them.
_registered: dict[MemPool, None] = {}


class MemPool:
    """A pool of device memory on one device.

    symmetric  all ranks must make the same allocations in it, and get the same places; `assert_aligned` compares it
    reserve    bytes to obtain now, as one segment for the current stream; None: segments come as they are needed
    conf       further configuration of the pool, as `limit_mb:4096` or `streams:shared`
    device     None: the current one

    When the pool is closed or collected and its tensors are gone, its memory goes back with the next `empty_cache()`. A pool
    with windows is not collected before it is deregistered: NCCL uses its memory. Raises `NotInstalled`, `InvalidSettings`,
    `OutOfMemory`.
    """

    def __init__(
        self, *, symmetric: bool = True, reserve: int | None = None, conf: str | None = None, device: Device = None
    ) -> None:
        self.device = device_index(device)
        self._allocator = allocator(self.device)
        self.id = self._allocator.create_pool(_pool_conf(symmetric, reserve, conf))
        self._registrars: dict[int, tuple[Any, c_void_p]] = {}
        self._finalizer = weakref.finalize(self, _destroy, self._allocator, self.id)
        self._finalizer.atexit = False  # the process gives everything back
        if reserve is not None:
            import torch

            self._allocator.reserve(reserve, torch.cuda.current_stream(self.device).cuda_stream, self.id)

    def digest(self) -> int:
        """64 bits over the pool's history: equal on all ranks exactly when ops and placements are."""
        return self._allocator.digest(self.id)

    def register(self, group: ProcessGroup | None = None, *, deadline_seconds: float = DEADLINE_SECONDS) -> int:
        """Registers the pool's segments as windows on the group's NCCL communicator; None: the default group.

        Collective: every rank of the group calls it at the same point. Segments that come later get their windows at
        the next `sync()`. Returns how many windows were made. Raises `MisalignedError` on every rank alike when the ranks
        placed differently, `NcclError` when a rank does not come within the deadline, `TorchError` for a group without NCCL.
        """
        backend = _nccl_backend(group, self.device)
        if id(backend) in self._registrars:
            raise InvalidState("the pool is registered on this group already: sync() registers what is new")
        registrar = c_void_p()
        communicator = _communicator(backend, self.device)
        call(
            "registrar_create",
            self._allocator._handle,
            self.id,
            communicator,
            int(deadline_seconds * 1000),
            _rendezvous(group),
            byref(registrar),
        )
        self._registrars[id(backend)] = backend, registrar
        _registered[self] = None
        return _sync(registrar)[0]

    def sync(self) -> tuple[int, int]:
        """Registers new segments and deregisters dead ones, on every group in the order of registration.

        Collective. Returns how many windows were made and how many went. Raises as `register`, and `InvalidState` when a
        group was destroyed.
        """
        self._check_groups()
        counts = [_sync(registrar) for _, registrar in self._registrars.values()]
        return sum(made for made, _ in counts), sum(gone for _, gone in counts)

    def deregister(self, group: ProcessGroup | None = None) -> None:
        """Takes the pool's windows off the group's communicator. On every rank, once no collective in them is running.

        Raises `InvalidState` when the pool is not registered there, or the group was destroyed.
        """
        backend = _nccl_backend(group, self.device)
        if id(backend) not in self._registrars:
            raise InvalidState("the pool is not registered on this group")
        _check_alive(backend, self.device)
        self._end(id(backend))

    def close(self) -> None:
        """Deregisters everywhere (collective, as `deregister`), then gives the pool up; its tensors stay valid.

        Raises `InvalidState` when a group was destroyed before.
        """
        self._check_groups()
        for key in reversed(list(self._registrars)):
            self._end(key)
        if self._finalizer.detach():
            self._allocator.destroy_pool(self.id)

    def _check_groups(self) -> None:
        for backend, _ in self._registrars.values():
            _check_alive(backend, self.device)

    def _end(self, key: int) -> None:
        _, registrar = self._registrars.pop(key)
        if not self._registrars:
            _registered.pop(self, None)
        call("registrar_destroy", registrar)


@contextmanager
def use_mem_pool(pool: MemPool) -> Iterator[None]:
    """This thread's allocations on the pool's device go to the pool. Scopes nest. Threads started inside are not in it."""
    call("torch_push_pool", pool.device, pool.id)
    try:
        yield
    finally:
        call("torch_pop_pool", pool.device)


@contextmanager
def announce(
    kind: str,
    *,
    elements: int | None = None,
    stream: torch.cuda.Stream | None = None,
    group: ProcessGroup | None = None,
    device: Device = None,
) -> Iterator[None]:
    """Tells the watchdog of a collective that the program submits by other means, inside the `with`:

        with symmalloc.announce("all_reduce", elements=gradients.numel()):
            torch.distributed.all_reduce(gradients)

    The group (None: the default one) is one on which a pool is registered; every rank announces the same in the same order. It is
    numbered among the group's collectives in flight records and has the deadline of `register()`: a rank that does not come is
    named on the error output, in a flight record and at the next `sync()`. Nothing of the group is aborted.

    kind      what it is, in flight records: the same on every rank
    elements  how large, the same on every rank; None where ranks may differ
    stream    the one that it ends on; None: the current one, which PyTorch's collectives join unless `async_op` is given
    device    None: the current one

    Raises `InvalidState` when no pool is registered on the group, `NcclError` when its communicator failed before: what is inside
    is not run then.
    """
    index = device_index(device)
    registrar = _registrar(_nccl_backend(group, index))
    if stream is None:
        import torch

        stream = torch.cuda.current_stream(index)
    announcement = c_void_p()
    call("announce_begin", registrar, kind.encode(), elements or 0, stream.cuda_stream, byref(announcement))
    try:
        yield
    finally:
        call("announce_end", announcement)


def _registrar(backend: Any) -> c_void_p:
    """Of the pool that was registered on the group first, which is the same one on every rank."""
    for pool in _registered:
        if id(backend) in pool._registrars:
            return pool._registrars[id(backend)][1]
    raise InvalidState("no pool is registered on this group: MemPool.register() comes before announce()")


def _pool_conf(symmetric: bool, reserve: int | None, conf: str | None) -> str:
    keys = ["symmetric:true"] if symmetric else []
    if reserve is not None:
        segment_bytes = -(-reserve // GRANULE_BYTES) * GRANULE_BYTES
        keys += ["segments:reserved", f"segment_bytes:{segment_bytes}"]
    elif "segments" not in (conf or ""):
        # A window covers a whole segment, and NCCL before 2.30.3 cannot register one that grows.
        keys += ["segments:fixed"]
    return ",".join(keys + ([conf] if conf else []))


def _destroy(allocator: Allocator, pool: int) -> None:
    with suppress(Error):  # the process ends, or is a fork
        allocator.destroy_pool(pool)


def _sync(registrar: c_void_p) -> tuple[int, int]:
    made, gone = c_uint64(), c_uint64()
    call("registrar_sync", registrar, byref(made), byref(gone))
    return made.value, gone.value


def _nccl_backend(group: ProcessGroup | None, device: int) -> Any:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise TorchError("windows need NCCL: call torch.distributed.init_process_group() first")
    process_group = group if group is not None else dist.group.WORLD
    try:
        backend = process_group._get_backend(torch.device("cuda", device))
    except RuntimeError as error:
        raise TorchError(f"the group has no backend for CUDA tensors: {error}") from error
    if not hasattr(backend, "_comm_ptr"):
        raise TorchError(f"windows need a group with NCCL; this one has {backend.name()}")
    return backend


# How often this process has met on each group, which is equal on all of the group's ranks.
_meetings: dict[str, int] = {}


def _rendezvous(group: ProcessGroup | None) -> bytes | None:
    """Where the group's ranks meet, to learn of each other's end: a free port of its rank 0, told through its store.

    None where `SYMMALLOC_WATCHDOG=off` says that they need not, on every rank.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    process_group = group if group is not None else dist.group.WORLD
    if dist.get_world_size(process_group) < 2 or os.environ.get("SYMMALLOC_WATCHDOG", "").strip() == "off":
        return None
    store = c10d._get_process_group_store(process_group)
    turn = _meetings[process_group.group_name] = _meetings.get(process_group.group_name, 0) + 1
    key = f"symmalloc/rendezvous/{turn}"
    if dist.get_rank(process_group) == 0:
        store.set(key, f"{_own_address()}:{_free_port()}")
    return bytes(store.get(key))


def _own_address() -> str:
    """The address under which this machine reaches the job's master, and others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _check_alive(backend: Any, device: int) -> None:
    """Raises when the group's communicator is gone, and the pool's windows with it: nobody may touch it then."""
    import torch

    with torch.cuda.device(device):
        try:
            backend._comm_ptr()
        except RuntimeError as error:
            raise InvalidState(
                "a group was destroyed with the pool's windows on it: call close() or deregister() before "
                "destroy_process_group()"
            ) from error


def _communicator(backend: Any, device: int) -> int:
    """The ncclComm_t of a process group. PyTorch makes it at the first collective; here it is made now."""
    import torch

    with torch.cuda.device(device):
        if not backend._comm_ptr():
            backend.eager_connect_single_device(torch.device("cuda", device))
        return int(backend._comm_ptr())
