"""torch.compile(mode="reduce-overhead"): GPT-2 trains 50 steps in CUDA graph trees, with the losses of PyTorch's allocator."""

from __future__ import annotations

from gpt2_train import training
from job import Job, report


def main() -> None:
    job = Job.from_command_line("graph_trees", __doc__)
    import torch

    batch, length = (2, 16) if job.is_tiny else (8, 256)
    # The loss is an output of the graph, so it is copied before the next replay overwrites it.
    step = training(job, batch, length, lambda _: length, lambda model: torch.compile(model, mode="reduce-overhead"))
    report(job.measure(10, lambda number: step(number).clone()) | {"graph_trees": is_in_trees(job)})


def is_in_trees(job: Job) -> bool:
    """Returns `True` if graphs were captured. Inductor runs code without graphs if it cannot capture it."""
    from torch._inductor import cudagraph_trees

    if job.device != "cuda":
        return False
    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    return manager is not None and len(list(manager.get_roots())) > 0


if __name__ == "__main__":
    main()
