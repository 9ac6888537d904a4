"""Conversion of PyTorch's devices to device numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from .errors import TorchError

if TYPE_CHECKING:
    import torch

Device = Union["torch.device", int, str, None]


def import_torch(needed_by: str) -> Any:
    """Returns PyTorch's module. If it cannot be imported, raises `TorchError`, which names the call that needs it."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise TorchError(f"PyTorch cannot be imported ({error}): {needed_by} needs it") from error
    return torch


def device_index(device: Device = None) -> int:
    """Returns the number of a device; None: the current one.

    Raises `TorchError` if it is not a CUDA device, or if PyTorch is needed to find the current device but is missing.
    """
    if isinstance(device, int):
        return device
    torch = import_torch("a device that is not given by its number")
    if device is None:
        return int(torch.cuda.current_device())
    named = torch.device(device)
    if named.type != "cuda":
        raise TorchError(f"{named} is not a CUDA device: give a CUDA device or its number")
    return int(torch.cuda.current_device() if named.index is None else named.index)
