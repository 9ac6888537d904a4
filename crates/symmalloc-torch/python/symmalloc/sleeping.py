"""Sleep and wake of pools by tag: pools release their memory and keep their addresses.

    weights = symmalloc.MemPool(symmetric=False, tag="weights")
    cache = symmalloc.MemPool(symmetric=False, tag="kv_cache")
    ...
    symmalloc.sleep(["weights", "kv_cache"], keep=["weights"])      other programs can use the memory
    symmalloc.wake()                                                tensors and graphs are valid again

    Regions have the names of torch_memory_saver, whose whole interface is in `symmalloc.torch_memory_saver`:

    with symmalloc.region(tag="weights", enable_cpu_backup=True):
        model = load()
    symmalloc.pause("weights")
    symmalloc.resume("weights")
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import captured_buffers
from .allocator import Allocator, Contents, DeviceMemory, Storage, Slept, Woken
from .descriptors import withdraw_exports
from .devices import Device, device_index
from .errors import FileError, InvalidArgument, UnknownPool
from .pool import MemPool, tagged_devices
from .pool import known as known_pool
from .private_folder import PrivateFolder, Untrusted
from .scopes import use_mem_pool
from .state import allocator

BACKENDS = {"pinned": Storage.PINNED, "mmap": Storage.PAGEABLE}


@dataclass(frozen=True)
class Backup:
    """The treatment of a pool's contents during a pause, and the storage for them on the host."""

    contents: Contents
    storage: Storage = Storage.PINNED


creation = threading.Lock()
"""Held by a thread that creates a pool which all threads share: two threads must not both create it."""

# The pools of regions, by tag, backup and device.
_regions: dict[tuple[str, Backup, int], MemPool] = {}

# The backup of each region's and graph's pool, by device and pool.
_backups: dict[tuple[int, int], Backup] = {}

# The tags of the pools of graphs, which PyTorch creates, by device and pool.
_graph_tags: dict[tuple[int, int], str] = {}

# The folder for backups in files.
_backup_folder: str | None = os.environ.get("TMS_DISK_BACKUP_DIR")


def sleep(
    tags: str | Iterable[str] | None = None,
    *,
    keep: bool | str | Iterable[str] | None = None,
    suspend: bool = False,
    device: Device = None,
) -> Slept:
    """Puts the pools with the given tags to sleep, in order of creation: releases their memory to the device.

    tags    one or several; None: all pools that have a tag
    keep    True: keep the contents on the host. False: contents are undefined after wake. Tags: keep the contents of these
            pools only. None: use `enable_cpu_backup` for a region's pool, and keep the contents of others
    suspend also suspend the NCCL communicators of sleeping pools, unless a pool that is awake is registered on them too: NCCL
            releases their memory until a pool of theirs wakes. No collective may run on these groups until then
    device  None: every device that has pools with tags, or else the current one

    Blocks until the device is idle. Until the pools wake, no kernel may use their tensors, and no graph that uses them may be
    replayed. This is not checked. Allocating in a sleeping pool raises; freeing is allowed. Pools that already sleep are
    skipped.

    A pool with windows sleeps on all ranks together: call this at the same point on every rank, when no collective in the
    windows is running. One of the pool's groups must contain the ranks of all others.

    Raises `InvalidState` if NCCL may have registered captured buffers (see `symmalloc.captured_buffers`). Raises `NotInstalled`,
    `UnknownPool` for a tag that no pool has, `InvalidState` during a stream capture or an open step, `MisalignedError` and `NcclError` as `MemPool.register` does, and `CudaError` if the host lacks memory for kept contents.
    The failing pool is then unchanged and the pools before it sleep. Another call continues with the rest. With `suspend`, it
    raises `InvalidState` before NCCL 2.29.7, once the pools sleep.
    """
    names = _names(tags)
    kept = keep if keep is None or isinstance(keep, bool) else frozenset(_names(keep) or ())
    if isinstance(kept, frozenset) and names is not None and not kept <= set(names):
        raise InvalidArgument(f"keep names {sorted(kept - set(names))}, which tags does not: name them in tags as well")
    total = Slept()
    pools = _checked(tagged_pools(device), names, kept if isinstance(kept, frozenset) else None)
    _check_captured_buffers(pools)
    for tagged in pools:
        total += tagged.sleep(tagged.contents(kept))
    if suspend:
        for of in {tagged.device: tagged.of for tagged in pools}.values():
            total += Slept(suspended_bytes=of.suspend())
    return total


def device_memory(device: Device = None) -> DeviceMemory:
    """Returns the used memory of a device by owner: what remains on it while pools sleep. Raises `NotInstalled`, `CudaError`."""
    return allocator(device_index(device)).device_memory()


def wake(tags: str | Iterable[str] | None = None, *, device: Device = None) -> Woken:
    """Wakes the pools with the given tags, in order of creation. Tensors have the same addresses and their kept contents.

    tags, device   as for `sleep`

    If `changed` of the result is not 0, windows have new handles: recapture graphs with collectives in them. If `lost` is not
    0, groups failed during the sleep: register on new ones.

    Raises as `sleep` does, and `OutOfMemory` if the device lacks memory. The failing pool then stays asleep and keeps its
    contents, and the pools before it are awake. Call again to retry.
    """
    total = Woken()
    for tagged in _checked(tagged_pools(device), _names(tags), None):
        total += tagged.wake()
    return total


@contextmanager
def region(
    tag: str = "default",
    enable_cpu_backup: bool = False,
    enable_disk_backup: bool = False,
    cpu_backup_backend: str | None = None,
) -> Iterator[None]:
    """Directs this thread's allocations on the current device to a pool that `pause(tag)` puts to sleep, inside a `with` block.

    tag                 1 to 24 lower-case letters, digits, `_` and `-`
    enable_cpu_backup   restore the contents on `resume(tag)`; otherwise they are undefined
    enable_disk_backup  the same, from an unnamed file in the folder that `set_backup_folder` or `TMS_DISK_BACKUP_DIR` names
    cpu_backup_backend  "pinned": pinned host memory, the fastest. "mmap": pageable memory, which returns to the system on
                        `resume(tag)`. None: "pinned"

    Regions nest. This is torch_memory_saver's `region`. Raises `NotInstalled`, and `InvalidArgument` for two backups, a backend
    without `enable_cpu_backup`, or a backup on disk without a folder.
    """
    backup = backup_of(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
    device = device_index()
    key = (tag, backup, device)
    with use_mem_pool(_regions.get(key) or _region_pool(key)):
        yield


def _region_pool(key: tuple[str, Backup, int]) -> MemPool:
    """Returns the pool of a region. Creates it if needed, once for all threads."""
    tag, backup, device = key
    with creation:
        if (pool := _regions.get(key)) is None:
            pool = MemPool(symmetric=False, tag=tag, conf="segments:expandable", device=device)
            keep_in(allocator(device), device, pool.id, backup)
            _regions[key] = pool
        return pool


def backup_of(cpu: bool, disk: bool, backend: str | None) -> Backup:
    """Returns the backup that `region`'s arguments ask for. Raises `InvalidArgument`."""
    if backend is not None and not cpu:
        raise InvalidArgument("cpu_backup_backend needs enable_cpu_backup=True")
    if backend is not None and backend not in BACKENDS:
        raise InvalidArgument(f"unknown cpu_backup_backend={backend!r} (its default is TMS_INIT_CPU_BACKUP_BACKEND): use 'pinned' or 'mmap'")
    if disk and cpu:
        raise InvalidArgument("enable_cpu_backup and enable_disk_backup exclude each other: use one of them")
    if disk and _backup_folder is None:
        raise InvalidArgument("a backup on disk needs a folder: call torch_memory_saver.set_disk_backup_dir() or symmalloc.sleeping.set_backup_folder(), or set TMS_DISK_BACKUP_DIR")
    if disk:
        return Backup(Contents.KEEP, Storage.FOLDER)
    return Backup(Contents.KEEP, BACKENDS[backend or "pinned"]) if cpu else Backup(Contents.DROP)


def keep_in(of: Allocator, device: int, pool: int, backup: Backup) -> None:
    """Sets the backup of a pool."""
    _backups[device, pool] = backup
    if backup.contents is Contents.KEEP:
        of.save_in(backup.storage, _backup_folder if backup.storage is Storage.FOLDER else None, pool)


def has_backup(device: int, pool: int) -> bool:
    """Returns `True` if the backup of a pool was set."""
    return (device, pool) in _backups


def tag_graph_pool(device: int, pool: int, tag: str) -> None:
    """Gives the pool of a graph, which PyTorch created, a tag for `pause` and `resume`."""
    _graph_tags[device, pool] = tag


def set_backup_folder(path: str | os.PathLike[str]) -> None:
    """Sets the folder for backups in files, and creates it if needed. Only this user may be able to write to it.

    Backups contain weights: each is a file without a name and with permissions for this user only. It disappears with the
    process, and its checksums are verified when it is read. Raises `FileError`.
    """
    global _backup_folder
    folder = Path(os.path.abspath(path))
    try:
        with PrivateFolder.open(folder):
            pass
    except (Untrusted, OSError) as why:
        raise FileError(f"{folder} cannot hold backups: {why}") from why
    _backup_folder = str(folder)
    for (device, pool), backup in _backups.items():
        if backup.storage is Storage.FOLDER:
            allocator(device).save_in(Storage.FOLDER, _backup_folder, pool)


def pause(tag: str | None = None) -> None:
    """Puts the pools with a tag to sleep on all devices; None: with any tag. This is torch_memory_saver's `pause`.

    The arguments of `region` select whether contents are kept. A tag that no pool has is not an error. Raises as `sleep` does,
    and `FileError` if a backup cannot be written.
    """
    pools = [tagged for tagged in tagged_pools() if tag is None or tagged.tag == tag]
    _check_captured_buffers(pools)
    for tagged in pools:
        tagged.sleep(tagged.contents(None))


def resume(tag: str | None = None) -> None:
    """Wakes the pools with a tag on all devices; None: with any tag. This is torch_memory_saver's `resume`.

    Raises as `wake` does, and `FileError` if a backup was modified: that pool stays asleep.
    """
    for tagged in tagged_pools():
        if tag is None or tagged.tag == tag:
            tagged.wake()


@dataclass(frozen=True)
class Tagged:
    """A pool with a tag. Includes the pool of `install("tag:...")`, and pools to which the program has no reference."""

    device: int
    of: Allocator
    pool: int
    tag: str

    def sleep(self, contents: Contents) -> Slept:
        if (known := known_pool(self.device, self.pool)) is not None:
            return known.sleep(contents)
        captured_buffers.check_off()
        withdraw_exports(self.device, self.pool)
        return self.of.sleep(self.pool, contents)

    def is_registered(self) -> bool:
        known = known_pool(self.device, self.pool)
        return known is not None and known.is_registered()

    def wake(self) -> Woken:
        known = known_pool(self.device, self.pool)
        return self.of.wake(self.pool) if known is None else known.wake()

    def contents(self, kept: bool | frozenset[str] | None) -> Contents:
        if kept is None:
            backup = _backups.get((self.device, self.pool))
            return Contents.KEEP if backup is None else backup.contents
        return Contents.KEEP if kept is True or (kept is not False and self.tag in kept) else Contents.DROP


def _check_captured_buffers(pools: list[Tagged]) -> None:
    """Raises `InvalidState` before the first pool sleeps, if one of them could not. See `symmalloc.captured_buffers`."""
    if any(not tagged.is_registered() for tagged in pools):
        captured_buffers.check_off()


def tagged_pools(device: Device = None) -> list[Tagged]:
    """Returns the pools that have a tag, by device and in order of creation."""
    devices = tagged_devices() if device is None else []
    found = []
    for index in devices or [device_index(device)]:
        of = allocator(index)
        # Before the pools are listed, so that a pool that another thread creates meanwhile is not taken for a destroyed one.
        noted = {*_graph_tags, *_backups}
        pools = [(pool["pool"], _graph_tags.get((index, pool["pool"]), pool["tag"])) for pool in of.stats()["pools"]]
        existing = {(index, pool) for pool, _ in pools}
        _forget(key for key in noted - existing if key[0] == index)
        found += [Tagged(index, of, pool, tag) for pool, tag in pools if tag is not None]
    return found


def _forget(pools: Iterable[tuple[int, int]]) -> None:
    """Removes the tags and backups of pools that PyTorch has destroyed. Their numbers are not reused."""
    for key in pools:
        _graph_tags.pop(key, None)
        _backups.pop(key, None)


def _checked(pools: list[Tagged], names: list[str] | None, kept: frozenset[str] | None) -> list[Tagged]:
    """Returns the pools that have one of the names as tag. Raises `UnknownPool` for a name that no pool has."""
    there = {tagged.tag for tagged in pools}
    if unknown := (set(names or ()) | (kept or frozenset())) - there:
        has = f"the existing tags are {sorted(there)}" if there else "no pool has a tag yet"
        raise UnknownPool(f"no pool has the tag {sorted(unknown)[0]!r}; {has}: create one with MemPool(tag=...) or region(tag=...)")
    return [tagged for tagged in pools if names is None or tagged.tag in names]


def _names(tags: str | Iterable[str] | None) -> list[str] | None:
    return None if tags is None else [tags] if isinstance(tags, str) else list(tags)
