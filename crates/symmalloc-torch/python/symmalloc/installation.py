"""Installation of symmalloc as PyTorch's allocator: call `install()` once, before the program uses CUDA."""

from __future__ import annotations

import os
import warnings
from ctypes import byref, c_uint32
from typing import Any

from . import pytorch_class, state
from . import statistics as pytorch_statistics
from .devices import import_torch
from .errors import InvalidState, TorchError
from .library import address, call, encoded, library, library_path
from .steps import follow_optimizers

TORCH_MINIMUM = (2, 5)
# The oldest version of PyTorch whose interface the class supports.
CLASS_MINIMUM = (2, 11)
# The number of functions of PyTorch's object that the library replaces, see src/virtuals.rs.
REPLACED = 2

# PyTorch's setters, and the library functions to pass to them.
SETTERS = {
    "set_init_fn": "symmalloc_torch_init",
    "set_reset_fn": "symmalloc_torch_reset",
    "set_memory_fraction_fn": "symmalloc_torch_memory_fraction",
    "set_base_alloc_fn": "symmalloc_torch_base_alloc",
    "set_record_stream_fn": "symmalloc_torch_record_stream",
    "set_begin_allocate_to_pool": "symmalloc_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "symmalloc_torch_end_allocate_to_pool",
    "set_release_pool": "symmalloc_torch_release_pool",
}

# Features that are missing without the class.
LACKS = (
    "torch.cuda.MemPool, torch.cuda.memory._record_memory_history, trace trackers and out-of-memory observers, "
    "torch.compile(mode='reduce-overhead'), CUDA tensors sent to other processes, and statistics for C++ extensions"
)


def install(conf: str | None = None, *, trace: str | os.PathLike[str] | None = None, statistics: bool = True) -> None:
    """Makes symmalloc the allocator of all CUDA tensors of this process.

    Call it after `import torch` and before anything uses CUDA: before the first CUDA tensor, `torch.cuda.set_device`,
    or `init_process_group` with a device. A second call with the same arguments does nothing.

    conf        configuration text, with PyTorch's syntax and symmalloc's keys; None: `SYMMALLOC_CONF`, or the defaults
    trace       record every op to this file, as `SYMMALLOC_TRACE` does; `%r` is the rank, `%d` the device, `%p` the process
    statistics  only for the fallback to PyTorch's class for pluggable allocators, which raises for statistics: replaces
                `torch.cuda.memory_stats`, `memory_allocated`, `memory._snapshot` and related functions

    The first call for a version of PyTorch compiles the allocator for it, see `symmalloc.pytorch_class`. If that fails, symmalloc
    falls back to PyTorch's class for pluggable allocators, and a warning states the reason and the missing features.
    `SYMMALLOC_TORCH_CLASS=require` makes that an error, and `off` always uses the fallback.

    Raises `TorchError` if PyTorch is missing, too old or has used CUDA, `InvalidSettings` for an invalid configuration,
    `InvalidState` for a second call with other arguments, and `LibraryNotFound`.
    """
    arguments = (conf, None if trace is None else os.fspath(trace), statistics)
    if state.installed_with is not None:
        if state.installed_with != arguments:
            raise InvalidState(
                f"symmalloc is installed already, with conf, trace and statistics {state.installed_with}: install it once"
            )
        return
    torch = _usable_torch()
    library()
    if conf is not None:
        call("torch_configure", encoded(conf))
    if trace is not None:
        os.environ["SYMMALLOC_TRACE"] = os.fspath(trace)
    state.uses_class = _install_class(torch)
    if not state.uses_class:
        _install_pluggable(torch, statistics)
    state.installed_with = arguments
    if _learns(conf):
        follow_optimizers(torch)


def _install_class(torch: Any) -> bool:
    """Installs the compiled class. Returns `False` if PyTorch's class for pluggable allocators must be used instead."""
    try:
        mode = pytorch_class.mode()
        if mode == "off":
            return False
        if version(torch) < CLASS_MINIMUM:
            raise pytorch_class.Unavailable(f"PyTorch {torch.__version__} is older than {'.'.join(map(str, CLASS_MINIMUM))}")
        pytorch_class.install(torch)
        return True
    except pytorch_class.Unavailable as why:
        if os.environ.get(pytorch_class.VARIABLE, "") == "require":
            raise TorchError(f"the allocator cannot be compiled for this PyTorch: {why}") from why
        warnings.warn(
            f"symmalloc falls back to PyTorch's class for pluggable allocators, which lacks {LACKS}: {why}\n"
            f"set {pytorch_class.VARIABLE}=off to use it without this warning",
            stacklevel=4,
        )
        return False


def _install_pluggable(torch: Any, statistics: bool) -> None:
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(
        str(library_path()), "symmalloc_torch_alloc", "symmalloc_torch_free"
    )
    for setter, function in SETTERS.items():
        getattr(pluggable.allocator(), setter)(address(function))
    torch.cuda.memory.change_current_allocator(pluggable)
    _complete(torch)
    if statistics:
        pytorch_statistics.teach(torch)


def _learns(conf: str | None) -> bool:
    """Returns `True` if the default pool plans its steps."""
    settings = os.environ.get("SYMMALLOC_CONF", "") if conf is None else conf
    return "plan:learn" in settings.replace(" ", "")


def _complete(torch: Any) -> None:
    """Replaces the functions of PyTorch's object that its class does not support and has no setters for."""
    replaced = c_uint32()
    call("torch_complete", byref(replaced))
    if replaced.value < REPLACED:
        warnings.warn(
            f"PyTorch {torch.__version__} hides some functions of its allocators: torch.backends.cudnn.benchmark, and copies "
            "between GPUs of one process unless SYMMALLOC_CONF has `peers:[...]`, may raise",
            stacklevel=3,
        )


def version(torch: Any) -> tuple[int, ...]:
    """Returns PyTorch's major and minor version."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _usable_torch() -> Any:
    torch = import_torch("install()")
    if version(torch) < TORCH_MINIMUM:
        raise TorchError(f"PyTorch {torch.__version__} is too old: install {'.'.join(map(str, TORCH_MINIMUM))} or later")
    if torch.version.cuda is None or not hasattr(torch._C, "_cuda_customAllocator"):
        raise TorchError(f"PyTorch {torch.__version__} was built without CUDA: install a CUDA build")
    if torch.cuda.is_initialized():
        raise TorchError(
            "CUDA is in use already: call symmalloc.install() right after `import torch`, before the first CUDA tensor, "
            "torch.cuda.set_device() or init_process_group()"
        )
    return torch
