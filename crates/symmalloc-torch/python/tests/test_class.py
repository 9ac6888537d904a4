"""The compiled class: compilation and cache, and its behavior under a PyTorch without a GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import needs
from symmalloc import pytorch_class

CALLS = Path(__file__).resolve().parents[4] / "benches" / "jobs" / "pytorch_calls.py"
INSTALL = "import torch, symmalloc; symmalloc.install(); print(symmalloc.installed())"


class Compiled(unittest.TestCase):
    """Tests with a shared cache, because compiling takes seconds."""

    cache: tempfile.TemporaryDirectory[str]

    @classmethod
    def setUpClass(cls) -> None:
        cls.cache = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.cache.cleanup()

    def run_in(self, cache: str, program: str = INSTALL, **environment: str) -> subprocess.CompletedProcess[str]:
        return needs.process(program, **environment, XDG_CACHE_HOME=cache)


@needs.torch
@needs.compilation
class Cache(Compiled):
    def files(self, cache: str) -> list[Path]:
        return sorted(Path(cache).rglob("*.so*")) + sorted(Path(cache).rglob(".*"))

    def test_ranks_that_start_at_once_compile_one_file_and_later_ones_none(self) -> None:
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"XDG_CACHE_HOME": cache}
            command = [sys.executable, "-c", INSTALL]
            ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
            for rank in ranks:
                said, _ = rank.communicate(timeout=280)
                self.assertEqual((rank.returncode, said), (0, "True\n"))
            (file,) = self.files(cache)
            written = file.stat().st_mtime_ns
            another = self.run_in(cache, CXX="true")
            self.assertIn("TorchError: /", another.stderr, "another compiler needs another file")
            self.assertEqual(self.run_in(cache).stdout, "True\n")
            self.assertEqual((self.files(cache), file.stat().st_mtime_ns), ([file], written))
            # A file that cannot be loaded is removed.
            file.write_bytes(pytorch_class.sealed(b"no library"))
            self.assertIn("the next install() recompiles it", self.run_in(cache).stderr)
            self.assertEqual(self.files(cache), [])

    def test_a_folder_that_others_can_write_is_not_used(self) -> None:
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as temporary:
            (Path(cache) / "symmalloc").mkdir()
            (Path(cache) / "symmalloc").chmod(0o777)
            done = self.run_in(cache, TMPDIR=temporary)
            self.assertEqual(done.stdout, "True\n", done.stderr)
            self.assertIn("This process compiles the allocator for itself", done.stderr)
            self.assertEqual(self.files(cache) + list(Path(temporary).iterdir()), [])


@needs.torch
@needs.device
@needs.stand_ins
class Calls(Compiled):
    """Calls of a real PyTorch on the stub, which does not run kernels."""

    def check(self, name: str) -> None:
        command = [sys.executable, str(CALLS), "--allocator", "symmalloc", "--only", name]
        environment = os.environ | {"XDG_CACHE_HOME": self.cache.name}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        self.assertIn(": works", done.stdout, done.stdout + done.stderr)
        self.assertNotIn("RAISES", done.stdout, done.stderr)

    def succeeds(self, program: str) -> str:
        done = self.run_in(self.cache.name, program)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_statistics_work_through_pytorchs_interface(self) -> None:
        self.check("statistics")

    def test_histories_have_frames_of_python_and_cxx(self) -> None:
        self.check("_record_memory_history")

    def test_a_trace_names_the_requesting_frames_while_a_history_is_on(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            script, trace = Path(folder) / "job.py", Path(folder) / "job.trace"
            script.write_text(
                "import gc, torch, symmalloc\n"
                f"symmalloc.install(trace={str(trace)!r})\n"
                "def weights():\n"
                "    return torch.nn.Linear(64, 64, bias=False, device='cuda')\n"
                "before = torch.empty(100, device='cuda')\n"
                "torch.cuda.memory._record_memory_history(context='state')\n"
                "layer = weights()\n"
                "torch.cuda.memory._set_memory_metadata('step 1')\n"
                "said = torch.empty(200, device='cuda')\n"
                "torch.cuda.memory._set_memory_metadata('')\n"
                "with symmalloc.named('mine'):\n"
                "    named = torch.empty(300, device='cuda')\n"
                "torch.cuda.memory._record_memory_history(enabled=None)\n"
                "after = torch.empty(400, device='cuda')\n"
                "symmalloc.dump_snapshot('-'.join([symmalloc.__name__, 'job.pickle']))\n"
            )
            environment = os.environ | {"XDG_CACHE_HOME": self.cache.name}
            done = subprocess.run(
                [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280, cwd=folder
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            lines = [line.split(" -> ")[0] for line in trace.read_text().splitlines() if line.startswith("a ")]
            where = f'"{Path(folder).name}/job.py:4 weights"'
            self.assertEqual(lines, [
                "a 0 400 s0", f"a 1 16384 s0 {where}", 'a 2 800 s0 "step 1"', 'a 3 1200 s0 "mine"', "a 4 1600 s0",
            ])  # fmt: skip
            # A snapshot shows the same names for live allocations.
            snapshot = pickle.loads((Path(folder) / "symmalloc-job.pickle").read_bytes())
            frames = [block["frames"] for segment in snapshot["segments"] for block in segment["blocks"]]
            self.assertIn([{"name": "weights", "filename": f"{Path(folder).name}/job.py", "line": 4}], frames)

    def test_annotations_work_through_pytorchs_interface(self) -> None:
        self.check("annotations")

    def test_mem_pools_work_through_pytorchs_interface(self) -> None:
        self.check("MemPool")

    def test_mem_pools_apply_in_the_backward_pass(self) -> None:
        self.check("backward")

    def test_memory_fractions_and_observers_work_through_pytorchs_interface(self) -> None:
        self.check("fraction")

    def test_a_graph_has_its_own_memory_and_releases_it(self) -> None:
        self.succeeds("""
            import torch, symmalloc
            symmalloc.install()
            graph, x = torch.cuda.CUDAGraph(), torch.empty(1000, device="cuda")
            with torch.cuda.graph(graph):
                y = torch.empty(3 << 20, device="cuda")
            pools = lambda: [segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()]
            pool = graph.pool()
            assert pool in pools(), pools()
            torch.cuda.empty_cache()
            assert pool in pools()
            del y
            graph.reset()
            torch.cuda.empty_cache()
            assert pool not in pools(), pools()
        """)

    def test_a_release_of_free_memory_counts_as_a_synchronization_of_all_streams(self) -> None:
        self.succeeds("""
            import torch, symmalloc
            symmalloc.install()
            x = torch.empty(1000, device="cuda")
            synchronizations = lambda: torch.cuda.memory_stats()["num_sync_all_streams"]
            before = synchronizations()
            torch.cuda.empty_cache()
            assert synchronizations() == before + 1
            torch.cuda.reset_accumulated_memory_stats()
            assert synchronizations() == 0
        """)

    def test_a_tree_of_graphs_returns_to_a_checkpoint(self) -> None:
        self.succeeds("""
            import torch, symmalloc
            symmalloc.install()
            pool, side, c = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), torch._C

            def inside(*sizes):
                with torch.cuda.stream(side):
                    c._cuda_beginAllocateCurrentStreamToPool(0, pool)
                    made = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in sizes]
                    c._cuda_endAllocateToPool(0, pool)
                return made

            a, b = inside(1, 3)
            addresses = {a.data_ptr(), b.data_ptr()}
            state = c._cuda_getCheckpointState(0, pool)
            assert c._cuda_checkPoolLiveAllocations(0, pool, addresses)
            (branch,) = inside(40)
            del b
            for tensor in (a, branch):
                c._free_And_Remove_DeleterFn(tensor.untyped_storage()._cdata)
            reserved = torch.cuda.memory_reserved()
            device = torch.device("cuda:0")
            storages = [c._construct_storage_from_data_pointer(address, device, 1 << 20) for address in addresses]
            c._cuda_setCheckpointPoolState(0, state, [], [storage._cdata for storage in storages])
            assert c._cuda_checkPoolLiveAllocations(0, pool, addresses)
            assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (4 << 20, reserved)
            del storages
            assert c._cuda_checkPoolLiveAllocations(0, pool, set())
            assert symmalloc.stats()["errors"]["failed_calls"] == 0
        """)

    def test_a_tensor_is_the_same_memory_in_another_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "program.py"
            script.write_text(
                "import ctypes, torch, symmalloc, torch.multiprocessing as mp\n"
                "def child(there, back):\n"
                "    symmalloc.install()\n"
                "    tensor, sum = there.get(timeout=100), 0\n"
                "    back.put(ctypes.string_at(tensor.data_ptr() + (39 << 20), 5))\n"
                "    ctypes.memset(tensor.data_ptr(), 7, 3)\n"
                "    back.put('done')\n"
                "    del tensor\n"
                "if __name__ == '__main__':\n"
                "    symmalloc.install()\n"
                "    context = mp.get_context('spawn')\n"
                "    there, back = context.Queue(), context.Queue()\n"
                "    process = context.Process(target=child, args=(there, back))\n"
                "    process.start()\n"
                "    before, tensor = (torch.empty(n << 20, dtype=torch.uint8, device='cuda') for n in (3, 40))\n"
                "    ctypes.memmove(tensor.data_ptr() + (39 << 20), b'hello', 5)\n"
                "    there.put(tensor)\n"
                "    assert back.get(timeout=100) == b'hello' and back.get(timeout=100) == 'done'\n"
                "    assert ctypes.string_at(tensor.data_ptr(), 3) == bytes([7, 7, 7])\n"
                "    process.join(60)\n"
                "    assert process.exitcode == 0\n"
                "    del before, tensor\n"
                "    torch.cuda.ipc_collect()\n"
                "    torch.cuda.empty_cache()\n"
                "    assert torch.cuda.memory_reserved() == 0\n"
            )
            environment = os.environ | {"XDG_CACHE_HOME": self.cache.name}
            done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
