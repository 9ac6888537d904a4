"""vLLM's sleep mode on symmalloc's pools: a pool with a tag for the weights, and one for the KV cache.

`use_sleep()` replaces the allocator behind the sleep mode, `CuMemAllocator`, in this process. Versions of vLLM with backends
(`SleepModeBackend`, after 0.22.0) also get the backend `symmalloc`, which does the same and never claims a state that failed.

    level 1   weights are kept in pinned host memory, the KV cache is discarded
    level 2   both are discarded, and the engine reloads the weights after the wake

Discarded memory contains zeros after the wake, so a page that an engine does not initialize again has no undefined contents.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from .allocator import Contents, Phase
from .devices import device_index
from .errors import InvalidState
from .pool import MemPool
from .scopes import use_mem_pool
from .state import allocator, installed

BACKEND = "symmalloc"
DEFAULT_TAG = "default"

try:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
except ImportError:  # vLLM 0.22.0 has no backends
    SleepModeBackend = object


class SleepAllocator:
    """The methods of vLLM's `CuMemAllocator`, on pools with tags. One for each process, as in vLLM."""

    def __init__(self) -> None:
        self._pools: dict[str, MemPool] = {}

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Directs this thread's allocations to the tag's pool, and afterwards releases memory that the pool does not use."""
        name = tag or DEFAULT_TAG
        if (pool := self._pools.get(name)) is None:
            pool = self._pools[name] = MemPool(symmetric=False, tag=name, conf="segments:expandable")
        with use_mem_pool(pool):
            yield
        _release_private()

    def sleep(self, offload_tags: Iterable[str] | str | None = None) -> None:
        """Puts all pools to sleep. Pools with one of the tags keep their contents on the host. Raises as `MemPool.sleep` does."""
        kept = (
            {DEFAULT_TAG}
            if offload_tags is None
            else {offload_tags}
            if isinstance(offload_tags, str)
            else set(offload_tags)
        )
        gc.collect()
        _release_private()
        for tag, pool in self._pools.items():
            if pool.phase is not Phase.ASLEEP:
                pool.sleep(Contents.KEEP if tag in kept else Contents.ZERO)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Wakes the pools with one of the tags; None: all. Pools that are awake are skipped. Raises as `MemPool.wake` does."""
        wanted = None if tags is None else set(tags)
        for tag, pool in self._pools.items():
            if (wanted is None or tag in wanted) and pool.phase is not Phase.AWAKE:
                pool.wake()

    def discard(self, tags: Iterable[str]) -> None:
        """Puts the pools with one of the tags to sleep, and discards their contents."""
        for tag in tags:
            if (pool := self._pools.get(tag)) is not None and pool.phase is not Phase.ASLEEP:
                pool.sleep(Contents.ZERO)

    def get_current_usage(self) -> int:
        """Returns the size of all pools in bytes."""
        return sum(segment["total_size"] for pool in self._pools.values() for segment in pool.snapshot())

    def is_awake(self) -> bool:
        """Returns `True` if every pool is awake."""
        return all(pool.phase is Phase.AWAKE for pool in self._pools.values())


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
    CuMemAllocator.get_instance = staticmethod(sleep_allocator)
    with suppress(ImportError):
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        with suppress(ValueError):  # registered already
            SleepModeBackendFactory.register_backend(BACKEND, __name__, "SymmallocBackend")


class SymmallocBackend(SleepModeBackend):  # type: ignore[misc,valid-type]
    """The sleep-mode backend. Its state is that of the pools, so a failed call does not change it."""

    def __init__(self) -> None:
        if SleepModeBackend is not object:
            super().__init__()
        self._is_resuming = False

    def suspend(self, level: int = 1) -> None:
        """Releases the memory. Level 1 keeps the weights on the host, level 2 discards everything."""
        sleep_allocator().sleep(("weights",) if level == 1 else ())

    def resume(self, tags: list[str] | None = None) -> None:
        """Restores the pools with one of the tags; None: all."""
        self._is_resuming = True
        try:
            sleep_allocator().wake_up(tags)
        finally:
            self._is_resuming = False

    def discard(self, tags: tuple[str, ...]) -> None:
        """Releases the memory of the pools with one of the tags, without their contents."""
        sleep_allocator().discard(tags)

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
        return True

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return False


def _release_private() -> None:
    """Releases free memory of private pools. Unlike `torch.cuda.empty_cache`, one worker alone may do it."""
    allocator(device_index()).trim_private()
