"""A deterministic caching allocator under PyTorch: equal places on every rank, less memory reserved.

    import torch, symmalloc
    symmalloc.install()

See docs/pytorch.md in the repository.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .agreement import assert_aligned
from .all_to_all import Work, all_to_all_single, exchange_splits
from .allocator import Allocator, Contents, Phase, Placement, Slept, StepReport, Woken
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
    TorchError,
    TransportError,
    UnknownPointer,
    UnknownPool,
)
from .installation import allocator, has_class, install, installed
from .library import VERSION as __version__
from .library import library_path, text
from .naming import named
from .pool import MemPool, Mode, Registration, Window, use_mem_pool
from .showing import MemoryTable, show
from .sleeping import pause, region, resume, sleep, wake
from .steps import Step, last_step, step

if TYPE_CHECKING:
    import torch

__all__ = [
    "Allocator", "Contents", "CudaError", "Device", "Error", "FileError", "InternalError", "InvalidArgument", "InvalidSettings",
    "InvalidState", "LibraryNotFound", "MemPool", "MemoryTable", "MisalignedError", "Mode", "NcclError", "NotInstalled",
    "OutOfMemory", "Phase", "Placement", "Registration", "Slept", "Step", "StepReport", "TorchError", "TransportError",
    "UnknownPointer", "UnknownPool", "Window", "Woken", "Work", "__version__", "all_to_all_single", "allocator", "announce",
    "assert_aligned", "digest", "dump_snapshot", "exchange_splits", "flight_record", "has_class", "install", "installed",
    "last_step", "library_path", "named", "pause", "placement", "region", "resume", "show", "sleep", "snapshot", "start_trace",
    "stats", "step", "stop_trace", "use_mem_pool", "wake",
]  # fmt: skip


def stats(device: Device = None) -> dict[str, Any]:
    """Counters of a device's allocator, total and per pool, with PyTorch's names. Raises `NotInstalled`."""
    return allocator(device).stats()


def snapshot(device: Device = None) -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot()` returns, for one device. Raises `NotInstalled`."""
    return allocator(device).snapshot()


def dump_snapshot(path: str | os.PathLike[str], device: Device = None) -> None:
    """Writes a snapshot for https://pytorch.org/memory_viz and `torch.cuda._memory_viz`. Raises `NotInstalled`."""
    import pickle

    Path(path).write_bytes(pickle.dumps(snapshot(device)))


def flight_record(path: str | os.PathLike[str] | None = None, *, reason: str = "asked for") -> dict[str, Any]:
    """What this process's groups with windows did last, and what is known of their other ranks; for `symmalloc diff`.

    `path` also writes it there. The watchdog writes a record when a group's sync fails, and at the signal that
    `SYMMALLOC_FLIGHT_SIGNAL` names (`USR1` or `USR2`), to the folder that `SYMMALLOC_FLIGHT_RECORDS` names, by default
    `~/.local/state/symmalloc`.
    """
    import json

    record = text("flight_record", reason.encode())
    if path is not None:
        Path(path).write_text(record)
    return json.loads(record)  # type: ignore[no-any-return]


def digest(device: Device = None, pool: MemPool | None = None) -> int:
    """64 bits over the history of a pool; None: the default pool. Equal on all ranks exactly when their placements are.

    Raises `NotInstalled`.
    """
    return pool.digest() if pool is not None else allocator(device).digest()


def placement(tensor: torch.Tensor) -> Placement:
    """Where a CUDA tensor's storage lies. Raises `NotInstalled`, `UnknownPointer` for memory that is not ours."""
    return allocator(tensor.device).placement_of(tensor.untyped_storage().data_ptr())


def start_trace(path: str | os.PathLike[str], device: Device = None) -> None:
    """Records every op of a device. Raises `NotInstalled`, and `InvalidState` after the first allocation there.

    `install(trace=...)` and `SYMMALLOC_TRACE` do it for all devices and for each rank's file.
    """
    allocator(device).start_trace(path)


def stop_trace(device: Device = None) -> None:
    """Ends a recording; the file is complete afterwards. Raises `NotInstalled`."""
    allocator(device).stop_trace()
