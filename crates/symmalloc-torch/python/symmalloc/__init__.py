"""A deterministic caching allocator for PyTorch: equal placements on every rank, and less reserved memory.

    import torch, symmalloc
    symmalloc.install()

See docs/pytorch.md in the repository.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from .agreement import assert_aligned
from .all_to_all import Work, all_to_all_single, exchange_splits
from .allocator import Allocator, Contents, DeviceMemory, DmaBuf, Phase, Placement, Slept, StepReport, Woken
from .announcement import announce
from .devices import Device
from .errors import (
    CudaError,
    Error,
    FileError,
    InternalError,
    InvalidArgument,
    InvalidSettings,
    InvalidState,
    LibraryNotFound,
    MisalignedError,
    NcclError,
    NotInstalled,
    OutOfMemory,
    ProgramNotFound,
    TorchError,
    TransportError,
    UnknownPointer,
    UnknownPool,
)
from .files import write_whole
from .installation import install
from .library import VERSION as __version__
from .library import library_path, text
from .naming import named
from .pool import MemPool, Mode, Registration, Window
from .scopes import use_mem_pool
from .showing import MemoryTable, show
from .sleeping import device_memory, pause, region, resume, sleep, wake
from .state import allocator, installed
from .steps import Step, last_step, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "Allocator", "Contents", "CudaError", "Device", "DeviceMemory", "DmaBuf", "Error", "FileError", "InternalError", "InvalidArgument", "InvalidSettings",
    "InvalidState", "LibraryNotFound", "MemPool", "MemoryTable", "MisalignedError", "Mode", "NcclError", "NotInstalled",
    "OutOfMemory", "Phase", "Placement", "ProgramNotFound", "Registration", "Slept", "Step", "StepReport", "TorchError", "TransportError",
    "UnknownPointer", "UnknownPool", "Window", "Woken", "Work", "__version__", "all_to_all_single", "allocator", "announce",
    "assert_aligned", "check_memory", "device_memory", "digest", "dma_buf", "dump_snapshot", "exchange_splits", "explain_address",
    "flight_record", "install", "installed",
    "last_step", "library_path", "named", "pause", "placement", "region", "resume", "show", "sleep", "snapshot", "start_trace",
    "stats", "step", "stop_trace", "use_mem_pool", "wake",
]  # fmt: skip


def __dir__() -> list[str]:
    """Returns the names of the API. The package's modules and imports are not part of it."""
    return sorted(__all__)


def stats(device: Device = None) -> dict[str, Any]:
    """Returns the counters of a device's allocator, in total and per pool, under PyTorch's names. Raises `NotInstalled`."""
    return allocator(device).stats()


def check_memory(device: Device = None) -> int:
    """Checks the memory of one device for damage, if `debug` is configured, and returns the number of checked guards.

    Raises `InvalidState` if memory was damaged; the message names the allocation. Raises `NotInstalled`.
    """
    return allocator(device).check_memory()


def explain_address(address: int, device: Device = None) -> str:
    """Returns what the allocator of a device knows about an address: its allocation, the neighbors, and freed allocations.

    Raises `NotInstalled`.
    """
    return allocator(device).explain_address(address)


def snapshot(device: Device = None) -> dict[str, Any]:
    """Returns a snapshot of one device, in the format of `torch.cuda.memory._snapshot()`. Raises `NotInstalled`."""
    return allocator(device).snapshot()


def dump_snapshot(path: str | os.PathLike[str], device: Device = None) -> None:
    """Writes a snapshot for https://pytorch.org/memory_viz and `torch.cuda._memory_viz`, to a file that only this user can read.

    Raises `NotInstalled` and `OSError`.
    """
    import pickle

    write_whole(path, pickle.dumps(snapshot(device)))


def flight_record(
    path: str | os.PathLike[str] | None = None, *, reason: str = "asked for", devices: Sequence[Device] = ()
) -> dict[str, Any]:
    """Returns a flight record: the last collectives of this process's registered groups, and the state of their other ranks.

    path    also write the record to this file, for `symmalloc diff`; None: no file. Only this user can read it
    reason  text for the record
    devices also list the allocations of these devices, for `symmalloc address`

    The watchdog also writes records by itself: when a group's sync fails, and on the signal that `SYMMALLOC_FLIGHT_SIGNAL`
    names (`USR1` or `USR2`). These go to the folder in `SYMMALLOC_FLIGHT_RECORDS`, by default `~/.local/state/symmalloc`.
    """
    record: dict[str, Any] = json.loads(text("flight_record", reason.encode()))
    for device in devices:
        record.setdefault("memory", []).extend(allocator(device).memory_record())
    if path is not None:
        write_whole(path, json.dumps(record, indent=2).encode())
    return record


def digest(device: Device = None, pool: MemPool | None = None) -> int:
    """Returns the 64-bit digest of a pool's history. `None` is the default pool.

    If digests are equal, all placements are equal. The reverse does not hold: a digest also covers the configuration and
    refused requests. Raises `NotInstalled`.
    """
    return pool.digest() if pool is not None else allocator(device).digest()


def placement(tensor: torch.Tensor) -> Placement:
    """Returns the segment and offset of a CUDA tensor's storage.

    Raises `InvalidArgument` if it is not a CUDA tensor, `NotInstalled`, and `UnknownPointer` for another allocator's memory.
    """
    if not hasattr(tensor, "untyped_storage"):
        raise InvalidArgument(f"placement() got {type(tensor).__name__}: give a CUDA tensor")
    return allocator(tensor.device).placement_of(tensor.untyped_storage().data_ptr())


def dma_buf(tensor: torch.Tensor) -> DmaBuf:
    """Creates a dma-buf of a CUDA tensor's storage, for libraries that register memory with network cards.

    Keep the tensor alive while the memory is registered. Raises `InvalidArgument` if it is not a CUDA tensor, `NotInstalled`, and the
    errors of `Allocator.dma_buf`.
    """
    if not hasattr(tensor, "untyped_storage"):
        raise InvalidArgument(f"dma_buf() got {type(tensor).__name__}: give a CUDA tensor")
    storage = tensor.untyped_storage()
    return allocator(tensor.device).dma_buf(storage.data_ptr(), storage.nbytes())


def start_trace(path: str | os.PathLike[str], device: Device = None) -> None:
    """Records every op of a device to a file. Raises `NotInstalled`, and `InvalidState` after the device's first allocation.

    `install(trace=...)` and `SYMMALLOC_TRACE` record all devices, with one file per rank.
    """
    allocator(device).start_trace(path)


def stop_trace(device: Device = None) -> None:
    """Ends a recording and completes its file. Raises `NotInstalled`."""
    allocator(device).stop_trace()
