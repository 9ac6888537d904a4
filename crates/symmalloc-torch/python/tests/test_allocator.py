"""The C interface from Python, on the stub of libcuda."""

from __future__ import annotations

import ctypes
import importlib
import os
import tempfile
import threading
import traceback
import unittest
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import needs
import symmalloc
from symmalloc import forks

MIB = 1 << 20


class WithoutADevice(unittest.TestCase):
    def test_without_libcuda_the_error_states_the_cause(self) -> None:
        done = needs.process("import symmalloc; symmalloc.Allocator(0)", LD_LIBRARY_PATH="")
        if not done.returncode:
            self.skipTest("this machine has a libcuda")
        self.assertIn("CudaError", done.stderr)
        self.assertIn("libcuda", done.stderr)


@needs.device
class OnADevice(unittest.TestCase):
    def setUp(self) -> None:
        self.allocator = symmalloc.Allocator(0)
        self.addCleanup(self.allocator.close)

    def test_a_freed_block_is_reused_at_the_same_placement(self) -> None:
        first = self.allocator.allocate(5 * MIB)
        place = self.allocator.placement_of(first)
        self.assertEqual((place.pool, place.stream, place.segment, place.offset_bytes), (0, 0, 0, 0))
        self.assertEqual(place.requested_bytes, 5 * MIB)
        self.allocator.free(first)
        self.assertEqual(self.allocator.allocate(5 * MIB), first)

    def test_damage_is_raised_once_and_names_the_allocation(self) -> None:
        with symmalloc.Allocator(0, "debug:[canary,poison]") as debugged:
            pointer = debugged.allocate(4000)
            self.assertEqual(debugged.check_memory(), 1)
            # The stub's device memory is memory of this process.
            ctypes.memset(pointer + 4000, 1, 1)
            with self.assertRaisesRegex(symmalloc.InvalidState, "memory was damaged: .* was overrun"):
                debugged.check_memory()
            self.assertEqual(debugged.check_memory(), 1)
            self.assertIn("byte 16 of", debugged.explain_address(pointer + 16))
            debugged.free(pointer)
            record = debugged.memory_record()
            self.assertEqual([(made["address"], made["size_bytes"]) for made in record], [(pointer, 4000)])
            self.assertIn("freed_at_op", record[0])

    def test_two_allocators_with_equal_histories_have_equal_digests(self) -> None:
        with symmalloc.Allocator(1) as other:
            for size in (100, 5 * MIB, 3 * MIB):
                pointers = self.allocator.allocate(size), other.allocate(size)
                self.assertEqual(self.allocator.placement_of(pointers[0]), other.placement_of(pointers[1]))
            self.assertEqual(self.allocator.digest(), other.digest())
            other.allocate(100)
            self.assertNotEqual(self.allocator.digest(), other.digest())

    def test_statistics_count_held_memory_and_peaks_can_be_reset(self) -> None:
        pointer = self.allocator.allocate(3 * MIB)
        total = self.allocator.stats()["total"]
        self.assertEqual(total["allocated_bytes"]["all"]["current"], 3 * MIB)
        self.assertGreaterEqual(total["reserved_bytes"]["all"]["peak"], 3 * MIB)
        self.allocator.free(pointer)
        self.allocator.reset_peaks()
        self.assertEqual(self.allocator.stats()["total"]["allocated_bytes"]["all"]["peak"], 0)

    def test_a_failed_allocation_writes_a_page_for_each_rank(self) -> None:
        program = """
            import symmalloc
            allocator = symmalloc.Allocator(0, "total_limit_mb:64")
            held = [allocator.allocate(10 << 20, name=f"cache {number}") for number in range(5)]
            try:
                allocator.allocate(30 << 20, name="logits")
            except symmalloc.OutOfMemory as error:
                print(error)
        """
        for rank, name in ((None, "out-of-memory.html"), ("3", "out-of-memory.rank3.html")):
            with tempfile.TemporaryDirectory() as folder:
                pages = Path(folder) / "pages"
                launch = {} if rank is None else {"RANK": rank, "WORLD_SIZE": "8"}
                done = needs.process(program, SYMMALLOC_ON_OUT_OF_MEMORY=f"report:{pages}", **launch)
                self.assertIn("30.00 MiB", done.stdout, done.stderr)
                self.assertEqual([page.name for page in pages.iterdir()], [name], done.stderr)
                self.assertIn(str(pages / name), done.stderr)
                page = (pages / name).read_text()
                for text in ("30.00 MiB for pool 0", "50.00 MiB live", "cache 4", "the allocator's limit is 64.00 MiB"):
                    self.assertIn(text, page)

    def test_an_unwritable_folder_of_pages_changes_no_error(self) -> None:
        program = """
            import symmalloc
            allocator = symmalloc.Allocator(0, "total_limit_mb:64")
            try:
                allocator.allocate(65 << 20)
            except symmalloc.OutOfMemory as error:
                print(error)
        """
        done = needs.process(program, SYMMALLOC_ON_OUT_OF_MEMORY="report:/proc/none")
        self.assertIn("65.00 MiB", done.stdout, done.stderr)
        self.assertIn("/proc/none", done.stderr)

    def test_a_step_that_occurs_twice_is_planned(self) -> None:
        with symmalloc.Allocator(0, "plan:learn") as learning:
            for number in range(4):
                learning.begin_step(key=7)
                first = learning.allocate(5 * MIB)
                second = learning.allocate(3 * MIB)
                learning.free(first)
                if number == 3:
                    learning.allocate(9 * MIB)
                learning.free(second)
                report = learning.end_step()
                planned, differs_at = {2: (2, None), 3: (2, 2)}.get(number, (0, None))
                self.assertEqual((report.planned, report.differs_at), (planned, differs_at))
            steps = learning.stats()["total"]["steps"]
            self.assertEqual((steps["ended"], steps["followed"], steps["plans"], steps["plan_bytes"]), (4, 1, 1, 8 * MIB))
            with self.assertRaises(symmalloc.InvalidState):
                learning.end_step()
            learning.begin_step()
            for call in (learning.begin_step, learning.drop_plans):
                with self.assertRaises(symmalloc.InvalidState):
                    call()
            learning.end_step()
            learning.drop_plans()
            self.assertEqual(learning.stats()["total"]["steps"]["plans"], 0)

    def test_a_trim_releases_all_free_memory(self) -> None:
        self.allocator.free(self.allocator.allocate(3 * MIB))
        self.assertGreater(self.allocator.trim(), 0)
        self.assertEqual(self.allocator.stats()["total"]["reserved_bytes"]["all"]["current"], 0)

    def test_a_private_trim_leaves_symmetric_pools_alone(self) -> None:
        for conf in ("", "symmetric:true"):
            pool = self.allocator.create_pool(conf)
            self.allocator.free(self.allocator.allocate(3 * MIB, pool=pool))
        before = self.allocator.stats()["total"]["reserved_bytes"]["all"]["current"]
        released = self.allocator.trim_private()
        self.assertGreaterEqual(released, 3 * MIB)
        after = self.allocator.stats()["total"]["reserved_bytes"]["all"]["current"]
        self.assertEqual(before - after, released)
        self.assertGreaterEqual(after, 3 * MIB)
        self.assertEqual(self.allocator.trim(), after)

    def test_a_dma_buf_covers_its_range_and_holds_its_memory(self) -> None:
        pool = self.allocator.create_pool("segments:reserved,segment_mb:16")
        pointer = self.allocator.allocate(10 * MIB, pool=pool)
        descriptors = len(os.listdir("/proc/self/fd"))
        with self.allocator.dma_buf(pointer + 100, MIB) as dma_buf:
            self.assertEqual(dma_buf.offset_bytes, 100)
            self.assertEqual(os.lseek(dma_buf.fileno(), 0, os.SEEK_END), MIB + 4096)
            used = self.allocator.device_memory().used_bytes
            self.allocator.sleep(pool, symmalloc.Contents.DROP)
            memory = self.allocator.device_memory()
            self.assertEqual((memory.used_bytes, memory.exported_bytes), (used, 16 * MIB))
            self.assertFalse(dma_buf.is_current)
        self.assertEqual(self.allocator.device_memory().used_bytes, used - 16 * MIB)
        self.assertEqual(len(os.listdir("/proc/self/fd")), descriptors)
        dma_buf.close()
        for closed in (dma_buf.fileno, lambda: dma_buf.is_current):
            with self.assertRaises(symmalloc.InvalidArgument):
                closed()
        self.allocator.wake(pool)
        with self.allocator.dma_buf(pointer, 10 * MIB) as again:
            self.assertTrue(again.is_current)

    def test_a_forked_child_closes_its_copy_of_a_dma_buf_and_no_other_file(self) -> None:
        pointer = self.allocator.allocate(MIB, pool=self.allocator.create_pool("segments:reserved,segment_mb:16"))
        with self.allocator.dma_buf(pointer, MIB) as dma_buf, self.allocator.dma_buf(pointer, MIB) as closed_later:
            numbers = dma_buf.fileno(), closed_later.fileno()
            child = os.fork()
            if child == 0:
                try:
                    for number in numbers:
                        with self.assertRaises(OSError):
                            os.fstat(number)
                        os.dup2(0, number)  # another file gets the number
                    with self.assertRaisesRegex(symmalloc.InvalidState, "belongs to the parent"):
                        dma_buf.fileno()
                    with self.assertRaises(symmalloc.InvalidState):
                        _ = dma_buf.is_current
                    forks.register_descriptors(numbers)
                    with closed_later:
                        dma_buf.close()
                        dma_buf.close()
                    for number in numbers:
                        os.fstat(number)
                        self.assertIn(number, forks._descriptors, "a registration of the child")
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            for one in (dma_buf, closed_later):
                os.fstat(one.fileno())
                self.assertTrue(one.is_current)
        # Another file has the number of a closed dma-buf, and stays open in a child.
        os.dup2(0, numbers[0])
        self.addCleanup(os.close, numbers[0])
        dma_buf.close()
        child = os.fork()
        if child == 0:
            with suppress(OSError):
                os.fstat(numbers[0])
                os._exit(0)
            os._exit(1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_a_child_that_another_thread_forks_while_a_dma_buf_is_opened_or_closed_has_no_copy(self) -> None:
        pointer = self.allocator.allocate(MIB, pool=self.allocator.create_pool("segments:reserved,segment_mb:16"))
        found: list[tuple[str, int]] = []
        threads: list[threading.Thread] = []
        module = importlib.import_module("symmalloc.allocator")  # the package has a function of that name
        call, numbers = module.call, []

        def fork(name: str) -> None:
            child = os.fork()
            if child == 0:
                os._exit(sum(os.path.exists(f"/proc/self/fd/{number}") for number in numbers))
            found.append((name, os.waitpid(child, 0)[1]))

        def with_forks(name: str, *arguments: Any) -> None:
            call(name, *arguments)
            if name == "dma_buf_open":
                numbers.append(arguments[3]._obj.value)
            threads.append(threading.Thread(target=fork, args=(name,)))
            threads[-1].start()
            threads[-1].join(0.2)  # it waits until the descriptor is registered

        with mock.patch.object(module, "call", with_forks):
            dma_bufs = [self.allocator.dma_buf(pointer, MIB) for _ in range(2)]
            dma_bufs[0].close()
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(found), [("dma_buf_close", 0), ("dma_buf_open", 0), ("dma_buf_open", 0)])
        dma_bufs[1].close()

    def test_a_dma_buf_that_is_refused_names_the_remedy(self) -> None:
        pointer = self.allocator.allocate(100 * MIB)
        with self.assertRaisesRegex(symmalloc.InvalidState, "segments:reserved or segments:fixed"):
            self.allocator.dma_buf(pointer, 100 * MIB)
        with self.assertRaises(symmalloc.UnknownPointer):
            self.allocator.dma_buf(1, 1)

    def test_a_snapshot_has_the_live_blocks_with_their_names(self) -> None:
        self.allocator.allocate(3 * MIB, name="activations")
        blocks = [block for segment in self.allocator.snapshot()["segments"] for block in segment["blocks"]]
        live = [block for block in blocks if block["state"] == "active_allocated"]
        self.assertEqual([block["requested_size"] for block in live], [3 * MIB])
        self.assertIn("activations", str(live[0]["frames"]))
        self.assertIn("activations", self.allocator.leak_report())

    def test_a_pool_has_its_own_placements_and_digest(self) -> None:
        before = self.allocator.digest()
        pool = self.allocator.create_pool("segments:fixed,symmetric:true")
        pointer = self.allocator.allocate(MIB, pool=pool)
        self.assertEqual(self.allocator.placement_of(pointer).pool, pool)
        self.assertEqual(self.allocator.digest(), before)
        self.allocator.free(pointer)
        self.allocator.destroy_pool(pool)
        with self.assertRaises(symmalloc.UnknownPool):
            self.allocator.allocate(MIB, pool=pool)

    def test_a_limit_is_an_error_that_changes_nothing(self) -> None:
        with symmalloc.Allocator(0, "total_limit_mb:8") as small:
            before = small.stats()["total"]["allocated_bytes"]["all"]["current"]
            with self.assertRaises(symmalloc.OutOfMemory):
                small.allocate(100 * MIB)
            self.assertEqual(small.stats()["total"]["allocated_bytes"]["all"]["current"], before)

    def test_a_wrong_configuration_names_the_byte_and_the_nearest_key(self) -> None:
        with self.assertRaisesRegex(symmalloc.InvalidSettings, "byte 0: .*segments"):
            symmalloc.Allocator(0, "segmens:fixed")

    def test_a_pointer_that_is_not_live_is_refused(self) -> None:
        pointer = self.allocator.allocate(MIB)
        self.allocator.free(pointer)
        for call in (self.allocator.free, self.allocator.placement_of, lambda at: self.allocator.record_use(at, 0)):
            with self.assertRaises(symmalloc.UnknownPointer):
                call(pointer)

    def test_a_stopped_trace_is_on_disk(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ops.trace"
            self.allocator.start_trace(path)
            self.allocator.free(self.allocator.allocate(MIB))
            self.allocator.stop_trace()
            self.assertGreater(path.stat().st_size, 0)

    def test_calls_on_a_closed_allocator_are_errors(self) -> None:
        self.allocator.close()
        with self.assertRaises(symmalloc.InvalidArgument):
            self.allocator.allocate(MIB)


@needs.device
class Agreement(unittest.TestCase):
    def ranks(self, extra_on_rank_1: int, conf: str | None = None) -> list[BaseException | None]:
        """Runs two ranks, each a thread with its own allocator, which exchange bytes in a list. Returns their errors."""
        parts: list[bytes] = [b"", b""]
        barrier = threading.Barrier(2, timeout=60)
        raised: list[BaseException | None] = [None, None]

        def rank(number: int) -> None:
            def gather(mine: bytes) -> bytes:
                parts[number] = mine
                barrier.wait()
                everyone = b"".join(parts)
                barrier.wait()
                return everyone

            with symmalloc.Allocator(number, conf) as allocator:
                allocator.allocate(MIB)
                if number == 1 and extra_on_rank_1:
                    allocator.allocate(extra_on_rank_1)
                try:
                    allocator.agree(number, 2, gather)
                except symmalloc.Error as error:
                    raised[number] = error

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised

    def test_ranks_that_allocated_alike_agree(self) -> None:
        self.assertEqual(self.ranks(0), [None, None])

    def test_ranks_that_differ_get_the_same_report_with_the_heap(self) -> None:
        reports = self.ranks(3 * MIB)
        for report in reports:
            self.assertIsInstance(report, symmalloc.MisalignedError)
        self.assertEqual(str(reports[0]), str(reports[1]))
        self.assertRegex(str(reports[0]), "pool 0, stream 0\n.*rank 0\n.*rank 1")

    def test_the_report_names_the_op_in_a_symmetric_pool(self) -> None:
        reports = self.ranks(3 * MIB, "symmetric:true")
        self.assertEqual(str(reports[0]), str(reports[1]))
        self.assertIn("allocate", str(reports[0]))

    def test_an_exception_of_the_exchange_is_propagated(self) -> None:
        def gather(_mine: bytes) -> bytes:
            raise ConnectionResetError("rank 1 is gone")

        with symmalloc.Allocator(0) as allocator, self.assertRaisesRegex(ConnectionResetError, "rank 1 is gone"):
            allocator.agree(0, 2, gather)


if __name__ == "__main__":
    unittest.main()
