"""Serves 300 requests of varying length with SGLang, offline, on PyTorch's native allocator and on symmalloc.

    python sglang_serve.py --wheels FOLDER --out report.json        0.5.17 on a machine with a GPU, PyTorch 2.11.0 and symmalloc
    python sglang_serve.py --wheels FOLDER --tensor-parallel 2      on two GPUs, with symmetric memory
    python sglang_serve.py --site FOLDER                            with a folder of unpacked packages, see bundle.py
    python sglang_serve.py --site FOLDER --together --kinds native,symmalloc,native_saver,symmalloc_saver --cycles 20

Several servers (`--kinds`) serve the same requests in `--rounds` rounds. The report compares tokens (where native repeats
itself), tokens per second (medians), memory, windows and start-up time. Each server is a process with another for each GPU:

native, native_again                 PyTorch's allocator
symmalloc                            symmalloc installed by the job
native_windows, symmalloc_windows    the same, and all-reduces in SGLang's symmetric memory (--enable-symm-mem)
native_custom, symmalloc_custom      the same, and SGLang's custom all-reduce
native_saver                         torch_memory_saver (--enable-memory-saver)
symmalloc_saver                      the same on symmalloc, through `symmalloc.sglang`

Servers start and run one after the other, so that each has the GPUs for itself. With `--together`, all of them start first, and
take turns in each round. The model, the requests and the report are those of `vllm_serve.py`.

With `--cycles N`, servers with the memory saver then release and resume N times: the KV cache and the weights, which have a backup on
the host, each alone and both. The report has the device's free bytes before, during and after, and the tokens before and after.

The job ends with a line for each bar, and with exit code 1 if one was missed. symmalloc must have native's tokens, and 0.98 of its
speed: the median of the ratios of adjacent rounds. The cycles must keep the tokens, return at least 0.9 of the bytes of
native_saver, and leak nothing.

A symmetric server needs a C++ compiler, because SGLang compiles its allocator. It also sets `NCCL_NVLS_ENABLE=1`, whatever the
environment says: this job restores the value of the environment, or 0. SGLang compiles small kernels on the first use with nvcc.

The folder has the wheels of `sglang_wheels/VERSION.txt`, which contain what SGLang imports. To fill it, where a registry can be reached:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d FOLDER -r sglang_wheels/0.5.17.txt

`VERSIONS` lists the versions and the PyTorch that each needs. A folder of `bundle.py` has its own PyTorch.
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
import statistics
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
    runtime_path,
)

VERSIONS = {"0.5.17": "2.11.0", "0.5.23": "2.14.1"}
"""The versions of SGLang for which this job was written, and the versions of PyTorch for which they are built."""


@dataclass(frozen=True)
class Kind(vllm_serve.Kind):
    """One kind of server."""

    has_saver: bool = False
    """`True` if the memory saver is on."""

    def resembles(self, other: vllm_serve.Kind) -> bool:
        return super().resembles(other) and isinstance(other, Kind) and self.has_saver == other.has_saver


KINDS: dict[str, Kind] = {
    "native": Kind(),
    "native_again": Kind(),
    "symmalloc": Kind("install"),
    "native_windows": Kind(has_windows=True),
    "symmalloc_windows": Kind("install", has_windows=True),
    "native_custom": Kind(has_custom=True),
    "symmalloc_custom": Kind("install", has_custom=True),
    "native_saver": Kind(has_saver=True),
    "symmalloc_saver": Kind("sglang", has_saver=True),
}
KV_CACHE_TOKENS = 128 * 1024
WHEELS = {version: Path(__file__).with_name("sglang_wheels") / f"{version}.txt" for version in VERSIONS}
TAGS: tuple[tuple[str, ...], ...] = (("kv_cache",), ("weights",), ("kv_cache", "weights"))
"""What the cycles release and resume, in turns."""


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
    installed = _installed_version("sglang")
    versions_there = list(there.get("sglang", {})) or ([] if installed is None else [installed])
    if not versions_there:
        raise MissingWheel(f"{folder} has no wheel of sglang: download it as this file's documentation says")
    if len(versions_there) > 1 or versions_there[0] not in WHEELS:
        raise VersionMismatch(f"sglang is {', '.join(versions_there)}: this job needs {' or '.join(VERSIONS)}")
    list_of_wheels = WHEELS[versions_there[0]].read_text()
    listed = [line.split("==") for line in list_of_wheels.splitlines() if line and not line.startswith("#")]
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
        if isinstance(kind, Kind) and kind.has_saver:
            environment["LD_LIBRARY_PATH"] = runtime_path()
        if kind.has_windows:
            environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{log}.nccl.%p"}
        return environment


class Server(vllm_serve.Server):
    """A process that serves the requests."""

    kinds = KINDS

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

    version = importlib.metadata.version("sglang")
    if VERSIONS.get(version) != torch.__version__.split("+")[0]:
        known = " or ".join(f"{sglang} (PyTorch {needed})" for sglang, needed in VERSIONS.items())
        raise VersionMismatch(f"SGLang {version} and PyTorch {torch.__version__} do not fit: this job needs SGLang {known}")
    import sglang_worker

    kind = KINDS[arguments.serve]
    if kind.plug_in == "sglang":
        # As a program does. It installs symmalloc in this process as well.
        from symmalloc.sglang import Engine
    else:
        from sglang.srt.entrypoints.engine import Engine

    class JobEngine(Engine):  # type: ignore[misc,valid-type]
        run_scheduler_process_func = staticmethod(sglang_worker.run_scheduler)

    os.environ[sglang_worker.INSTALL] = kind.plug_in
    os.environ[sglang_worker.NVLS] = os.environ.get("NCCL_NVLS_ENABLE", "0")
    llm = JobEngine(
        model_path=str(arguments.model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", random_seed=SEED,
        context_length=2048, mem_fraction_static=0.3, max_total_tokens=KV_CACHE_TOKENS, max_running_requests=128,
        disable_radix_cache=True, tp_size=arguments.tensor_parallel, disable_custom_all_reduce=not kind.has_custom,
        enforce_disable_flashinfer_allreduce_fusion=True, enable_symm_mem=kind.has_windows,
        attention_backend=arguments.attention_backend, sampling_backend="pytorch", grammar_backend="none",
        disable_prefill_cuda_graph=True, cuda_graph_bs_decode=[1, 2, 4, 8, 16, 32, 64, 96, 128],
        port=30000 + 1000 * list(KINDS).index(arguments.serve), log_level="info",
        **{"enable_memory_saver": True, "enable_weights_cpu_backup": True} if kind.has_saver else {},
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

    def cycles(count: int) -> dict[str, Any]:
        before, free, released, taken, seconds = run(), facts(), [], [], []
        for cycle in range(count):
            tags = list(TAGS[cycle % len(TAGS)])
            start = time.perf_counter()
            llm.release_memory_occupation(tags=tags)
            seconds.append(time.perf_counter() - start)
            released.append(least_free(facts()) - least_free(free))
            llm.resume_memory_occupation(tags=tags)
            taken.append(least_free(facts()) - least_free(free))
        after = run()
        return {
            "cycles": count, "free_bytes_before": least_free(free), "free_bytes_after": least_free(after["workers"]),
            "returned_bytes": {"+".join(tags): min(released[at :: len(TAGS)], default=None) for at, tags in enumerate(TAGS)},
            "missing_bytes_after_resume": -min(taken, default=0), "release_seconds": statistics.median(seconds) if seconds else None,
            "equal_requests": vllm_serve.equal(before["digests"], after["digests"]), "digests": after["digests"],
        }  # fmt: skip

    def answer(what: dict[str, Any]) -> None:
        print("\nANSWER " + json.dumps(what), flush=True)

    answer({
        "start_seconds": time.perf_counter() - began, "workers": facts(), "sglang": version, "torch": torch.__version__,
    })  # fmt: skip
    for line in sys.stdin:
        command, *numbers = line.split()
        answer(run() if command == "run" else cycles(*map(int, numbers)))
    llm.shutdown()


def least_free(workers: list[dict[str, Any]]) -> int:
    return min(worker["free_bytes"] for worker in workers)


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

    def run_one(self, name: str, request: str = "run") -> dict[str, Any] | None:
        return self._try(name, request) if name in self.names else None


def compare(setup: Setup, names: list[str], rounds_of_each: int, cycles: int, *, together: bool) -> dict[str, Any]:
    """Runs the servers, and returns the report. Raises `Unusable` without a native server."""
    field = Field(setup, names)
    # The first round is not measured: it also compiles kernels.
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    cycled: dict[str, dict[str, Any]] = {}

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
            for name in [name for name in group if cycles and KINDS[name].has_saver]:
                if (one := field.run_one(name, f"cycles {cycles}")) is not None:
                    cycled[name] = one
            field.end()
    finally:
        field.end()
    report: dict[str, Any] = {
        "requests": setup.requests, "kv_cache_tokens": KV_CACHE_TOKENS, "gpus": setup.ranks,
        "attention_backend": setup.attention_backend, "started_together": together, **field.report,
    }  # fmt: skip
    setup.out.write_text(json.dumps(report, indent=1))
    vllm_serve.evaluate(
        report,
        field,
        {name: done[name][0] for name in field.names},
        {name: done[name][1:] for name in field.names},
        KINDS,
    )
    for name, one in cycled.items():
        rounds = done[name][-1]["digests"]
        report[name]["cycles"] = {key: value for key, value in one.items() if key != "digests"} | {
            "equal_to_the_last_round": vllm_serve.equal(rounds, one["digests"])
        }
    return report


def verdicts(report: dict[str, Any], names: list[str], least_speed: float) -> list[str]:
    """Returns a line for each bar: tokens, speed and memory. The line of a missed bar begins with FAIL."""
    count = report["requests_where_native_repeats_itself"]
    native = _returned(report, "native_saver")
    lines = []

    def line(is_met: bool, text: str) -> None:
        lines.append(f"{'PASS' if is_met else 'FAIL'} {text}")

    for name in names:
        one = report[name]
        if "failed" in one:
            line(False, f"{name}: {one['failed'].splitlines()[0]}")
            continue
        if KINDS[name].plug_in:
            equal, other = one["equal_requests"], one["speed_compared_with"]
            line(count > 0 and equal == count, f"{name}: {equal} of {count} requests have native's tokens")
            both = f"the median of adjacent rounds' ratios; the medians of all rounds: {one['speed']:.3f}"
            line(one["speed_of_rounds"] >= least_speed, f"{name}: {one['speed_of_rounds']:.3f} of the speed of {other} ({both})")
        if (cycles := one.get("cycles")) is not None:
            are_equal = cycles["equal_requests"] == cycles["equal_to_the_last_round"] == report["requests"]
            line(are_equal, f"{name}: {cycles['equal_requests']} of {report['requests']} requests alike after {cycles['cycles']} cycles")
            returned = _returned(report, name)
            enough = all(size_bytes > 0 and size_bytes >= 0.9 * native.get(tags, 0) for tags, size_bytes in returned.items())
            compared = f"; native_saver {native}" if native and name != "native_saver" else ""
            line(bool(returned) and enough, f"{name}: returned to the device {returned}{compared}")
            missing = cycles["missing_bytes_after_resume"]
            line(missing <= 64 << 20, f"{name}: {missing} bytes less free after a resume than before the cycles")
    return lines


def _returned(report: dict[str, Any], name: str) -> dict[str, int]:
    """Returns the bytes that the cycles of a server returned, for each combination of tags that was released."""
    cycles = report.get(name, {}).get("cycles", {})
    return {tags: size_bytes for tags, size_bytes in cycles.get("returned_bytes", {}).items() if size_bytes is not None}


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
    parser.add_argument("--cycles", type=at_least(0), default=0, help="also release and resume with the memory saver")
    parser.add_argument("--together", action="store_true", help="start all servers, and let them take turns")
    parser.add_argument("--least-speed", type=float, default=0.98, help="fail below this part of native's speed; default: 0.98")
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
            report = compare(setup, names, arguments.rounds, arguments.cycles, together=arguments.together)
            arguments.out.write_text(json.dumps(report, indent=1))
    except Unusable as why:
        sys.exit(f"{type(why).__name__}: {why}")
    print(json.dumps(report, indent=1))
    lines = verdicts(report, names, arguments.least_speed)
    print("\n".join(lines))
    sys.exit(any(line.startswith("FAIL") for line in lines))


if __name__ == "__main__":
    main()
