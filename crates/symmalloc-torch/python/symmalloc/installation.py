"""Installation of symmalloc as PyTorch's allocator: call `install()` once, before the program uses CUDA."""

from __future__ import annotations

import atexit
import os
import sys
from ctypes import byref
from typing import Any

from . import captured_buffers, pytorch_class, state
from .devices import import_torch
from .errors import Error, InvalidState, TorchError
from .library import PropertiesStruct, call, library
from .steps import follow_optimizers


def install(conf: str | None = None, *, trace: str | os.PathLike[str] | None = None) -> None:
    """Makes symmalloc the allocator of all CUDA tensors of this process, or raises and changes nothing.

    Call it after `import torch` and before anything uses CUDA: before the first CUDA tensor, `torch.cuda.set_device`,
    or `init_process_group` with a device. A second call with the same arguments does nothing.

    conf        configuration text, with PyTorch's syntax and symmalloc's keys; None: `SYMMALLOC_CONF`, or the defaults
    trace       record every op to this file, as `SYMMALLOC_TRACE` does; `%r` is the rank, `%d` the device, `%p` the process

    The package contains the allocator for the newest versions of PyTorch. For others, the first call compiles it, which needs a C++
    compiler, see `symmalloc.pytorch_class`.

    Raises `TorchError` if PyTorch is missing, unsupported or has used CUDA, or if the allocator cannot be compiled or loaded,
    `InvalidSettings` for an invalid configuration, `InvalidState` for a second call with other arguments, and `LibraryNotFound`.
    """
    arguments = (conf, None if trace is None else os.fspath(trace))
    if state.installed_with is not None:
        if state.installed_with != arguments:
            raise InvalidState(f"symmalloc is installed already, with conf and trace {state.installed_with}: install it once")
        return
    torch = _usable_torch()
    library()
    pytorch_class.install(torch, conf)
    if trace is not None:
        os.environ["SYMMALLOC_TRACE"] = os.fspath(trace)
    state.installed_with = arguments
    if "tag:" in state.configuration():
        captured_buffers.turn_off()
    if "debug:" in (conf if conf is not None else os.environ.get("SYMMALLOC_CONF", "")):
        atexit.register(_report_damage, torch)
    if _learns_plans():
        follow_optimizers(torch)


def _report_damage(torch: Any) -> None:
    """Checks the memory of the current device at exit, and prints damage that no call has raised."""
    # Each check compares all blocks again, so the number of reports is limited.
    for _ in range(32 if torch.cuda.is_initialized() else 0):
        try:
            state.allocator().check_memory()
            return
        except Error as error:
            print(f"symmalloc: {error}", file=sys.stderr, flush=True)
            # After a fault, nothing can be checked.
            if "was damaged" not in str(error):
                return


def _learns_plans() -> bool:
    properties = PropertiesStruct()
    call("torch_properties", byref(properties))
    return bool(properties.learns_plans)


def _usable_torch() -> Any:
    torch = import_torch("install()")
    pytorch_class.check(torch)
    if torch.cuda.is_initialized():
        raise TorchError(pytorch_class.IN_USE)
    return torch
