"""vLLM's sleep mode on symmalloc's pools: one for each of vLLM's tags, such as the weights and the KV cache.

`use_sleep()` replaces the allocator behind the sleep mode, `CuMemAllocator`, in this process. vLLM 0.33 also gets the backend
`symmalloc`, which never claims a state that failed.

    level 1   weights are kept in pinned host memory, the KV cache is discarded
    level 2   both are discarded, and the engine reloads the weights after the wake

vLLM selects the tags that a sleep keeps: from 0.33 on, memory of the running engine (`runtime`) and of graphs (`cudagraph`) at
every level. Discarded memory contains zeros after the wake, so a page that an engine does not initialize again has no undefined
contents.

NCCL's registration of captured buffers is turned off, see `symmalloc.captured_buffers`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from . import captured_buffers
from .allocator import Contents, Phase, Slept, Woken
from .devices import device_index
from .errors import InvalidState
from .pool import MemPool
from .scopes import use_mem_pool
from .state import allocator, installed

BACKEND = "symmalloc"
DEFAULT_TAG = "default"
GRAPHS_TAG = "cudagraph"

try:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
except ImportError:  # vLLM 0.22.0 has no backends
    CuMemBackend = object


class Sleeper(Protocol):
    """A pool that sleeps."""

    @property
    def phase(self) -> Phase: ...
    def sleep(self, contents: Contents) -> Slept: ...
    def wake(self) -> Woken: ...
    def close(self) -> None: ...
    @property
    def id(self) -> int: ...


class GraphPool:
    """The pool of captured graphs, whose memory PyTorch requests. It belongs to a `torch.cuda.MemPool`."""

    def __init__(self) -> None:
        import torch

        self._allocator = allocator(device_index())
        self.mempool = torch.cuda.MemPool()
        # The first allocation creates the pool. Its placement has the pool's number.
        with torch.cuda.use_mem_pool(self.mempool):
            first = torch.empty(1, dtype=torch.uint8, device="cuda")
        self.id = self._allocator.placement_of(first.data_ptr()).pool

    @property
    def phase(self) -> Phase:
        return self._allocator.phase(self.id)

    def sleep(self, contents: Contents) -> Slept:
        captured_buffers.check_off()
        return self._allocator.sleep(self.id, contents)

    def wake(self) -> Woken:
        return self._allocator.wake(self.id)

    def close(self) -> None:
        """Releases the pool's memory when its graphs and tensors end."""
        self.mempool = None


class SleepAllocator:
    """The methods of vLLM's `CuMemAllocator`, on pools with tags. One for each process, as in vLLM."""

    def __init__(self) -> None:
        self._pools: dict[str, Sleeper] = {}

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Directs this thread's allocations to the tag's pool, and afterwards releases memory that the pool does not use."""
        name = tag or DEFAULT_TAG
        if not isinstance(pool := self._pools.get(name), MemPool):
            pool = self._pools[name] = MemPool(symmetric=False, tag=name, conf="segments:expandable")
        with use_mem_pool(pool):
            yield
        _release_private()

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Returns the id of the pool for captures whose memory sleeps, too."""
        if not isinstance(pool := self._pools.get(GRAPHS_TAG), GraphPool):
            pool = self._pools[GRAPHS_TAG] = GraphPool()
        yield pool.mempool.id

    def sleep(self, offload_tags: Iterable[str] | str | None = None) -> None:
        """Puts all pools to sleep. Pools with one of the tags keep their contents on the host. Raises as `MemPool.sleep` does."""
        kept = {DEFAULT_TAG} if offload_tags is None else _tags(offload_tags)
        gc.collect()
        _release_private()
        for tag, pool in self._pools.items():
            if pool.phase is not Phase.ASLEEP:
                pool.sleep(Contents.KEEP if tag in kept else Contents.ZERO)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Wakes the pools with one of the tags; None: all. Pools that are awake are skipped. Raises as `MemPool.wake` does.

        From vLLM 0.33 on, only weights and the KV cache can wait for a later wake: pools with other tags wake in any case.
        """
        wanted, deferrable = None if tags is None else _tags(tags), _deferrable_tags()
        for tag, pool in self._pools.items():
            wakes = wanted is None or tag in wanted or (deferrable is not None and tag not in deferrable)
            if wakes and pool.phase is not Phase.AWAKE:
                pool.wake()

    def discard(self, tags: Iterable[str] | str) -> None:
        """Puts the pools with one of the tags to sleep, and discards their contents."""
        for tag, pool in self._pools.items():
            if tag in _tags(tags) and pool.phase is not Phase.ASLEEP:
                pool.sleep(Contents.ZERO)

    def get_current_usage(self) -> int:
        """Returns the size in bytes of the live allocations, awake or asleep."""
        return sum(self._live_bytes().values())

    def _live_bytes(self) -> dict[int, int]:
        """Returns the bytes of live allocations, by the number of the pool."""
        numbers = {pool.id for pool in self._pools.values()}
        pools = allocator(device_index()).stats()["pools"] if numbers else []
        return {pool["pool"]: pool["stats"]["allocated_bytes"]["all"]["current"] for pool in pools if pool["pool"] in numbers}

    def is_awake(self) -> bool:
        """Returns `True` if every pool is awake."""
        return all(pool.phase is Phase.AWAKE for pool in self._pools.values())

    def release_pools(self) -> None:
        """Closes the pools without live allocations. Pools that another engine of this process uses, awake or asleep, stay."""
        live = self._live_bytes()
        for tag, pool in list(self._pools.items()):
            if not live.get(pool.id):
                del self._pools[tag]
                pool.close()

    close = release_pools


_allocator: SleepAllocator | None = None


def sleep_allocator() -> SleepAllocator:
    """Returns this process's allocator."""
    global _allocator
    if _allocator is None:
        _allocator = SleepAllocator()
    return _allocator


def use_sleep() -> None:
    """Replaces vLLM's allocator of the sleep mode, and registers the backend. Raises `InvalidState` if this vLLM has none."""
    try:
        from vllm.device_allocator.cumem import CuMemAllocator

        CuMemAllocator.get_instance  # noqa: B018
    except (ImportError, AttributeError) as why:
        raise InvalidState(f"this vLLM has no sleep mode that symmalloc can replace ({why}): leave out sleep") from why
    captured_buffers.turn_off()
    CuMemAllocator.get_instance = staticmethod(sleep_allocator)
    # The worker's shutdown releases the pools of this instance.
    CuMemAllocator.instance = sleep_allocator()
    if CuMemBackend is object:
        return
    with suppress(ImportError):
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        with suppress(ValueError):  # registered already
            SleepModeBackendFactory.register_backend(BACKEND, __name__, "SymmallocBackend")


class SymmallocBackend(CuMemBackend):  # type: ignore[misc,valid-type]
    """The sleep-mode backend. vLLM's own backend selects the tags. The state is that of the pools, so a failed call does not change it."""

    def __init__(self) -> None:
        super().__init__()
        self._is_resuming = False

    def resume(self, tags: list[str] | None = None) -> None:
        """Restores the pools with one of the tags; None: all."""
        self._is_resuming = True
        try:
            super().resume(tags)
        finally:
            self._is_resuming = False

    def state(self) -> str:
        """Returns `RUNNING` only if every pool is awake."""
        if self._is_resuming:
            return "RESUMING"
        return "RUNNING" if sleep_allocator().is_awake() else "SUSPENDED"

    @classmethod
    def is_supported(cls) -> bool:
        return installed()

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Returns `True` if NCCL does not register the buffers of captured collectives, whose memory a sleep replaces."""
        return captured_buffers.is_off()

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return False


def _tags(tags: Iterable[str] | str) -> set[str]:
    return {tags} if isinstance(tags, str) else set(tags)


def _deferrable_tags() -> tuple[str, ...] | None:
    """Returns the tags whose memory may stay asleep in a partial wake. None before vLLM 0.33: all."""
    try:
        from vllm.device_allocator import DEFERRABLE_TAGS
    except ImportError:
        return None
    return tuple(DEFERRABLE_TAGS)


def _release_private() -> None:
    """Releases free memory of private pools. Unlike `torch.cuda.empty_cache`, one worker alone may do it."""
    allocator(device_index()).trim_private()
