"""A trainer and an inference engine that take turns on the same devices, in two processes per device.

    trainer, one process per rank                          engine, one process per rank
    turns = Trainer("/run/job", rank, ranks, memory=...)    turns = Engine("/run/job", rank, ranks, memory=...)
    train()                                                 turns.take(load)    waits, loads the weights, wakes
    turns.hand_over(weights)   releases all its memory      generate()
    turns.take()               waits, and wakes             turns.hand_over()   releases all its memory

The engine reads the trainer's weights where they are: `load` gets tensors in the trainer's memory, which a socket has handed over by
file descriptors (`SCM_RIGHTS`). It copies what it needs on the device. An engine with equal layouts needs no copy: it uses the tensors
as its parameters until it hands over (`take(keep=True)` and `adopt`). No call needs `ptrace`, `pidfd_getfd` or CUDA's IPC handles.

Rank R of the trainer pairs with rank R of the engine, on one device. Every call has a deadline. If any of the processes dies, all
others raise `PeerDied` in their current or next call, which names the process; `on_death` also reaches processes that are blocked
elsewhere, such as in a collective. A failed object stays failed: end the process, which returns its memory.

See docs/colocate.md in the repository.
"""

from __future__ import annotations

import enum
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from . import forks
from .allocator import Contents, Phase
from .descriptors import CudaDescriptors, Descriptors, StatePage, forget_export, note_export
from .devices import device_index
from .errors import (
    DeadlinePassed,
    Error,
    InvalidArgument,
    InvalidState,
    OutOfMemory,
    PeerDied,
    PeerFailed,
    StaleImport,
    TooManyOpenFiles,
    UnequalLayouts,
    UnknownPointer,
    WrongPeer,
)
from .pool import MemPool
from .scopes import use_mem_pool
from .sleeping import sleep, wake
from .state import allocator, installed
from .turn_peers import (
    CONNECT,
    DESCRIPTORS,
    ENGINE,
    HUB,
    JOIN,
    LEAVING_SECONDS,
    NAMING_SECONDS,
    TRAINER,
    Channel,
    Deadline,
    Listener,
    Member,
    Membership,
    check_user,
    close_all,
    naming_limits,
    open_folder,
    socket_path,
    start_thread,
    value,
)
from .write_signals import without_signals

if TYPE_CHECKING:
    import torch

DEADLINE_SECONDS = 60.0
TURN_SECONDS = 3600.0
BUCKET_BYTES = 1 << 30
ABANDON_SECONDS = 2.0
"""How long a failed call waits for the device before it leaves memory mapped until the process ends."""
CLOSE_SECONDS = 15.0
"""How long a second call of `close` waits for the first one, whose own waits add up to less."""
NUMBER_MAXIMUM = (1 << 63) - 1

Range = tuple[int, int]
"""Contiguous chunks of the trainer: the address of the first byte, and the size in bytes."""


class Part(enum.Enum):
    """A part of a process's memory, which is released and restored as a whole."""

    WEIGHTS = "weights"
    """The trainer's: released after the engine has loaded them. The engine's: restored before it loads them."""
    REST = "rest"
    """Everything else, such as the optimizer's state or the KV cache. No process has it while the other one has its own."""


class Memory(Protocol):
    """Releases and restores a process's memory."""

    def sleep(self, part: Part) -> None: ...
    def wake(self, part: Part) -> None: ...


class Pools:
    """The memory of pools with tags, see `symmalloc.sleep`.

    weights, rest   the tags of each part. Every tag needs a pool before the first turn
    keep            tags whose contents are kept on the host; None: as the regions say, and all contents of other pools
    device          None: the current one
    """

    def __init__(
        self,
        weights: Iterable[str] = (),
        rest: Iterable[str] = (),
        *,
        keep: Iterable[str] | None = None,
        device: int | None = None,
    ) -> None:
        self._tags = {Part.WEIGHTS: _tags(weights), Part.REST: _tags(rest)}
        self._keep, self._device = None if keep is None else _tags(keep), device

    def sleep(self, part: Part) -> None:
        """Puts the pools of a part to sleep, and releases free memory of all other pools."""
        if tags := self._tags[part]:
            sleep(tags, keep=None if self._keep is None else [tag for tag in tags if tag in self._keep], device=self._device)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        else:
            allocator(device_index(self._device)).trim()

    def wake(self, part: Part) -> None:
        """Wakes the pools of a part."""
        if tags := self._tags[part]:
            wake(tags, device=self._device)


class Unmanaged:
    """Memory that the program releases and restores by itself, around the calls."""

    def sleep(self, part: Part) -> None:
        """Does nothing."""

    def wake(self, part: Part) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Layout:
    """The position and the type of a tensor in the memory that the trainer shares."""

    range: int
    """The number of the range."""
    offset_bytes: int
    size_bytes: int
    """The bytes from the first to the last element."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def fits(self, ranges: list[int]) -> bool:
        """Returns `True` if a range of these sizes contains the tensor."""
        return self.size_bytes == 0 or (self.range < len(ranges) and self.offset_bytes + self.size_bytes <= ranges[self.range])

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} with strides {list(self.stride)}"


class Weights(Mapping[str, Any]):
    """Tensors in the trainer's memory, by name. They are read-only for the device unless the engine asked for `is_writable`.

    Valid in the call of `load`, or with `keep=True` until the engine hands over. Afterwards, and if the trainer puts the memory to
    sleep meanwhile, access raises `StaleImport`. A kernel that uses a tensor after that reads undefined contents or faults.
    Tensors of size zero have the address 0.
    """

    def __init__(
        self, layouts: dict[str, Layout], addresses: list[int], page: StatePage, view: Callable[[Layout, int], Any]
    ) -> None:
        self.layouts = layouts
        """The layout of each tensor."""
        self._addresses, self._page, self._view, self._is_mapped = addresses, page, view, True
        self._tensors: dict[str, Any] = {}

    def check(self) -> None:
        """Raises `StaleImport` if the trainer's memory has changed, or is no longer mapped here."""
        if not self._is_mapped:
            raise StaleImport("the weights are no longer mapped: take them in the next turn")
        if not self._page.is_live:
            raise StaleImport("the trainer has released the memory of the weights: take them in the next turn")

    def address(self, name: str) -> int:
        """Returns the address of a tensor in this process. Raises `StaleImport`."""
        self.check()
        layout = self.layouts[name]
        return self._addresses[layout.range] + layout.offset_bytes if layout.size_bytes else 0

    def __getitem__(self, name: str) -> Any:
        address = self.address(name)
        if (tensor := self._tensors.get(name)) is None:
            tensor = self._tensors[name] = self._view(self.layouts[name], address)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def size_bytes(self) -> int:
        return sum(layout.size_bytes for layout in self.layouts.values())


@dataclass(frozen=True)
class Update:
    """The result of a hand-over with weights."""

    size_bytes: int = 0
    update_seconds: float = 0.0
    """From the end of the trainer's release to the end of the engine's load, including the time to gather weights."""
    load_seconds: float = 0.0
    """The part of it in which the weights were handed over and loaded, without the time to gather them and to wake the engine's own."""


class _Side:
    """What trainer and engine have in common."""

    role, first_phase = "", ""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        ranks: int,
        *,
        memory: Memory,
        device: int | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        on_death: Callable[[Error], None] | None = None,
        on_phase: Callable[[str], None] | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        rank, ranks = index(rank), index(ranks)  # integers of any kind, such as NumPy's
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} is not one of {ranks} ranks of this machine: number them from 0")
        self.rank, self.ranks, self._memory, self._deadline_seconds = rank, ranks, memory, deadline_seconds
        self._device = device_index(device) if descriptors is None else device or 0
        self._descriptors: Descriptors = CudaDescriptors(self._device) if descriptors is None else descriptors
        self._me = Member(self.role, rank, os.getpid())
        self._on_phase, self._is_closed, self._in_call = on_phase, False, threading.Lock()
        # Held by a call of `close`. A signal handler may call it again while its thread holds it.
        self._closing = threading.RLock()
        self._error: Error | None = None
        # The thread of a call that has not failed.
        self._caller: int | None = None
        # Set when the latest wait for the device has returned.
        self._device_wait: threading.Event | None = None
        deadline, path = Deadline(deadline_seconds), open_folder(folder)
        with naming_limits(), ExitStack() as opened:
            self._membership = Membership(path, self._me, ranks, deadline, on_death)
            opened.callback(self._membership.close)
            with self._failing(), naming_limits(), self._membership.naming_hub():
                self._membership.wait_for_all(JOIN, deadline)
                self._channel = self._connect(socket_path(path, f"{HUB}.{rank}"), deadline)
                opened.callback(self._channel.close)
                self._membership.wait_for_all(CONNECT, deadline)
                self._enter(self.first_phase)
            opened.pop_all()

    def _connect(self, path: str, deadline: Deadline) -> Channel:
        raise NotImplementedError

    def _greet(self, channel: Channel, deadline: Deadline, peer: Member) -> None:
        """Exchanges identities. Raises `WrongPeer`."""
        channel.send(
            "hello",
            deadline,
            role=self.role,
            rank=self.rank,
            ranks=self.ranks,
            pid=self._me.pid,
            device=self._descriptors.identity,
        )
        said = channel.receive(deadline, "hello", doing="introduce itself")
        theirs = (said.get("role"), said.get("rank"), said.get("ranks"))
        if theirs != (peer.role, peer.rank, self.ranks):
            raise WrongPeer(
                f"expected {peer} of {self.ranks}, found {theirs[0]} {theirs[1]} of {theirs[2]}: use one folder per job and machine"
            )
        if said.get("device") != self._descriptors.identity:
            raise WrongPeer(
                f"{peer} uses the device {said.get('device')}, this process {self._descriptors.identity}: "
                "give equal ranks of trainer and engine the same device"
            )
        channel.peer = Member(peer.role, peer.rank, value(said, "pid", int))

    def _enter(self, phase: str) -> None:
        self._membership.enter(phase)
        if self._on_phase is not None:
            self._on_phase(phase)

    @property
    def phase(self) -> str:
        """The phase of this process's turn."""
        return self._membership.phase

    @contextmanager
    def _call(self, phase: str, seconds: float | None) -> Iterator[Deadline]:
        """A call in a phase. It notifies the other processes if it fails, and the object then stays failed. Misuse has no effect."""
        if self._is_closed:
            raise InvalidState("the turns have ended: close() was called")
        if self._is_forked():
            raise InvalidState("the turns belong to the parent of this process")
        if self._error is not None:
            raise self._error
        if not self._in_call.acquire(blocking=False):
            raise InvalidState("a call of these turns has not returned yet: make one call at a time")
        try:
            if self.phase != phase:
                raise InvalidState(f"this process is in the phase `{self.phase}`: call hand_over() and take() alternately")
            deadline = Deadline(self._deadline_seconds if seconds is None else seconds)
            try:
                with self._failing(), naming_limits():
                    self._caller = threading.get_ident()
                    self._membership.watch.check()
                    yield deadline
            except BaseException as error:
                self._caller = None
                self._error = (
                    error if isinstance(error, Error) else PeerFailed(f"an earlier call failed: {type(error).__name__}: {error}")
                )
                with suppress(Exception):
                    self._abandon()
                raise
        finally:
            self._caller = None
            self._in_call.release()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Reports an error to the other processes, unless it follows from one of theirs, which is raised in its place."""
        try:
            yield
        except BaseException as error:
            cause = self._cause(error)
            if cause is not error:
                raise cause from error
            if not isinstance(error, (PeerDied, PeerFailed)):
                self._membership.fail(error)
            raise

    def _cause(self, error: BaseException) -> BaseException:
        """Returns the death or failure of another process that an error of this one follows from, or the error itself."""
        if isinstance(error, Exception) and self._is_closed:
            return self._closed_meanwhile()
        if isinstance(error, Exception) and not isinstance(error, (PeerDied, PeerFailed)):
            try:
                # The program's own code may notice a death first, such as in a collective. The trainer also withdraws its weights when
                # it learns of a death, which may be before this process does.
                has_own_cause = isinstance(error, Error) and not isinstance(error, StaleImport)
                self._membership.watch.wait(0.0 if has_own_cause else NAMING_SECONDS)
            except (PeerDied, PeerFailed) as why:
                return why
        return error

    def _closed_meanwhile(self) -> InvalidState:
        return InvalidState("the turns have ended: close() was called during this call")

    def check(self) -> None:
        """Raises `PeerDied` or `PeerFailed` if one of the processes has ended. Takes no time."""
        self._membership.watch.check()

    def _synchronize(self, deadline: Deadline) -> None:
        """Waits for all work of this process on the device. Raises `DeadlinePassed`.

        The driver's wait has no time limit, and a kernel may wait for a dead rank. A separate thread
        therefore waits, and is abandoned at the deadline.
        """
        errors: list[BaseException] = []
        is_done = threading.Event()

        def wait() -> None:
            try:
                self._descriptors.synchronize()
            except BaseException as error:
                errors.append(error)
            is_done.set()

        start_thread(wait, "symmalloc-synchronize")
        self._device_wait = is_done  # only now: a thread that did not start would never set it
        while not is_done.wait(min(0.1, deadline.left())):
            if self._caller == threading.get_ident():
                if self._is_closed:
                    raise self._closed_meanwhile()
                self._membership.watch.check()
            if deadline.left() == 0:
                raise DeadlinePassed(f"the device did not complete the work of this process within {deadline.seconds} s")
        if errors:
            raise errors[0]

    def _is_forked(self) -> bool:
        """Returns `True` in a forked child, which must not touch what it shares with its parent."""
        return os.getpid() != self._me.pid

    def _abandon(self) -> None:
        """Releases what belongs to a turn."""

    def close(self) -> None:
        """Leaves the turns. Others that wait for this process raise `PeerDied`. No effect in further calls, and in a forked child.

        A call in another thread ends with `InvalidState`. If it does not end within 2 s, the trainer's memory stays mapped in the engine.
        Further calls return when the first one has ended, or after 15 s; in `load` and `on_death`, they return at once.
        """
        if self._is_forked():
            return
        # The first call waits for these threads.
        is_awaited = self._caller == threading.get_ident() or self._membership.is_listening_here()
        if not self._closing.acquire(timeout=0.0 if is_awaited else CLOSE_SECONDS):
            return
        try:
            if self._is_closed:
                return
            self._is_closed = True
            self._channel.shut_down()
            if self._in_call.acquire(timeout=LEAVING_SECONDS):
                try:
                    with suppress(Exception):
                        self._abandon()
                finally:
                    self._in_call.release()
            self._channel.close()
            self._membership.close()
        finally:
            self._closing.release()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Leaves. Reports an error within the `with` block to the others. If it follows from a death, it is raised as `PeerDied`."""
        try:
            is_open = self._error is None and not (self._is_closed or self._is_forked())
            if error is not None and is_open and not _is_orderly(error):
                if isinstance(error, Exception):
                    self._membership.watch.wait(NAMING_SECONDS)
                self._membership.fail(error)
        except (PeerDied, PeerFailed) as why:
            raise why from error
        finally:
            self.close()


class Trainer(_Side):
    """The trainer's side of one rank. It has the first turn.

    folder            for the sockets, on this machine, with a path of at most 90 bytes; created if missing. Only this user may be able to
                      write to it. Mount it into both containers if trainer and engine run in two
    rank, ranks       this pair's number, and the number of pairs on this machine
    memory            what this process releases and restores, such as `Pools`
    device            the device's number; None: the current one
    deadline_seconds  the time limit for the other processes to start, and for each call except the wait for a turn: a number above 0, or
                      `math.inf` for none
    on_death          called in a thread when a process has died or failed, such as `end_process()`
    on_phase          called in each phase of a turn

    Waits until all pairs of the machine are connected. Raises `DeadlinePassed`, which names the missing ones, `WrongPeer`, and
    `InvalidState` if another job uses the folder.
    """

    role, first_phase = TRAINER, "train"

    def _connect(self, path: str, deadline: Deadline) -> Channel:
        peer = Member(ENGINE, self.rank)
        listener = Listener(Path(path).parent, Path(path).name)
        try:
            of = _accept(listener, deadline, peer, self._membership)
        finally:
            listener.close()
        channel = Channel(of, self._membership.watch, peer)
        try:
            check_user(of, path)
            self._greet(channel, deadline, peer)
        except BaseException:
            channel.close()
            raise
        self._page: StatePage | None = None
        # What the engine has mapped in this hand-over: the handles of each range's chunks, and their holds.
        self._offered: dict[Range, tuple[dict[Range, int], ExitStack]] = {}
        self._sent: dict[int, list[tuple[str, Layout]]] = {}
        self._has_slept = False
        return channel

    def hand_over(
        self, weights: Mapping[str, Any] | Iterable[Mapping[str, Any]] = (), *, deadline_seconds: float | None = None
    ) -> Update:
        """Releases this process's memory, gives the engine the weights, and returns when the engine is awake.

        weights           tensors by name, in memory of symmalloc; or an iterable of such groups, such as `Gathering.buckets`. The next
                          group is requested when the engine has loaded the one before it

        First releases `Part.REST`. If the engine keeps the weights, `Part.WEIGHTS` stays until it hands over; otherwise it is
        released as soon as they are loaded. Until `take` returns, no work of this process may use the memory. Raises `PeerDied`,
        `PeerFailed`, `DeadlinePassed`, `InvalidArgument` for a tensor that cannot be shared, and as the memory's `sleep` does.
        """
        with self._call("train", deadline_seconds) as deadline:
            self._enter("release")
            self._synchronize(deadline)
            self._memory.sleep(Part.REST)
            self._enter("update")
            begun = time.perf_counter()
            update = self._send_weights(weights, begun, deadline)
            self._channel.send("end", deadline)
            complete = self._channel.receive(deadline, "complete", doing="load the weights")
            self._has_slept = not value(complete, "keeps", bool)
            if self._has_slept:
                self._enter("sleep")
                self._withdraw()
                self._memory.sleep(Part.WEIGHTS)
            self._channel.send("released", deadline)
            self._channel.receive(deadline, "awake", doing="wake")
            self._enter("wait")
            return update

    def take(self, *, deadline_seconds: float = TURN_SECONDS) -> None:
        """Waits for the turn, and restores this process's memory. The deadline includes the engine's work.

        Raises `PeerDied`, `PeerFailed`, `DeadlinePassed`, and as the memory's `wake` does.
        """
        with self._call("wait", deadline_seconds) as deadline:
            self._channel.receive(deadline, "returned", doing="hand over")
            self._enter("wake")
            self._withdraw()
            if self._has_slept:
                self._memory.wake(Part.WEIGHTS)
            self._memory.wake(Part.REST)
            self._channel.send("awake", deadline)
            self._enter("train")

    def _send_weights(self, weights: Mapping[str, Any] | Iterable[Mapping[str, Any]], begun: float, deadline: Deadline) -> Update:
        size_bytes, load_seconds, number = 0, 0.0, 0
        self._page = page = StatePage.create()
        groups: Iterable[Mapping[str, Any]] = [weights] if isinstance(weights, Mapping) else weights
        try:
            for group in groups:
                if not group:
                    continue
                self._synchronize(deadline)  # the engine does not see this process's streams
                start = time.perf_counter()
                message, handles = self._offer(number, group, page)
                self._channel.send("weights", deadline, **message)
                self._send_descriptors([page.fileno()] if number == 0 else [], handles, deadline)
                loaded = self._channel.receive(deadline, "loaded", doing="load the weights")
                load_seconds += time.perf_counter() - start - value(loaded, "wake_seconds", float)
                size_bytes += value(loaded, "size_bytes", int)
                number += 1
        finally:
            for _, holds in self._offered.values():
                holds.close()
            self._offered.clear()
        return Update(size_bytes, time.perf_counter() - begun, load_seconds)

    def _offer(self, number: int, group: Mapping[str, Any], page: StatePage) -> tuple[dict[str, Any], list[int]]:
        """Returns the message of a group, and the handles of chunks that the engine has not mapped yet."""
        page.renew()  # the engine no longer uses the group before, whose memory may have been released meanwhile
        spans = {name: _span(name, tensor) for name, tensor in group.items()}
        chunks = sorted({chunk for address, size in spans.values() if size for chunk in self._descriptors.chunks(address, size)})
        runs: list[list[Range]] = []
        for chunk in chunks:
            if runs and runs[-1][-1][0] + runs[-1][-1][1] == chunk[0]:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        fresh: list[list[Any]] = []
        handles: list[int] = []
        used: list[tuple[Range, Range]] = []  # an offered range, and the part of it that this group uses
        for run in runs:
            part = (run[0][0], run[-1][0] + run[-1][1] - run[0][0])
            with ExitStack() as holds:
                held: dict[Range, int] = {}
                for chunk in run:
                    held[chunk] = self._descriptors.hold(chunk)
                    holds.callback(self._descriptors.drop, held[chunk])
                # An address may have other memory than in an earlier group. A held handle cannot belong to other memory.
                whole = next((one for one, (known, _) in self._offered.items() if held.items() <= known.items()), None)
                if whole is None:
                    whole = part
                    if whole in self._offered:
                        self._offered[whole][1].close()
                    self._offered[whole] = held, holds.pop_all()
                    fresh.append([whole, [size for _, size in run]])
                    handles += held.values()
                used.append((whole, part))
        numbers = {whole: at for at, whole in enumerate(self._offered)}
        ranges = [(numbers[whole], whole[0], part) for whole, part in used]
        layouts = [(name, _layout(tensor, spans[name], ranges)) for name, tensor in group.items()]
        self._note(spans, page)
        message: dict[str, Any] = {"number": number, "fresh": fresh}
        if self._sent.get(number) != layouts:
            self._sent[number] = layouts
            message["layouts"] = [[name, *vars(layout).values()] for name, layout in layouts]
        return message, handles

    def _note(self, spans: Mapping[str, tuple[int, int]], page: StatePage) -> None:
        """Lets a sleep of the tensors' pools withdraw the weights. Views into an allocation are not found by it."""
        if not installed():
            return
        for address, _ in spans.values():
            with suppress(UnknownPointer):
                note_export(self._device, allocator(self._device).placement_of(address).pool, page)

    def _send_descriptors(self, first: list[int], handles: list[int], deadline: Deadline) -> None:
        """Sends descriptors of files and handles in batches. A batch exists only until the engine has mapped its memory."""
        sources = [(os.dup, one) for one in first] + [(self._descriptors.export, one) for one in handles]
        for at in range(0, len(sources), DESCRIPTORS):
            self._channel.receive(deadline, "next", doing="load the weights")
            batch: list[int] = []
            try:
                for export, source in sources[at : at + DESCRIPTORS]:
                    batch.append(forks.open_descriptor(export, source))
                self._channel.send("chunks", deadline, batch)
            finally:
                close_all(batch)

    def _withdraw(self) -> None:
        if (page := self._page) is not None:
            self._page = None
            page.withdraw()
            forget_export(page)
            page.close()

    def _abandon(self) -> None:
        self._withdraw()


class Engine(_Side):
    """The engine's side of one rank. It has the second turn, and sleeps when it joins: release its memory before.

    The arguments are those of `Trainer`, and:

    is_writable   map the trainer's weights for writing, too
    view          a function that creates the tensor of a layout at an address; None: PyTorch's
    """

    role, first_phase = ENGINE, "wait"

    def __init__(
        self, *arguments: Any, is_writable: bool = False, view: Callable[[Layout, int], Any] | None = None, **options: Any
    ) -> None:
        self._is_writable, self._view = is_writable, view
        # The addresses that are reserved for the trainer's ranges. A range that every turn uses has the same address in all turns.
        self._reserved: dict[Range, int] = {}
        self._mapped: dict[Range, list[tuple[int, int]]] = {}
        self._ranges: list[Range] = []
        self._layouts: dict[int, dict[str, Layout]] = {}
        self._taken: list[Weights] = []
        self._views: dict[tuple[int, Layout], Any] = {}
        self._page: StatePage | None = None
        self._has_abandoned = False
        super().__init__(*arguments, **options)

    def _connect(self, path: str, deadline: Deadline) -> Channel:
        peer = Member(TRAINER, self.rank)
        channel = Channel.connect(path, self._membership.watch, peer, deadline)
        try:
            self._greet(channel, deadline, peer)
        except BaseException:
            channel.close()
            raise
        return channel

    def take(
        self, load: Callable[[Weights], object] | None = None, *, keep: bool = False, deadline_seconds: float = TURN_SECONDS
    ) -> Weights | None:
        """Waits for the turn, loads the weights, and restores this process's memory. The deadline includes the trainer's work.

        load   called for each group of weights after `Part.WEIGHTS` was restored. It copies them, and may not keep the tensors
        keep   leave the weights mapped until `hand_over`, and return them: for an engine that uses the trainer's tensors as its own.
               The trainer then keeps their memory. Its weights must be one group

        `Part.REST` is restored after the trainer has released its memory. Once the trainer has begun to hand over, each of its
        answers has this object's deadline. Raises `PeerDied`, `PeerFailed`, `DeadlinePassed`,
        `UnequalLayouts` (from `adopt` and `copy_into`), and as the memory's `wake` does.
        """
        with self._call("wait", deadline_seconds) as deadline:
            is_first, taken, wake_seconds = True, None, 0.0
            while True:
                message = self._channel.receive(deadline, "weights", "end", doing="hand over")
                if is_first:
                    deadline = Deadline(self._deadline_seconds)
                    self._enter("update")
                    begun = time.perf_counter()
                    self._memory.wake(Part.WEIGHTS)
                    wake_seconds = time.perf_counter() - begun
                    is_first = False
                if message["kind"] == "end":
                    break
                if keep and taken is not None:
                    raise InvalidArgument(
                        "the trainer gave several groups of weights, of which keep=True needs one: give it a single mapping"
                    )
                taken = self._open(message, deadline)
                if load is not None:
                    load(taken)
                self._synchronize(deadline)
                if not keep:
                    self._invalidate()
                self._channel.send("loaded", deadline, size_bytes=taken.size_bytes, wake_seconds=wake_seconds)
                wake_seconds = 0.0
                deadline = Deadline(self._deadline_seconds)
            if self._ranges:
                self._release_addresses(keep=set(self._ranges))
            if not keep:
                taken = None
                self._unmap(deadline)
            self._channel.send("complete", deadline, keeps=keep)
            self._channel.receive(deadline, "released", doing="release its memory")
            self._enter("wake")
            self._memory.wake(Part.REST)
            self._channel.send("awake", deadline)
            self._enter("generate")
            return taken

    def hand_over(self, *, deadline_seconds: float | None = None) -> None:
        """Releases this process's memory, and returns when the trainer is awake.

        Raises `PeerDied`, `PeerFailed`, `DeadlinePassed`, and as the memory's `sleep` does.
        """
        with self._call("generate", deadline_seconds) as deadline:
            self._enter("sleep")
            self._synchronize(deadline)
            self._memory.sleep(Part.REST)
            self._memory.sleep(Part.WEIGHTS)
            self._unmap(deadline)
            self._channel.send("returned", deadline)
            self._channel.receive(deadline, "awake", doing="wake")
            self._enter("wait")

    def _open(self, message: dict[str, Any], deadline: Deadline) -> Weights:
        """Maps what is new in a message of weights, and returns the weights."""
        number, fresh = value(message, "number", int), _fresh(value(message, "fresh", list), self._channel.peer)
        count = sum(len(sizes) for _, sizes in fresh) + (self._page is None)
        with closing(self._receive_descriptors(count, deadline)) as descriptors:
            if self._page is None:
                page = next(descriptors)
                try:
                    with naming_limits(), forks.lock:
                        self._page = StatePage(os.dup(page), is_owner=False)
                except TooManyOpenFiles:
                    raise
                except (OSError, ValueError) as why:
                    raise WrongPeer(f"{self._channel.peer} sent an invalid state page: {why}") from why
            for whole, sizes in fresh:
                self._map(whole, sizes, descriptors)
        if "layouts" in message:
            self._layouts[number] = _layouts(value(message, "layouts", list), self._channel.peer)
        layouts, ends = self._layouts.get(number), [size for _, size in self._ranges]
        if layouts is None or not all(one.fits(ends) for one in layouts.values()):
            raise WrongPeer(f"{self._channel.peer} sent no layouts of the group {number}, or some outside its memory")
        addresses = [self._reserved[one] for one in self._ranges]
        weights = Weights(layouts, addresses, self._page, self._tensor)
        self._taken.append(weights)
        return weights

    def _receive_descriptors(self, count: int, deadline: Deadline) -> Generator[int, None, None]:
        """Requests descriptors in batches, and returns them one by one. Closes each batch before it requests the next."""
        for at in range(0, count, DESCRIPTORS):
            self._channel.send("next", deadline)
            batch = self._channel.receive_descriptors(deadline, "chunks", min(count - at, DESCRIPTORS), "export its memory")
            try:
                yield from list(batch)
            finally:
                close_all(batch)

    def _map(self, whole: Range, sizes: list[int], descriptors: Iterator[int]) -> None:
        """Maps a range, in place of earlier memory at its addresses."""
        if (base := self._reserved.get(whole)) is None:
            base = self._reserved[whole] = self._descriptors.reserve(whole[1])
        self._unmap_range(whole)
        at, parts = base, self._mapped.setdefault(whole, [])
        for size in sizes:
            self._descriptors.map(at, size, next(descriptors))
            parts.append((at, size))
            at += size
        self._descriptors.allow(base, whole[1], is_writable=self._is_writable)
        if whole not in self._ranges:
            self._ranges.append(whole)

    def _unmap_range(self, whole: Range) -> None:
        parts = self._mapped.get(whole, [])
        while parts:
            self._descriptors.unmap(*parts[-1])
            parts.pop()
        self._mapped.pop(whole, None)

    def _unmap(self, deadline: Deadline) -> None:
        """Unmaps the trainer's memory. The addresses stay reserved."""
        self._invalidate()
        if self._page is not None:
            self._page.close()
            self._page = None
        if self._mapped:
            self._synchronize(deadline)
        for whole in list(self._mapped):
            self._unmap_range(whole)
        self._ranges.clear()

    def _invalidate(self) -> None:
        for weights in self._taken:
            weights._is_mapped = False
        self._taken.clear()

    def _release_addresses(self, keep: Collection[Range] = ()) -> None:
        """Releases all other addresses, of which none is mapped, and their tensors."""
        for whole in [one for one in self._reserved if one not in keep]:
            base = self._reserved.pop(whole)
            self._views = {key: view for key, view in self._views.items() if not base <= key[0] < base + whole[1]}
            self._descriptors.release(base, whole[1])

    def _tensor(self, layout: Layout, address: int) -> Any:
        """Returns the tensor of a layout. Equal layouts at equal addresses are one object in all turns."""
        key = (address, layout)
        if (found := self._views.get(key)) is None:
            view = self._view or _torch_view(self._device)
            found = self._views[key] = view(layout, address)
        return found

    def _abandon(self) -> None:
        self._invalidate()
        if self._has_abandoned and self._device_wait is not None and not self._device_wait.is_set():
            return  # it has waited for the device before, and the device is still busy
        self._has_abandoned = True
        self._unmap(Deadline(ABANDON_SECONDS))
        self._release_addresses()


class Gathering:
    """Gathers sharded parameters in groups, in memory that exists only during an update.

    bucket_bytes   the size of a group, of which one exists at a time. A larger parameter is a group by itself

    Parameters of FSDP2 (`DTensor`) are gathered on all ranks of their mesh, in a pool that has room for one group. Others are given to
    the engine where they are.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._pool: MemPool | None = None
        # The size of the largest group for which the pool has room.
        self._group_bytes = bucket_bytes

    def buckets(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        """Returns the groups, for `Trainer.hand_over`. All ranks give the same parameters in the same order."""
        parameters = list(named)
        self._make_room([parameter for _, parameter in parameters])
        bucket: dict[str, torch.Tensor] = {}
        size_bytes = 0
        try:
            for name, parameter in parameters:
                more = _size_bytes(parameter)
                if bucket and size_bytes + more > self.bucket_bytes:
                    yield bucket
                    bucket.clear()  # frees the memory, which the next group reuses
                    size_bytes = 0
                bucket[name] = self._whole(parameter.detach())
                size_bytes += more
            if bucket:
                yield bucket
        finally:
            bucket.clear()
            if self._pool is not None and self._pool.phase is Phase.AWAKE:
                self._pool.sleep(Contents.DROP)

    def _make_room(self, parameters: list[Any]) -> None:
        """Replaces a pool that a parameter would not fit into. A reserved segment cannot grow, so this precedes the first gather."""
        largest_bytes = max((_size_bytes(one) for one in parameters if _is_gathered(one)), default=0)
        if largest_bytes > self._group_bytes:
            self._pool, self._group_bytes = None, largest_bytes

    def _whole(self, parameter: Any) -> Any:
        if not hasattr(parameter, "full_tensor"):
            return parameter
        if not _is_gathered(parameter):
            return parameter.to_local()
        with self._scope(parameter):
            return parameter.full_tensor()

    def _scope(self, parameter: Any) -> Any:
        if not parameter.is_cuda:
            return nullcontext()
        if self._pool is None:
            self._pool = MemPool(
                symmetric=False, reserve=self._group_bytes + self._group_bytes // 64, device=device_index(parameter.device)
            )
        elif self._pool.phase is not Phase.AWAKE:
            self._pool.wake()
        return use_mem_pool(self._pool)


def adopt(parameters: Iterable[tuple[str, torch.Tensor]], weights: Weights) -> int:
    """Makes the trainer's tensors the parameters of an engine, without a copy. Returns how many have a new address.

    parameters   `module.named_parameters()`, of which each needs a tensor with its name, type, shape and strides

    Captured graphs stay valid if the result is 0, which holds from the second turn on while the trainer's memory stays where it is.
    Raises `UnequalLayouts`, which names the first parameter that differs. No parameter has changed then.
    """
    found = list(parameters)
    for name, parameter in found:
        layout, own = _layout_of(name, weights), _layout(parameter, _span(name, parameter), [])
        is_equal = (layout.dtype, layout.shape) == (own.dtype, own.shape)
        if not is_equal or (own.size_bytes and layout.stride != own.stride):
            raise UnequalLayouts(
                f"{name} is {own} in the engine and {layout} in the trainer: copy it (`copy_into`), or use one layout"
            )
    # Parameters of size zero stay as they are.
    moved = [(name, one) for name, one in found if weights.layouts[name].size_bytes and one.data_ptr() != weights.address(name)]
    for name, parameter in moved:
        parameter.data = weights[name]
    return len(moved)


def copy_into(parameters: Iterable[tuple[str, torch.Tensor]], weights: Weights) -> None:
    """Copies weights into an engine's parameters of the same names and shapes, on the device. Types and strides may differ.

    Raises `UnequalLayouts`, which names the first parameter that differs, before it copies.
    """
    import torch

    to, of = [], []
    for name, parameter in parameters:
        layout = _layout_of(name, weights)
        if layout.shape != tuple(parameter.shape):
            raise UnequalLayouts(
                f"{name} has the shape {list(parameter.shape)} in the engine and {list(layout.shape)} in the trainer"
            )
        if layout.size_bytes:
            to.append(parameter)
            of.append(weights[name])
    if to:
        with torch.no_grad():
            torch._foreach_copy_(to, of)


def end_process(seconds: float = 5.0, status: int = 1) -> Callable[[Error], None]:
    """Returns an `on_death` that prints the error, and ends this process if it has not ended by itself after some seconds.

    A process may be blocked in a collective that a dead rank does not join. Its memory returns to the device only when it ends.
    """
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise InvalidArgument(f"the time to end is {seconds} s: give a finite number of at least 0")

    def end(error: Error) -> None:
        def later() -> None:
            time.sleep(seconds)
            os._exit(status)

        # First, because a write to a pipe that nobody reads blocks.
        try:
            start_thread(later, "symmalloc-turns-end")
        except OutOfMemory:  # this thread waits instead
            later()
        _print_error(f"symmalloc: {error}; this process ends within {seconds:g} s\n")

    return end


def _print_error(text: str) -> None:
    """Writes text to the standard error. Ignores failures, and the signals that a write can cause, whatever their actions are."""
    if sys.__stderr__ is None:
        return  # it was closed at the start, so that another file may have its number
    with without_signals(), suppress(OSError):
        if not os.get_inheritable(2):
            return  # it was closed later, and this is another file
        os.write(2, text.encode(errors="backslashreplace"))


def _is_orderly(error: BaseException) -> bool:
    """Returns `True` for an end that is not a failure, such as `sys.exit(0)`."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _is_gathered(parameter: Any) -> bool:
    """Returns `True` if several ranks have parts of the parameter."""
    return hasattr(parameter, "full_tensor") and parameter.device_mesh.size() > 1


def _size_bytes(parameter: Any) -> int:
    """Returns the size of a parameter in bytes, including its parts on other ranks."""
    return int(parameter.numel() * parameter.element_size())


def _layout_of(name: str, weights: Weights) -> Layout:
    if (layout := weights.layouts.get(name)) is None:
        raise UnequalLayouts(f"the trainer has no parameter {name}")
    return layout


def _tags(tags: Iterable[str]) -> list[str]:
    return [tags] if isinstance(tags, str) else list(tags)


def _span(name: str, tensor: Any) -> tuple[int, int]:
    """Returns the address and the size of a tensor's elements. Raises `InvalidArgument` for one that is sharded."""
    if hasattr(tensor, "full_tensor"):
        raise InvalidArgument(f"{name} is sharded: gather it with Gathering.buckets()")
    if math.prod(tensor.shape) == 0:
        return tensor.data_ptr(), 0
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _layout(tensor: Any, span: tuple[int, int], ranges: list[tuple[int, int, Range]]) -> Layout:
    """Returns the layout of a tensor in one of some parts of ranges, or outside of all.

    Each part comes with the number and the address of its range. Other parts of that range may be outdated.
    """
    address, size = span
    of, offset = 0, 0
    for number, base, (first, length) in ranges:
        if size and first <= address and address + size <= first + length:
            of, offset = number, address - base
    return Layout(of, offset, size, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))


def _torch_view(device: int) -> Callable[[Layout, int], Any]:
    """Returns a function that creates PyTorch's tensors at addresses of a device."""
    import torch

    def view(layout: Layout, address: int) -> Any:
        dtype = getattr(torch, layout.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UnequalLayouts(f"this PyTorch has no type {layout.dtype}: use one version on both sides")
        if layout.size_bytes == 0:
            return torch.empty_strided(layout.shape, layout.stride, dtype=dtype, device=f"cuda:{device}")
        return (
            torch.as_tensor(_Bytes(address, layout.size_bytes), device=f"cuda:{device}")
            .view(dtype)
            .as_strided(layout.shape, layout.stride)
        )

    return view


class _Bytes:
    """Device memory as bytes, for `torch.as_tensor`."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _fresh(sent: list[Any], peer: Member | None) -> list[tuple[Range, list[int]]]:
    """Returns the ranges of a message, and the sizes of their chunks. Raises `WrongPeer`."""
    try:
        fresh = [((whole[0], whole[1]), list(sizes)) for whole, sizes in sent]
        for whole, sizes in fresh:
            _check_numbers([*whole, *sizes])
            if sum(sizes) != whole[1] or 0 in sizes or not sizes:
                raise ValueError("the chunks do not fill the range")
    except (LookupError, TypeError, ValueError) as why:
        raise WrongPeer(f"{peer} sent an invalid description of its memory: {why}") from why
    return fresh


def _layouts(sent: list[Any], peer: Member | None) -> dict[str, Layout]:
    """Returns the layouts of a message by name. Raises `WrongPeer`."""
    found = {}
    try:
        for name, of, offset, size, dtype, shape, stride in sent:
            _check_numbers([of, offset, size, *shape, *stride])
            if not isinstance(name, str) or not isinstance(dtype, str) or len(shape) != len(stride):
                raise ValueError("a layout has no name, type, shape and strides")
            if (size == 0) != (0 in shape):
                raise ValueError("a size does not fit its shape")
            found[name] = Layout(of, offset, size, dtype, tuple(shape), tuple(stride))
    except (TypeError, ValueError) as why:
        raise WrongPeer(f"{peer} sent an invalid description of its weights: {why}") from why
    return found


def _check_numbers(numbers: list[Any]) -> None:
    if not all(type(number) is int and 0 <= number <= NUMBER_MAXIMUM for number in numbers):
        raise ValueError("a number is out of range")


def _accept(listener: Listener, deadline: Deadline, peer: Member, membership: Membership) -> Any:
    """Returns the first connection of a listener. Raises `DeadlinePassed`, and as `Listener.accept` does."""
    poll = select.poll()
    poll.register(listener.socket, select.POLLIN)
    while True:
        poll.poll(min(0.02, deadline.left()) * 1000)
        try:
            return listener.accept()
        except (BlockingIOError, ConnectionError):
            membership.watch.check()
            if deadline.left() == 0:
                raise DeadlinePassed(f"{peer} did not connect within {deadline.seconds} s") from None
