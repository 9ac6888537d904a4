"""A load that runs as long as a machine can be had: results are compared with PyTorch's allocator, and memory must not grow.

    soak.py --seconds 1200 --state soak.json     runs, and continues the counts of earlier runs in the file
    soak.py --report soak.json                   the table of all runs, with the slope of each figure

Every result is compared with that of PyTorch's allocator, so the job detects memory that two tensors share, or that is reused too early.
Each round does the following. Its results depend only on its variant, of which there are eight in turn. A process with PyTorch's allocator
computes the results of all variants first, and every round must have the same results bit by bit.

    serve     three threads with a stream each answer requests of varying sizes, and read each tensor again before they drop it; some
              tensors are also read on a different stream
    sleep     a pool with contents and one without sleep and wake
    share     a second process reads tensors of this one

In variants 0 and 4, it also does the following. A capture and an error release PyTorch's free memory, so the rounds between them grow a heap:

    capture   a graph is captured, replayed and destroyed
    refuse    a request that exceeds the device fails, and the next one succeeds
    group     a process group with NCCL, and windows on it, is created and destroyed
    train     GPT-2 (124M) trains for two steps from new weights

At regular intervals, the job measures what must not grow. Exit status of a run: 0 if all results are equal, otherwise 1. Exit status of
`--report`: 0 if each run ended with equal results only, has at least ten samples after its first two minutes, and if no memory, descriptor,
thread or pool count has a slope above zero beyond its confidence. The samples of a run depend on each other, so the stated confidence is
too narrow. Times depend on the machine and do not decide the status.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIANTS = 8
"""Number of different rounds."""
SELDOM = 4
"""Parts that take long, or release free memory, are in every variant that is divisible by this."""
SAMPLES_LEAST = 10
THREADS, REQUESTS = 3, 40
WARM_UP_SECONDS = 120
"""Samples of the first part of a run are not used for slopes."""
KIB, MIB = 1 << 10, 1 << 20
FIGURES = {
    "device_mib": "device memory in use, MiB",
    "reserved_mib": "reserved, MiB",
    "resident_mib": "resident host memory, MiB",
    "descriptors": "descriptors",
    "threads": "threads",
    "pools": "pools",
    "empty_ns": "`torch.empty` of 1 KiB, ns",
    "round_ms": "round, ms",
}
TIMES = ("empty_ns", "round_ms")


class Load:
    """The objects that live for a whole run."""

    def __init__(self, allocator: str, device: str) -> None:
        import torch

        self.torch, self.device, self.is_ours = torch, device, allocator == "symmalloc"
        self.is_gpu = device == "cuda"
        self.streams = [torch.cuda.Stream() for _ in range(THREADS)] if self.is_gpu else [None] * THREADS
        self.reader = Reader() if self.is_gpu else None

    def round(self, number: int) -> dict[str, str]:
        """Runs a round. Returns the digest of each part's results."""
        variant = number % VARIANTS
        parts: dict[str, Callable[[int], Any]] = {"serve": self.serve}
        if self.is_gpu:
            parts |= {"sleep": self.sleep, "share": self.share}
        if variant % SELDOM == 0:
            parts |= {"train": self.train}
            if self.is_gpu:
                parts |= {"capture": self.capture, "refuse": self.refuse, "group": self.group}
        return {name: digest(part(variant)) for name, part in parts.items()}

    def serve(self, variant: int) -> list[int]:
        results: list[list[int]] = [[] for _ in range(THREADS)]
        failures: list[BaseException] = []

        def answer(thread: int) -> None:
            try:
                results[thread] = self.requests(random.Random(f"{variant} {thread}"), thread)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=answer, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [value for values in results for value in values]

    def requests(self, random: random.Random, thread: int) -> list[int]:
        """Holds the tensors of up to eight requests. Integers make the sums independent of the order of additions."""
        torch = self.torch
        sums: list[Any] = []
        held: list[Any] = []
        stream, other = self.streams[thread], self.streams[(thread + 1) % THREADS]

        def drop(position: int) -> None:
            sums.append(held.pop(position).sum())

        with torch.cuda.stream(stream):
            for request in range(REQUESTS):
                elements = random.choice((64 * KIB, MIB, 3 * MIB, 8 * MIB)) + 64 * random.randrange(1000)
                cache = torch.arange(elements, dtype=torch.int32, device=self.device).remainder_(997 + request)
                if request % 5 == 0 and self.is_gpu:
                    # Its memory is overwritten on this stream while the other one may still read it, unless the allocator waits.
                    other.wait_stream(stream)
                    with torch.cuda.stream(other):
                        sums.append((cache * 3).sum())
                        cache.record_stream(other)
                    del cache
                    cache = torch.full((elements,), request, dtype=torch.int32, device=self.device)
                held.append(cache)
                if len(held) > random.randrange(8):
                    drop(random.randrange(len(held)))
            while held:
                drop(0)
            if self.is_gpu:
                stream.wait_stream(other)
            return torch.stack(sums).cpu().tolist()

    def capture(self, variant: int) -> list[int]:
        torch = self.torch
        values = torch.arange(MIB, dtype=torch.int32, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            squares = values * values
            result = (squares + variant).sum()
        results = []
        for replay in range(4):
            values.fill_(replay + variant)
            graph.replay()
            results.append(int(result))
        return results

    def sleep(self, variant: int) -> list[int]:
        torch = self.torch
        if not self.is_ours:
            values = torch.arange(16 * MIB, dtype=torch.int32, device=self.device) + variant
            return [int(values.sum()), variant]
        import symmalloc

        with symmalloc.region(tag="kept", enable_cpu_backup=True):
            values = torch.arange(16 * MIB, dtype=torch.int32, device=self.device)
            values += variant
        with symmalloc.region(tag="discarded"):
            cache = torch.zeros(16 * MIB, dtype=torch.int32, device=self.device)
        for tag in ("kept", "discarded"):
            symmalloc.pause(tag)
        torch.full((32 * MIB,), 1, device=self.device)
        for tag in ("kept", "discarded"):
            symmalloc.resume(tag)
        cache.fill_(variant)
        return [int(values.sum()), int(cache[-1])]

    def share(self, variant: int) -> int:
        values = self.torch.arange(variant, variant + MIB, dtype=self.torch.int32, device=self.device)
        self.torch.cuda.synchronize()
        assert self.reader is not None, "a GPU has a reader"
        return self.reader.sum(values)

    def refuse(self, variant: int) -> list[int]:
        torch = self.torch
        total = torch.cuda.mem_get_info()[1]
        try:
            torch.empty(total + MIB, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError:
            return [int(torch.full((MIB,), variant, dtype=torch.int32, device=self.device).sum())]
        raise RuntimeError(f"a request of more than the device's {total} bytes succeeded")

    def group(self, variant: int) -> list[int]:
        import torch.distributed as dist

        torch = self.torch
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        try:
            pool = None
            if self.is_ours:
                import symmalloc

                pool = symmalloc.MemPool()
                with symmalloc.use_mem_pool(pool):
                    values = torch.arange(MIB, dtype=torch.int32, device=device)
                pool.register(dist.group.WORLD)
            else:
                values = torch.arange(MIB, dtype=torch.int32, device=device)
            values += variant
            dist.all_reduce(values)
            result = int(values.sum())
            del values
            if pool is not None:
                pool.close()
            return [result]
        finally:
            dist.destroy_process_group()

    def train(self, variant: int) -> list[float]:
        from gpt2_train import training
        from job import Job

        self.torch.manual_seed(variant)
        job = Job("soak", "symmalloc", self.device, None, not self.is_gpu, 1)
        batch, longest = (16, 512) if self.is_gpu else (2, 64)
        step = training(job, batch, longest, lambda number: longest // 2 + 16 * number)
        return [float(step(number)) for number in range(2)]

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


class Reader:
    """A second process that returns the sums of tensors of this one."""

    def __init__(self) -> None:
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self.tensors, self.sums = context.Queue(), context.Queue()
        self.process = context.Process(target=read_tensors, args=(self.tensors, self.sums), daemon=True)
        self.process.start()

    def sum(self, tensor: Any) -> int:
        self.tensors.put(tensor)
        try:
            result = self.sums.get(timeout=120)
        except queue.Empty:
            code = self.process.exitcode
            raise RuntimeError(f"the second process did not answer within two minutes; its exit code is {code}") from None
        if isinstance(result, str):
            raise RuntimeError(f"the second process failed to read a tensor: {result}")
        return int(result)

    def close(self) -> None:
        self.tensors.put(None)
        self.process.join(30)


def read_tensors(tensors: Any, sums: Any) -> None:
    install(os.environ["SOAK_ALLOCATOR"])
    while True:
        try:
            if (tensor := tensors.get()) is None:
                return
            sums.put(int(tensor.sum()))
        except Exception as error:
            sums.put(repr(error))
        # The owner frees its memory only after the last reference here is gone.
        tensor = None


def install(allocator: str) -> None:
    if allocator == "symmalloc":
        import symmalloc

        symmalloc.install()


def digest(results: object) -> str:
    """Returns a hash. JSON states floating-point numbers exactly."""
    return hashlib.sha256(json.dumps(results).encode()).hexdigest()[:16]


def sample(load: Load, seconds: float, rounds: int, round_ms: float) -> dict[str, float]:
    """Measures what must not grow. The garbage collector runs before."""
    torch = load.torch
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    figures = {
        "seconds": round(seconds, 1),
        "rounds": rounds,
        "resident_mib": int(fields["VmRSS"].split()[0]) / KIB,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(fields["Threads"]),
        "round_ms": round(round_ms, 3),
        "empty_ns": empty_ns(load),
    }
    if load.is_gpu:
        torch.cuda.synchronize()
        figures["device_mib"] = device_mib(torch)
        figures["reserved_mib"] = torch.cuda.memory_reserved() / MIB
    if load.is_ours and load.is_gpu:
        import symmalloc

        figures["pools"] = len(symmalloc.stats()["pools"])
    return figures


def device_mib(torch: Any) -> float:
    """The device memory of this process, according to the driver. If the driver lists no processes, that of all processes."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        used = [float(line.split(",")[1]) for line in listed if line.split(",")[0] == str(os.getpid())]
        if used:
            return sum(used)
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def empty_ns(load: Load) -> float:
    """The minimum over 15 series of 1,000 allocations with their frees."""
    least = math.inf
    for _ in range(15):
        begun = time.perf_counter_ns()
        for _ in range(1000):
            load.torch.empty(KIB, dtype=load.torch.uint8, device=load.device)
        least = min(least, (time.perf_counter_ns() - begun) / 1000)
    return round(least, 1)


def prepare(allocator: str) -> Any:
    """Imports PyTorch with deterministic arithmetic, and installs the allocator."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["SOAK_ALLOCATOR"] = allocator
    import torch

    install(allocator)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    return torch


def expected(device: str) -> dict[str, dict[str, str]]:
    """Returns the results of every variant, from a process with PyTorch's allocator."""
    command = [sys.executable, str(Path(__file__).resolve()), "--variants", "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("variants ")]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"the run with PyTorch's allocator ended with {done.returncode}: see its messages above")
    return json.loads(lines[0].removeprefix("variants "))


def variants(device: str) -> int:
    prepare("native")
    load = Load("native", device)
    print("variants", json.dumps({variant: load.round(variant) for variant in range(VARIANTS)}), flush=True)
    load.close()
    return 0


def soak(options: argparse.Namespace) -> int:
    state = json.loads(options.state.read_text()) if options.state.exists() else {"rounds": 0, "runs": []}
    right = expected(options.device)
    torch = prepare("symmalloc")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    begun = time.strftime("%Y-%m-%d %H:%M")
    run: dict[str, Any] = {"device": name, "pytorch": torch.__version__, "begun": begun, "samples": [], "wrong": []}
    state["runs"].append(run)
    save(options.state, state)
    try:
        load = Load("symmalloc", options.device)
        repeat(options, load, state, run, right)
        load.close()
    except BaseException as error:
        run["error"] = repr(error)
        raise
    finally:
        save(options.state, state)
    wrong = len(run["wrong"])
    print(f"{run['rounds']} rounds in {run['seconds']:.0f} s, {wrong} wrong results, {state['rounds']} rounds in all runs")
    return 1 if wrong else 0


def repeat(
    options: argparse.Namespace, load: Load, state: dict[str, Any], run: dict[str, Any], right: dict[str, dict[str, str]]
) -> None:
    """Runs rounds until the time is over."""
    begun = last = time.monotonic()
    rounds = since = 0
    while last - begun < options.seconds:
        number = state["rounds"]
        results = load.round(number)
        wrong = [part for part, value in results.items() if value != right[str(number % VARIANTS)][part]]
        run["wrong"] += [{"round": number, "part": part} for part in wrong]
        for part in wrong:
            print(f"round {number}: {part} differs from the results with PyTorch's allocator", flush=True)
        state["rounds"], rounds, since = number + 1, rounds + 1, since + 1
        now = time.monotonic()
        # Whole cycles of variants, so that all samples follow the same work.
        if now - last >= options.interval and rounds % VARIANTS == 0:
            figures = sample(load, now - begun, rounds, (now - last) * 1000 / since)
            print(json.dumps(figures), flush=True)
            run["samples"].append(figures)
            last, since = time.monotonic(), 0
            save(options.state, state)
        elif now - begun >= options.seconds:
            break
    run["rounds"], run["seconds"] = rounds, round(time.monotonic() - begun, 1)


def save(path: Path, state: dict[str, Any]) -> None:
    """Replaces the file, so that an interrupted run leaves the previous state."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state))
    partial.replace(path)


def slope(points: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Returns the slope of a least-squares line per hour, and half of its 95 % confidence interval."""
    count = len(points)
    if count < 4:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    squares = sum((x - mean_x) ** 2 for x, _ in points)
    incline = sum((x - mean_x) * (y - mean_y) for x, y in points) / squares
    residual = sum((y - mean_y - incline * (x - mean_x)) ** 2 for x, y in points)
    # Student's t for 95 %, approximated from the normal distribution (Abramowitz and Stegun 26.7.5).
    degrees, z = count - 2, 1.959964
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return incline * 3600, t * math.sqrt(residual / degrees / squares) * 3600


def report(path: Path) -> int:
    """Prints the figures of each run. Returns 1 if one of them failed or has too few samples, or if something grew."""
    state = json.loads(path.read_text())
    is_level = True
    for run in state["runs"]:
        minutes = run.get("seconds", run["samples"][-1]["seconds"] if run["samples"] else 0) / 60
        print(f"{run['begun']}, {run['device']}, PyTorch {run['pytorch']}: {minutes:.0f} min, {len(run['wrong'])} wrong results")
        samples = [figures for figures in run["samples"] if figures["seconds"] >= WARM_UP_SECONDS]
        if "rounds" not in run or len(samples) < SAMPLES_LEAST:
            print(f"{len(samples)} samples; {run.get('error', 'interrupted' if 'rounds' not in run else 'too short')}")
            is_level = False
        print("| figure | least | most | slope per hour |\n|---|---:|---:|---:|")
        for name, title in FIGURES.items():
            points = [(figures["seconds"], figures[name]) for figures in samples if name in figures]
            fitted = slope(points)
            if fitted is None:
                continue
            per_hour, half = fitted
            is_level &= name in TIMES or per_hour - half <= 0
            values = [value for _, value in points]
            print(f"| {title} | {min(values):,.6g} | {max(values):,.6g} | {per_hour:+.3g} ± {half:.2g} |")
        is_level &= not run["wrong"]
    return 0 if is_level else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--interval", type=float, default=20, help="seconds between two samples, at least")
    parser.add_argument("--state", type=Path, default=Path("soak.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--report", type=Path, metavar="STATE", help="print the table of all runs and exit")
    parser.add_argument("--variants", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        return report(options.report)
    return variants(options.device) if options.variants else soak(options)


if __name__ == "__main__":
    sys.exit(main())
