"""Shared code of the jobs: the allocator, repeatable arithmetic, and measurements.

A job is a function that returns a `step`: a function of the step's number that does the work and returns its loss. The sizes
of steps repeat after a period, so that windows of whole periods have equal work and comparable times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

ALLOCATORS = ("native", "expandable", "async", "symmalloc", "planned", "stitched")
# The names for symmalloc, with their additional configuration.
OURS = {"symmalloc": None, "planned": "plan:learn", "stitched": "stitching:true,streams:shared"}


@dataclass(frozen=True)
class Job:
    """One run of a job."""

    name: str
    allocator: str
    device: str
    trace: str | None
    is_tiny: bool
    """`True` for a smaller model, so that the script can be tried on a CPU."""
    windows: int
    is_profiled: bool = False
    """`True` to profile one more period after all others."""
    is_large: bool = False
    """`True` for a larger model that keeps the GPU busy, in the jobs that have one."""

    @staticmethod
    def from_command_line(name: str, description: str | None, conf: str | None = None) -> Job:
        """Reads the command line, and installs the allocator in PyTorch, with this configuration for symmalloc."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--allocator", choices=ALLOCATORS, default="symmalloc")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        parser.add_argument("--windows", type=int, default=4, help="number of timed windows with equally many steps")
        parser.add_argument("--conf", help="additional settings for symmalloc, such as stitching_granule_mb:16")
        parser.add_argument("--profile", action="store_true", help="measure how long the GPU is idle in one more period")
        parser.add_argument("--large", action="store_true", help="a larger model that keeps the GPU busy, in jobs that have one")
        parser.add_argument("--trace", help="record every op to this file (symmalloc) or a snapshot (others)")
        options = parser.parse_args()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if options.allocator == "expandable":
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if options.allocator == "async":
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
        import torch

        if options.allocator in OURS:
            import symmalloc

            settings = [text for text in (conf, OURS[options.allocator], options.conf) if text is not None]
            symmalloc.install(",".join(settings) if settings else None, trace=options.trace)
        elif options.trace and options.device == "cuda":
            torch.cuda.memory._record_memory_history(context=None)
        # Results are bitwise equal from run to run, as far as PyTorch supports it.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.manual_seed(1)
        is_tiny = options.device == "cpu"
        return Job(
            name,
            options.allocator,
            options.device,
            options.trace,
            is_tiny,
            options.windows,
            options.profile,
            options.large,
        )

    def measure(self, period: int, step: Callable[[int], object], periods: int = 1) -> dict[str, object]:
        """Runs a period to warm up, then the windows of `periods` periods each. Returns the measurements."""
        import torch

        def carried_out(number: int) -> object:
            if self.allocator != "planned":
                return step(number)
            import symmalloc

            with symmalloc.step(number % period):
                return step(number)

        losses, speeds = [carried_out(number) for number in range(period)], []
        steps = periods * period
        for window in range(self.windows):
            self.synchronize()
            start = time.perf_counter()
            losses += [carried_out(period + window * steps + number) for number in range(steps)]
            self.synchronize()
            speeds.append(steps / (time.perf_counter() - start))
        values = torch.stack(losses).double().cpu().tolist()
        figures = {
            "job": self.name,
            "allocator": self.allocator,
            "steps": len(values),
            "losses": hashlib.sha256(struct.pack(f"{len(values)}d", *values)).hexdigest()[:16],
            "last_losses": values[-3:],
            "steps_per_s": round(statistics.median(speeds), 3),
            "window_speeds": [round(speed, 3) for speed in speeds],
        }
        if self.device == "cuda":
            figures["reserved_peak_mib"] = torch.cuda.max_memory_reserved() / 2**20
            figures["allocated_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
            figures |= self.steady(steps, period, carried_out)
            if self.is_profiled:
                # Steps after all others, because a job may do more in some of the first ones.
                begin = 2 * period + self.windows * steps
                figures["idle"] = self.idle(lambda: [carried_out(begin + number) for number in range(period)])
        return figures

    def steady(self, steps: int, period: int, step: Callable[[int], object]) -> dict[str, object]:
        """Measures the peaks of one more period after all windows, and the memory that the driver then has in use."""
        import torch

        torch.cuda.reset_peak_memory_stats()
        for number in range(period):
            step(period + self.windows * steps + number)
        self.synchronize()
        free, total = torch.cuda.mem_get_info()
        figures: dict[str, object] = {
            "steady_reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
            "steady_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
            "driver_used_mib": (total - free) / 2**20,
        }
        if self.allocator == "planned":
            import symmalloc

            figures["plans"] = symmalloc.stats()["total"]["steps"]
        return figures

    def idle(self, run: Callable[[], object]) -> float:
        """Returns the share of the time from the first kernel or copy to the end of the last one in which none runs. A kernel
        of a collective that waits for another GPU runs, too.
        """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            self.synchronize()
        # CUPTI reports what ran on the device, and the calls of the host.
        ran = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        spans = sorted((event.time_range.start, event.time_range.end) for event in ran)
        if not spans:
            raise RuntimeError("the profile has no kernel: is another profiler attached, or CUPTI missing?")
        busy, until = 0.0, spans[0][0]
        for start, end in spans:
            busy += max(end - max(start, until), 0.0)
            until = max(until, end)
        return round(1 - busy / (until - spans[0][0]), 4)

    def end_trace(self) -> None:
        """Completes the recording."""
        if self.trace and self.allocator in OURS:
            import symmalloc

            symmalloc.stop_trace()
        elif self.trace and self.device == "cuda":
            import torch

            torch.cuda.memory._dump_snapshot(self.trace.replace("%r", os.environ.get("RANK", "0")))

    def synchronize(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def report(figures: dict[str, object]) -> None:
    """Prints one line for `run`. It is a single write that begins a new line, because several ranks write to one file."""
    sys.stdout.write(f"\nfigures {json.dumps(figures)}\n")
    sys.stdout.flush()
