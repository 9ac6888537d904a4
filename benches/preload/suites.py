"""Runs CuPy's memory tests and Numba's tests with and without symmalloc, and compares the outcome of each test.

    python3 benches/preload/suites.py cupy cupy-14.2.0/tests/cupy_tests/cuda_tests/test_memory.py
    python3 benches/preload/suites.py numba numba.cuda.tests.cudadrv numba.cuda.tests.nrt

Each set of tests runs on the library's own allocator (`native`) and under `symmalloc run` (`run`), and Numba's also with the plugin
`symmalloc.numba` (`plugin`). A test that passes natively and fails on symmalloc is repeated on both before it counts, in a separate
process each, together with all tests whose name contains its own (pytest's `-k`). `symmalloc` must be on the PATH. Needs pytest and pytest-xdist, and for Numba's tests filecheck and NumPy before 2.5.

Exits with 0 without a regression, 1 with a regression, and 2 if no comparison is possible: a set of tests leaves no report, the native set
does not end within --seconds, or no native test passes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

COMMANDS = {"native": [], "run": ["symmalloc", "run", "--"], "plugin": []}
# numba-cuda's own conftest.py, which defines this fixture, is not in its wheel.
NUMBA_CONFTEST = """import pytest

@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    request.cls._dump_failed_filechecks = False
"""
PLUGIN = {"NUMBA_CUDA_MEMORY_MANAGER": "symmalloc.numba"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=("cupy", "numba"))
    parser.add_argument("tests", nargs="+", help="files of tests of CuPy, packages of tests of Numba")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="concurrent processes")
    parser.add_argument("--seconds", type=float, default=600, help="time limit of each set of tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.library == "cupy":
            return compared(options, ("native", "run"))
        options.tests = [numba_files(options.tests, Path(folder))]
        return compared(options, ("native", "run", "plugin"))


def numba_files(packages: list[str], folder: Path) -> str:
    """Writes a file that imports the tests for each module: pytest cannot import numba-cuda's files by their paths."""
    for package in packages:
        root = Path(importlib.import_module(package).__file__).parent
        for path in root.glob("test_*.py"):
            name = f"{package}.{path.stem}"
            (folder / f"test_{name.replace('.', '_')}.py").write_text(f"from {name} import *\n")
    (folder / "conftest.py").write_text(NUMBA_CONFTEST)
    return str(folder)


@dataclass
class Report:
    """pytest's report."""

    outcomes: dict[str, str]
    """The outcome of each test by its name. Tests after a crash or the time limit are missing."""
    is_cut: bool
    """`True` if the time limit ended the tests."""


def compared(options: argparse.Namespace, variants: tuple[str, ...]) -> int:
    outcomes = {}
    for variant in variants:
        report = run(variant, options.tests, options.at_once, options.seconds)
        if report is None:
            print(f"no report under {variant}", file=sys.stderr)
            return 2
        if report.is_cut and variant == "native":
            print(f"the native tests did not end within {options.seconds:.0f} s: increase --seconds", file=sys.stderr)
            return 2
        outcomes[variant] = report.outcomes
        print(f"{options.library} {variant}: {dict(Counter(report.outcomes.values()))}", flush=True)
    native = outcomes["native"]
    if "passed" not in native.values():
        print("no test passes natively", file=sys.stderr)
        return 2

    regressions = 0
    for variant in variants[1:]:
        worse = sorted(name for name, outcome in native.items() if outcome == "passed" and outcomes[variant].get(name) != "passed")
        if variant == "plugin":
            skipped = [name for name in worse if outcomes[variant].get(name) == "skipped"]
            worse = sorted(set(worse) - set(skipped))
            for name in skipped:
                print(f"{variant}: {name}: skipped by Numba, because it tests Numba's own memory manager", flush=True)
        for name in worse:
            again = {one: run_one(one, name, options) for one in ("native", variant)}
            is_regression = again["native"] == "passed" != again[variant]
            regressions += is_regression
            verdict = "fails on symmalloc" if is_regression else f"not reproduced: {again}"
            print(f"{variant}: {name}: {outcomes[variant].get(name, 'not run')}; {verdict}", flush=True)
        better = sum(outcome != "passed" and outcomes[variant].get(name) == "passed" for name, outcome in native.items())
        print(f"{variant}: {len(worse)} of {len(native)} tests worse in the first run, {better} better")
    return 1 if regressions else 0


def run_one(variant: str, name: str, options: argparse.Namespace) -> str:
    """Returns the outcome of one test in a separate process, in which all tests run whose name contains this one's."""
    test = name.rsplit("::", 1)[1]
    report = run(variant, options.tests, 0, options.seconds, ["-k", test.split("[")[0]])
    return report.outcomes.get(name, "not run") if report is not None else "not run"


def run(variant: str, tests: list[str], at_once: int, seconds: float, more: list[str] | None = None) -> Report | None:
    """Runs tests. Returns None if pytest wrote no report, as after a crash."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*COMMANDS[variant], sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["--continue-on-collection-errors"]
        command += ["-n", str(at_once)] if at_once else ["-p", "no:xdist"]
        environment = os.environ | (PLUGIN if variant == "plugin" else {})
        process = subprocess.Popen(
            [*command, *(more or []), *tests], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        is_cut = False
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            is_cut = True
            print(f"{variant}: ended after {seconds:.0f} s", flush=True)
            process.send_signal(signal.SIGINT)  # pytest writes its report
            try:
                output, _ = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        if not report.exists():
            print(f"{variant}: no report; the last lines of pytest:\n" + "\n".join(output.splitlines()[-15:]), flush=True)
            return None
        return Report(dict(outcome(case) for case in xml.parse(report).iter("testcase")), is_cut)


def outcome(case: xml.Element) -> tuple[str, str]:
    kinds = {child.tag for child in case}
    result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return f"{case.get('classname')}::{case.get('name')}", result


if __name__ == "__main__":
    sys.exit(main())
