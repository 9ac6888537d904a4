"""Compares the ranks of a job: did all of them allocate alike so far?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from .allocator import Allocator, Gather
from .devices import Device, device_index
from .errors import TorchError
from .installation import allocator

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def assert_aligned(group: ProcessGroup | None = None, *, symmetric_only: bool = False, device: Device = None) -> None:
    """Raises `MisalignedError` on every rank when ranks differ, with the first op that differs and what each rank did.

    Collective: every rank of the group (None: the default one) calls it at the same point. Compared are the histories of all
    pools, or with `symmetric_only` of those in which ranks promise to allocate alike. It costs one small all-gather while
    ranks agree: through host tensors where the group has gloo, otherwise through the device, in memory that no pool has. So
    a comparison changes nothing that is compared, and a part of the ranks may compare itself. Raises `TorchError` without
    torch.distributed, `NotInstalled`.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise TorchError("there are no ranks to compare: call torch.distributed.init_process_group() first")
    index = device_index(device)
    allocator(index).agree(
        dist.get_rank(group), dist.get_world_size(group), _gather(group, index), symmetric_only=symmetric_only
    )


def _gather(group: ProcessGroup | None, device: int) -> Gather:
    """An all-gather of bytes over the group."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size(group)

    def over(sent: torch.Tensor, gathered: torch.Tensor) -> bytes:
        dist.all_gather_into_tensor(gathered, sent, group=group)
        return bytes(gathered.tolist())

    def on_host(mine: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(mine), dtype=torch.uint8)

    def over_host(mine: bytes) -> bytes:
        # Devices are named: the program may have set a default one.
        return over(on_host(mine), torch.empty(world * len(mine), dtype=torch.uint8, device="cpu"))

    def over_device(mine: bytes) -> bytes:
        with _exchange_bytes(device, (1 + world) * len(mine)) as exchange:
            sent, gathered = exchange[: len(mine)], exchange[len(mine) :]
            sent.copy_(on_host(mine))
            return over(sent, gathered)

    # A group that takes tensors of both kinds says so as `cpu:gloo,cuda:nccl`.
    has_gloo = "gloo" in str(dist.get_backend_config(group))
    return over_host if has_gloo else over_device


@contextmanager
def _exchange_bytes(device: int, size_bytes: int) -> Iterator[torch.Tensor]:
    """Bytes on the device for work on the current stream. What reads them is waited for before they are given up; after a
    failure they are not, because NCCL may still use them."""
    import torch

    memory = _exchange_allocator(device)
    address = memory.allocate(size_bytes, torch.cuda.current_stream(device).cuda_stream)
    yield torch.as_tensor(_DeviceBytes(address, size_bytes), device=torch.device("cuda", device))
    memory.free(address)


@cache
def _exchange_allocator(device: int) -> Allocator:
    """Not PyTorch's: an exchange must add nothing to what is compared, no op, no pool, and no stream."""
    return Allocator(device, "segments:fixed,streams:shared")


class _DeviceBytes:
    """Memory of the device, for PyTorch to make a tensor of."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 2, "typestr": "|u1", "shape": (size_bytes,), "data": (address, False),
        }  # fmt: skip
