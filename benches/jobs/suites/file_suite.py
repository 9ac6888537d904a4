"""A file of PyTorch's own tests, such as `test_cuda.py`: `--tests FOLDER --suite test_cuda.py`.

PyTorch's packages lack its tests. Its source and Debian's source package `pytorch` have them in `test/`. They need `expecttest`.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

import removed_names
from allocators import under_allocator
from results import Outcome
from worker import FILE, TESTS, outcome

path = Path(os.environ[TESTS], os.environ[FILE])
# Tests import each other, and their child processes find them by name.
sys.path[:0] = [str(path.parent), os.environ[TESTS]]
# PyTorch parses the command line of its tests.
sys.argv = [str(path)]
under_allocator()
removed_names.supply()
module = importlib.import_module(path.stem)


def _cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _cases(test)
        else:
            yield test


# Tests are identified by name: names are equal on both allocators, and PyTorch's own loader may omit some tests.
CASES = {test.id().removeprefix(f"{module.__name__}."): test for test in _cases(unittest.TestLoader().loadTestsFromModule(module))}


def names() -> list[str]:
    return list(CASES)


def run(name: str) -> Outcome:
    return outcome(CASES[name])


def IS_BROKEN(error: Exception | None) -> bool:
    """Returns `True` after an error of the device, which every later call in this process returns, too."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
