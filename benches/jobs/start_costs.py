"""Startup costs of symmalloc: milliseconds from `import torch` to the first tensor.

PyTorch is imported only once, because the time of an import varies by seconds. Each process is a fork of this one, alternating
between native and symmalloc. Run the script once before measuring, so that the class is compiled.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from itertools import pairwise

import torch
from job import report

TURNS = 15
PARTS = ("import", "install", "cuda", "first_tensor", "all")


def parts(is_ours: bool) -> list[float]:
    """Measures one process."""
    moments = [time.perf_counter()]
    if is_ours:
        import symmalloc
    moments.append(time.perf_counter())
    if is_ours:
        symmalloc.install()
    moments.append(time.perf_counter())
    torch.cuda.current_stream()
    moments.append(time.perf_counter())
    torch.zeros(1, device="cuda").item()
    moments.append(time.perf_counter())
    times = [(end - begin) * 1e3 for begin, end in pairwise(moments)]
    return [*times, sum(times)]


def forked(is_ours: bool) -> list[float]:
    """Measures in a separate process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(parts(is_ours)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("a process failed: see above")
    return json.loads(said)


def main() -> None:
    turns = [[forked(False), forked(True)] for _ in range(TURNS)]
    for name, of_turns in zip(("native", "symmalloc"), zip(*turns)):
        medians = [round(statistics.median(times), 1) for times in zip(*of_turns)]
        report({"job": "start_costs", "allocator": name, "ms": dict(zip(PARTS, medians))})


if __name__ == "__main__":
    main()
