"""PyTorch's `DistributedTest`: collectives, DDP and their kin, a process for each rank.

With NCCL, unless `SYMMALLOC_SUITES_BACKEND` says otherwise. The allocator comes before anything that may use CUDA.
"""

from __future__ import annotations

import os
import unittest

os.environ.setdefault("BACKEND", os.environ.get("SYMMALLOC_SUITES_BACKEND", "nccl"))
os.environ.setdefault("WORLD_SIZE", "2")
# Ranks come here, too: they are started anew, and find the test's class by the name of this file.
import torch
from results import FAILED, PASSED, SKIPPED, Outcome
from worker import under_allocator

under_allocator()

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class OnBothAllocators(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """As PyTorch's own `test_distributed_spawn.py` has it."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()


def names() -> list[str]:
    return unittest.TestLoader().getTestCaseNames(OnBothAllocators)


def run(name: str) -> Outcome:
    result = unittest.TestResult()
    unittest.TestSuite([OnBothAllocators(name)]).run(result)
    if troubles := result.failures + result.errors:
        return Outcome(FAILED, detail=troubles[0][1].strip())
    if result.skipped:
        return Outcome(SKIPPED, detail=result.skipped[0][1])
    if result.unexpectedSuccesses or result.testsRun == 0:
        return Outcome(FAILED, detail="it was expected to fail" if result.unexpectedSuccesses else "it did not run")
    return Outcome(PASSED)
