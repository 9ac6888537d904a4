"""Runs in each scheduler process of `sglang_serve.py`: installs symmalloc, counts windows and reports memory.

A plug-in of SGLang would be too late: SGLang calls it after importing its kernels, whose import uses CUDA. `Engine` has an
attribute for the function of its scheduler processes, and a spawned process imports that function's file before SGLang.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

INSTALL = "SGLANG_SERVE_INSTALL"
"""How this file installs symmalloc on import: `install`, or `sglang` for `symmalloc.sglang`; not at all if it is empty. The server sets it
after its own import, for the processes that it starts.
"""
NVLS = "SGLANG_SERVE_NVLS"
"""The value of `NCCL_NVLS_ENABLE`, which SGLang sets to 1 for symmetric memory, whatever it was."""

faulthandler.register(signal.SIGUSR1)
if how := os.environ.get(INSTALL):
    if how == "sglang":
        import symmalloc.sglang
    else:
        import symmalloc

        symmalloc.install()


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Replaces SGLang's `run_scheduler_process`."""
    os.environ["NCCL_NVLS_ENABLE"] = os.environ[NVLS]
    from sglang.srt.managers import scheduler

    _count_windows()
    scheduler.Scheduler.job_facts = _facts
    run = scheduler.run_scheduler_process
    if os.environ[INSTALL] == "sglang":
        from symmalloc.sglang import run_scheduler_process as run
    run(*arguments, **named)


def _count_windows() -> None:
    """Adds counters to the allocator of symmetric memory, which SGLang compiles on the first use."""
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    source = pynccl_allocator.nccl_allocator_source
    begin, register = 'extern "C" {\n', "ncclResult_t res = ncclCommWindowRegister("
    if source.count(begin) != 1 or source.count(register) != 1:
        raise RuntimeError("this SGLang registers windows in another way: use a version of sglang_serve.VERSIONS")
    source = source.replace(begin, begin + "size_t job_windows = 0, job_window_bytes = 0;\n")
    source = source.replace(register, "++job_windows, job_window_bytes += seg.size;\n" + register)
    pynccl_allocator.nccl_allocator_source = source


def _windows() -> tuple[int, int]:
    """Returns the number and the bytes of the windows that SGLang has registered."""
    path = Path(tempfile.gettempdir()) / "symm_allocator" / "nccl_allocator.so"
    if not path.exists():
        return 0, 0
    library = ctypes.CDLL(str(path))
    count, size_bytes = (ctypes.c_size_t.in_dll(library, name).value for name in ("job_windows", "job_window_bytes"))
    return count, size_bytes


def _facts(_scheduler: Any, folder: str) -> None:
    """Writes the memory and the windows of this process to a file. `Engine.collective_rpc` calls it on each rank."""
    import torch

    torch.cuda.synchronize()
    counts = torch.cuda.memory_stats()
    count, size_bytes = _windows()
    facts = {
        "free_bytes": torch.cuda.mem_get_info()[0],
        "reserved_bytes_peak": counts.get("reserved_bytes.all.peak"),
        "allocated_bytes_peak": counts.get("allocated_bytes.all.peak"),
        "windows_of_engine": count,
        "window_bytes_of_engine": size_bytes,
        "nvls": os.environ["NCCL_NVLS_ENABLE"],
        "installed": False,
    }
    if "symmalloc" in sys.modules:
        import symmalloc

        facts["installed"] = symmalloc.installed()
    (Path(folder) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(facts))
