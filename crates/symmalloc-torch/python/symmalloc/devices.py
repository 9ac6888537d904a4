"""Conversion of PyTorch's devices to device numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from .errors import TorchError

if TYPE_CHECKING:
    import torch

Device = Union["torch.device", int, str, None]


def device_index(device: Device = None) -> int:
    """Returns the number of a device; None: the current one. Raises `TorchError` if it is not a CUDA device."""
    if isinstance(device, int):
        return device
    import torch

    if device is None:
        return int(torch.cuda.current_device())
    named = torch.device(device)
    if named.type != "cuda":
        raise TorchError(f"{named} is not a CUDA device: give a CUDA device or its number")
    return int(torch.cuda.current_device() if named.index is None else named.index)
