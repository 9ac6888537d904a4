"""Descriptors that a forked child closes. For `symmalloc.colocate`, and for dma-bufs.

A child has copies of all descriptors of its parent, whichever thread forks. A copy of a socket or of a lock hides the parent's death, and
a copy of a descriptor of memory keeps that memory on the device. The child therefore closes them before any of its own code runs:

    a thread that opens   holds the lock:  opens a descriptor and registers it
    a thread that forks   holds the lock:  forks ──► the child closes all that are registered

Covers `os.fork` and all that uses it, such as `multiprocessing`. Programs that a process starts inherit none: each descriptor is closed
on `exec`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol


class Closes(Protocol):
    """An object with descriptors, such as a socket."""

    def close(self) -> None: ...


lock = threading.RLock()
"""Held while a descriptor is opened and registered, or closed, and during a fork. A signal handler may fork while its thread holds it."""
_objects: weakref.WeakSet[Closes] = weakref.WeakSet()
_descriptors: set[int] = set()


def register(one: Closes) -> None:
    """Closes an object in forked children."""
    _objects.add(one)


def close(one: Closes) -> None:
    """Closes an object, registered or not."""
    with lock:
        one.close()


@contextmanager
def closing() -> Iterator[ExitStack]:
    """Returns a stack for objects of a constructor, which closes them if it fails."""
    opened = ExitStack()
    try:
        yield opened
    except BaseException:
        close(opened)
        raise


def register_descriptors(descriptors: Iterable[int]) -> None:
    """Closes descriptors in forked children until `close_descriptor`."""
    _descriptors.update(descriptors)


def open_descriptor(opens: Callable[..., int], *arguments: Any) -> int:
    """Returns the registered descriptor that a function opens.

    A fork in another thread waits for that function, such as an export by the driver. Otherwise the child would have a descriptor
    that is not registered yet.
    """
    with lock:
        descriptor = opens(*arguments)
        _descriptors.add(descriptor)
        return descriptor


def forget_descriptor(descriptor: int) -> None:
    """Ends the registration of a descriptor that the caller has closed while it holds the lock."""
    _descriptors.discard(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Closes a descriptor, registered or not. Ignores errors."""
    with lock:
        _descriptors.discard(descriptor)
        with suppress(OSError):
            os.close(descriptor)


def _close_in_child() -> None:
    for one in list(_objects):
        with suppress(Exception):
            one.close()
    while _descriptors:
        close_descriptor(next(iter(_descriptors)))
    lock.release()


os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=_close_in_child)
