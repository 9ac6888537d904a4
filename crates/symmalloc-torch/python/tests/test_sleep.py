"""Sleep and wake of pools, regions with torch_memory_saver's names, and pools with a quota."""

from __future__ import annotations

import unittest

import needs
from test_class import Compiled
from test_engines import BEGIN

ALONE = (
    BEGIN
    + """
installation_of = symmalloc.state
installation_of.installed_with = (None, None, True)
ours = symmalloc.Allocator.shared(0)

def fill(pointer, byte, size=MIB):
    ctypes.memset(pointer, byte, size)

def holds(pointer, byte, size=MIB):
    return set(ctypes.string_at(pointer, size)) == {byte}

def inside(pool, size=MIB):
    with use_mem_pool(pool):
        return allocate(size, 0, None)

import ctypes
from symmalloc import Contents, Phase
"""
)


@needs.device
@needs.nccl
class Pools(unittest.TestCase):
    def succeeds(self, program: str, **environment: str) -> str:
        done = needs.process(program, **environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_pools_sleep_and_wake_by_tag_and_restore_kept_contents(self) -> None:
        self.succeeds(ALONE + """
weights = MemPool(symmetric=False, tag="weights", device=0)
cache = MemPool(symmetric=False, tag="kv_cache", device=0)
plain = MemPool(symmetric=False, device=0)
held = {pool: inside(pool) for pool in (weights, cache, plain)}
for pointer in held.values():
    fill(pointer, 7)
slept = symmalloc.sleep(["kv_cache", "weights"], keep="weights")
assert slept.kept_bytes == MIB and slept.released_bytes >= 2 * MIB and slept.deregistrations == 0, slept
assert [pool.phase for pool in held] == [Phase.ASLEEP, Phase.ASLEEP, Phase.AWAKE]
assert "sleeps" in str(raises(symmalloc.InvalidState, "sleeps", lambda: ours.allocate(MIB, pool=weights.id)))
woken = symmalloc.wake("weights")
assert woken.remapped_bytes >= MIB and (woken.registrations, woken.changed, woken.lost) == (0, 0, 0), woken
assert [pool.phase for pool in held] == [Phase.AWAKE, Phase.ASLEEP, Phase.AWAKE]
symmalloc.wake()
assert holds(held[weights], 7) and holds(held[plain], 7) and cache.phase is Phase.AWAKE
assert symmalloc.sleep(keep=False).kept_bytes == 0
assert [pool.phase for pool in held] == [Phase.ASLEEP, Phase.ASLEEP, Phase.AWAKE]
symmalloc.wake()
fill(held[weights], 5)
assert symmalloc.sleep(("weights",)).kept_bytes == MIB, "contents are kept by default"
symmalloc.wake()
assert holds(held[weights], 5)
weights.sleep(Contents.ZERO); weights.wake()
assert holds(held[weights], 0)
""")

    def test_invalid_calls_are_errors_and_change_nothing(self) -> None:
        self.succeeds(ALONE + """
raises(symmalloc.UnknownPool, "no pool has a tag yet", lambda: symmalloc.sleep("weights", device=0))
raises(symmalloc.InvalidSettings, "tag", lambda: MemPool(tag="Weights!", device=0))
pool = MemPool(symmetric=False, tag="weights", device=0)
raises(symmalloc.UnknownPool, "no pool has the tag 'unknown'; the existing tags are ['weights']", lambda: symmalloc.sleep("unknown"))
raises(symmalloc.UnknownPool, "'kv'", lambda: symmalloc.wake(["weights", "kv"]))
raises(symmalloc.InvalidArgument, "name them in tags as well", lambda: symmalloc.sleep("weights", keep="kv_cache"))
raises(symmalloc.UnknownPool, "'kv_cache'", lambda: symmalloc.sleep(keep="kv_cache"))
assert pool.phase is Phase.AWAKE, "the failed calls did not change the pool"
ours.begin_step(pool=pool.id)
raises(symmalloc.InvalidState, "between end_step and begin_step", lambda: symmalloc.sleep("weights"))
ours.end_step(pool=pool.id)
raises(symmalloc.UnknownPool, "99", lambda: ours.sleep(99))
installation_of.installed_with = None
raises(symmalloc.NotInstalled, "install()", lambda: symmalloc.sleep(device=0))
""")

    def test_a_wake_on_a_full_device_is_an_error_and_loses_nothing(self) -> None:
        self.succeeds(ALONE + """
first, second = (MemPool(symmetric=False, tag="weights", device=0) for _ in range(2))
held = [inside(pool, 100 * MIB) for pool in (first, second)]
fill(held[0], 1); fill(held[1], 2)
symmalloc.sleep("weights")
other = ours.allocate(100 * MIB)
raises(symmalloc.OutOfMemory, "stays asleep", lambda: symmalloc.wake("weights"))
assert [first.phase, second.phase] == [Phase.AWAKE, Phase.ASLEEP]
ours.free(other); ours.trim()
symmalloc.wake("weights")
assert holds(held[0], 1) and holds(held[1], 2)
""", STUB_MEMORY_BYTES=str(256 << 20))  # fmt: skip

    def test_an_unreferenced_pool_sleeps_by_its_tag(self) -> None:
        self.succeeds(ALONE + """
pool = MemPool(symmetric=False, tag="weights", device=0)
pointer, number = inside(pool), pool.id
fill(pointer, 3)
del pool
assert symmalloc.sleep("weights").kept_bytes == MIB
assert ours.phase(number) is Phase.ASLEEP
symmalloc.wake("weights")
assert holds(pointer, 3)
""")

    def test_a_pool_holds_exactly_its_quota(self) -> None:
        self.succeeds(ALONE + """
import types
stream = types.SimpleNamespace(cuda_stream=0)
raises(symmalloc.InvalidArgument, "quota or reserve", lambda: MemPool(quota=MIB, reserve=MIB, device=0))
pool = MemPool(symmetric=False, quota=64 * MIB, tag="kv_cache", device=0)
reserved = lambda: ours.stats()["pools"][pool.id]["stats"]["reserved_bytes"]["all"]["current"]
raises(symmalloc.OutOfMemory, "resize", lambda: ours.allocate(MIB, pool=pool.id))
assert pool.resize(7 * MIB, stream) == 8 * MIB == reserved()
blocks = [ours.allocate(2 * MIB, pool=pool.id) for _ in range(4)]
fill(blocks[3], 9)
raises(symmalloc.OutOfMemory, "resize", lambda: ours.allocate(MIB, pool=pool.id))
ours.free(blocks[0]); ours.trim()
assert reserved() == 8 * MIB, "trim keeps the memory of a quota"
raises(symmalloc.InvalidState, "free some first", lambda: pool.resize(4 * MIB, stream))
assert reserved() == 8 * MIB
assert pool.resize(6 * MIB, stream) == 6 * MIB == reserved()
symmalloc.sleep("kv_cache")
raises(symmalloc.InvalidState, "sleeps", lambda: pool.resize(8 * MIB, stream))
symmalloc.wake("kv_cache")
assert pool.resize(64 * MIB, stream) == 64 * MIB == reserved()
assert ours.allocate(2 * MIB, pool=pool.id) == blocks[0] and holds(blocks[3], 9)
raises(symmalloc.InvalidArgument, "range", lambda: pool.resize(65 * MIB, stream))
raises(symmalloc.InvalidArgument, "-1", lambda: pool.resize(-1, stream))
raises(symmalloc.InvalidState, "growth_mb:0", lambda: MemPool(device=0).resize(MIB, stream))
""", SYMMALLOC_CONF="chunk_mb:2")  # fmt: skip

    def test_windows_are_deregistered_by_sleep_and_restored_by_wake_on_all_ranks(self) -> None:
        self.succeeds(BEGIN + """
from symmalloc import Contents, Phase

def program(rank):
    pool = MemPool(tag="weights", device=rank.number)
    pool.register(comm=rank.connect(ids[0]), mode=Mode.OFF)
    with use_mem_pool(pool, register=True):
        pointer = rank.allocate(4 * MIB)
    ctypes.memset(pointer, rank.number + 1, 4 * MIB)
    rank.wait()
    assert nccl.stub_nccl_live(1) == 2
    rank.wait()
    slept = symmalloc.sleep("weights", device=rank.number)
    assert (slept.deregistrations, slept.kept_bytes) == (1, 4 * MIB), slept
    rank.wait()
    assert nccl.stub_nccl_live(1) == 0, "windows are deregistered on all ranks"
    rank.wait()
    woken = symmalloc.wake("weights", device=rank.number)
    assert (woken.registrations, woken.changed, woken.lost) == (1, 0, 0), woken
    assert set(ctypes.string_at(pointer, 4 * MIB)) == {rank.number + 1}
    assert pool.sync() == (0, 0)
    rank.wait()
    assert nccl.stub_nccl_live(1) == 2
    rank.wait()
    act = pool.sleep if rank.number == 0 else pool.wake
    raises(symmalloc.MisalignedError, "the ranks differ in the call", act)
    assert pool.phase is Phase.AWAKE
    rank.wait()
    pool.close()

import ctypes
on_ranks(program)
""", STUB_NCCL_REUSE_WINDOWS="1")  # fmt: skip

    def test_communicators_of_sleeping_pools_are_suspended_until_one_wakes(self) -> None:
        self.succeeds(BEGIN + """
from symmalloc import Phase

def program(rank):
    comm = rank.connect(ids[0])
    pools = [MemPool(tag=tag, device=rank.number) for tag in ("weights", "kv_cache")]
    for pool in pools:
        pool.register(comm=comm, mode=Mode.OFF)
        with use_mem_pool(pool, register=True):
            rank.allocate(4 * MIB)
    held = lambda: symmalloc.device_memory(rank.number).communicators_bytes
    assert held() == 64 * MIB
    raises(symmalloc.InvalidState, "windows of other pools", lambda: pools[0].sleep(suspend=True))
    assert symmalloc.sleep("weights", suspend=True, device=rank.number).suspended_bytes == 0, "another pool is awake"
    slept = symmalloc.sleep(suspend=True, device=rank.number)
    assert (slept.deregistrations, slept.suspended_bytes, held()) == (1, 64 * MIB, 0), slept
    woken = symmalloc.wake("kv_cache", device=rank.number)
    assert (woken.registrations, woken.resumed, held()) == (1, 1, 64 * MIB), woken
    assert symmalloc.wake(device=rank.number).resumed == 0
    symmalloc.sleep("kv_cache", device=rank.number)
    assert pools[0].sleep(suspend=True).suspended_bytes == 64 * MIB
    assert symmalloc.wake(device=rank.number).resumed == 1
    assert [pool.phase for pool in pools] == [Phase.AWAKE] * 2
    for pool in pools:
        pool.close()

on_ranks(program)
""", STUB_NCCL_VERSION="23007", STUB_NCCL_SUSPENDABLE_MB="64", STUB_NCCL_REUSE_WINDOWS="1")  # fmt: skip

    def test_threads_that_enter_a_region_at_once_share_its_pool(self) -> None:
        self.succeeds(ALONE + """
import threading, time
from symmalloc import sleeping, torch_memory_saver_regions as regions

created = []
def slowly(**options):
    time.sleep(0.2)
    created.append(MemPool(**options))
    return created[-1]
sleeping.MemPool = regions.MemPool = slowly
sleeping.device_index = lambda *_: 0

def in_region():
    with sleeping.region(tag="weights", enable_cpu_backup=True):
        return ours.placement_of(allocate(MIB, 0, None)).pool

def outside():
    return regions._outside_pool(0).id

for enter in (in_region, outside):
    barrier, found = threading.Barrier(4), []
    def run():
        barrier.wait()
        found.append(enter())
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1, found
assert len(created) == 2, created
""")

    def test_a_region_that_begins_during_a_pause_keeps_its_backup(self) -> None:
        self.succeeds(ALONE + """
from symmalloc import sleeping
sleeping.device_index = lambda *_: 0
with sleeping.region(tag="weights"):
    pass
list_pools = symmalloc.Allocator.stats
def slowly(of):
    listed = list_pools(of)
    with sleeping.region(tag="cache"):  # as another thread
        pass
    return listed
symmalloc.Allocator.stats = slowly
symmalloc.pause("weights")
symmalloc.Allocator.stats = list_pools
backups = {tagged.tag: tagged.contents(None) for tagged in sleeping.tagged_pools(0)}
assert backups == {"weights": Contents.DROP, "cache": Contents.DROP}, backups
""")

    def test_an_older_nccl_does_not_suspend(self) -> None:
        self.succeeds(BEGIN + """
from symmalloc import Phase

def program(rank):
    pool = MemPool(tag="weights", device=rank.number)
    pool.register(comm=rank.connect(ids[0]), mode=Mode.OFF)
    with use_mem_pool(pool, register=True):
        rank.allocate(4 * MIB)
    raises(symmalloc.InvalidState, "2.29.7", lambda: pool.sleep(suspend=True))
    assert pool.phase is Phase.AWAKE
    raises(symmalloc.InvalidState, "2.29.7", lambda: symmalloc.sleep(suspend=True, device=rank.number))
    assert pool.phase is Phase.ASLEEP
    symmalloc.wake(device=rank.number)
    pool.close()

on_ranks(program)
""", STUB_NCCL_VERSION="22906", STUB_NCCL_REUSE_WINDOWS="1")  # fmt: skip

    def test_the_memory_of_a_device_is_listed_by_owner(self) -> None:
        self.succeeds(ALONE + """
pool = MemPool(symmetric=False, tag="weights", device=0)
inside(pool, 6 * MIB)
awake = symmalloc.device_memory(0)
released = symmalloc.sleep().released_bytes
asleep = symmalloc.device_memory(0)
assert awake.awake_bytes - asleep.awake_bytes == awake.used_bytes - asleep.used_bytes == released >= 6 * MIB, (awake, asleep)
assert (asleep.asleep_bytes, asleep.graph_bytes, asleep.communicators_bytes) == (0, 0, 0), asleep
assert asleep.other_bytes == awake.other_bytes
""")


@needs.torch
@needs.device
@needs.stand_ins
class Tensors(Compiled):
    """A real PyTorch on the stub."""

    BEGIN = """
import ctypes, torch, symmalloc
symmalloc.install()
MIB = 1 << 20
fill = lambda tensor, byte: ctypes.memset(tensor.data_ptr(), byte, tensor.nbytes)
holds = lambda tensor, byte: set(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)) == {byte}
empty = lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")
"""

    def succeeds(self, program: str, conf: str = "") -> None:
        done = self.run_in(self.cache.name, self.BEGIN + program, SYMMALLOC_CONF=conf)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_regions_are_paused_and_resumed(self) -> None:
        self.succeeds("""
with symmalloc.region(tag="weights", enable_cpu_backup=True):
    weights = empty(5 * MIB)
    with symmalloc.region(tag="kv_cache"):
        cache = empty(7 * MIB)
    more = empty(MIB)
outside = empty(MIB)
for tensor in (weights, cache, more, outside):
    fill(tensor, 6)
pools = {symmalloc.placement(tensor).pool for tensor in (weights, more)}
assert len(pools) == 1 and symmalloc.placement(cache).pool not in pools | {0} and symmalloc.placement(outside).pool == 0
reserved, address = torch.cuda.memory_reserved(), weights.data_ptr()
symmalloc.pause()
assert reserved - torch.cuda.memory_reserved() >= 13 * MIB
try:
    with symmalloc.region(tag="weights", enable_cpu_backup=True):
        empty(MIB)
except RuntimeError as error:
    assert "sleeps" in str(error), error
else:
    raise AssertionError
empty(3 * MIB)
symmalloc.resume("weights")
assert holds(weights, 6) and holds(more, 6) and weights.data_ptr() == address
symmalloc.resume()
assert torch.cuda.memory_reserved() >= reserved and holds(outside, 6)
symmalloc.pause("a_tag_of_nobody"); symmalloc.resume("a_tag_of_nobody")
symmalloc.pause("weights"); symmalloc.pause("weights"); symmalloc.resume("weights"); symmalloc.resume("weights")
assert holds(weights, 6)
del weights, more, cache
torch.cuda.empty_cache()
""")

    def test_the_default_pool_and_graph_pools_sleep_by_the_same_tag(self) -> None:
        self.succeeds("""
tensor, graph = empty(4 * MIB), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inside = empty(3 * MIB)
    try:
        symmalloc.sleep("model")
    except symmalloc.InvalidState as error:
        assert "captured" in str(error), error
    else:
        raise AssertionError
fill(tensor, 4); fill(inside, 5)
symmalloc.sleep("model")
assert torch.cuda.memory_reserved() == 0
symmalloc.wake("model")
assert holds(tensor, 4) and holds(inside, 5)
graph.replay()
""", conf="tag:model")  # fmt: skip

    def test_a_pool_with_a_quota_is_resized_on_the_current_stream(self) -> None:
        self.succeeds("""
pool = symmalloc.MemPool(symmetric=False, quota=64 * MIB)
pool.resize(8 * MIB)
with symmalloc.use_mem_pool(pool):
    blocks = [empty(2 * MIB) for _ in range(4)]
    try:
        empty(MIB)
    except torch.OutOfMemoryError as error:
        assert "resize" in str(error), error
    else:
        raise AssertionError
fill(blocks[3], 8)
torch.cuda.empty_cache()
del blocks[0]
torch.cuda.empty_cache()
assert pool.resize(6 * MIB) == 6 * MIB and pool.resize(12 * MIB) == 12 * MIB
assert holds(blocks[2], 8)
""")


if __name__ == "__main__":
    unittest.main()
