"""Shared code of the engine jobs: a communicator that the program owns, like PyNcclCommunicator in vLLM and SGLang."""

from __future__ import annotations

import ctypes
import os
from ctypes import Structure, byref, c_byte, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

FLOAT32, SUM, SYMMETRIC = 7, 0, 1


class _UniqueId(Structure):
    _fields_ = [("internal", c_byte * 128)]


class Communicator:
    """An NCCL communicator through C calls, on the current device. Its ranks exchange the id over the default group."""

    def __init__(self, rank: int, world: int) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.world = rank, world
        self._nccl = ctypes.CDLL("libnccl.so.2")  # PyTorch has loaded it
        self._nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, _UniqueId, c_int]
        self._nccl.ncclAllReduce.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
        self._nccl.ncclCommWindowRegister.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p, c_int]
        unique_id = _UniqueId()
        if rank == 0:
            self._check(self._nccl.ncclGetUniqueId(byref(unique_id)))
        shared = torch.frombuffer(bytearray(bytes(unique_id)), dtype=torch.uint8)
        dist.broadcast(shared, 0)
        self.comm = c_void_p()
        self._check(
            self._nccl.ncclCommInitRank(
                byref(self.comm), world, _UniqueId.from_buffer_copy(bytes(shared.tolist())), rank
            )
        )

    def all_reduce(self, tensor: Any) -> None:
        """Reduces in place on the current stream."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        pointer, count = tensor.data_ptr(), tensor.numel()
        self._check(self._nccl.ncclAllReduce(pointer, pointer, count, FLOAT32, SUM, self.comm, stream))

    def register_window(self, address: int, size_bytes: int) -> None:
        """Registers a symmetric window. All ranks must call it."""
        window = c_uint64()
        self._check(self._nccl.ncclCommWindowRegister(self.comm, address, size_bytes, byref(window), SYMMETRIC))

    def destroy(self) -> None:
        self._check(self._nccl.ncclCommDestroy(self.comm))

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"NCCL returned {code}")


def start(backend: str, *, binds_device: bool = True) -> tuple[int, int, Any]:
    """Joins the job. Returns rank, number of ranks and device of this process. Before 2.30, NCCL uses sockets if ranks share a GPU.

    A group with a device creates its communicator immediately. Without `binds_device`, the first use creates it.
    """
    import torch
    import torch.distributed as dist

    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    shares = int(os.environ.get("LOCAL_WORLD_SIZE", world)) > torch.cuda.device_count()
    if shares and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        os.environ |= {"NCCL_HOSTID": f"machine{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if binds_device and "nccl" in backend else None)
    return rank, world, device
