"""The region of each thread, and torch_memory_saver's `tms_` functions, which read and change it.

Programs call these functions through `torch_memory_saver._impl._binary_wrapper.cdll`. Most of them exclude the buffers of a
library from the region of the whole process: `tms_set_interesting_region(False)`, the library's constructor, and
`tms_set_interesting_region(True)`.

Each `with` block has a level, and so does the thread. The setters change the innermost level. A level that differs from
its block has a scope of its own, which begins with the change and ends when the change is undone, or with the block. This scope
nests with all other scopes of the thread: a setter that would end it inside a later scope raises `InvalidState`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from . import sleeping
from .devices import device_index
from .errors import InvalidState
from .pool import MemPool
from .scopes import Scope, innermost, use_mem_pool
from .state import allocator

BytePointer = ctypes.POINTER(ctypes.c_uint8)


@dataclass(frozen=True)
class Region:
    """The region of a thread, with the names of `region`'s arguments."""

    interesting: bool
    """`False` outside of all regions."""
    tag: str
    enable_cpu_backup: bool
    cpu_backup_backend: str
    enable_disk_backup: bool = False

    def scope(self) -> AbstractContextManager[None]:
        """Directs this thread's allocations on the current device to the region's pool, or to memory that no pause releases."""
        if not self.interesting:
            return use_mem_pool(_outside_pool(device_index()))
        backend = self.cpu_backup_backend if self.enable_cpu_backup else None
        return sleeping.region(self.tag, self.enable_cpu_backup, self.enable_disk_backup, backend)


_outside: dict[int, MemPool] = {}


def _outside_pool(device: int) -> MemPool:
    """Returns the pool for allocations that no pause may release."""
    with sleeping.creation:
        if (pool := _outside.get(device)) is None:
            pool = _outside[device] = MemPool(symmetric=False, conf="segments:expandable", device=device)
        return pool


class Level:
    """The region of a `with` block, or of a thread."""

    def __init__(self, block: Region) -> None:
        self._block = self.now = block
        self._scope: AbstractContextManager[None] | None = None
        self._innermost: Scope | None = None
        """The scope of the pool in `_scope`."""

    def change(self, to: Region) -> None:
        """Changes the region until the end of the block. If it fails, the block's own region remains.

        Raises `InvalidState`, and changes nothing, inside a scope that began after the last change.
        """
        if to == self.now:
            return
        if self._innermost is not None and innermost(self._innermost.device) is not self._innermost:
            raise InvalidState(
                "another pool's scope began after the last change of the region: end that scope before the next change"
            )
        self.end()
        is_elsewhere = to.interesting or self._block.interesting
        if to != self._block and is_elsewhere:
            device, scope = device_index(), to.scope()
            scope.__enter__()
            self._scope, self._innermost = scope, innermost(device)
        self.now = to

    def end(self) -> None:
        """Undoes all changes."""
        scope, self._scope, self._innermost, self.now = self._scope, None, None, self._block
        if scope is not None:
            scope.__exit__(None, None, None)


class Regions:
    """The levels of each thread."""

    def __init__(self, of_threads: Region) -> None:
        self._of_threads, self._thread = of_threads, threading.local()

    @property
    def now(self) -> Region:
        """The region of this thread."""
        return self._innermost().now

    @contextmanager
    def block(self, **changes: Any) -> Iterator[None]:
        """Adds a level for a `with` block, which directs allocations itself."""
        levels = self._levels()
        level = Level(replace(levels[-1].now, **changes))
        levels.append(level)
        try:
            yield
        finally:
            levels.pop()
            level.end()

    def change(self, **changes: Any) -> None:
        """Changes the region of the innermost block, or of the thread outside of all blocks."""
        level = self._innermost()
        level.change(replace(level.now, **changes))

    def _innermost(self) -> Level:
        return self._levels()[-1]

    def _levels(self) -> list[Level]:
        levels: list[Level] | None = getattr(self._thread, "levels", None)
        if levels is None:
            levels = self._thread.levels = [Level(self._of_threads)]
        return levels


class Saver(Protocol):
    """The part of `symmalloc.torch_memory_saver.Implementation` that the C functions call."""

    retain_cpu_backup: bool
    memory_margin_bytes: int

    def pause(self, tag: str | None = None) -> None: ...
    def resume(self, tag: str | None = None) -> None: ...


class Functions:
    """torch_memory_saver's C functions. Texts are `bytes`, and errors are raised as exceptions, unlike in C."""

    def __init__(self, of: Saver, regions: Regions) -> None:
        self._of, self._regions = of, regions

    def tms_get_interesting_region(self) -> bool:
        return self._regions.now.interesting

    def tms_set_interesting_region(self, value: bool) -> None:
        self._regions.change(interesting=bool(value))

    def tms_get_current_tag(self) -> bytes:
        return self._regions.now.tag.encode()

    def tms_set_current_tag(self, value: bytes) -> None:
        self._regions.change(tag=value.decode())

    def tms_get_enable_cpu_backup(self) -> bool:
        return self._regions.now.enable_cpu_backup

    def tms_set_enable_cpu_backup(self, value: bool) -> None:
        self._regions.change(enable_cpu_backup=bool(value))

    def tms_get_cpu_backup_backend(self) -> bytes:
        return self._regions.now.cpu_backup_backend.encode()

    def tms_set_cpu_backup_backend(self, value: bytes) -> None:
        self._regions.change(cpu_backup_backend=value.decode())

    def tms_get_enable_disk_backup(self) -> bool:
        return self._regions.now.enable_disk_backup

    def tms_set_enable_disk_backup(self, value: bool) -> None:
        self._regions.change(enable_disk_backup=bool(value))

    def tms_set_disk_backup_dir(self, path: bytes) -> None:
        sleeping.set_backup_folder(path.decode())

    def tms_get_retain_cpu_backup(self) -> bool:
        return self._of.retain_cpu_backup

    def tms_set_retain_cpu_backup(self, value: bool) -> None:
        self._of.retain_cpu_backup = bool(value)

    def tms_pause(self, tag: bytes | None) -> int:
        self._of.pause(None if tag is None else tag.decode())
        return 0

    def tms_resume(self, tag: bytes | None) -> int:
        self._of.resume(None if tag is None else tag.decode())
        return 0

    def tms_get_cpu_backup_pointer(self, pointer: Any, size_bytes: int) -> Any:
        """Returns a pointer to the backup of memory on the current device; a null pointer if there is none."""
        address = pointer if isinstance(pointer, int) else ctypes.cast(pointer, ctypes.c_void_p).value or 0
        return ctypes.cast(allocator(device_index()).saved_pointer(address, size_bytes), BytePointer)

    def set_memory_margin_bytes(self, value: int) -> None:
        self._of.memory_margin_bytes = value


@dataclass(frozen=True)
class BinaryWrapper:
    """The object by which programs reach the C functions."""

    cdll: Functions
    _regions: Regions

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Changes the region of the innermost block or of the thread at once; `cpu_backup_backend=None` keeps the backend."""
        backend = self._regions.now.cpu_backup_backend if cpu_backup_backend is None else cpu_backup_backend
        to = Region(interesting_region, tag, enable_cpu_backup, backend, enable_disk_backup)
        self._regions.change(**vars(to))
