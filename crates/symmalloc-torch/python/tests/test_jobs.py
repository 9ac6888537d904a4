"""Runners of engines among the jobs: folders of wheels, options, and the comparison, on a fake engine. No GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import needs

JOBS = Path(__file__).resolve().parents[4] / "benches" / "jobs"
FAKES = Path(__file__).resolve().parent / "fakes"
VLLM = "0.33.0"
FAKE, FAKE_SGLANG = FAKES / "vllm_engine", FAKES / "sglang_engine"


def job(name: str) -> ModuleType:
    """Imports a job without putting its folder on the path."""
    spec = importlib.util.spec_from_file_location(name, JOBS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def is_running(process: int) -> bool:
    """Returns `False` for a process that has ended, even if its parent has not waited for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Wheels(unittest.TestCase):
    def setUp(self) -> None:
        self.job = job("vllm_serve")
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)
        self.folder = Path(self._folder.name)
        for name in self.job.NEEDED:
            version = VLLM if name == "vllm" else "1.0"
            self.touch(f"{name}-{version}-py3-none-any.whl")

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def test_a_complete_folder_is_accepted_under_every_spelling_of_names(self) -> None:
        (self.folder / "pyzmq-1.0-py3-none-any.whl").rename(
            self.folder / "PyZMQ-27.3.0-1-cp312-abi3-manylinux_2_26_x86_64.whl"
        )
        (self.folder / "openai_harmony-1.0-py3-none-any.whl").rename(
            self.folder / "openai.harmony-1.0-py3-none-any.whl"
        )
        self.touch("README.md")
        self.assertEqual(len(self.job.check_wheels(self.folder)), len(self.job.NEEDED))

    def test_odd_files_missing_wheels_and_other_versions_are_typed_errors(self) -> None:
        for odd in ("vllm.whl", "vllm-0.22.0.whl", "vllm 0.22.0.whl"):
            self.touch(odd)
            with self.assertRaisesRegex(self.job.OddFile, "remove or rename"):
                self.job.check_wheels(self.folder)
            (self.folder / odd).unlink()
        vllm = self.folder / f"vllm-{VLLM}-py3-none-any.whl"
        vllm.rename(self.folder / "vllm-0.23.0-py3-none-any.whl")
        with self.assertRaisesRegex(self.job.VersionMismatch, r"vLLM is 0\.23\.0: this job needs 0\.22\.0 \(PyTorch 2\.11\.0\) or 0\.33\.0"):
            self.job.check_wheels(self.folder)
        (self.folder / "vllm-0.23.0-py3-none-any.whl").unlink()
        with self.assertRaisesRegex(self.job.MissingWheel, "no wheel of vllm"):
            self.job.check_wheels(self.folder)

    def test_an_installed_vllm_needs_no_wheel(self) -> None:
        (self.folder / f"vllm-{VLLM}-py3-none-any.whl").unlink()
        for installed, fits in ((VLLM, True), ("0.22.0", True), ("0.23.0", False)):
            with (
                mock.patch.object(self.job, "_is_installed", lambda name: name == "vllm"),
                mock.patch.object(self.job.importlib.metadata, "version", lambda _name, version=installed: version),
            ):
                if fits:
                    self.job.check_wheels(self.folder)
                else:
                    with self.assertRaises(self.job.VersionMismatch):
                        self.job.check_wheels(self.folder)


def served(name: str, fake: Path, options: tuple[str, ...], environment: dict[str, str]) -> tuple[Any, dict]:
    """Runs a job on the packages of a fake engine. Returns the finished process and the report."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, str(JOBS / f"{name}.py"), "--site", str(fake), "--requests", "20", "--out", str(out)]
        path = os.pathsep.join([str(fake), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*command, *options],
            env=os.environ | {"PYTHONPATH": path} | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done, json.loads(out.read_text()) if out.exists() else {}


class Comparison(unittest.TestCase):
    def serve(self, *options: str, **environment: str) -> tuple[Any, dict]:
        # The package itself is not under test: `SYMMALLOC_VLLM` is only seen by the fake engine.
        return served("vllm_serve", FAKE, options, environment)

    def test_kinds_on_several_gpus_are_compared_with_native_of_their_sort(self) -> None:
        done, report = self.serve("--tensor-parallel", "2", "--rounds", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["requests_where_native_repeats_itself"], 20)
        for name, reference in (
            ("symmalloc_windows", "native_windows"),
            ("pools", "native_windows"),
            ("native", "native"),
        ):
            self.assertEqual(report[name]["speed_compared_with"], reference)
            self.assertEqual(len(report[name]["workers"]), 2)
            self.assertEqual(report[name]["new_windows"], 0)
        self.assertEqual(report["pools"]["equal_requests"], 20)

    def test_wrong_tokens_and_late_windows_are_counted(self) -> None:
        done, report = self.serve(
            "--tensor-parallel", "2", "--rounds", "2", FAKE_VLLM="install/1:wrong;pools/1:registers"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((report["symmalloc_windows"]["equal_requests"], report["pools"]["equal_requests"]), (0, 20))
        self.assertEqual((report["symmalloc_windows"]["new_windows"], report["pools"]["new_windows"]), (0, 4))
        done, report = self.serve("--tensor-parallel", "2", "--rounds", "2", FAKE_VLLM="/1:wrong")
        self.assertEqual(report["requests_where_native_repeats_itself"], 0)

    def test_a_server_that_fails_is_left_out_and_named(self) -> None:
        done, report = self.serve("--tensor-parallel", "2", "--rounds", "1", FAKE_VLLM="install/1:crash")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("the engine crashes", report["symmalloc_windows"]["failed"])
        self.assertEqual(report["pools"]["equal_requests"], 20)
        done, report = self.serve("--tensor-parallel", "2", "--rounds", "1", FAKE_VLLM="/0:crash;/1:crash")
        self.assertIn("Unusable: no native server is left", done.stderr)

    def test_sleep_levels_are_compared_before_and_after(self) -> None:
        options = ("--only-sleep", "--sleep-cycles", "3", "--sleep-levels", "1,2", "--tensor-parallel", "2")
        done, report = self.serve(*options, "--sleep-kinds", "native_windows,pools_sleep")
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("sleep_native_windows", "sleep_pools_sleep"):
            one, two = report[name]
            self.assertEqual((one["level"], two["level"], one["cycles"]), (1, 2, 3))
            self.assertTrue(one["equal_tokens"] and two["equal_tokens"])
            self.assertIsNone(one["reload_seconds"])
            self.assertIsNotNone(two["reload_seconds"])
        _, report = self.serve(*options, "--sleep-kinds", "native", FAKE_VLLM="/0:wrong")
        self.assertFalse(report["sleep_native"][0]["equal_tokens"])

    def test_partial_wakes_follow_full_ones(self) -> None:
        kinds = ("--sleep-kinds", "native,symmalloc_backend,symmalloc_graphs")
        options = ("--only-sleep", "--sleep-cycles", "2", "--sleep-levels", "1,2", "--partial", *kinds)
        done, report = self.serve(*options, "--tensor-parallel", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("native", "symmalloc_backend", "symmalloc_graphs"):
            cycles = report[f"sleep_{name}"]
            ways = [(one["level"], one["is_partial"]) for one in cycles]
            self.assertEqual(ways, [(1, False), (1, True), (2, False), (2, True)])
            self.assertTrue(all(one["equal_tokens"] for one in cycles))

    def test_a_pytorch_that_vllm_was_not_built_for_is_an_error(self) -> None:
        engine = job("vllm_serve")
        with mock.patch.object(engine.importlib.metadata, "version", lambda _: "0.33.0"):
            engine.check_torch("2.14.0+cu130")
            for version in ("2.11.0", "2.14.1+cu130"):
                with self.assertRaisesRegex(engine.VersionMismatch, r"0\.33\.0 and PyTorch .* do not fit"):
                    engine.check_torch(version)

    def test_measured_servers_can_sleep_afterwards(self) -> None:
        options = (
            "--tensor-parallel",
            "2",
            "--rounds",
            "1",
            "--sleep-in-place",
            "--sleep-cycles",
            "2",
            "--sleep-levels",
            "2",
        )
        kinds = ("--kinds", "native,native_windows,pools_sleep", "--sleep-kinds", "native_windows,pools_sleep")
        done, report = self.serve(*options, *kinds)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(
            report["sleep_pools_sleep"][0]["equal_tokens"] and report["sleep_native_windows"][0]["equal_tokens"]
        )
        done, report = self.serve(*options, *kinds, FAKE_VLLM="pools,sleep/1:crash")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual((list(report["pools_sleep"]), "sleep_pools_sleep" in report), (["failed"], False))

    def test_a_server_that_hangs_is_ended_with_the_processes_that_it_started(self) -> None:
        began = time.monotonic()
        options = ("--tensor-parallel", "2", "--rounds", "1", "--kinds", "native,symmalloc", "--answer-seconds", "8")
        done, report = self.serve(*options, FAKE_VLLM="install/0:hangs")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertLess(time.monotonic() - began, 40)
        failed = report["symmalloc"]["failed"]
        self.assertTrue(failed.startswith("symmalloc did not answer for 8 s and was ended"), failed)
        self.assertEqual(failed.count("most recent call first"), 2, "the stacks of the server and its worker")
        worker = re.search(r"worker (\d+)", failed)
        assert worker is not None
        self.assertFalse(is_running(int(worker[1])))

    def test_a_server_without_the_allocator_of_its_kind_fails(self) -> None:
        done, report = self.serve("--tensor-parallel", "2", "--rounds", "1", FAKE_VLLM="install/1:without")
        self.assertEqual(done.returncode, 1)
        self.assertIn("a worker of symmalloc_windows has another allocator", report["symmalloc_windows"]["failed"])
        self.assertNotIn("failed", report["pools"])

    def test_invalid_options_are_refused(self) -> None:
        for options, says in (
            (("--rounds", "0"), "at least 1"),
            (("--tensor-parallel", "0"), "at least 1"),
            (("--kinds", "other"), "unknown kind 'other'"),
            (("--kinds", "pools"), "needs a native kind"),
            (("--sleep-levels", "3"), "use 1, 2 or 1,2"),
            (("--only-sleep",), "needs --sleep-cycles"),
            (("--sleep-in-place", "--sleep-cycles", "1", "--sleep-kinds", "pools"), "among --kinds"),
        ):
            done, _ = self.serve(*options)
            self.assertEqual(done.returncode, 2, options)
            self.assertIn(says, done.stderr)


class SGLang(unittest.TestCase):
    def serve(self, *options: str, **environment: str) -> tuple[Any, dict]:
        # The speed of a fake engine says nothing.
        return served("sglang_serve", FAKE_SGLANG, ("--least-speed", "0", *options), environment)

    def test_kinds_on_several_gpus_are_compared_with_native_of_their_sort(self) -> None:
        for together in ((), ("--together",)):
            done, report = self.serve("--tensor-parallel", "2", "--rounds", "2", *together, NCCL_NVLS_ENABLE="2")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(report["requests_where_native_repeats_itself"], 20)
            for name, reference in (("symmalloc_windows", "native_windows"), ("symmalloc", "native")):
                self.assertEqual(report[name]["speed_compared_with"], reference)
                self.assertEqual(report[name]["equal_requests"], 20)
                self.assertEqual([worker["nvls"] for worker in report[name]["workers"]], ["2", "2"])

    def test_wrong_tokens_and_servers_that_crash_are_reported(self) -> None:
        wrong = "install/1:wrong;install/0:crash"
        done, report = self.serve("--tensor-parallel", "2", "--rounds", "1", FAKE_SGLANG=wrong)
        self.assertEqual(done.returncode, 1)
        done, other = self.serve("--tensor-parallel", "2", "--rounds", "1", FAKE_SGLANG="install/1:without")
        self.assertEqual(done.returncode, 1)
        self.assertIn("has another allocator", other["symmalloc_windows"]["failed"])
        self.assertEqual(report["symmalloc_windows"]["equal_requests"], 0)
        self.assertIn("the engine crashes", report["symmalloc"]["failed"])

    def test_the_memory_saver_must_return_memory_and_keep_the_tokens(self) -> None:
        options = ("--kinds", "native,symmalloc,native_saver,symmalloc_saver", "--rounds", "2", "--cycles", "4", "--together")
        done, report = self.serve(*options)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("native_saver", "symmalloc_saver"):
            cycles = report[name]["cycles"]
            self.assertEqual(cycles["returned_bytes"], {"kv_cache": 100, "weights": 100, "kv_cache+weights": 200})
            self.assertEqual((cycles["equal_requests"], cycles["equal_to_the_last_round"]), (20, 20))
            self.assertEqual(cycles["missing_bytes_after_resume"], 0)
        self.assertEqual(report["symmalloc_saver"]["speed_compared_with"], "native_saver")
        self.assertEqual(report["symmalloc"]["speed_compared_with"], "native")
        self.assertNotIn("FAIL", done.stdout)
        for behavior, line in (
            ("keeps", "FAIL symmalloc_saver: returned to the device {'kv_cache': 0, 'weights': 0, 'kv_cache+weights': 0}"),
            ("forgets", "FAIL symmalloc_saver: 0 of 20 requests alike after 4 cycles"),
            ("leaks", "FAIL symmalloc_saver: 268435456 bytes less free after a resume than before the cycles"),
        ):
            done, _ = self.serve(*options, FAKE_SGLANG=f"install/saver:{behavior}")
            self.assertIn(line, done.stdout)
            self.assertEqual(done.returncode, 1, "a missed bar is an error")
        done, report = self.serve("--kinds", "native,symmalloc", "--rounds", "3", "--least-speed", "1e9")
        self.assertIn("FAIL symmalloc: ", done.stdout)
        self.assertEqual(done.returncode, 1)
        ratios = [one / other for one, other in zip(report["symmalloc"]["all"], report["native"]["all"], strict=True)]
        self.assertEqual(report["symmalloc"]["speed_of_rounds"], sorted(ratios)[1])

    def test_each_bar_can_be_missed(self) -> None:
        job("vllm_serve")
        module = job("sglang_serve")

        def failures(**changed: Any) -> list[str]:
            returned = changed.pop("returned", {"kv_cache": 90, "weights": 91})
            cycles = {"cycles": 2, "equal_requests": 5, "equal_to_the_last_round": 5, "missing_bytes_after_resume": 0}
            native = {"cycles": cycles | {"returned_bytes": {"kv_cache": 100, "weights": 100, "kv_cache+weights": None}}}
            ours = {"equal_requests": 5, "speed": 0.97, "speed_of_rounds": 0.98, "speed_compared_with": "native_saver"}
            ours |= {"cycles": cycles | {"returned_bytes": returned}} | changed
            report = {"requests": 5, "requests_where_native_repeats_itself": ours["equal_requests"]}
            report |= {"native_saver": native, "symmalloc_saver": ours}
            lines = module.verdicts(report, ["native_saver", "symmalloc_saver"], 0.98)
            self.assertEqual(len(lines), 8)
            return [line for line in lines if not line.startswith("PASS ")]

        self.assertEqual(failures(), [])
        (line,) = failures(returned={"kv_cache": 89, "weights": 100})
        self.assertEqual(
            line,
            "FAIL symmalloc_saver: returned to the device {'kv_cache': 89, 'weights': 100}; native_saver {'kv_cache': 100, 'weights': 100}",
        )
        self.assertEqual(len(failures(returned={"kv_cache": None})), 1, "nothing was released")
        (line,) = failures(equal_requests=0)
        self.assertIn("FAIL symmalloc_saver: 0 of 0 requests have native's tokens", line)
        (line,) = failures(speed=0.99, speed_of_rounds=0.979)
        self.assertIn("0.979 of the speed of native_saver", line)
        self.assertIn("the medians of all rounds: 0.990", line)

    def test_a_pytorch_that_sglang_was_not_built_for_is_an_error(self) -> None:
        done, _ = self.serve("--rounds", "1", FAKE_TORCH="2.11.0")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("SGLang 0.5.23 and PyTorch 2.11.0 do not fit: this job needs SGLang 0.5.17 (PyTorch 2.11.0)", done.stdout)

    def test_each_wheel_must_be_there_in_the_listed_version(self) -> None:
        job("vllm_serve")
        module = job("sglang_serve")
        self.assertEqual(set(module.WHEELS), set(module.VERSIONS))
        listed = [line for line in module.WHEELS["0.5.23"].read_text().splitlines() if line and not line.startswith("#")]
        with tempfile.TemporaryDirectory() as path, mock.patch.object(module, "_installed_version", lambda _: None):
            folder = Path(path)
            for line in listed:
                name, version = line.split("==")
                (folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").touch()
            self.assertEqual(len(module.check_wheels(folder)), len(listed))
            wheel = next(folder.glob("sglang-*"))
            wheel.rename(folder / "sglang-0.5.18-py3-none-any.whl")
            with self.assertRaisesRegex(module.VersionMismatch, r"sglang is 0\.5\.18: this job needs 0\.5\.17 or 0\.5\.23"):
                module.check_wheels(folder)
            (folder / "sglang-0.5.18-py3-none-any.whl").unlink()
            with self.assertRaisesRegex(module.MissingWheel, "no wheel of sglang"):
                module.check_wheels(folder)

    def test_a_new_process_finds_the_schedulers_function_in_a_file_that_installs_symmalloc_first(self) -> None:
        program = f"""
        import pickle, sys
        import symmalloc
        sys.path.insert(0, {str(FAKE_SGLANG)!r})
        from symmalloc import installation
        seen = []
        def install(conf):
            seen.append([name for name in sys.modules if name.startswith("sglang")])
            symmalloc.state.installed_with = (conf, None)
        installation.install = install
        from symmalloc.sglang import Engine
        import torch_memory_saver
        assert torch_memory_saver is sys.modules["symmalloc.torch_memory_saver"], "SGLang's memory saver"
        assert seen == [[]], seen
        name = pickle.dumps(Engine.run_scheduler_process_func)
        assert b"symmalloc.sglang" in name and b"run_scheduler_process" in name, name
        Engine.run_scheduler_process_func(1, tp_rank=0)
        from sglang.srt.managers import scheduler
        assert scheduler.calls == [((1,), {{"tp_rank": 0}})], scheduler.calls
        from sglang.srt.model_executor.runner_utils import pool
        MIB = pool.MIB
        assert pool.find_free_graph_pool_runs(None) == [(8 * MIB, 6 * MIB), (22 * MIB, 6 * MIB)], "aligned parts only"
        """
        done = needs.process(program)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_processes_of_data_parallelism_install_symmalloc_first_without_the_programs_main_module(self) -> None:
        begin = f"""
        import pickle, sys
        import symmalloc
        sys.path.insert(0, {str(FAKE_SGLANG)!r})
        from symmalloc import installation
        seen = []
        def install(conf):
            seen.append([name for name in sys.modules if name.startswith("sglang")])
            symmalloc.state.installed_with = (conf, None)
        installation.install = install
        """
        parent = """
        from symmalloc.sglang import Engine
        from sglang.srt.entrypoints import engine
        first = engine.run_scheduler_process_with_init_pipe, engine.run_data_parallel_controller_process
        print(pickle.dumps([*first, Engine.run_scheduler_process_func]).hex())
        """
        done = needs.process(begin + parent)
        self.assertEqual(done.returncode, 0, done.stderr)
        child = f"""
        scheduler_first, controller_first, run = pickle.loads(bytes.fromhex({done.stdout.strip()!r}))
        assert seen == [[]], seen
        scheduler_first(run, 7)
        controller_first(run_scheduler_process_func=run)
        from sglang.srt.managers import scheduler
        assert scheduler.calls == [((7,), {{}}), "controller", ((), {{}})], scheduler.calls
        """
        done = needs.process(begin + child)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_missing_function_of_data_parallelism_is_a_warning_with_the_version(self) -> None:
        program = f"""
        import importlib.metadata, sys, symmalloc
        sys.path.insert(0, {str(FAKE_SGLANG)!r})
        symmalloc.state.installed_with = (None, None)
        importlib.metadata.version = lambda _: VERSION
        from sglang.srt.entrypoints import engine
        del engine.NAME
        import symmalloc.sglang
        """
        for version, name, warns in (
            ("0.6.0", "run_scheduler_process_with_init_pipe", True),
            ("0.6.0", "run_data_parallel_controller_process", True),
            ("0.5.17", "run_data_parallel_controller_process", True),
            ("0.5.17", "run_scheduler_process_with_init_pipe", False),
        ):
            done = needs.process(program.replace("NAME", name).replace("VERSION", repr(version)))
            self.assertEqual(done.returncode, 0, done.stderr)
            said = f"RuntimeWarning: SGLang {version} has no engine.{name}: with data parallelism"
            self.assertEqual(said in done.stderr, warns, done.stderr)

    def test_all_modules_of_torch_memory_saver_are_replaced(self) -> None:
        program = f"""
        import os, sys, symmalloc
        sys.path.insert(0, {str(FAKE_SGLANG)!r})
        symmalloc.state.installed_with = (None, None)
        import symmalloc.sglang
        from torch_memory_saver import TorchMemorySaver, configure_subprocess, register_hook_mode, torch_memory_saver
        from torch_memory_saver.entrypoint import TorchMemorySaver as same
        from torch_memory_saver.hooks.base import HookMode, HookUtilBase
        from torch_memory_saver.hooks.mode_preload import HookUtilModePreload
        from torch_memory_saver.hooks.mode_torch import HookUtilModeTorch
        from torch_memory_saver.binary_wrapper import BinaryWrapper
        from torch_memory_saver.testing_utils import empty_cache, get_and_print_gpu_memory, get_device
        from torch_memory_saver.utils import change_env, get_binary_path_from_package
        import torch_memory_saver.utils as utils, torch_memory_saver.hooks as hooks
        assert same is TorchMemorySaver and type(torch_memory_saver) is same and hooks.base.HookMode is HookMode
        path = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
        assert path.is_file() and HookUtilBase.create("torch").get_path_binary() == str(path)
        assert isinstance(HookUtilBase.create("preload"), HookUtilModePreload)
        with change_env("AN_UNSET_VARIABLE", "1"):
            assert os.environ["AN_UNSET_VARIABLE"] == "1"
        assert "AN_UNSET_VARIABLE" not in os.environ
        torch_memory_saver._ensure_initialized()
        assert isinstance(torch_memory_saver._impl._binary_wrapper, BinaryWrapper)
        """
        done = needs.process(program)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_sglang_without_the_function_is_refused(self) -> None:
        program = f"""
        import sys, symmalloc
        sys.path.insert(0, {str(FAKE_SGLANG)!r})
        from sglang.srt.entrypoints.engine import Engine
        symmalloc.state.installed_with = (None, None)
        del Engine.run_scheduler_process_func
        import symmalloc.sglang
        """
        done = needs.process(program)
        self.assertIn("InvalidState: this SGLang has no Engine.run_scheduler_process_func", done.stderr)
        there = "sys.modules['torch_memory_saver'] = sys"
        done = needs.process(program.replace("del Engine.run_scheduler_process_func", there))
        self.assertIn("RuntimeWarning: torch_memory_saver was imported before symmalloc.sglang", done.stderr)

    def test_a_scheduler_with_the_original_memory_saver_is_an_error(self) -> None:
        program = f"""
        import sys, symmalloc
        from types import SimpleNamespace
        sys.path.insert(0, {str(FAKE_SGLANG)!r})
        symmalloc.state.installed_with = (None, None)
        BEFORE
        from symmalloc.sglang import run_scheduler_process as run
        run(SimpleNamespace(enable_memory_saver=False))
        from sglang.srt.managers import scheduler
        for with_saver in (lambda options: run(options), lambda options: run(server_args=options)):
            try:
                with_saver(SimpleNamespace(enable_memory_saver=True))
            except symmalloc.InvalidState as error:
                assert "import symmalloc.sglang first" in str(error)
        print(len(scheduler.calls))
        """
        done = needs.process(program.replace("BEFORE", "sys.modules['torch_memory_saver'] = sys"))
        self.assertEqual(done.stdout, "1\n", done.stderr)
        self.assertEqual(needs.process(program.replace("BEFORE", "")).stdout, "3\n")

    def test_the_command_serves_over_http_with_symmalloc_and_ends_its_processes(self) -> None:
        program = f"""
        import runpy, sys, symmalloc
        from symmalloc import installation
        sys.path.insert(0, {str(FAKE_SGLANG)!r})
        def install(conf):
            print("installed", conf)
            symmalloc.state.installed_with = (conf, None)
        installation.install = install
        sys.argv[1:] = ["MODEL", *OPTIONS]
        runpy.run_module("symmalloc.sglang", run_name="__main__")
        """
        done = needs.process(program.replace("OPTIONS", "[]"))
        lines = ["installed None", "plug-ins", "MODEL symmalloc.sglang run_scheduler_process", "ended False"]
        self.assertEqual(done.stdout.splitlines(), lines, done.stderr)
        done = needs.process(program.replace("OPTIONS", "['--use-ray']"))
        self.assertIn("InvalidArgument: --use-ray: symmalloc.sglang serves over HTTP only", done.stderr)
        done = needs.process(program.replace("OPTIONS", "[]"), TMS_INIT_ENABLE="1")
        self.assertEqual(done.stdout.splitlines()[:1], ["installed tag:default"], done.stderr)


class Examples(unittest.TestCase):
    def test_each_example_runs_on_the_original_and_on_symmalloc_in_a_table(self) -> None:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            (folder / "examples").mkdir()
            (folder / "examples" / "simple.py").write_text(
                "import os, torch_memory_saver as saver\n"
                "def run(mode):\n"
                "    assert saver.KIND == 'symmalloc' or ('hook_mode_preload' in os.environ.get('LD_PRELOAD', '')) == (mode == 'preload')\n"
                "    assert (saver.KIND, mode) != ('symmalloc', 'torch'), 'this one fails'\n"
            )
            (folder / "torch.py").write_text(
                "from types import SimpleNamespace\n__version__ = '2'\ncuda = SimpleNamespace(device_count=lambda: 1)\n"
            )
            (folder / "symmalloc").mkdir()
            (folder / "symmalloc" / "__init__.py").touch()
            (folder / "symmalloc" / "torch_memory_saver.py").write_text(
                "import sys\nKIND = 'symmalloc'\n"
                "def replace_original():\n    sys.modules['torch_memory_saver'] = sys.modules[__name__]\n    return True\n"
            )
            with zipfile.ZipFile(folder / "saver.whl", "w") as wheel:
                wheel.writestr("torch_memory_saver/__init__.py", "KIND = 'native'\n")
                wheel.writestr("torch_memory_saver_hook_mode_preload_cu13.abi3.so", "")
            out = folder / "report.json"
            command = [sys.executable, str(JOBS / "torch_memory_saver_examples.py"), "--examples", str(folder / "examples")]
            command += ["--wheel", str(folder / "saver.whl"), "--out", str(out), "--only", "simple"]
            environment = os.environ | {"PYTHONPATH": path}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("| simple.run[preload] | passed | passed |", done.stdout)
            self.assertIn("| simple.run[torch] | passed | failed (1) |", done.stdout)
            self.assertIn("3 passed, 1 failed", done.stdout)
            self.assertIn("this one fails", json.loads(out.read_text())["results"]["symmalloc"]["simple.run[torch]"])
            (folder / "current").mkdir()
            at = command.index("--out")
            command[at : at + 2] = []
            done = subprocess.run(
                command, cwd=folder / "current", env=environment, capture_output=True, text=True, timeout=60
            )
            self.assertIn("3 passed, 1 failed", done.stdout, done.stderr)
            self.assertEqual(list((folder / "current").iterdir()), [], "no files without --out")

    def test_a_run_without_any_example_fails(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "simple.py").touch()
            command = [
                sys.executable,
                str(JOBS / "torch_memory_saver_examples.py"),
                "--examples",
                folder,
                "--only",
                "unknown",
            ]
            done = subprocess.run(
                [*command, "--out", f"{folder}/out.json"],
                env=os.environ | {"PYTHONPATH": str(FAKE)},
                capture_output=True,
                text=True,
            )
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("no example was run", done.stderr)


if __name__ == "__main__":
    unittest.main()
