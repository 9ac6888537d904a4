"""PyTorch's `DistributedTest`: collectives, DDP and related features, with a process for each rank.

It uses NCCL, unless `SYMMALLOC_SUITES_BACKEND` selects another backend. The allocator is installed before any use of CUDA.
"""

from __future__ import annotations

import os
import unittest

os.environ.setdefault("BACKEND", os.environ.get("SYMMALLOC_SUITES_BACKEND", "nccl"))
os.environ.setdefault("WORLD_SIZE", "2")
# Spawned ranks also run this file, and find the test's class by name.
import torch
from allocators import under_allocator
from results import Outcome
from worker import outcome

under_allocator()

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class OnBothAllocators(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """The class of PyTorch's own `test_distributed_spawn.py`."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()


def names() -> list[str]:
    return unittest.TestLoader().getTestCaseNames(OnBothAllocators)


def run(name: str) -> Outcome:
    return outcome(OnBothAllocators(name))
