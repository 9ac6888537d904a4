"""Verdicts, the lines of the table, and JSON."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.Enum):
    CORRECT = "correct"
    WRONG = "WRONG"
    HANGS = "HANGS"
    CRASHES = "CRASHES"
    REFUSED = "refused"
    CANNOT_RUN = "cannot run here"


BAD = (Verdict.WRONG, Verdict.HANGS, Verdict.CRASHES)


@dataclass
class Outcome:
    """The verdict on one case."""

    case: str
    title: str
    verdict: Verdict
    reason: str = ""
    """The number of wrong elements, the error, or the place where each rank was. A remark for a correct case."""
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    """Further facts for `--json`: the results of the ranks, stacks, and NCCL's kernels."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "title": self.title,
            "verdict": self.verdict.value.lower(),
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
            "details": self.details,
        }


def exit_code(outcomes: list[Outcome]) -> int:
    """Returns 0 if a case is correct and none is wrong, hangs or crashes; 1 if one does; 2 otherwise.

    If the check was interrupted, the caller returns 2 instead of 0.
    """
    if any(outcome.verdict in BAD for outcome in outcomes):
        return 1
    return 0 if any(outcome.verdict is Verdict.CORRECT for outcome in outcomes) else 2


def line(outcome: Outcome, names: Iterable[str], columns: int = 118) -> str:
    """Returns the outcome as a line of the table of these cases. The reason is wrapped."""
    name = max(len(name) for name in names)
    verdict = max(len(verdict.value) for verdict in Verdict)
    indent = name + verdict + 4
    text = f"{outcome.title}: {outcome.reason}" if outcome.reason else outcome.title
    first, *rest = textwrap.wrap(" ".join(text.split()), max(40, columns - indent), break_long_words=False)
    lines = [f"{outcome.case:<{name}}  {outcome.verdict.value:<{verdict}}  {first}"]
    return "\n".join(lines + [" " * indent + part for part in rest])


class Table:
    """Prints a line for each outcome as it arrives. Consecutive outcomes with one reason share a line."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._first: Outcome | None = None
        self._further: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        first = self._first
        if first is not None and outcome.reason and (outcome.verdict, outcome.reason) == (first.verdict, first.reason):
            self._further.append(outcome)
            return
        self.end()
        self._first = outcome
        print(line(outcome, self._names), flush=True)

    def end(self) -> None:
        """Prints the line of the outcomes that share the last reason."""
        if self._further:
            first, last = self._further[0], self._further[-1]
            text = "the same" if first is last else f"the same, and for {len(self._further) - 1} more up to {last.case}"
            print(line(Outcome(first.case, text, first.verdict), self._names), flush=True)
        self._further.clear()


def summary(outcomes: list[Outcome]) -> str:
    """Returns one line with the number of cases for each verdict."""
    counts = {verdict: sum(outcome.verdict is verdict for outcome in outcomes) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
