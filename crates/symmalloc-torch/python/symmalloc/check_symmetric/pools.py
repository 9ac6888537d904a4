"""The allocators under test. Each provides pools of symmetric memory, and links: communicators on which a pool is registered.

native            a `torch.cuda.MemPool` of `ncclMemAlloc`, registered by PyTorch: `register_mem_pool(pool, symm=True)`
expandable        a `torch.cuda.MemPool` with `expandable_segments:True`; windows over the segments of its snapshot
cudaMallocAsync   the same with `backend:cudaMallocAsync`
vllm              vLLM's `nccl_symm_mem_context`, on its own communicator
sglang            SGLang's `SymmetricMemoryContext`, on its own communicator
symmalloc         a `symmalloc.MemPool`, registered on this program's communicator
module:function   the result of `function()`: a `torch.cuda.MemPool`, with windows over the segments of its snapshot
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .nccl import WINDOWS_MINIMUM, Communicator, address_range, unique_id, version
from .rank import CannotRun, Rank

NAMES = ("native", "expandable", "cudaMallocAsync", "vllm", "sglang", "symmalloc")
CONFIGURATIONS = {"expandable": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}
# The largest tensor of a case has 48 MiB.
ELEMENTS_MAX = 12 << 20
DEADLINE_SECONDS = 8.0
VLLM_ENVIRONMENT = {
    "VLLM_USE_NCCL_SYMM_MEM": "1",
    # Standard output may have JSON.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # vLLM's imports ask PyTorch for GPUs. Without this, the answer initializes CUDA, which the ranks cannot use after their fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
VLLM_NOT_COMPILED = (
    "vLLM could not compile its allocator for NCCL, see its warning. It needs nvcc, nccl.h (VLLM_NCCL_INCLUDE_PATH), "
    "and a libnccl.so that the linker finds (LIBRARY_PATH)"
)


# PyTorch raises these if a compiler is missing or fails.
SGLANG_COMPILATION = (RuntimeError, OSError, subprocess.CalledProcessError)
SGLANG_NEEDS = "It needs nvcc, and a libnccl.so that the linker finds (LIBRARY_PATH)"


class Link:
    """A communicator on which a pool is registered."""

    def __init__(self, rank: Rank, name: str) -> None:
        self._rank, self.name = rank, name

    def all_reduce(self, tensor: Any, *, is_symmetric: bool = True) -> None:
        """Sums a float32 tensor in place on the current stream. `is_symmetric`: NCCL must use a symmetric kernel."""
        self._rank.note(f"all-reduce of {tensor.numel():,} elements on {self.name}")
        self._rank.reduces += is_symmetric
        self._all_reduce(tensor)

    def _all_reduce(self, tensor: Any) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        """Aborts the communicator. Its windows end with it."""
        raise NotImplementedError


class RawLink(Link):
    """A communicator of this program."""

    def __init__(self, rank: Rank, name: str, communicator: Communicator) -> None:
        super().__init__(rank, name)
        self.communicator = communicator
        self.windows: dict[int, tuple[int, int]] = {}
        """Size and handle of each window, by its address."""

    @staticmethod
    def connect(rank: Rank, name: str) -> RawLink:
        """Creates a communicator. Collective."""
        identity = unique_id().hex() if rank.rank == 0 else ""
        identity = rank.exchange(identity)[0]
        rank.note(f"ncclCommInitRank of {name}")
        return RawLink(rank, name, Communicator.connect(bytes.fromhex(identity), rank.rank, rank.world))

    def _all_reduce(self, tensor: Any) -> None:
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        self.communicator.all_reduce(tensor.data_ptr(), tensor.numel(), stream)

    def abort(self) -> None:
        self._rank.note(f"ncclCommAbort of {self.name}")
        self.windows.clear()
        self.communicator.abort()


class Pool:
    """A pool of symmetric memory."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._seen: list[int] = []

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Directs this thread's allocations to the pool."""
        raise NotImplementedError

    def link(self) -> Any:
        """Registers the pool on a new communicator. Collective."""
        raise NotImplementedError

    def sync(self) -> None:
        """Creates windows over new segments on all links, and removes those of released segments. Collective."""

    def segments(self) -> list[tuple[int, int]]:
        """Returns address and size of each segment."""
        raise NotImplementedError

    def size_bytes(self) -> int:
        """Returns the total size of all segments."""
        return sum(size_bytes for _, size_bytes in self.segments())

    def trim(self) -> None:
        """Releases free memory to the device."""
        import torch

        self._rank.note("releases free memory (empty_cache)")
        torch.cuda.empty_cache()
        with self.scope():
            torch.cuda.empty_cache()

    def renew(self) -> None:
        """Gives up the pool, releases its memory, and replaces it by a new pool on the same links. Collective."""
        raise CannotRun("this allocator's pool cannot be replaced")

    def for_graphs(self, _size_bytes: int, _stream: Any) -> Pool:
        """Returns the pool for tensors that are allocated during a capture. Collective."""
        return self

    def sleep(self) -> None:
        """Releases the memory, and keeps the addresses. Collective."""
        raise CannotRun("this allocator cannot release memory and keep its addresses (no sleep and wake)")

    def wake(self) -> None:
        raise NotImplementedError

    def observe(self) -> None:
        """Numbers new segments. Call it after each allocation."""
        self._seen += [address for address, _ in sorted(self.segments()) if address not in self._seen]

    def place(self, tensor: Any) -> tuple[int, int] | None:
        """Returns the segment, numbered in order of appearance, and the offset in it; None outside of the pool."""
        self.observe()
        for address, size_bytes in self.segments():
            if address <= tensor.data_ptr() < address + size_bytes:
                return self._seen.index(address), tensor.data_ptr() - address
        return None


class TorchPool(Pool):
    """A `torch.cuda.MemPool`."""

    def __init__(self, rank: Rank, make: Callable[[], Any]) -> None:
        super().__init__(rank)
        rank.note("creates a torch.cuda.MemPool")
        self._make, self._pool = make, make()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        import torch

        # During a capture, the graph's pool has precedence. vLLM and SGLang leave it for the scope.
        graph_pool = self._rank.allocator.graph_pool if torch.cuda.is_current_stream_capturing() else None
        device = torch.cuda.current_device()
        if graph_pool is not None:
            torch._C._cuda_endAllocateToPool(device, graph_pool)
        try:
            with torch.cuda.use_mem_pool(self._pool):
                yield
        finally:
            if graph_pool is not None:
                torch._C._cuda_beginAllocateCurrentThreadToPool(device, graph_pool)

    def segments(self) -> list[tuple[int, int]]:
        return [(segment["address"], segment["total_size"]) for segment in self._pool.snapshot()]

    def _drop(self) -> None:
        import torch

        self._pool = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._seen.clear()


class GroupLink(Link):
    """A process group of PyTorch."""

    def __init__(self, rank: Rank, name: str, group: Any) -> None:
        import torch

        super().__init__(rank, name)
        self._group = group
        device = torch.device("cuda", torch.cuda.current_device())
        self.backend = group._get_backend(device)
        rank.note(f"first all-reduce of {name}")
        torch.distributed.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize()

    def _all_reduce(self, tensor: Any) -> None:
        import torch

        torch.distributed.all_reduce(tensor, group=self._group)

    def abort(self) -> None:
        self._rank.note(f"abort of {self.name}")
        self.backend.abort()


class NativePool(TorchPool):
    """A pool that PyTorch registers: each segment at its creation, on each group."""

    def __init__(self, rank: Rank) -> None:
        import torch

        backend = torch.distributed.group.WORLD._get_backend(torch.device("cuda", torch.cuda.current_device()))
        super().__init__(rank, lambda: torch.cuda.MemPool(backend.mem_allocator))
        self._links: list[GroupLink] = []

    def link(self) -> GroupLink:
        import torch

        number = self._rank.allocator.number()
        self._rank.note("creates a process group")
        group = torch.distributed.new_group() if number else torch.distributed.group.WORLD
        link = GroupLink(self._rank, f"group {number}", group)
        self._register(link)
        self._links.append(link)
        return link

    def renew(self) -> None:
        self._drop()
        self._pool = self._make()
        for link in self._links:
            self._register(link)

    def _register(self, link: GroupLink) -> None:
        self._rank.note(f"register_mem_pool on {link.name}")
        link.backend.register_mem_pool(self._pool, symm=True)


class SnapshotPool(TorchPool):
    """A pool with windows over the segments of its snapshot.

    Like vLLM, a sync compares the snapshot with the windows. Unlike vLLM, it also removes windows of segments that were released
    or have grown.
    """

    def __init__(self, rank: Rank, make: Callable[[], Any]) -> None:
        super().__init__(rank, make)
        self._links: list[RawLink] = []

    def link(self) -> RawLink:
        link = self._rank.allocator.raw_link()
        self._links.append(link)
        self._sync(link)
        return link

    def sync(self) -> None:
        for link in self._links:
            self._sync(link)

    def renew(self) -> None:
        self._drop()
        self._pool = self._make()
        self.sync()

    def _sync(self, link: RawLink) -> None:
        segments = dict(self.segments())
        for address, (size_bytes, window) in list(link.windows.items()):
            if segments.get(address) != size_bytes:
                self._rank.note(f"ncclCommWindowDeregister of {size_bytes:,} bytes on {link.name}")
                link.communicator.deregister(window)
                del link.windows[address]
        for address, size_bytes in segments.items():
            if address not in link.windows:
                self._remark_pieces(address, size_bytes)
                self._rank.note(f"ncclCommWindowRegister of {size_bytes:,} bytes on {link.name}")
                link.windows[address] = (size_bytes, link.communicator.register(address, size_bytes))

    def _remark_pieces(self, address: int, size_bytes: int) -> None:
        """Adds a remark if the window will span several allocations of the driver."""
        _, piece_bytes = address_range(address)
        if piece_bytes < size_bytes:
            self._rank.remark(
                "a window spans several allocations of the driver, of which NCCL before 2.30.3 maps the first"
            )


class VllmPool(Pool):
    """vLLM's pool. It has one pool and one communicator in a process."""

    engine = "vLLM"

    def __init__(self, rank: Rank, module: Any, communicator: Any) -> None:
        super().__init__(rank)
        self._module, self._communicator = module, communicator
        self._is_linked = False

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        import torch

        if torch.cuda.is_current_stream_capturing():
            self._module.set_graph_pool_id(self._rank.allocator.graph_pool)
        self._rank.note(f"{self.engine}'s context")
        with self._context():
            yield

    def _context(self) -> Any:
        return self._module.nccl_symm_mem_context(self._communicator)

    def link(self) -> RawLink:
        if self._is_linked:
            raise CannotRun(f"{self.engine}'s pool is registered on one communicator only")
        self._is_linked = True
        return RawLink(self._rank, f"{self.engine}'s communicator", Communicator(self._communicator.comm))

    def segments(self) -> list[tuple[int, int]]:
        return [(segment["address"], segment["total_size"]) for segment in self._module.get_nccl_mem_pool().snapshot()]


class SglangPool(VllmPool):
    """SGLang's pool, of which a process has one. The end of a context registers new segments on the communicator of its group."""

    engine = "SGLang"

    def _context(self) -> Any:
        group = SimpleNamespace(pynccl_comm=self._communicator, unique_name="check_symmetric", world_size=self._rank.world)
        return self._module.SymmetricMemoryContext(group)


class SymmallocPool(Pool):
    """A pool of symmalloc."""

    def __init__(self, rank: Rank, **options: Any) -> None:
        import symmalloc

        super().__init__(rank)
        rank.note("creates a symmalloc.MemPool")
        self._options, self._pool = options, symmalloc.MemPool(**options)
        self._links: list[SymmallocLink] = []

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        import symmalloc

        with symmalloc.use_mem_pool(self._pool):
            yield

    def link(self) -> SymmallocLink:
        raw = self._rank.allocator.raw_link()
        link = SymmallocLink(self._rank, raw.name, raw.communicator, self)
        self._register(link)
        self._links.append(link)
        return link

    def sync(self) -> None:
        self._rank.note("MemPool.sync")
        self._pool.sync()

    def segments(self) -> list[tuple[int, int]]:
        return [(segment["address"], segment["total_size"]) for segment in self._pool.snapshot()]

    def renew(self) -> None:
        import symmalloc
        import torch

        self._rank.note("MemPool.close")
        self._pool.close()
        torch.cuda.empty_cache()
        self._seen.clear()
        self._pool = symmalloc.MemPool(**self._options)
        for link in self._links:
            self._register(link)

    def for_graphs(self, size_bytes: int, stream: Any) -> Pool:
        pool = SymmallocPool(self._rank, reserve=size_bytes, graphs=True, stream=stream)
        for link in self._links:
            pool._register(link)
            pool._links.append(link)
        return pool

    def sleep(self) -> None:
        self._rank.note("MemPool.sleep")
        self._pool.sleep()

    def wake(self) -> None:
        self._rank.note("MemPool.wake")
        self._pool.wake()

    def _register(self, link: SymmallocLink) -> None:
        self._rank.note(f"MemPool.register on {link.name}")
        self._pool.register(
            comm=link.communicator.comm,
            rank=self._rank.rank,
            world=self._rank.world,
            name=link.name,
            deadline_seconds=DEADLINE_SECONDS,
        )

    def _deregister(self, link: SymmallocLink) -> None:
        self._links.remove(link)
        self._pool.deregister(comm=link.communicator.comm)


class SymmallocLink(RawLink):
    """A communicator of this program, on which a pool of symmalloc is registered."""

    def __init__(self, rank: Rank, name: str, communicator: Communicator, pool: SymmallocPool) -> None:
        super().__init__(rank, name, communicator)
        self._pool = pool

    def abort(self) -> None:
        """Deregisters the pool first, as symmalloc requires for communicators that the program owns."""
        self._rank.note(f"MemPool.deregister on {self.name}")
        self._pool._deregister(self)
        super().abort()


class Allocator:
    """The allocator under test, in the process of a rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._numbers = 0
        self._connected: RawLink | None = None
        self.graph_pool: tuple[int, int] | None = None
        """The pool of the graph that is being captured."""

    def connect(self) -> None:
        """Connects the ranks before the case begins."""
        self._connected = RawLink.connect(self._rank, "communicator 0")
        self._warm(self._connected)

    def pool(self) -> Pool:
        """Creates a pool."""
        raise NotImplementedError

    def number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def raw_link(self) -> RawLink:
        """Returns a communicator of this program without windows. Collective."""
        number = self.number()
        if number == 0 and self._connected is not None:
            return self._connected
        link = RawLink.connect(self._rank, f"communicator {number}")
        self._warm(link)
        return link

    def _warm(self, link: RawLink) -> None:
        import torch

        link.all_reduce(torch.zeros(1 << 18, device="cuda"), is_symmetric=False)
        torch.cuda.synchronize()


class Native(Allocator):
    def connect(self) -> None:
        import torch

        self._rank.note("init_process_group")
        device = torch.device("cuda", torch.cuda.current_device())
        store = f"file://{self._rank.folder / 'store'}"
        torch.distributed.init_process_group(
            "nccl", init_method=store, rank=self._rank.rank, world_size=self._rank.world, device_id=device
        )
        torch.distributed.all_reduce(torch.zeros(1 << 18, device=device))
        torch.cuda.synchronize()

    def pool(self) -> Pool:
        return NativePool(self._rank)


class Snapshot(Allocator):
    def pool(self) -> Pool:
        import torch

        return SnapshotPool(self._rank, torch.cuda.MemPool)


class Vllm(Allocator):
    def connect(self) -> None:
        import torch

        store = f"file://{self._rank.folder / 'store'}"
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=self._rank.rank, world_size=self._rank.world
        )
        allocator, pynccl = _vllm()
        self._rank.note("PyNcclCommunicator")
        device = torch.device("cuda", torch.cuda.current_device())
        self._communicator = pynccl.PyNcclCommunicator(torch.distributed.group.WORLD, device)
        if self._communicator.disabled:
            raise CannotRun("vLLM's communicator is disabled: unset VLLM_DISABLE_PYNCCL, and see that vLLM finds NCCL")
        self._module = allocator
        self._has_pool = False
        if allocator.get_nccl_mem_pool() is None:
            raise CannotRun(VLLM_NOT_COMPILED)

    def pool(self) -> Pool:
        if self._has_pool:
            raise CannotRun("vLLM has one pool in a process")
        self._has_pool = True
        return VllmPool(self._rank, self._module, self._communicator)


class Sglang(Allocator):
    def connect(self) -> None:
        import torch

        store = f"file://{self._rank.folder / 'store'}"
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=self._rank.rank, world_size=self._rank.world
        )
        self._rank.note("imports SGLang")
        self._module, pynccl = _sglang()
        self._rank.note("PyNcclCommunicator")
        device = torch.device("cuda", torch.cuda.current_device())
        self._communicator = pynccl.PyNcclCommunicator(
            torch.distributed.group.WORLD, device, is_symmetric_memory_enabled=True
        )
        if self._communicator.disabled:
            raise CannotRun("SGLang's communicator is disabled: see that SGLang finds NCCL (SGLANG_NCCL_SO_PATH)")
        self._rank.note("get_nccl_mem_pool")
        self._module.get_nccl_mem_pool()
        self._has_pool = False

    def pool(self) -> Pool:
        if self._has_pool:
            raise CannotRun("SGLang has one pool in a process")
        self._has_pool = True
        return SglangPool(self._rank, self._module, self._communicator)


class Symmalloc(Allocator):
    def pool(self) -> Pool:
        return SymmallocPool(self._rank)


class Other(Allocator):
    """Pools that a function of the user creates."""

    def __init__(self, rank: Rank, function: Callable[[], Any]) -> None:
        super().__init__(rank)
        self._function = function

    def pool(self) -> Pool:
        return SnapshotPool(self._rank, self._function)


class Gpus:
    """The stack under test: PyTorch, NCCL and an allocator on the GPUs of this machine."""

    def __init__(self, allocator: str, devices: list[int] | None = None) -> None:
        """Raises `ValueError` for an unknown allocator."""
        if allocator not in NAMES and not re.fullmatch(r"[\w.]+:\w+", allocator):
            raise ValueError(f"unknown allocator `{allocator}`: use {', '.join(NAMES)}, or module:function")
        self.allocator, self._devices = allocator, devices
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        """The temporary folder of the probe and of the ranks, if they need their own."""

    def configure(self) -> None:
        """Sets the environment, and imports PyTorch for all processes. This process never uses CUDA."""
        if (configuration := CONFIGURATIONS.get(self.allocator)) is not None:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = configuration
            os.environ.pop("PYTORCH_ALLOC_CONF", None)
        _torch()
        if self.allocator == "vllm":
            for name, value in VLLM_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            _vllm()  # takes seconds, and the forked ranks inherit it
        if self.allocator == "sglang":
            # SGLang compiles in a folder that all its processes of a machine share by default, and removes the lock there.
            self._temporary = tempfile.TemporaryDirectory(prefix="sglang-")

    def probe(self) -> dict[str, Any]:
        """Checks that the stack is complete. Returns its versions and devices."""
        self._use_temporary()
        torch = _torch()
        if self.allocator == "symmalloc":
            _install_symmalloc()  # compiles its class once, before the deadlines
        if not torch.cuda.is_available():
            raise CannotRun("PyTorch finds no GPU: check the driver and CUDA_VISIBLE_DEVICES")
        try:
            number = version()
        except OSError as error:
            raise CannotRun(f"libnccl.so.2 cannot be loaded: {error}") from error
        if number < WINDOWS_MINIMUM:
            raise CannotRun(f"NCCL {_dotted(number)} has no symmetric windows: 2.27 is the first version that has them")
        if ":" in self.allocator:
            _function(self.allocator)
        if self.allocator == "vllm":
            _compile_vllm()
        if self.allocator == "sglang":
            _compile_sglang()
        devices = self._devices if self._devices is not None else list(range(torch.cuda.device_count()))
        names = [torch.cuda.get_device_name(device) for device in devices]
        pairs = [(one, two) for one in devices for two in devices if one != two]
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        if apart:
            raise CannotRun(
                f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other's memory, which symmetric kernels need"
            )
        facts = {
            "allocator": self.allocator,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": _dotted(number),
            "devices": names,
            "environment": {
                name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "PYTORCH_"))
            },
        }
        if self.allocator == "symmalloc":
            import symmalloc

            facts["symmalloc"] = symmalloc.__version__
        if self.allocator == "vllm":
            facts["vllm"] = importlib.metadata.version("vllm")
        if self.allocator == "sglang":
            facts["sglang"] = importlib.metadata.version("sglang")
        return facts

    def begin(self, rank: Rank) -> None:
        """Initializes CUDA, and connects the ranks."""
        self._use_temporary()
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "TUNING",
            "NCCL_DEBUG_FILE": str(rank.folder / f"nccl{rank.rank}"),
            "RANK": str(rank.rank),
            "WORLD_SIZE": str(rank.world),
            "LOCAL_RANK": str(rank.rank),
        }
        torch = _torch()
        rank.note("initializes CUDA")
        rank.allocator = self._allocator(rank)
        if self.allocator == "symmalloc":
            _install_symmalloc()
        devices = self._devices if self._devices is not None else range(torch.cuda.device_count())
        torch.cuda.set_device(devices[rank.rank % len(devices)])
        rank.prepare(ELEMENTS_MAX)
        rank.allocator.connect()

    def kernels(self, folder: Path) -> dict[str, int] | None:
        """Counts the launches in the log of NCCL, where the first rank of a communicator writes them.

        Kernels with LL in their names exchange data through NCCL's own buffers, so they cannot detect a wrong address.
        """
        try:
            log = (folder / "nccl0").read_text(errors="replace")
        except OSError:
            return {}
        found = re.findall(
            r"AllReduce \[Symmetric\]: \d+ Bytes -> Kernel (\S+) .*?(?:nWorks (\d+))?$", log, re.MULTILINE
        )
        kernels: Counter[str] = Counter()
        for kernel, works in found:
            if "LL" not in kernel:
                kernels[kernel] += int(works or 1)
        return dict(kernels)

    def _use_temporary(self) -> None:
        if self._temporary is not None:
            tempfile.tempdir = os.environ["TMPDIR"] = self._temporary.name

    def _allocator(self, rank: Rank) -> Allocator:
        if ":" in self.allocator:
            return Other(rank, _function(self.allocator))
        kinds = {"native": Native, "vllm": Vllm, "sglang": Sglang, "symmalloc": Symmalloc}
        return kinds.get(self.allocator, Snapshot)(rank)


def _torch() -> Any:
    try:
        import torch
    except Exception as error:  # an incomplete installation may raise any exception
        raise CannotRun(f"PyTorch cannot be imported: {error}") from error
    if torch.version.cuda is None:
        raise CannotRun(f"PyTorch {torch.__version__} was built without CUDA: install a CUDA build")
    return torch


def _install_symmalloc() -> None:
    import symmalloc

    try:
        symmalloc.install()
    except symmalloc.Error as error:
        raise CannotRun(f"symmalloc cannot be installed in PyTorch: {error}") from error


def _vllm() -> tuple[Any, Any]:
    try:
        from vllm.distributed.device_communicators import pynccl, pynccl_allocator
    except Exception as error:
        raise CannotRun(f"vLLM's pool cannot be imported: {error}") from error
    return pynccl_allocator, pynccl


def _compile_vllm() -> None:
    """Compiles vLLM's allocator once. The ranks then load it within their deadlines."""
    allocator, _ = _vllm()
    if not allocator.is_symmetric_memory_enabled():
        raise CannotRun("vLLM's symmetric memory is off: unset VLLM_USE_NCCL_SYMM_MEM, or set it to 1")
    allocator.compile_nccl_allocator()
    if not allocator.is_symmetric_memory_enabled():
        raise CannotRun(VLLM_NOT_COMPILED)


def _sglang() -> tuple[Any, Any]:
    """Imports SGLang's pool. The import may use CUDA, so the process that forks the ranks must not call this."""
    try:
        from sglang.srt.distributed.device_communicators import pynccl, pynccl_allocator
    except Exception as error:
        raise CannotRun(f"SGLang's pool cannot be imported: {error}") from error
    return pynccl_allocator, pynccl


def _compile_sglang() -> None:
    """Compiles SGLang's allocator once. The ranks then load it within their deadlines."""
    import torch

    allocator, _ = _sglang()
    if not torch.distributed.is_initialized():
        # SGLang waits for other processes before it compiles.
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        allocator.get_nccl_mem_pool()
    except Exception as error:
        if isinstance(error, SGLANG_COMPILATION) and not any(Path(tempfile.gettempdir()).rglob("nccl_allocator.so")):
            raise CannotRun(f"SGLang could not compile its allocator for NCCL ({error}). {SGLANG_NEEDS}") from error
        raise CannotRun(f"SGLang could not create its pool: {type(error).__name__}: {error}") from error


def _function(name: str) -> Callable[[], Any]:
    module, function = name.split(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise CannotRun(f"--allocator {name} cannot be imported: {error}") from error
    if not callable(found):
        raise CannotRun(f"--allocator {name} is not a function")
    return found  # type: ignore[no-any-return]


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
