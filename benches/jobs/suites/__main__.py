"""PyTorch's own tests on PyTorch's allocator and on symmalloc, compared by test: a test that passes natively must not fail here.

    python benches/jobs/suites --gpus 2 --at-once 12 --out suites
    python benches/jobs/suites --suite op_db --only 'add|matmul'
    python benches/jobs/suites --tests pytorch/test --suite test_cuda.py --suite inductor/test_cudagraph_trees.py
    python benches/jobs/suites --tests pytorch/test --suite distributed/test_c10d_nccl.py --gpus 2 --at-once 12 --together

    distributed    `torch.testing._internal.distributed.distributed_test`: NCCL, a rank on each GPU; with
                   SYMMALLOC_SUITES_BACKEND=gloo on CPUs
    test_cuda.py   any file of PyTorch's tests, in the folder `--tests`
    op_db          every operator of `op_db` with its samples, forward and backward: outcomes and bits of results

A test that is worse on symmalloc is repeated on both before it counts. Outcomes stay in the folder `--out`, and the same command
continues after a crash, a kill, or `--budget` seconds. A test that crashes or hangs ends its worker, but not the run. The table
is printed and written to `OUT/suites.md`, and all outcomes to `OUT/suites.json`.

With `--together`, both allocators run the tests at the same time and in the same order. A `--budget` that ends early then leaves a
comparison of the first tests, instead of all tests on one allocator.

Exits with 0 without a regression, 1 with a regression, 2 if no test could be run, and 3 if tests remain to be run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results import BAD, Comparison, OtherRun, Outcome, compare
from runs import Machine, Run, WorkerFailed, listed
from worker import TESTS

SUITES = ("distributed", "op_db")
# Suites with tests that need all GPUs. Their other tests use the first GPU.
TAKES_ALL_GPUS = (
    "distributed", "test_c10d_nccl", "test_cuda_multigpu", "test_cudagraph_trees", "test_multiprocessing", "test_symmetric_memory",
)  # fmt: skip
# Results are compared bitwise only if the native runs agree with each other.
NATIVE_RUNS = {"op_db": 2}


@dataclass
class Options:
    suite: list[str]
    tests: Path | None
    gpus: int
    at_once: int
    only: str
    out: Path
    seconds: float
    budget: float
    together: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", help=f"{', '.join(SUITES)}, a file of --tests, or a path; the first two")
    parser.add_argument("--tests", type=Path, help="the folder `test` of PyTorch's source")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="concurrent tests; at least one per GPU for single-GPU tests")
    parser.add_argument("--only", default="", metavar="REGEX", help="run only tests whose names match")
    parser.add_argument("--out", type=Path, default=Path("suites"))
    parser.add_argument("--seconds", type=float, default=300, help="time limit per test")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="total time; repeat the command to continue")
    parser.add_argument("--together", action="store_true", help="run both allocators at once; they share --at-once")
    options = Options(**vars(parser.parse_args()))
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tests is not None:
        os.environ[TESTS] = str(options.tests.resolve())
    machine = Machine(options.gpus, options.at_once, options.seconds, time.monotonic() + options.budget)
    compared = []
    try:
        for suite in options.suite or SUITES:
            compared.append(compared_suite(suite, options, machine))
            print(compared[-1].table(), flush=True)
            (options.out / "suites.md").write_text("\n".join(one.table() for one in compared))
            (options.out / "suites.json").write_text(json.dumps([one.object() for one in compared], indent=1))
    except (OtherRun, WorkerFailed) as error:
        print(error, file=sys.stderr)
        return 2
    if any(one.bad() for one in compared):
        return 1
    if not any(one.verdicts for one in compared):
        print("no test matches --only", file=sys.stderr)
        return 2
    return 3 if any(one.unfinished() for one in compared) else 0


def compared_suite(suite: str, options: Options, machine: Machine) -> Comparison:
    """Runs a suite on both allocators, and repeats failed tests once."""
    there = listed(suite, machine)
    names = [name for name in there.names if re.search(options.only, name)]
    stem = Path(suite).stem
    shares_gpus = stem not in TAKES_ALL_GPUS

    def run(allocator: str, number: str, of: list[str], machine: Machine) -> dict[str, Outcome]:
        print(f"{stem} on {allocator}, {number}: {len(of)} tests", flush=True)
        facts = {"suite": stem, "allocator": allocator, "number": number} | versions()
        if not shares_gpus:
            facts["gpus"] = options.gpus
        path = options.out / f"{stem}-{allocator}-{number}"
        return Run(suite, allocator, path, facts).carry_out(of, machine, shares_gpus)

    def carry_out(runs: list[tuple[str, str, list[str]]]) -> list[dict[str, Outcome]]:
        if not options.together:
            return [run(*one, machine) for one in runs]
        share = replace(machine, at_once=max(1, machine.at_once // len(runs)))
        with ThreadPoolExecutor(len(runs)) as threads:
            return list(threads.map(lambda one: run(*one, share), runs))

    runs = [("native", str(number + 1), names) for number in range(NATIVE_RUNS.get(stem, 1))] + [("symmalloc", "1", names)]
    *native, ours = carry_out(runs)
    first = compare(stem, names, native, [ours], there.without_contents)
    bad = [name for name, verdict in first.verdicts.items() if verdict.verdict in BAD]
    if not bad:
        return first
    again_native, again_ours = carry_out([("native", "again", bad), ("symmalloc", "again", bad)])
    return compare(stem, names, native, [ours], there.without_contents, (again_native, again_ours))


def versions() -> dict[str, str]:
    """Returns the version of PyTorch without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "symmalloc"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "of a checkout"
    return found


if __name__ == "__main__":
    sys.exit(main())
