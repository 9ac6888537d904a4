"""Announcements of the program's own collectives to the watchdog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING

from .communicators import Communicator, Member
from .devices import Device, device_index
from .library import call
from .pool import registered_first

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@contextmanager
def announce(
    kind: str,
    *,
    elements: int | None = None,
    stream: torch.cuda.Stream | None = None,
    group: ProcessGroup | None = None,
    comm: Communicator | None = None,
    device: Device = None,
) -> Iterator[None]:
    """Announces a collective that the program submits inside the `with` block to the watchdog:

        with symmalloc.announce("all_reduce", elements=gradients.numel()):
            torch.distributed.all_reduce(gradients)

    kind      the collective's name in flight records, equal on every rank
    elements  its element count, equal on every rank; None if ranks may differ
    stream    the stream on which it ends; None: the current one, which PyTorch's collectives join unless `async_op` is given
    group     a group on which a pool is registered; None: the default group
    comm      a raw communicator instead of the group's
    device    None: the current one

    Every rank announces the same collectives in the same order. An announced collective counts as one of the group's
    collectives in flight records, and has the deadline of `register()`. If a rank misses the deadline, standard error, a flight
    record and the next `sync()` name it. The watchdog does not abort the group.

    Raises `InvalidState` if no pool is registered on the group, and `NcclError` if its communicator failed earlier. In both
    cases, the block does not run.
    """
    index = device_index(device)
    registrar = registered_first(Member(group, comm, index)).registrar
    if stream is None:
        import torch

        stream = torch.cuda.current_stream(index)
    announcement = c_void_p()
    call("announce_begin", registrar, kind.encode(), elements or 0, stream.cuda_stream, byref(announcement))
    try:
        yield
    finally:
        call("announce_end", announcement)
