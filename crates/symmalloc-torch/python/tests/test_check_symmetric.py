"""`python -m symmalloc.check_symmetric`: processes, deadlines, verdicts and the command line, with cases that need no GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import needs
from symmalloc.check_symmetric import cases, pools, runner
from symmalloc.check_symmetric.cases import CASES
from symmalloc.check_symmetric.pools import Gpus
from symmalloc.check_symmetric.rank import CannotRun, Rank
from symmalloc.check_symmetric.runner import _frame
from symmalloc.check_symmetric.verdicts import Outcome, Verdict, exit_code, line

FAKE = Path(__file__).resolve().parent / "fakes" / "check_symmetric" / "fake_check.py"


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def command_line(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    variables["PYTHONPATH"] = os.pathsep.join([needs.packages(), variables.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "symmalloc.check_symmetric", *arguments]
    return subprocess.run(command, env=variables | environment, capture_output=True, text=True, timeout=200)


class Fakes(unittest.TestCase):
    """Runs of fake cases."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.notes = Path(folder.name)

    def text(self, *cases: str, **environment: str) -> subprocess.CompletedProcess[str]:
        packages = os.pathsep.join([needs.packages(), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, str(FAKE), str(self.notes), *cases],
            env=os.environ | {"PYTHONPATH": packages} | environment,
            capture_output=True,
            text=True,
            timeout=100,
            # A shell that starts the tests in the background makes them ignore Ctrl+C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def report(self, *cases: str, **environment: str) -> tuple[int, dict[str, Any]]:
        done = self.text(*cases, FAKE_JSON="1", **environment)
        self.assertTrue(done.stdout, done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual(report["exit_code"], done.returncode)
        return done.returncode, report

    def one(self, case: str) -> tuple[int, dict[str, Any]]:
        code, report = self.report(case)
        return code, report["cases"][0]

    def test_an_error_of_a_package_is_a_refusal_even_if_it_is_an_assertion(self) -> None:
        _, case = self.one("misaligned")
        self.assertEqual((case["verdict"], case["reason"]), ("refused", "MisalignedError: rank 1 differs"))

    def test_the_first_error_is_the_reason(self) -> None:
        _, case = self.one("fails_twice")
        self.assertEqual((case["verdict"], case["reason"]), ("refused", "RuntimeError: the cause"))

    def test_correct_and_refused_cases_exit_with_0(self) -> None:
        code, report = self.report("right", "refused")
        self.assertEqual(code, 0)
        right, refused = report["cases"]
        self.assertEqual((right["verdict"], right["reason"]), ("correct", "a remark"))
        # The error without general advice, and once for all ranks.
        self.assertEqual((refused["verdict"], refused["reason"]), ("refused", "RuntimeError: not supported"))
        self.assertEqual((report["schema_version"], report["ranks"], report["facts"]["allocator"]), (1, 2, "fake"))

    def test_wrong_elements_of_one_rank_are_counted_and_the_next_case_runs(self) -> None:
        code, report = self.report("wrong", "right")
        self.assertEqual(code, 1)
        wrong, right = report["cases"]
        self.assertEqual((wrong["verdict"], right["verdict"]), ("wrong", "correct"))
        self.assertEqual(wrong["reason"], "7 of 200 elements (rank 0: 0, rank 1: 7)")
        self.assertEqual(wrong["details"]["results"]["1"]["wrong"], 7)

    def test_a_hang_is_reported_with_its_place_and_killed_with_all_its_processes(self) -> None:
        begun = time.monotonic()
        code, case = self.one("hangs")
        self.assertLess(time.monotonic() - begun, 30)
        self.assertEqual((code, case["verdict"]), (1, "hangs"))
        self.assertIn("no end after 2 s; rank 0 is in: waits for ever (fake_check.py:", case["reason"])
        self.assertRegex(case["reason"], r"fake_check\.py:\d+ stuck\); 6 of 200 elements were wrong$")
        self.assertIn("in hangs", case["details"]["stacks"]["0"])
        for name in ("rank", "child", "orphan", "stubborn", "daemon"):
            process = int((self.notes / name).read_text())
            self.assertFalse(alive(process), name)

    def test_a_rank_that_fails_while_the_others_are_stuck_is_a_hang(self) -> None:
        code, case = self.one("fails_and_others_hang")
        self.assertEqual((code, case["verdict"]), (1, "hangs"))
        self.assertIn("rank 0 failed (no window for you)", case["reason"])
        self.assertIn("rank 1 is in: waits for rank 0 (fake_check.py:", case["reason"])

    def test_ranks_that_wait_on_the_host_end_with_a_rank_that_fails(self) -> None:
        code, case = self.one("fails_and_others_wait")
        self.assertEqual((code, case["verdict"], case["reason"]), (2, "refused", "rank 0: no window for you"))
        self.assertLess(case["seconds"], 2)

    def test_a_crash_names_the_signal_and_the_operation(self) -> None:
        code, report = self.report("crashes", "exits", "device_fails")
        self.assertEqual(code, 1)
        crash, leave, device = report["cases"]
        self.assertEqual((crash["verdict"], crash["reason"]), ("crashes", "rank 1: died of SIGSEGV in: about to crash"))
        self.assertIn("Segmentation fault", crash["details"]["logs"]["1"])
        self.assertEqual((leave["verdict"], leave["reason"]), ("crashes", "exited with 3 in: begins"))
        self.assertEqual(
            (device["verdict"], device["reason"]), ("crashes", "CUDA error: an illegal memory access was encountered")
        )

    def test_a_case_that_cannot_run_is_neither_correct_nor_bad(self) -> None:
        code, report = self.report("cannot", "defect", "without_kernel")
        self.assertEqual(code, 2)
        cannot, defect, without = report["cases"]
        self.assertEqual({case["verdict"] for case in report["cases"]}, {"cannot run here"})
        self.assertEqual(cannot["reason"], "no such feature")
        self.assertRegex(defect["reason"], r"^AssertionError: unexpected \(fake_check\.py:\d+\)$")
        self.assertEqual(without["reason"], "2 of 5 all-reduces used a symmetric kernel, so the result proves nothing")

    def test_a_case_that_compares_nothing_is_not_correct(self) -> None:
        code, report = self.report("without_reduce", "without_comparison", "without_comparison_on_rank_1")
        self.assertEqual(code, 2)
        self.assertEqual(
            [(case["verdict"], case["reason"]) for case in report["cases"]],
            [("cannot run here", "no all-reduce was compared")] * 2
            + [("cannot run here", "rank 1: no all-reduce was compared")],
        )

    def test_wrong_elements_count_even_if_a_rank_cannot_run_and_the_others_hang(self) -> None:
        code, case = self.one("wrong_and_cannot")
        self.assertEqual((code, case["verdict"]), (1, "wrong"))
        self.assertIn("rank 0 failed (no such feature)", case["reason"])
        self.assertRegex(case["reason"], r"; 3 of 100 elements were wrong$")

    def test_a_start_that_fails_on_one_rank_is_a_refusal(self) -> None:
        code, case = self.one("start-fails")
        self.assertEqual((code, case["verdict"], case["reason"]), (2, "refused", "rank 1: no device"))

    def test_a_case_may_have_a_longer_deadline(self) -> None:
        _, report = self.report("long", "late")
        self.assertEqual([case["verdict"] for case in report["cases"]], ["correct", "hangs"])

    def test_cases_do_not_overlap(self) -> None:
        code, report = self.report("right", "alone", "wrong")
        self.assertEqual(
            [case["verdict"] for case in report["cases"]], ["correct", "correct", "wrong"], report["cases"]
        )
        self.assertEqual(code, 1)

    def test_a_control_that_is_not_wrong_revokes_correct_verdicts(self) -> None:
        code, report = self.report("right", "wrong", FAKE_CONTROL="right")
        self.assertEqual(code, 1)
        self.assertEqual([case["verdict"] for case in report["cases"]], ["cannot run here", "cannot run here", "wrong"])
        code, report = self.report("right", FAKE_CONTROL="wrong")
        self.assertEqual([case["verdict"] for case in report["cases"]], ["correct", "correct"])
        self.assertEqual((code, report["cases"][0]["reason"]), (0, "found 7 of 200 elements (rank 0: 0, rank 1: 7)"))
        self.assertEqual(self.report("cannot", FAKE_CONTROL="wrong")[0], 2)

    def test_one_gpu_is_too_few(self) -> None:
        code, report = self.report("right", FAKE_DEVICES="1")
        self.assertEqual(code, 2)
        self.assertIn(
            "2 ranks need 2 GPUs that can access each other, and PyTorch finds 1", report["cases"][0]["reason"]
        )
        self.assertFalse(list(self.notes.iterdir()))

    def test_a_stack_that_is_incomplete_is_the_reason_of_all_cases(self) -> None:
        code, report = self.report("right", "wrong", FAKE_PROBE="no driver")
        self.assertEqual((code, [case["reason"] for case in report["cases"]]), (2, ["no driver"] * 2))

    def test_an_interrupted_check_prints_what_is_known(self) -> None:
        code, report = self.report("wrong", "interrupts", "right")
        self.assertEqual(code, 1)
        verdicts = [(case["verdict"], case["reason"]) for case in report["cases"]]
        self.assertEqual(verdicts[1:], [("cannot run here", "the check was interrupted")] * 2)
        self.assertEqual(verdicts[0][0], "wrong")

    def test_the_table_has_a_line_for_each_case_and_a_summary(self) -> None:
        done = self.text("right", "wrong", FAKE_CONTROL="wrong")
        self.assertEqual(done.returncode, 1, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[1], "right    correct          a fake: a remark")
        self.assertEqual(lines[2], "wrong    WRONG            a fake: 7 of 200 elements (rank 0: 0, rank 1: 7)")
        self.assertRegex(lines[-2], r"^allocator fake, 2 ranks on fake, \d+ s$")
        self.assertEqual(lines[-1], "2 correct, 1 WRONG")

    def test_cases_with_one_reason_share_a_line(self) -> None:
        done = self.text("refused", "refused", "refused", "right", "refused", "refused")
        lines = [" ".join(text.split()) for text in done.stdout.splitlines()[:5]]
        self.assertEqual(lines, [
            "refused refused a fake: RuntimeError: not supported", "refused refused the same, and for 1 more up to refused",
            "right correct a fake: a remark", "refused refused a fake: RuntimeError: not supported", "refused refused the same",
        ])  # fmt: skip
        self.assertEqual(len(self.report("refused", "refused")[1]["cases"]), 2)


class CommandLine(unittest.TestCase):
    def test_an_unknown_allocator_or_case_is_refused(self) -> None:
        done = command_line("--allocator", "jemalloc")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("unknown allocator `jemalloc`: use native, expandable", done.stderr)
        done = command_line("--case", "13")
        self.assertEqual(done.returncode, 2)
        self.assertIn("no case is named 13: use 1-address-order, 2-event", done.stderr)
        # Also next to known ones, and with --list.
        for more in ([], ["--list"]):
            done = command_line("--case", "2", "--case", "evnt", "--case", "6-inside", *more)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn("no case is named evnt: use 1-address-order", done.stderr)

    def test_fewer_than_two_ranks_are_refused(self) -> None:
        for number in ("0", "1", "-2"):
            done = command_line("--ranks", number)
            self.assertEqual((done.returncode, done.stdout), (2, ""), number)
            self.assertEqual(done.stderr, "a check needs at least 2 ranks\n", number)
        for torchrun in (
            {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
            {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        ):
            self.assertEqual(command_line("--ranks", "0", **torchrun).returncode, 2, torchrun)
        self.assertEqual(command_line(LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1").returncode, 2)

    def test_a_folder_with_files_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "file").touch()
            done = command_line("--folder", folder)
        self.assertEqual(done.returncode, 2)
        self.assertIn("is not empty", done.stderr)

    def test_cases_are_listed_and_chosen_by_number(self) -> None:
        listed = command_line("--list").stdout.splitlines()
        self.assertEqual([text.split()[0] for text in listed], [case.name for case in CASES])
        self.assertEqual({case.name.split("-")[0] for case in CASES}, {str(number) for number in range(1, 13)})
        self.assertEqual(len(command_line("--list", "--case", "6", "--case", "2-event").stdout.splitlines()), 4)

    def test_without_pytorch_nothing_can_run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "torch.py").write_text("raise ImportError('broken installation')")
            path = os.pathsep.join([folder, needs.packages()])
            done = command_line("--json", PYTHONPATH=path)
        report = json.loads(done.stdout)
        self.assertEqual((done.returncode, len(report["cases"])), (2, len(CASES)))
        self.assertEqual(
            {(case["verdict"], case["reason"]) for case in report["cases"]},
            {("cannot run here", "PyTorch cannot be imported: broken installation")},
        )

    def test_one_process_of_torchrun_starts_all_ranks(self) -> None:
        done = command_line(LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        done = command_line(LOCAL_RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
        self.assertEqual(done.returncode, 2)
        self.assertIn("several machines", done.stderr)


class SlowProbe:
    """A stack whose probe takes a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def configure(self) -> None:
        pass

    def probe(self) -> dict[str, Any]:
        time.sleep(self._seconds)
        return {"allocator": "slow"}

    def begin(self, rank: Rank) -> None:
        raise NotImplementedError

    def kernels(self, folder: Path) -> dict[str, int] | None:
        return {}


class FakePool(pools.Pool):
    """A pool whose segments are given, before and after memory is released."""

    def __init__(self, rank: Rank, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
        super().__init__(rank)
        self._before, self._segments, self._after = before, before, after

    def scope(self) -> Any:
        return contextlib.nullcontext()

    def link(self) -> Any:
        self.sync()
        return mock.MagicMock()

    def sync(self) -> None:
        pass

    def segments(self) -> list[tuple[int, int]]:
        return self._segments

    def trim(self) -> None:
        self._segments = self._after

    def renew(self) -> None:
        self._segments = []


class Mechanisms(unittest.TestCase):
    """Cases that check that their mechanism occurred, on one rank without a GPU."""

    def run_case(self, function: Any, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> Rank:
        addresses = iter(range(0x1000, 1 << 30))

        def empty(rank: Rank, pool: FakePool, elements: int) -> Any:
            pool._segments = before
            return mock.MagicMock(data_ptr=mock.Mock(return_value=next(addresses)))

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(sys.modules, {"torch": mock.MagicMock()}),
            mock.patch.multiple(cases, Holes=mock.MagicMock(), empty=empty),
            mock.patch.multiple(Rank, fill=mock.DEFAULT, expect=mock.DEFAULT),
        ):
            rank = Rank(0, 1, Path(folder))
            rank.allocator = mock.MagicMock(pool=lambda: FakePool(rank, before, after))
            function(rank)
            return rank

    def test_a_case_about_address_order_needs_several_segments(self) -> None:
        with self.assertRaisesRegex(CannotRun, "^all tensors are in one segment$"):
            self.run_case(cases.address_order, [(0x1000, 1 << 20)], [])
        # A single rank has one order.
        with self.assertRaisesRegex(CannotRun, "in the same order on all ranks$"):
            self.run_case(cases.address_order, [(0x1000, 4), (0x1004, 1 << 20)], [])

    def test_addresses_must_be_reused(self) -> None:
        rank = self.run_case(cases.address_reused, [(0x1000, 1 << 20)], [])
        self.assertEqual(rank.facts["reused"], 2)
        with self.assertRaisesRegex(CannotRun, "^no address was reused$"):
            self.run_case(cases.address_reused, [], [])

    def test_memory_must_be_released(self) -> None:
        rank = self.run_case(cases.remapped_under_graph, [(0, 24), (24, 24), (48, 24)], [(0, 24)])
        self.assertEqual(rank.facts["released_bytes"], 3 * 48)
        with self.assertRaisesRegex(CannotRun, "^the allocator released no memory of its pool$"):
            self.run_case(cases.remapped_under_graph, [(0, 24)], [(0, 24)])


class Parts(unittest.TestCase):
    def test_a_probe_has_its_own_deadline(self) -> None:
        with mock.patch.object(runner, "START_SECONDS", 0.1):
            self.assertEqual(runner.probe(SlowProbe(1.0)), {"allocator": "slow"})
        with mock.patch.object(runner, "PROBE_SECONDS", 1.0), self.assertRaisesRegex(CannotRun, "^no end after 1 s"):
            runner.probe(SlowProbe(60.0))

    def test_only_the_check_of_symmalloc_installs_it(self) -> None:
        torch = mock.MagicMock(__version__="2.11.0")
        for allocator in ("native", "expandable", "cudaMallocAsync", "symmalloc"):
            with (
                tempfile.TemporaryDirectory() as folder,
                mock.patch.dict(sys.modules, {"torch": torch}),
                mock.patch.dict(os.environ),
                mock.patch.object(pools, "version", return_value=22809),
                mock.patch.object(pools, "_install_symmalloc") as install,
                mock.patch.object(pools.Allocator, "connect"),
            ):
                stack = Gpus(allocator, devices=[0, 1])
                stack.configure()
                stack.probe()
                self.assertEqual(install.call_count, allocator == "symmalloc", allocator)
                stack.begin(Rank(0, 2, Path(folder)))
                self.assertEqual(install.call_count, 2 * (allocator == "symmalloc"), allocator)

    def test_sglangs_context_registers_on_its_own_communicator_and_leaves_the_pool_of_a_captured_graph(self) -> None:
        entered, graph_pools = [], []

        @contextlib.contextmanager
        def context(group: Any) -> Any:
            entered.append(group.pynccl_comm)
            yield

        torch = mock.MagicMock(__version__="2.14.1")
        module = mock.MagicMock(SymmetricMemoryContext=context, set_graph_pool_id=graph_pools.append)
        module.get_nccl_mem_pool.return_value.snapshot.return_value = [{"address": 4096, "total_size": 1 << 21}]
        communicator = mock.MagicMock(disabled=False)
        pynccl = mock.MagicMock(PyNcclCommunicator=mock.Mock(return_value=communicator))
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(sys.modules, {"torch": torch}),
            mock.patch.dict(os.environ),
            mock.patch.object(tempfile, "tempdir", tempfile.tempdir),
            mock.patch.object(pools, "version", return_value=23007),
            mock.patch.object(pools, "_sglang", return_value=(module, pynccl)) as imported,
            mock.patch.object(pools, "Communicator"),
            mock.patch.object(pools.importlib.metadata, "version", return_value="0.5.23"),
        ):
            stack = Gpus("sglang", devices=[0, 1])
            stack.configure()
            self.assertEqual(imported.call_count, 0, "the process that forks the ranks must not use CUDA")
            self.assertEqual(stack.probe()["sglang"], "0.5.23")
            module.get_nccl_mem_pool.assert_called_once_with()
            rank = Rank(0, 2, Path(folder))
            stack.begin(rank)
            pool = rank.allocator.pool()
            torch.cuda.is_current_stream_capturing.return_value = False
            with pool.scope():
                pass
            rank.allocator.graph_pool = (0, 7)
            torch.cuda.is_current_stream_capturing.return_value = True
            with pool.scope():
                pass
            self.assertEqual((entered, graph_pools), ([communicator, communicator], [(0, 7)]))
            self.assertEqual((pool.segments(), pool.link().name), ([(4096, 1 << 21)], "SGLang's communicator"))
            with self.assertRaisesRegex(CannotRun, "SGLang's pool is registered on one communicator only"):
                pool.link()
            with self.assertRaisesRegex(CannotRun, "SGLang has one pool"):
                rank.allocator.pool()
            module.get_nccl_mem_pool.side_effect = RuntimeError("no nvcc")
            with self.assertRaisesRegex(CannotRun, "could not compile its allocator for NCCL .no nvcc.*LIBRARY_PATH"):
                stack.probe()
            module.get_nccl_mem_pool.side_effect = AssertionError("requires torch>=2.8")
            with self.assertRaisesRegex(CannotRun, "could not create its pool: AssertionError: requires torch>=2.8"):
                stack.probe()
            library = Path(tempfile.gettempdir()) / "symm_allocator" / "nccl_allocator.so"
            library.parent.mkdir()
            library.touch()
            module.get_nccl_mem_pool.side_effect = RuntimeError("CUDA error")
            with self.assertRaisesRegex(CannotRun, "could not create its pool: RuntimeError: CUDA error"):
                stack.probe()

    def test_sglang_compiles_in_a_folder_of_the_check(self) -> None:
        program = """
        import os, sys, tempfile, types
        from pathlib import Path
        from unittest import mock
        sys.modules["torch"] = mock.MagicMock(__version__="2.14.1")
        from symmalloc.check_symmetric import pools
        shared = tempfile.gettempdir()
        class Engine:
            def get_nccl_mem_pool():
                assert tempfile.gettempdir() != shared and os.environ["TMPDIR"] == tempfile.gettempdir()
                print(tempfile.gettempdir())
        pools.version = lambda: 23007
        pools._sglang = lambda: (Engine, mock.MagicMock(**{"PyNcclCommunicator.return_value.disabled": False}))
        pools.importlib.metadata.version = lambda _: "0.5.23"
        stack = pools.Gpus("sglang", devices=[0, 1])
        stack.configure()
        assert tempfile.gettempdir() == shared, "this process starts other ones"
        with tempfile.TemporaryDirectory() as folder:
            stack.probe()
            stack.begin(pools.Rank(0, 2, Path(folder)))
        """
        done = needs.process(program)
        self.assertEqual(done.returncode, 0, done.stderr)
        (folder,) = set(done.stdout.splitlines())
        self.assertEqual(len(done.stdout.splitlines()), 2, "the ranks find what the probe compiled")
        self.assertFalse(Path(folder).exists(), "removed at the end")

    def test_the_exit_code_depends_on_bad_verdicts_and_on_correct_ones(self) -> None:
        def code(*verdicts: Verdict) -> int:
            return exit_code([Outcome("case", "", verdict) for verdict in verdicts])

        self.assertEqual(code(Verdict.CORRECT, Verdict.REFUSED, Verdict.CANNOT_RUN), 0)
        self.assertEqual(
            [code(Verdict.CORRECT, bad) for bad in (Verdict.WRONG, Verdict.HANGS, Verdict.CRASHES)], [1, 1, 1]
        )
        # Without a correct case, nothing was checked.
        self.assertEqual((code(Verdict.REFUSED), code(Verdict.CANNOT_RUN), code()), (2, 2, 2))

    def test_long_reasons_are_wrapped(self) -> None:
        text = line(Outcome("name", "title", Verdict.WRONG, "word " * 60), ["name", "longer"])
        self.assertTrue(all(len(part) <= 118 for part in text.splitlines()))
        self.assertEqual(len(text.splitlines()), 4)

    def test_vllm_is_imported_once_and_compiled_before_the_deadlines(self) -> None:
        program = f"""
import os, sys, types
sys.path.insert(0, {str(FAKE.parents[1] / "vllm_pool")!r})
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].version = types.SimpleNamespace(cuda="13.0")
from symmalloc.check_symmetric import pools
from symmalloc.check_symmetric.rank import CannotRun
stack = pools.Gpus("vllm")
stack.configure()
assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "the ranks are forked after the import"
allocator = sys.modules["vllm.distributed.device_communicators.pynccl_allocator"]
assert allocator.compilations == 0, "a compilation may use CUDA, so the probe's process does it"
try:
    pools._compile_vllm()
    print("compiled", allocator.compilations)
except CannotRun as why:
    print("cannot run:", why)
ranks = types.SimpleNamespace(note=lambda text: None)
vllm = pools.Vllm(ranks)
vllm._has_pool, vllm._module, vllm._communicator = False, allocator, None
vllm.pool()
try:
    vllm.pool()
except CannotRun as why:
    print(why)
"""
        for environment, says in (
            ({}, "compiled 1\nvLLM has one pool in a process\n"),
            ({"FAKE_VLLM_COMPILES": "0"}, "cannot run: vLLM could not compile its allocator for NCCL"),
            (
                {"VLLM_USE_NCCL_SYMM_MEM": "0"},
                "cannot run: vLLM's symmetric memory is off: unset VLLM_USE_NCCL_SYMM_MEM",
            ),
        ):
            done = needs.process(program, PYTHONPATH=needs.packages(), **environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(done.stdout.startswith(says), done.stdout)

    def test_symmetric_kernels_are_counted_in_the_log_of_nccl(self) -> None:
        log = """
host:1:1 [0] NCCL INFO AllReduce: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
host:1:1 [0] NCCL INFO AllReduce [Symmetric]: 1048576 Bytes -> Kernel AllReduce_RSxLD_AGxST nchannels 8 nthreads 512 nWorks 1
host:1:1 [0] NCCL INFO AllReduce [Symmetric]: 4194304 Bytes -> Kernel AllReduce_RSxLD_AGxST nchannels 8 nthreads 512 nWorks 2
host:1:1 [0] NCCL INFO AllReduce [Symmetric]: 1024 Bytes -> Kernel AllReduce_AGxLL_R nchannels 1 nthreads 512 nWorks 1
"""
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(Gpus("native").kernels(Path(folder)), {})
            (Path(folder) / "nccl0").write_text(log)
            # Kernels with LL do not access the peers' buffers.
            self.assertEqual(Gpus("native").kernels(Path(folder)), {"AllReduce_RSxLD_AGxST": 3})

    def test_the_innermost_frame_of_the_main_thread_is_named(self) -> None:
        stack = 'Thread 0x1 (most recent call first):\n  File "/a/b.py", line 1 in other\n\n' + (
            'Current thread 0x2 (most recent call first):\n  File "/a/c.py", line 7 in inner\n  File "/a/d.py", line 9 in outer\n'
        )
        self.assertEqual((_frame(stack), _frame("")), (" (c.py:7 inner)", ""))


@needs.torch
@needs.device
@needs.stand_ins
class OfPyTorch(unittest.TestCase):
    def test_an_nccl_without_windows_is_the_reason_of_all_cases(self) -> None:
        done = command_line("--allocator", "torch.cuda:MemPool", "--case", "6")
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn("NCCL 0.0.0 has no symmetric windows", done.stdout)


if __name__ == "__main__":
    unittest.main()
