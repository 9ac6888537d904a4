"""torch_memory_saver's interface, and backups in pageable memory and in files."""

from __future__ import annotations

import tempfile
import unittest

import needs
from test_class import Compiled
from test_sleep import ALONE


@needs.device
@needs.nccl
class Backups(unittest.TestCase):
    """Backups through the library, without PyTorch."""

    def succeeds(self, program: str, **environment: str) -> str:
        done = needs.process(ALONE + program, **environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_a_backup_in_each_place_is_readable_and_is_restored(self) -> None:
        self.succeeds("""
import tempfile
from symmalloc.allocator import Storage
for place in Storage:
    with tempfile.TemporaryDirectory() as folder:
        pool = ours.create_pool("segments:expandable,tag:weights")
        ours.save_in(place, folder if place is Storage.FOLDER else None, pool)
        pointer = ours.allocate(3 * MIB, pool=pool)
        fill(pointer, 7, 3 * MIB)
        copy = ctypes.create_string_buffer(MIB)
        assert not ours.saved_copy(pointer, MIB, ctypes.addressof(copy)) and ours.saved_pointer(pointer, MIB) == 0
        ours.sleep(pool)
        assert ours.saved_copy(pointer + MIB, MIB, ctypes.addressof(copy)) and set(copy.raw) == {7}
        if place is Storage.FOLDER:
            raises(symmalloc.InvalidState, "copy them instead", lambda: ours.saved_pointer(pointer, MIB))
        else:
            assert holds(ours.saved_pointer(pointer, MIB), 7)
        ours.retain_saved(True, pool)
        ours.wake(pool)
        assert holds(pointer, 7, 3 * MIB)
        assert ours.saved_copy(pointer, MIB, ctypes.addressof(copy)) == (place is not Storage.FOLDER), "files are not retained"
        ours.free(pointer)
        ours.destroy_pool(pool)
        assert not ours.saved_copy(pointer, MIB, ctypes.addressof(copy))
raises(symmalloc.InvalidArgument, "folder", lambda: ours.save_in(Storage.FOLDER))
for size_bytes in (1 << 63, (1 << 64) - 1):
    raises(symmalloc.InvalidArgument, "bytes", lambda: ours.saved_copy(pointer, size_bytes, ctypes.addressof(copy)))
raises(symmalloc.UnknownPool, "99", lambda: ours.save_in(Storage.PINNED, None, 99))
""")

    def test_messages_do_not_reach_a_file_that_got_the_number_of_stderr(self) -> None:
        self.succeeds("""
import os, tempfile
from symmalloc.allocator import Storage
with tempfile.TemporaryDirectory() as folder:
    pool = ours.create_pool("segments:expandable")
    pointer = ours.allocate(3 * MIB, pool=pool)
    fill(pointer, 7, 3 * MIB)
    ours.save_in(Storage.FOLDER, folder, pool)
    os.close(2)
    ours.sleep(pool)
    assert os.readlink("/proc/self/fd/2").startswith(folder), "the file has the lowest free number"
    symmalloc.library.library().symmalloc_torch_deallocate(0, ctypes.c_void_p(0x1000), ctypes.byref(ctypes.c_uint64()))
    ours.wake(pool)
    assert holds(pointer, 7, 3 * MIB)
""")

    def test_a_modified_or_impossible_file_is_a_file_error_and_nothing_is_lost(self) -> None:
        self.succeeds("""
import os, resource, tempfile
from symmalloc.allocator import Storage
folder = tempfile.mkdtemp()
pool = ours.create_pool("segments:expandable")
pointer = ours.allocate(3 * MIB, pool=pool)
fill(pointer, 7, 3 * MIB)
ours.save_in(Storage.FOLDER, folder, pool)
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
raises(symmalloc.FileError, "check the folder, and the free space", lambda: ours.sleep(pool))
assert ours.phase(pool) is Phase.AWAKE and holds(pointer, 7, 3 * MIB)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ours.sleep(pool)
assert os.listdir(folder) == [], "the file has no name"
(file,) = [entry.path for entry in os.scandir("/proc/self/fd") if os.readlink(entry.path).startswith(folder)]
with open(file, "r+b") as it:
    it.seek(2 * MIB); it.write(b"8")
raises(symmalloc.FileError, "was modified", lambda: ours.wake(pool))
assert ours.phase(pool) is Phase.ASLEEP
copy = ctypes.create_string_buffer(MIB)
raises(symmalloc.FileError, "was modified", lambda: ours.saved_copy(pointer, MIB, ctypes.addressof(copy)))
with open(file, "r+b") as it:
    it.seek(2 * MIB); it.write(bytes([7]))
ours.wake(pool)
assert holds(pointer, 7, 3 * MIB)
ours.save_in(Storage.FOLDER, folder + "/missing", pool)
raises(symmalloc.FileError, "open failed with 2", lambda: ours.sleep(pool))
assert ours.phase(pool) is Phase.AWAKE
os.rmdir(folder)
""")

    def test_a_folder_that_others_can_write_is_refused(self) -> None:
        self.succeeds("""
import os, tempfile
from symmalloc import sleeping
folder = tempfile.mkdtemp()
os.chmod(folder, 0o777)
raises(symmalloc.FileError, "others can write", lambda: sleeping.set_backup_folder(folder))
os.chmod(folder, 0o700)
sleeping.set_backup_folder(folder + "/new")
assert os.stat(folder + "/new").st_mode & 0o777 == 0o700
""")


class Installation(unittest.TestCase):
    """The import installs symmalloc for the region of the whole process, or finds it installed."""

    PROGRAM = """
import symmalloc
from symmalloc import installation, state
installation.install = lambda conf=None: setattr(state, "installed_with", (conf, None))
{before}
import symmalloc.torch_memory_saver
print(state.installed_with[0])
"""

    def imported(self, before: str = "", **environment: str) -> str:
        done = needs.process(self.PROGRAM.replace("{before}", before), **environment)
        return done.stdout.strip() or done.stderr.splitlines()[-1]

    def test_the_region_of_the_process_needs_its_tag(self) -> None:
        whole = {"TMS_INIT_ENABLE": "1"}
        self.assertEqual(self.imported(**whole), "tag:default")
        self.assertEqual(self.imported(**whole, SYMMALLOC_CONF="limit_mb:8"), "limit_mb:8,tag:default")
        self.assertEqual(self.imported(SYMMALLOC_CONF="limit_mb:8"), "None", "as a later install() without arguments")
        self.assertEqual(self.imported("state.installed_with = (None, None)"), "None")
        refused = "InvalidState: TMS_INIT_ENABLE is set, but symmalloc is installed without tag:default"
        for conf in (None, "tag:weights", "tag:default2"):
            said = self.imported(f"state.installed_with = ({conf!r}, None)", **whole)
            self.assertIn(refused, said)
            self.assertIn("before install(), or add tag:default to its configuration", said)
        before = "state.installed_with = (None, None)"
        self.assertEqual(self.imported(before, **whole, SYMMALLOC_CONF="limit_mb:8, tag:default"), "None")
        self.assertIn("tag:default", self.imported("state.installed_with = ('tag:default', None)", **whole))


@needs.torch
@needs.device
@needs.stand_ins
class Saver(Compiled):
    """The interface under a real PyTorch on the stub, with the compiled class and with its fallback."""

    BEGIN = """
import ctypes, os, tempfile, torch
from symmalloc.torch_memory_saver import configure_subprocess, torch_memory_saver as saver
import symmalloc
MIB = 1 << 20
fill = lambda tensor, byte: ctypes.memset(tensor.data_ptr(), byte, tensor.nbytes)
holds = lambda tensor, byte: set(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)) == {byte}
empty = lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")
def raises(error, message, call):
    try:
        call()
    except error as caught:
        assert message in str(caught), caught
    else:
        raise AssertionError(f"no {error.__name__} with the message {message!r}")
"""

    def succeeds(self, program: str, **environment: str) -> None:
        done = self.run_in(self.cache.name, self.BEGIN + program, **environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_regions_restore_their_contents_from_each_backup(self) -> None:
        self.succeeds("""
assert saver.enabled and not saver.retain_cpu_backup and symmalloc.installed()
folder = tempfile.mkdtemp()
arguments = {
    "pinned": {"enable_cpu_backup": True}, "mmap": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
    "disk": {"enable_disk_backup": True}, "none": {},
}
raises(symmalloc.InvalidArgument, "set_disk_backup_dir", lambda: saver.region(**arguments["disk"]).__enter__())
saver.set_disk_backup_dir(folder)
held = {}
for name, given in arguments.items():
    with saver.region(tag=name, **given):
        held[name] = empty(5 * MIB)
    fill(held[name], 6)
reserved = torch.cuda.memory_reserved()
assert saver.get_cpu_backup(held["pinned"]) is None
saver.pause()
assert torch.cuda.memory_reserved() <= reserved - 20 * MIB
for name in ("pinned", "mmap", "disk"):
    copy = saver.get_cpu_backup(held[name])
    assert copy.device.type == "cpu" and copy.shape == held[name].shape and bool((copy == 6).all()), name
assert saver.get_cpu_backup(held["none"]) is None
view = saver.get_cpu_backup(held["mmap"][MIB:], zero_copy=True)
assert view.numel() == 4 * MIB and bool((view == 6).all())
raises(symmalloc.InvalidState, "copy them", lambda: saver.get_cpu_backup(held["disk"], zero_copy=True))
saver.resume("mmap"); saver.resume()
assert all(holds(held[name], 6) for name in ("pinned", "mmap", "disk"))
assert saver.get_cpu_backup(held["pinned"]) is None and os.listdir(folder) == []
saver.retain_cpu_backup = True
saver.pause("mmap")
first = saver.get_cpu_backup(held["mmap"], zero_copy=True).data_ptr()
saver.resume("mmap"); saver.pause("mmap"); saver.resume("mmap")
assert saver.get_cpu_backup(held["mmap"], zero_copy=True).data_ptr() == first
saver.retain_cpu_backup = False
saver.pause("mmap"); saver.resume("mmap")
assert saver.get_cpu_backup(held["mmap"]) is None
""")

    def test_a_graphs_memory_has_its_own_tag(self) -> None:
        self.succeeds("""
graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with saver.cuda_graph(graph, tag="graph", enable_cpu_backup=True):
    inside = empty(9 * MIB)
    temporary = empty(64 * MIB)
    del temporary
with saver.cuda_graph(other, tag="other"):
    elsewhere = empty(3 * MIB)
fill(inside, 5)
torch.cuda.empty_cache()
reserved = torch.cuda.memory_reserved()
saver.pause("graph")
assert torch.cuda.memory_reserved() <= reserved - 64 * MIB, "also what the graph freed"
assert bool((saver.get_cpu_backup(inside) == 5).all())
saver.resume("graph")
assert holds(inside, 5) and torch.cuda.memory_reserved() == reserved
graph.replay()
saver.pause("other")
assert torch.cuda.memory_reserved() <= reserved - 2 * MIB
saver.resume()
other.replay()
del graph, inside
saver.pause("graph"); saver.resume("graph")
""")

    def test_the_whole_process_is_a_region_except_where_it_is_disabled(self) -> None:
        self.succeeds("""
weights = empty(8 * MIB)
fill(weights, 4)
with saver.region(tag="gradients"):
    gradients = empty(8 * MIB)
saver.pause()
assert torch.cuda.memory_reserved() == 0
raises(RuntimeError, "sleeps", lambda: empty(MIB))
with saver.disable():
    temporary = empty(16 * MIB)
    fill(temporary, 1)
    assert holds(temporary, 1)
    del temporary
assert torch.cuda.memory_reserved() == 0, "the end of disable() releases its memory"
assert bool((saver.get_cpu_backup(weights) == 4).all()) and saver.get_cpu_backup(gradients) is None
saver.resume()
assert holds(weights, 4)
saver.pause("gradients")
assert holds(weights, 4)
saver.resume()
""", TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1", TMS_INIT_CPU_BACKUP_BACKEND="mmap")  # fmt: skip

    def test_the_c_functions_read_and_change_the_region_of_the_thread(self) -> None:
        self.succeeds("""
tms = saver._impl._binary_wrapper.cdll
def now():
    return (tms.tms_get_interesting_region(), tms.tms_get_current_tag(), tms.tms_get_enable_cpu_backup(),
            tms.tms_get_cpu_backup_backend(), tms.tms_get_enable_disk_backup())
def tag_of(tensor):
    of = symmalloc.allocator(0)
    pool = of.placement_of(tensor.data_ptr()).pool
    return next(entry["tag"] for entry in of.stats()["pools"] if entry["pool"] == pool)
def is_paused(tensor):
    before = torch.cuda.memory_reserved()
    assert tms.tms_pause(None) == 0
    there = saver.get_cpu_backup(tensor) is not None
    assert tms.tms_resume(None) == 0
    return there
outside = (False, b"default", False, b"pinned", False)
assert now() == outside
with saver.region(tag="weights", enable_cpu_backup=True, cpu_backup_backend="mmap"):
    assert now() == (True, b"weights", True, b"mmap", False)
    weights = empty(4 * MIB)
    tms.tms_set_interesting_region(False)
    assert now()[0] is False
    buffers = empty(4 * MIB)
    tms.tms_set_interesting_region(True)
    more = empty(4 * MIB)
    with saver.disable():
        assert now()[0] is False
    tms.tms_set_interesting_region(False)
assert now() == outside, "the end of a block undoes its changes"
assert (tag_of(weights), tag_of(buffers), tag_of(more), tag_of(empty(MIB))) == ("weights", None, "weights", None)
fill(buffers, 9)
assert is_paused(weights) and is_paused(more) and not is_paused(buffers) and holds(buffers, 9)

tms.tms_set_current_tag(b"cache"); tms.tms_set_enable_cpu_backup(True); tms.tms_set_interesting_region(True)
assert now() == (True, b"cache", True, b"pinned", False)
cache = empty(4 * MIB)
tms.tms_set_current_tag(b"other")
other = empty(4 * MIB)
tms.tms_set_cpu_backup_backend(b"mmap")
mapped = empty(4 * MIB)
tms.tms_set_interesting_region(False)
assert [tag_of(one) for one in (cache, other, mapped, empty(MIB))] == ["cache", "other", "other", None]
fill(cache, 3)
tms.tms_pause(b"cache")
pointer = tms.tms_get_cpu_backup_pointer(ctypes.cast(cache.data_ptr(), ctypes.POINTER(ctypes.c_uint8)), MIB)
assert pointer and pointer[0] == 3 and not tms.tms_get_cpu_backup_pointer(other.data_ptr(), MIB)
tms.tms_resume(b"cache")
tms.tms_set_retain_cpu_backup(True)
assert tms.tms_get_retain_cpu_backup() and saver.retain_cpu_backup
raises(ValueError, "'pinned' or 'mmap'", lambda: (tms.tms_set_cpu_backup_backend(b"disk"), tms.tms_set_interesting_region(True)))
assert now()[0] is False
import threading
thread = threading.Thread(target=lambda: tms.tms_set_interesting_region(True)); thread.start(); thread.join()
assert now()[0] is False and tag_of(empty(MIB)) is None
""")

    def test_a_change_of_the_region_nests_with_the_scopes_of_other_pools(self) -> None:
        self.succeeds("""
tms = saver._impl._binary_wrapper.cdll
of = symmalloc.allocator(0)
def pool_of():
    tensor = empty(MIB)
    return of.placement_of(tensor.data_ptr()).pool
other = symmalloc.MemPool(symmetric=False)
tms.tms_set_interesting_region(True)
region = pool_of()
with symmalloc.use_mem_pool(other):
    raises(symmalloc.InvalidState, "end that scope before the next change", lambda: tms.tms_set_interesting_region(False))
    assert tms.tms_get_interesting_region() and pool_of() == other.id
assert pool_of() == region != other.id
tms.tms_set_interesting_region(False)
assert pool_of() == 0
with symmalloc.use_mem_pool(other):
    tms.tms_set_interesting_region(True)
    assert pool_of() == region
    tms.tms_set_interesting_region(False)
    assert pool_of() == other.id
def forgets():
    with symmalloc.use_mem_pool(other):
        tms.tms_set_interesting_region(True)
raises(symmalloc.InvalidState, "undo a call of tms_set_", forgets)
assert pool_of() == 0
""")

    def test_one_call_changes_the_whole_region(self) -> None:
        self.succeeds("""
wrapper = saver._impl._binary_wrapper
tms = wrapper.cdll
def now():
    return (tms.tms_get_interesting_region(), tms.tms_get_current_tag(), tms.tms_get_enable_cpu_backup(),
            tms.tms_get_cpu_backup_backend(), tms.tms_get_enable_disk_backup())
outside = now()
regions = lambda: {entry["tag"] for entry in symmalloc.allocator(0).stats()["pools"]} - {None}
wrapper.set_config(tag="weights", interesting_region=True, enable_cpu_backup=True, cpu_backup_backend="mmap")
assert now() == (True, b"weights", True, b"mmap", False)
weights = empty(4 * MIB)
fill(weights, 8)
wrapper.set_config(tag="cache", interesting_region=True, enable_cpu_backup=False)
assert now() == (True, b"cache", False, b"mmap", False), "the backend stays"
cache = empty(4 * MIB)
assert regions() == {"weights", "cache"}, "no region in between"
raises(ValueError, "exclude each other", lambda: wrapper.set_config(
    tag="both", interesting_region=True, enable_cpu_backup=True, enable_disk_backup=True))
assert now() == outside, "the thread's own region remains"
wrapper.set_config(tag="default", interesting_region=False, enable_cpu_backup=False, cpu_backup_backend="pinned")
saver.pause("weights")
assert bool((saver.get_cpu_backup(weights) == 8).all())
saver.resume("weights")
with saver.region(tag="block"):
    wrapper.set_config(tag="cache", interesting_region=True, enable_cpu_backup=False)
assert now() == outside
""")

    def test_the_region_of_the_process_excludes_buffers_and_may_be_on_disk(self) -> None:
        self.succeeds("""
tms = saver._impl._binary_wrapper.cdll
saver.set_disk_backup_dir(tempfile.mkdtemp())
assert tms.tms_get_interesting_region() and tms.tms_get_enable_disk_backup() and not tms.tms_get_enable_cpu_backup()
weights = empty(4 * MIB)
tms.tms_set_interesting_region(False)
buffers = empty(4 * MIB)
tms.tms_set_interesting_region(True)
fill(weights, 4); fill(buffers, 5)
saver.pause()
assert holds(buffers, 5) and bool((saver.get_cpu_backup(weights) == 4).all())
saver.resume()
assert holds(weights, 4)
""", TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_DISK_BACKUP="1", TMS_DISK_BACKUP_DIR=tempfile.gettempdir())  # fmt: skip

    def test_another_implementation_can_be_registered(self) -> None:
        self.succeeds("""
from contextlib import contextmanager
from symmalloc.torch_memory_saver import register_hook_mode
calls = []
class Other:
    @contextmanager
    def region(self, tag, enable_cpu_backup=False):
        calls.append(("region", tag)); yield
    def pause(self, tag):
        calls.append(("pause", tag))
raises(ValueError, "register_hook_mode", lambda: setattr(saver, "hook_mode", "other"))
register_hook_mode("other", Other, uses_preload=False)
raises(ValueError, "already registered", lambda: register_hook_mode("other", Other))
raises(ValueError, "already registered", lambda: register_hook_mode("torch", Other))
saver.hook_mode = "other"
with saver.region(tag="weights"):
    pass
saver.pause("weights")
assert calls == [("region", "weights"), ("pause", "weights")] and saver.hook_mode == "other"
saver.hook_mode = "preload"
saver.pause("weights")
assert len(calls) == 2
""")

    def test_wrong_arguments_raise_typed_errors(self) -> None:
        self.succeeds("""
def region(**arguments):
    with saver.region(**arguments):
        pass
raises(ValueError, "needs enable_cpu_backup", lambda: region(cpu_backup_backend="mmap"))
raises(ValueError, "'pinned' or 'mmap'", lambda: region(enable_cpu_backup=True, cpu_backup_backend="disk"))
raises(ValueError, "exclude each other", lambda: region(enable_cpu_backup=True, enable_disk_backup=True))
raises(ValueError, "hook_mode", lambda: setattr(saver, "hook_mode", "kernel"))
for mode in ("preload", "torch"):
    saver.hook_mode = mode
raises(ValueError, "contiguous CUDA", lambda: saver.get_cpu_backup(torch.empty(3)))
raises(ValueError, "memory_margin_bytes", lambda: setattr(saver, "memory_margin_bytes", 1 << 60))
raises(NotImplementedError, "only be set", lambda: saver.memory_margin_bytes)
with configure_subprocess():
    pass
saver.pause("a_tag_of_nobody"); saver.resume("a_tag_of_nobody")
""")


if __name__ == "__main__":
    unittest.main()
