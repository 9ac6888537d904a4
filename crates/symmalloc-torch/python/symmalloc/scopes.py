"""The scope of a pool. A model may enter a scope for every layer, so entry and exit each make a single library call.

The library ends the scope that began last on the thread and device, whichever pool it is of. Each thread therefore lists its open
scopes here, and a scope that ends out of order is an error.
"""

from __future__ import annotations

import threading
from types import TracebackType

from .errors import Error, InvalidState
from .library import call, failure
from .pool import MemPool


class _Thread(threading.local):
    """The open scopes of this thread."""

    def __init__(self) -> None:
        self.open: list[Scope] = []


_thread = _Thread()


class Scope:
    """The result of `use_mem_pool`. It is reentrant and can be reused."""

    __slots__ = ("_pool", "_registers")

    def __init__(self, pool: MemPool, registers: bool) -> None:
        self._pool, self._registers = pool, registers

    @property
    def device(self) -> int:
        return self._pool.device

    def __enter__(self) -> None:
        pool = self._pool
        if pool.graphs and not _is_capturing(pool.device):
            raise InvalidState(
                "the pool's memory belongs to graphs: use it in a capture, so that nothing overwrites what a graph has captured"
            )
        if status := pool._calls.begin(pool.device, pool.id):
            raise failure("scope_begin", status)
        _thread.open.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        open_scopes = _thread.open
        if not open_scopes or open_scopes[-1] is not self:
            self._end_out_of_order(open_scopes, error)
            return
        open_scopes.pop()
        pool = self._pool
        if error is not None:
            self._end_with(error)
        elif not self._registers:
            if status := pool._calls.leave(pool.device):
                raise failure("torch_pop_pool", status)
        elif pool._groups and not _are_alive(pool):
            call("torch_pop_pool", pool.device)
            pool._check_groups()
        elif status := pool._calls.end(pool.device, pool.id, None, None):
            raise failure("scope_end", status)

    def _end_out_of_order(self, open_scopes: list[Scope], error: BaseException | None) -> None:
        """Ends the scope, and with it the scopes of its device that began inside. Raises `InvalidState` unless there are none."""
        if self not in open_scopes:
            _fail(
                "the pool's scope has ended already, or began on another thread: end scopes in reverse order, on their thread",
                error,
            )
            return
        at = max(at for at, scope in enumerate(open_scopes) if scope is self)
        inner = [scope for scope in open_scopes[at + 1 :] if scope.device == self.device]
        others = [scope for scope in open_scopes[at + 1 :] if scope.device != self.device]
        for _ in inner:
            call("torch_pop_pool", self.device)
        open_scopes[at:] = [*others, self]
        self.__exit__(None, error, None)
        if inner:
            _fail(
                f"{len(inner)} scopes that began inside the pool's scope ended with it: end a scope, and undo a call of "
                "tms_set_, in the block in which it began",
                error,
            )

    def _end_with(self, error: BaseException) -> None:
        """Ends the scope after an error inside, which then propagates.

        The other ranks join the sync, so this one does too. An interrupted thread skips it, and the others time out.
        """
        pool = self._pool
        try:
            if self._registers and isinstance(error, Exception) and _are_alive(pool):
                call("scope_end", pool.device, pool.id, None, None)
            else:
                call("torch_pop_pool", pool.device)
        except Error as failed:
            _add_note(error, failed)


def innermost(device: int) -> Scope | None:
    """Returns the scope that began last on this thread and device; None outside of all scopes."""
    return next((scope for scope in reversed(_thread.open) if scope.device == device), None)


def use_mem_pool(pool: MemPool, *, register: bool = False) -> Scope:
    """Directs this thread's allocations on the pool's device to the pool, inside a `with` block.

    register  register new segments on every group of the pool at the end of the scope, as `pool.sync()` does. The end is then
              collective: every rank ends the scope at the same point. With `Mode.OFF` an end without new segments takes about
              a microsecond

    Scopes nest, and an end out of order raises `InvalidState`. Threads started inside do not inherit the scope. A capture cannot
    register memory, so an end with new segments raises `InvalidState` there: reserve memory for the capturing stream, and sync,
    before the capture. If the block raises, the end still syncs, because the other ranks do, and the error propagates. Raises
    `InvalidState` for `register` with a pool that has no registration, and for a graph pool outside of a capture.
    """
    if register and not pool._on:
        raise InvalidState(
            "the pool is not registered: call MemPool.register() before use_mem_pool(register=True)"
        )
    return Scope(pool, register)


def _fail(text: str, error: BaseException | None) -> None:
    """Raises `InvalidState`, or adds it to an error that propagates already."""
    if error is None:
        raise InvalidState(text)
    _add_note(error, InvalidState(text))


def _add_note(error: BaseException, failed: Error) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"The end of the pool's scope failed as well: {failed}")


def _are_alive(pool: MemPool) -> bool:
    """Returns `True` if no group of the pool was destroyed."""
    for member in pool._groups:
        if not member.is_as_it_was():
            try:
                member.check_alive()
            except Error:
                return False
    return True


def _is_capturing(device: int) -> bool:
    import torch

    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
