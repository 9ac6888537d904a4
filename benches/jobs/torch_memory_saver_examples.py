"""Runs torch_memory_saver's own example tests on `symmalloc.torch_memory_saver`, each in a separate process.

    git clone https://github.com/fzyzcjy/torch_memory_saver
    python torch_memory_saver_examples.py --examples torch_memory_saver/test/examples --out report.json
    python torch_memory_saver_examples.py --examples ... --wheel torch_memory_saver-0.0.10-*.whl      also on the original

Written for the examples of August 2026 (4a43c97). They import `torch_memory_saver`, which is replaced by this
package's module. Some of them also look inside the original. `PATCHES` lists what is changed for that, and `INAPPLICABLE` what is not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from vllm_serve import runtime_path

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

NATIVE_CASES: tuple[tuple[str, str, tuple[str, ...], dict[str, str], int], ...] = (
    ("cuda_vmm_granularity", "run", ("preload",), {"TMS_INIT_ENABLE": "1"}, 1),
)
PREPARED = 4
"""The number of processes that have been started, including the one that runs."""

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


def run_example(folder: Path, kind: str, example: str, function: str, mode: str) -> None:
    """Runs one example, in a separate process, when its standard input has a line: until then, it only imports PyTorch."""
    # The folder of this file is not on the path: a job must not shadow a package.
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    import torch  # noqa: F401

    sys.stdin.readline()
    source = (folder / f"{example}.py").read_text()
    if kind == "symmalloc":
        from symmalloc import torch_memory_saver as ours

        assert ours.replace_original(), "nothing has imported the original"
        for text, replacement, reason in PATCHES.get(example, []):
            if text not in source:
                raise SystemExit(f"{example} is another version: it lacks {text!r}, which is replaced because {reason}")
            source = source.replace(text, replacement)
    module = types.ModuleType(example)
    module.__dict__["unnamed_files"] = unnamed_files
    exec(compile(source, str(folder / f"{example}.py"), "exec"), module.__dict__)
    getattr(module, function)(mode)


@dataclass(frozen=True)
class Run:
    """A run of an example."""

    kind: str
    """`native` or `symmalloc`."""
    example: str
    function: str
    mode: str
    environment: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.example}.{self.function}[{self.mode}]"

    def start(self, examples: Path, original: Path) -> subprocess.Popen[str]:
        """Starts the process, which waits before it uses the device."""
        environment = os.environ | self.environment
        if self.kind == "native":
            paths = [str(original), environment.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            if self.mode == "preload":
                (library,) = original.glob("torch_memory_saver_hook_mode_preload_cu13*.so")
                environment |= {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": runtime_path()}
        command = [sys.executable, __file__, "--examples", str(examples), "--run", self.kind, self.example]
        return subprocess.Popen(
            [*command, self.function, self.mode], env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Lets a process run, and returns its exit status and its output."""
    try:
        said, _ = process.communicate("run\n", timeout=60)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        process.kill()
        return 124, process.communicate()[0] + "no end after 60 s"


def table(runs: list[Run], results: dict[str, dict[str, str]], kinds: list[str]) -> str:
    """Returns a table in Markdown with a line for each example."""
    names = list(dict.fromkeys(run.name for run in runs))
    lines = [f"| example | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for name in names:
        cells = [results[kind].get(name, "not run").split(":")[0] for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=Path, required=True, help="the folder test/examples of torch_memory_saver")
    parser.add_argument("--wheel", type=Path, help="torch_memory_saver's wheel: also run the examples on the original")
    parser.add_argument("--out", type=Path, help="the report, with logs of failed runs next to it; default: no files")
    parser.add_argument("--only", default="", help="run examples whose name contains this text")
    parser.add_argument(
        "--gpus", type=int, default=None, help="run examples that need this many GPUs; default: all that fit"
    )
    parser.add_argument("--run", nargs=4, metavar=("KIND", "EXAMPLE", "FUNCTION", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.examples / "simple.py").exists():
        sys.exit(f"{arguments.examples} has no simple.py: clone torch_memory_saver, and give its test/examples")
    if arguments.run:
        run_example(arguments.examples, *arguments.run)
        return
    import torch

    there = torch.cuda.device_count()
    kinds = ["native", "symmalloc"] if arguments.wheel is not None else ["symmalloc"]
    runs = [
        Run(kind, example, function, mode, environment)
        for example, function, modes, environment, gpus in (*CASES, *NATIVE_CASES)
        for mode in modes
        for kind in kinds
        if arguments.only in example and gpus == (arguments.gpus or gpus) and gpus <= there
        if kind == "native" or example not in INAPPLICABLE
    ]
    results: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.wheel is not None:
            with zipfile.ZipFile(arguments.wheel) as wheel:
                wheel.extractall(folder)
        waiting: deque[subprocess.Popen[str]] = deque()
        try:
            for at, run in enumerate(runs):
                # The next processes import PyTorch while this one uses the device, alone.
                for later in runs[at + len(waiting) : at + PREPARED]:
                    waiting.append(later.start(arguments.examples, Path(folder)))
                start = time.monotonic()
                code, said = finish(waiting.popleft())
                if code and arguments.out is not None:
                    arguments.out.with_suffix(f".{run.kind}.{run.name}.log").write_text(said)
                failure = f"failed ({code}): " + " | ".join(said.splitlines()[-3:])
                results[run.kind][run.name] = failure if code else "passed"
                print(f"{run.kind} {run.name}: {results[run.kind][run.name]} ({time.monotonic() - start:.1f} s)", flush=True)
        finally:
            for process in waiting:
                process.kill()
                process.wait()
    failed = sum(result != "passed" for of_kind in results.values() for result in of_kind.values())
    if arguments.out is not None:
        report = {"torch": torch.__version__, "results": results, "inapplicable": INAPPLICABLE}
        arguments.out.write_text(json.dumps(report, indent=1))
    print(table(runs, results, kinds))
    print(f"{len(runs) - failed} passed, {failed} failed; not run on symmalloc: {INAPPLICABLE}")
    if not runs:
        sys.exit(f"no example was run: none fits --only {arguments.only!r}, --gpus {arguments.gpus} and {there} GPUs")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
