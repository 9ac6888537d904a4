"""A run of a suite on an allocator, in supervised workers. A worker that dies or hangs is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import CRASHED, TIMEOUT, Outcome, RunFile
from worker import BROKEN

WORKER = Path(__file__).resolve().with_name("worker.py")
# A worker imports PyTorch and creates a context before its first test.
START_SECONDS = 300
POLL_SECONDS = 0.1
# The number of consecutive workers that may exit before they begin a test. With more, no test is the cause.
VAIN_STARTS_MAX = 2


class WorkerFailed(Exception):
    """Workers do not start. The text names the file with their output."""


@dataclass(frozen=True)
class Listed:
    """The tests of a suite."""

    names: list[str]
    without_contents: list[str]


@dataclass
class Machine:
    """The options for running tests."""

    gpus: int
    at_once: int
    """The maximum number of concurrent tests. Each test has its own GPU, or all of them."""
    seconds: float
    """The time limit per test, in seconds."""
    deadline: float
    """The time on the monotonic clock after which no test begins."""

    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def environment(self, gpu: int | None) -> dict[str, str]:
        # The order of samples in `op_db` depends on the order of sets.
        added = {"PYTHONUNBUFFERED": "1", "WORLD_SIZE": str(self.gpus), "PYTHONHASHSEED": "0"}
        if gpu is not None and self.gpus > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            added["CUDA_VISIBLE_DEVICES"] = visible[gpu] if len(visible) >= self.gpus and visible[0] else str(gpu)
        return os.environ | added


def listed(suite: str, machine: Machine) -> Listed:
    """Lists the tests of a suite in a worker, because this process never imports PyTorch. Raises `WorkerFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "names.json"
        command = [sys.executable, str(WORKER), suite, "native", str(file), "--list"]
        done = subprocess.run(command, env=machine.environment(None), capture_output=True, text=True, timeout=START_SECONDS)
        if done.returncode != 0:
            raise WorkerFailed(f"{suite} cannot be listed:\n{done.stderr[-2000:]}")
        return Listed(**json.loads(file.read_text()))


@dataclass
class Run:
    """One suite on one allocator."""

    suite: str
    allocator: str
    path: Path
    facts: dict[str, Any]
    """Returns the identity of the run. A file of another run is not continued."""

    def carry_out(self, names: list[str], machine: Machine, shares_gpus: bool) -> dict[str, Outcome]:
        """Runs tests without an outcome until the deadline. With `shares_gpus`, each test needs one GPU, and the GPUs work
        concurrently. Raises `OtherRun` and `WorkerFailed`."""
        parts = max(machine.at_once, machine.gpus if shares_gpus else 1)
        files = [RunFile(self.path.with_suffix(f".{part}.jsonl")) for part in range(parts)]
        # The number of GPUs may differ from the earlier run.
        known = self._known()
        for file in files:
            file.begin(self.facts)
        left = [name for name in names if name not in known]
        with ThreadPoolExecutor(parts) as threads:
            works = [
                threads.submit(self._work, file, left[part::parts], machine, part % machine.gpus if shares_gpus else None)
                for part, file in enumerate(files)
            ]
            for work in works:
                work.result()
        return self._known()

    def _known(self) -> dict[str, Outcome]:
        known: dict[str, Outcome] = {}
        for path in sorted(self.path.parent.glob(f"{self.path.stem}.*.jsonl")):
            known |= RunFile(path).outcomes()
        return known

    def _work(self, file: RunFile, names: list[str], machine: Machine, gpu: int | None) -> None:
        vain = 0
        while left := file.without_outcome(names):
            if machine.is_over():
                return
            before = len(left)
            code = self._watch(file, left, machine, gpu)
            running = file.running()
            if running is not None and code is None and not machine.is_over():
                file.ended(running, Outcome(TIMEOUT, machine.seconds, f"no end after {machine.seconds:.0f} s"))
            elif running is not None and code is not None:
                file.ended(running, Outcome(CRASHED, detail=_told(code)))
            vain = 0 if len(file.without_outcome(names)) < before else vain + 1
            if vain > VAIN_STARTS_MAX:
                log = file.path.with_suffix(".log")
                raise WorkerFailed(f"workers of {self.suite} on {self.allocator} begin no test: see {log}")

    def _watch(self, file: RunFile, names: list[str], machine: Machine, gpu: int | None) -> int | None:
        """Starts a worker and waits for it. Returns its exit status; `None` if it timed out and was killed."""
        command = [sys.executable, str(WORKER), self.suite, self.allocator, str(file.path)]
        with file.path.with_suffix(".log").open("ab") as log, tempfile.TemporaryFile() as given:
            given.write("\n".join(names).encode())
            given.seek(0)
            size, since, is_started = file.path.stat().st_size, time.monotonic(), False
            # A separate session, so that the child processes of a test end with it.
            worker = subprocess.Popen(
                command, env=machine.environment(gpu), stdin=given, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while True:
                    try:
                        code = worker.wait(POLL_SECONDS)
                        return 0 if code == BROKEN else code
                    except subprocess.TimeoutExpired:
                        pass
                    if (grown := file.path.stat().st_size) != size:
                        size, since, is_started = grown, time.monotonic(), True
                    limit = machine.seconds if is_started else machine.seconds + START_SECONDS
                    if time.monotonic() - since > limit or machine.is_over():
                        return None
            finally:
                _end_all(worker)


def _end_all(worker: subprocess.Popen[bytes]) -> None:
    """Ends the worker's session, because its child processes may still run."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _told(code: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with {code}"
