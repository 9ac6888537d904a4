"""Comparison of PyTorch's own tests on two allocators (`benches/jobs/suites`): verdicts, and continuation after any failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import needs

SUITES = Path(__file__).resolve().parents[4] / "benches" / "jobs" / "suites"
FAKE = Path(__file__).resolve().with_name("fakes") / "suites" / "fake_suite.py"
sys.path.insert(0, str(SUITES))

import results  # noqa: E402
from results import CRASHED, FAILED, PASSED, SKIPPED, TIMEOUT, Outcome, RunFile, compare, judge  # noqa: E402

BETTER, BOTH_FAIL, BOTH_SKIP, EQUAL, FLAKY = (
    results.BETTER, results.BOTH_FAIL, results.BOTH_SKIP, results.EQUAL, results.FLAKY,
)  # fmt: skip
NO_CONTENTS, OTHER_BITS, REGRESSION, UNFINISHED, VARIES = (
    results.NO_CONTENTS, results.OTHER_BITS, results.REGRESSION, results.UNFINISHED, results.VARIES,
)  # fmt: skip


class Verdicts(unittest.TestCase):
    def test_a_test_that_passes_only_natively_is_a_regression(self) -> None:
        for bad in (FAILED, CRASHED, TIMEOUT, SKIPPED):
            self.assertEqual(judge([Outcome(PASSED)], [Outcome(bad)]).verdict, REGRESSION)
            self.assertEqual(judge([Outcome(PASSED)] * 2, [Outcome(bad), Outcome(FAILED)]).verdict, REGRESSION)
            self.assertEqual(judge([Outcome(PASSED)] * 2, [Outcome(bad), Outcome(PASSED)]).verdict, FLAKY)
        for bad in (FAILED, CRASHED, TIMEOUT):
            self.assertEqual(judge([Outcome(bad)], [Outcome(PASSED)]).verdict, BETTER)
            self.assertEqual(judge([Outcome(bad)], [Outcome(FAILED)]).verdict, BOTH_FAIL)
        # A test that is flaky natively cannot be judged.
        self.assertEqual(judge([Outcome(PASSED), Outcome(FAILED)], [Outcome(FAILED)]).verdict, BOTH_FAIL)
        self.assertEqual(judge([Outcome(SKIPPED)], [Outcome(SKIPPED)]).verdict, BOTH_SKIP)

    def test_bits_are_compared_only_if_native_runs_agree(self) -> None:
        one, other = Outcome(PASSED, bits="1"), Outcome(PASSED, bits="2")
        self.assertEqual(judge([one, one], [one]).verdict, EQUAL)
        self.assertEqual(judge([one, one], [other]).verdict, OTHER_BITS)
        self.assertEqual(judge([one, one], [one, other]).verdict, OTHER_BITS)
        self.assertEqual(judge([one, other], [Outcome(PASSED, bits="3")]).verdict, VARIES)
        self.assertEqual(judge([one, one], [other], has_no_contents=True).verdict, NO_CONTENTS)

    def test_a_test_that_was_not_run_is_unfinished(self) -> None:
        self.assertEqual(judge([Outcome(PASSED)], [None]).verdict, UNFINISHED)
        self.assertEqual(judge([None], [Outcome(PASSED)]).verdict, UNFINISHED)
        comparison = compare("suite", ["a", "b"], [{"a": Outcome(PASSED)}], [{"a": Outcome(PASSED)}])
        self.assertEqual((comparison.unfinished(), comparison.bad()), (1, []))

    def test_a_table_lists_regressions_first_and_escapes_its_cells(self) -> None:
        ours = {"a": Outcome(PASSED), "b": Outcome(FAILED, detail="1 | 2\n3"), "c": Outcome(PASSED)}
        native = {"a": Outcome(PASSED), "b": Outcome(PASSED), "c": Outcome(FAILED)}
        lines = compare("suite", "abc", [native], [ours]).table().splitlines()
        self.assertIn("| REGRESSION | 1 |", lines)
        told = [line for line in lines if line.startswith("| `")]
        self.assertEqual(told, [
            "| `b` | REGRESSION | passed | failed | 1 \\| 2 3 |", "| `c` | fails on native alone | failed | passed |  |",
        ])  # fmt: skip


class Files(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "run.jsonl"

    def test_a_torn_line_loses_no_other_outcome(self) -> None:
        file = RunFile(self.path)
        file.began("a")
        file.ended("a", Outcome(PASSED, 1.5))
        with self.path.open("a") as cut:
            cut.write('{"name": "b", "outc')
        file.began("c")
        self.assertEqual(file.outcomes(), {"a": Outcome(PASSED, 1.5)})
        self.assertEqual(file.running(), "c")
        file.ended("c", Outcome(FAILED, detail="why"))
        self.assertEqual((file.running(), file.outcomes()["c"].detail), (None, "why"))


class Runs(unittest.TestCase):
    """Whole runs of a suite that fails, crashes and hangs."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.notes, self.out = Path(folder.name) / "notes", Path(folder.name) / "out"
        self.notes.mkdir()

    def suites(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SUITES), "--suite", str(FAKE), "--out", str(self.out), "--seconds", "2", *arguments]
        environment = os.environ | {"FAKE_SUITE_NOTES": str(self.notes)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    def times(self, name: str, where: str) -> int:
        noted = self.notes / f"{name}-{where}"
        return len(noted.read_text()) if noted.exists() else 0

    def test_a_run_continues_after_tests_that_crash_hang_or_break_their_process(self) -> None:
        done = self.suites()
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        tests = json.loads((self.out / "suites.json").read_text())[0]["tests"]
        verdicts = {name: one["verdict"] for name, one in tests.items()}
        self.assertEqual(verdicts, {
            "fine": EQUAL, "fails": BOTH_FAIL, "skips": BOTH_SKIP, "fails here": REGRESSION, "crashes here": REGRESSION,
            "hangs here": REGRESSION, "skips here": REGRESSION, "fails there": BETTER, "once": FLAKY, "other bits": OTHER_BITS,
            "undefined": NO_CONTENTS, "breaks": BOTH_FAIL, "last": EQUAL,
        })  # fmt: skip
        self.assertEqual(tests["crashes here"]["detail"], "the process died of SIGABRT")
        self.assertEqual(tests["hangs here"]["detail"], "no end after 2 s")
        self.assertIn("| `fails here` | REGRESSION | passed | failed | AssertionError: 1 is not \\| 2 |", done.stdout)
        # The child processes of a hanging test were killed.
        self.assertFalse(alive(int((self.notes / "child").read_text())))
        # Failed tests ran twice on both allocators, and the others once.
        self.assertEqual((self.times("fails here", "ours"), self.times("fails here", "native")), (2, 2))
        self.assertEqual((self.times("fine", "ours"), self.times("fine", "native")), (1, 1))
        # Repeating the command runs no test.
        again = self.suites()
        self.assertEqual((again.returncode, self.times("fine", "ours"), self.times("crashes here", "ours")), (1, 1, 2))

    def test_the_same_command_resumes_after_the_budget_is_exhausted(self) -> None:
        arguments = ("--only", "^fine$|^last$")
        done = self.suites(*arguments, "--budget", "0")
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertIn("| not finished | 2 |", done.stdout)
        # Simulates a kill in the middle of a test.
        RunFile(self.out / "fake_suite-native-1.0.jsonl").began("fine")
        done = self.suites(*arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("| equal | 2 |", done.stdout)
        self.assertEqual((self.times("fine", "native"), self.times("fine", "ours")), (1, 1))

    def test_gpus_share_the_tests(self) -> None:
        done = self.suites("--only", "^fine$|^last$|^skips$", "--gpus", "2")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        parts = [RunFile(self.out / f"fake_suite-native-1.{part}.jsonl").outcomes() for part in range(2)]
        self.assertEqual([sorted(part) for part in parts], [["fine", "last"], ["skips"]])
        # With one GPU fewer, the command continues with the tests that both runs have.
        self.assertEqual(self.suites("--only", "^fine$|^last$|^skips$").returncode, 0)
        self.assertEqual(self.times("skips", "ours"), 1)

    def test_tests_run_concurrently_on_one_gpu(self) -> None:
        done = self.suites("--only", "^fine$|^last$|^skips$", "--at-once", "3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        parts = [RunFile(self.out / f"fake_suite-native-1.{part}.jsonl").outcomes() for part in range(3)]
        self.assertEqual([list(part) for part in parts], [["fine"], ["skips"], ["last"]])

    def test_together_each_allocator_gets_half_of_the_slots(self) -> None:
        done = self.suites("--only", "^fine$|^last$|^fails here$", "--at-once", "4", "--together")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        for allocator in ("native", "symmalloc"):
            parts = [RunFile(self.out / f"fake_suite-{allocator}-1.{part}.jsonl").outcomes() for part in range(2)]
            self.assertEqual([list(part) for part in parts], [["fine", "last"], ["fails here"]])
            self.assertFalse((self.out / f"fake_suite-{allocator}-1.2.jsonl").exists())
        self.assertEqual((self.times("fails here", "ours"), self.times("fails here", "native")), (2, 2))

    def test_the_file_of_another_run_is_refused(self) -> None:
        self.assertEqual(self.suites("--only", "^fine$").returncode, 0)
        path = self.out / "fake_suite-native-1.0.jsonl"
        path.write_text(path.read_text().replace('"torch": "', '"torch": "1.'))
        done = self.suites("--only", "^fine$")
        self.assertEqual(done.returncode, 2)
        self.assertIn("belongs to another run (torch '1.", done.stderr)

    def test_a_suite_that_cannot_be_loaded_is_reported_with_the_reason(self) -> None:
        command = [sys.executable, str(SUITES), "--suite", "missing", "--out", str(self.out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 2)
        self.assertIn("missing_suite.py", done.stderr)

    def test_a_table_is_printed_before_a_later_suite_fails(self) -> None:
        broken = self.notes / "broken_suite.py"
        broken.write_text("raise OSError('no such device')\n")
        done = self.suites("--only", "^fine$", "--suite", str(broken))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("no such device", done.stderr)
        self.assertIn("| equal | 1 |", done.stdout.splitlines())
        self.assertIn("| equal | 1 |", (self.out / "suites.md").read_text().splitlines())


class Imports(unittest.TestCase):
    """Changes to modules that tests and their child processes import."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "symmalloc.py").write_text("def install(): print('installed')\n")
        inner = self.folder / "torch" / "testing" / "_internal"
        inner.mkdir(parents=True)
        for package in (self.folder / "torch", inner.parent, inner):
            (package / "__init__.py").write_text("")
        (inner / "inductor_utils.py").write_text("HAS_CUDA_AND_TRITON = 'as before'\n")

    def child(self, program: str) -> list[str]:
        """Runs a program as a child process of a test. Returns the words it prints."""
        environment = os.environ | {"PYTHONPATH": f"{SUITES}{os.pathsep}{self.folder}", "SYMMALLOC_SUITES_ALLOCATOR": "symmalloc"}
        command = [sys.executable, "-c", f"import sys\nimport child_process\n{program}"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout.split()

    def test_a_child_installs_the_allocator_when_it_imports_pytorch(self) -> None:
        program = "print('torch' in sys.modules); import torch; print('imported')"
        self.assertEqual(self.child(program), ["False", "installed", "imported"])
        self.assertEqual(self.child("import importlib.util; importlib.util.find_spec('torch'); print('found')"), ["found"])

    def test_a_removed_name_is_supplied_to_the_test_that_imports_it(self) -> None:
        told = self.child("from torch.testing._internal.inductor_utils import HAS_CUDA; print(HAS_CUDA)")
        self.assertEqual(told, ["installed", "as", "before"])

    def test_a_name_that_pytorch_still_has_stays(self) -> None:
        path = self.folder / "torch" / "testing" / "_internal" / "inductor_utils.py"
        path.write_text("HAS_CUDA = 'kept'\n")
        self.assertEqual(self.child("from torch.testing._internal.inductor_utils import HAS_CUDA; print(HAS_CUDA)")[1:], ["kept"])


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@needs.torch
@needs.device
@needs.stand_ins
class OfPyTorch(unittest.TestCase):
    """PyTorch's own suites on the host, because the stub device does not compute."""

    def suites(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"SYMMALLOC_SUITES_DEVICE": "cpu", "SYMMALLOC_SUITES_BACKEND": "gloo"}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(SUITES), "--gpus", "2", "--out", folder, *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)

    def test_operators_give_equal_bits_on_both_allocators(self) -> None:
        done = self.suites("--suite", "op_db", "--only", "^(add|cumsum|empty|nn.functional.linear) (float32|int64)$")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"\| equal \| [67] \|")

    def test_collectives_pass_on_both_allocators(self) -> None:
        done = self.suites("--suite", "distributed", "--only", "^test_(barrier|all_reduce_sum|backend_group)$")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("| equal |", done.stdout)


if __name__ == "__main__":
    unittest.main()
