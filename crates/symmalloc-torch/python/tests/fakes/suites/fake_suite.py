"""A suite whose tests behave differently on the two allocators, without PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from results import PASSED, SKIPPED, Outcome

IS_OURS = os.environ["SYMMALLOC_SUITES_ALLOCATOR"] == "symmalloc"
NOTES = Path(os.environ["FAKE_SUITE_NOTES"])
WITHOUT_CONTENTS = ("undefined",)


class Broken(Exception):
    pass


def names() -> list[str]:
    return [
        "fine", "fails", "skips", "fails here", "crashes here", "hangs here", "skips here", "fails there", "once", "other bits",
        "undefined", "breaks", "last",
    ]  # fmt: skip


def run(name: str) -> Outcome:
    """Records that the test ran, and on which allocator."""
    noted = NOTES / f"{name}-{'ours' if IS_OURS else 'native'}"
    runs = len(noted.read_text()) if noted.exists() else 0
    noted.write_text("x" * (runs + 1))
    bits = "1"
    match name:
        case "fails" | "breaks":
            raise Broken("no luck")
        case "skips":
            return Outcome(SKIPPED, detail="on purpose")
        case "fails here" if IS_OURS:
            raise AssertionError("1 is not | 2")
        case "fails there" if not IS_OURS:
            raise AssertionError("natively")
        case "crashes here" if IS_OURS:
            os.abort()
        case "hangs here" if IS_OURS:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
            (NOTES / "child").write_text(str(child.pid))
            time.sleep(300)
        case "skips here" if IS_OURS:
            return Outcome(SKIPPED)
        case "once" if IS_OURS and runs == 0:
            raise AssertionError("bad luck")
        case "other bits" | "undefined" if IS_OURS:
            bits = "2"
    return Outcome(PASSED, bits=bits)


def IS_BROKEN(error: Exception) -> bool:
    return isinstance(error, Broken)
