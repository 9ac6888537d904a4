"""Communicators that other code owns: PyTorch's process groups, and raw `ncclComm_t` handles of inference engines.

PyTorch creates a group's communicator at its first collective, and may destroy it at any time. The program owns a raw
communicator, and must keep it alive until everything that is registered on it was deregistered.
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
"""An `ncclComm_t`, as an int or a ctypes pointer, such as `PyNcclCommunicator.comm` of vLLM and SGLang."""


class Member:
    """This rank's membership in a communicator on one device: a group's (None: the default group), or a raw one."""

    def __init__(self, group: ProcessGroup | None, comm: Communicator | None, device: int) -> None:
        self.device = device
        self.backend = None if comm is not None else nccl_backend(group, device)
        self._pointer = None if comm is None else _pointer(comm)
        self._name = None if comm is not None else _group_name(group)

    @property
    def name(self) -> str | None:
        """The group's unique name, equal on all of its ranks; None for a raw communicator, which the program names."""
        return self._name

    def is_of(self, backend: Any, pointer: int | None) -> bool:
        """Returns `True` if the member has this backend or this communicator."""
        return (backend is not None and backend is self.backend) or (pointer is not None and pointer == self._pointer)

    def same(self, other: Member) -> bool:
        return self.is_of(other.backend, other._pointer)

    def pointer(self) -> int:
        """Returns the `ncclComm_t`. Creates a group's communicator if it has none, which is collective."""
        if self._pointer is None:
            self._pointer = _communicator(self.backend, self.device)
        return self._pointer

    def is_as_it_was(self) -> bool:
        """Returns `True` if the group's communicator is known to be alive.

        PyTorch's older backend reports only the communicator of the current device, which is usually the pool's device.
        """
        return self.backend is None or _current_pointer(self.backend) == self._pointer

    def check_alive(self) -> None:
        """Raises `InvalidState` if the group's communicator was destroyed. The communicator and its windows are then unusable."""
        if self.backend is not None:
            check_alive(self.backend, self.device, self._pointer)


def check_raw(group: ProcessGroup | None, comm: Communicator | None, rank: int | None, world: int | None) -> None:
    """Raises `InvalidArgument` for arguments that contradict each other."""
    if (rank is None) != (world is None):
        raise InvalidArgument("rank and world go together: give both, or neither")
    if comm is None and rank is not None:
        raise InvalidArgument("rank and world describe a raw communicator: give comm, or leave them out")
    if comm is not None and not _pointer(comm):
        raise InvalidArgument("comm is a null ncclComm_t: connect it first")
    if rank is not None and world is not None and not 0 <= rank < world:
        raise InvalidArgument(f"rank {rank} of {world}: give a rank below the number of ranks")


def _pointer(comm: Communicator) -> int:
    return comm if isinstance(comm, int) else comm.value or 0


def nccl_backend(group: ProcessGroup | None, device: int) -> Any:
    """Returns the group's backend for CUDA tensors. Raises `TorchError` if that is not NCCL."""
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
        raise _no_communicator(backend)
    return backend


def _no_communicator(backend: Any) -> TorchError:
    """Returns the error for a backend of another library, and for "nccl-lazy" where it connects pairs of ranks only."""
    return TorchError(f"the group's backend {backend.name()} has no NCCL communicator of all ranks: use the backend nccl")


def _group_name(group: ProcessGroup | None) -> str | None:
    import torch.distributed as dist

    name = getattr(group if group is not None else dist.group.WORLD, "group_name", None)
    return None if name is None else f"group {name}"


def check_alive(backend: Any, device: int, known: int | None = None) -> None:
    """Raises `InvalidState` if the group has no communicator, or one that differs from `known`."""
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

    `ProcessGroupNCCL` raises without one. `ProcessGroupNCCL2`, the "nccl" backend since PyTorch 2.15, may raise or return 0.
    """
    try:
        return int(backend._comm_ptr() or 0)
    except RuntimeError:
        return 0


def _communicator(backend: Any, device: int) -> int:
    """Returns the `ncclComm_t` of a process group, and creates it without waiting for the first collective."""
    import torch

    with torch.cuda.device(device):
        if not _current_pointer(backend):
            backend.eager_connect_single_device(torch.device("cuda", device))
        if pointer := _current_pointer(backend):
            return pointer
    raise _no_communicator(backend)


# The number of calls of `rendezvous` on each group, which is equal on all of the group's ranks.
_meetings: dict[str, int] = {}


def rendezvous(group: ProcessGroup | None) -> bytes | None:
    """Returns the address where the group's ranks connect to detect dead peers, as `host:port`.

    Rank 0 chooses a free port and publishes it in the group's store. Returns None for a single rank, and if
    `SYMMALLOC_WATCHDOG=off`, which must be set on every rank or on none.
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
    """Returns this machine's address on the network of the job's master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
