"""GPT-2 (124M) training and generation that alternate on a GPU, each without device memory while the other one works.

    benches/jobs/take_turns.py --compare                          every --memory in turn, and a table
    benches/jobs/take_turns.py --compare --turns 200 --other 0.9  another process uses 90 % of the device meanwhile
    benches/jobs/take_turns.py --memory symmalloc --turns 50      one run
    benches/jobs/take_turns.py --compare --device cpu             tests the script without a GPU and without sleep

    training    | wake, steps ───────── | asleep: weights and optimizer on the host |
    generation  | asleep                | wake: weights copied, KV cache empty, a captured graph per token |

A run passes if losses and tokens are bitwise equal to those of the run without sleep, and if the device has the same amount
of free memory after each turn while both sleep. `--memory`:

plain               no sleep
    symmalloc           symmalloc.region, pause, resume
    torch_memory_saver  torch_memory_saver's functions; skipped if it is not installed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

MEMORIES = ("plain", "symmalloc", "torch_memory_saver")
MIB = 1 << 20
SKIPPED = 77
"""The exit status of a run that is unavailable here."""


class Plain:
    """A run without sleep."""

    def region(self, tag: str, enable_cpu_backup: bool = False) -> Any:
        return nullcontext()

    def pause(self, tag: str) -> None:
        pass

    def resume(self, tag: str) -> None:
        pass


def memory_saver(name: str) -> Any:
    """Installs a provider of `region`, `pause` and `resume` in PyTorch. Exits if it is unavailable."""
    if name == "plain":
        return Plain()
    if name == "symmalloc":
        import symmalloc

        symmalloc.install()
        return symmalloc
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(SKIPPED)
    torch_memory_saver.hook_mode = "torch"
    return torch_memory_saver


class Other:
    """Another process, which allocates a fraction of the device on request."""

    def __init__(self, share: float) -> None:
        command = [sys.executable, __file__, "--hold", str(share)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.heard("ready")

    def heard(self, word: str) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said == word, f"the other process sent {said!r} instead of {word!r}"

    def request(self, word: str, answer: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.heard(answer)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def hold(share: float) -> None:
    """Runs in the other process: allocates memory, writes and reads all of it, and frees it."""
    import torch

    total = torch.cuda.mem_get_info()[1]
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        pattern = number % 251
        if number % 2 == 0:
            held = torch.full((int(total * share),), pattern, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            print("taken", flush=True)
        else:
            assert bool((held[:: 4 * MIB] == pattern - 1).all()), "another program wrote to the memory"
            del held
            torch.cuda.empty_cache()
            print("given back", flush=True)


def gpt2(is_tiny: bool, device: str, length_max: int) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, heads, width, vocabulary = (2, 2, 32, 128) if is_tiny else (12, 12, 768, 50304)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor, cache: torch.Tensor | None, place: torch.Tensor | None) -> torch.Tensor:
            split = self.qkv(self.norm_attention(x)).view(*x.shape[:2], 3, heads, width // heads)
            q, k, v = split.permute(2, 0, 3, 1, 4)
            if cache is None:
                attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                assert place is not None
                cache[0].index_copy_(2, place, k)
                cache[1].index_copy_(2, place, v)
                seen = (torch.arange(length_max, device=x.device) <= place).view(1, 1, 1, length_max)
                # Memory after this position is undefined after a sleep, and may be NaN. It is not read.
                keys, values = (torch.where(seen.transpose(2, 3), part, 0.0) for part in cache)
                attention = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + self.projection(attention.transpose(1, 2).reshape(x.shape))
            return x + self.mlp(self.norm_mlp(x))

    class Gpt2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length_max, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.head.weight = self.tokens.weight

        def forward(
            self, tokens: torch.Tensor, caches: torch.Tensor | None = None, place: torch.Tensor | None = None
        ) -> torch.Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device) if place is None else place
            x = self.tokens(tokens) + self.positions(places)
            for number, block in enumerate(self.blocks):
                x = block(x, None if caches is None else caches[number], place)
            return self.head(self.norm(x))

    with torch.device(device):
        model = Gpt2()
    return model, vocabulary, (layers, 2), (heads, length_max, width // heads)


def train_and_generate(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    saver = memory_saver(options.memory)
    import torch
    from torch import nn
    from torch.nn import functional as F

    device, on_gpu = options.device, options.device == "cuda"
    is_tiny = not on_gpu
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(1)
    batch, length_max, answers = (2, 32, 2) if is_tiny else (8, 1024, 8)

    with saver.region(tag="training", enable_cpu_backup=True):
        model, vocabulary, outer, inner = gpt2(is_tiny, device, length_max)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        # The optimizer creates its state in its first step.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with saver.region(tag="weights", enable_cpu_backup=True):
        engine = gpt2(is_tiny, device, length_max)[0].eval()
        token, place = torch.zeros((answers, 1), dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long, device=device)
    with saver.region(tag="kv_cache"):
        caches = torch.zeros((*outer, answers, *inner), device=device)

    losses, answered = [], []

    def train(turn: int) -> None:
        for number in range(options.steps):
            generator = torch.Generator(device).manual_seed(turn * 1000 + number)
            text = torch.randint(vocabulary, (batch, length_max // 2 + 1), device=device, generator=generator)
            with torch.autocast(device, torch.bfloat16):
                logits = model(text[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().double().item())

    @torch.inference_mode()
    def one_token() -> None:
        best = engine(token, caches, place)[:, -1].argmax(-1, keepdim=True)
        token.copy_(best)
        place.add_(1)

    graph = None
    if on_gpu:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one_token()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_token()

    def generate(turn: int) -> None:
        place.zero_()
        token.copy_(torch.arange(answers, device=device).view(answers, 1) + turn)
        for _ in range(options.tokens):
            one_token() if graph is None else graph.replay()
            answered.append(token.flatten().tolist())

    def load_weights() -> None:
        with torch.no_grad():
            for of, to in zip(model.parameters(), engine.parameters(), strict=True):
                to.copy_(of)

    def free_bytes() -> int:
        if not on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    other = Other(options.other) if options.other and options.memory != "plain" else None
    sleeping, seconds = [], {"pause": 0.0, "resume": 0.0}

    def timed(name: str, *tags: str) -> None:
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for tag in tags:
            getattr(saver, name)(tag)
        if on_gpu:
            torch.cuda.synchronize()
        seconds[name] += time.perf_counter() - begun

    timed("pause", "weights", "kv_cache")
    begun = time.perf_counter()
    for turn in range(options.turns):
        train(turn)
        timed("resume", "weights")
        load_weights()
        timed("pause", "training")
        timed("resume", "kv_cache")
        generate(turn)
        timed("pause", "weights", "kv_cache")
        sleeping.append(free_bytes())
        if other is not None:
            other.request("take", "taken")
            other.request("give", "given back")
        timed("resume", "training")
    elapsed = time.perf_counter() - begun
    if other is not None:
        other.end()
    packed = struct.pack(f"{len(losses)}d", *losses)
    return {
        "memory": options.memory,
        "turns": options.turns,
        "losses": hashlib.sha256(packed).hexdigest()[:16],
        "tokens": hashlib.sha256(json.dumps(answered).encode()).hexdigest()[:16],
        "last_loss": losses[-1],
        "last_tokens": answered[-1],
        "seconds": round(elapsed, 1),
        "pause_ms": round(seconds["pause"] * 1000 / options.turns, 1),
        "resume_ms": round(seconds["resume"] * 1000 / options.turns, 1),
        "free_mib_asleep_first": sleeping[0] // MIB,
        "free_mib_asleep_least": min(sleeping) // MIB,
        "free_mib_asleep_last": sleeping[-1] // MIB,
    }


def compare(options: argparse.Namespace) -> int:
    """Runs each configuration in a separate process, one after the other. Returns 0 if all results are equal."""
    rows: list[dict[str, Any]] = []
    # Without a GPU, no run can sleep, so the run without sleep is repeated.
    for memory in MEMORIES if options.device == "cuda" else ("plain", "plain"):
        command = [sys.executable, str(Path(__file__).resolve()), "--memory", memory, "--device", options.device]
        command += ["--turns", str(options.turns), "--steps", str(options.steps), "--tokens", str(options.tokens)]
        command += ["--other", str(options.other)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        figures = [line for line in done.stdout.splitlines() if line.startswith("figures ")]
        if done.returncode == SKIPPED:
            print(f"{memory}: {done.stdout.strip()}")
        elif not figures or (done.returncode != 0 and memory != "torch_memory_saver"):
            print(f"{memory}: failed, {done.returncode}\n{done.stdout}")
            return 1
        else:
            # torch_memory_saver 0.0.10 kills a process that frees its tensors during Python's exit, after all of its work.
            if done.returncode != 0:
                print(f"{memory}: ended with {done.returncode} after its results")
            rows.append(json.loads(figures[0].removeprefix("figures ")))
            print(json.dumps(rows[-1], indent=1))
    plain = rows[0]
    is_well = True
    for row in rows[1:]:
        same = all(row[key] == plain[key] for key in ("losses", "tokens"))
        leaks = row["free_mib_asleep_first"] - row["free_mib_asleep_last"]
        print(f"{row['memory']}: {'equal' if same else 'OTHER LOSSES OR TOKENS'}, {leaks} MiB less free after {row['turns']} turns")
        is_well = is_well and same and leaks <= 0
    return 0 if is_well and len(rows) > 1 else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=MEMORIES, default="symmalloc")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4, help="training steps per turn")
    parser.add_argument("--tokens", type=int, default=24, help="tokens per answer")
    parser.add_argument("--other", type=float, default=0.0, help="fraction of the device that another process uses meanwhile")
    parser.add_argument("--hold", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold is not None:
        hold(options.hold)
    elif options.compare:
        sys.exit(compare(options))
    else:
        print(f"figures {json.dumps(train_and_generate(options))}", flush=True)


if __name__ == "__main__":
    main()
