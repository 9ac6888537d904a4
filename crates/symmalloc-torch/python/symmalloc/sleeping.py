"""Sleep and wake of pools by tag: pools release their memory and keep their addresses.

    weights = symmalloc.MemPool(symmetric=False, tag="weights")
    cache = symmalloc.MemPool(symmetric=False, tag="kv_cache")
    ...
    symmalloc.sleep(["weights", "kv_cache"], keep=["weights"])      other programs can use the memory
    symmalloc.wake()                                                tensors and graphs are valid again

    A program that uses torch_memory_saver only changes an import:

    with symmalloc.region(tag="weights", enable_cpu_backup=True):
        model = load()
    symmalloc.pause("weights")
    symmalloc.resume("weights")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .allocator import Allocator, Contents, Slept, Woken
from .devices import Device, device_index
from .errors import InvalidArgument, UnknownPool
from .installation import allocator
from .pool import MemPool, tagged_devices
from .pool import known as known_pool
from .scopes import use_mem_pool

# The pools of regions, by tag, by whether they keep their contents, and by device.
_regions: dict[tuple[str, bool, int], MemPool] = {}

# The treatment of the contents of each region's pool, by device and pool.
_contents: dict[tuple[int, int], Contents] = {}


def sleep(
    tags: str | Iterable[str] | None = None,
    *,
    keep: bool | str | Iterable[str] | None = None,
    device: Device = None,
) -> Slept:
    """Puts the pools with the given tags to sleep, in order of creation: releases their memory to the device.

    tags    one or several; None: all pools that have a tag
    keep    True: keep the contents on the host. False: contents are undefined after wake. Tags: keep the contents of these
            pools only. None: use `enable_cpu_backup` for a region's pool, and keep the contents of others
    device  None: every device that has pools with tags, or else the current one

    Blocks until the device is idle. Until the pools wake, no kernel may use their tensors, and no graph that uses them may be
    replayed. This is not checked. Allocating in a sleeping pool raises; freeing is allowed. Pools that already sleep are
    skipped.

    A pool with windows sleeps on all ranks together: call this at the same point on every rank, when no collective in the
    windows is running. One of the pool's groups must contain the ranks of all others.

    Raises `NotInstalled`, `UnknownPool` for a tag that no pool has, `InvalidState` during a stream capture or an open step,
    `MisalignedError` and `NcclError` as `MemPool.register` does, and `CudaError` if the host lacks memory for kept contents.
    The failing pool is then unchanged and the pools before it sleep. Another call continues with the rest.
    """
    names = _names(tags)
    kept = keep if keep is None or isinstance(keep, bool) else frozenset(_names(keep) or ())
    if isinstance(kept, frozenset) and names is not None and not kept <= set(names):
        raise InvalidArgument(f"keep names {sorted(kept - set(names))}, which tags does not: name them in tags as well")
    total = Slept()
    for tagged in _checked(_tagged(device), names, kept if isinstance(kept, frozenset) else None):
        total += tagged.sleep(tagged.contents(kept))
    return total


def wake(tags: str | Iterable[str] | None = None, *, device: Device = None) -> Woken:
    """Wakes the pools with the given tags, in order of creation. Tensors have the same addresses and their kept contents.

    tags, device   as for `sleep`

    If `changed` of the result is not 0, windows have new handles: recapture graphs with collectives in them. If `lost` is not
    0, groups failed during the sleep: register on new ones.

    Raises as `sleep` does, and `OutOfMemory` if the device lacks memory. The failing pool then stays asleep and keeps its
    contents, and the pools before it are awake. Call again to retry.
    """
    total = Woken()
    for tagged in _checked(_tagged(device), _names(tags), None):
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
    enable_disk_backup  must be False
    cpu_backup_backend  "pinned" or None

    Regions nest. This is torch_memory_saver's `region`, without backups on disk or in unpinned memory. Raises `NotInstalled`
    and `InvalidArgument`.
    """
    if enable_disk_backup:
        raise InvalidArgument("backups on disk are not supported: use enable_cpu_backup=True, or leave both out")
    if cpu_backup_backend not in (None, "pinned"):
        raise InvalidArgument(f"unsupported cpu_backup_backend={cpu_backup_backend!r}: use 'pinned' or None")
    device = device_index()
    key = (tag, enable_cpu_backup, device)
    if (pool := _regions.get(key)) is None:
        pool = _regions[key] = MemPool(symmetric=False, tag=tag, conf="segments:expandable", device=device)
        _contents[device, pool.id] = Contents.KEEP if enable_cpu_backup else Contents.DROP
    with use_mem_pool(pool):
        yield


def pause(tag: str | None = None) -> None:
    """Puts the pools with a tag to sleep on all devices; None: with any tag. This is torch_memory_saver's `pause`.

    The arguments of `region` select whether contents are kept. A tag that no pool has is not an error. Raises as `sleep` does.
    """
    for tagged in _tagged(None):
        if tag is None or tagged.tag == tag:
            tagged.sleep(tagged.contents(None))


def resume(tag: str | None = None) -> None:
    """Wakes the pools with a tag on all devices; None: with any tag. This is torch_memory_saver's `resume`. Raises as `wake`."""
    for tagged in _tagged(None):
        if tag is None or tagged.tag == tag:
            tagged.wake()


@dataclass(frozen=True)
class _Tagged:
    """A pool with a tag. Includes the pool of `install("tag:...")`, and pools to which the program has no reference."""

    device: int
    of: Allocator
    pool: int
    tag: str

    def sleep(self, contents: Contents) -> Slept:
        known = known_pool(self.device, self.pool)
        return self.of.sleep(self.pool, contents) if known is None else known.sleep(contents)

    def wake(self) -> Woken:
        known = known_pool(self.device, self.pool)
        return self.of.wake(self.pool) if known is None else known.wake()

    def contents(self, kept: bool | frozenset[str] | None) -> Contents:
        if kept is None:
            return _contents.get((self.device, self.pool), Contents.KEEP)
        return Contents.KEEP if kept is True or (kept is not False and self.tag in kept) else Contents.DROP


def _tagged(device: Device) -> list[_Tagged]:
    """Returns the pools that have a tag, by device and in order of creation."""
    devices = tagged_devices() if device is None else []
    found = []
    for index in devices or [device_index(device)]:
        of = allocator(index)
        pools = [(pool["pool"], pool["tag"]) for pool in of.stats()["pools"] if pool["tag"] is not None]
        found += [_Tagged(index, of, pool, tag) for pool, tag in pools]
    return found


def _checked(pools: list[_Tagged], names: list[str] | None, kept: frozenset[str] | None) -> list[_Tagged]:
    """Returns the pools that have one of the names as tag. Raises `UnknownPool` for a name that no pool has."""
    there = {tagged.tag for tagged in pools}
    if unknown := (set(names or ()) | (kept or frozenset())) - there:
        has = f"the existing tags are {sorted(there)}" if there else "no pool has a tag yet"
        raise UnknownPool(f"no pool has the tag {sorted(unknown)[0]!r}; {has}: create one with MemPool(tag=...) or region(tag=...)")
    return [tagged for tagged in pools if names is None or tagged.tag in names]


def _names(tags: str | Iterable[str] | None) -> list[str] | None:
    return None if tags is None else [tags] if isinstance(tags, str) else list(tags)
