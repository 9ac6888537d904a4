"""A table of an allocator's memory: text in a terminal, HTML in a notebook."""

from __future__ import annotations

import html
from typing import Any

from .allocator import Allocator
from .devices import Device, device_index
from .state import allocator

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COLUMNS = ("live", "peak live", "reserved", "peak reserved", "live over reserved", "allocations", "segments")


class MemoryTable:
    """A table with a row per pool and a total. `print` it, or let a notebook display it."""

    def __init__(self, title: str, rows: list[tuple[str, list[str]]]) -> None:
        self.title, self.rows = title, rows

    def __str__(self) -> str:
        cells = [["", *COLUMNS], *([name, *values] for name, values in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
        lines = [
            "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True)))
            for row in cells
        ]
        return "\n".join([self.title, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(column)}</th>" for column in ("", *COLUMNS))
        body = "".join(
            f"<tr><th>{html.escape(name)}</th>" + "".join(f"<td>{html.escape(value)}</td>" for value in values) + "</tr>"
            for name, values in self.rows
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def show(device: Device = None, *, of: Allocator | None = None) -> MemoryTable:
    """Returns a table of a device's current and peak memory by pool.

    device  None: the current one
    of      an `Allocator` to show instead of the device's

    A notebook displays the result of a cell's last line. Elsewhere, use `print(symmalloc.show())`. Raises `NotInstalled`.
    """
    if of is None:
        of, title = allocator(device), f"symmalloc, device {device_index(device)}"
    else:
        title = "symmalloc"
    stats = of.stats()
    rows = [(f"pool {pool['pool']}", _row(pool["stats"])) for pool in stats["pools"]]
    return MemoryTable(title, [*rows, ("all", _row(stats["total"]))])


def _row(stats: dict[str, Any]) -> list[str]:
    live, reserved = stats["requested_bytes"]["all"], stats["reserved_bytes"]["all"]
    share = f"{live['peak'] / reserved['peak']:.3f}" if reserved["peak"] else "-"
    sizes = [_size(value) for value in (live["current"], live["peak"], reserved["current"], reserved["peak"])]
    return [*sizes, share, str(stats["allocation"]["all"]["current"]), str(stats["segment"]["all"]["current"])]


def _size(size_bytes: int) -> str:
    """Formats bytes in the unit that leaves at most three digits before the decimal point."""
    value, unit = float(size_bytes), 0
    while value >= 1000 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{value:.1f} {UNITS[unit]}"
