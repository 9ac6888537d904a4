"""Runs torch_memory_saver's own example tests on `symmalloc.torch_memory_saver`, each in a separate process.

    git clone https://github.com/fzyzcjy/torch_memory_saver
    python torch_memory_saver_examples.py --examples torch_memory_saver/test/examples --out report.json

Written for the examples of August 2026 (4a43c97). They import `torch_memory_saver`, which is replaced by this package's module.
Some of them also look inside the original. `PATCHES` lists what is changed for that, and `INAPPLICABLE` what is not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BOTH = ("preload", "torch")
WHOLE = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
MMAP = {"TMS_INIT_CPU_BACKUP_BACKEND": "mmap"}

# Example, function, hook modes, environment, and the number of GPUs that it needs.
CASES: tuple[tuple[str, str, tuple[str, ...], dict[str, str], int], ...] = (
    ("simple", "run", BOTH, {}, 1),
    ("cuda_graph", "run", BOTH, {}, 1),
    ("cpu_backup", "run", BOTH, {}, 1),
    ("cpu_backup", "run_rss", ("torch",), {}, 1),
    ("cpu_backup", "run_backend_from_env", BOTH, MMAP, 1),
    ("cpu_backup", "run_preload_backend_from_env", ("preload",), WHOLE | MMAP, 1),
    ("cpu_backup", "run_retain_from_env", BOTH, {"TMS_RETAIN_CPU_BACKUP": "1"}, 1),
    ("cpu_backup", "run_multi_device_mmap_restore", BOTH, {}, 2),
    ("disk_backup", "run", BOTH, {}, 1),
    ("rl_example", "run", BOTH, {}, 1),
    ("training_engine", "run", ("preload",), WHOLE, 1),
    ("nested_region", "run", ("preload",), WHOLE, 1),
    ("multi_device", "run", BOTH, {}, 2),
    ("multi_device_torch_mode", "run", ("torch",), {}, 2),
)

INAPPLICABLE = {
    "cuda_vmm_granularity": "calls cudaMalloc and the C functions of the preloaded library directly",
    "xpu_scenarios": "is for Intel GPUs",
}

# What is changed in an example: (text, replacement, reason).
PATCHES: dict[str, list[tuple[str, str, str]]] = {
    "disk_backup": [
        ("files = os.listdir(disk_dir)", "files = unnamed_files(disk_dir)", "backups are files without a name"),
        ("assert len(files) >= 2", "assert len(files) >= 1", "a pool has one backup, not one for each allocation"),
    ],
    "cpu_backup": [
        (
            '    state = "paused" if paused else "active"\n',
            '    return\n    state = "paused" if paused else "active"\n',
            "the check that a freed allocation releases its backup uses the original's own pools",
        )
    ],
}


def unnamed_files(folder: str) -> list[str]:
    """Returns the open files of this process that were unlinked from a folder."""
    found = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(entry.path).startswith(os.path.realpath(folder) + "/"):
                found.append(entry.path)
        except OSError:
            continue
    return found


class State:
    """Answers the questions that examples ask the original's C library about the current region. It checks nothing of ours."""

    def __init__(self, saver: Any) -> None:
        is_whole, is_backed = (os.environ.get(name) == "1" for name in WHOLE)
        self._regions = [(is_whole, "default", is_backed, os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "pinned"))]
        original = saver.region

        @contextmanager
        def region(tag: str = "default", enable_cpu_backup: bool = False, **arguments: Any) -> Any:
            backend = arguments.get("cpu_backup_backend") or self._regions[-1][3]
            self._regions.append((True, tag, enable_cpu_backup, backend))
            try:
                with original(tag, enable_cpu_backup, **arguments):
                    yield
            finally:
                self._regions.pop()

        saver.region = region
        saver._ensure_initialized = lambda: None
        saver._impl = types.SimpleNamespace(_binary_wrapper=types.SimpleNamespace(cdll=self))

    def tms_get_interesting_region(self) -> bool:
        return self._regions[-1][0]

    def tms_get_current_tag(self) -> bytes:
        return self._regions[-1][1].encode()

    def tms_get_enable_cpu_backup(self) -> bool:
        return self._regions[-1][2]

    def tms_get_cpu_backup_backend(self) -> bytes:
        return self._regions[-1][3].encode()


def run_example(folder: Path, example: str, function: str, mode: str) -> None:
    """Runs one example, in a separate process."""
    # The folder of this file is not on the path: a job must not shadow a package.
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    import torch
    from symmalloc import torch_memory_saver as ours

    def used(message: str, gpu_id: int = 0) -> int:
        free, total = torch.cuda.mem_get_info(gpu_id)
        print(f"GPU {gpu_id} memory: {(total - free) / 1024**3:.2f} GB ({message})", flush=True)
        return total - free

    testing: Any = types.ModuleType("torch_memory_saver.testing_utils")
    testing.get_device = lambda: "cuda"
    testing.empty_cache = torch.cuda.empty_cache
    testing.get_and_print_gpu_memory = used
    sys.modules["torch_memory_saver"] = ours
    sys.modules["torch_memory_saver.testing_utils"] = testing
    State(ours.torch_memory_saver)
    source = (folder / f"{example}.py").read_text()
    for text, replacement, reason in PATCHES.get(example, []):
        if text not in source:
            raise SystemExit(f"{example} is another version: it lacks {text!r}, which is replaced because {reason}")
        source = source.replace(text, replacement)
    module = types.ModuleType(example)
    module.__dict__["unnamed_files"] = unnamed_files
    exec(compile(source, str(folder / f"{example}.py"), "exec"), module.__dict__)
    getattr(module, function)(mode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=Path, required=True, help="the folder test/examples of torch_memory_saver")
    parser.add_argument("--out", type=Path, default=Path("torch_memory_saver.json"), help="the report")
    parser.add_argument("--only", default="", help="run examples whose name contains this text")
    parser.add_argument(
        "--gpus", type=int, default=None, help="run examples that need this many GPUs; default: all that fit"
    )
    parser.add_argument("--run", nargs=3, metavar=("EXAMPLE", "FUNCTION", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.examples / "simple.py").exists():
        sys.exit(f"{arguments.examples} has no simple.py: clone torch_memory_saver, and give its test/examples")
    if arguments.run:
        run_example(arguments.examples, *arguments.run)
        return
    import torch

    there = torch.cuda.device_count()
    results: dict[str, str] = {}
    for example, function, modes, environment, gpus in CASES:
        if arguments.only not in example or gpus != (arguments.gpus or gpus) or gpus > there:
            continue
        for mode in modes:
            name, start = f"{example}.{function}[{mode}]", time.monotonic()
            command = [
                sys.executable,
                __file__,
                "--examples",
                str(arguments.examples),
                "--run",
                example,
                function,
                mode,
            ]
            try:
                done = subprocess.run(
                    command, env=os.environ | environment, capture_output=True, text=True, timeout=120
                )
                said, code = done.stdout + done.stderr, done.returncode
            except subprocess.TimeoutExpired as late:
                said, code = f"{late}", 124
            arguments.out.with_suffix(f".{name}.log").write_text(said) if code else None
            results[name] = "passed" if code == 0 else f"failed ({code}): " + " | ".join(said.splitlines()[-3:])
            print(f"{name}: {results[name]} ({time.monotonic() - start:.1f} s)", flush=True)
    failed = sum(result != "passed" for result in results.values())
    arguments.out.write_text(json.dumps({"results": results, "inapplicable": INAPPLICABLE}, indent=1))
    print(f"{len(results) - failed} passed, {failed} failed; not run: {INAPPLICABLE}")
    if not results:
        sys.exit(f"no example was run: none fits --only {arguments.only!r}, --gpus {arguments.gpus} and {there} GPUs")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
