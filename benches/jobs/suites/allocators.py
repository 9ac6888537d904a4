"""Selects the allocator of a run in its processes, by an environment variable. Imports little, because every child process imports it."""

from __future__ import annotations

import os

ALLOCATOR = "SYMMALLOC_SUITES_ALLOCATOR"


def under_allocator() -> None:
    """Installs the allocator of this run in PyTorch. Suites call it first, also in their child processes."""
    if os.environ.get(ALLOCATOR) == "symmalloc":
        import symmalloc

        symmalloc.install()
