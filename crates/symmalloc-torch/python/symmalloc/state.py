"""The state of the installation in this process, which `install()` sets."""

from __future__ import annotations

import os

from .allocator import Allocator
from .devices import Device, device_index
from .errors import NotInstalled

# The arguments of install(); None before the call. PyTorch keeps the allocator for the rest of the process.
installed_with: tuple[str | None, str | None] | None = None


def installed() -> bool:
    """Returns `True` after a successful `install()` in this process."""
    return installed_with is not None


def configuration() -> str:
    """Returns the configuration text of `install()`, or that of the environment."""
    conf = None if installed_with is None else installed_with[0]
    return os.environ.get("SYMMALLOC_CONF", "") if conf is None else conf


def allocator(device: Device = None) -> Allocator:
    """Returns the allocator of PyTorch's CUDA tensors on a device; None: the current one. Raises `NotInstalled`."""
    if not installed():
        raise NotInstalled("PyTorch does not use symmalloc: call symmalloc.install() before CUDA is used")
    return Allocator.shared(device_index(device))
