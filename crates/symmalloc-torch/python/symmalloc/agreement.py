"""Comparison of allocation histories between the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from .allocator import Allocator, Gather
from .devices import Device, device_index, import_torch
from .errors import TorchError
from .state import allocator

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def assert_aligned(group: ProcessGroup | None = None, *, symmetric_only: bool = False, device: Device = None) -> None:
    """Compares the allocation histories of all ranks, and raises `MisalignedError` on every rank if they differ.

    group           the ranks to compare; None: the default group
    symmetric_only  compare only symmetric pools instead of all pools
    device          None: the current one

    Collective: every rank of the group calls it at the same point. For a symmetric pool, the error names the first op that
    differs and what each rank did; for another pool, it names only the heap. While ranks agree, the cost is one small
    all-gather. It uses host tensors if the group has gloo, and otherwise device memory that belongs to no pool. A comparison
    therefore does not change any compared history, and a subset of the ranks can run one. Raises `TorchError` without PyTorch
    or its process group, and `NotInstalled`.
    """
    import_torch("assert_aligned()")
    import torch.distributed as dist

    if not dist.is_initialized():
        raise TorchError("there are no ranks to compare: call torch.distributed.init_process_group() first")
    index = device_index(device)
    allocator(index).agree(
        dist.get_rank(group), dist.get_world_size(group), _gather(group, index), symmetric_only=symmetric_only
    )


def _gather(group: ProcessGroup | None, device: int) -> Gather:
    """Returns an all-gather of bytes over the group."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size(group)

    def over(sent: torch.Tensor, gathered: torch.Tensor) -> bytes:
        dist.all_gather_into_tensor(gathered, sent, group=group)
        return bytes(gathered.tolist())

    def on_host(mine: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(mine), dtype=torch.uint8)

    def over_host(mine: bytes) -> bytes:
        # The device is explicit because the program may have set a default device.
        return over(on_host(mine), torch.empty(world * len(mine), dtype=torch.uint8, device="cpu"))

    def over_device(mine: bytes) -> bytes:
        with _exchange_bytes(device, (1 + world) * len(mine)) as exchange:
            sent, gathered = exchange[: len(mine)], exchange[len(mine) :]
            sent.copy_(on_host(mine))
            return over(sent, gathered)

    # The configuration of a group with both backends reads `cpu:gloo,cuda:nccl`.
    has_gloo = "gloo" in str(dist.get_backend_config(group))
    return over_host if has_gloo else over_device


@contextmanager
def _exchange_bytes(device: int, size_bytes: int) -> Iterator[torch.Tensor]:
    """Allocates bytes on the device for work on the current stream.

    The `with` block must wait for the work that reads them. An error leaks the bytes, because NCCL may still use them.
    """
    import torch

    memory = _exchange_allocator(device)
    address = memory.allocate(size_bytes, stream=torch.cuda.current_stream(device).cuda_stream)
    yield torch.as_tensor(_DeviceBytes(address, size_bytes), device=torch.device("cuda", device))
    memory.free(address)


@cache
def _exchange_allocator(device: int) -> Allocator:
    """Returns a separate allocator for exchanges.

    An exchange must not add an op, a pool or a stream to the compared histories, so it cannot use PyTorch's allocator.
    """
    return Allocator(device, "segments:fixed,streams:shared")


class _DeviceBytes:
    """Device memory that PyTorch can wrap in a tensor."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 2, "typestr": "|u1", "shape": (size_bytes,), "data": (address, False),
        }  # fmt: skip
