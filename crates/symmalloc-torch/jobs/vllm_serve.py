"""Serves 300 requests of varying length with vLLM 0.22.0, offline, on PyTorch's native allocator and on symmalloc.

    python vllm_serve.py --wheels FOLDER --out report.json          on a machine with a GPU, PyTorch 2.11.0 and symmalloc

Three processes serve the same requests: native, native again, and symmalloc. They start one after the other, and then take turns
in `--rounds` rounds. The report compares tokens (where native repeats itself), tokens per second (medians), memory and start-up time.
The KV cache has a fixed size, because vLLM otherwise fills the GPU. With `--sleep-cycles N`, native and symmalloc also run vLLM's
sleep mode N times at level 1, and compare the tokens before and after.

The model is a small Llama with vLLM's dummy weights, which are deterministic. Prompts are token ids, so nothing is downloaded.
This file is not named after the package, because Python would then import the file instead.

The folder has the wheels of vLLM and of what it needs beyond the machine's packages. To fill it, where a registry can be reached:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \\
        --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \\
        --platform manylinux1_x86_64 -d FOLDER -r vllm_wheels.txt

The folder then has 381 MB. `NEEDED` lists the packages that vLLM imports. Only packages that the machine lacks are installed, to a
folder that is last on the path.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VLLM = "0.22.0"
TORCH = "2.11.0"
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


class Unusable(Exception):
    """The job cannot run. The text states what is missing, and what to do."""


class MissingWheel(Unusable):
    """The folder lacks a wheel."""


class OtherVersion(Unusable):
    """A package has another version than the one that this job was written for."""


def requests() -> list[tuple[list[int], int]]:
    """Returns the prompts and the numbers of tokens to generate."""
    draw = random.Random(SEED)
    return [
        ([draw.randrange(3, CONFIG["vocab_size"]) for _ in range(draw.randrange(16, 1024))], draw.randrange(16, 256))
        for _ in range(REQUESTS)
    ]


def check_wheels(folder: Path) -> list[Path]:
    """Returns the wheels of a folder. Raises `MissingWheel` and `OtherVersion`."""
    wheels = sorted(folder.glob("*.whl"))
    there = {wheel.name.split("-")[0].lower().replace(".", "_"): wheel for wheel in wheels}
    if missing := [name for name in NEEDED if name not in there and not _is_installed(name)]:
        raise MissingWheel(
            f"{folder} has no wheel of {', '.join(missing)}: download it as this file's documentation says"
        )
    if (version := there["vllm"].name.split("-")[1]) != VLLM:
        raise OtherVersion(f"{folder} has vLLM {version}: this job needs {VLLM}, which is built for PyTorch {TORCH}")
    return wheels


def check_engine(llm: Any) -> None:
    """Raises `OtherVersion` if the engine lacks the functions of the sleep mode."""
    for name in ("sleep", "wake_up"):
        if not hasattr(llm, name):
            raise OtherVersion(f"vLLM {importlib.metadata.version('vllm')} has no LLM.{name}: use {VLLM}")


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


class Server:
    """A process that serves the requests."""

    def __init__(self, allocator: str, site: Path, model: Path, log: Path, more: list[str]) -> None:
        # vLLM starts processes that must find its packages too.
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))
        environment = os.environ | {
            "PYTHONPATH": path,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
            # The sampler's seed and the scheduler are in one process.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }  # fmt: skip
        command = [sys.executable, __file__, "--serve", allocator, "--site", str(site), "--model", str(model), *more]
        self.log = log
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )
        self.ready = self._answer()

    def ask(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])  # type: ignore[no-any-return]
        end = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-30:])
        raise Unusable(f"the process ended with {self._process.wait()}, see {self.log}:\n{end}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(allocator: str, site: Path, model: Path, has_sleep: bool) -> None:
    """Starts an engine in a separate process, and answers requests from its standard input."""
    began = time.perf_counter()
    # The packages of the machine come first. The folder of this file is not on the path: a job must not shadow a package.
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    sys.path.append(str(site))
    import torch

    if torch.__version__.split("+")[0] != TORCH:
        raise OtherVersion(f"PyTorch is {torch.__version__}: vLLM {VLLM} needs {TORCH}")
    if allocator == "symmalloc":
        import symmalloc

        symmalloc.install()
    free_before = torch.cuda.mem_get_info()[0]
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=SEED, max_model_len=2048,
        gpu_memory_utilization=0.1, kv_cache_memory_bytes=KV_CACHE_BYTES, enable_prefix_caching=False,
        enable_sleep_mode=has_sleep,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, max_num_seqs=128,
    )  # fmt: skip
    check_engine(llm)
    work = requests()
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens, _ in work]
    parameters = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in work
    ]

    def run() -> dict[str, Any]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        statistics_of = torch.cuda.memory_stats()
        return {
            "seconds": seconds,
            "tokens": sum(map(len, tokens)),
            "digests": [hashlib.sha256(repr(one).encode()).hexdigest()[:16] for one in tokens],
            "reserved_bytes_peak": statistics_of.get("reserved_bytes.all.peak"),
            "allocated_bytes_peak": statistics_of.get("allocated_bytes.all.peak"),
        }

    def sleep_cycles(count: int) -> dict[str, Any]:
        before = run()
        total, slept, woken = torch.cuda.mem_get_info()[0], [], []
        free_asleep = 0
        for _ in range(count):
            start = time.perf_counter()
            llm.sleep(level=1)
            slept.append(time.perf_counter() - start)
            free_asleep = torch.cuda.mem_get_info()[0]
            start = time.perf_counter()
            llm.wake_up()
            torch.cuda.synchronize()
            woken.append(time.perf_counter() - start)
        after = run()
        return {
            "cycles": count, "sleep_seconds": statistics.median(slept), "wake_seconds": statistics.median(woken),
            "returned_bytes": free_asleep - total, "equal_tokens": before["digests"] == after["digests"],
        }  # fmt: skip

    def answer(what: dict[str, Any]) -> None:
        print("ANSWER " + json.dumps(what), flush=True)

    used = free_before - torch.cuda.mem_get_info()[0]
    answer(
        {
            "start_seconds": time.perf_counter() - began,
            "device_bytes": used,
            "torch_reserved": torch.cuda.memory_reserved(),
        }
    )
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        answer(run() if command == "run" else sleep_cycles(int(argument)))


def equal(one: list[str], other: list[str]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def compare(site: Path, out: Path, rounds_of_each: int, sleep_cycles: int) -> dict[str, Any]:
    """Runs the processes and returns the report."""
    report: dict[str, Any] = {"vllm": VLLM, "torch": TORCH, "requests": REQUESTS, "kv_cache_bytes": KV_CACHE_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(CONFIG))
        names = {"native": "native", "native_again": "native", "symmalloc": "symmalloc"}
        servers: dict[str, Server] = {}
        try:
            for name, allocator in names.items():
                servers[name] = Server(allocator, site, model, out.with_suffix(f".{name}.log"), [])
                report[name] = {"ready": servers[name].ready}
                print(name, servers[name].ready, flush=True)
            for server in servers.values():
                server.ask("run")  # Not measured: the first round also compiles kernels.
            rounds = {name: [] for name in names}
            for _ in range(rounds_of_each):
                for name, server in servers.items():
                    rounds[name].append(server.ask("run"))
        finally:
            for server in servers.values():
                server.end()
        for name, done in rounds.items():
            speeds = [one["tokens"] / one["seconds"] for one in done]
            report[name] |= {
                "tokens_per_second": statistics.median(speeds), "all": speeds, "tokens": done[0]["tokens"],
                "reserved_bytes_peak": done[-1]["reserved_bytes_peak"], "allocated_bytes_peak": done[-1]["allocated_bytes_peak"],
                "repeats_itself": [equal(done[0]["digests"], one["digests"]) for one in done],
            }  # fmt: skip
        first = {name: done[0]["digests"] for name, done in rounds.items()}
        stable = [
            at for at in range(REQUESTS)
            if len({one["digests"][at] for name in ("native", "native_again") for one in rounds[name]}) == 1
        ]  # fmt: skip
        report["requests_where_native_repeats_itself"] = len(stable)
        report["of_those_equal_on_symmalloc"] = sum(first["native"][at] == first["symmalloc"][at] for at in stable)
        report["speed"] = report["symmalloc"]["tokens_per_second"] / report["native"]["tokens_per_second"]
        out.write_text(json.dumps(report, indent=1))
        if sleep_cycles:
            for allocator in ("native", "symmalloc"):
                server = Server(allocator, site, model, out.with_suffix(f".sleep-{allocator}.log"), ["--sleep-mode"])
                try:
                    report[f"sleep_{allocator}"] = server.ask(f"sleep {sleep_cycles}")
                finally:
                    server.end()
                print(allocator, report[f"sleep_{allocator}"], flush=True)
                out.write_text(json.dumps(report, indent=1))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheels", type=Path, help="folder of wheels")
    parser.add_argument("--out", type=Path, default=Path("vllm.json"), help="the report; logs lie beside it")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each process")
    parser.add_argument("--sleep-cycles", type=int, default=0, help="also sleep and wake this many times")
    parser.add_argument("--serve", choices=["native", "symmalloc"], help=argparse.SUPPRESS)
    parser.add_argument("--site", type=Path, help="folder with the wheels' packages; default: a temporary one")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sleep-mode", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.site, arguments.model, arguments.sleep_mode)
        return
    try:
        if arguments.site is None and arguments.wheels is None:
            raise MissingWheel("no wheels are given: use --wheels FOLDER")
        with tempfile.TemporaryDirectory() as folder:
            site = arguments.site or Path(folder)
            if arguments.wheels is not None:
                unpack(check_wheels(arguments.wheels), site)
            report = compare(site, arguments.out, arguments.rounds, arguments.sleep_cycles)
    except Unusable as why:
        sys.exit(f"{type(why).__name__}: {why}")
    print(json.dumps({key: value for key, value in report.items() if key != "all"}, indent=1))


if __name__ == "__main__":
    main()
