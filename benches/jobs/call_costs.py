"""Cost of an allocation from Python: `torch.empty` and its free, in nanoseconds.

    call_costs.py --allocator native
    call_costs.py --allocator symmalloc
    call_costs.py --allocator symmalloc --trace run.trace.zst     records every op; with a history, names each by Python frame

    `history`: `torch.cuda.memory._record_memory_history` keeps the Python frames of live allocations.
"""

from __future__ import annotations

import time

from job import Job, report

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"1_kib": KIB, "4_mib": 4 * MIB}
CALLS, TURNS = 2000, 15


def nanoseconds(size: int, device: str) -> float:
    """Returns the minimum over all turns, for a tensor of `size` bytes that is freed immediately."""
    import torch

    least = float("inf")
    for _ in range(TURNS):
        begun = time.perf_counter_ns()
        for _ in range(CALLS):
            torch.empty(size, dtype=torch.uint8, device=device)
        least = min(least, (time.perf_counter_ns() - begun) / CALLS)
    return round(least)


def main() -> None:
    job = Job.from_command_line("call_costs", __doc__)
    import torch

    torch.zeros(1, device=job.device)
    figures: dict[str, object] = {"job": job.name, "allocator": job.allocator, "is_recorded": job.trace is not None}
    for name, size in SIZES.items():
        figures[f"{name}_ns"] = nanoseconds(size, job.device)
    if job.device == "cuda":
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1000)
        for name, size in SIZES.items():
            figures[f"{name}_history_ns"] = nanoseconds(size, job.device)
        torch.cuda.memory._record_memory_history(enabled=None)
    job.end_trace()
    report(figures)


if __name__ == "__main__":
    main()
