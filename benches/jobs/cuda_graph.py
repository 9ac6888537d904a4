"""A CUDA graph keeps its memory: capture, empty the cache, fill free memory, replay, compare with the eager result."""

from __future__ import annotations

from job import Job, report


def main() -> None:
    job = Job.from_command_line("cuda_graph", __doc__)
    import torch
    from torch import nn

    with torch.device(job.device):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)))
        inputs = torch.zeros(64, 1024)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        return loss + sum(parameter.grad.square().sum() for parameter in model.parameters())

    def filled(number: int) -> torch.Tensor:
        return torch.full_like(inputs, 0.01 * (number + 1))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graphs, results = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
            results.append(step(inputs))
        graphs.append(graph)
    torch.cuda.empty_cache()
    right = 0
    for number in range(10):
        # An allocation in the graph's memory would now be overwritten, or overwrite it.
        others = [torch.full((1 << 20,), float(number), device=job.device) for _ in range(64)]
        inputs.copy_(filled(number))
        graphs[number % 2].replay()
        replayed = results[number % 2].clone()
        is_kept = all(bool((other == number).all()) for other in others)
        del others
        torch.cuda.empty_cache()
        right += is_kept and bool(torch.equal(replayed, step(inputs)))
    reserved_before = torch.cuda.memory_reserved()
    del graphs, graph, results, replayed
    torch.cuda.empty_cache()
    report({
        "job": job.name, "allocator": job.allocator, "right": right, "of": 10,
        "reserved_mib_with_graphs": reserved_before / 2**20, "reserved_mib_after": torch.cuda.memory_reserved() / 2**20,
    })  # fmt: skip


if __name__ == "__main__":
    main()
