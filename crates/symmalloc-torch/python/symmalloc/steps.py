"""Steps, the repeated parts of a program that follow plans: `install("plan:learn")`, and `step()` once per iteration.

    symmalloc.install("plan:learn")
    for batch in loader:
        symmalloc.step()                             ends the previous step and begins the next one
        ...

or `with symmalloc.step(): ...` around the repeated part. Without either, `install("plan:learn")` ends a step at the end of an
optimizer's `step()`.

The allocator plans a step after two equal runs. Later runs follow the plan, so the reserved memory equals the peak live memory.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from .allocator import Allocator, StepReport
from .devices import Device, device_index
from .state import allocator

# The open step of each device, begun by `step()` or by an optimizer.
_open: dict[int, Step] = {}

# The report of the last step on each device.
_last: dict[int, StepReport] = {}

# The number of each optimizer, in order of their first steps. It is the key of the steps that begin after the optimizer's.
_optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# `True` after the program called `step()` itself.
_is_explicit = False


class Step:
    """An open step of a device's default pool. It ends with the `with` block, or when the next step begins."""

    def __init__(self, device: int, of: Allocator) -> None:
        self.device = device
        self.report: StepReport | None = None
        """The report; None until the step has ended."""
        self._allocator = of

    def end(self) -> StepReport:
        """Ends the step if it is open. Returns its report, which states how many allocations followed the plan."""
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
    """Begins a step, and ends the step of the previous call if it is still open.

    key     equal for steps that make the same allocations, such as a hash of the batch's shape; 0 if all steps do
    device  None: the current one

    Call it at the same point on every rank, and not during a graph capture. Raises `NotInstalled`.
    """
    global _is_explicit
    _is_explicit = True
    return _begin(key, device)


def last_step(device: Device = None) -> StepReport | None:
    """Returns the report of the last step that `step()` or an optimizer ended on the device; None before the first."""
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
    """Ends a step after each optimizer step, unless the program calls `step()` itself."""

    def stepped(optimizer: Any, *_: object) -> None:
        if _is_explicit or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        if optimizer not in _optimizers:
            _optimizers[optimizer] = len(_optimizers)
        _begin(_optimizers[optimizer], None)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(stepped)

