"""A check with cases that are right, wrong, hang, crash and fail, on a stack without GPUs: `fake_check.py NOTES [CASE...]`.

The folder NOTES receives the ids of processes that must not survive their case. Options in the environment:

FAKE_DEVICES  the number of devices, by default 2
FAKE_CONTROL  `right` or `wrong`: adds a control with this result
FAKE_JSON     print JSON
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from symmalloc.check_symmetric.__main__ import check
from symmalloc.check_symmetric.rank import CannotRun, Rank, Refused
from symmalloc.check_symmetric.runner import Case
from symmalloc.errors import MisalignedError

NOTES = Path(sys.argv[1])


class Fake:
    """A stack without GPUs. It counts two launches of a symmetric kernel in each case."""

    def configure(self) -> None:
        pass

    def probe(self) -> dict[str, Any]:
        if "FAKE_PROBE" in os.environ:
            raise CannotRun(os.environ["FAKE_PROBE"])
        return {"allocator": "fake", "devices": ["fake"] * int(os.environ.get("FAKE_DEVICES", "2"))}

    def begin(self, rank: Rank) -> None:
        (NOTES / f"began-{rank.folder.name}-{rank.rank}").touch()
        if rank.folder.name.endswith("start-fails") and rank.rank == 1:
            raise Refused("no device")

    def kernels(self, folder: Path) -> dict[str, int] | None:
        return {"kernel": 2}


def right(rank: Rank) -> None:
    assert rank.exchange(rank.rank * 10) == [10 * other for other in range(rank.world)]
    reduced(rank)
    rank.remark("a remark")


def reduced(rank: Rank) -> None:
    """Counts two all-reduces, and compares their elements."""
    rank.reduces = 2
    rank.compared(100, 0)


def wrong(rank: Rank) -> None:
    rank.compared(100, 7 if rank.rank == 1 else 0)


def wrong_and_cannot(rank: Rank) -> None:
    """Reports wrong elements on rank 0, which then cannot run, and blocks the others."""
    if rank.rank == 0:
        rank.compared(100, 3)
        raise CannotRun("no such feature")
    stuck()


def without_reduce(rank: Rank) -> None:
    rank.compared(100, 0)


def without_comparison(rank: Rank) -> None:
    rank.reduces = 2


def without_comparison_on_rank_1(rank: Rank) -> None:
    rank.reduces = 2
    rank.compared(100 if rank.rank == 0 else 0, 0)


def hangs(rank: Rank) -> None:
    rank.compared(100, 3)
    if rank.rank == 0:
        rank.note("waits for ever")
        # A child, a grandchild that leaves the session and becomes an orphan, and a child that ignores signals.
        sleep = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
        fork = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)"
        stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {sleep}"
        subprocess.Popen([sys.executable, "-c", sleep, NOTES / "child"])
        subprocess.Popen([sys.executable, "-c", fork, "-c", sleep, NOTES / "orphan"])
        subprocess.Popen([sys.executable, "-c", stubborn, NOTES / "stubborn"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() != 0:
                os._exit(0)
            (NOTES / "daemon").write_text(str(os.getpid()))
            time.sleep(600)
        (NOTES / "rank").write_text(str(os.getpid()))
        stuck()


def stuck() -> None:
    time.sleep(600)


def fails_and_others_hang(rank: Rank) -> None:
    if rank.rank == 0:
        raise Refused("no window for you")
    rank.note("waits for rank 0")
    stuck()


def fails_and_others_wait(rank: Rank) -> None:
    if rank.rank == 0:
        raise Refused("no window for you")
    rank.exchange("never")


def crashes(rank: Rank) -> None:
    if rank.rank == 1:
        rank.note("about to crash")
        os.kill(os.getpid(), signal.SIGSEGV)
    rank.exchange("never")


def exits(rank: Rank) -> None:
    os._exit(3)


def refused(rank: Rank) -> None:
    raise RuntimeError("not supported\nSearch for advice in the documentation")


def misaligned(rank: Rank) -> None:
    raise MisalignedError("rank 1 differs")


def fails_twice(rank: Rank) -> None:
    try:
        raise RuntimeError("the cause")
    finally:
        raise OSError("what followed from it")


def device_fails(rank: Rank) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def cannot(rank: Rank) -> None:
    raise CannotRun("no such feature")


def defect(rank: Rank) -> None:
    raise AssertionError("unexpected")


def without_kernel(rank: Rank) -> None:
    rank.reduces = 5
    rank.compared(100, 0)


def alone(rank: Rank) -> None:
    begun = {path.name.split("-")[2] for path in NOTES.glob("began-*")}
    assert begun <= {"right", "alone"}, begun
    reduced(rank)


def slow(rank: Rank) -> None:
    time.sleep(2.5)
    reduced(rank)


FUNCTIONS = (
    right, wrong, hangs, fails_and_others_hang, fails_and_others_wait, crashes, exits, refused, device_fails, cannot, defect,
    without_kernel, without_reduce, without_comparison, without_comparison_on_rank_1, alone, misaligned, fails_twice,
    wrong_and_cannot,
)  # fmt: skip
CASES = {
    **{function.__name__: Case(function.__name__, "a fake", function) for function in FUNCTIONS},
    "start-fails": Case("start-fails", "a fake", right),
    "long": Case("long", "a fake", slow, seconds=10.0),
    "late": Case("late", "a fake", slow),
    "interrupts": Case("interrupts", "a fake", lambda rank: os.kill(os.getppid(), signal.SIGINT) or time.sleep(600)),
}
CONTROLS = {"right": Case("control", "the control", right), "wrong": Case("control", "the control", wrong)}

sys.exit(
    check(
        Fake(),
        [CASES[name] for name in sys.argv[2:]],
        None,
        control=CONTROLS.get(os.environ.get("FAKE_CONTROL", "")),
        seconds=2.0,
        as_json="FAKE_JSON" in os.environ,
    )
)
