"""Outcomes of tests: a file for each run, which outlives its process, and the verdicts over the runs of two allocators.

A run is one suite on one allocator. Its file has a line of JSON for each event, so that a crash loses none:

{"run": {"suite": "op_db", "torch": "2.11.0", ...}}       the run's identity; a file of another run is rejected
    {"name": "add float32", "began": true}
    {"name": "add float32", "outcome": "passed", "seconds": 0.1, "bits": "9f3c..."}

A test that began and has no outcome was running when its process died.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, CRASHED, TIMEOUT = "passed", "failed", "skipped", "crashed", "timeout"
OUTCOMES = (PASSED, FAILED, SKIPPED, CRASHED, TIMEOUT)


class OtherRun(Exception):
    """The file belongs to another run. The text states the difference."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test in one run."""

    outcome: str
    seconds: float = 0.0
    detail: str = ""
    bits: str | None = None
    """A digest of the results, if the suite computes one."""


class RunFile:
    """The file of a run, for its worker and for the worker's supervisor."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, run: dict[str, Any]) -> None:
        """Continues with an existing file of the same run. Raises `OtherRun`."""
        lines = self._lines()
        known = next((line["run"] for line in lines if "run" in line), None)
        if known is None:
            self._write({"run": run})
        elif known != run:
            keys = known.keys() | run.keys()
            differ = [key for key in sorted(keys) if known.get(key) != run.get(key)]
            told = ", ".join(f"{key} {known.get(key)!r}, now {run.get(key)!r}" for key in differ)
            raise OtherRun(f"{self.path} belongs to another run ({told}): select another folder with --out, or remove the file")

    def began(self, name: str) -> None:
        self._write({"name": name, "began": True})

    def ended(self, name: str, outcome: Outcome) -> None:
        self._write({"name": name} | {key: value for key, value in asdict(outcome).items() if value not in (None, "")})

    def outcomes(self) -> dict[str, Outcome]:
        """Returns the outcomes by test. The last one of a test counts."""
        found = {}
        for line in self._lines():
            if "outcome" in line:
                found[line["name"]] = Outcome(**{key: value for key, value in line.items() if key != "name"})
        return found

    def without_outcome(self, names: list[str]) -> list[str]:
        """Returns the tests among these that have no outcome."""
        known = self.outcomes()
        return [name for name in names if name not in known]

    def running(self) -> str | None:
        """Returns the test that began last, if it has no outcome."""
        running = None
        for line in self._lines():
            if "began" in line:
                running = line["name"]
            elif line.get("name") == running:
                running = None
        return running

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = []
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue  # truncated when its process was killed
        return lines

    def _write(self, line: dict[str, Any]) -> None:
        is_cut = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if is_cut else "") + json.dumps(line) + "\n")


# The verdicts on a test. The first four are no worse than native.
EQUAL, BOTH_FAIL, BOTH_SKIP, BETTER = "equal", "fails on both", "skipped on both", "fails on native alone"
VARIES = "passes, other bits in each native run"
NO_CONTENTS = "passes, contents undefined"
FLAKY = "failed once, passed again"
REGRESSION, OTHER_BITS, UNFINISHED = "REGRESSION", "OTHER BITS", "not finished"
BAD = (REGRESSION, OTHER_BITS)


@dataclass(frozen=True)
class Verdict:
    """The verdict on the runs of a test."""

    verdict: str
    native: str
    ours: str
    detail: str = ""


def judge(native: list[Outcome | None], ours: list[Outcome | None], has_no_contents: bool = False) -> Verdict:
    """Compares a test's runs. `native` and `ours` have one outcome for each run, `None` if it was not run.

    `has_no_contents`: the test's results are undefined, as with `torch.empty`.
    """
    told = _told(native), _told(ours)
    if None in native or None in ours:
        return Verdict(UNFINISHED, *told)
    theirs, mine = [one for one in native if one], [one for one in ours if one]
    detail = next((one.detail for one in mine if one.outcome != PASSED and one.detail), "")
    if any(one.outcome != PASSED for one in theirs):
        if all(one.outcome == SKIPPED for one in theirs + mine):
            return Verdict(BOTH_SKIP, *told)
        return Verdict(BETTER if all(one.outcome == PASSED for one in mine) else BOTH_FAIL, *told, detail)
    # From here on, the test passes natively in every run.
    if all(one.outcome != PASSED for one in mine):
        return Verdict(REGRESSION, *told, detail)
    if any(one.outcome != PASSED for one in mine):
        return Verdict(FLAKY, *told, detail)
    bits = {one.bits for one in theirs}
    if bits == {one.bits for one in mine}:
        return Verdict(EQUAL if len(bits) == 1 else VARIES, *told)
    if has_no_contents:
        return Verdict(NO_CONTENTS, *told)
    return Verdict(VARIES if len(bits) > 1 else OTHER_BITS, *told)


def _told(outcomes: list[Outcome | None]) -> str:
    words = [one.outcome if one else "not run" for one in outcomes]
    return words[0] if len(set(words)) == 1 else ", ".join(words)


@dataclass
class Comparison:
    """All verdicts of a suite."""

    suite: str
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def counts(self) -> Counter[str]:
        return Counter(verdict.verdict for verdict in self.verdicts.values())

    def bad(self) -> list[str]:
        return [name for name, verdict in self.verdicts.items() if verdict.verdict in BAD]

    def unfinished(self) -> int:
        return self.counts()[UNFINISHED]

    def table(self) -> str:
        """Returns Markdown: the number of tests per verdict, then the tests that are neither equal nor skipped."""
        counts = self.counts()
        lines = [f"## {self.suite}", "", "| verdict | tests |", "|---|---:|"]
        order = [*BAD, UNFINISHED, FLAKY, BETTER, BOTH_FAIL, VARIES, NO_CONTENTS, BOTH_SKIP, EQUAL]
        lines += [f"| {verdict} | {counts[verdict]} |" for verdict in order if counts[verdict]]
        told = [(name, one) for name, one in self.verdicts.items() if one.verdict not in (EQUAL, BOTH_SKIP, UNFINISHED)]
        if told:
            told.sort(key=lambda row: (order.index(row[1].verdict), row[0]))
            lines += ["", "| test | verdict | native | symmalloc | |", "|---|---|---|---|---|"]
            lines += [f"| `{name}` | {one.verdict} | {one.native} | {one.ours} | {_cell(one.detail)} |" for name, one in told]
        return "\n".join(lines) + "\n"

    def object(self) -> dict[str, Any]:
        return {"suite": self.suite, "counts": dict(self.counts()), "tests": {k: asdict(v) for k, v in self.verdicts.items()}}


def _cell(text: str, length: int = 160) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")[:length]


def compare(
    suite: str,
    names: Iterable[str],
    native: list[dict[str, Outcome]],
    ours: list[dict[str, Outcome]],
    without_contents: Iterable[str] = (),
    retried: tuple[dict[str, Outcome], dict[str, Outcome]] = ({}, {}),
) -> Comparison:
    """Judges every test. `retried` has the outcomes of repeated tests on both allocators, which count as a further run of both."""
    undefined = set(without_contents)
    comparison = Comparison(suite)
    for name in names:
        runs = [
            [run.get(name) for run in of] + ([again[name]] if name in again else [])
            for of, again in zip((native, ours), retried, strict=True)
        ]
        comparison.verdicts[name] = judge(*runs, has_no_contents=name in undefined)
    return comparison
