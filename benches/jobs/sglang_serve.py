"""Serves 300 requests of varying length with SGLang 0.5.17, offline, on PyTorch's native allocator and on symmalloc.

    python sglang_serve.py --wheels FOLDER --out report.json        on a machine with a GPU, PyTorch 2.11.0 and symmalloc
    python sglang_serve.py --wheels FOLDER --tensor-parallel 2      on two GPUs, with symmetric memory

Several servers (`--kinds`) serve the same requests in `--rounds` rounds. The report compares tokens (where native repeats
itself), tokens per second (medians), memory, windows and start-up time. Each server is a process with another for each GPU:

native, native_again                 PyTorch's allocator
symmalloc                            symmalloc installed
native_windows, symmalloc_windows    the same, and all-reduces in SGLang's symmetric memory (--enable-symm-mem)

Servers start and run one after the other, so that each has the GPUs for itself. With `--together`, all of them start first, and
take turns in each round. The model, the requests and the report are those of `vllm_serve.py`.

A symmetric server needs a C++ compiler, because SGLang compiles its allocator. It also sets `NCCL_NVLS_ENABLE=1`, whatever the
environment says: this job restores the value of the environment, or 0. SGLang compiles small kernels on the first use with nvcc.

The folder has the wheels of `sglang_wheels.txt`, which contain what SGLang imports. To fill it, where a registry can be reached:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d FOLDER -r sglang_wheels.txt

A wheel is installed unless the machine has exactly its version, to a folder that is first on the path. The kernels need libnuma1.
The attention backend is Triton's. `sglang-kernel` has 383 MB, of which an H100 needs only `sm90/common_ops` here.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_serve
from vllm_serve import (
    SEED,
    WHEEL,
    MissingWheel,
    OddFile,
    VersionMismatch,
    Unusable,
    at_least,
    cccl,
    kinds,
    normal,
    requests,
)

SGLANG, TORCH = "0.5.17", "2.11.0"
KINDS = {
    name: vllm_serve.KINDS[name]
    for name in ("native", "native_again", "symmalloc", "native_windows", "symmalloc_windows")
}
KV_CACHE_TOKENS = 128 * 1024
WHEELS = Path(__file__).with_name("sglang_wheels.txt")


class MissingLibrary(Unusable):
    """The machine lacks a library of the system."""


def check_libraries() -> None:
    """Raises `MissingLibrary` without libnuma, with which SGLang's kernels are linked."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as why:
        raise MissingLibrary(
            "no libnuma.so.1: install libnuma1, or add a folder that has it to LD_LIBRARY_PATH"
        ) from why


def check_wheels(folder: Path) -> list[Path]:
    """Returns the wheels to install. Raises `MissingWheel`, `VersionMismatch` and `OddFile`."""
    there: dict[str, dict[str, Path]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        if (parts := WHEEL.fullmatch(wheel.name)) is None:
            raise OddFile(
                f"{wheel} is not named like a wheel (name-version-python-abi-platform.whl): remove or rename it"
            )
        there.setdefault(normal(parts["name"]), {})[parts["version"]] = wheel
    listed = [line.split("==") for line in WHEELS.read_text().splitlines() if line and not line.startswith("#")]
    needed = [(name, version) for name, version in listed if _installed_version(name) != version]
    if missing := [name for name, _ in needed if normal(name) not in there]:
        raise MissingWheel(
            f"{folder} has no wheel of {', '.join(missing)}: download it as this file's documentation says"
        )
    for name, version in needed:
        if version not in (versions := there[normal(name)]):
            raise VersionMismatch(f"{name} is {', '.join(versions)}: this job needs {version}")
    return [there[normal(name)][version] for name, version in needed]


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unpack(wheels: list[Path], site: Path) -> None:
    """Installs the wheels to a folder."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(site), *map(str, wheels)], check=True)


@dataclass(frozen=True)
class Setup(vllm_serve.Setup):
    """The settings that all servers share."""

    attention_backend: str

    def environment(self, kind: vllm_serve.Kind, log: Path) -> dict[str, str]:
        """Returns the environment of a server, which SGLang's processes inherit."""
        path = [str(self.site), os.environ.get("PYTHONPATH"), str(Path(__file__).resolve().parent)]
        libraries = [str(self.scratch / "lib"), os.environ.get("LIBRARY_PATH")]
        headers = [cccl(), os.environ.get("CPATH")]
        # Each server compiles in its own folder: SGLang removes the lock file of any other server there. The folder also has
        # sockets, so its name is short.
        temporary = tempfile.mkdtemp(dir=self.scratch / "tmp")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)), "LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "CPATH": os.pathsep.join(filter(None, headers)), "TMPDIR": temporary,
            # A bfloat16 model does not use DeepGEMM, which has hung with symmetric memory (sglang#12524).
            "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
            # Servers that start together change the free memory of each other's GPUs.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        if kind.has_windows:
            environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{log}.nccl.%p"}
        return environment


class Server(vllm_serve.Server):
    """A process that serves the requests."""

    def __init__(self, name: str, setup: Setup) -> None:
        """Starts the process, without waiting for it."""
        self.name, self._answer_seconds = name, setup.answer_seconds
        self.log = setup.out.with_suffix(f".{name}.log")
        command = [
            sys.executable, __file__, "--serve", name, "--model", str(setup.scratch / "model"),
            "--tensor-parallel", str(setup.ranks), "--requests", str(setup.requests),
            "--attention-backend", setup.attention_backend,
        ]  # fmt: skip
        self._start(command, setup.environment(KINDS[name], self.log))


def serve(arguments: argparse.Namespace) -> None:
    """Starts an engine in a separate process, and answers requests from its standard input."""
    began = time.perf_counter()
    # The folder of this file comes last: a job must not shadow a package.
    here = str(Path(__file__).resolve().parent)
    sys.path = [*(entry for entry in sys.path if str(Path(entry or ".").resolve()) != here), here]
    import torch

    if torch.__version__.split("+")[0] != TORCH:
        raise VersionMismatch(f"PyTorch is {torch.__version__}: SGLang {SGLANG} needs {TORCH}")
    import sglang_worker
    from sglang.srt.entrypoints.engine import Engine

    class JobEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(sglang_worker.run_scheduler)

    kind = KINDS[arguments.serve]
    os.environ[sglang_worker.INSTALL] = str(int(bool(kind.plug_in)))
    os.environ[sglang_worker.NVLS] = os.environ.get("NCCL_NVLS_ENABLE", "0")
    llm = JobEngine(
        model_path=str(arguments.model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", random_seed=SEED,
        context_length=2048, mem_fraction_static=0.3, max_total_tokens=KV_CACHE_TOKENS, max_running_requests=128,
        disable_radix_cache=True, tp_size=arguments.tensor_parallel, disable_custom_all_reduce=True,
        enforce_disable_flashinfer_allreduce_fusion=True, enable_symm_mem=kind.has_windows,
        attention_backend=arguments.attention_backend, sampling_backend="pytorch", grammar_backend="none",
        disable_prefill_cuda_graph=True, cuda_graph_bs_decode=[1, 2, 4, 8, 16, 32, 64, 96, 128],
        port=30000 + 1000 * list(KINDS).index(arguments.serve), log_level="info",
    )  # fmt: skip
    work = requests(arguments.requests)
    prompts = [tokens for tokens, _ in work]
    parameters = [{"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for _, count in work]

    def facts() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            llm.collective_rpc("job_facts", folder=folder)
            files = [Path(folder) / f"{rank}.json" for rank in range(arguments.tensor_parallel)]
            return [json.loads(file.read_text()) for file in files]

    def run() -> dict[str, Any]:
        # SGLang sends prompts of token ids to its scheduler in one message, so batches are the same each time.
        start = time.perf_counter()
        outputs = [output["output_ids"] for output in llm.generate(input_ids=prompts, sampling_params=parameters)]
        seconds = time.perf_counter() - start
        digests = [hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16] for tokens in outputs]
        return {"seconds": seconds, "tokens": sum(map(len, outputs)), "digests": digests, "workers": facts()}

    def answer(what: dict[str, Any]) -> None:
        print("\nANSWER " + json.dumps(what), flush=True)

    answer({"start_seconds": time.perf_counter() - began, "workers": facts()})
    for _ in sys.stdin:
        answer(run())
    llm.shutdown()


class Field(vllm_serve.Field):
    """The servers that are compared."""

    def __init__(self, setup: Setup, names: list[str]) -> None:
        super().__init__(setup, names, has_sleep=False)
        self._settings = setup  # with SGLang's own

    def start_all(self, names: list[str]) -> None:
        """Starts servers, and waits until they are ready."""
        for name in names:
            self.servers[name] = Server(name, self._settings)
        for name in names:
            self._try(name, "ready")

    def run_one(self, name: str) -> dict[str, Any] | None:
        return self._try(name, "run") if name in self.names else None


def compare(setup: Setup, names: list[str], rounds_of_each: int, *, together: bool) -> dict[str, Any]:
    """Runs the servers, and returns the report. Raises `Unusable` without a native server."""
    field = Field(setup, names)
    # The first round is not measured: it also compiles kernels.
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def run(name: str) -> None:
        if (one := field.run_one(name)) is not None:
            done[name].append(one)

    try:
        for group in [names] if together else [[name] for name in names]:
            field.start_all(group)
            for _ in range(1 + rounds_of_each):
                for name in group:
                    run(name)
                # In case that a time limit ends the job.
                setup.out.with_suffix(".rounds.json").write_text(json.dumps(done))
            field.end()
    finally:
        field.end()
    report: dict[str, Any] = {
        "sglang": SGLANG, "torch": TORCH, "requests": setup.requests, "kv_cache_tokens": KV_CACHE_TOKENS, "gpus": setup.ranks,
        "attention_backend": setup.attention_backend, "started_together": together, **field.report,
    }  # fmt: skip
    setup.out.write_text(json.dumps(report, indent=1))
    vllm_serve.evaluate(
        report, field, {name: done[name][0] for name in field.names}, {name: done[name][1:] for name in field.names}
    )
    return report


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheels", type=Path, help="folder of wheels")
    parser.add_argument("--site", type=Path, help="folder with the wheels' packages; default: a temporary one")
    parser.add_argument("--out", type=Path, default=Path("sglang.json"), help="the report; logs are next to it")
    parser.add_argument("--tensor-parallel", type=at_least(1), default=1, metavar="GPUS", help="the number of GPUs")
    parser.add_argument(
        "--kinds",
        type=kinds(KINDS),
        help="default: native, native_again, symmalloc; on several GPUs those with windows, too",
    )
    parser.add_argument("--requests", type=at_least(1), default=vllm_serve.REQUESTS)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="measured rounds of each server")
    parser.add_argument("--together", action="store_true", help="start all servers, and let them take turns")
    parser.add_argument("--attention-backend", default="triton", help="SGLang's; default: triton")
    parser.add_argument(
        "--answer-seconds",
        type=at_least(1),
        default=300,
        help="end a server that does not answer for this long; default: 300",
    )
    parser.add_argument("--serve", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = command_line()
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    several = arguments.tensor_parallel > 1
    names = arguments.kinds or (
        ["native", "symmalloc", "native_windows", "symmalloc_windows"]
        if several
        else ["native", "native_again", "symmalloc"]
    )
    if all(KINDS[name].plug_in for name in names):
        parser.error("--kinds needs a native kind, with which the others are compared")
    report: dict[str, Any] = {}
    try:
        if arguments.site is None and arguments.wheels is None:
            raise MissingWheel("no wheels are given: use --wheels FOLDER")
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            site = (arguments.site or scratch / "site").resolve()
            if arguments.wheels is not None:
                check_libraries()
                unpack(check_wheels(arguments.wheels), site)
            setup = Setup(
                site,
                scratch,
                arguments.out.resolve(),
                arguments.tensor_parallel,
                arguments.requests,
                arguments.answer_seconds,
                arguments.attention_backend,
            )
            setup.prepare()
            report = compare(setup, names, arguments.rounds, together=arguments.together)
            arguments.out.write_text(json.dumps(report, indent=1))
    except Unusable as why:
        sys.exit(f"{type(why).__name__}: {why}")
    print(json.dumps(report, indent=1))
    sys.exit(any(isinstance(one, dict) and "failed" in one for one in report.values()))


if __name__ == "__main__":
    main()
