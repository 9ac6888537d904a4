"""Processes and deadlines.

Each case has a process for each rank, forked from this process, which has imported PyTorch but never uses CUDA. Cases do not
overlap: CUDA and NCCL of several groups of processes would wait for each other in the driver and on the GPUs.

    fork -> stack.begin -> ready | go -> case -> result -> exit
            \\__ START_SECONDS __/  \\__ deadline __/

A probe has no start: it only writes its result before its deadline.

At the deadline each rank writes its Python stacks (SIGUSR2), and then all its processes are killed: its descendants, its session,
and processes that left both but have its environment or became children of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .nccl import NcclError
from .rank import CannotRun, PeerEnded, Rank, Refused, write
from .verdicts import Outcome, Verdict

START_SECONDS = 60.0
PROBE_SECONDS = 180.0
# The time for the other ranks to end after one has failed.
GRACE_SECONDS = 5.0
EXIT_SECONDS = 5.0
SETTLE_SECONDS = 1.0
LOG_CHARACTERS = 3000
MARK = "SYMMALLOC_CHECK_CASE"
STACKS = signal.SIGUSR2
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
# Errors that mean a defect of the case or an unexpected interface, rather than a refusal.
DEFECTS = (AssertionError, AttributeError, LookupError, NameError, TypeError, ImportError)
# The beginnings of general advice in the errors of PyTorch.
HINTS = r"\n(?:Search for|CUDA kernel errors|Exception raised from|If reserved but)|\. If reserved but"
FATAL = (
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
    "illegal address",
    "illegal instruction",
)


@dataclass(frozen=True)
class Case:
    """One case. `function` runs on each rank."""

    name: str
    title: str
    function: Callable[[Rank], None]
    seconds: float | None = None
    """The shortest deadline."""


class Stack(Protocol):
    """The stack under test."""

    def configure(self) -> None:
        """Sets the environment, and imports what all processes need, before they are forked. Raises `CannotRun`."""

    def probe(self) -> dict[str, Any]:
        """Returns facts about the stack. Runs in a separate process. Raises `CannotRun`."""

    def begin(self, rank: Rank) -> None:
        """Prepares a rank, and connects it with the others."""

    def kernels(self, folder: Path) -> dict[str, int] | None:
        """Returns the number of launches of each symmetric kernel in a case; None if the stack does not count them."""


def probe(stack: Stack) -> dict[str, Any]:
    """Returns the facts about the stack. Raises `CannotRun`."""
    with tempfile.TemporaryDirectory() as folder:
        group = Group(Case("probe", "", lambda _: None), 1, Path(folder), stack, is_probe=True)
        outcome = group.finish(PROBE_SECONDS)
        if outcome.verdict is not Verdict.CORRECT:
            raise CannotRun(outcome.reason)
        return dict(group.results()[0]["facts"])


def run(
    cases: Sequence[Case],
    world: int,
    stack: Stack,
    *,
    seconds: float = 20.0,
    folder: Path | None = None,
) -> Iterator[Outcome]:
    """Runs the cases in order, and yields their outcomes.

    seconds  the deadline of a case that needs no longer one
    folder   keeps the files of all cases; None: a temporary folder
    """
    _prctl(SET_CHILD_SUBREAPER, 1)
    others = set(_children(_processes()).get(os.getpid(), ()))
    with contextlib.ExitStack() as exits:
        if folder is None:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        for number, case in enumerate(cases):
            place = folder.resolve() / f"{number:02}-{case.name}"
            place.mkdir()
            try:
                outcome = Group(case, world, place, stack).finish(max(case.seconds or 0, seconds))
            finally:
                _kill(sorted(set(_children(_processes()).get(os.getpid(), ())) - others), [])
            yield outcome


class Group:
    """The processes of one case."""

    def __init__(self, case: Case, world: int, folder: Path, stack: Stack, *, is_probe: bool = False) -> None:
        self._case, self._world, self._folder, self._stack = case, world, folder, stack
        self._is_probe = is_probe
        self._began = time.monotonic()
        # Each rank reads one byte from its pipe for each go.
        self._pipes = [os.pipe() for _ in range(world)]
        self._statuses: dict[int, int] = {}
        self._kept: Exception | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._pids = [self._fork(rank) for rank in range(world)]
        for read, _ in self._pipes:
            os.close(read)

    def finish(self, seconds: float) -> Outcome:
        """Runs the case, kills what is left of it, and returns its outcome."""
        try:
            outcome = self._outcome(seconds)
        finally:
            self.kill()
        outcome.details["results"] = self.results()
        if outcome.verdict is not Verdict.CORRECT:
            outcome.details["logs"] = {rank: self._log(rank) for rank in range(self._world)}
        return outcome

    def results(self) -> dict[int, dict[str, Any]]:
        """Returns the results of the ranks that have ended their case."""
        return {
            rank: json.loads(path.read_text())
            for rank in range(self._world)
            if (path := self._path("result", rank)).exists()
        }

    def kill(self) -> None:
        """Kills all processes of the case."""
        while self._pipes:
            os.close(self._pipes.pop()[1])
        running = [pid for rank, pid in enumerate(self._pids) if rank not in self._statuses]
        _kill(running, self._pids, f"{MARK}={self._folder}")

    # The processes of the ranks

    def _fork(self, rank: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid != 0:
            return pid
        try:  # the new process
            os.setsid()
            _prctl(SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            self._run(rank)
        finally:
            os._exit(1)

    def _run(self, rank: int) -> None:
        """Runs the case in the process of one rank. Does not return."""
        go = self._pipes[rank][0]
        log = os.open(self._path("log", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(file=2)
        stacks = self._path("stacks", rank).open("w")
        faulthandler.register(STACKS, file=stacks, all_threads=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.environ[MARK] = str(self._folder)
        state = Rank(rank, self._world, self._folder)
        kind, reason = "done", ""
        try:
            if self._is_probe:
                state.facts = self._stack.probe()
            else:
                state.note("starts")
                self._stack.begin(state)
                write(self._path("ready", rank), True)
                os.read(go, 1)
                state.note("begins")
                self._case.function(state)
                state.settle()
        except Exception as error:
            kind, reason = _judge(error)
            traceback.print_exc()
            # PyTorch may abort the process when it destroys a pool after an error, so the error keeps its frames.
            self._kept = error
            # A failed device raises again.
            state.settle_within(SETTLE_SECONDS)
        state.end(kind, reason)
        sys.stdout.flush()
        sys.stderr.flush()
        # Peers may still access memory of this process.
        end = time.monotonic() + EXIT_SECONDS
        while len(self.results()) < self._world and time.monotonic() < end:
            time.sleep(0.001)
        os._exit(0)

    # The judgment

    def _outcome(self, seconds: float) -> Outcome:
        outcome = Outcome(self._case.name, self._case.title, Verdict.CANNOT_RUN)
        if not self._is_probe and self._wait("ready", self._began + START_SECONDS) is None:
            failures = [f"rank {rank} failed ({text})" for rank, text in self._failures()]
            late = "did not follow" if failures else f"did not end within {START_SECONDS:.0f} s"
            outcome.reason = "; ".join([*failures, f"the start {late}", self._where(outcome)])
            outcome.details["is_start"] = True
            return outcome
        began = time.monotonic()
        self._go()
        ended = self._wait("result", began + seconds)
        outcome.seconds = time.monotonic() - began
        if ended is None:
            kinds = {result["kind"] for result in self.results().values()}
            wrong, elements = self._counts()
            # A case that cannot run explains why other ranks wait, but not wrong elements.
            verdicts = {"crashed": Verdict.CRASHES, "cannot": Verdict.WRONG if wrong else Verdict.CANNOT_RUN}
            outcome.verdict = next((verdict for kind, verdict in verdicts.items() if kind in kinds), Verdict.HANGS)
            failures = [f"rank {rank} failed ({text})" for rank, text in self._failures()]
            late = f"no end {GRACE_SECONDS:.0f} s later" if failures else f"no end after {seconds:.0f} s"
            parts = [*failures, late, self._where(outcome), *self._remarks()]
            outcome.reason = "; ".join(parts) + (f"; {wrong:,} of {elements:,} elements were wrong" if wrong else "")
            return outcome
        self._decide(outcome)
        return outcome

    def _go(self) -> None:
        """Lets all ranks continue."""
        for _, write_end in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the rank has ended
                os.write(write_end, b"x")

    def _wait(self, name: str, until: float) -> float | None:
        """Waits until each rank has written its result or this file, or has died. Returns None at the deadline."""
        failed_at = None
        while True:
            self._reap()
            if all(self._has(name, rank) for rank in range(self._world)):
                return time.monotonic()
            now = time.monotonic()
            if failed_at is None and self._failures():
                failed_at = now
            if now > until or (failed_at is not None and now > failed_at + GRACE_SECONDS):
                return None
            time.sleep(0.005)

    def _has(self, name: str, rank: int) -> bool:
        return any(self._path(file, rank).exists() for file in (name, "result"))

    def _failures(self) -> list[tuple[int, str]]:
        """Returns the ranks that failed, with the reasons."""
        return [
            (rank, result["reason"])
            for rank, result in self.results().items()
            if result["kind"] not in ("done", "peer")
        ]

    def _decide(self, outcome: Outcome) -> None:
        results = self.results()
        by_kind = {
            kind: [(rank, result["reason"]) for rank, result in results.items() if result["kind"] == kind]
            for kind in ("done", "crashed", "refused", "cannot")
        }
        wrong, elements = self._counts()
        kernels = self._stack.kernels(self._folder)
        reduces = max((result["reduces"] for result in results.values()), default=0)
        # A rank without a counted all-reduce or a compared element proves nothing. A probe has neither.
        idle = [(rank, "no all-reduce was compared") for rank, it in results.items() if not (it["reduces"] and it["elements"])]
        if kernels is not None:
            outcome.details["kernels"] = kernels
        remarks = self._remarks()
        wrong_by_rank = ", ".join(f"rank {rank}: {result['wrong']:,}" for rank, result in results.items())
        if by_kind["crashed"]:
            outcome.verdict = Verdict.CRASHES
            outcome.reason = "; ".join([*_each(by_kind["crashed"], self._world), *remarks])
            outcome.reason += f"; {wrong:,} of {elements:,} elements were wrong" if wrong else ""
        elif wrong:
            refusals = _each(by_kind["refused"], self._world)
            outcome.verdict = Verdict.WRONG
            outcome.reason = "; ".join([f"{wrong:,} of {elements:,} elements ({wrong_by_rank})", *remarks, *refusals])
        elif by_kind["refused"]:
            outcome.verdict, outcome.reason = Verdict.REFUSED, "; ".join(_each(by_kind["refused"], self._world))
        elif by_kind["cannot"] or len(by_kind["done"]) < self._world:
            outcome.reason = "; ".join(_each(by_kind["cannot"], self._world))
        elif idle and not self._is_probe:
            outcome.reason = "; ".join([*_each(idle, self._world), *remarks])
        elif kernels is not None and sum(kernels.values()) < reduces:
            used = f"{sum(kernels.values()):,} of {reduces:,} all-reduces used a symmetric kernel"
            outcome.reason = "; ".join([f"{used}, so the result proves nothing", *remarks])
        else:
            outcome.verdict, outcome.reason = Verdict.CORRECT, "; ".join(remarks)

    def _remarks(self) -> list[str]:
        """Returns the different remarks of all ranks."""
        return list(dict.fromkeys(remark for result in self.results().values() for remark in result["remarks"]))

    def _counts(self) -> tuple[int, int]:
        """Returns the wrong and all compared elements of all ranks, as far as they are known."""
        states = [self.results().get(rank) or self._state(rank) for rank in range(self._world)]
        return sum(state.get("wrong", 0) for state in states), sum(state.get("elements", 0) for state in states)

    def _where(self, outcome: Outcome) -> str:
        """Returns the last operation and the innermost Python frame of each rank that has not ended."""
        running = [rank for rank in range(self._world) if not self._path("result", rank).exists()]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], STACKS)
        time.sleep(0.3)
        stacks = {rank: self._path("stacks", rank).read_text() for rank in running}
        outcome.details["stacks"] = stacks
        outcome.details["operations"] = {rank: self._operation(rank) for rank in range(self._world)}
        return "; ".join(f"rank {rank} is in: {self._operation(rank)}{_frame(stacks[rank])}" for rank in running)

    def _operation(self, rank: int) -> str:
        return str(self._state(rank).get("operation", "the start of the process"))

    def _state(self, rank: int) -> dict[str, Any]:
        try:
            return dict(json.loads(self._path("state", rank).read_text()))
        except (OSError, ValueError):
            return {}

    def _log(self, rank: int) -> str:
        """Returns the end of what the rank has printed."""
        try:
            return self._path("log", rank).read_text(errors="replace")[-LOG_CHARACTERS:]
        except OSError:
            return ""

    def _path(self, name: str, rank: int) -> Path:
        return self._folder / f"{name}{rank}"

    def _reap(self) -> None:
        for rank, pid in enumerate(self._pids):
            if rank not in self._statuses:
                with contextlib.suppress(ChildProcessError):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        self._statuses[rank] = status
                        if not self._path("result", rank).exists():
                            # The result ends the waits of the other ranks.
                            reason = f"{_death(status)} in: {self._operation(rank)}"
                            result = Rank(rank, self._world, self._folder).result("crashed", reason)
                            write(self._path("result", rank), result | self._state(rank))


def _judge(error: Exception) -> tuple[str, str]:
    """Returns the kind of a result, and its reason: the first error, if others followed from it."""
    while isinstance(error.__context__, Exception) and not isinstance(error, (CannotRun, Refused, PeerEnded)):
        error = error.__context__
    text = " ".join(re.split(HINTS, str(error).strip())[0].split())[:600] or "no text"
    if isinstance(error, CannotRun):
        return "cannot", text
    if isinstance(error, PeerEnded):
        return "peer", text
    if any(fatal in text for fatal in FATAL):
        return "crashed", text
    if isinstance(error, DEFECTS) and type(error).__module__ == "builtins":
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "cannot", f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
    return "refused", text if isinstance(error, (Refused, NcclError)) else f"{type(error).__name__}: {text}"


def _each(reasons: list[tuple[int, str]], world: int) -> list[str]:
    """Returns each different reason with its ranks."""
    by_text: dict[str, list[int]] = {}
    for rank, text in reasons:
        by_text.setdefault(text, []).append(rank)
    return [
        text if len(ranks) == world else f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()
    ]


def _frame(stack: str) -> str:
    """Returns the innermost frame of the main thread in a dump of faulthandler."""
    threads = stack.split("\n\n")
    main = next((thread for thread in threads if thread.startswith("Current thread")), threads[-1])
    found = re.search(r'File "(.+)", line (\d+) in (\S+)', main)
    return f" ({Path(found[1]).name}:{found[2]} {found[3]})" if found else ""


def _death(status: int) -> str:
    """Describes the end of a process."""
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with {os.waitstatus_to_exitcode(status)}"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children(processes: dict[int, tuple[int, int]]) -> dict[int, list[int]]:
    """Returns the children of each process."""
    children: dict[int, list[int]] = {}
    for process, (parent, _) in processes.items():
        children.setdefault(parent, []).append(process)
    return children


def _processes() -> dict[int, tuple[int, int]]:
    """Returns parent and session of each process, except of zombies."""
    processes = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                status, parent, _, session = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[:4]
                if status != "Z":
                    processes[int(entry)] = (int(parent), int(session))
    return processes


def _kill(pids: list[int], sessions: list[int], mark: str | None = None) -> None:
    """Kills processes, their descendants, all processes of sessions, and processes with this mark in their environment."""
    doomed = set(pids)
    for _ in range(100):
        processes = _processes()
        children = _children(processes)
        pending = list(doomed)
        while pending:
            for child in children.get(pending.pop(), ()):
                if child not in doomed:
                    doomed.add(child)
                    pending.append(child)
        doomed |= {process for process, (_, session) in processes.items() if session in sessions}
        if mark is not None:
            doomed |= {process for process in processes if process != os.getpid() and _has_mark(process, mark)}
        alive = [process for process in doomed if process in processes]
        for process in alive:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        for process in doomed:
            with contextlib.suppress(ChildProcessError, OSError):
                os.waitpid(process, os.WNOHANG)
        if not alive:
            return
        time.sleep(0.02)


def _has_mark(process: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
