"""FSDP training and an inference engine that take turns on the same GPUs, in two processes per rank, on a small random model.

    colocate.py --ranks 2 --turns 200                          a plain PyTorch engine, on symmalloc, compared with a reference
    colocate.py --ranks 2 --engine vllm --site SITE            vLLM 0.33 with tensor parallelism, see bundle.py
    colocate.py --memory torch_memory_saver --turns 20         the same turns on another library's memory
    colocate.py --engine vllm --memory cumem --turns 20        vLLM's sleep mode; the trainer moves its state to the host
    colocate.py --deny-ptrace                                  without the right to call ptrace and pidfd_getfd, as in a container
    colocate.py --kill all                                     kills a rank in each phase of a turn
    colocate.py --ranks 1 --kill all --together 6              on one GPU, six jobs at a time
    colocate.py --device cpu                                   tests the flow without a GPU

    trainer  | train 3 steps | releases | gives its weights ─► loaded | asleep: nothing on the device     | wakes, next turn
    engine   | asleep                   | wakes its weights, copies   | wakes its KV cache, generates     | releases

The reference has the same trainer and engine without sleep, and copies the weights through a file. A run passes if its losses and
tokens are equal to the reference's, if the memory at each point of a turn is equal from turn 3 to the last, and if weights are loaded
at half of the bandwidth of a plain copy on the device, or faster. Ranks share a GPU if there are more ranks than GPUs: this needs NCCL
2.30 or later (`--nccl PATH` preloads one), and `NCCL_MULTI_RANK_GPU_ENABLE`, which the job sets.

`--memory`:

    symmalloc           symmalloc.colocate, with symmalloc in both processes
    torch_memory_saver  torch_memory_saver in both processes, weights through CUDA's IPC handles
    cumem               vLLM's sleep mode in the engine, weights through CUDA's IPC handles
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import hashlib
import json
import mmap
import os
import pickle
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
MEMORIES = ("symmalloc", "torch_memory_saver", "cumem")
TRAINER, ENGINE, REFERENCE = "trainer", "engine", "files"
PHASES = [(TRAINER, phase) for phase in ("train", "release", "update", "sleep", "wait", "wake")]
PHASES += [(ENGINE, phase) for phase in ("wait", "update", "wake", "generate", "sleep")]
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}  # fmt: skip
"""As in vllm_serve.py."""
SKIPPED = 77
"""The exit status of a process whose memory library is unavailable here."""
END_SECONDS = 5.0
"""The time that a process has to end by itself after another one has died."""
KILL_SECONDS = 60.0
"""The longest time from a kill to the end of all processes."""
RETURN_SECONDS = 5.0
"""The longest time from the end of all processes to the return of their memory."""
PRINTED_CHARACTERS = 8000
"""The end of a process's output that is printed if its run fails. An exception of vLLM takes several thousand."""
KILL_TURN = 2
STABLE_MIB = 16
STABLE_FROM = 3
POINTS = ("train", "generate", "both_asleep")


@dataclass(frozen=True)
class Config:
    """A Llama. Names and shapes are those of Hugging Face, which vLLM reads."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    length_max: int = 256

    @property
    def head(self) -> int:
        return self.width // self.heads

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": self.vocabulary,
            "hidden_size": self.width, "intermediate_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu", "initializer_range": 0.02,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip


SIZES = {
    "tiny": Config(2, 64, 128, 4, 4, 256, 64),
    "medium": Config(4, 1024, 2816, 8, 4, 8192),
    "small": Config(16, 2048, 5632, 16, 4, 32000),
    "large": Config(32, 4096, 11008, 32, 8, 32000),
}


def llama(config: Config, rank: int = 0, ranks: int = 1, reduce: Callable[[Any], Any] | None = None) -> Any:
    """Returns a model, or one rank's part of it for tensor parallelism."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    heads, kv_heads, hidden = config.heads // ranks, config.kv_heads // ranks, config.hidden // ranks
    head, width = config.head, config.width
    summed = reduce or (lambda x: x)

    def linear(of: int, to: int) -> nn.Linear:
        return nn.Linear(of, to, bias=False)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (
                linear(width, heads * head),
                linear(width, kv_heads * head),
                linear(width, kv_heads * head),
            )
            self.o_proj = linear(heads * head, width)

        def forward(self, x: torch.Tensor, cache: torch.Tensor | None, place: torch.Tensor | None) -> torch.Tensor:
            batch, length = x.shape[:2]
            q = self.q_proj(x).view(batch, length, heads, head).transpose(1, 2)
            k, v = (of(x).view(batch, length, kv_heads, head).transpose(1, 2) for of in (self.k_proj, self.v_proj))
            positions = torch.arange(length, device=x.device) if place is None else place
            angles = positions.float().unsqueeze(1) * 10000.0 ** (-torch.arange(0, head, 2, device=x.device).float() / head)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

            def turned(y: torch.Tensor) -> torch.Tensor:
                left, right = y.chunk(2, -1)
                return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

            q, k = turned(q), turned(k)

            def repeated(y: torch.Tensor) -> torch.Tensor:
                return y.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1, -1).reshape(batch, heads, y.shape[2], head)

            if cache is None:
                k, v = repeated(k), repeated(v)
                attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                cache[0].index_copy_(2, place, k)
                cache[1].index_copy_(2, place, v)
                seen = (torch.arange(config.length_max, device=x.device) <= place).view(1, 1, 1, -1)
                # Memory after this position is undefined after a sleep, and may be NaN. It is not read.
                keys, values = (repeated(torch.where(seen.transpose(2, 3), part, 0.0)) for part in cache)
                attention = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            return summed(self.o_proj(attention.transpose(1, 2).reshape(batch, length, heads * head)))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = linear(width, hidden), linear(width, hidden), linear(hidden, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return summed(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.mlp = Attention(), Mlp()
            self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)

        def forward(self, x: torch.Tensor, cache: torch.Tensor | None, place: torch.Tensor | None) -> torch.Tensor:
            x = x + self.self_attn(self.input_layernorm(x), cache, place)
            return x + self.mlp(self.post_attention_layernorm(x))

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(config.vocabulary, width)
            self.layers = nn.ModuleList(Layer() for _ in range(config.layers))
            self.norm = nn.RMSNorm(width, 1e-5)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = Inner(), linear(width, config.vocabulary)

        def forward(self, tokens: torch.Tensor, caches: Any = None, place: torch.Tensor | None = None) -> torch.Tensor:
            x = self.model.embed_tokens(tokens)
            for number, layer in enumerate(self.model.layers):
                x = layer(x, None if caches is None else caches[number], place)
            return self.lm_head(self.model.norm(x))

    return Llama()


def part_of(name: str, whole: Any, rank: int, ranks: int) -> Any:
    """Returns one rank's part of a weight for tensor parallelism, as a view."""
    if re.search(r"\.(q|k|v|gate|up)_proj\.", name):
        return whole.chunk(ranks, 0)[rank]
    if re.search(r"\.(o|down)_proj\.", name):
        return whole.chunk(ranks, 1)[rank]
    return whole


# ---- a device without a GPU: memory files, which processes share by descriptors --------------------------------------------------


class HostDescriptors:
    """Host memory in place of a device's, for `symmalloc.colocate` without a GPU. A chunk is a memory file."""

    identity = "host"

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._files: dict[tuple[int, int], int] = {}
        self.maps = 0

    def allocate(self, size_bytes: int) -> int:
        """Allocates memory that can be exported, in whole pages."""
        size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("colocate", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        address = self._mmap(0, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file)
        self._files[address, size] = file
        return address

    def chunks(self, address: int, size_bytes: int) -> list[tuple[int, int]]:
        return [chunk for chunk in sorted(self._files) if chunk[0] < address + size_bytes and address < chunk[0] + chunk[1]]

    def hold(self, chunk: tuple[int, int]) -> int:
        return self._files[chunk]  # never closed, so it names one file

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def drop(self, handle: int) -> None:
        pass

    def reserve(self, size_bytes: int) -> int:
        return self._mmap(0, size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def release(self, address: int, size_bytes: int) -> None:
        self._libc.munmap(address, size_bytes)

    def map(self, address: int, size_bytes: int, descriptor: int) -> None:
        fixed = 0x10
        self._mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, descriptor)
        self.maps += 1

    def allow(self, address: int, size_bytes: int, *, is_writable: bool) -> None:
        pass

    def unmap(self, address: int, size_bytes: int) -> None:
        fixed = 0x10
        self._mmap(address, size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1)
        self.maps -= 1

    def synchronize(self) -> None:
        pass

    def _mmap(self, *arguments: int) -> int:
        address = self._libc.mmap(*arguments, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"mmap failed with {ctypes.get_errno()}")
        return int(address)


def host_tensor(layout: Any, address: int) -> Any:
    """Returns the tensor of a layout in host memory."""
    import torch

    if layout.size_bytes == 0:
        return torch.empty_strided(layout.shape, layout.stride, dtype=getattr(torch, layout.dtype))
    raw = (ctypes.c_char * layout.size_bytes).from_address(address)
    return torch.frombuffer(raw, dtype=getattr(torch, layout.dtype)).as_strided(layout.shape, layout.stride)


# ---- what the processes of a run do ----------------------------------------------------------------------------------------------


class Process:
    """A trainer's or an engine's process: its rank, its device, and its figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.role, self.rank, self.ranks = options, options.role, options.rank, options.ranks
        self.config = SIZES[options.size]
        self.is_cuda = options.device == "cuda"
        self.folder = Path(options.folder)
        self.points: dict[str, list[int]] = {}
        self.turn = 0
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(options.port),
        }
        self.saver = self._memory_library()
        import torch

        self.torch = torch
        # vLLM's kernels are not all on PyTorch's list, and it repeats its own tokens.
        torch.use_deterministic_algorithms(self.role == TRAINER or options.engine == "plain")
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.manual_seed(1)
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass is not deterministic
        self.local = self.rank % torch.cuda.device_count() if self.is_cuda else 0
        os.environ["LOCAL_RANK"] = str(self.local)
        self.device = f"cuda:{self.local}" if self.is_cuda else "cpu"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        if self.is_cuda:
            torch.cuda.set_device(self.local)
        else:
            torch.set_num_threads(1)
        self.descriptors = None if self.is_cuda else HostDescriptors()

    def _memory_library(self) -> Any:
        memory, is_vllm = self.options.memory, self.options.engine == "vllm" and self.role == ENGINE
        if is_vllm:
            os.environ |= VLLM_ENVIRONMENT
        if memory == "symmalloc" and self.is_cuda:
            import symmalloc

            if is_vllm:
                # This process is vLLM's worker, and uses CUDA before vLLM calls the plug-in.
                from symmalloc import vllm as plug_in

                os.environ["SYMMALLOC_VLLM"] = "sleep"
                plug_in.register()
            else:
                symmalloc.install("tag:private")
            return symmalloc
        if memory == "torch_memory_saver" and self.is_cuda and not is_vllm:
            try:
                from torch_memory_saver import torch_memory_saver
            except ImportError as error:
                print(f"skipped: {error}", flush=True)
                sys.exit(SKIPPED)
            torch_memory_saver.hook_mode = "torch"
            return torch_memory_saver
        return None

    def region(self, tag: str, keep: bool) -> Any:
        return nullcontext() if self.saver is None else self.saver.region(tag=tag, enable_cpu_backup=keep)

    def connect(self) -> None:
        """Creates the process group. gloo carries barriers."""
        self.torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if self.is_cuda else "gloo", init_method="env://", rank=self.rank, world_size=self.ranks
        )

    def barrier(self) -> None:
        self.torch.distributed.all_reduce(self.torch.zeros(1))

    def measure(self, point: str) -> None:
        """Notes the memory in use on the device at a point of the turn, when all ranks of this side are there."""
        if not self.is_cuda:
            return
        self.barrier()
        self.torch.cuda.synchronize()
        free, total = self.torch.cuda.mem_get_info()
        self.points.setdefault(point, []).append((total - free) // MIB)
        self.barrier()

    def on_phase(self, phase: str) -> None:
        """Kills this process in the phase that the job asks for."""
        if self.options.kill and self.turn == KILL_TURN:
            role, rank, at = self.options.kill.split(":")
            if (role, int(rank), at) == (self.role, self.rank, phase):
                print(f"killed at {time.time()}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        if phase == "wake" and self.role == TRAINER:
            self.measure("both_asleep")

    def turns(self, kind: str, **options: Any) -> Any:
        """Joins the turns."""
        from symmalloc import colocate

        uses_ipc = self.options.memory != "symmalloc" and self.is_cuda
        sides = ipc_sides(colocate) if uses_ipc else {TRAINER: colocate.Trainer, ENGINE: colocate.Engine}
        if kind == ENGINE and self.descriptors is not None:
            options["view"] = host_tensor
        return sides[kind](
            self.folder / "sockets", self.rank, self.ranks, device=self.local, on_phase=self.on_phase, descriptors=self.descriptors,
            on_death=colocate.end_process(END_SECONDS), deadline_seconds=self.options.deadline, **options,
        )  # fmt: skip

    def report(self, **figures: Any) -> None:
        if self.is_cuda:
            figures["reserved_mib_peak"] = self.torch.cuda.max_memory_reserved() // MIB
        sys.stdout.write(
            "\nfigures " + json.dumps({"role": self.role, "rank": self.rank, "points": self.points, **figures}) + "\n"
        )
        sys.stdout.flush()


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def train(process: Process) -> None:
    options, torch = process.options, process.torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F

    is_reference = options.memory == REFERENCE
    process.connect()
    # The engine starts first: it has released its memory when it joins.
    if is_reference:
        for rank in range(process.ranks):
            wait_for(process.folder / f"engine.{rank}.ready", options.start_deadline)
        turns = None
    else:
        turns = process.turns(TRAINER, memory=trainer_memory(process))
    with turns or nullcontext():
        with torch.device("meta"):
            model = llama(process.config).to(process.dtype)
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda" if process.is_cuda else "cpu", (process.ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with process.region("weights", keep=True):
            model.to_empty(device=process.device)
        seeded = torch.Generator(process.device).manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = torch.randn(parameter.shape, dtype=process.dtype, device=process.device, generator=seeded) * 0.02
                part = whole.chunk(process.ranks, 0)[process.rank]
                parameter.to_local().copy_(torch.ones_like(part) if "norm" in name else part)
        del whole, part
        with process.region("optimizer", keep=True):
            optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, foreach=True)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        process.state = (model, optimizer)
        losses: list[float] = []
        length = process.config.length_max // 2
        generator = torch.Generator().manual_seed(7)

        def steps() -> None:
            for _ in range(options.steps):
                text = torch.randint(process.config.vocabulary, (process.ranks, 2, length + 1), generator=generator)[
                    process.rank
                ].to(process.device)
                logits = model(text[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
                del logits
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach().double().item())

        gathering, updates, seconds = gatherer(process), [], []
        for turn in range(options.turns):
            process.turn = turn + 1
            if options.kill and process.turn == KILL_TURN:
                process.on_phase("train")
            begun = time.perf_counter()
            steps()
            process.measure("train")
            if turns is None:
                save_weights(process, model, turn)
                wait_for(process.folder / f"tokens.{turn}", options.deadline)
            else:
                updates.append(turns.hand_over(gathering(model.named_parameters())))
                turns.take(deadline_seconds=options.deadline)
            seconds.append(time.perf_counter() - begun)
        plain = copy_bandwidth(process, updates[-1].size_bytes) if updates and process.is_cuda else None
        process.report(
            losses=digest(losses), last_loss=losses[-1], turn_seconds=seconds,
            updates=[[update.size_bytes, update.update_seconds, update.load_seconds] for update in updates], copy_bytes_per_second=plain,
        )  # fmt: skip


def trainer_memory(process: Process) -> Any:
    """Returns what releases and restores the trainer's memory."""
    from symmalloc import colocate

    memory, part = process.options.memory, colocate.Part
    if not process.is_cuda:
        return colocate.Unmanaged()
    if memory == "symmalloc":
        # "private" is the tag of PyTorch's default pool and of the pools of graphs.
        return colocate.Pools(weights=["weights"], rest=["optimizer", "private"])

    class Saver:
        """torch_memory_saver's regions."""

        def sleep(self, of: Any) -> None:
            process.saver.pause("weights" if of is part.WEIGHTS else "optimizer")
            process.torch.cuda.ipc_collect()
            process.torch.cuda.empty_cache()

        def wake(self, of: Any) -> None:
            process.saver.resume("weights" if of is part.WEIGHTS else "optimizer")

    class Host:
        """Moves the model and the optimizer's state to the host and back, as trainers do that have no allocator with sleep."""

        def _move(self, of: Any, device: str) -> None:
            model, optimizer = process.state
            if of is part.WEIGHTS:
                model.to(device)
            else:
                for state in optimizer.state.values():
                    for key, value in state.items():
                        if isinstance(value, process.torch.Tensor) and value.dim() > 0:
                            state[key] = value.to(device)
            process.torch.cuda.synchronize()
            process.torch.cuda.ipc_collect()
            process.torch.cuda.empty_cache()

        def sleep(self, of: Any) -> None:
            self._move(of, "cpu")

        def wake(self, of: Any) -> None:
            self._move(of, process.device)

    return Saver() if memory == "torch_memory_saver" else Host()


def gatherer(process: Process) -> Callable[[Iterable[tuple[str, Any]]], Iterator[Mapping[str, Any]]]:
    """Returns the function that gathers weights in groups."""
    from symmalloc import colocate

    gathering = colocate.Gathering(process.options.bucket_mib * MIB)
    if process.is_cuda and process.options.memory == "symmalloc":
        return gathering.buckets
    descriptors, kept = process.descriptors, {}

    def buckets(named: Iterable[tuple[str, Any]]) -> Iterator[Mapping[str, Any]]:
        # Memory of other libraries cannot be exported. The group is a copy, which PyTorch's own allocator has with cudaMalloc.
        for bucket in gathering.buckets(named):
            if descriptors is None:
                yield {name: tensor.clone() for name, tensor in bucket.items()}
                continue
            copies = {}
            for name, tensor in bucket.items():
                layout = colocate.Layout(
                    0,
                    0,
                    tensor.nbytes,
                    str(tensor.dtype).removeprefix("torch."),
                    tuple(tensor.shape),
                    tuple(tensor.contiguous().stride()),
                )
                if name not in kept:
                    kept[name] = host_tensor(layout, descriptors.allocate(tensor.nbytes))
                copies[name] = kept[name].copy_(tensor)
            yield copies

    return buckets


def save_weights(process: Process, model: Any, turn: int) -> None:
    whole = {name: parameter.full_tensor().detach().cpu() for name, parameter in model.named_parameters()}
    if process.rank == 0:
        path = process.folder / f"weights.{turn}"
        process.torch.save(whole, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def copy_bandwidth(process: Process, size_bytes: int) -> float:
    """Returns the bytes per second of a plain copy on the device, as the median of nine, while all ranks copy."""
    torch = process.torch
    size_bytes = min(size_bytes, 4 << 30)
    of, to = (torch.empty(size_bytes, dtype=torch.uint8, device=process.device) for _ in range(2))
    found = []
    for _ in range(10):
        process.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        to.copy_(of)
        torch.cuda.synchronize()
        found.append(size_bytes / (time.perf_counter() - begun))
    return statistics.median(found[1:])


def wait_for(path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was not written within {seconds} s")
        time.sleep(0.005)


def run_engine(process: Process) -> None:
    options, torch = process.options, process.torch
    engine: Any = VllmEngine(process) if options.engine == "vllm" else PlainEngine(process)
    tokens: list[Any] = []
    if options.memory == REFERENCE:
        (process.folder / f"engine.{process.rank}.ready").touch()
        for turn in range(options.turns):
            wait_for(path := process.folder / f"weights.{turn}", options.start_deadline)
            weights = torch.load(path)
            engine.load({name: weight.to(process.device) for name, weight in weights.items()})
            del weights
            tokens.append(engine.generate(turn))
            process.barrier()
            if process.rank == 0:
                (process.folder / f"tokens.{turn}").touch()
                path.unlink()
    else:
        engine.sleep_first()
        with process.turns(ENGINE, memory=engine.memory()) as turns:
            for turn in range(options.turns):
                process.turn = turn + 1
                turns.take(engine.load, deadline_seconds=options.deadline)
                tokens.append(engine.generate(turn))
                process.measure("generate")
                turns.hand_over()
    process.report(tokens=digest(tokens), last_tokens=str(tokens[-1])[:120], loaded_bytes=engine.loaded_bytes // options.turns)


class PlainEngine:
    """An engine in plain PyTorch with tensor parallelism, a KV cache, and a captured graph per token."""

    def __init__(self, process: Process) -> None:
        self.process, torch = process, process.torch
        config, answers = process.config, 8 if process.is_cuda else 2
        process.connect()

        def reduce(x: Any) -> Any:
            torch.distributed.all_reduce(x)
            return x

        torch.set_default_dtype(process.dtype)
        with process.region("weights", keep=False), torch.device(process.device):
            self.model = llama(config, process.rank, process.ranks, reduce if process.ranks > 1 else None).eval()
        torch.set_default_dtype(torch.float32)
        self.loaded_bytes = 0
        self.parameters = dict(self.model.named_parameters())
        shape = (config.layers, 2, answers, config.kv_heads // process.ranks, config.length_max, config.head)
        with process.region("kv_cache", keep=False):
            self.caches = torch.zeros(shape, dtype=process.dtype, device=process.device)
        self.token = torch.zeros((answers, 1), dtype=torch.long, device=process.device)
        self.place = torch.zeros(1, dtype=torch.long, device=process.device)
        self.graph = None
        if process.is_cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.one_token()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.one_token()

    def one_token(self) -> None:
        torch = self.process.torch
        with torch.inference_mode():
            best = self.model(self.token, self.caches, self.place)[:, -1].argmax(-1, keepdim=True)
            self.token.copy_(best)
            self.place.add_(1)

    def load(self, weights: Mapping[str, Any]) -> None:
        process, torch = self.process, self.process.torch
        names = [name for name in weights if name in self.parameters]
        parts = [part_of(name, weights[name], process.rank, process.ranks) for name in names]
        with torch.no_grad():
            torch._foreach_copy_([self.parameters[name] for name in names], parts)
        self.loaded_bytes += sum(part.nbytes for part in parts)

    def generate(self, turn: int) -> list[Any]:
        torch = self.process.torch
        self.place.zero_()
        first = torch.arange(self.token.shape[0]).view(-1, 1) + turn
        self.token.copy_(first % self.process.config.vocabulary)
        answered = []
        for _ in range(self.process.options.tokens):
            self.one_token() if self.graph is None else self.graph.replay()
            answered.append(self.token.flatten().tolist())
        return answered

    def memory(self) -> Any:
        from symmalloc import colocate

        process = self.process
        if not process.is_cuda:
            return colocate.Unmanaged()
        if process.options.memory == "symmalloc":
            # The default pool and the graph's pool keep their contents: the graph's inputs, and what kernels expect between replays.
            return colocate.Pools(weights=["weights"], rest=["kv_cache", "private"])

        class Saver:
            def sleep(self, of: Any) -> None:
                process.saver.pause("weights" if of is colocate.Part.WEIGHTS else "kv_cache")
                process.torch.cuda.empty_cache()

            def wake(self, of: Any) -> None:
                process.saver.resume("weights" if of is colocate.Part.WEIGHTS else "kv_cache")

        return Saver()

    def sleep_first(self) -> None:
        from symmalloc.colocate import Part

        memory = self.memory()
        if self.process.is_cuda:
            self.process.torch.cuda.synchronize()
        memory.sleep(Part.REST)
        memory.sleep(Part.WEIGHTS)


class VllmEngine:
    """vLLM with tensor parallelism, one process per rank: its executor `external_launcher` takes the device from LOCAL_RANK.

    The executor of other jobs starts its workers itself, and gives each a device of its own, so it cannot share a GPU.
    """

    def __init__(self, process: Process) -> None:
        self.process, options = process, process.options
        self._seen: set[str] = set()
        process.connect()  # vLLM uses this process group
        from vllm import LLM

        folder = process.folder / f"model.{process.rank}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(process.config.to_json()))
        self.llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=1, max_model_len=1024,
            gpu_memory_utilization=0.1, kv_cache_memory_bytes=options.kv_mib * MIB, enable_prefix_caching=False,
            enable_sleep_mode=options.memory != REFERENCE, tensor_parallel_size=process.ranks, disable_custom_all_reduce=True,
            distributed_executor_backend="external_launcher", compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            max_num_seqs=16,
        )  # fmt: skip
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.loaded_bytes = 0

    def load(self, weights: Mapping[str, Any]) -> None:
        with self.process.torch.no_grad():
            loaded = self.worker.model_runner.get_model().load_weights(iter(weights.items()))
        sizes = {name: parameter.nbytes for name, parameter in self.worker.model_runner.get_model().named_parameters()}
        # A fused parameter is named once for each of its parts' groups: its bytes count once per update.
        self._seen |= set(loaded or ())
        self.loaded_bytes = sum(sizes.get(name, 0) for name in self._seen) * self.process.turn

    def generate(self, turn: int) -> list[Any]:
        from vllm import SamplingParams, TokensPrompt

        count = self.process.options.tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompts = [
            TokensPrompt(prompt_token_ids=[(turn + at + 3) % 1000 + 3 for at in range(first, first + 8 + first)])
            for first in range(8)
        ]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def memory(self) -> Any:
        from symmalloc.colocate import Part

        worker = self.worker

        class Worker:
            """vLLM's sleep mode: all memory at once, and the weights before the KV cache."""

            def sleep(self, of: Part) -> None:
                if of is Part.REST:
                    worker.sleep(2)

            def wake(self, of: Part) -> None:
                worker.wake_up(["weights" if of is Part.WEIGHTS else "kv_cache"])

        return Worker()

    def sleep_first(self) -> None:
        self.worker.sleep(2)


def ipc_sides(colocate: Any) -> dict[str, Any]:
    """Returns trainer and engine whose weights go through CUDA's IPC handles, as trainers send them without symmalloc."""

    class IpcWeights(dict[str, Any]):
        @property
        def size_bytes(self) -> int:
            return sum(tensor.nbytes for tensor in self.values())

    class Trainer(colocate.Trainer):
        def _offer(self, number: int, group: Mapping[str, Any], page: Any) -> Any:
            from torch.multiprocessing.reductions import reduce_tensor

            text = base64.b64encode(pickle.dumps([(name, reduce_tensor(tensor)) for name, tensor in group.items()])).decode()
            return {"number": number, "ipc": text}, []

        def _send_descriptors(self, first: list[int], handles: list[int], deadline: Any) -> None:
            pass

    class Engine(colocate.Engine):
        def _open(self, message: Any, deadline: Any) -> Any:
            opened = pickle.loads(base64.b64decode(message["ipc"]))
            return IpcWeights((name, rebuild(*arguments)) for name, (rebuild, arguments) in opened)

        def _unmap(self, deadline: Any) -> None:
            super()._unmap(deadline)
            if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
                import gc

                gc.collect()
                sys.modules["torch"].cuda.ipc_collect()

    return {TRAINER: Trainer, ENGINE: Engine}


# ---- the launcher ----------------------------------------------------------------------------------------------------------------


class Meter:
    """The memory in use on all GPUs, by NVML, which needs no context."""

    def __init__(self) -> None:
        self._handles: list[ctypes.c_void_p] = []
        self.peak = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        count = ctypes.c_uint()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for number in range(count.value):
            handle = ctypes.c_void_p()
            if not self._nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
                self._handles.append(handle)

    def used(self) -> int | None:
        """Returns the used memory in MiB, summed over the GPUs; None if it is unknown."""
        total = 0
        for handle in self._handles:
            memory = (ctypes.c_ulonglong * 3)()
            if self._nvml.nvmlDeviceGetMemoryInfo(handle, memory):
                return None
            total += memory[2]
        return total // MIB if self._handles else None

    def start(self) -> None:
        self.peak = 0
        self._stop.clear()

        def sample() -> None:
            while not self._stop.wait(0.005):
                self.peak = max(self.peak, self.used() or 0)

        self._thread = threading.Thread(target=sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return self.peak


_given_ports: set[int] = set()


def free_port() -> int:
    """Returns a port that no call has returned before: jobs may start at the same time."""
    while True:
        with socket.socket() as of:
            of.bind(("127.0.0.1", 0))
            port = int(of.getsockname()[1])
            if port not in _given_ports:
                _given_ports.add(port)
                return port


def environment(options: argparse.Namespace, role: str, rank: int) -> dict[str, str]:
    chosen = dict(os.environ) | {"PYTHONHASHSEED": "0"}
    here = str(Path(__file__).resolve().parent)
    path = [str(options.site)] if options.site and role == ENGINE and options.engine == "vllm" else []
    path += [one for one in chosen.get("PYTHONPATH", "").split(os.pathsep) if one and one != here]
    chosen["PYTHONPATH"] = os.pathsep.join(path)
    if options.device == "cuda":
        # For more ranks than GPUs, from NCCL 2.30 on.
        chosen.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        chosen.setdefault("NCCL_GRAPH_REGISTER", "0")
        if options.nccl and (role == TRAINER or options.engine == "plain"):
            chosen["LD_PRELOAD"] = os.pathsep.join(filter(None, [str(options.nccl), chosen.get("LD_PRELOAD")]))
        if options.hosts:
            chosen |= {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return chosen


@dataclass
class Run:
    """The processes of a run, and what they have printed."""

    figures: list[dict[str, Any]]
    output: dict[str, str]
    status: dict[str, int]
    peak_mib: int
    kill_seconds: float | None = None


def launch(options: argparse.Namespace, memory: str, kill: str | None = None, turns: int | None = None) -> Run:
    """Runs all processes of a job, and waits for their end."""
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="colocate-", dir="/tmp") as folder:
        ports = {TRAINER: free_port(), ENGINE: free_port()}
        processes: dict[str, tuple[subprocess.Popen[Any], Path]] = {}
        meter.start()
        for role in (ENGINE, TRAINER):
            for rank in range(options.ranks):
                command = [
                    sys.executable, str(Path(__file__).resolve()), "--role", role, "--rank", str(rank), "--folder", folder,
                    "--port", str(ports[role]), "--memory", memory, "--engine", options.engine, "--device", options.device,
                    "--ranks", str(options.ranks), "--turns", str(turns or options.turns), "--steps", str(options.steps),
                    "--tokens", str(options.tokens), "--size", options.size, "--bucket-mib", str(options.bucket_mib),
                    "--kv-mib", str(options.kv_mib), "--deadline", str(options.deadline), "--lr", str(options.lr),
                    "--start-deadline", str(options.start_deadline), *(["--kill", kill] if kill else []),
                ]  # fmt: skip
                log = Path(folder) / f"{role}.{rank}.log"
                started = subprocess.Popen(
                    command,
                    stdout=log.open("w"),
                    stderr=subprocess.STDOUT,
                    env=environment(options, role, rank),
                    start_new_session=True,
                )
                processes[f"{role} {rank}"] = (started, log)
        first_end = _wait_for_all(processes, options.limit)
        ended = time.monotonic()
        peak = meter.stop()
        output = {name: log.read_text(errors="replace") for name, (_, log) in processes.items()}
    figures = [json.loads(line[8:]) for text in output.values() for line in text.splitlines() if line.startswith("figures ")]
    status = {name: process.returncode for name, (process, _) in processes.items()}
    return Run(figures, output, status, peak, None if first_end is None else ended - first_end)


def _wait_for_all(processes: dict[str, tuple[subprocess.Popen[Any], Path]], limit: float) -> float | None:
    """Waits for all processes. After one has failed, the others have `KILL_SECONDS`. Returns when the first has failed."""
    until, first = time.monotonic() + limit, None
    while any(process.poll() is None for process, _ in processes.values()):
        if first is None and any(process.returncode not in (None, 0) for process, _ in processes.values()):
            first = time.monotonic()
            until = min(until, first + KILL_SECONDS)
        if time.monotonic() > until:
            for process, _ in processes.values():
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    process.returncode = -999  # ended by the launcher
            break
        time.sleep(0.01)
    return first


class Bars:
    """The lines of the result."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, name: str, is_met: bool, detail: str = "") -> None:
        self.failed += not is_met
        print(f"{'PASS' if is_met else 'FAIL'} {name}{': ' if detail else ''}{detail}", flush=True)


def of(run: Run, role: str) -> list[dict[str, Any]]:
    return sorted((one for one in run.figures if one["role"] == role), key=lambda one: one["rank"])


def is_complete(run: Run, options: argparse.Namespace, bars: Bars, name: str) -> bool:
    # torch_memory_saver 0.0.10 kills a process that frees its tensors during Python's exit, after all of its work.
    tolerated = name == "torch_memory_saver"
    is_well = len(run.figures) == 2 * options.ranks and (tolerated or all(code == 0 for code in run.status.values()))
    bars.check(f"{name}: all processes ended in order", is_well, "" if is_well else f"{run.status}")
    if not is_well or options.verbose:
        for process, text in run.output.items():
            print(f"--- {process}, status {run.status[process]}\n{text[-PRINTED_CHARACTERS:]}", flush=True)
    return is_well


def compare(options: argparse.Namespace) -> int:
    """Runs the reference and a memory, and prints the table and the bars."""
    bars = Bars()
    memory = options.memory
    reference = launch(options, REFERENCE) if not options.no_reference else None
    if reference is not None and not is_complete(reference, options, bars, "reference"):
        return 1
    run = launch(options, memory)
    if SKIPPED in run.status.values():
        print(f"{memory} is not available here:", next(iter(run.output.values()))[-200:])
        return SKIPPED
    if not is_complete(run, options, bars, memory):
        return 1
    trainers, engines = of(run, TRAINER), of(run, ENGINE)
    if reference is not None:
        for figure, role in (("losses", TRAINER), ("tokens", ENGINE)):
            pairs = list(zip(of(reference, role), of(run, role), strict=True))
            bars.check(
                f"{memory}: {figure} equal to the reference",
                all(one[figure] == other[figure] for one, other in pairs),
                pairs[0][1][figure],
            )
    points = {point: [one["points"][point] for one in trainers + engines if point in one["points"]] for point in POINTS}
    for point, of_ranks in points.items():
        spread = max(
            (
                max(values[STABLE_FROM - 1 :]) - min(values[STABLE_FROM - 1 :])
                for values in of_ranks
                if len(values) >= STABLE_FROM
            ),
            default=None,
        )
        if spread is not None:
            bars.check(
                f"{memory}: memory at `{point}` equal from turn {STABLE_FROM} to {options.turns}",
                spread <= STABLE_MIB,
                f"{spread} MiB apart",
            )
    updates = [update for one in trainers for update in one["updates"][1:] or one["updates"]]
    turn_seconds = statistics.median(seconds for one in trainers for seconds in one["turn_seconds"][1:] or one["turn_seconds"])
    update_seconds = statistics.median(seconds for _, seconds, _ in updates)
    load_seconds = statistics.median(seconds for _, _, seconds in updates)
    size_bytes = updates[0][0]
    plain = trainers[0]["copy_bytes_per_second"]
    if plain is not None:
        # With tensor parallelism, each engine copies its part.
        speed = min(one["loaded_bytes"] for one in engines) / load_seconds
        bars.check(
            f"{memory}: weights loaded at half of a plain copy's bandwidth",
            speed >= plain / 2,
            f"{speed / 1e9:.0f} of {plain / 1e9:.0f} GB/s, {speed / plain:.2f}",
        )
    asleep = max((values[-1] for values in points["both_asleep"]), default=0)
    rows = [("memory", memory), ("engine", options.engine), ("ranks", options.ranks), ("turns", options.turns), ("weights MiB", size_bytes // MIB),
            ("peak MiB", run.peak_mib), ("reference's peak MiB", reference.peak_mib if reference else ""), ("held while both sleep MiB", asleep),
            ("turn s", round(turn_seconds, 3)), ("weight update ms", round(update_seconds * 1000, 1)), ("of it hand-over and load ms", round(load_seconds * 1000, 1)),
            ("losses", trainers[0]["losses"]), ("tokens", engines[0]["tokens"])]  # fmt: skip
    rows += [
        (f"memory at {point} MiB", f"{values[0][STABLE_FROM - 1 :][:1]} to {values[0][-1]}")
        for point, values in points.items()
        if values
    ]
    for name, value in rows:
        print(f"| {name} | {value} |", flush=True)
    if options.deny_ptrace:
        bars.check("ptrace and pidfd_getfd are denied", is_denied())
    return 1 if bars.failed else 0


def victim(options: argparse.Namespace, phase: str) -> str:
    """Returns the process to kill in a phase, as `--kill` of a process expects it."""
    role, at = phase.split(":")
    return f"{role}:{options.ranks - 1}:{at}"


def left_mib(meter: Meter, before: int | None) -> int | None:
    """Returns the memory that is in use beyond `before`, after a short wait for its return; None if it is unknown."""
    until = time.monotonic() + RETURN_SECONDS
    while before is not None and (after := meter.used()) is not None:
        if after - before <= STABLE_MIB or time.monotonic() > until:
            return after - before
        time.sleep(0.1)
    return None


def is_named(dead: str, phase: str, output: str) -> bool:
    """Returns `True` if a process's output names the dead one, and the phase unless it was trainer 0, which collects the phases."""
    if dead == f"{TRAINER} 0":
        return re.search(rf"{dead} has died|{dead} (\(pid \d+\) )?has closed its connection", output) is not None
    return re.search(rf"{dead} \(pid \d+\) died in the phase `{phase}`", output) is not None


def check_killed(bars: Bars, options: argparse.Namespace, chosen: str, run: Run, left: int | None) -> None:
    """Checks that a process was killed in a phase, that the others ended in time and named it, and that its batch left no memory."""
    role, rank, phase = victim(options, chosen).split(":")
    dead = f"{role} {rank}"
    others = [name for name in run.status if name != dead]
    names = [name for name in others if is_named(dead, phase, run.output[name])]
    in_time = all(run.status[name] not in (0, -999) for name in others)
    returned = left is None or left <= STABLE_MIB
    is_met = run.status[dead] == -signal.SIGKILL and in_time and len(names) == len(others) and returned
    seconds = "" if run.kill_seconds is None else f"{run.kill_seconds:.1f} s, "
    memory = "" if left is None else f", {left} MiB left"
    bars.check(f"{dead} killed in `{phase}`", is_met, f"{seconds}{len(names)} of {len(others)} name it{memory}")
    if not is_met or options.verbose:
        for name, text in run.output.items():
            print(f"--- {name}, status {run.status[name]}\n{text[-PRINTED_CHARACTERS:]}", flush=True)


def kill(options: argparse.Namespace) -> int:
    """Kills a rank in each phase, and checks that the others end in time and name it, and that the device's memory returns.

    The jobs of a batch run at the same time, and their memory is checked together.
    """
    bars, meter = Bars(), Meter()
    known = dict.fromkeys(f"{role}:{phase}" for role, phase in PHASES)
    chosen = list(known) if options.kill == "all" else options.kill.split(",")
    if unknown := [one for one in chosen if one not in known]:
        print(f"unknown phase {unknown[0]!r}: use all, or a list of {', '.join(known)}")
        return 2
    for first in range(0, len(chosen), options.together):
        batch = chosen[first : first + options.together]
        before = meter.used()
        with ThreadPoolExecutor(len(batch)) as pool:
            runs = list(pool.map(lambda one: launch(options, options.memory, victim(options, one), turns=KILL_TURN + 1), batch))
        left = left_mib(meter, before)
        for one, run in zip(batch, runs, strict=True):
            check_killed(bars, options, one, run, left)
    return 1 if bars.failed else 0


# ---- a container's default ---------------------------------------------------------------------------------------------------------

CALLS = {"x86_64": (101, 438), "aarch64": (117, 438)}
"""The numbers of `ptrace` and `pidfd_getfd`."""


def deny_ptrace() -> None:
    """Makes `ptrace` and `pidfd_getfd` return EPERM in this process and all that it starts. Raises `OSError`."""

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]

    load, jump_equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 1  # EPERM
    ptrace, pidfd_getfd = CALLS[os.uname().machine]
    code = [
        (load, 0, 0, 0),
        (jump_equal, 1, 0, ptrace),
        (jump_equal, 0, 1, pidfd_getfd),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    instructions = (Instruction * len(code))(*(Instruction(*one) for one in code))
    program = Program(len(code), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(set_no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filter_mode, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def is_denied() -> bool:
    """Returns `True` if both calls return EPERM."""
    libc = ctypes.CDLL(None, use_errno=True)
    for call in CALLS[os.uname().machine]:
        ctypes.set_errno(0)
        if libc.syscall(call, -1, -1, 0, 0) != -1 or ctypes.get_errno() != 1:
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=(*MEMORIES, REFERENCE), default="symmalloc")
    parser.add_argument("--engine", choices=("plain", "vllm"), default="plain")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="training steps per turn")
    parser.add_argument("--tokens", type=int, default=24, help="tokens per answer")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: small, and tiny on the CPU")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--bucket-mib", type=int, default=1024, help="weights that are gathered at a time")
    parser.add_argument("--kv-mib", type=int, default=1024, help="vLLM's KV cache")
    parser.add_argument("--site", type=Path, help="folder with vLLM's packages, see bundle.py")
    parser.add_argument("--nccl", type=Path, help="preload this libnccl.so.2 in processes that do not use --site")
    parser.add_argument("--hosts", action="store_true", help="let NCCL take each rank for a machine, for NCCL before 2.30")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for each call")
    parser.add_argument("--start-deadline", type=float, default=300.0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for a run")
    parser.add_argument("--deny-ptrace", action="store_true")
    parser.add_argument("--no-reference", action="store_true", help="do not run the reference")
    parser.add_argument(
        "--kill", metavar="PHASES", help=f"all, or a list of {', '.join(f'{role}:{phase}' for role, phase in PHASES)}"
    )
    parser.add_argument("--together", type=int, default=1, metavar="JOBS", help="with --kill: jobs that run at the same time")
    parser.add_argument("--verbose", action="store_true", help="print what the processes print")
    for name in ("--role", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = options.size or ("tiny" if options.device == "cpu" else "small")
    if options.together < 1:
        parser.error("--together needs at least 1")
    if options.memory == "cumem" and options.engine != "vllm":
        parser.error("--memory cumem is vLLM's: use --engine vllm")
    if options.engine == "vllm" and options.device == "cpu":
        parser.error("--engine vllm needs a GPU")
    if options.role is not None:
        # A job must not shadow a package.
        here = str(Path(__file__).resolve().parent)
        sys.path = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != here]
        process = Process(options)
        train(process) if options.role == TRAINER else run_engine(process)
        sys.stdout.flush()
        os._exit(0)  # libraries that end in any order must not decide the status
    if options.deny_ptrace:
        deny_ptrace()
    sys.exit(kill(options) if options.kill else compare(options))


if __name__ == "__main__":
    main()
