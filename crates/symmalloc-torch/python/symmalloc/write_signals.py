"""Writes that cannot end or stop the process by a signal, whatever the actions of its signals are."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU}
"""Those that a write can cause: to a closed pipe, beyond the limit of file sizes, and to the terminal from the background."""


@contextmanager
def without_signals() -> Iterator[None]:
    """Blocks the signals of a write in this thread, and discards those that it causes. The write then fails with an error."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pending = signal.sigpending()
        try:
            yield
        finally:
            for caused in (SIGNALS & signal.sigpending()) - pending:
                signal.sigtimedwait({caused}, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
