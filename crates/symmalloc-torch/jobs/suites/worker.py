"""Runs tests of a suite in this process, one after the other, and notes what became of each: `worker.py SUITE ALLOCATOR FILE`.

Names come on the standard input, one a line; with `--list`, the suite's names go to the file instead. A suite is a Python file
beside this one (or any, by its path) with

    names() -> list[str]
    run(name) -> results.Outcome       raises what the test raises
    WITHOUT_CONTENTS                   names whose results are undefined; may be missing
    IS_BROKEN(error) -> bool           whether nothing else can run in this process after that; may be missing
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results import FAILED, Outcome, RunFile

ALLOCATOR = "SYMMALLOC_SUITES_ALLOCATOR"
# Ends a worker that cannot go on: another one does.
BROKEN = 75
DETAIL_CHARACTERS = 400


def load(suite: str) -> ModuleType:
    """A suite by its name or path, under the name by which processes that it starts find it, too."""
    path = Path(suite) if suite.endswith(".py") else Path(__file__).resolve().with_name(f"{suite}_suite.py")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def under_allocator() -> None:
    """Puts the allocator of this run under PyTorch. Suites call it first, in processes that they start, too."""
    if os.environ.get(ALLOCATOR) == "symmalloc":
        import symmalloc

        symmalloc.install()
        if not symmalloc.has_class():
            raise SystemExit("the class for PyTorch is missing here: SYMMALLOC_TORCH_CLASS=require says why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("allocator", choices=("native", "symmalloc"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--list", action="store_true", help="print what there is, as JSON, and end")
    options = parser.parse_args()
    os.environ[ALLOCATOR] = options.allocator
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
        file.ended(name, Outcome(outcome.outcome, seconds, outcome.detail[-DETAIL_CHARACTERS:], outcome.bits))
        if is_broken:
            sys.stdout.flush()
            os._exit(BROKEN)


if __name__ == "__main__":
    main()
