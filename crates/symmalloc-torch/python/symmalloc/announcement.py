"""Collectives that the program submits by other means, for the watchdog."""

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
    """Tells the watchdog of a collective that the program submits by other means, inside the `with`:

        with symmalloc.announce("all_reduce", elements=gradients.numel()):
            torch.distributed.all_reduce(gradients)

    The group (None: the default one), or the raw communicator, is one on which a pool is registered; every rank announces
    the same in the same order. It is numbered among the group's collectives in flight records and has the deadline of
    `register()`: a rank that does not come is named on the error output, in a flight record and at the next `sync()`.
    Nothing of the group is aborted.

    kind      what it is, in flight records: the same on every rank
    elements  how large, the same on every rank; None where ranks may differ
    stream    the one that it ends on; None: the current one, which PyTorch's collectives join unless `async_op` is given
    comm      a raw communicator, in place of the group's
    device    None: the current one

    Raises `InvalidState` when no pool is registered on the group, `NcclError` when its communicator failed before: what is inside
    is not run then.
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
