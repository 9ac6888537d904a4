"""Overrides for functions of PyTorch's interface that the allocator class lacks. Each override throws.

A newer PyTorch may add pure virtual functions to `CUDAAllocator` or to its bases. The class then fails to compile, and the compiler
reports where each function is declared. The override repeats the declaration in the header:

    virtual void trimTo(DeviceIndex device, size_t bytes) const = 0;
    void trimTo(DeviceIndex device, size_t bytes) const override { unsupported("trimTo"); }

No other C++ is parsed, so the types do not matter. GCC and Clang both report file, line and column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# GCC: `FILE:LINE:COLUMN: note:   'virtual TYPE CLASS::NAME(...)'`. Clang: `... note: unimplemented pure virtual method 'NAME' in ...`.
NOTE = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+):(?P<column>\d+): note:\s+(?:.?virtual\s|unimplemented pure virtual method )", re.M)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


class Unreadable(Exception):
    """A declaration cannot be converted to an override. The text names it."""


@dataclass(frozen=True)
class Function:
    """A pure virtual function of PyTorch."""

    name: str
    declaration: str
    """The text between `virtual` and `= 0`."""

    def override(self) -> str:
        return f'{self.declaration} override {{ unsupported("{self.name}"); }}'


def find(message: str) -> list[Function]:
    """Returns the functions that the compiler reports as pure, in its order. Raises `Unreadable`."""
    found = dict.fromkeys((note["file"], int(note["line"]), int(note["column"])) for note in NOTE.finditer(message))
    return [_declared(Path(file), line, column) for file, line, column in found]


def macros(functions: Iterable[Function]) -> list[str]:
    """Returns compiler options that add the overrides to the class."""
    functions = list(functions)
    overrides = " ".join(function.override() for function in functions)
    names = ", ".join(dict.fromkeys(function.name for function in functions))
    return [f"-DSYMMALLOC_UNKNOWN_FUNCTIONS={overrides}", f'-DSYMMALLOC_UNKNOWN_NAMES="{names}"']


def _declared(file: Path, line: int, column: int) -> Function:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error}") from error
    # Replacing comments by blanks of the same length preserves all positions.
    text = COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)
    place = sum(map(len, text.splitlines(keepends=True)[: line - 1])) + column - 1
    start = max((word.end() for word in re.finditer(r"\bvirtual\b", text[: place + len("virtual")])), default=-1)
    end = re.compile(r"=\s*0\s*;").search(text, max(place, 0))
    declaration = "" if start < 0 or end is None else " ".join(text[start : end.start()].split())
    name = re.search(r"(operator\s*\S+?|~?\w+)\s*\(", text[place : end.start()] if end else "")
    if not declaration or name is None or ";" in declaration or "{" in re.sub(r"=\s*\{[^{}]*\}", "", declaration):
        raise Unreadable(f"{file}:{line}: the declaration of this pure virtual function is not supported")
    return Function(name[1], declaration)
