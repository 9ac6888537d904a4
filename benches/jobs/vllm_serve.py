"""Serves 300 requests of varying length with vLLM, offline, on PyTorch's native allocator and on symmalloc.

    python vllm_serve.py --wheels FOLDER --out report.json          on a machine with a GPU, PyTorch and symmalloc
    python vllm_serve.py --wheels FOLDER --tensor-parallel 2        on two GPUs, with symmetric memory
    python vllm_serve.py --wheels FOLDER --only-sleep --sleep-cycles 100 --sleep-levels 1,2
    python vllm_serve.py --site FOLDER                              with a folder of unpacked packages, see bundle.py

Several servers (`--kinds`) serve the same requests. They take turns in `--rounds` rounds. The report compares tokens (where
native repeats itself), tokens per second (medians), memory, windows and start-up time. A server is one process, or with tensor
parallelism one and another for each GPU:

native, native_again                 PyTorch's allocator
symmalloc                            symmalloc installed
native_custom, symmalloc_custom      the same, and vLLM's custom all-reduce
native_windows, symmalloc_windows    the same, and all-reduces in vLLM's symmetric memory (VLLM_USE_NCCL_SYMM_MEM=1)
pools                                symmalloc installed, and all-reduces in symmalloc's pools
symmalloc_sleep, pools_sleep         symmalloc or pools, and the sleep mode on symmalloc's pools
symmalloc_backend                    the sleep mode's backend is symmalloc's (vLLM 0.33)
native_graphs, symmalloc_graphs      the memory of CUDA graphs sleeps as well (vLLM 0.33), vLLM's or in symmalloc's pools

The KV cache has a fixed size, because vLLM otherwise fills the GPU. With `--sleep-cycles N`, the servers of `--sleep-kinds` also
run vLLM's sleep mode N times at each of the `--sleep-levels`, and compare the tokens before and after. With `--partial`, the
weights wake first, and the KV cache afterwards.

The model is a small Llama with vLLM's dummy weights, which are deterministic. Prompts are token ids, so nothing is downloaded.
vLLM uses symmetric memory only on four or more GPUs: `vllm_worker.py` removes that limit.
This file is not named after the package, because Python would then import the file instead.

The folder has the wheels of vLLM and of what it needs beyond the machine's packages. To fill it, where a registry can be reached:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \\
        --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \\
        --platform manylinux1_x86_64 -d FOLDER -r vllm_wheels/0.22.0.txt

`VERSIONS` lists the versions of vLLM that were run, and the PyTorch that each needs. `NEEDED` lists the packages that vLLM imports.
Only packages that the machine lacks are installed. A folder of `bundle.py` has its own PyTorch, and comes first on the path.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSIONS = {"0.22.0": "2.11.0", "0.33.0": "2.14.0"}
"""The versions of vLLM that this job was run with, and the versions of PyTorch for which they are built."""
NEEDED = (
    "vllm", "xgrammar", "apache_tvm_ffi", "blake3", "cachetools", "cbor2", "cloudpickle", "compressed_tensors", "depyf",
    "diskcache", "einops", "fastapi", "gguf", "lark", "llguidance", "lm_format_enforcer", "mistral_common", "msgspec", "numba",
    "llvmlite", "openai", "openai_harmony", "outlines_core", "partial_json_parser", "prometheus_client", "pybase64", "py_cpuinfo",
    "pydantic", "pydantic_core", "pyzmq", "setproctitle", "starlette", "uvloop", "watchfiles",
)  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
REQUESTS, SEED = 300, 42
KV_CACHE_BYTES = 4 << 30
STACK_SECONDS = 5.0
"""The time that processes have to write their stacks."""
WHEEL = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")


@dataclass(frozen=True)
class Kind:
    """One kind of server."""

    plug_in: str = ""
    """The value of `SYMMALLOC_VLLM`; empty for PyTorch's allocator."""
    has_windows: bool = False
    """`True` if all-reduces are in symmetric memory."""
    has_custom: bool = False
    """`True` if vLLM's custom all-reduce is on."""
    backend: str = "cumem"
    """The backend of the sleep mode. Versions without backends have only this one."""
    graphs_sleep: bool = False
    """`True` if the memory of CUDA graphs sleeps as well."""

    def resembles(self, other: Kind) -> bool:
        """Returns `True` if the speed of the two can be compared: if both use the same all-reduce."""
        return (self.has_windows, self.has_custom) == (other.has_windows, other.has_custom)

    def sleep_options(self) -> dict[str, Any]:
        """Returns vLLM's options for the sleep mode that differ from its defaults."""
        options: dict[str, Any] = {} if self.backend == "cumem" else {"sleep_mode_backend": self.backend}
        return options | ({"sleep_mode_offload_cudagraph": True} if self.graphs_sleep else {})


KINDS = {
    "native": Kind(),
    "native_again": Kind(),
    "symmalloc": Kind("install"),
    "native_custom": Kind(has_custom=True),
    "symmalloc_custom": Kind("install", has_custom=True),
    "native_windows": Kind(has_windows=True),
    "symmalloc_windows": Kind("install", has_windows=True),
    "pools": Kind("pools", has_windows=True),
    "symmalloc_sleep": Kind("sleep"),
    "pools_sleep": Kind("pools,sleep", has_windows=True),
    "symmalloc_backend": Kind("sleep", backend="symmalloc"),
    "native_graphs": Kind(graphs_sleep=True),
    "symmalloc_graphs": Kind("sleep", graphs_sleep=True),
}


# A server that does not answer is asked for its stacks. Processes that import this file have this handler, too.
faulthandler.register(signal.SIGUSR1)


class Unusable(Exception):
    """The job cannot run. The text states what is missing, and what to do."""


class MissingWheel(Unusable):
    """The folder lacks a wheel."""


class OddFile(Unusable):
    """A file of the folder is not a wheel."""


class VersionMismatch(Unusable):
    """A package has another version than the one that this job was written for."""


def requests(count: int = REQUESTS) -> list[tuple[list[int], int]]:
    """Returns the prompts and the numbers of tokens to generate."""
    draw = random.Random(SEED)
    return [
        ([draw.randrange(3, CONFIG["vocab_size"]) for _ in range(draw.randrange(16, 1024))], draw.randrange(16, 256))
        for _ in range(count)
    ]


def check_wheels(folder: Path) -> list[Path]:
    """Returns the wheels of a folder. Raises `MissingWheel`, `VersionMismatch` and `OddFile`."""
    wheels = sorted(folder.glob("*.whl"))
    there: dict[str, str] = {}
    for wheel in wheels:
        if (parts := WHEEL.fullmatch(wheel.name)) is None:
            raise OddFile(
                f"{wheel} is not named like a wheel (name-version-python-abi-platform.whl): remove or rename it"
            )
        there[normal(parts["name"])] = parts["version"]
    if missing := [name for name in NEEDED if name not in there and not _is_installed(name)]:
        raise MissingWheel(
            f"{folder} has no wheel of {', '.join(missing)}: download it as this file's documentation says"
        )
    version = importlib.metadata.version("vllm") if _is_installed("vllm") else there["vllm"]
    if version not in VERSIONS:
        raise VersionMismatch(f"vLLM is {version}: this job needs {known_versions()}")
    return wheels


def known_versions() -> str:
    return " or ".join(f"{version} (PyTorch {torch})" for version, torch in VERSIONS.items())


def check_torch(version: str) -> None:
    """Raises `VersionMismatch` if vLLM was not built for this PyTorch."""
    vllm = importlib.metadata.version("vllm")
    if VERSIONS.get(vllm) != version.split("+")[0]:
        raise VersionMismatch(f"vLLM {vllm} and PyTorch {version} do not fit: this job needs vLLM {known_versions()}")


def check_engine(llm: Any) -> None:
    """Raises `VersionMismatch` if the engine lacks the functions of the sleep mode."""
    for name in ("sleep", "wake_up"):
        if not hasattr(llm, name):
            raise VersionMismatch(f"vLLM {importlib.metadata.version('vllm')} has no LLM.{name}: use {known_versions()}")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpack(wheels: list[Path], site: Path) -> None:
    """Installs the wheels to a folder, except for those of packages that the machine has."""
    new = [str(wheel) for wheel in wheels if not _is_installed(wheel.name.split("-")[0])]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        str(site),
    ]
    subprocess.run([*command, *new], check=True)


def link_libraries(folder: Path) -> None:
    """Links NCCL and CUDA's runtime under the names that a linker uses, which wheels lack. vLLM compiles against NCCL."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    for name in ("nccl", "cudart"):
        found = [path for root in roots for path in sorted(Path(root).glob(f"*/lib/lib{name}.so.*"))]
        if found and not (folder / f"lib{name}.so").exists():
            (folder / f"lib{name}.so").symlink_to(found[0])


def runtime_path() -> str:
    """Returns `LD_LIBRARY_PATH` with the folder of CUDA's runtime, without which a library that needs it cannot be preloaded."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [str(path.parent) for root in roots for path in sorted(Path(root).glob("*/lib/libcudart.so.*"))]
    return os.pathsep.join(filter(None, [*found[:1], os.environ.get("LD_LIBRARY_PATH")]))


def cccl() -> str | None:
    """Returns the folder of CUDA 13's header `nv/target`, which NCCL's header includes, and host compilers do not find."""
    nvcc = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME"),
        None if nvcc is None else str(Path(nvcc).resolve().parents[1]),
        "/usr/local/cuda",
    ]
    found = [Path(home) / "include" / "cccl" for home in homes if home]
    return next((str(folder) for folder in found if folder.is_dir()), None)


def write_entry_point(folder: Path) -> None:
    """Writes the metadata with which vLLM finds symmalloc's plug-in, for a symmalloc that runs from a checkout."""
    metadata = folder / "symmalloc_from_checkout-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: symmalloc-from-checkout\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nsymmalloc = symmalloc.vllm:register\n")


@dataclass(frozen=True)
class Setup:
    """The settings that all servers share."""

    site: Path
    """The packages of the wheels."""
    scratch: Path
    """A folder for the model, libraries and metadata."""
    out: Path
    """The report; logs are next to it."""
    ranks: int
    """The number of GPUs."""
    requests: int
    answer_seconds: float
    """A server that has not answered after this time is ended."""

    def prepare(self) -> None:
        (self.scratch / "model").mkdir()
        (self.scratch / "model" / "config.json").write_text(json.dumps(CONFIG))
        for name in ("lib", "tmp", "metadata"):
            (self.scratch / name).mkdir()
        link_libraries(self.scratch / "lib")
        if not any(
            point.name == "symmalloc" for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        ):
            write_entry_point(self.scratch / "metadata")

    def environment(self, kind: Kind, log: Path) -> dict[str, str]:
        """Returns the environment of a server. vLLM's processes inherit it, and find the packages through it."""
        metadata, site, here = self.scratch / "metadata", self.site, Path(__file__).resolve().parent
        path = [os.environ.get("PYTHONPATH"), str(metadata), str(site), str(here)]
        libraries = [str(self.scratch / "lib"), os.environ.get("LIBRARY_PATH")]
        headers = [cccl(), os.environ.get("CPATH")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)), "LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "CPATH": os.pathsep.join(filter(None, headers)),
            # The sampler's seed and the scheduler are in one process, and so is the worker of a single GPU.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "VLLM_USE_DEEP_GEMM": "0", "VLLM_DEEP_GEMM_WARMUP": "skip", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            # Standard output has the answers, and each worker shares it.
            "VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
            "SYMMALLOC_VLLM": kind.plug_in, "VLLM_USE_NCCL_SYMM_MEM": str(int(kind.has_windows)),
            # vLLM compiles its allocator of symmetric memory in the temporary folder. A killed compilation leaves a lock there.
            "TMPDIR": os.environ.get("TMPDIR") or str(self.scratch / "tmp"),
        }  # fmt: skip
        if kind.has_windows:
            environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{log}.nccl.%p"}
        return environment


class Server:
    """A process that serves the requests."""

    kinds: Mapping[str, Kind] = KINDS

    def __init__(self, name: str, setup: Setup, *, has_sleep: bool = False) -> None:
        """Starts the process, without waiting for it."""
        self.name, self._answer_seconds = name, setup.answer_seconds
        self.log = setup.out.with_suffix(f".{'sleep-' if has_sleep else ''}{name}.log")
        command = [
            sys.executable, __file__, "--serve", name, "--site", str(setup.site), "--model", str(setup.scratch / "model"),
            "--tensor-parallel", str(setup.ranks), "--requests", str(setup.requests), *["--sleep-mode"] * has_sleep,
        ]  # fmt: skip
        self._start(command, setup.environment(KINDS[name], self.log))

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        self._is_given_up = self._has_ended = False
        # The processes of the server are signaled as a group.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True,
            start_new_session=True,
        )  # fmt: skip

    def ready(self) -> dict[str, Any]:
        """Waits until the engine has started. Raises `Unusable` if its workers do not have the allocator of this kind."""
        answer, has_symmalloc = self._answer(), bool(self.kinds[self.name].plug_in)
        if any(worker["installed"] != has_symmalloc for worker in answer["workers"]):
            raise Unusable(f"a worker of {self.name} has another allocator, see `installed`: {answer['workers']}")
        return answer

    def ask(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer states how the process has ended
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(self._answer_seconds, self._give_up)
        timer.start()
        try:
            line = next((line for line in self._process.stdout if line.startswith("ANSWER ")), None)
        finally:
            timer.cancel()
            timer.join()
        end = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-40:])
        if self._is_given_up:
            why = f"did not answer for {self._answer_seconds} s and was ended; its stacks are in {self.log}:"
            raise Unusable(f"{self.name} {why}\n{end}")
        if line is None:
            raise Unusable(f"{self.name} ended with {self._process.wait()}, see {self.log}:\n{end}")
        return json.loads(line[7:])  # type: ignore[no-any-return]

    def _give_up(self) -> None:
        """Signals the server's processes to write their stacks to the log, and then ends them."""
        self._is_given_up = True
        self._signal(signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Sends a signal to the server and the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self, seconds: float = 60.0) -> None:
        """Ends the process. It has this time after its input was closed."""
        if self._has_ended:
            return
        self.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._has_ended = True

    def close(self) -> None:
        """Closes the input, so that the process begins to end."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kernels(self) -> dict[str, int]:
        """Counts NCCL's symmetric all-reduces outside of replays, by kernel. The first rank writes them to its log."""
        kernels: Counter[str] = Counter()
        for log in self.log.parent.glob(f"{self.log.name}.nccl.*"):
            text = log.read_text(errors="replace")
            kernels.update(re.findall(r"AllReduce \[Symmetric\]: \d+ Bytes -> Kernel (\S+)", text))
        return dict(kernels)


def serve(arguments: argparse.Namespace) -> None:
    """Starts an engine in a separate process, and answers requests from its standard input."""
    began = time.perf_counter()
    kind, ranks = KINDS[arguments.serve], arguments.tensor_parallel
    # The folder of this file comes last: a job must not shadow a package. So does the folder of packages, unless it has PyTorch.
    here = str(Path(__file__).resolve().parent)
    sys.path = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != here]
    has_torch = (arguments.site / "torch").is_dir()
    sys.path = [*[str(arguments.site)] * has_torch, *sys.path, *[str(arguments.site)] * (not has_torch), here]
    import torch

    check_torch(torch.__version__)
    answer_of: dict[str, Any] = {}
    if ranks == 1:
        if kind.plug_in:
            # The worker is in this process, which measures before vLLM calls the plug-in.
            from symmalloc import vllm as plug_in

            plug_in.register()
        answer_of["free_before"] = torch.cuda.mem_get_info()[0]
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=str(arguments.model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=SEED,
        max_model_len=2048, gpu_memory_utilization=0.1, kv_cache_memory_bytes=KV_CACHE_BYTES, enable_prefix_caching=False,
        enable_sleep_mode=arguments.sleep_mode, tensor_parallel_size=ranks, disable_custom_all_reduce=not kind.has_custom,
        **kind.sleep_options() if arguments.sleep_mode else {},
        worker_extension_cls="vllm_worker.Extension",
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, max_num_seqs=128,
    )  # fmt: skip
    check_engine(llm)
    work = requests(arguments.requests)
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens, _ in work]
    parameters = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in work
    ]

    def facts() -> list[dict[str, Any]]:
        return llm.collective_rpc("job_facts")  # type: ignore[no-any-return]

    def run() -> dict[str, Any]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {
            "seconds": seconds,
            "tokens": sum(map(len, tokens)),
            "digests": [hashlib.sha256(repr(one).encode()).hexdigest()[:16] for one in tokens],
            "workers": facts(),
        }

    def reload() -> float:
        start = time.perf_counter()
        llm.collective_rpc("job_reload")
        return time.perf_counter() - start

    def sleep_cycles(level: int, count: int, is_partial: int) -> dict[str, Any]:
        run()  # Not compared: the first run also compiles kernels.
        before = run()
        free, slept, woken, reloaded = [one["free_bytes"] for one in facts()], [], [], []
        returned = 0
        for cycle in range(count):
            start = time.perf_counter()
            llm.sleep(level=level)
            slept.append(time.perf_counter() - start)
            if cycle == count - 1:
                returned = min(one["free_bytes"] - awake for one, awake in zip(facts(), free, strict=True))
            start = time.perf_counter()
            llm.wake_up(["weights"] if is_partial else None)
            llm.collective_rpc("job_synchronize")
            woken.append(time.perf_counter() - start)
            if level == 2:
                if cycle == count - 1:
                    llm.collective_rpc("job_damage")
                reloaded.append(reload())
            if is_partial:
                start = time.perf_counter()
                llm.wake_up(["kv_cache"])
                llm.collective_rpc("job_synchronize")
                woken[-1] += time.perf_counter() - start
        after = run()
        return {
            "level": level, "cycles": count, "is_partial": bool(is_partial), "sleep_seconds": statistics.median(slept),
            "wake_seconds": statistics.median(woken), "reload_seconds": statistics.median(reloaded) if reloaded else None,
            "returned_bytes": returned, "equal_tokens": before["digests"] == after["digests"],
            "equal_requests": equal(before["digests"], after["digests"]), "digests": after["digests"],
            "new_windows": new_windows(before["workers"], after["workers"]),
            "grown_bytes": [one["free_bytes"] - other["free_bytes"]
                            for one, other in zip(before["workers"], after["workers"], strict=True)],
        }  # fmt: skip

    def answer(what: dict[str, Any]) -> None:
        print("\nANSWER " + json.dumps(what), flush=True)

    answer_of |= {"start_seconds": time.perf_counter() - began, "workers": facts()}
    answer_of |= {"vllm": importlib.metadata.version("vllm"), "torch": torch.__version__}
    if ranks == 1:
        answer_of["device_bytes"] = answer_of.pop("free_before") - torch.cuda.mem_get_info()[0]
    answer(answer_of)
    for line in sys.stdin:
        command, *numbers = line.split()
        answer(run() if command == "run" else sleep_cycles(*map(int, numbers)))


def equal(one: list[str], other: list[str]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def new_windows(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """Returns the number of windows that all workers registered between two reports."""
    new = 0
    for one, other in zip(before, after, strict=True):
        new += other["windows_of_engine"] - one["windows_of_engine"]
        there = [tuple(window.values()) for window in one.get("windows_of_symmalloc", [])]
        new += sum(tuple(window.values()) not in there for window in other.get("windows_of_symmalloc", []))
    return new


def peak(workers: list[dict[str, Any]], name: str) -> int:
    return max(worker[name] or 0 for worker in workers)


@dataclass(frozen=True)
class Cycles:
    """The cycles of the sleep mode."""

    levels: list[int]
    count: int
    names: list[str]
    """The kinds of servers that sleep."""
    is_partial: bool = False
    """`True` if each level also has cycles in which the weights wake first."""

    def run(self, server: Server) -> list[dict[str, Any]]:
        """Runs the cycles of each level, and returns their reports."""
        ways = (0, 1) if self.is_partial else (0,)
        done = [server.ask(f"sleep {level} {self.count} {way}") for level in self.levels for way in ways]
        for one in done:
            one["digests"] = hashlib.sha256(repr(one["digests"]).encode()).hexdigest()[:16]
            print(server.name, one, flush=True)
        return done


class Field:
    """The servers that are compared. A server that fails is left out from then on, and the report states why."""

    def __init__(self, setup: Setup, names: list[str], *, has_sleep: bool) -> None:
        self._setup, self.names, self._has_sleep = setup, list(names), has_sleep
        self.servers: dict[str, Server] = {}
        self.report: dict[str, dict[str, Any]] = {name: {} for name in names}

    def start(self, *, together: bool) -> None:
        for name in list(self.names):
            self.servers[name] = Server(name, self._setup, has_sleep=self._has_sleep)
            if not together:
                self._try(name, "ready")
        for name in list(self.names) if together else []:
            self._try(name, "ready")

    def run(self) -> dict[str, dict[str, Any]]:
        """Lets each server serve the requests, in turns."""
        done = {name: self._try(name, "run") for name in list(self.names)}
        return {name: one for name, one in done.items() if one is not None}

    def end(self) -> None:
        for server in self.servers.values():
            server.close()
        for server in self.servers.values():
            server.end(20.0)

    def _try(self, name: str, request: str) -> dict[str, Any] | None:
        server = self.servers[name]
        try:
            answer = server.ready() if request == "ready" else server.ask(request)
        except Unusable as why:
            self.report[name]["failed"] = str(why)
            self.names.remove(name)
            print(f"{name} failed: {why}", flush=True)
            return None
        if request == "ready":
            self.report[name]["ready"] = answer
        print(name, request, {key: value for key, value in answer.items() if key.endswith("seconds")}, flush=True)
        return answer


def compare(
    setup: Setup, names: list[str], rounds_of_each: int, cycles: Cycles | None, *, together: bool
) -> dict[str, Any]:
    """Runs the servers in turns, and returns the report. Raises `Unusable` without a native server.

    With `cycles`, the servers then sleep. The report is written before that.
    """
    field = Field(setup, names, has_sleep=cycles is not None)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        field.start(together=together)
        warm = field.run()  # Not measured: the first round also compiles kernels.
        for _ in range(rounds_of_each):
            for name, one in field.run().items():
                rounds[name].append(one)
        report: dict[str, Any] = {
            "requests": setup.requests, "kv_cache_bytes": KV_CACHE_BYTES, "gpus": setup.ranks,
            "started_together": together, "has_sleep_mode": cycles is not None, **field.report,
        }  # fmt: skip
        evaluate(report, field, warm, rounds)
        setup.out.write_text(json.dumps(report, indent=1))
        for name in cycles.names if cycles is not None else []:
            if name in field.names:
                report[f"sleep_{name}"] = slept_or_failed(cycles, field.servers[name])
                setup.out.write_text(json.dumps(report, indent=1))
    finally:
        field.end()
    return report


def evaluate(
    report: dict[str, Any],
    field: Field,
    warm: dict[str, dict[str, Any]],
    rounds: dict[str, list[dict[str, Any]]],
    known: Mapping[str, Kind] = KINDS,
) -> None:
    """Adds the figures of each server that did not fail, compared with native. Raises `Unusable` without a native server."""
    natives = [name for name in field.names if not known[name].plug_in]
    if not natives:
        raise Unusable(f"no native server is left: {report}")
    for name in field.names:
        done = rounds[name]
        speeds = [one["tokens"] / one["seconds"] for one in done]
        report[name] |= {
            "tokens_per_second": statistics.median(speeds), "all": speeds, "tokens": done[0]["tokens"],
            "reserved_bytes_peak": peak(done[-1]["workers"], "reserved_bytes_peak"),
            "allocated_bytes_peak": peak(done[-1]["workers"], "allocated_bytes_peak"),
            "repeats_itself": [equal(done[0]["digests"], one["digests"]) for one in done],
            "new_windows": new_windows(warm[name]["workers"], done[-1]["workers"]),
            "workers": done[-1]["workers"], "symmetric_kernels": field.servers[name].kernels(),
        }  # fmt: skip
    count = report["requests"]
    stable = [at for at in range(count) if len({one["digests"][at] for name in natives for one in rounds[name]}) == 1]
    report["requests_where_native_repeats_itself"] = len(stable)
    first = rounds[natives[0]][0]["digests"]
    for name in field.names:
        if known[name].plug_in:
            report[name]["equal_requests"] = sum(
                all(one["digests"][at] == first[at] for one in rounds[name]) for at in stable
            )
        alike = [native for native in natives if known[native].resembles(known[name])]
        reference = (alike or natives)[0]
        report[name]["speed"] = report[name]["tokens_per_second"] / report[reference]["tokens_per_second"]
        of_rounds = [one / other for one, other in zip(report[name]["all"], report[reference]["all"], strict=True)]
        report[name]["speed_of_rounds"] = statistics.median(of_rounds)
        report[name]["speed_compared_with"] = reference


def slept_or_failed(cycles: Cycles, server: Server) -> Any:
    try:
        return cycles.run(server)
    except Unusable as why:
        print(f"{server.name} failed to sleep: {why}", flush=True)
        return {"failed": str(why)}


def sleep(setup: Setup, name: str, cycles: Cycles) -> Any:
    """Runs the cycles on a separate server, and returns their reports."""
    server = Server(name, setup, has_sleep=True)
    try:
        server.ready()
        return cycles.run(server)
    except Unusable as why:
        print(f"{name} failed to sleep: {why}", flush=True)
        return {"failed": str(why)}
    finally:
        server.end()


def kinds(known: Mapping[str, Kind]) -> Any:
    """Returns a reader of lists of kinds, for a command line."""

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown kind {unknown[0]!r}: use {', '.join(known)}")
        return names

    return read


def levels(text: str) -> list[int]:
    """Reads a list of sleep levels, for a command line."""
    if any(word not in ("1", "2") for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of levels: use 1, 2 or 1,2")
    return [int(word) for word in text.split(",")]


def at_least(least: int) -> Any:
    """Returns a reader of numbers, for a command line."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return read


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheels", type=Path, help="folder of wheels")
    parser.add_argument("--site", type=Path, help="folder with the wheels' packages; default: a temporary one")
    parser.add_argument("--out", type=Path, default=Path("vllm.json"), help="the report; logs are next to it")
    parser.add_argument("--tensor-parallel", type=at_least(1), default=1, metavar="GPUS", help="the number of GPUs")
    parser.add_argument(
        "--kinds",
        type=kinds(KINDS),
        help="default: native, native_again, symmalloc; on several GPUs those with windows",
    )
    parser.add_argument("--requests", type=at_least(1), default=REQUESTS)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="measured rounds of each process")
    parser.add_argument("--only-sleep", action="store_true", help="do not measure rounds")
    parser.add_argument("--sleep-cycles", type=at_least(0), default=0, help="also sleep and wake this many times")
    parser.add_argument("--sleep-levels", type=levels, default=[1], metavar="LEVELS", help="1, 2 or 1,2; default: 1")
    parser.add_argument(
        "--sleep-kinds", type=kinds(KINDS), help="default: native, symmalloc; on several GPUs those with windows"
    )
    parser.add_argument("--partial", action="store_true", help="also wake the weights first, and the KV cache afterwards")
    parser.add_argument(
        "--sleep-in-place", action="store_true", help="the measured servers have the sleep mode, and then sleep"
    )
    parser.add_argument(
        "--answer-seconds",
        type=at_least(1),
        default=300,
        help="end a server that does not answer for this long; all cycles of a level are one answer; default: 300",
    )
    parser.add_argument("--serve", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sleep-mode", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = command_line()
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    several = arguments.tensor_parallel > 1
    names = arguments.kinds or (
        ["native", "native_windows", "symmalloc_windows", "pools"]
        if several
        else ["native", "native_again", "symmalloc"]
    )
    asleep = arguments.sleep_kinds or (["native_windows", "symmalloc_windows"] if several else ["native", "symmalloc"])
    if all(KINDS[name].plug_in for name in names):
        parser.error("--kinds needs a native kind, with which the others are compared")
    if arguments.only_sleep and not arguments.sleep_cycles:
        parser.error("--only-sleep needs --sleep-cycles")
    if arguments.sleep_in_place and (
        arguments.only_sleep or not arguments.sleep_cycles or not set(asleep) <= set(names)
    ):
        parser.error("--sleep-in-place needs --sleep-cycles, measured rounds, and --sleep-kinds that are among --kinds")
    report: dict[str, Any] = {}
    # Servers are no longer signaled with this process: they end when it closes their input.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if arguments.site is None and arguments.wheels is None:
            raise MissingWheel("no wheels are given: use --wheels FOLDER")
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            site = arguments.site or scratch / "site"
            if arguments.wheels is not None:
                unpack(check_wheels(arguments.wheels), site)
            setup = Setup(
                site,
                scratch,
                arguments.out.resolve(),
                arguments.tensor_parallel,
                arguments.requests,
                arguments.answer_seconds,
            )
            setup.prepare()
            cycles = Cycles(arguments.sleep_levels, arguments.sleep_cycles, asleep, arguments.partial)
            if not arguments.only_sleep:
                in_place = cycles if arguments.sleep_in_place else None
                report = compare(setup, names, arguments.rounds, in_place, together=several)
                arguments.out.write_text(json.dumps(report, indent=1))
            for name in asleep if cycles.count and not arguments.sleep_in_place else []:
                report[f"sleep_{name}"] = sleep(setup, name, cycles)
                arguments.out.write_text(json.dumps(report, indent=1))
    except Unusable as why:
        sys.exit(f"{type(why).__name__}: {why}")
    print(json.dumps(report, indent=1))
    sys.exit(any(isinstance(one, dict) and "failed" in one for one in report.values()))


if __name__ == "__main__":
    main()
