"""Names of allocations from Python frames, used while `torch.cuda.memory._record_memory_history` is on.

The innermost frame of the program names an allocation, as in `model/attention.py:88 forward`. Without such a frame, the
innermost frame of PyTorch names it. `symmalloc import` names PyTorch's recordings by the same rule, so traces, reports and
snapshots match.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from functools import lru_cache
from types import FrameType

CALLER_FN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
"""A function that writes the caller's name to a buffer as a C string. The second argument is the buffer's size in bytes."""


def caller(frame: FrameType | None = None) -> str:
    """Returns the name of the frame that requested memory, or an empty text if there is none.

    The search begins at `frame`; None: at the caller's frame.
    """
    frame = frame or sys._getframe(1)
    library = None
    while frame is not None:
        path = frame.f_code.co_filename
        if is_programs(path):
            return _name(frame)
        if library is None and path.endswith(".py"):
            library = frame
        frame = frame.f_back
    return "" if library is None else _name(library)


@lru_cache(maxsize=4096)
def is_programs(path: str) -> bool:
    """Returns `True` if a file belongs to the program, rather than to PyTorch or Python's standard library."""
    if not path.endswith(".py") and not path.startswith(("<ipython", "/tmp/ipykernel")):
        return False
    is_installed = "site-packages/" in path or "dist-packages/" in path
    is_torch = "/torch/" in path or path.startswith("torch/")
    return not is_torch and (is_installed or "/lib/python3" not in path)


def _name(frame: FrameType) -> str:
    return _text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@lru_cache(maxsize=4096)
def _text(path: str, line: int, function: str) -> str:
    return f"{'/'.join(path.split('/')[-2:])}:{line} {function}"


@lru_cache(maxsize=4096)
def _bytes(name: str, size: int) -> bytes:
    return name.encode(errors="replace")[: size - 1].decode(errors="ignore").encode() + b"\0"


def _write(buffer: int, size: int) -> None:
    frame = sys._getframe().f_back
    if frame is not None:
        name = _bytes(caller(frame), size)
        ctypes.memmove(buffer, name, len(name))


_function = CALLER_FN(_write)


def register(compiled: ctypes.CDLL) -> None:
    """Registers the naming function with the compiled class, until the interpreter exits."""
    compiled.symmalloc_name_callers(_function)
    atexit.register(compiled.symmalloc_name_callers, CALLER_FN())
