"""Communicators that other code owns: groups of PyTorch's, and raw `ncclComm_t` of engines.

PyTorch makes a group's communicator at its first collective, and may destroy it at any time. A raw one is the program's: it lives
until what is registered on it was deregistered.
"""

from __future__ import annotations

import os
import socket
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument, InvalidState, TorchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Communicator = int | c_void_p
"""An `ncclComm_t`, as a number or as ctypes has it: what vLLM's and SGLang's `PyNcclCommunicator.comm` is."""


class Member:
    """This rank of a communicator, on one device: of a group (None: the default one), or a raw one."""

    def __init__(self, group: ProcessGroup | None, comm: Communicator | None, device: int) -> None:
        self.device = device
        self.backend = None if comm is not None else nccl_backend(group, device)
        self._pointer = None if comm is None else _pointer(comm)
        self._name = None if comm is not None else _group_name(group)

    @property
    def name(self) -> str | None:
        """What all ranks of the group call it, and no other group; None for a raw one, whose name is the program's to give."""
        return self._name

    def is_of(self, backend: Any, pointer: int | None) -> bool:
        """Whether it is the group of this backend, or this communicator."""
        return (backend is not None and backend is self.backend) or (pointer is not None and pointer == self._pointer)

    def same(self, other: Member) -> bool:
        return self.is_of(other.backend, other._pointer)

    def pointer(self) -> int:
        """The `ncclComm_t`. A group's is made if there is none yet: every rank comes here."""
        if self._pointer is None:
            self._pointer = _communicator(self.backend, self.device)
        return self._pointer

    def is_as_it_was(self) -> bool:
        """Returns `True` if the group's communicator is certainly alive.

        PyTorch's older backend answers for the current device alone, which is the pool's as a rule.
        """
        return self.backend is None or _current_pointer(self.backend) == self._pointer

    def check_alive(self) -> None:
        """Raises `InvalidState` if the group's communicator is gone, and the windows with it: nobody may touch it then."""
        if self.backend is not None:
            check_alive(self.backend, self.device, self._pointer)


def check_raw(group: ProcessGroup | None, comm: Communicator | None, rank: int | None, world: int | None) -> None:
    """Refuses arguments that do not belong together."""
    if (rank is None) != (world is None):
        raise InvalidArgument("rank and world come together: give both, or neither")
    if comm is None and rank is not None:
        raise InvalidArgument("rank and world say what a raw communicator is: give comm, or leave them out")
    if comm is not None and not _pointer(comm):
        raise InvalidArgument("comm is a null ncclComm_t: connect it first")
    if rank is not None and world is not None and not 0 <= rank < world:
        raise InvalidArgument(f"rank {rank} of {world}: give a rank below the number of ranks")


def _pointer(comm: Communicator) -> int:
    return comm if isinstance(comm, int) else comm.value or 0


def nccl_backend(group: ProcessGroup | None, device: int) -> Any:
    """The group's backend for CUDA tensors. Raises `TorchError` where that is not NCCL."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise TorchError("windows need NCCL: call torch.distributed.init_process_group() first, or give comm")
    process_group = group if group is not None else dist.group.WORLD
    try:
        backend = process_group._get_backend(torch.device("cuda", device))
    except RuntimeError as error:
        raise TorchError(f"the group has no backend for CUDA tensors: {error}") from error
    if not hasattr(backend, "_comm_ptr"):
        raise TorchError(f"windows need a group with NCCL; this one has {backend.name()}")
    return backend


def _group_name(group: ProcessGroup | None) -> str | None:
    import torch.distributed as dist

    name = getattr(group if group is not None else dist.group.WORLD, "group_name", None)
    return None if name is None else f"group {name}"


def check_alive(backend: Any, device: int, known: int | None = None) -> None:
    """Raises `InvalidState` if the group has no communicator, or another one than the known one."""
    import torch

    with torch.cuda.device(device):
        pointer = _current_pointer(backend)
    if not pointer:
        raise InvalidState(
            "a group was destroyed with the pool's windows on it: call close() or deregister() before destroy_process_group()"
        )
    if known and pointer != known:
        raise InvalidState(
            "a group was given another communicator (reconfigure, shrink) with the pool's windows on the old one: call deregister() "
            "before, and register() afterwards"
        )


def _current_pointer(backend: Any) -> int:
    """Returns the `ncclComm_t` of a process group; 0 if it has none.

    `ProcessGroupNCCL` raises without one. `ProcessGroupNCCL2`, which is "nccl" from PyTorch 2.15 on, may do either.
    """
    try:
        return int(backend._comm_ptr() or 0)
    except RuntimeError:
        return 0


def _communicator(backend: Any, device: int) -> int:
    """Returns the `ncclComm_t` of a process group. PyTorch makes it at the first collective; here it is made now."""
    import torch

    with torch.cuda.device(device):
        if not _current_pointer(backend):
            backend.eager_connect_single_device(torch.device("cuda", device))
        if pointer := _current_pointer(backend):
            return pointer
    # A lazy group has a communicator for each pair of ranks, and none for all.
    raise TorchError(f"the group's backend {backend.name()} has no communicator of all ranks: use the backend nccl")


# How often this process has met on each group, which is equal on all of the group's ranks.
_meetings: dict[str, int] = {}


def rendezvous(group: ProcessGroup | None) -> bytes | None:
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
