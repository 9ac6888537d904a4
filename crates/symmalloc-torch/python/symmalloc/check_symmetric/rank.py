"""The state of one rank of a case: its notes, its values, and exchanges between ranks.

Ranks exchange values through files in the folder of the case, because NCCL and the GPU are under test.

folder/state0    the last operation of rank 0, and its counts; overwritten in place
folder/result0   the result of rank 0; exists when the rank has ended its case
folder/value3.0  the value of rank 0 in the third exchange
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

STATE_BYTES = 1024
# A prime number. Sums of the values of up to 44 ranks are exact in float32.
PERIOD = 16381
FACTOR, SHIFT = 7, 1009


class CannotRun(Exception):
    """The case cannot run here. The text states the reason."""


class Refused(Exception):
    """The allocator or a library refused an operation, and the ranks continued."""


class PeerEnded(Exception):
    """Another rank has ended the case, so this rank ends it, too."""


class Rank:
    """One rank of a case."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self.allocator: Any = None
        """The allocator under test, set at the start."""
        self.reduces = 0
        """The number of all-reduces that must use a symmetric kernel."""
        self.elements = 0
        self.remarks: list[str] = []
        self.facts: dict[str, Any] = {}
        self._wrong = 0
        self._wrong_on_device: Any = None
        self._exchanges = 0
        self._state = os.open(folder / f"state{rank}", os.O_RDWR | os.O_CREAT, 0o600)
        self._pattern: Any = None

    # Notes

    def note(self, operation: str) -> None:
        """Records the operation that starts now, for the report of a hang."""
        text = json.dumps({"operation": operation[:400], "wrong": self._wrong, "elements": self.elements})
        os.pwrite(self._state, text.encode()[:STATE_BYTES].ljust(STATE_BYTES), 0)

    def remark(self, text: str) -> None:
        """Adds a remark to the result, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    # Exchanges

    def exchange(self, value: Any) -> list[Any]:
        """Returns the values of all ranks. Raises `PeerEnded` if another rank has ended the case."""
        self._exchanges += 1
        name = f"value{self._exchanges}"
        write(self.folder / f"{name}.{self.rank}", value)
        values = []
        for rank in range(self.world):
            path = self.folder / f"{name}.{rank}"
            while not path.exists():
                if (self.folder / f"result{rank}").exists() and not path.exists():
                    raise PeerEnded(f"rank {rank} has ended")
                time.sleep(0.0005)
            values.append(json.loads(path.read_text()))
        return values

    # Values. Rank r contributes (r + 1) * base(position, tag), and base is never 0, so the sum shows every mix-up of ranks,
    # tags and positions.

    def prepare(self, elements_max: int) -> None:
        """Computes the values on the device."""
        import torch

        positions = torch.arange(elements_max + PERIOD, device="cuda", dtype=torch.int32)
        self._pattern = positions.mul_(FACTOR).remainder_(PERIOD).add_(1).float()
        self._wrong_on_device = torch.zeros((), device="cuda", dtype=torch.int64)

    def base(self, elements: int, tag: int) -> Any:
        """Returns base(position, tag) for all positions."""
        shift = tag * SHIFT % PERIOD
        return self._pattern[shift : shift + elements]

    def fill(self, tensor: Any, tag: int) -> None:
        """Writes this rank's values."""
        import torch

        torch.mul(self.base(tensor.numel(), tag), float(self.rank + 1), out=tensor)

    def expect(self, tensor: Any, tag: int) -> None:
        """Compares a tensor with the sum of all ranks' values. Does not block."""
        factor = self.world * (self.world + 1) // 2
        self.compared(tensor.numel(), (tensor != self.base(tensor.numel(), tag) * float(factor)).sum())

    def settle(self) -> int:
        """Waits for the device. Returns the number of wrong elements so far."""
        if self._wrong_on_device is not None:
            import torch

            torch.cuda.synchronize()
            self._wrong = int(self._wrong_on_device)
        return self._wrong

    def settle_within(self, seconds: float) -> None:
        """Counts the wrong elements so far, if the device completes in time. After an error it may never complete."""
        thread = threading.Thread(target=self._settle_quietly, daemon=True)
        thread.start()
        thread.join(seconds)

    def _settle_quietly(self) -> None:
        with contextlib.suppress(Exception):  # a failed device raises again
            self.settle()

    def compared(self, elements: int, wrong: Any) -> None:
        """Counts compared elements, and wrong ones: a number, or a tensor on the device."""
        self.elements += elements
        if self._wrong_on_device is None:
            self._wrong += wrong
        else:
            self._wrong_on_device += wrong

    # Results

    def result(self, kind: str, reason: str = "") -> dict[str, Any]:
        return {
            "kind": kind,
            "reason": reason,
            "wrong": self._wrong,
            "elements": self.elements,
            "reduces": self.reduces,
            "remarks": self.remarks,
            "facts": self.facts,
        }

    def end(self, kind: str, reason: str = "") -> None:
        """Writes the result."""
        write(self.folder / f"result{self.rank}", self.result(kind, reason))


def write(path: Path, value: Any) -> None:
    """Writes JSON atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, default=str))
    partial.rename(path)
