"""Pools that give their memory back for a while and keep their addresses, by tags; and the names of torch_memory_saver for it.

    weights = symmalloc.MemPool(symmetric=False, tag="weights")
    cache = symmalloc.MemPool(symmetric=False, tag="kv_cache")
    ...
    symmalloc.sleep(["weights", "kv_cache"], keep=["weights"])      the device is somebody else's
    symmalloc.wake()                                                tensors and graphs are what they were

A program that was written for torch_memory_saver changes an import:

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
from .pool import MemPool, tagged_devices, use_mem_pool
from .pool import known as known_pool

# The pools of regions: by tag, by whether they keep what is in them, and by device.
_regions: dict[tuple[str, bool, int], MemPool] = {}

# What becomes of the contents of a region's pool, by device and pool.
_contents: dict[tuple[int, int], Contents] = {}


def sleep(
    tags: str | Iterable[str] | None = None,
    *,
    keep: bool | str | Iterable[str] | None = None,
    device: Device = None,
) -> Slept:
    """Puts the pools of some tags to sleep, in the order in which they were made: their memory goes back to the device.

    tags    one or several; None: all pools that have a tag
    keep    True: what is in them is kept on the host. False: it is undefined after waking. Tags: kept in these pools, and
            not in others. None: a region's pool as `enable_cpu_backup` says, any other is kept
    device  None: every device on which pools with tags were made, or the current one

    Waits for the device. Until they wake, no kernel may use the pools' tensors and no graph that uses them may be replayed,
    which nobody checks; allocating in them raises, and freeing does not. Pools that sleep sleep on.

    A pool with windows sleeps on all ranks together: call it at the same point on every rank, once no collective is running
    in them. One of its groups must have all ranks of all others.

    Raises `NotInstalled`, `UnknownPool` for a tag that no pool has, `InvalidState` while a stream is captured or a step is
    open, `MisalignedError` and `NcclError` as `MemPool.register`, `CudaError` when the host has no memory for what is kept.
    The pool is as it was then, and those before it sleep: another call goes on.
    """
    names = _names(tags)
    kept = keep if keep is None or isinstance(keep, bool) else frozenset(_names(keep) or ())
    if isinstance(kept, frozenset) and names is not None and not kept <= set(names):
        raise InvalidArgument(f"keep names {sorted(kept - set(names))}, which do not sleep: name them in tags as well")
    total = Slept()
    for tagged in _checked(_tagged(device), names, kept if isinstance(kept, frozenset) else None):
        total += tagged.sleep(tagged.contents(kept))
    return total


def wake(tags: str | Iterable[str] | None = None, *, device: Device = None) -> Woken:
    """Wakes the pools of some tags, in the order in which they were made: tensors lie where they lay, with what was kept.

    tags, device   as `sleep`

    Where `changed` of the answer is not 0, windows have other handles than before: capture graphs with collectives in them
    again. Where `lost` is not 0, groups died meanwhile: register on new ones.

    Raises as `sleep`, and `OutOfMemory` where the device has no room: that pool sleeps on, nothing is lost, and another call
    may succeed. Those before it are awake.
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
    """This thread's allocations on the current device go to a pool that `pause(tag)` puts to sleep. Regions nest.

    tag                 1 to 24 lower-case letters, digits, `_` and `-`
    enable_cpu_backup   whether what is in it is there again after `resume(tag)`; otherwise it is undefined
    cpu_backup_backend  "pinned" or None

    torch_memory_saver's; its backups on disk and in unpinned memory are not here. Raises `NotInstalled`, `InvalidArgument`.
    """
    if enable_disk_backup:
        raise InvalidArgument("contents are not kept on disk here: use enable_cpu_backup=True, or leave both out")
    if cpu_backup_backend not in (None, "pinned"):
        raise InvalidArgument(f"cpu_backup_backend={cpu_backup_backend!r}: contents are kept in pinned memory here")
    device = device_index()
    key = (tag, enable_cpu_backup, device)
    if (pool := _regions.get(key)) is None:
        pool = _regions[key] = MemPool(symmetric=False, tag=tag, conf="segments:expandable", device=device)
        _contents[device, pool.id] = Contents.KEEP if enable_cpu_backup else Contents.DROP
    with use_mem_pool(pool):
        yield


def pause(tag: str | None = None) -> None:
    """Puts the pools of a tag to sleep, on all devices, or of all tags: torch_memory_saver's `pause`.

    What is kept says `region`. A tag that no pool has is no error. Raises as `sleep`.
    """
    for tagged in _tagged(None):
        if tag is None or tagged.tag == tag:
            tagged.sleep(tagged.contents(None))


def resume(tag: str | None = None) -> None:
    """Wakes the pools of a tag, on all devices, or of all tags: torch_memory_saver's `resume`. Raises as `wake`."""
    for tagged in _tagged(None):
        if tag is None or tagged.tag == tag:
            tagged.wake()


@dataclass(frozen=True)
class _Tagged:
    """A pool with a tag, whoever made it: also that of `install("tag:...")`, and one that the program has let go of."""

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
    """The pools that have a tag, in the order in which they were made, device by device."""
    devices = tagged_devices() if device is None else []
    found = []
    for index in devices or [device_index(device)]:
        of = allocator(index)
        pools = [(pool["pool"], pool["tag"]) for pool in of.stats()["pools"] if pool["tag"] is not None]
        found += [_Tagged(index, of, pool, tag) for pool, tag in pools]
    return found


def _checked(pools: list[_Tagged], names: list[str] | None, kept: frozenset[str] | None) -> list[_Tagged]:
    """Those of some tags. Raises for a tag that none of them has."""
    there = {tagged.tag for tagged in pools}
    if unknown := (set(names or ()) | (kept or frozenset())) - there:
        has = f"there are {sorted(there)}" if there else "there is none yet"
        raise UnknownPool(f"no pool has the tag {sorted(unknown)[0]!r}, {has}: MemPool(tag=...) and region(tag=...) make one")
    return [tagged for tagged in pools if names is None or tagged.tag in names]


def _names(tags: str | Iterable[str] | None) -> list[str] | None:
    return None if tags is None else [tags] if isinstance(tags, str) else list(tags)
