"""The plug-in for vLLM on fakes of vLLM's modules: pools in place of vLLM's own, and the sleep mode. No PyTorch."""

from __future__ import annotations

import unittest
from pathlib import Path

import needs
from test_engines import BEGIN

FAKES = Path(__file__).resolve().parent / "fakes" / "vllm"

PLUG_IN = (
    f"import sys; sys.path.insert(0, {str(FAKES)!r})"
    + BEGIN
    + """
import ctypes, os, torch
from ctypes import CDLL
from symmalloc import vllm as plug_in, vllm_sleep
from symmalloc.vllm import register
from vllm.distributed.device_communicators import pynccl, pynccl_allocator


def new_stream():
    stream = ctypes.c_void_p()
    assert CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), 1) == 0
    return stream.value

def on(stream, is_capturing=False):
    torch.streams.number, torch.streams.is_capturing = stream, is_capturing

def allocate_on(rank, size_bytes):
    return int(allocate(size_bytes, rank.number, torch.cuda.current_stream().cuda_stream))
"""
)

ONE = (
    PLUG_IN
    + """
symmalloc.state.installed_with = (None, None, True)
os.environ["SYMMALLOC_VLLM"] = "sleep"
register()
from vllm.device_allocator.cumem import CuMemAllocator
cumem = CuMemAllocator.get_instance()

def inside(tag, size=MIB):
    with cumem.use_memory_pool(tag):
        return allocate(size, 0, None)

def holds(pointer, byte, size=MIB):
    return set(ctypes.string_at(pointer, size)) == {byte}
"""
)


@needs.device
@needs.nccl
class PlugIn(unittest.TestCase):
    def succeeds(self, program: str, **environment: str) -> str:
        done = needs.process(program, **environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_contexts_use_the_pools_of_their_communicator_and_register_nothing_after_the_warm_up(self) -> None:
        self.succeeds(
            PLUG_IN
            + """
def program(rank):
    comm = pynccl.PyNcclCommunicator(rank.connect(ids[0]), rank.number, RANKS, rank.number)
    main, side = new_stream(), new_stream()
    on(main)
    with pynccl.symmetric_context(comm):
        first = allocate_on(rank, MIB)
    (pools,) = [pools for pools in plug_in._pools.values() if pools.communicator is comm]
    assert symmalloc.allocator(rank.number).placement_of(first).pool == pools.eager.id
    assert not pools.graphs, "nothing is captured on the first stream"
    on(side)
    with pynccl.symmetric_context(comm):  # the run before the capture
        warm = allocate_on(rank, MIB)
    rank.free(warm)
    on(side, is_capturing=True)
    with pynccl.symmetric_context(comm):
        captured = allocate_on(rank, MIB)
    graphs = pools.graphs[side]
    assert symmalloc.allocator(rank.number).placement_of(captured).pool == graphs.id != pools.eager.id
    rank.wait()
    before, there = calls("ncclCommWindowRegister"), pools.windows()
    assert {window["pool"] for window in there} == {"eager", "graphs"} and len(there) == 3, there
    assert before == RANKS * 3, before
    rank.wait()
    for _ in range(5):
        on(main)
        with pynccl.symmetric_context(comm):
            rank.free(allocate_on(rank, MIB // 2))
        on(side)
        with pynccl.symmetric_context(comm):
            again = allocate_on(rank, MIB)
        assert again == warm, "memory of a capture is not given to others"
        rank.free(again)
    rank.wait()
    assert calls("ncclCommWindowRegister") == before and pools.windows() == there
    assert symmalloc.allocator(rank.number).placement_of(allocate_on(rank, MIB)).pool == 0, "no scope is left open"
    rank.wait()
    comm.destroy()
    assert comm.is_destroyed
    rank.wait()
    assert nccl.stub_nccl_live(1) == 0, "windows end before their communicator"

os.environ["SYMMALLOC_VLLM"] = "install, pools"
symmalloc.state.installed_with = (None, None, True)
register()
register()
on_ranks(program)
""",
            VLLM_USE_NCCL_SYMM_MEM="1",
            SYMMALLOC_VLLM_GRAPH_MB="4",
        )

    def test_a_context_is_empty_where_vllm_has_no_symmetric_memory(self) -> None:
        self.succeeds(
            PLUG_IN
            + """
symmalloc.state.installed_with = (None, None, True)
plug_in.use_pools()
for world, disabled in ((1, False), (2, True)):
    alone = pynccl.PyNcclCommunicator(None, 0, world, 0)
    with pynccl_allocator.nccl_symm_mem_context(alone, disabled) as context:
        assert context.disabled
        assert symmalloc.allocator(0).placement_of(allocate(MIB, 0, None)).pool == 0
assert not plug_in._pools
""",
            VLLM_USE_NCCL_SYMM_MEM="1",
        )
        self.succeeds(
            PLUG_IN
            + """
plug_in.use_pools()
with pynccl.symmetric_context(pynccl.PyNcclCommunicator(None, 0, 2, 0)) as context:
    assert context.disabled
""",
            VLLM_USE_NCCL_SYMM_MEM="0",
        )

    def test_a_capture_before_any_other_run_is_an_error(self) -> None:
        self.succeeds(
            PLUG_IN
            + """
symmalloc.state.installed_with = (None, None, True)
plug_in.use_pools()
on(2, is_capturing=True)
def capture():
    with pynccl.symmetric_context(pynccl.PyNcclCommunicator(1, 0, 2, 0)):
        pass
raises(symmalloc.InvalidState, "before the capture", capture)
""",
            VLLM_USE_NCCL_SYMM_MEM="1",
        )

    def test_settings_and_versions_that_do_not_fit_are_errors(self) -> None:
        self.succeeds(
            PLUG_IN
            + """
register()
assert not symmalloc.installed() and pynccl_allocator.nccl_symm_mem_context is not plug_in.Context
os.environ["SYMMALLOC_VLLM"] = "pool"
raises(symmalloc.InvalidSettings, "use install, pools, sleep", register)
for text in ("0", "x", "-1", "1.5"):
    os.environ["SYMMALLOC_VLLM_GRAPH_MB"] = text
    raises(symmalloc.InvalidSettings, "MiB", plug_in.graph_bytes)
os.environ["SYMMALLOC_VLLM_GRAPH_MB"] = ""
assert plug_in.graph_bytes() == 64 * MIB
symmalloc.state.installed_with = (None, None, True)
del pynccl_allocator.nccl_symm_mem_context
os.environ["SYMMALLOC_VLLM"] = "pools"
raises(symmalloc.InvalidState, "SYMMALLOC_VLLM=install", register)
from vllm.device_allocator import cumem
del cumem.CuMemAllocator.get_instance
os.environ["SYMMALLOC_VLLM"] = "sleep"
raises(symmalloc.InvalidState, "leave out sleep", register)
"""
        )

    def test_the_package_has_the_entry_point(self) -> None:
        metadata = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
        self.assertIn(
            '[project.entry-points."vllm.general_plugins"]\nsymmalloc = "symmalloc.vllm:register"\n', metadata
        )


@needs.device
@needs.nccl
class SleepMode(unittest.TestCase):
    def succeeds(self, program: str, **environment: str) -> str:
        done = needs.process(program, **environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_level_1_keeps_weights_and_level_2_discards_everything(self) -> None:
        self.succeeds(
            ONE
            + """
assert cumem is CuMemAllocator.get_instance() and cumem.get_current_usage() == 0
weights, cache = inside("weights"), inside("kv_cache")
assert cumem.get_current_usage() >= 2 * MIB
for byte in range(1, 4):
    for pointer in (weights, cache):
        ctypes.memset(pointer, byte, MIB)
    cumem.sleep(offload_tags=("weights",))
    assert not cumem.is_awake()
    cumem.wake_up()
    assert holds(weights, byte) and holds(cache, 0), "level 1: a discarded page is zero, never undefined"
    cumem.sleep(offload_tags=())
    cumem.wake_up(["weights", "scheduling"])
    assert not cumem.is_awake() and holds(weights, 0)
    cumem.wake_up(["weights"]), cumem.wake_up(["kv_cache"])
    assert cumem.is_awake() and holds(cache, 0)
"""
        )

    def test_sleeping_twice_and_waking_twice_change_nothing(self) -> None:
        self.succeeds(
            ONE
            + """
weights, cache = inside("weights"), inside("kv_cache")
ctypes.memset(weights, 9, MIB)
cumem.discard(("kv_cache", "unknown"))
cumem.sleep("weights")
cumem.sleep("weights")
cumem.wake_up()
cumem.wake_up()
assert holds(weights, 9) and holds(cache, 0)
cumem.sleep(())
asleep = cumem._pools["weights"].id
raises(symmalloc.InvalidState, "sleeps", lambda: symmalloc.allocator(0).allocate(MIB, pool=asleep))
"""
        )

    def test_the_backend_has_the_interface_and_its_state_follows_the_pools(self) -> None:
        self.succeeds(
            PLUG_IN
            + BACKENDS
            + """
symmalloc.state.installed_with = (None, None, True)
os.environ["SYMMALLOC_VLLM"] = "sleep"
register()
register()
assert registry == {"symmalloc": ("symmalloc.vllm_sleep", "SymmallocBackend")}, registry
from symmalloc.vllm_sleep import SymmallocBackend
assert issubclass(SymmallocBackend, backends.SleepModeBackend) and SymmallocBackend.is_supported()
backend: Interface = SymmallocBackend()
assert isinstance(backend, Interface)
assert backend.preserves_communicators() and backend.preserves_graphs_with_communicators()
assert backend.preserves_compiled_artifacts() and not backend.supports_durable_storage()
allocator = vllm_sleep.sleep_allocator()
with allocator.use_memory_pool("weights"):
    weights = allocate(MIB, 0, None)
with allocator.use_memory_pool("kv_cache"):
    cache = allocate(MIB, 0, None)
ctypes.memset(weights, 3, MIB)
assert backend.state() == "RUNNING"
backend.suspend(1)
assert backend.state() == "SUSPENDED"
backend.resume(["weights"])
assert backend.state() == "SUSPENDED", "the cache still sleeps"
backend.resume()
assert backend.state() == "RUNNING" and set(ctypes.string_at(weights, MIB)) == {3}
backend.discard(("kv_cache",))
assert backend.state() == "SUSPENDED"
backend.resume(None)
backend.suspend(level=2)
backend.resume()
assert set(ctypes.string_at(weights, MIB)) == {0}
# A call that fails leaves the state as the pools are.
for method, failing, state in (("sleep", lambda: backend.suspend(1), "RUNNING"), ("wake", backend.resume, "SUSPENDED")):
    pool = allocator._pools["weights"]
    if method == "wake":
        backend.suspend(1)
    original = getattr(symmalloc.MemPool, method)
    def refuse(*_):
        raise symmalloc.OutOfMemory("refused by the test")
    setattr(symmalloc.MemPool, method, refuse)
    raises(symmalloc.OutOfMemory, "refused", failing)
    setattr(symmalloc.MemPool, method, original)
    assert backend.state() == state, (method, backend.state())
backend.resume()
assert backend.state() == "RUNNING"
"""
        )


# The interface of vLLM's backends, and their registry.
BACKENDS = """
import types
from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

@runtime_checkable
class Interface(Protocol):
    def suspend(self, level: int = 1) -> None: ...
    def resume(self, tags: list[str] | None = None) -> None: ...
    def state(self) -> str: ...
    def discard(self, tags: tuple[str, ...]) -> None: ...
    @classmethod
    def is_supported(cls) -> bool: ...
    @classmethod
    def preserves_communicators(cls) -> bool: ...
    @classmethod
    def preserves_compiled_artifacts(cls) -> bool: ...
    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool: ...
    @classmethod
    def supports_durable_storage(cls) -> bool: ...

class SleepModeBackend(ABC):
    @abstractmethod
    def suspend(self, level=1): ...
    @abstractmethod
    def resume(self, tags=None): ...

registry = {}

class SleepModeBackendFactory:
    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in registry:
            raise ValueError("registered already")
        registry[name] = (module_path, class_name)

backends = types.ModuleType("vllm.device_allocator.sleep_mode_backend")
backends.SleepModeBackend, backends.SleepModeBackendFactory = SleepModeBackend, SleepModeBackendFactory
sys.modules[backends.__name__] = backends
sys.modules.pop("symmalloc.vllm_sleep")
del symmalloc.vllm_sleep
from symmalloc import vllm_sleep
"""


if __name__ == "__main__":
    unittest.main()
