"""Runs in each worker process of `vllm_serve.py`, as its `worker_extension_cls`: measures, counts windows and reloads weights.

vLLM imports this file before it initializes the device, so the changes below apply to everything that the worker does.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import Any

# The job asks for the stacks of a server that does not answer.
faulthandler.register(signal.SIGUSR1)

registered: list[int] = []
"""The sizes of the windows that vLLM has registered, in order."""


def _use_windows_on_any_number_of_gpus() -> None:
    """Lets vLLM use symmetric memory for every all-reduce. It otherwise requires four GPUs, and excludes sizes by tables."""
    from vllm.distributed.device_communicators import all_reduce_utils

    all_reduce_utils.NCCL_SYMM_MEM_ALL_REDUCE_CONFIG.update(
        min_world_size=2, custom_ar_preferred_ranges={}, always_use_above_world_size=1
    )


def _count_windows() -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    original = NCCLLibrary.ncclCommWindowRegister

    def counted(self: Any, comm: Any, buffer: Any, size: int, flags: int) -> Any:
        registered.append(size)
        return original(self, comm, buffer, size, flags)

    NCCLLibrary.ncclCommWindowRegister = counted


if os.environ.get("VLLM_USE_NCCL_SYMM_MEM") == "1":
    _use_windows_on_any_number_of_gpus()
    _count_windows()


class Extension:
    """Methods of vLLM's worker, for `LLM.collective_rpc`."""

    def job_facts(self) -> dict[str, Any]:
        """Returns the memory and the windows of this worker."""
        import torch

        torch.cuda.synchronize()
        counts = torch.cuda.memory_stats()
        facts = {
            "free_bytes": torch.cuda.mem_get_info()[0],
            "reserved_bytes_peak": counts.get("reserved_bytes.all.peak"),
            "allocated_bytes_peak": counts.get("allocated_bytes.all.peak"),
            "windows_of_engine": len(registered),
            "window_bytes_of_engine": sum(registered),
            "installed": False,
        }
        if "symmalloc" in sys.modules:
            import symmalloc

            facts["installed"] = symmalloc.installed()
        if "symmalloc.vllm" in sys.modules:
            from symmalloc.vllm import windows

            facts["windows_of_symmalloc"] = windows()
        return facts

    def job_synchronize(self) -> None:
        """Waits for the device."""
        import torch

        torch.cuda.synchronize()

    def job_reload(self) -> None:
        """Loads the dummy weights again. They depend on nothing but each parameter's size and type.

        `reload_weights` has no implementation for dummy weights. Buffers keep their values: the loader would fill them, too.
        """
        import torch
        from vllm.model_executor.model_loader import get_model_loader

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        with torch.inference_mode():
            kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            get_model_loader(runner.load_config).load_weights(model, runner.model_config)
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        torch.cuda.synchronize()

    def job_damage(self) -> None:
        """Fills the weights with zeros, so that a reload that does nothing shows in the tokens."""
        import torch

        with torch.inference_mode():
            for parameter in self.model_runner.get_model().parameters():  # type: ignore[attr-defined]
                parameter.zero_()
