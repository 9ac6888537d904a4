"""The C library: its path, the types of its functions (`include/symmalloc.h`), and its failures as exceptions."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from . import errors

LIBRARY = "libsymmalloc_torch.so"
VERSION = "0.1.0"

GatherFunction = ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(ctypes.c_uint8), c_size_t, POINTER(ctypes.c_uint8))
"""`gather(context, mine, len, all)` fills `all` with every rank's `len` bytes, in rank order. Returns 0 on success."""


class PlacementStruct(ctypes.Structure):
    """symmalloc_placement in the header."""

    _fields_ = [
        ("pool", c_uint32),
        ("stream", c_uint32),
        ("segment", c_uint64),
        ("offset_bytes", c_uint64),
        ("size_bytes", c_uint64),
        ("requested_bytes", c_uint64),
    ]


class StepReportStruct(ctypes.Structure):
    """symmalloc_step_report in the header."""

    _fields_ = [
        ("allocations", c_uint64),
        ("planned", c_uint64),
        ("plan_bytes", c_uint64),
        ("differs_at", c_uint64),
    ]


class SleptStruct(ctypes.Structure):
    """symmalloc_slept in the header."""

    _fields_ = [
        ("released_bytes", c_uint64),
        ("kept_bytes", c_uint64),
        ("deregistrations", c_uint64),
        ("suspended_bytes", c_uint64),
    ]


class WokenStruct(ctypes.Structure):
    """symmalloc_woken in the header."""

    _fields_ = [
        ("remapped_bytes", c_uint64),
        ("registrations", c_uint64),
        ("changed", c_uint64),
        ("lost", c_uint64),
        ("resumed", c_uint64),
    ]


class MemoryStruct(ctypes.Structure):
    """symmalloc_memory in the header."""

    _fields_ = [
        ("used_bytes", c_uint64),
        ("awake_bytes", c_uint64),
        ("graph_bytes", c_uint64),
        ("asleep_bytes", c_uint64),
        ("exported_bytes", c_uint64),
        ("idle_bytes", c_uint64),
        ("communicators_bytes", c_uint64),
        ("other_bytes", c_uint64),
    ]


class PropertiesStruct(ctypes.Structure):
    """symmalloc_properties in the header."""

    _fields_ = [("is_expandable", c_bool), ("learns_plans", c_bool)]


class RegistrarOptionsStruct(ctypes.Structure):
    """symmalloc_registrar_options in the header."""

    _fields_ = [
        ("deadline_ms", c_uint32),
        ("registration", c_uint32),
        ("agree_every", c_uint32),
        ("rank", c_uint32),
        ("world", c_uint32),
        ("rendezvous", c_char_p),
        ("name", c_char_p),
    ]


# Functions that return a symmalloc_status.
CALLS: dict[str, list[Any]] = {
    "create": [c_int32, c_char_p, POINTER(c_void_p)],
    "destroy": [c_void_p],
    "allocate": [c_void_p, c_uint32, c_void_p, c_size_t, POINTER(c_void_p)],
    "allocate_named": [c_void_p, c_uint32, c_void_p, c_size_t, c_char_p, POINTER(c_void_p)],
    "free": [c_void_p, c_void_p],
    "record_use": [c_void_p, c_void_p, c_void_p],
    "register_stream": [c_void_p, c_void_p],
    "register_stream_in": [c_void_p, c_void_p, c_void_p],
    "allocate_unordered": [c_void_p, c_size_t, POINTER(c_void_p)],
    "free_unordered": [c_void_p, c_void_p],
    "free_on": [c_void_p, c_void_p, c_void_p],
    "ort_use_stream": [c_int32, c_void_p],
    "pool_create": [c_void_p, c_char_p, POINTER(c_uint32)],
    "pool_create_with_key": [c_void_p, c_uint32, c_char_p],
    "pool_reset": [c_void_p, c_uint32, POINTER(c_uint64)],
    "pool_destroy": [c_void_p, c_uint32],
    "reserve": [c_void_p, c_uint32, c_void_p, c_size_t],
    "sleep": [c_void_p, c_uint32, c_uint32, POINTER(SleptStruct)],
    "sleep_and_suspend": [c_void_p, c_uint32, c_uint32, POINTER(SleptStruct)],
    "suspend": [c_void_p, POINTER(c_uint64)],
    "device_memory": [c_void_p, POINTER(MemoryStruct)],
    "wake": [c_void_p, c_uint32, POINTER(WokenStruct)],
    "phase": [c_void_p, c_uint32, POINTER(c_uint32)],
    "save_in": [c_void_p, c_uint32, c_uint32, c_char_p],
    "retain_saved": [c_void_p, c_uint32, c_uint32],
    "saved_pointer": [c_void_p, c_void_p, c_size_t, POINTER(c_void_p)],
    "saved_copy": [c_void_p, c_void_p, c_size_t, c_void_p, POINTER(c_uint32)],
    "resize": [c_void_p, c_uint32, c_void_p, c_size_t, POINTER(c_uint64)],
    "reserve_host_memory": [c_void_p, c_size_t],
    "release_host_memory": [c_void_p, POINTER(c_uint64)],
    "trim": [c_void_p, POINTER(c_uint64)],
    "trim_private": [c_void_p, POINTER(c_uint64)],
    "grant_access": [c_void_p, c_int32],
    "dma_buf_open": [c_void_p, c_void_p, c_size_t, POINTER(c_int32), POINTER(c_uint64), POINTER(c_void_p)],
    "dma_buf_is_current": [c_void_p, POINTER(c_uint32)],
    "dma_buf_close": [c_void_p],
    "step_begin": [c_void_p, c_uint32, c_uint64],
    "step_end": [c_void_p, c_uint32, POINTER(StepReportStruct)],
    "plans_adopt": [c_void_p, c_uint32, c_char_p, POINTER(c_uint32)],
    "plans_drop": [c_void_p, c_uint32],
    "placement_of": [c_void_p, c_void_p, POINTER(PlacementStruct)],
    "stats_json": [c_void_p, POINTER(c_void_p)],
    "reset_peaks": [c_void_p],
    "digest": [c_void_p, c_uint32, POINTER(c_uint64)],
    "snapshot": [c_void_p, POINTER(c_void_p), POINTER(c_size_t)],
    "check_memory": [c_void_p, POINTER(c_uint64)],
    "explain_address": [c_void_p, c_uint64, POINTER(c_void_p)],
    "memory_record": [c_void_p, POINTER(c_void_p)],
    "leak_report": [c_void_p, POINTER(c_void_p)],
    "config": [c_void_p, POINTER(c_void_p)],
    "trace_start": [c_void_p, c_char_p],
    "trace_stop": [c_void_p],
    "agree": [c_void_p, c_uint32, c_uint32, GatherFunction, c_void_p],
    "agree_all": [c_void_p, c_uint32, c_uint32, GatherFunction, c_void_p],
    "registrar_create": [c_void_p, c_uint32, c_void_p, c_uint32, c_char_p, POINTER(c_void_p)],
    "registrar_create_with": [c_void_p, c_uint32, c_void_p, POINTER(RegistrarOptionsStruct), POINTER(c_void_p)],
    "registrar_sync": [c_void_p, POINTER(c_uint64), POINTER(c_uint64)],
    "registrar_agree": [c_void_p, POINTER(c_uint64), POINTER(c_uint64)],
    "registrar_rank": [c_void_p, POINTER(c_uint32), POINTER(c_uint32)],
    "registrar_window": [c_void_p, c_void_p, c_size_t, POINTER(c_void_p), POINTER(c_uint64)],
    "registrar_destroy": [c_void_p],
    "pool_sync": [c_void_p, c_uint32, POINTER(c_uint64), POINTER(c_uint64)],
    "pool_agree": [c_void_p, c_uint32, POINTER(c_uint64), POINTER(c_uint64)],
    "scope_begin": [c_int32, c_uint32],
    "scope_end": [c_int32, c_uint32, POINTER(c_uint64), POINTER(c_uint64)],
    "all_to_all_create": [c_void_p, c_uint32, POINTER(c_void_p)],
    "all_to_all_exchange": [c_void_p, POINTER(c_uint64), POINTER(c_uint64)],
    "all_to_all_run": [
        c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, POINTER(c_uint64), POINTER(c_uint64),
    ],
    "all_to_all_destroy": [c_void_p],
    "announce_begin": [c_void_p, c_char_p, c_uint64, c_void_p, POINTER(c_void_p)],
    "announce_end": [c_void_p],
    "flight_record": [c_char_p, POINTER(c_void_p)],
    "torch_configure": [c_char_p],
    "process_allocator": [c_int32, POINTER(c_void_p)],
    "torch_properties": [POINTER(PropertiesStruct)],
    "torch_push_pool": [c_int32, c_uint32],
    "torch_pop_pool": [c_int32],
    "torch_push_name": [c_int32, c_char_p],
    "torch_pop_name": [c_int32],
}  # fmt: skip


def library_path() -> Path:
    """Returns the path of the library: `SYMMALLOC_LIBRARY` from the environment, or the file in this package.

    Raises `LibraryNotFound`.
    """
    given = os.environ.get("SYMMALLOC_LIBRARY")
    path = Path(given) if given else Path(__file__).resolve().parent / LIBRARY
    if not path.is_file():
        source = "SYMMALLOC_LIBRARY names it" if given else "it belongs to this package"
        raise errors.LibraryNotFound(
            f"{path} is not a file ({source}): install with `pip install ./crates/symmalloc-torch`, or set "
            f"SYMMALLOC_LIBRARY to a {LIBRARY} that cargo built"
        )
    return path


@cache
def library() -> ctypes.CDLL:
    """Loads the library on first use, and returns it. Raises `LibraryNotFound`."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.symmalloc_version.restype = c_char_p
        version = loaded.symmalloc_version().decode()
        if version != VERSION:
            raise errors.LibraryNotFound(f"{path} has version {version}, this package {VERSION}: reinstall both")
        for name, types in CALLS.items():
            function = getattr(loaded, f"symmalloc_{name}")
            function.argtypes, function.restype = types, c_int32
    except (OSError, AttributeError) as error:
        raise errors.LibraryNotFound(f"{path} cannot be used: {error}") from error
    loaded.symmalloc_error_message.restype = c_char_p
    loaded.symmalloc_release_bytes.argtypes, loaded.symmalloc_release_bytes.restype = [c_void_p], None
    return loaded


def call(name: str, *arguments: Any) -> None:
    """Calls `symmalloc_{name}`. Raises the error of its status."""
    loaded = library()
    status = getattr(loaded, f"symmalloc_{name}")(*arguments)
    if status != 0:
        raise failure(name, status)


def failure(name: str, status: int) -> errors.Error:
    """Returns the error for the status of this thread's last call."""
    message = (library().symmalloc_error_message() or b"").decode(errors="replace")
    return errors.BY_STATUS.get(status, errors.Error)(message or f"symmalloc_{name} failed with status {status}")


def text(name: str, *arguments: Any) -> str:
    """Calls a function whose last argument receives a text, and returns the text."""
    out = c_void_p()
    call(name, *arguments, byref(out))
    try:
        return ctypes.string_at(out.value or 0).decode()
    finally:
        library().symmalloc_release_bytes(out)


def data(name: str, *arguments: Any) -> bytes:
    """Calls a function whose last two arguments receive bytes and their number, and returns the bytes."""
    out, length = c_void_p(), c_size_t()
    call(name, *arguments, byref(out), byref(length))
    try:
        return ctypes.string_at(out.value or 0, length.value)
    finally:
        library().symmalloc_release_bytes(out)


def address(name: str) -> int:
    """Returns the address of a library function, for other runtimes."""
    return ctypes.cast(getattr(library(), name), c_void_p).value or 0


def encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
