"""Prepares a Python child process of a test, before the child imports PyTorch. `worker.py` makes every child import this file.

The allocator is installed right after the child imports PyTorch. A child without PyTorch, such as the resource tracker of
`multiprocessing`, starts fast.
"""

from __future__ import annotations

import removed_names
from allocators import under_allocator
from import_hooks import after_import

after_import("torch", lambda _: under_allocator())
removed_names.supply()
