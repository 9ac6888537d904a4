"""All-to-all on registered memory: `torch.distributed.all_to_all_single` with a separate exchange of the splits.

    received = symmalloc.exchange_splits(rows_by_rank)          on all ranks, after the splits of any rank changed
    symmalloc.all_to_all_single(output, tokens, received, rows_by_rank)
    ...                                                         the experts
    symmalloc.all_to_all_single(combined, output, rows_by_rank, received)     the reverse direction, without an exchange

    A call submits sends and receives in one NCCL group on the program's stream, and copies the rows that stay on the rank. It
    never allocates, registers or blocks the host, so a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, byref, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

from .communicators import Communicator, Member
from .devices import Device, device_index, import_torch
from .errors import InvalidArgument
from .library import call, failure, library
from .pool import Registered, registered_first

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# Options of symmalloc_all_to_all_create.
REGISTERED, CHECKED = 1, 2

Splits = Sequence[int]
"""The number of rows sent to each rank, or received from each rank."""


class Work:
    """An all-to-all that runs on a separate stream. Keep it until `wait()`: it holds the tensors."""

    def __init__(self, event: Any, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> None:
        """Makes the current stream wait on the device. Later work on that stream sees the received rows."""
        import torch

        torch.cuda.current_stream(self._tensors[0].device).wait_event(self._event)

    def is_completed(self) -> bool:
        """Returns `True` if the all-to-all has completed. Never blocks."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Blocks the host until the all-to-all has completed."""
        self._event.synchronize()


def exchange_splits(
    input_splits: Splits,
    group: ProcessGroup | None = None,
    *,
    comm: Communicator | None = None,
    device: Device = None,
) -> list[int]:
    """Exchanges the input splits of all ranks, and returns this rank's `output_splits`.

    input_splits  rows that this rank sends to each rank
    group         a group on which a pool is registered; None: the default group
    comm          a raw communicator instead of the group's
    device        None: the current one

    Collective: all ranks call it after the splits of any rank changed, and at no other time. Blocks the host until the
    exchange is done. Raises `InvalidArgument` if the number of splits differs from the number of ranks (the other ranks
    then raise `MisalignedError`), `NcclError` if a rank does not join within the deadline, and `InvalidState` in a capture.
    """
    registered = _found(group, comm, device_index(device))
    all_to_all = _made(registered, 0)
    received = (c_uint64 * registered.ranks)()
    try:
        sent = _numbers("input_splits", input_splits, registered.ranks)
    except Exception:
        # The other ranks wait for this one, so it joins with invalid splits.
        library().symmalloc_all_to_all_exchange(all_to_all, None, received)
        raise
    call("all_to_all_exchange", all_to_all, sent, received)
    return list(received)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Splits | None = None,
    input_splits: Splits | None = None,
    group: ProcessGroup | None = None,
    *,
    comm: Communicator | None = None,
    async_op: bool = False,
    require_registered: bool = True,
    check_splits: bool = False,
) -> Work | None:
    """Sends rows of the input to all ranks, and receives their rows in the output, in rank order.

    output, input       contiguous tensors of one dtype with rows of one size. The first dimension counts rows. Each tensor may
                        have more rows than its splits, so that one buffer serves steps of different sizes
    output_splits       rows received from each rank; if this and `input_splits` are None, both are split equally
    input_splits        rows sent to each rank. A rank's entry for itself must be equal in both lists
    group               a group on which a pool is registered; None: the default group
    comm                a raw communicator instead of the group's
    async_op            run on a separate stream, after the work of the current one; `Work.wait()` joins it
    require_registered  reject tensors outside registered memory. NCCL can move these too, through its internal buffers. With NCCL
                        2.30.7, keep both tensors in windows, or neither: `torch.distributed.all_to_all_single` never
                        returns if only the input is in a window
    check_splits        compare the splits of all ranks first, for debugging: every rank gets the same error. Blocks the host

    Collective. Does not exchange splits: if a rank knows only its input splits, call `exchange_splits` first. Raises
    `InvalidArgument` for tensors or splits that do not fit, `InvalidState` for unregistered memory, `MisalignedError` if checked
    splits differ, and `NcclError` if the communicator failed.
    """
    torch = import_torch("all_to_all_single()")
    index = _device_of(output, input)
    registered = _found(group, comm, index)
    row_bytes = _row_bytes(output, input)
    sent = received = None
    if input_splits is not None and output_splits is not None:
        sent = _numbers("input_splits", input_splits, registered.ranks)
        received = _numbers("output_splits", output_splits, registered.ranks)
    elif input_splits is not None or output_splits is not None:
        raise InvalidArgument("give the splits of both sides (exchange_splits() returns the output's), or none")
    options = (REGISTERED if require_registered else 0) | (CHECKED if check_splits else 0)
    all_to_all = _made(registered, options)
    current = torch.cuda.current_stream(index)
    stream = _side_stream(index, registered.registrar.value) if async_op else current
    if async_op:
        stream.wait_stream(current)
    status = library().symmalloc_all_to_all_run(
        all_to_all,
        stream.cuda_stream,
        input.data_ptr(),
        input.nbytes,
        output.data_ptr(),
        output.nbytes,
        row_bytes,
        sent,
        received,
    )
    if status:
        raise failure("all_to_all_run", status)
    if not async_op:
        return None
    input.record_stream(stream)
    output.record_stream(stream)
    return Work(stream.record_event(), (output, input))


def _device_of(output: torch.Tensor, input: torch.Tensor) -> int:
    if not (output.is_cuda and output.device == input.device):
        raise InvalidArgument(f"the tensors are on {output.device} and {input.device}: pass tensors on one CUDA device")
    return int(output.device.index)


def _row_bytes(output: torch.Tensor, input: torch.Tensor) -> int:
    """Returns the size in bytes of a row, that is, of one index of the first dimension."""
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:] or not output.dim() or not input.dim():
        raise InvalidArgument(
            f"rows of {tuple(input.shape)} {input.dtype} and {tuple(output.shape)} {output.dtype} differ: pass tensors of one "
            "type that differ only in the first dimension"
        )
    if not (output.is_contiguous() and input.is_contiguous()):
        raise InvalidArgument("the rows of a tensor are not contiguous: give contiguous tensors")
    return int(output.element_size() * output.shape[1:].numel())


def _numbers(name: str, splits: Splits, ranks: int) -> Array[c_uint64]:
    if len(splits) != ranks:
        raise InvalidArgument(
            f"{name} has {len(splits)} numbers for {ranks} ranks: give a number of rows for each rank"
        )
    if min(splits) < 0:
        raise InvalidArgument(f"{name} has {min(splits)} rows: give numbers that are at least 0")
    return (c_uint64 * ranks)(*splits)


# The registration of each group or raw communicator. Ended registrations are removed at the next lookup that misses.
_known: dict[tuple[int, int], tuple[Any, Registered]] = {}


def _found(group: ProcessGroup | None, comm: Communicator | None, device: int) -> Registered:
    """Returns the first registration on a group or a raw communicator."""
    if comm is None and group is None:
        import torch.distributed as dist

        group = dist.group.WORLD
    named = group if comm is None else Member(None, comm, device).pointer()
    key = (device, named if isinstance(named, int) else id(named))
    known = _known.get(key)
    # The entry holds the group, so no other object can have its id.
    if known is None or known[1].is_ended:
        for ended in [other for other, (_, registered) in _known.items() if registered.is_ended]:
            del _known[ended]
        known = _known[key] = named, registered_first(Member(group, comm, device))
    registered = known[1]
    if not registered.member.is_as_it_was():
        registered.member.check_alive()
    return registered


def _made(registered: Registered, options: int) -> c_void_p:
    made = registered.exchanges.get(options)
    if made is None:
        made = c_void_p()
        call("all_to_all_create", registered.registrar, options, byref(made))
        registered.exchanges[options] = made
    return made


@cache
def _side_stream(device: int, registrar: int) -> torch.cuda.Stream:
    """Returns the side stream of a communicator. There is one per communicator, so that its calls keep their order."""
    import torch

    return torch.cuda.Stream(device)
