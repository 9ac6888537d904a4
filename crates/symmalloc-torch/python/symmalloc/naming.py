"""Names for allocations, so that snapshots, traces and reports say what a block is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .devices import Device, device_index
from .errors import NotInstalled
from .installation import installed
from .library import call


@contextmanager
def named(name: str, device: Device = None) -> Iterator[None]:
    """What this thread allocates on the device inside (None: the current one) has this name; the inner one of two.

    A name changes no placement and no digest. The backward pass runs on another thread and is not named. Raises
    `NotInstalled`.
    """
    if not installed():
        raise NotInstalled("PyTorch does not use symmalloc: call symmalloc.install() before CUDA is used")
    index = device_index(device)
    call("torch_push_name", index, name.encode())
    try:
        yield
    finally:
        call("torch_pop_name", index)
