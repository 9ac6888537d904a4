"""The package on a real PyTorch without a GPU. install() applies to the rest of a process, so each test starts its own."""

from __future__ import annotations

import unittest

import needs


def succeeds(test: unittest.TestCase, program: str, **environment: str) -> str:
    done = needs.process(program, **environment)
    test.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    return done.stdout


class WithoutTorch(unittest.TestCase):
    def test_install_without_torch_is_an_error(self) -> None:
        program = "import sys; sys.modules['torch'] = None; import symmalloc; symmalloc.install()"
        self.assertIn("TorchError: PyTorch cannot be imported", needs.process(program).stderr)

    def test_calls_without_an_installation_are_errors(self) -> None:
        program = "import symmalloc; symmalloc.stats(0)"
        self.assertIn("NotInstalled: PyTorch does not use symmalloc", needs.process(program).stderr)


@needs.torch
class Install(unittest.TestCase):
    def test_a_second_install_does_nothing_or_is_refused_with_other_arguments(self) -> None:
        succeeds(self, """
            import torch, symmalloc
            assert not symmalloc.installed()
            symmalloc.install(); symmalloc.install()
            assert symmalloc.installed()
            for arguments in ({"conf": "segments:fixed"}, {"trace": "job.trace"}, {"statistics": False}):
                try:
                    symmalloc.install(**arguments)
                except symmalloc.InvalidState:
                    continue
                raise AssertionError(arguments)
        """)  # fmt: skip

    def test_every_function_that_the_class_refuses_is_found_and_replaced(self) -> None:
        program = "import warnings, torch, symmalloc; warnings.simplefilter('error'); symmalloc.install()"
        succeeds(self, program, SYMMALLOC_TORCH_CLASS="off")

    def test_a_wrong_configuration_is_refused_before_anything_is_replaced(self) -> None:
        succeeds(self, """
            import torch, symmalloc
            before = torch._C._cuda_memoryStats
            try:
                symmalloc.install("segmens:fixed")
            except symmalloc.InvalidSettings as error:
                assert "segments" in str(error), error
            assert not symmalloc.installed() and torch._C._cuda_memoryStats is before
            symmalloc.install("segments:fixed")
        """)  # fmt: skip

    def test_install_after_the_first_use_of_cuda_is_refused(self) -> None:
        done = needs.process("import torch, symmalloc; torch.cuda.is_initialized = lambda: True; symmalloc.install()")
        self.assertIn(
            "TorchError: CUDA is in use already: call symmalloc.install() right after `import torch`", done.stderr
        )

    def test_an_old_torch_is_refused(self) -> None:
        done = needs.process("import torch, symmalloc; torch.__version__ = '2.1.0'; symmalloc.install()")
        self.assertIn("TorchError: PyTorch 2.1.0 is too old", done.stderr)

    def test_without_statistics_pytorchs_functions_are_not_replaced(self) -> None:
        succeeds(self, """
            import torch, symmalloc
            before = torch._C._cuda_memoryStats
            symmalloc.install(statistics=False)
            assert torch._C._cuda_memoryStats is before
        """, SYMMALLOC_TORCH_CLASS="off")  # fmt: skip


@needs.torch
@needs.device
class Statistics(unittest.TestCase):
    # This PyTorch cannot use the stub. Allocations use the C interface, and the test marks CUDA as initialized in PyTorch.
    START = """
        import os, torch, symmalloc
        os.environ["SYMMALLOC_TORCH_CLASS"] = "off"
        symmalloc.install()
        torch.cuda.memory.is_initialized = lambda: True
        torch.cuda.memory._get_device_index = lambda device, optional=False: 0 if device is None else device
        torch._C._cuda_hasPrimaryContext = lambda device: device == 0
        torch.cuda.device_count = lambda: 2
        ours = symmalloc.allocator(0)
        pointer = ours.allocate(3 << 20)
    """

    def test_pytorchs_functions_return_statistics_of_symmalloc(self) -> None:
        succeeds(self, self.START + """
        assert torch.cuda.memory_allocated() == 3 << 20
        assert torch.cuda.max_memory_reserved() >= 3 << 20
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 1
        assert torch.cuda.memory_stats(1)["allocation.all.allocated"] == 0
        assert "3072 KiB" in torch.cuda.memory_summary()
        ours.free(pointer)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
        """)  # fmt: skip

    def test_snapshots_are_read_by_pytorchs_own_viewer(self) -> None:
        succeeds(self, self.START + """
        import pickle, tempfile
        from torch.cuda import _memory_viz
        snapshot = torch.cuda.memory._snapshot()
        assert len(snapshot["device_traces"]) == 2
        def lines(text):  # instead of a viewer
            return text

        assert "stream" in _memory_viz.segments(snapshot, format_flamegraph=lines)
        assert str(3 << 20) in _memory_viz.memory(snapshot, format_flamegraph=lines)
        assert "MemoryViz.js" in _memory_viz.segment_plot(snapshot)
        assert not _memory_viz.compare(snapshot["segments"], snapshot["segments"], format_flamegraph=lines)
        assert torch.cuda.memory_snapshot()[0]["allocated_size"] == 3 << 20
        with tempfile.NamedTemporaryFile() as file:
            torch.cuda.memory._dump_snapshot(file.name)
            assert pickle.load(open(file.name, "rb"))["segments"] == snapshot["segments"]
            symmalloc.dump_snapshot(file.name, 0)
            assert pickle.load(open(file.name, "rb"))["segments"] == snapshot["segments"]
        """)  # fmt: skip

    def test_pytorchs_recording_is_refused_with_the_remedy(self) -> None:
        succeeds(self, self.START + """
        torch.cuda.memory._record_memory_history(enabled=None)
        try:
            torch.cuda.memory._record_memory_history()
        except RuntimeError as error:
            assert "symmalloc.start_trace" in str(error)
        else:
            raise AssertionError
        """)  # fmt: skip


@needs.torch
@needs.device
class Pools(unittest.TestCase):
    def test_allocations_of_this_thread_go_to_the_pool_in_use(self) -> None:
        succeeds(self, Statistics.START + """
        import ctypes
        from symmalloc.library import library
        allocate = library().symmalloc_torch_alloc
        allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        pool = symmalloc.MemPool(device=0)
        before = pool.digest()
        with symmalloc.use_mem_pool(pool):
            inside = allocate(1 << 20, 0, None)
        outside = allocate(1 << 20, 0, None)
        assert [ours.placement_of(pointer).pool for pointer in (inside, outside)] == [pool.id, 0]
        assert pool.digest() != before
        ours.free(inside)
        pool.close()
        pool.close()
        try:
            with symmalloc.use_mem_pool(pool):
                raise AssertionError
        except symmalloc.UnknownPool:
            pass
        """)  # fmt: skip

    def test_allocations_in_a_named_scope_have_the_name(self) -> None:
        succeeds(self, Statistics.START + """
        import ctypes
        from symmalloc.library import library
        allocate = library().symmalloc_torch_alloc
        allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        with symmalloc.named("layer 3", device=0):
            allocate(5 << 20, 0, None)
        allocate(7 << 20, 0, None)
        blocks = [block for segment in symmalloc.snapshot(0)["segments"] for block in segment["blocks"]]
        named = {block["requested_size"] >> 20: "layer 3" in str(block["frames"]) for block in blocks if block["frames"]}
        assert named.get(5) and not named.get(7) and not named.get(3), blocks
        """)  # fmt: skip

    def test_a_pool_is_kept_until_its_windows_are_deregistered(self) -> None:
        succeeds(self, Statistics.START + """
        import contextlib, gc, weakref
        from symmalloc import communicators, pool as pools
        calls, real = [], pools.call

        def call(name, *arguments):
            if name.startswith("registrar"):
                return calls.append(name)
            return real(name, *arguments)

        class Backend:
            is_gone = False

            def _comm_ptr(self):
                if self.is_gone:
                    raise RuntimeError("NCCL communicator was aborted on rank 0.")
                return 1

        backend = Backend()
        pools.call = call
        communicators.nccl_backend = lambda group, device: backend
        communicators._communicator = lambda backend, device: 1
        pools.rendezvous = lambda group: None
        torch.cuda.device = lambda device: contextlib.nullcontext()
        pool = symmalloc.MemPool(device=0)
        pool.register()
        kept = weakref.ref(pool)
        del pool
        gc.collect()
        assert kept() is not None, "NCCL uses its memory"
        backend.is_gone = True
        for act in (kept().close, kept().sync, kept().deregister):
            try:
                act()
            except symmalloc.InvalidState as error:
                assert "before destroy_process_group()" in str(error), error
                continue
            raise AssertionError(act)
        del act
        assert calls == ["registrar_create_with", "registrar_rank", "registrar_sync"], calls
        backend.is_gone = False
        kept().close()
        assert calls[3:] == ["registrar_destroy"], calls
        gc.collect()
        assert kept() is None
        """)  # fmt: skip

    def test_windows_need_nccl(self) -> None:
        succeeds(self, Statistics.START + """
        try:
            symmalloc.MemPool(device=0).register()
        except symmalloc.TorchError as error:
            assert "init_process_group" in str(error), error
        else:
            raise AssertionError
        """)  # fmt: skip


@needs.torch
@needs.device
class Ranks(unittest.TestCase):
    PROGRAM = """
        import os
        import torch, symmalloc
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        symmalloc.install()
        dist.init_process_group("gloo")
        ours = symmalloc.allocator(0)
        ours.allocate(1 << 20)
        symmalloc.assert_aligned(device=0)
        ours.allocate((1 << 20) << rank)
        try:
            symmalloc.assert_aligned(device=0)
        except symmalloc.MisalignedError as error:
            assert "rank 1" in str(error), error
            print("told")
        dist.destroy_process_group()
    """

    # As over NCCL, the ranks exchange through device memory, which is host memory on the stub.
    PART = """
        import ctypes, os, types
        import torch, symmalloc
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        symmalloc.install()
        dist.init_process_group("gloo")
        dist.get_backend_config = lambda group=None: "cuda:nccl"
        torch.cuda.current_stream = lambda device=None: types.SimpleNamespace(cuda_stream=0)
        exchanged = []

        def as_tensor(described, device):
            assert device == torch.device("cuda", 0), device
            shape, (address, _) = (described.__cuda_array_interface__[key] for key in ("shape", "data"))
            exchanged.append(address)
            return torch.frombuffer((ctypes.c_uint8 * shape[0]).from_address(address), dtype=torch.uint8)

        torch.as_tensor = as_tensor
        alone = dist.new_group([0])
        if rank == 0:
            for _ in range(2):
                symmalloc.assert_aligned(alone, device=0)
            assert exchanged[0] == exchanged[-1] and len(exchanged) >= 2, exchanged
            stats = symmalloc.stats(0)
            assert (stats["streams"], len(stats["pools"])) == (0, 1), stats
        pool = symmalloc.MemPool(device=0)
        ours = symmalloc.allocator(0)
        for number in (pool.id, 0):
            ours.allocate(1 << 20, pool=number)
        symmalloc.assert_aligned(device=0)
        pointer = ours.allocate(1 << 20)
        symmalloc.assert_aligned(device=0)
        assert ours.placement_of(pointer).pool == 0 and pool.id == 1
        ours.allocate((1 << 20) << rank, pool=pool.id)
        try:
            symmalloc.assert_aligned(device=0)
        except symmalloc.MisalignedError:
            print("told")
        dist.destroy_process_group()
    """

    def test_assert_aligned_over_gloo_raises_on_every_rank(self) -> None:
        self.every_rank_is_told(self.PROGRAM)

    def test_comparing_some_ranks_does_not_affect_later_comparisons(self) -> None:
        self.every_rank_is_told(self.PART)

    def every_rank_is_told(self, program: str) -> None:
        import socket
        from concurrent.futures import ThreadPoolExecutor

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        with ThreadPoolExecutor() as ranks:
            for done in ranks.map(lambda rank: needs.process(program, RANK=str(rank), **shared), range(2)):
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout.strip(), "told")


if __name__ == "__main__":
    unittest.main()
