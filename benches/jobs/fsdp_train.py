"""FSDP on several GPUs (`torchrun --nproc-per-node 2 fsdp_train.py`): the job whose placements differed between ranks.

It trains a Llama-style model in FSDP1 with bf16 and sequences of varying lengths. Inputs are copied on one side stream, and
statistics of the activations are computed on another, both with `record_stream`. With symmalloc, the ranks keep every step's
digest and compare them at the end. `assert_aligned` runs once in the loop. Ranks may share a GPU.
"""

from __future__ import annotations

import functools
import os
import random

from job import OURS, Job, report


def main() -> None:
    job = Job.from_command_line("fsdp_train", __doc__)
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn import functional as F

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    is_cuda = job.device == "cuda"
    if is_cuda and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        # Before 2.30, NCCL requires a device per rank of a machine. With these settings it treats ranks as machines, and uses sockets.
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            os.environ |= {"NCCL_HOSTID": f"machine{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        local_rank %= torch.cuda.device_count()
    if is_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")

    layers, heads, width, hidden, vocabulary, batch, length_max, period = (
        (2, 2, 32, 64, 128, 2, 32, 3)
        if job.is_tiny
        else (12, 16, 2048, 5632, 32000, 12, 2048, 6)
        if job.is_large
        else (8, 16, 1024, 2816, 32000, 8, 2048, 12)
    )

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = self.qkv(self.norm_attention(x)).view(*x.shape[:2], 3, heads, width // heads)
            q, k, v = split.permute(2, 0, 3, 1, 4)
            attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(attention.transpose(1, 2).reshape(x.shape))
            y = self.norm_mlp(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.tokens(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x)), x

    half = torch.bfloat16
    sharded = functools.partial(
        FullyShardedDataParallel,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half),
        device_id=local_rank if is_cuda else None,
        # With the original parameters, each rank has only the parameters of its shard, so ranks would run different programs.
        use_orig_params=False,
    )
    # FSDP1 requires an accelerator. A run on a CPU only tests the script.
    model = sharded(Model()) if is_cuda else nn.parallel.DistributedDataParallel(Model())
    clip = model.clip_grad_norm_ if is_cuda else functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    lengths = [random.Random(number).randrange(length_max // 8, length_max) for number in range(period)]
    texts = torch.Generator().manual_seed(1)
    inputs, statistics = (torch.cuda.Stream(), torch.cuda.Stream()) if is_cuda else (None, None)
    digests: list[int] = []

    def copied(text: torch.Tensor) -> torch.Tensor:
        """Copies the text to the device on a separate stream."""
        if inputs is None:
            return text
        with torch.cuda.stream(inputs):
            tokens = text.pin_memory().to(job.device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(inputs)
        tokens.record_stream(torch.cuda.current_stream())
        return tokens

    def watch(activations: torch.Tensor) -> torch.Tensor:
        """Computes a statistic of the activations, concurrently with the backward pass."""
        if statistics is None:
            return activations.detach().float().square().mean()
        statistics.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(statistics):
            watched = activations.detach().float().square().mean()
        activations.record_stream(statistics)
        return watched

    def step(number: int) -> torch.Tensor:
        text = torch.randint(vocabulary, (batch, lengths[number % period] + 1), generator=texts)
        # Each rank has a different text with the same number of distinct words, so that no size depends on the rank.
        tokens = copied((text + rank) % vocabulary)
        logits, activations = model(tokens[:, :-1])
        watched = watch(activations)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del logits, activations
        loss.backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if statistics is not None:
            torch.cuda.current_stream().wait_stream(statistics)
            watched.record_stream(torch.cuda.current_stream())
        if job.allocator in OURS and is_cuda:
            import symmalloc

            digests.append(symmalloc.digest())
            if number == period - 1:  # waits for the device, so it is outside the timed windows
                symmalloc.assert_aligned()
        return loss.detach() + watched

    figures = job.measure(period, step, periods=2)
    job.end_trace()
    everyone: list[tuple[dict[str, object], list[int]]] = [({}, [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (figures, digests))
    if rank == 0:
        peaks = [their["reserved_peak_mib"] for their, _ in everyone if "reserved_peak_mib" in their]
        figures["losses"] = "+".join(str(their["losses"]) for their, _ in everyone)
        figures["reserved_peak_mib"] = max(peaks, default=0.0)
        figures["digests"] = len(digests)
        figures["digests_equal"] = sum(
            len(set(step)) == 1 for step in zip(*(their for _, their in everyone), strict=True)
        )
        report(figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
