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

    def test_vllm_recognizes_symmetric_tensors(self) -> None:
        self.succeeds(
            PLUG_IN
            + """
from vllm.distributed.device_communicators import cuda_communicator
tensor_of = lambda pointer, rank: torch.Tensor(pointer, rank.number)

def program(rank):
    comm = pynccl.PyNcclCommunicator(rank.connect(ids[0]), rank.number, RANKS, rank.number)
    for ask in (cuda_communicator.has_symmetric_output, pynccl_allocator.is_symmetric_memory_tensor):
        assert not ask(tensor_of(rank.allocate(MIB), rank))
    on(new_stream())
    with pynccl.symmetric_context(comm):
        first = allocate_on(rank, MIB)
    ordinary = allocate_on(rank, MIB)
    for ask in (cuda_communicator.has_symmetric_output, pynccl_allocator.is_symmetric_memory_tensor):
        assert ask(tensor_of(first, rank)) and not ask(tensor_of(ordinary, rank))
        assert not ask(tensor_of(first + 1, rank)), "not an allocation"
    rank.wait()
    comm.destroy()
    rank.wait()
    assert not plug_in._pools and not cuda_communicator.has_symmetric_output(tensor_of(first, rank))

symmalloc.state.installed_with = (None, None, True)
os.environ["SYMMALLOC_VLLM"] = "pools"
register()
on_ranks(program)
""",
            VLLM_USE_NCCL_SYMM_MEM="1",
        )

    def test_a_communicator_ends_in_time_if_its_ranks_are_gone(self) -> None:
        self.succeeds(
            PLUG_IN
            + """
import time
plug_in.CLOSE_SECONDS = 0.5

closed = []

class Pool:
    def __init__(self, seconds):
        self.seconds = seconds
    def close(self):
        time.sleep(self.seconds)
        closed.append(self.seconds)

class Gone:
    def all(self):
        return [Pool(1.5), Pool(0)]

symmalloc.state.installed_with = (None, None, True)
plug_in.use_pools()
comm = pynccl.PyNcclCommunicator(1, 0, 2, 0)
plug_in._pools[id(comm)] = Gone()
began = time.monotonic()
comm.destroy()
assert comm.is_destroyed and not plug_in._pools and time.monotonic() - began < 1.5
time.sleep(2)
assert closed == [1.5], "the second pool is left"
"""
        )

    def test_the_custom_all_reduce_copies_captured_buffers(self) -> None:
        self.succeeds(
            PLUG_IN
            + """
os.environ["SYMMALLOC_VLLM"] = "install"
symmalloc.state.installed_with = (None, None, True)
register()
register()
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
assert not CustomAllreduce(None, 0).is_registered
assert not CustomAllreduce(group=None, device=0, symm_mem_enabled=True, register_graph_buffers=True).is_registered
"""
        )

    def test_a_version_that_was_not_run_gives_one_warning(self) -> None:
        program = (
            PLUG_IN
            + """
import vllm
vllm.__version__ = os.environ["VERSION"]
os.environ["SYMMALLOC_VLLM"] = "install"
symmalloc.state.installed_with = (None, None, True)
register()
register()
"""
        )
        for version, warnings in (("0.22.0", 0), ("0.33.0", 0), ("0.34.0", 1)):
            done = needs.process(program, VERSION=version)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(done.stderr.count("0.22.0 and 0.33.0 were"), warnings, done.stderr)

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
            ONE
            + """
register()
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
assert SleepModeBackendFactory._registry == {"symmalloc": ("symmalloc.vllm_sleep", "SymmallocBackend")}
from symmalloc.vllm_sleep import SymmallocBackend
assert issubclass(SymmallocBackend, CuMemBackend) and SymmallocBackend.is_supported()
backend = SymmallocBackend()
assert backend.preserves_communicators() and backend.preserves_graphs_with_communicators()
assert backend.preserves_compiled_artifacts() and not backend.supports_durable_storage()
allocator = vllm_sleep.sleep_allocator()
weights, cache, runtime = inside("weights"), inside("kv_cache"), inside("runtime")
ctypes.memset(weights, 3, MIB), ctypes.memset(runtime, 4, MIB)
assert backend.state() == "RUNNING"
backend.suspend(1)
assert backend.state() == "SUSPENDED"
backend.resume(["weights"])
assert backend.state() == "SUSPENDED", "the cache still sleeps"
backend.resume()
assert backend.state() == "RUNNING" and holds(weights, 3) and holds(runtime, 4)
backend.discard(("kv_cache",))
assert backend.state() == "SUSPENDED"
backend.resume(None)
backend.suspend(level=2)
backend.resume()
assert holds(weights, 0) and holds(runtime, 4), "level 2 keeps what the engine does not reload"
# A call that fails leaves the state as the pools are.
for method, failing, state in (("sleep", lambda: backend.suspend(1), "RUNNING"), ("wake", backend.resume, "SUSPENDED")):
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
os.environ["NCCL_GRAPH_REGISTER"] = "1"
assert not backend.preserves_graphs_with_communicators(), "NCCL may use the former memory of captured buffers"
"""
        )

    def test_any_wake_restores_what_the_engine_cannot_defer(self) -> None:
        wake = """
weights, cache, runtime = inside("weights"), inside("kv_cache"), inside("runtime")
ctypes.memset(runtime, 4, MIB)
cumem.sleep(offload_tags=("runtime", "cudagraph"))
cumem.wake_up(["weights"])
phases = {tag: pool.phase.name for tag, pool in cumem._pools.items()}
"""
        self.succeeds(
            ONE
            + wake
            + """
assert phases == {"weights": "AWAKE", "kv_cache": "ASLEEP", "runtime": "AWAKE"}, phases
assert holds(runtime, 4)
cumem.wake_up(["kv_cache"])
assert cumem.is_awake()
"""
        )
        before_0_33 = "import vllm.device_allocator\ndel vllm.device_allocator.DEFERRABLE_TAGS\n"
        self.succeeds(ONE + before_0_33 + wake + 'assert phases["runtime"] == "ASLEEP", phases\n')

    def test_the_memory_of_graphs_sleeps_in_a_pool_of_pytorch(self) -> None:
        self.succeeds(
            ONE
            + """
def capture():
    with cumem.cudagraph_pool() as number:
        pool = cumem._pools["cudagraph"].mempool
        assert number == pool.id
        with torch.cuda.use_mem_pool(pool):
            return allocate(MIB, 0, None)
first, second = capture(), capture()
assert {symmalloc.allocator(0).placement_of(one).pool for one in (first, second)} == {cumem._pools["cudagraph"].id}
assert symmalloc.allocator(0).placement_of(allocate(MIB, 0, None)).pool == 0
assert cumem.get_current_usage() >= 2 * MIB
weights = inside("weights")
for byte in (5, 6):
    ctypes.memset(first, byte, MIB), ctypes.memset(second, byte + 1, MIB)
    cumem.sleep(offload_tags=("weights", "runtime", "cudagraph"))
    assert symmalloc.allocator(0).phase(cumem._pools["cudagraph"].id).name == "ASLEEP"
    cumem.wake_up(["kv_cache"])
    assert holds(first, byte) and holds(second, byte + 1)
    cumem.wake_up()
"""
        )

    def test_an_engine_that_ends_leaves_the_pools_of_another_one(self) -> None:
        self.succeeds(
            ONE
            + """
assert CuMemAllocator.instance is cumem, "the worker's shutdown releases its pools"
for close in (cumem.release_pools, cumem.close):
    assert cumem.get_current_usage() == 0
    weights = inside("weights")
    symmalloc.allocator(0).free(inside("kv_cache"))
    with cumem.cudagraph_pool():
        pass
    used = cumem.get_current_usage()
    assert used > 0
    ctypes.memset(weights, 8, MIB)
    cumem.sleep(("weights",))
    close()
    assert list(cumem._pools) == ["weights"] and cumem.get_current_usage() == used, "another engine sleeps"
    assert not cumem.is_awake()
    cumem.wake_up()
    assert holds(weights, 8)
    symmalloc.allocator(0).free(weights)
    close()
    close()
    assert cumem.get_current_usage() == 0 and not cumem._pools
symmalloc.allocator(0).trim()
assert symmalloc.allocator(0).stats()["total"]["reserved_bytes"]["all"]["current"] == 0
"""
        )

    def test_nccl_does_not_register_captured_buffers(self) -> None:
        peers = """
from types import SimpleNamespace
sys.modules["torch.distributed"] = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: int(os.environ["RANKS"]))
inside("weights")
has_captured = symmalloc.library.library().symmalloc_torch_has_captured
assert not has_captured()
if os.environ["CAPTURES"] == "1":
    with cumem.cudagraph_pool():
        pass
    assert has_captured()
"""
        works = "cumem.sleep(())\ncumem.wake_up()\n"
        fails = """
says = "start the job with NCCL_GRAPH_REGISTER=0"
for sleep in (lambda: cumem.sleep(()), lambda: symmalloc.sleep("weights"), lambda: symmalloc.pause("weights")):
    raises(symmalloc.InvalidState, says, sleep)
assert cumem.is_awake()
"""
        late = """
del os.environ["NCCL_GRAPH_REGISTER"]
inside("kv_cache")
assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
says = "NCCL_GRAPH_REGISTER was set too late"
raises(symmalloc.InvalidState, says, lambda: cumem.sleep(()))
"""
        for ranks, captures, value, program in (
            ("2", "1", None, works),
            ("1", "1", "1", works),
            ("2", "0", "1", works),
            ("2", "1", "0x0", works),
            ("2", "1", "1", fails),
            ("2", "1", "yes", fails),
            ("2", "1", None, late),
        ):
            environment = {} if value is None else {"NCCL_GRAPH_REGISTER": value}
            self.succeeds(ONE + peers + program, RANKS=ranks, CAPTURES=captures, **environment)


if __name__ == "__main__":
    unittest.main()
