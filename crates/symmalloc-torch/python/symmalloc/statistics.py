"""Statistics and snapshots for PyTorch's pluggable allocator.

PyTorch's class for pluggable allocators raises for statistics and snapshots. All functions that read them, from
`torch.cuda.memory_allocated` to `torch.accelerator.memory_stats`, call one of a few functions of `torch._C`. This module replaces
these.

    torch.cuda.memory_summary ─ memory_stats ─ memory_stats_as_nested_dict ─ torch._C._cuda_memoryStats   ← ours
"""

from __future__ import annotations

from typing import Any

from .allocator import Allocator

# PyTorch's counters: those that are split by request size, those that are not, and plain numbers.
SPLIT = (
    "allocation", "segment", "active", "inactive_split",
    "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
WHOLE = ("oversize_allocations", "oversize_segments")
NUMBERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
STAT = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
ACCUMULATED = ("allocated", "freed", *NUMBERS)
NO_SPLIT_LIMIT = -1

# The totals at the program's last reset of "accumulated" statistics, per device. The allocator's own counters only grow.
_accumulated_before: dict[int, dict[str, Any]] = {}


def memory_stats(device: int) -> dict[str, Any]:
    """Returns a device's statistics as `torch.cuda.memory_stats_as_nested_dict` does. Unsupported counters are 0."""
    everything: dict[str, Any] = {"max_split_size": NO_SPLIT_LIMIT, **dict.fromkeys(NUMBERS, 0)}
    everything |= {name: dict(STAT) for name in WHOLE}
    everything |= {name: {pool: dict(STAT) for pool in ("all", "small_pool", "large_pool")} for name in SPLIT}
    return _since(_merged(everything, _totals(device)), _accumulated_before.get(device, {}))


def _merged(zeros: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """Returns PyTorch's keys, with the allocator's values where available."""
    return {
        key: _merged(zero, counted.get(key, {})) if isinstance(zero, dict) else int(counted.get(key, zero))
        for key, zero in zeros.items()
    }


def _since(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Returns `now` with the earlier values subtracted from all accumulated counters."""
    since = dict(now)
    for key, value in now.items():
        if isinstance(value, dict):
            since[key] = _since(value, then.get(key, {}))
        elif key in ACCUMULATED:
            since[key] = value - then.get(key, 0)
    return since


def reset_peaks(device: int) -> None:
    if _is_used(device):
        Allocator.shared(device).reset_peaks()


def reset_accumulated(device: int) -> None:
    _accumulated_before[device] = _totals(device)


def _is_used(device: int) -> bool:
    """Returns `True` if the process has a context on a device. Querying an allocator would create one."""
    import torch

    return bool(torch._C._cuda_hasPrimaryContext(device))


def _totals(device: int) -> dict[str, Any]:
    return Allocator.shared(device).stats()["total"] if _is_used(device) else {}


def snapshot(devices: int) -> dict[str, Any]:
    """Returns a snapshot of all devices, as `torch.cuda.memory._snapshot()` does."""
    whole: dict[str, Any] = {"segments": [], "device_traces": [[] for _ in range(devices)]}
    for device in filter(_is_used, range(devices)):
        part = Allocator.shared(device).snapshot()
        whole["segments"] += part["segments"]
        traces = part.get("device_traces", [])
        if device < len(traces):
            whole["device_traces"][device] = traces[device]
        for key, value in part.items():
            whole.setdefault(key, value)
    return whole


def teach(torch: Any) -> None:
    """Replaces the functions of `torch._C` for the rest of the process."""
    native = torch._C
    set_fraction, fractions = native._cuda_setMemoryFraction, {}

    def memory_snapshot(request: tuple[int, int, bool] | None) -> dict[str, Any]:
        taken = snapshot(torch.cuda.device_count())
        if request is not None:
            first, second, has_traces = request
            if (first, second) != (0, 0):
                taken["segments"] = [s for s in taken["segments"] if tuple(s["segment_pool_id"]) == (first, second)]
            if not has_traces:
                taken["device_traces"] = [[] for _ in taken["device_traces"]]
        return taken

    def set_memory_fraction(fraction: float, device: int) -> None:
        set_fraction(fraction, device)
        fractions[device] = fraction

    def record_memory_history(enabled: str | bool | None, *_: Any, **__: Any) -> None:
        if enabled:
            raise RuntimeError(
                "symmalloc does not record memory history here: use symmalloc.start_trace(path) or SYMMALLOC_TRACE=path"
            )

    native._cuda_memoryStats = memory_stats
    native._cuda_resetPeakMemoryStats = reset_peaks
    native._cuda_resetAccumulatedMemoryStats = reset_accumulated
    native._cuda_memorySnapshot = memory_snapshot
    native._cuda_setMemoryFraction = set_memory_fraction
    native._cuda_getMemoryFraction = lambda device: fractions.get(device, 1.0)
    native._cuda_record_memory_history = record_memory_history
    native._cuda_record_memory_history_legacy = record_memory_history
    if hasattr(native, "_accelerator_getDeviceStats"):
        # PyTorch's versions would query its built-in allocator.
        native._accelerator_isAllocatorInitialized = torch.cuda.is_initialized
        native._accelerator_emptyCache = native._cuda_emptyCache
        native._accelerator_getDeviceStats = memory_stats
        native._accelerator_resetPeakStats = native._cuda_resetPeakMemoryStats
        native._accelerator_resetAccumulatedStats = native._cuda_resetAccumulatedMemoryStats
