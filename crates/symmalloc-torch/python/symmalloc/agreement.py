"""Compares the ranks of a job: did all of them allocate alike so far?"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from .allocator import Gather
from .devices import Device, device_index
from .errors import TorchError
from .installation import allocator
from .pool import MemPool, use_mem_pool

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def assert_aligned(group: ProcessGroup | None = None, *, symmetric_only: bool = False, device: Device = None) -> None:
    """Raises `MisalignedError` on every rank when ranks differ, with the first op that differs and what each rank did.

    Collective: every rank of the group (None: the default one) calls it at the same point. Compared are the histories of all
    pools, or with `symmetric_only` of those in which ranks promise to allocate alike. It costs one small all-gather while
    ranks agree: through host tensors where the group has gloo, otherwise through tensors on the device, in a pool of their
    own. Raises `TorchError` without torch.distributed, `NotInstalled`.
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

    def over(where: torch.device, mine: bytes) -> bytes:
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(where)
        gathered = torch.empty(world * len(mine), dtype=torch.uint8, device=where)
        dist.all_gather_into_tensor(gathered, sent, group=group)
        return bytes(gathered.tolist())

    def over_host(mine: bytes) -> bytes:
        return over(torch.device("cpu"), mine)

    def over_device(mine: bytes) -> bytes:
        # In a pool of its own: comparing must not add to what is compared.
        with use_mem_pool(_exchange_pool(device)):
            return over(torch.device("cuda", device), mine)

    # A group that takes tensors of both kinds says so as `cpu:gloo,cuda:nccl`.
    has_gloo = "gloo" in str(dist.get_backend_config(group))
    return over_host if has_gloo else over_device


@cache
def _exchange_pool(device: int) -> MemPool:
    return MemPool(symmetric=False, device=device)
