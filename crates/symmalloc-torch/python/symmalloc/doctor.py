"""Checks of the installation: a list of what works, and why the rest does not. Exits with 0 if `install()` will work."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from . import captured_buffers, errors, pytorch_class
from .library import VERSION, call, encoded, library, library_path
from .state import installed

# CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED.
VIRTUAL_MEMORY = 102
NCCL_WINDOWS = (2, 27)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    works: bool
    what: str
    """The component that was found, or the problem and its solution."""
    is_needed: bool = True
    """`True` if `install()` fails without it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Missing(Exception):
    """A component is missing. The text states how to fix it."""


def examine() -> list[Finding]:
    """Runs all checks. Allocates no device memory, and does not modify PyTorch."""
    looks: list[tuple[str, bool, Callable[[], str]]] = [
        ("symmalloc", True, _package),
        ("SYMMALLOC_CONF", True, _configuration),
        ("NVIDIA driver", True, _driver),
        ("PyTorch", True, _pytorch),
        ("allocator class", True, _class),
        ("PYTORCH_CUDA_ALLOC_CONF", False, _pytorch_configuration),
        ("NCCL windows", False, _nccl),
        (captured_buffers.VARIABLE, False, _captured_buffers),
    ]
    return [_finding(name, is_needed, look) for name, is_needed, look in looks]


def table(findings: list[Finding]) -> str:
    """Returns the findings as text."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{_mark(finding):<4} {finding.name:<{width}}  {finding.what}" for finding in findings]
    works = all(finding.works for finding in findings if finding.is_needed)
    return "\n".join([*lines, "", "symmalloc.install() will work" if works else "symmalloc.install() will not work here"])


def _mark(finding: Finding) -> str:
    return "ok" if finding.works else "NO" if finding.is_needed else "-"


def _finding(name: str, is_needed: bool, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look(), is_needed)
    except (_Missing, errors.Error) as missing:
        return Finding(name, False, str(missing), is_needed)


def _package() -> str:
    library()
    return f"{VERSION}, {library_path()}"


def _configuration() -> str:
    text = os.environ.get("SYMMALLOC_CONF")
    if text is None:
        return "not set: the defaults"
    if not installed():
        call("torch_configure", encoded(text))
    return text


def _driver() -> str:
    """Checks the driver and its devices."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise _Missing(f"{error}: install the NVIDIA driver, or put the folder of its library on LD_LIBRARY_PATH") from error
    version, count = ctypes.c_int(), ctypes.c_int()
    if status := cuda.cuInit(0):
        raise _Missing(f"cuInit failed with {status}: is there a GPU that this process may use (CUDA_VISIBLE_DEVICES, container)?")
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        raise _Missing("no CUDA device is visible: check CUDA_VISIBLE_DEVICES")
    devices = ", ".join(_devices(cuda, count.value))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}; {devices}"


def _devices(cuda: ctypes.CDLL, count: int) -> Iterator[str]:
    for ordinal in range(count):
        device, can_map, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(100)
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(can_map), VIRTUAL_MEMORY, device)
        if not can_map.value:
            raise _Missing(f"device {ordinal}, {name.value.decode()}, cannot map virtual memory, which symmalloc needs")
        yield f"device {ordinal} {name.value.decode()}"


@cache
def _imported() -> Any:
    """Returns PyTorch, or the error of its import. PyTorch reports a second attempt instead of the cause."""
    try:
        import torch
    except Exception as error:  # an incomplete installation may raise any exception
        return error
    return torch


def _torch() -> Any:
    torch = _imported()
    if isinstance(torch, Exception):
        raise _Missing(f"cannot be imported ({torch}): only the C interface works here (symmalloc.Allocator)") from torch
    return torch


def _pytorch() -> str:
    torch = _torch()
    pytorch_class.check(torch)
    if torch.cuda.is_initialized() and not installed():
        raise _Missing(pytorch_class.IN_USE)
    here, tested = ".".join(map(str, pytorch_class.version(torch))), pytorch_class.TESTED
    untested = "" if here in tested else "; not tested"
    return f"{torch.__version__}, CUDA {torch.version.cuda}{untested} (tested: {', '.join(tested)})"


def _class() -> str:
    """Predicts how `install()` would obtain the class, without compiling it."""
    torch = _torch()
    pytorch_class.check(torch)
    return pytorch_class.place(torch)


def _pytorch_configuration() -> str:
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    if text:
        raise _Missing(f"{text!r} is for PyTorch's own allocator and has no effect: set SYMMALLOC_CONF, with the same syntax")
    return "not set"


def _nccl() -> str:
    try:
        nccl: Any = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        try:
            torch = _torch()
            version = torch.cuda.nccl.version() if torch.version.cuda is not None else None
        except _Missing:
            version = None
        if version is None:
            raise _Missing(f"{error}: windows and MemPool.register need libnccl {_dotted(NCCL_WINDOWS)} or later") from error
    else:
        number = ctypes.c_int()
        nccl.ncclGetVersion(ctypes.byref(number))
        version = (number.value // 10000, number.value // 100 % 100, number.value % 100)
    if tuple(version[:2]) < NCCL_WINDOWS:
        raise _Missing(f"NCCL {_dotted(version)} has no windows: install {_dotted(NCCL_WINDOWS)} or later")
    return f"NCCL {_dotted(version)}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _captured_buffers() -> str:
    """Checks the setting on which the sleep of pools depends."""
    value = os.environ.get(captured_buffers.VARIABLE)
    if value is None:
        return "not set: pools with a tag set it to 0, because NCCL would keep the memory of captured buffers through a sleep"
    if not captured_buffers.is_off():
        raise _Missing(f"{value}: plain pools of several ranks cannot sleep, because NCCL keeps the memory of captured buffers: set it to 0")
    return "0: NCCL does not keep the memory of captured buffers through a sleep"
