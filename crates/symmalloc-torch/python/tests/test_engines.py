"""Engines that own their communicators: pools on raw ones, scopes that end in a sync, all-to-all. No PyTorch."""

from __future__ import annotations

import socket
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs

BEGIN = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from engine_ranks import *
from symmalloc import MemPool, Mode, Registration, use_mem_pool

MIB = 1 << 20
ids = [unique_id(), unique_id()]

def raises(kind, says, act):
    try:
        act()
    except kind as error:
        assert says in str(error), error
        return error
    raise AssertionError(f"{{kind.__name__}} was not raised")
"""


@needs.device
@needs.nccl
class Engines(unittest.TestCase):
    def succeeds(self, program: str) -> str:
        done = needs.process(BEGIN + program)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_a_scope_registers_new_segments_on_every_communicator_of_its_pool(self) -> None:
        self.succeeds("""
def program(rank):
    world, tp = rank.connect(ids[0]), rank.connect(ids[1])
    pool = MemPool(device=rank.number)
    raises(symmalloc.InvalidState, "call MemPool.register() before", lambda: use_mem_pool(pool, register=True))
    assert pool.register(comm=world, rank=rank.number, world=2, mode=Mode.OFF, name="world") == 0
    assert pool.register(comm=tp.value, mode=Mode.OFF, agree_every=3) == 0
    with use_mem_pool(pool, register=True):
        pointer = rank.allocate(4 * MIB)
    (segment,) = pool.snapshot()
    assert (segment["address"], segment["blocks"][0]["address"]) == (pointer, pointer), segment
    assert segment["total_size"] >= 4 * MIB and segment["segment_pool_id"] == (0, pool.id)
    rank.wait()
    assert nccl.stub_nccl_live(1) == 4, "each communicator of each rank has a window"
    rank.wait()
    before = calls("ncclCommWindowRegister"), calls("ncclAllGather")
    rank.wait()
    for _ in range(5):
        with use_mem_pool(pool, register=True):
            rank.free(rank.allocate(3 * MIB))
    rank.wait()
    assert calls("ncclCommWindowRegister") == before[0]
    assert calls("ncclAllGather") - before[1] == 2 * rank_count, "on one of two communicators, every third sync compares"
    assert rank.allocate(MIB) and len(pool.snapshot()) == 1, "the scope has ended"
    rank.wait()
    raises(symmalloc.InvalidState, "already", lambda: pool.register(comm=world))
    pool.deregister(comm=world)
    raises(symmalloc.InvalidState, "not registered on this group", lambda: pool.deregister(comm=world))
    rank.wait()
    assert nccl.stub_nccl_live(1) == 2
    rank.wait()
    pool.close()
    rank.wait()
    assert nccl.stub_nccl_live(1) == 0

rank_count = RANKS
on_ranks(program)
""")

    def test_ranks_that_differ_get_an_error_when_they_compare(self) -> None:
        self.succeeds("""
def program(rank):
    pool = MemPool(device=rank.number)
    pool.register(comm=rank.connect(ids[0]), mode=Mode.OFF)
    with use_mem_pool(pool, register=True):
        rank.allocate(MIB // 4 + 4096 * rank.number)
    raises(symmalloc.MisalignedError, "266,240", pool.agree)
    assert pool.sync() == (0, 0)

on_ranks(program)
""")

    def test_a_scope_syncs_at_its_end_even_if_the_work_fails(self) -> None:
        self.succeeds("""
def program(rank):
    pool = MemPool(device=rank.number)
    pool.register(comm=rank.connect(ids[0]))
    def work():
        with use_mem_pool(pool, register=True):
            rank.allocate(4 * MIB)
            if rank.number == 1:
                raise ValueError("of the work")
    if rank.number == 1:
        raises(ValueError, "of the work", work)
    else:
        work()
    assert pool.sync() == (0, 0), "both ranks synced at the end of the scope"
    def differing():
        with use_mem_pool(pool, register=True):
            rank.allocate(MIB * (1 + rank.number))
            if rank.number == 1:
                raise ValueError("of the work")
    if rank.number == 1:
        error = raises(ValueError, "of the work", differing)
        assert sys.version_info < (3, 11) or "1,048,576" in error.__notes__[0], error.__notes__
    else:
        raises(symmalloc.MisalignedError, "1,048,576", differing)
    before = rank.allocate(MIB)
    assert symmalloc.allocator(rank.number).placement_of(before).pool == 0, "no scope is left open"

on_ranks(program)
""")

    def test_a_rank_that_misses_the_end_of_a_scope_is_named_within_the_deadline(self) -> None:
        self.succeeds("""
import socket, time
with socket.socket() as free_port:
    free_port.bind(("127.0.0.1", 0))
    meet = f"127.0.0.1:{free_port.getsockname()[1]}"

def program(rank):
    comm = rank.connect(ids[0])
    pool = MemPool(device=rank.number)
    pool.register(comm=comm, mode=Mode.OFF, meet=meet, deadline_seconds=0.8)
    if rank.number == 0:
        begun = time.monotonic()
        def alone():
            with use_mem_pool(pool, register=True):
                rank.allocate(4 * MIB)
        raises(symmalloc.NcclError, "rank 1", alone)
        assert time.monotonic() - begun < 3.8
        raises(symmalloc.NcclError, "rank 1", alone)
    rank.wait()
    nccl.ncclCommAbort(comm)

on_ranks(program)
""")

    def test_a_pool_for_graphs_is_used_only_in_captures(self) -> None:
        self.succeeds("""
import types
capturing = []
class On:
    def __init__(self, device): pass
    def __enter__(self): pass
    def __exit__(self, *_): pass
cuda = types.SimpleNamespace(
    is_current_stream_capturing=lambda: bool(capturing), device=On,
    graph=types.SimpleNamespace(default_capture_stream=types.SimpleNamespace(cuda_stream=0)))
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)

def program(rank):
    raises(symmalloc.InvalidArgument, "give reserve", lambda: MemPool(graphs=True, device=rank.number))
    pool = MemPool(graphs=True, reserve=8 * MIB, device=rank.number)
    assert pool.register(comm=rank.connect(ids[0]), mode=Mode.OFF) == 1
    scope = use_mem_pool(pool, register=True)
    raises(symmalloc.InvalidState, "use it in a capture", scope.__enter__)
    rank.wait()
    capturing.append(1)
    with scope:
        inside = rank.allocate(MIB)
    assert symmalloc.allocator(rank.number).placement_of(inside).pool == pool.id

on_ranks(program)
""")

    def test_scopes_that_end_out_of_order_are_an_error_and_all_end(self) -> None:
        self.succeeds("""
from threading import Thread

def program(rank):
    first, second = (MemPool(symmetric=False, device=rank.number) for _ in range(2))
    elsewhere = MemPool(symmetric=False, device=1 - rank.number)
    pool_of = lambda: symmalloc.allocator(rank.number).placement_of(rank.allocate(MIB)).pool
    outer, inner, other = use_mem_pool(first), use_mem_pool(second), use_mem_pool(elsewhere)
    outer.__enter__(), other.__enter__()
    outer.__exit__(None, None, None)
    other.__exit__(None, None, None)  # devices are independent of each other
    outer.__enter__(), inner.__enter__()
    raises(symmalloc.InvalidState, "1 scopes that began inside", lambda: outer.__exit__(None, None, None))
    assert pool_of() == 0
    with use_mem_pool(first):
        raises(symmalloc.InvalidState, "has ended already", lambda: inner.__exit__(None, None, None))
        assert pool_of() == first.id, "the other pool's scope has not ended"
    outer.__enter__(), inner.__enter__()
    error = ValueError("the block raises")
    assert not outer.__exit__(ValueError, error, None) and "began inside" in error.__notes__[0]
    assert not inner.__exit__(ValueError, error, None) and "ended already" in error.__notes__[1]
    outer.__enter__()
    done = []
    def ends_it():
        with use_mem_pool(second):
            done.append(raises(symmalloc.InvalidState, "another thread", lambda: outer.__exit__(None, None, None)))
            assert pool_of() == second.id
            done.append(None)
    thread = Thread(target=ends_it)
    thread.start(), thread.join()
    assert len(done) == 2 and pool_of() == first.id
    outer.__exit__(None, None, None)
    with outer, outer, inner, outer:
        assert pool_of() == first.id
    assert pool_of() == 0

on_ranks(program)
""")

    def test_buffers_can_be_registered_for_any_pool(self) -> None:
        self.succeeds("""
def program(rank):
    pool = MemPool(symmetric=False, conf="segments:expandable", device=rank.number)
    pool.register(comm=rank.connect(ids[0]), registration=Registration.BUFFERS, mode=Mode.OFF)
    with use_mem_pool(pool, register=True):
        rank.allocate(MIB << (4 * rank.number))
    rank.wait()
    assert (calls("ncclCommRegister") >= 2, calls("ncclCommWindowRegister")) == (True, 0)
    rank.wait()
    pool.close()

on_ranks(program)
""")

    def test_invalid_arguments_are_errors(self) -> None:
        self.succeeds("""
def program(rank):
    pool, comm = MemPool(device=rank.number), rank.connect(ids[0])
    for says, arguments in {
        "go together": {"comm": comm, "rank": 0},
        "give comm": {"rank": 0, "world": 2},
        "null ncclComm_t": {"comm": 0},
        "below the number of ranks": {"comm": comm, "rank": 2, "world": 2},
        "`world` is 3": {"comm": comm, "rank": rank.number, "world": 3},
        "needs Mode.OFF": {"comm": comm, "agree_every": 2},
        "above 0": {"comm": comm, "agree_every": 0, "mode": Mode.OFF},
    }.items():
        raises(symmalloc.InvalidArgument, says, lambda: pool.register(**arguments))
    raises(symmalloc.NcclError, "not symmetric", lambda: MemPool(symmetric=False, device=rank.number).register(comm=comm))
    assert pool.register(comm=comm) == 0

on_ranks(program)
""")

    def test_a_scope_without_changes_takes_microseconds(self) -> None:
        (figures,) = self.succeeds("""
import time
done = []

class Nothing:
    def __enter__(self): pass
    def __exit__(self, *_): pass

def nanoseconds(make):
    least = 1e9
    for _ in range(30):
        begun = time.perf_counter_ns()
        for _ in range(2000):
            with make():
                pass
        least = min(least, (time.perf_counter_ns() - begun) / 2000)
    return least

def program(rank):
    pool = MemPool(device=rank.number)
    pool.register(comm=rank.connect(ids[0]), mode=Mode.OFF)
    rank.wait()
    if rank.number == 0:
        print(nanoseconds(Nothing), nanoseconds(lambda: use_mem_pool(pool, register=True)))
    rank.wait()
    pool.close()

on_ranks(program)
""").splitlines()
        nothing, scope = (float(figure) for figure in figures.split())
        print(f"empty scope {nothing:.0f} ns, scope without new segments {scope:.0f} ns")
        # A scope takes one microsecond on an idle machine. This machine may be busy, and its libraries unoptimized.
        self.assertLess(scope, 10_000)


@needs.device
@needs.nccl
class Processes(unittest.TestCase):
    PROGRAM = """
import os, time
from pathlib import Path
from symmalloc import state

number, file = int(os.environ["RANK"]), Path(os.environ["ID_FILE"])
state.installed_with = (None, None, True)
if number == 0:
    file.with_suffix(".new").write_bytes(bytes(ids[0]))
    file.with_suffix(".new").rename(file)
while not file.exists():
    time.sleep(0.01)
rank = Rank(number, threading.Barrier(1))
comm = rank.connect(UniqueId.from_buffer_copy(file.read_bytes()))
pool = MemPool(device=number)
pool.register(comm=comm, rank=number, world=2, mode=Mode[os.environ["MODE"]], meet=os.environ["MEET"], deadline_seconds=2)
with use_mem_pool(pool, register=True):
    rank.allocate(MIB)
print("in step", flush=True)
# The process must not die while the other process is still in the first scope.
file.with_suffix(f".{number}").touch()
while not file.with_suffix(f".{1 - number}").exists():
    time.sleep(0.01)
begun = time.monotonic()

def second():
    with use_mem_pool(pool, register=True):
        rank.allocate(4 * MIB)
        if number == 1:
            os._exit(9)

error = raises(symmalloc.NcclError, "rank 1", second)
assert time.monotonic() - begun < 5, error  # at most three seconds after the deadline
outside = rank.allocate(MIB)
assert symmalloc.allocator(number).placement_of(outside).pool == 0, "no scope is left open"
print("told", flush=True)
nccl.ncclCommAbort(comm)
os._exit(0)
"""

    def test_a_process_that_dies_in_a_scope_is_named_on_the_others_within_the_deadline(self) -> None:
        for mode in ("AT_SYNC", "OFF"):
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as ranks:
                shared = {"ID_FILE": f"{folder}/id", "MEET": f"127.0.0.1:{free_port()}", "MODE": mode}
                survivor, dead = ranks.map(
                    lambda rank: needs.process(BEGIN + "import threading" + self.PROGRAM, RANK=str(rank), **shared),
                    range(2),
                )
                self.assertEqual((dead.returncode, dead.stdout), (9, "in step\n"), dead.stderr)
                self.assertEqual((survivor.returncode, survivor.stdout), (0, "in step\ntold\n"), survivor.stderr)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# Tensors of the stub, whose device memory is host memory, and the required subset of PyTorch.
TENSORS = """
import ctypes, types

class Event:
    def query(self): return True
    def synchronize(self): pass

class Stream:
    cuda_stream = 0
    waited, events = 0, 0
    def wait_stream(self, other): Stream.waited += 1
    def wait_event(self, event): Stream.events += 1
    def record_event(self): return Event()

class Shape(tuple):
    def numel(self):
        product = 1
        for size in self:
            product *= size
        return product
    def __getitem__(self, key):
        found = tuple.__getitem__(self, key)
        return Shape(found) if isinstance(key, slice) else found

class Tensor:
    is_cuda, dtype, used = True, "int32", 0
    def __init__(self, rank, *shape):
        self.shape, self.device = Shape(shape), types.SimpleNamespace(index=rank.number)
        self.nbytes = 4 * self.shape.numel()
        self.pointer = rank.allocate(self.nbytes)
        self.values = (ctypes.c_int32 * (self.nbytes // 4)).from_address(self.pointer) if self.nbytes else []
    def data_ptr(self): return self.pointer or 0
    def dim(self): return len(self.shape)
    def element_size(self): return 4
    def is_contiguous(self): return True
    def record_stream(self, stream): self.used += 1

streams = types.SimpleNamespace(current_stream=lambda device=None: Stream(), Stream=lambda device: Stream())
sys.modules["torch"] = types.SimpleNamespace(cuda=streams)
"""


@needs.device
@needs.nccl
class AllToAll(unittest.TestCase):
    def succeeds(self, program: str) -> None:
        done = needs.process(BEGIN + TENSORS + program)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_rows_arrive_with_changing_splits_and_exchanges_are_explicit(self) -> None:
        self.succeeds("""
def sent_rows(step, of, to):
    return (step * 3 + of * 2 + to) % 5

def program(rank):
    comm, me = rank.connect(ids[0]), rank.number
    pool = MemPool(reserve=4 * MIB, device=me)
    with use_mem_pool(pool):
        source, target = Tensor(rank, 16, 3), Tensor(rank, 16, 3)
    assert pool.register(comm=comm) == 1
    gathers = None
    for step in range(10):
        rows = [sent_rows(step, me, to) for to in range(2)]
        if step == 5:
            rank.wait()
            gathers = calls("ncclAllGather")
            rank.wait()
        from_ranks = [sent_rows(step, of, me) for of in range(2)]
        received = symmalloc.exchange_splits(rows, comm=comm, device=me) if step < 5 else from_ranks
        assert received == from_ranks, (step, received)
        source.values[: sum(rows) * 3] = [1000 * step + 100 * me + row for row in range(sum(rows) * 3)]
        work = symmalloc.all_to_all_single(target, source, received, rows, comm=comm, async_op=step % 2 == 1)
        assert (work is not None) == (step % 2 == 1)
        if work:
            work.wait()
            assert work.is_completed()
        rank.wait()
        expected = []
        for of in range(2):
            first = 3 * sum(sent_rows(step, of, to) for to in range(me))
            expected += [1000 * step + 100 * of + row for row in range(first, first + 3 * from_ranks[of])]
        assert list(target.values[: len(expected)]) == expected, (step, expected)
        rank.wait()
    assert calls("ncclAllGather") == gathers, "known splits are not exchanged"
    assert source.used == target.used == 5, "calls with async_op use the separate stream"
    for of in range(2):
        source.values[24 * of] = 7 + me
    symmalloc.all_to_all_single(target, source, comm=comm)
    rank.wait()
    assert [target.values[0], target.values[24]] == [7, 8], "the tensors are split equally"
    rank.wait()
    pool.close()

on_ranks(program)
""")

    def test_mismatched_buffers_and_splits_are_refused(self) -> None:
        self.succeeds("""
def program(rank):
    comm, me = rank.connect(ids[0]), rank.number
    raises(symmalloc.InvalidState, "no pool is registered", lambda: symmalloc.exchange_splits([1, 1], comm=comm, device=me))
    pool = MemPool(reserve=4 * MIB, device=me)
    with use_mem_pool(pool):
        source, target, other = Tensor(rank, 16, 3), Tensor(rank, 16, 3), Tensor(rank, 16, 2)
    outside = Tensor(rank, 16, 3)
    pool.register(comm=comm)
    # The other rank gets an error instead of waiting.
    kind, says = (symmalloc.InvalidArgument, "1 numbers for 2 ranks") if me == 0 else (symmalloc.MisalignedError, "rank 0")
    raises(kind, says, lambda: symmalloc.exchange_splits([1] * (1 + me), comm=comm, device=me))
    assert symmalloc.exchange_splits([3, 3], comm=comm, device=me) == [3, 3]
    def run(output, input, *splits, **options):
        return lambda: symmalloc.all_to_all_single(output, input, *splits, comm=comm, **options)
    raises(symmalloc.InvalidArgument, "both sides", run(target, source, [1, 1]))
    raises(symmalloc.InvalidArgument, "3 numbers for 2 ranks", run(target, source, [1, 1, 1], [1, 1]))
    raises(symmalloc.InvalidArgument, "-1 rows", run(target, source, [1, 1], [-1, 1]))
    raises(symmalloc.InvalidArgument, "differ", run(other, source, [1, 1], [1, 1]))
    raises(symmalloc.InvalidArgument, "longer buffer", run(target, source, [99, 99], [99, 99]))
    raises(symmalloc.InvalidState, "registered memory", run(target, outside, [1, 1], [1, 1]))
    sent = [1, 2] if me == 0 else [1, 1]
    raises(symmalloc.MisalignedError, "rank 0 sends 2 rows", run(target, source, [1, 1], sent, check_splits=True))
    rank.wait()
    run(target, outside, [1, 1], [1, 1], require_registered=False)()
    rank.wait()
    pool.close()
    raises(symmalloc.InvalidState, "no pool is registered", run(target, source, [1, 1], [1, 1]))

on_ranks(program)
""")


if __name__ == "__main__":
    unittest.main()
