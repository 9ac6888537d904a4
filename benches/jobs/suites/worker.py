"""Runs tests of a suite in this process, one after the other, and records their outcomes: `worker.py SUITE ALLOCATOR FILE`.

It reads names from standard input, one per line. With `--list`, it writes the suite's names to the file instead. A suite is a Python
file next to this one (or any, by its path), or a file of PyTorch's tests in the folder `SYMMALLOC_SUITES_TESTS`. A suite's file has

names() -> list[str]
run(name) -> results.Outcome       propagates the test's errors
WITHOUT_CONTENTS                   names whose results are undefined; optional
IS_BROKEN(error) -> bool           True if no test can run in this process after that error, or a failure (None); optional
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from allocators import ALLOCATOR
from results import FAILED, PASSED, SKIPPED, Outcome, RunFile

# The folder of PyTorch's tests, and the suite's file in it.
TESTS = "SYMMALLOC_SUITES_TESTS"
FILE = "SYMMALLOC_SUITES_FILE"
# Prepares the Python child processes of a test.
SITE = f"""import sys
sys.path.append({str(Path(__file__).resolve().parent)!r})
import child_process
"""
# The exit status of a worker that cannot continue. Another worker replaces it.
BROKEN = 75
DETAIL_CHARACTERS = 400


def load(suite: str) -> ModuleType:
    """Imports a suite by its name or path, under the name by which its child processes find it."""
    if os.environ.get(TESTS) and Path(os.environ[TESTS], suite).is_file():
        os.environ[FILE], suite = suite, "file"
    path = Path(suite) if suite.endswith(".py") else Path(__file__).resolve().with_name(f"{suite}_suite.py")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def outcome(test: unittest.TestCase) -> Outcome:
    """Runs a test of `unittest`, with the fixtures of its class and its module."""
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    if troubles := result.failures + result.errors:
        return Outcome(FAILED, detail=troubles[0][1].strip())
    if result.skipped:
        return Outcome(SKIPPED, detail=result.skipped[0][1])
    if result.unexpectedSuccesses or result.testsRun == 0:
        return Outcome(FAILED, detail="it was expected to fail" if result.unexpectedSuccesses else "it did not run")
    return Outcome(PASSED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("allocator", choices=("native", "symmalloc"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--list", action="store_true", help="print the tests as JSON and exit")
    options = parser.parse_args()
    os.environ[ALLOCATOR] = options.allocator
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(SITE)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        work(options)


def work(options: argparse.Namespace) -> None:
    suite = load(options.suite)
    if options.list:
        listed = {"names": suite.names(), "without_contents": sorted(getattr(suite, "WITHOUT_CONTENTS", ()))}
        options.file.write_text(json.dumps(listed))
        return
    file = RunFile(options.file)
    for name in sys.stdin.read().splitlines():
        file.began(name)
        start = time.monotonic()
        is_broken = False
        try:
            outcome = suite.run(name)
        except Exception as error:
            told = "".join(traceback.format_exception_only(error)).strip()
            outcome = Outcome(FAILED, detail=told[:DETAIL_CHARACTERS])
            is_broken = getattr(suite, "IS_BROKEN", lambda _: False)(error)
        seconds = round(time.monotonic() - start, 3)
        # A suite that catches a test's errors can report a broken process, too.
        if outcome.outcome == FAILED and not is_broken:
            is_broken = getattr(suite, "IS_BROKEN", lambda _: False)(None)
        file.ended(name, Outcome(outcome.outcome, seconds, outcome.detail[-DETAIL_CHARACTERS:], outcome.bits))
        if is_broken:
            sys.stdout.flush()
            os._exit(BROKEN)


if __name__ == "__main__":
    main()
