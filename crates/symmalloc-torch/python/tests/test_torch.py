"""The package on a real PyTorch without a GPU. install() applies to the rest of a process, so each test starts its own."""

from __future__ import annotations

import unittest

import needs


# This PyTorch cannot use the stub, so the programs make the class's calls.
START = """
        import ctypes, os, torch, symmalloc
        from symmalloc.library import library
        symmalloc.install()
        ours = symmalloc.allocator(0)

        def allocate(size_bytes):
            out = ctypes.c_void_p()
            size, number = ctypes.c_size_t(size_bytes), ctypes.c_uint64(0)
            assert library().symmalloc_torch_allocate(0, None, size, number, None, ctypes.byref(out)) == 0
            return out.value
"""


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
            for arguments in ({"conf": "segments:fixed"}, {"trace": "job.trace"}):
                try:
                    symmalloc.install(**arguments)
                except symmalloc.InvalidState:
                    continue
                raise AssertionError(arguments)
        """)  # fmt: skip

    def test_a_wrong_configuration_is_refused_before_anything_is_replaced(self) -> None:
        succeeds(self, """
            import os, torch, symmalloc
            for arguments, variable in ((["segmens:fixed"], ""), ([], "segmens:fixed")):
                os.environ["SYMMALLOC_CONF"] = variable
                try:
                    symmalloc.install(*arguments, trace="job.trace")
                except symmalloc.InvalidSettings as error:
                    assert "segments" in str(error), error
                else:
                    raise AssertionError(arguments)
                assert not symmalloc.installed() and "SYMMALLOC_TRACE" not in os.environ
                assert torch._C._cuda_customAllocator is not None
            symmalloc.install("segments:fixed")
            assert "segments:fixed" in symmalloc.library.text("torch_settings")
        """)  # fmt: skip

    def test_plans_are_learned_from_optimizers_if_the_configuration_says_so(self) -> None:
        for conf, learns in (("plan: learn", True), ("plan:off", False), (None, False)):
            succeeds(self, f"""
                import torch, symmalloc
                from torch.optim import optimizer
                symmalloc.install({conf!r})
                assert bool(optimizer._global_optimizer_post_hooks) is {learns}
            """)  # fmt: skip


@needs.torch
@needs.device
class Snapshots(unittest.TestCase):
    def test_pytorchs_own_viewer_reads_them(self) -> None:
        succeeds(self, START + """
        import pickle, tempfile
        from torch.cuda import _memory_viz
        pointer = ours.allocate(3 << 20)
        snapshot = symmalloc.snapshot(0)
        def lines(text):  # instead of a viewer
            return text

        assert "stream" in _memory_viz.segments(snapshot, format_flamegraph=lines)
        assert str(3 << 20) in _memory_viz.memory(snapshot, format_flamegraph=lines)
        assert "MemoryViz.js" in _memory_viz.segment_plot(snapshot)
        assert not _memory_viz.compare(snapshot["segments"], snapshot["segments"], format_flamegraph=lines)
        with tempfile.NamedTemporaryFile() as file:
            symmalloc.dump_snapshot(file.name, 0)
            assert pickle.load(open(file.name, "rb"))["segments"] == snapshot["segments"]
        """)  # fmt: skip


@needs.torch
@needs.device
class Pools(unittest.TestCase):
    def test_allocations_of_this_thread_go_to_the_pool_in_use(self) -> None:
        succeeds(self, START + """
        pool = symmalloc.MemPool(device=0)
        before = pool.digest()
        with symmalloc.use_mem_pool(pool):
            inside = allocate(1 << 20)
        outside = allocate(1 << 20)
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

    def test_a_pool_with_a_base_has_its_addresses(self) -> None:
        succeeds(self, START + """
        pool = symmalloc.MemPool(symmetric=False, base="slot:4", device=0)
        other = symmalloc.MemPool(base=0x2000_0000_0000, reserve=4 << 20, device=0)
        with symmalloc.use_mem_pool(pool):
            assert allocate(1 << 20) == 0x1400_0000_0000
        with symmalloc.use_mem_pool(other):
            assert allocate(1 << 20) == 0x2000_0000_0000
        for base, kind in (("slot:4", symmalloc.InvalidState), ("slot:64", symmalloc.InvalidSettings), (4096, symmalloc.InvalidSettings)):
            try:
                symmalloc.MemPool(base=base, device=0)
            except kind as error:
                assert "slot:" in str(error), error
            else:
                raise AssertionError(base)
        """)  # fmt: skip

    def test_allocations_in_a_named_scope_have_the_name(self) -> None:
        succeeds(self, START + """
        with symmalloc.named("layer 3", device=0):
            allocate(5 << 20)
        allocate(7 << 20)
        blocks = [block for segment in symmalloc.snapshot(0)["segments"] for block in segment["blocks"]]
        named = {block["requested_size"] >> 20: "layer 3" in str(block["frames"]) for block in blocks if block["frames"]}
        assert named.get(5) and not named.get(7) and not named.get(3), blocks
        """)  # fmt: skip

    def test_a_pool_is_kept_until_its_windows_are_deregistered(self) -> None:
        succeeds(self, START + """
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
        succeeds(self, START + """
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
