"""Names for allocations, which snapshots, traces and reports show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .devices import Device, device_index
from .errors import NotInstalled
from .library import call
from .state import installed


@contextmanager
def named(name: str, device: Device = None) -> Iterator[None]:
    """Names this thread's allocations on a device (None: the current one) inside a `with` block. The innermost name applies.

    Names do not affect placements or digests. The backward pass runs on another thread and is not named. Raises
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
