"""Steps of a program, which follow plans: `install("plan:learn")`, and `step()` once in each iteration.

    symmalloc.install("plan:learn")
    for batch in loader:
        symmalloc.step()                             the step before ends here, and the next one begins
        ...

or `with symmalloc.step(): ...` around what repeats. Without either, `install("plan:learn")` takes the end of an optimizer's
`step()` for the end of a step.

A step that comes twice alike is planned, and later ones place their tensors as planned: what is reserved is then what is live at
the peak.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from .allocator import Allocator, StepReport
from .devices import Device, device_index
from .installation import allocator

# Devices with a step that `step()` or an optimizer began: what ends it.
_open: dict[int, Step] = {}

# What became of the last step on each device.
_last: dict[int, StepReport] = {}

# The number of each optimizer, in the order of their first steps; it is the key of what comes before that step.
_optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# Whether the program says by itself where its steps are.
_is_explicit = False


class Step:
    """A step of a device's default pool that has begun. Ends with the `with` block, or where the next one begins."""

    def __init__(self, device: int, of: Allocator) -> None:
        self.device = device
        self.report: StepReport | None = None
        """What became of it, once it has ended."""
        self._allocator = of

    def end(self) -> StepReport:
        """Ends the step, if it has not ended yet. Says how far it went as planned."""
        if self.report is None:
            if _open.get(self.device) is self:
                del _open[self.device]
            self.report = _last[self.device] = self._allocator.end_step()
        return self.report

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


def step(key: int = 0, device: Device = None) -> Step:
    """Begins a step, and ends the one that the last call began, if that is open still.

    `key` says which steps are alike, such as the shape of a batch; 0 when all are. Call it at the same point on every rank, and not
    while a graph is captured. Raises `NotInstalled`.
    """
    global _is_explicit
    _is_explicit = True
    return _begin(key, device)


def last_step(device: Device = None) -> StepReport | None:
    """What became of the last step that `step()` or an optimizer ended on the device; None before the first."""
    return _last.get(device_index(device))


def _begin(key: int, device: Device) -> Step:
    index = device_index(device)
    of = allocator(index)
    before = _open.get(index)
    if before is not None:
        before.end()
    of.begin_step(key)
    begun = _open[index] = Step(index, of)
    return begun


def follow_optimizers(torch: Any) -> None:
    """From now on a step ends where an optimizer's does, unless the program calls `step()` itself."""

    def stepped(optimizer: Any, *_: object) -> None:
        if _is_explicit or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        if optimizer not in _optimizers:
            _optimizers[optimizer] = len(_optimizers)
        _begin(_optimizers[optimizer], None)

    torch.optim.optimizer.register_optimizer_step_post_hook(stepped)

