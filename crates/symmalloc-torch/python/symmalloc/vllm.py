"""The plug-in for vLLM: installs symmalloc in every process of an engine, and replaces vLLM's own pools.

vLLM calls `register()` in each of its processes before it uses CUDA: the package has an entry point in `vllm.general_plugins`.
`SYMMALLOC_VLLM` selects what it does: nothing if it is unset, or a list such as `pools,sleep`.

install   installs symmalloc as PyTorch's allocator; the others imply it
pools     symmetric memory (`VLLM_USE_NCCL_SYMM_MEM=1`) comes from symmalloc's pools
sleep     the sleep mode uses symmalloc's pools, see `symmalloc.vllm_sleep`

vLLM allocates symmetric tensors in `nccl_symm_mem_context`, on a communicator of its own. It registers new segments at the end of
each context. A capture cannot register memory, so vLLM first runs the same work outside of a capture, on the same stream.

    context outside of a capture   the communicator's pool, which grows; the end of the context registers new segments
    context in a capture           a pool of this stream for graphs alone: reserved and registered by the run before the capture

vLLM's custom all-reduce copies the buffers of captured graphs to its own memory: it would otherwise share them with
`cudaIpcGetMemHandle`, which accepts no mapped memory.

Tested with the versions in `VERSIONS`. Others work if they have the functions that the plug-in replaces, and one warning names
the tested ones.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .devices import device_index
from .errors import Error, InvalidSettings, InvalidState, UnknownPointer
from .installation import install
from .pool import MemPool, Mode
from .scopes import Scope, use_mem_pool
from .state import allocator, installed

VARIABLE = "SYMMALLOC_VLLM"
GRAPH_VARIABLE = "SYMMALLOC_VLLM_GRAPH_MB"
GRAPH_MB = 64
FEATURES = ("install", "pools", "sleep")
VERSIONS = ("0.22.0", "0.33.0")
"""The versions of vLLM that ran on symmalloc."""
CLOSE_SECONDS = 5.0
"""The time limit for the deregistration of a communicator that vLLM destroys. vLLM gives NCCL's abort as much."""


def register() -> None:
    """Does what `SYMMALLOC_VLLM` selects. The entry point of the plug-in; vLLM may call it several times.

    Raises `InvalidSettings` for an unknown value, `InvalidState` if this vLLM lacks what the plug-in replaces, and as
    `symmalloc.install` does.
    """
    selected = {word for word in os.environ.get(VARIABLE, "").replace(" ", "").split(",") if word}
    if unknown := selected - set(FEATURES):
        raise InvalidSettings(f"unknown {VARIABLE}={sorted(unknown)[0]!r}: use {', '.join(FEATURES)}, or unset it")
    if not selected:
        return
    if not installed():
        install()
    warn_of_untested_version()
    copy_captured_buffers()
    if "pools" in selected:
        use_pools()
    if "sleep" in selected:
        from .vllm_sleep import use_sleep

        use_sleep()


def warn_of_untested_version() -> None:
    """Warns once if this version of vLLM was not run."""
    try:
        from vllm import __version__ as version
    except ImportError:
        return
    if version.split("+")[0] not in VERSIONS:
        warnings.warn(
            f"vLLM {version} was not tested with symmalloc; {' and '.join(VERSIONS)} were: compare tokens with and without it",
            RuntimeWarning,
            stacklevel=2,
        )


def copy_captured_buffers() -> None:
    """Lets vLLM's custom all-reduce copy captured buffers, if this vLLM can. Otherwise, set `disable_custom_all_reduce=True`."""
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError:
        return
    create = CustomAllreduce.__init__
    if "register_graph_buffers" not in inspect.signature(create).parameters or hasattr(create, "copies"):
        return

    def create_with_copies(reducer: Any, *arguments: Any, **named: Any) -> None:
        create(reducer, *arguments, **named | {"register_graph_buffers": False})

    create_with_copies.copies = True  # type: ignore[attr-defined]
    CustomAllreduce.__init__ = create_with_copies


def use_pools() -> None:
    """Replaces vLLM's pool of symmetric memory in this process. Raises `InvalidState` if this vLLM has no such pool."""
    try:
        from vllm.distributed.device_communicators import pynccl, pynccl_allocator

        pynccl_allocator.nccl_symm_mem_context  # noqa: B018
        destroy = pynccl.PyNcclCommunicator.destroy
    except (ImportError, AttributeError) as why:
        raise InvalidState(f"this vLLM has no pool that symmalloc can replace ({why}): use {VARIABLE}=install") from why
    if pynccl_allocator.nccl_symm_mem_context is Context:
        return
    pynccl_allocator.nccl_symm_mem_context = Context
    # From 0.33 on. Modules import the function by its name.
    original = getattr(pynccl_allocator, "is_symmetric_memory_tensor", None)
    for name, module in list(sys.modules.items()) if original is not None else []:
        if name.startswith("vllm.") and getattr(module, "is_symmetric_memory_tensor", None) is original:
            module.is_symmetric_memory_tensor = is_symmetric_memory_tensor  # type: ignore[attr-defined]

    def close_and_destroy(communicator: Any) -> None:
        if (pools := _pools.pop(id(communicator), None)) is not None:
            _close_within(CLOSE_SECONDS, pools.all())
        destroy(communicator)

    pynccl.PyNcclCommunicator.destroy = close_and_destroy


def is_symmetric_memory_tensor(tensor: Any) -> bool:
    """Returns `True` if a tensor's storage is in one of this process's symmetric pools."""
    if not _pools or not tensor.is_cuda:
        return False
    device = device_index(tensor.device)
    try:
        number = allocator(device).placement_of(tensor.untyped_storage().data_ptr()).pool
    except UnknownPointer:
        return False
    return any((pool.device, pool.id) == (device, number) for pools in list(_pools.values()) for pool in pools.all())


def _close_within(seconds: float, pools: list[MemPool]) -> None:
    """Deregisters and destroys pools, and leaves the rest if it takes longer: a deregistration waits for the other ranks, which may be gone.

    vLLM then aborts the communicator. The thread has no reference to it, because vLLM ends its process group at a certain point.
    """
    is_abandoned = threading.Event()

    def close() -> None:
        for pool in pools:
            if not is_abandoned.is_set():
                with suppress(Error):  # the communicator may have failed
                    pool.close()

    thread = threading.Thread(target=close, name="symmalloc-close", daemon=True)
    thread.start()
    thread.join(seconds)
    is_abandoned.set()


def windows() -> list[dict[str, Any]]:
    """Returns the segments of all pools: the pool's kind, the address and the size. Each has a window after the end of its context."""
    return [window for pools in _pools.values() for window in pools.windows()]


@dataclass
class Pools:
    """The pools of a communicator."""

    communicator: Any
    eager: MemPool
    stream: int
    """The stream of the first context, on which nothing is captured."""
    graphs: dict[int, MemPool] = field(default_factory=dict)
    """The pools for graphs, by the stream of the captures."""

    @staticmethod
    def of(communicator: Any, stream: int) -> Pools:
        """Returns the pools of a communicator. The first call on it creates them, which is collective."""
        if (found := _pools.get(id(communicator))) is None:
            eager = MemPool(device=communicator.device)
            found = Pools(communicator, eager, stream)
            found._register(eager)
            _pools[id(communicator)] = found
        return found

    def at(self, stream: int, is_capturing: bool) -> MemPool:
        """Returns the pool of a context. Outside of a capture, it may create the stream's pool for graphs (collective).

        Raises `InvalidState` for a capture on a stream that has no such pool.
        """
        if is_capturing:
            if (pool := self.graphs.get(stream)) is None:
                raise InvalidState("a capture needs a pool for graphs: run the same work on this stream once before the capture")
            return pool
        if stream != self.stream and stream not in self.graphs:
            import torch

            size_bytes = graph_bytes()
            pool = MemPool(
                reserve=size_bytes,
                graphs=True,
                stream=torch.cuda.current_stream(self.communicator.device),
                device=self.communicator.device,
            )
            self._register(pool)
            self.graphs[stream] = pool
        return self.eager

    def windows(self) -> list[dict[str, Any]]:
        pools = [("eager", self.eager), *(("graphs", pool) for pool in self.graphs.values())]
        return [
            {"pool": kind, "address": segment["address"], "size_bytes": segment["total_size"]}
            for kind, pool in pools
            for segment in pool.snapshot()
        ]

    def all(self) -> list[MemPool]:
        return [*self.graphs.values(), self.eager]

    def _register(self, pool: MemPool) -> None:
        communicator = self.communicator
        try:
            pool.register(
                comm=communicator.comm, rank=communicator.rank, world=communicator.world_size, mode=Mode.OFF, name="vLLM"
            )
        except Error:
            with suppress(Error):
                pool.close()
            raise


# The pools of this process, by the identity of the communicator, in order of creation. `Pools` keeps the communicator alive.
_pools: dict[int, Pools] = {}


class Context:
    """Replaces `nccl_symm_mem_context`: directs this thread's allocations to the communicator's pool."""

    def __init__(self, pynccl_comm: Any, disabled: bool = False) -> None:
        from vllm import envs

        self.disabled = bool(disabled or not envs.VLLM_USE_NCCL_SYMM_MEM or pynccl_comm.world_size == 1)
        self._communicator = pynccl_comm
        self._scope: Scope | None = None

    def __enter__(self) -> Context:
        if not self.disabled:
            import torch

            stream = torch.cuda.current_stream(self._communicator.device).cuda_stream
            is_capturing = torch.cuda.is_current_stream_capturing()
            if is_capturing and id(self._communicator) not in _pools:
                raise InvalidState("a capture cannot create pools: run the same work once before the capture")
            pool = Pools.of(self._communicator, stream).at(stream, is_capturing)
            self._scope = use_mem_pool(pool, register=True)
            self._scope.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._scope is not None:
            scope, self._scope = self._scope, None
            scope.__exit__(kind, error, at)


def graph_bytes() -> int:
    """Returns the size of a pool for graphs. Raises `InvalidSettings`."""
    text = os.environ.get(GRAPH_VARIABLE, "").strip() or str(GRAPH_MB)
    if not text.isdecimal() or int(text) == 0:
        raise InvalidSettings(f"{GRAPH_VARIABLE}={text!r} is not a number of MiB above 0")
    return int(text) << 20
