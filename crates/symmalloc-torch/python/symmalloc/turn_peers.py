"""The processes that take turns on a machine: their sockets, and the notice that one of them has died. For `symmalloc.colocate`.

    folder/turns     the hub: a thread in trainer 0. Every process connects, and reports its phase
    folder/turns.R   trainer R listens, and engine R connects. Messages and descriptors of their turns

    engine 1 is killed ──► the kernel closes its sockets ──► the hub tells all others: "engine 1 (pid 7) died while it generated"

All sockets have paths, because an abstract name is visible only in its network namespace. The kernel reports the user of the other
end (`SO_PEERCRED`); a process of another user is rejected. A message is a JSON object with descriptors (`SCM_RIGHTS`).
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import resource
import select
import selectors
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import forks
from .errors import (
    DeadlinePassed,
    Error,
    InvalidArgument,
    InvalidState,
    OutOfMemory,
    PeerDied,
    PeerFailed,
    TooManyOpenFiles,
    WrongPeer,
)
from .private_folder import PrivateFolder, Untrusted

PROTOCOL = 3
HUB = "turns"
TRAINER, ENGINE = "trainer", "engine"
JOIN, CONNECT = "join", "connect"
"""The steps of the start. All processes take the first one before any takes the second."""
PATH_BYTES = 107
"""The longest path of a socket."""
MESSAGE_BYTES = 64 << 20
HUB_BYTES = 64 << 10
"""The longest message to the hub."""
TEXT_CHARACTERS = 4096
"""The longest error text that a process reports to the others."""
DESCRIPTORS = 64
"""The most descriptors of one message, and the most that a side holds at once. The kernel allows 253."""
RIGHTS_BYTES = socket.CMSG_LEN(DESCRIPTORS * array("i").itemsize)
"""The size of the control message that has these descriptors."""
HEADER = struct.Struct("!III")
"""The protocol, the size of the body, and the number of descriptors."""
NAMING_SECONDS = 1.0
"""How long a closed connection waits for the hub to name the phase, and a start that failed waits for the hub's answer."""
LEAVING_SECONDS = 2.0
"""How long a process that leaves waits for its own threads."""
RETRY_SECONDS = 0.1
"""How long the hub waits if the system refuses a connection, such as at the limit of open files."""
WAIT_SECONDS = 3600.0
"""The longest single wait. Longer deadlines wait again."""
FILE_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
"""The system's errors for limits of open files."""


def too_many_files(what: str) -> TooManyOpenFiles:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TooManyOpenFiles(
        f"{what}: this process may have {limit} open files. Raise the limit, for example with `ulimit -n 65536`"
    )


def _named(why: OSError) -> str:
    """Returns the name and the text of a system's error."""
    return f"{errno.errorcode.get(why.errno or 0, why.errno)}, {why.strerror}"


@contextmanager
def naming_limits() -> Iterator[None]:
    """Raises `TooManyOpenFiles` in place of the system's errors for that limit."""
    try:
        yield
    except OSError as why:
        if why.errno in FILE_LIMITS:
            raise too_many_files(_named(why)) from why
        raise


@contextmanager
def naming_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises `InvalidState`, or `TooManyOpenFiles`, in place of the system's errors for the files of turns, such as a full disk."""
    try:
        with naming_limits():
            yield
    except (Untrusted, OSError) as why:
        if isinstance(why, Error):
            raise
        raise InvalidState(f"{os.fspath(path)} cannot hold the sockets of turns: {why}") from why


@dataclass(frozen=True, order=True)
class Member:
    """A process that takes turns."""

    role: str
    rank: int
    pid: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.role} {self.rank} (pid {self.pid})" if self.pid else f"{self.role} {self.rank}"


class Deadline:
    """The end of a call. Infinity means no end."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise InvalidArgument(f"deadline_seconds is {seconds}: give a number above 0")
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Returns the seconds that are left, or `WAIT_SECONDS` if there are more."""
        return min(max(0.0, self._until - time.monotonic()), WAIT_SECONDS)


def socket_path(folder: Path, name: str) -> str:
    """Returns the path of a socket. Raises `InvalidArgument` if the system does not support its length."""
    path = str(folder / name)
    if len(os.fsencode(path)) > PATH_BYTES:
        raise InvalidArgument(
            f"{path} is longer than {PATH_BYTES} bytes, the limit for sockets: use a shorter folder, such as /run/JOB"
        )
    return path


def open_folder(folder: str | os.PathLike[str]) -> Path:
    """Creates the folder of the sockets if it is missing. Raises `InvalidState` if another user can write to it."""
    path = Path(os.path.abspath(folder))
    with naming_path(path), PrivateFolder.open(path):
        return path


class Listener:
    """A socket with a path, which this process alone holds: a lock that ends with the process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = socket_path(folder, name)
        with naming_path(self.path), forks.closing() as opened:
            opened.enter_context(_lock(f"{self.path}.lock"))
            opened.callback(_unlink, f"{self.path}.lock")  # before the lock's release
            _unlink(self.path)  # left by a process that was killed
            self.socket = opened.enter_context(_socket())
            self.socket.setblocking(False)
            self.socket.bind(self.path)
            opened.callback(_unlink, self.path)
            os.chmod(self.path, 0o600)
            self.socket.listen(64)
            self._opened = opened.pop_all()

    def accept(self) -> socket.socket:
        """Returns the next connection. Raises `BlockingIOError` if there is none, and `ConnectionError` if its process has left.

        Raises `TooManyOpenFiles`, `OutOfMemory` and `InvalidState` if the system refuses the connection.
        """
        with forks.lock:
            try:
                of, _ = self.socket.accept()
            except (BlockingIOError, ConnectionError):
                raise
            except OSError as why:
                raise self._refusal(why) from why
            forks.register(of)
            return of

    def _refusal(self, why: OSError) -> Error:
        if why.errno in FILE_LIMITS:
            return too_many_files(_named(why))
        if why.errno in (errno.ENOMEM, errno.ENOBUFS):
            return OutOfMemory(
                f"{_named(why)}: the system has no memory for a connection at {self.path}: end other processes, or raise the limit of"
                " the control group"
            )
        return InvalidState(f"{_named(why)}: the system refuses connections at {self.path}: allow this process to accept them")

    def close(self) -> None:
        forks.close(self._opened)


def _socket() -> socket.socket:
    with forks.lock:
        of = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        forks.register(of)
        return of


def _lock(path: str) -> io.FileIO:
    """Returns the locked file of a path. Raises `InvalidState` if another process has locked it."""
    while True:
        with forks.lock:
            file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+")
            forks.register(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                # Its last owner may have unlinked the file between the open and the lock. The path then has no lock.
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BlockingIOError as why:
            forks.close(file)
            raise InvalidState(f"another process holds {path}: use a separate folder for each job on a machine") from why
        except BaseException:
            forks.close(file)
            raise
        forks.close(file)


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def user_of(of: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end, from the kernel. The process is 0 in a sibling container."""
    pid, user, _ = struct.unpack("3i", of.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def check_user(of: socket.socket, path: str) -> int:
    """Returns the process at the other end. Raises `WrongPeer` if another user started it."""
    pid, user = user_of(of)
    if user != os.geteuid():
        raise WrongPeer(f"process {pid} at {path} belongs to user {user}, this one to user {os.geteuid()}: run both as one user")
    return pid


class Watch:
    """What the hub has told this process about the others. Blocked calls wait for its notice, too."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._error: Error | None = None
        self._lock = threading.Lock()
        self._has_error = threading.Event()

    def set(self, error: Error) -> bool:
        """Sets the first error. Returns `False` if there was one before."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
        self._has_error.set()
        with suppress(OSError):
            os.write(self._writer, b"1")
        return True

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self._error is not None:
            raise self._error

    def wait(self, seconds: float) -> None:
        """Waits for an error, and raises it."""
        self._has_error.wait(seconds)
        self.check()

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


class Channel:
    """A connection that carries messages with descriptors. Every call ends by a deadline."""

    def __init__(self, of: socket.socket, watch: Watch | None, peer: Member | None = None) -> None:
        self.socket, self._watch, self.peer, self._is_shut_down = of, watch, peer, False
        of.setblocking(False)

    @classmethod
    def connect(cls, path: str, watch: Watch | None, peer: Member, deadline: Deadline) -> Channel:
        """Connects to a socket, as soon as a process listens there. Raises `DeadlinePassed`, `WrongPeer`."""
        while True:
            of = _socket()
            try:
                of.settimeout(max(deadline.left(), 0.001))
                of.connect(path)
                return cls(of, watch, replace(peer, pid=check_user(of, path)))
            except (FileNotFoundError, ConnectionRefusedError, TimeoutError, BlockingIOError) as why:
                forks.close(of)
                if watch is not None:
                    watch.check()
                if deadline.left() == 0:
                    # Not an error before: the socket may be that of an earlier job, whose successor has not started yet.
                    died = ": the process that listened there has died" if isinstance(why, ConnectionRefusedError) else ""
                    raise DeadlinePassed(f"{peer} does not listen at {path} after {deadline.seconds} s{died}") from None
                time.sleep(min(0.02, deadline.left()))
            except PermissionError as why:
                forks.close(of)
                raise WrongPeer(f"this user cannot connect to {path} ({why}): run trainer and engine as one user") from why
            except BaseException:
                forks.close(of)
                raise

    def send(self, kind: str, deadline: Deadline, descriptors: Sequence[int] = (), **body: Any) -> None:
        """Sends a message. Raises `DeadlinePassed`, `PeerDied`, `PeerFailed`, `TooManyOpenFiles`."""
        text = json.dumps({"kind": kind, **body}).encode()
        if len(text) > MESSAGE_BYTES:
            raise InvalidArgument(
                f"a message of {len(text)} bytes describes the weights, and the limit is {MESSAGE_BYTES}: give them in groups"
            )
        message = memoryview(HEADER.pack(PROTOCOL, len(text), len(descriptors)) + text)
        first = list(descriptors)
        while message:
            try:
                with naming_limits():
                    # `socket.send_fds` ignores flags (CPython 3.12): the death of the other end would raise SIGPIPE.
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", first))] if first else []
                    sent = self.socket.sendmsg([message], rights, socket.MSG_NOSIGNAL)
                message, first = message[sent:], []
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, "receive a message")
            except TooManyOpenFiles:
                raise
            except OSError as why:
                raise self._died() from why

    def receive(self, deadline: Deadline, *kinds: str, doing: str = "answer") -> dict[str, Any]:
        """Returns a message of one of these kinds, which has no descriptors.

        Raises `DeadlinePassed`, `PeerDied`, `PeerFailed`, and `WrongPeer` for a message that has no meaning.
        """
        return self._receive(deadline, kinds, doing, [], 0)

    def receive_descriptors(self, deadline: Deadline, kind: str, count: int, doing: str = "answer") -> list[int]:
        """Returns the descriptors of a message, which the caller closes. Raises as `receive`, and `TooManyOpenFiles`."""
        received: list[int] = []
        self._receive(deadline, (kind,), doing, received, count)
        return received

    def _receive(
        self, deadline: Deadline, kinds: Sequence[str], doing: str, received: list[int], expected: int
    ) -> dict[str, Any]:
        """Returns a message, and appends its descriptors. Closes them if it fails."""
        try:
            protocol, size, count = HEADER.unpack(self._bytes(HEADER.size, received, deadline, doing))
            if protocol != PROTOCOL or size > MESSAGE_BYTES or count > DESCRIPTORS:
                raise WrongPeer(f"{self.peer} sent an invalid message: use one version of symmalloc on both sides")
            body = json.loads(self._bytes(size, received, deadline, doing))
            if not isinstance(body, dict) or body.get("kind") not in kinds:
                kind = body.get("kind") if isinstance(body, dict) else None
                raise WrongPeer(f"{self.peer} sent {kind!r} instead of {' or '.join(kinds)}: both sides must call in turns")
            if not len(received) == count == expected:
                raise WrongPeer(f"{self.peer} sent {len(received)} descriptors with {body['kind']!r} instead of {expected}")
            return body
        except (ValueError, RecursionError) as why:
            close_all(received)
            raise WrongPeer(f"{self.peer} sent an invalid message") from why
        except BaseException:
            close_all(received)
            raise

    def _bytes(self, count: int, descriptors: list[int], deadline: Deadline, doing: str) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                with forks.lock:
                    # `socket.recv_fds` ignores flags (CPython 3.12): programs that start meanwhile would inherit the descriptors.
                    part, rights, flags, _ = self.socket.recvmsg(count - len(parts), RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
                    more = array("i")
                    for level, kind, body in rights:
                        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                            more.frombytes(body[: len(body) // more.itemsize * more.itemsize])
                    forks.register_descriptors(more)
                    descriptors += more
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, doing)
                continue
            except OSError as why:
                raise self._died() from why
            if flags & socket.MSG_CTRUNC and len(more) < DESCRIPTORS:
                raise too_many_files(f"the system did not deliver all descriptors from {self.peer}")
            if len(descriptors) > DESCRIPTORS:
                raise WrongPeer(f"{self.peer} sent more descriptors than any message has")
            if not part:
                raise self._died()
            parts += part
        return bytes(parts)

    def _wait(self, what: int, deadline: Deadline, doing: str) -> None:
        poll = select.poll()
        poll.register(self.socket, what)
        if self._watch is not None:
            poll.register(self._watch.reader, select.POLLIN)
        ready = poll.poll(deadline.left() * 1000)
        # What the peer has sent comes first: it may have ended in order.
        if self._watch is not None and not any(of == self.socket.fileno() for of, _ in ready):
            self._watch.check()
        if not ready and deadline.left() == 0:
            raise DeadlinePassed(f"{self.peer} did not {doing} within {deadline.seconds} s")

    def _died(self) -> PeerDied | PeerFailed:
        """Returns the error for a connection that the other side has closed: the hub's error, which names the phase, if it arrives in time."""
        if self._watch is not None and not self._is_shut_down:
            try:
                self._watch.wait(NAMING_SECONDS)
            except (PeerDied, PeerFailed) as error:
                return error
        return PeerDied(f"{self.peer} has closed its connection")

    def shut_down(self) -> None:
        """Ends the calls of other threads: they raise `PeerDied`."""
        self._is_shut_down = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        forks.close(self.socket)


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread that does not keep the process alive. Raises `OutOfMemory`."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as why:
        raise OutOfMemory(f"{why}: raise the limit of processes (`ulimit -u`) or of memory (`ulimit -v`)") from why
    return thread


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        forks.close_descriptor(descriptors.pop())


def value(message: dict[str, Any], name: str, kind: type) -> Any:
    """Returns a value of a message. Raises `WrongPeer` if it is missing or has another type."""
    found = message.get(name)
    if type(found) is not kind:
        raise WrongPeer(
            f"{name!r} in the message {message.get('kind')!r} is not of type {kind.__name__}: use one version of symmalloc on both sides"
        )
    return found


@dataclass
class _Connected:
    """A process at the hub."""

    channel: Channel
    member: Member | None = None
    phase: str = "start"
    received: bytearray = field(default_factory=bytearray)


class Hub:
    """Tells all processes that one of them has died. A thread in trainer 0."""

    def __init__(self, folder: Path, pairs: int) -> None:
        everyone = {(role, rank) for role in (TRAINER, ENGINE) for rank in range(pairs)}
        self._missing = {JOIN: everyone, CONNECT: set(everyone)}
        self.refused: Error | None = None
        """Why the system refuses the next connection."""
        # The first death or failure, for processes that join later.
        self._cause: tuple[str, dict[str, Any]] | None = None
        self._connected: list[_Connected] = []
        self._is_closed = False
        with ExitStack() as opened:
            self._listener = Listener(folder, HUB)
            opened.callback(self._listener.close)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._stop_reader, self._stop = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, self._stop_reader)
            opened.callback(os.close, self._stop)
            self._listen()
            self._selector.register(self._stop_reader, selectors.EVENT_READ, None)
            self._thread = start_thread(self._run, "symmalloc-turns")
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Ends the thread. No effect in further calls."""
        if self._is_closed:
            return
        self._is_closed = True
        os.write(self._stop, b"1")
        self._thread.join()
        self._opened.close()

    def _listen(self) -> None:
        self._selector.register(self._listener.socket, selectors.EVENT_READ, None)
        self._retry: Deadline | None = None

    def _run(self) -> None:
        try:
            while not self._step():
                pass
            for one in list(self._connected):
                self._read(one)  # such as the error that ends this process's turns
            self._tell("ended")
        finally:
            # After an error, too: all others then notice that the hub has ended.
            for one in list(self._connected):
                self._forget(one)

    def _step(self) -> bool:
        """Waits for connections and messages. Returns `True` if the hub ends."""
        ready = self._selector.select(None if self._retry is None else self._retry.left())
        if self._retry is not None and self._retry.left() == 0:
            self._listen()
        for key, _ in ready:
            if key.fd == self._stop_reader:
                return True
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        return False

    def _accept(self) -> None:
        try:
            one = _Connected(Channel(self._listener.accept(), None))
        except (BlockingIOError, ConnectionError):
            return  # it has left
        except Error as why:
            # The connection remains in the queue, so that a wait would return at once.
            self.refused = why
            self._selector.unregister(self._listener.socket)
            self._retry = Deadline(RETRY_SECONDS)
            return
        self.refused = None
        try:
            if user_of(one.channel.socket)[1] != os.geteuid():
                raise PermissionError("another user")
            self._selector.register(one.channel.socket, selectors.EVENT_READ, one)
            self._connected.append(one)
        except OSError:
            one.channel.close()

    def _read(self, one: _Connected) -> None:
        if one not in self._connected:
            return
        try:
            part = one.channel.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        one.received += part
        try:
            while one in self._connected and len(one.received) >= HEADER.size:
                protocol, size, _ = HEADER.unpack(one.received[: HEADER.size])
                if protocol != PROTOCOL or size > HUB_BYTES:
                    raise ValueError("no message of this protocol")
                if len(one.received) < HEADER.size + size:
                    break
                body = one.received[HEADER.size : HEADER.size + size]
                del one.received[: HEADER.size + size]
                self._heard(one, json.loads(body))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            part = b""  # an invalid message ends the connection
        if not part:
            self._lose(one)

    def _heard(self, one: _Connected, said: dict[str, Any]) -> None:
        kind = said["kind"]
        if kind == "join":
            if one.member is not None:
                raise ValueError("a member joins again")
            member = Member(str(said["role"]), int(said["rank"]), int(said["pid"]))
            key = (member.role, member.rank)
            if self._cause is not None:
                kind, why = self._cause
                self._say(one, kind, **why)
            if key not in self._missing[JOIN]:
                self._say(one, "rejected", why=f"{member.role} {member.rank} has joined already, or is none of this job's ranks")
                return self._forget(one)
            one.member = member
            self._missing[JOIN].discard(key)
            self._tell("missing", **self._named())
        elif kind == "connected" and one.member is not None:
            self._missing[CONNECT].discard((one.member.role, one.member.rank))
            self._tell("missing", **self._named())
        elif kind == "ask":
            self._say(one, "missing", **self._named())
        elif kind == "phase":
            one.phase = str(said["phase"])
        elif kind == "failed" and one.member is not None:
            error, failed, one.member = str(said["why"]), one.member, None
            self._tell_end("failed", of=str(failed), phase=one.phase, why=error)
        elif kind == "bye":
            self._forget(one)

    def _named(self) -> dict[str, list[str]]:
        """Returns the processes that have not taken each step of the start."""
        return {step: [f"{role} {rank}" for role, rank in sorted(those)] for step, those in self._missing.items()}

    def _tell_end(self, kind: str, **body: Any) -> None:
        if self._cause is None:
            self._cause = kind, body
        self._tell(kind, **body)

    def _tell(self, kind: str, **body: Any) -> None:
        for one in list(self._connected):
            if one.member is not None:
                self._say(one, kind, **body)

    def _say(self, one: _Connected, kind: str, **body: Any) -> None:
        # A process that does not read loses its connection. It must not block the others.
        try:
            one.channel.send(kind, Deadline(0.5), **body)
        except Error:
            self._read(one)  # it may have left in order
            self._lose(one)

    def _lose(self, one: _Connected) -> None:
        """Ends a connection, and reports the death of its process if it had joined and not left."""
        member, one.member = one.member, None
        if one in self._connected:
            self._forget(one)
            if member is not None:
                self._tell_end("died", of=str(member), phase=one.phase)

    def _forget(self, one: _Connected) -> None:
        if one in self._connected:
            self._connected.remove(one)
            self._selector.unregister(one.channel.socket)
            one.channel.close()


class Membership:
    """This process's connection to the hub: reports its phase, and learns who has died."""

    def __init__(
        self, folder: Path, me: Member, pairs: int, deadline: Deadline, on_death: Callable[[Error], None] | None
    ) -> None:
        self.phase, self._on_death, self._send_lock = "start", on_death, threading.Lock()
        self._is_closed, self._missing = False, {step: ["everyone"] for step in (JOIN, CONNECT)}
        self._is_complete = {step: threading.Event() for step in self._missing}
        self._has_answer = threading.Event()
        with ExitStack() as opened:
            self.watch = Watch()
            opened.callback(self.watch.close)
            self._hub = Hub(folder, pairs) if (me.role, me.rank) == (TRAINER, 0) else None
            if self._hub is not None:
                opened.callback(self._hub.close)
            self._channel = Channel.connect(socket_path(folder, HUB), None, Member(TRAINER, 0), deadline)
            opened.callback(self._channel.close)
            self._channel.send("join", deadline, role=me.role, rank=me.rank, pid=me.pid)
            try:
                self._thread = start_thread(self._listen, "symmalloc-turns-watch")
            except BaseException as error:
                self.fail(error)
                raise
            opened.pop_all()

    def wait_for_all(self, step: str, deadline: Deadline) -> None:
        """Waits until all processes have taken a step of the start. Raises `DeadlinePassed`, which names those that have not."""
        if step == CONNECT:
            self._report("connected")
        while not self._is_complete[step].wait(min(0.02, deadline.left() or 0.001)):
            self.watch.check()
            if deadline.left() == 0:
                raise DeadlinePassed(f"{', '.join(self._missing[step])} did not {step} within {deadline.seconds} s")
        self.watch.check()

    @contextmanager
    def naming_hub(self) -> Iterator[None]:
        """Names the cause of a deadline error of the start that lies in trainer 0.

        Its process may be stopped, so that the hub does not answer. The system may also refuse connections to it, such as at the limit of
        open files, so that others cannot join.
        """
        try:
            yield
        except DeadlinePassed as error:
            if self._hub is not None and self._hub.refused is not None:
                raise self._hub.refused from error
            self._has_answer.clear()
            self._report("ask")
            if self._has_answer.wait(NAMING_SECONDS):
                raise
            self.watch.check()
            raise DeadlinePassed(
                f"{self._channel.peer} did not answer before the deadline, and all processes start through it: is it stopped?"
            ) from error

    def enter(self, phase: str) -> None:
        """Reports the phase of this process's turn, unless the hub does not read, such as in a stopped process."""
        self.phase = phase
        self._report("phase", seconds=0.001, phase=phase)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process's turn ended with an error."""
        self._report("failed", why=f"{type(error).__name__}: {error}"[:TEXT_CHARACTERS])

    def is_listening_here(self) -> bool:
        """Returns `True` in the thread that calls `on_death`."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Leaves. The others are not told that this process has died."""
        if self._is_closed:
            return
        self._is_closed = True
        self._report("bye")
        if self._hub is not None:
            self._hub.close()
        self._channel.shut_down()  # ends the thread
        if not self.is_listening_here():
            self._thread.join(LEAVING_SECONDS)  # unless it is in a call of `on_death`
        self._channel.close()
        self.watch.close()

    def _report(self, kind: str, *, seconds: float = 5.0, **body: Any) -> None:
        with suppress(Error, OSError), self._send_lock:  # the hub may be gone; the watch tells
            self._channel.send(kind, Deadline(seconds), **body)

    def _listen(self) -> None:
        kinds = ("missing", "died", "failed", "rejected", "ended")
        while not self._is_closed:
            try:
                said = self._channel.receive(Deadline(math.inf), *kinds)
                if said["kind"] == "ended":
                    if not self._is_complete[CONNECT].is_set():
                        self._set(PeerDied("trainer 0 has left before all processes had connected"))
                    return
                self._heard(said)
            except WrongPeer as error:
                self._set(error)
            except (Error, OSError, ValueError):
                if not self._is_closed:
                    self._set(PeerDied("trainer 0 has died: its connection was closed"))
                return
            except BaseException as why:  # such as no memory
                self._set(PeerFailed(f"this process cannot learn of failures any more: {type(why).__name__}: {why}"))
                raise

    def _heard(self, said: dict[str, Any]) -> None:
        if said["kind"] == "missing":
            for step, is_complete in self._is_complete.items():
                self._missing[step] = [str(one) for one in value(said, step, list)]
                if not self._missing[step]:
                    is_complete.set()
            self._has_answer.set()
        elif said["kind"] == "died":
            self._set(PeerDied(f"{value(said, 'of', str)} died in the phase `{value(said, 'phase', str)}`"))
        elif said["kind"] == "failed":
            of, phase, why = (value(said, name, str) for name in ("of", "phase", "why"))
            self._set(PeerFailed(f"{of} failed in the phase `{phase}`: {why}"))
        else:
            self._set(WrongPeer(value(said, "why", str)))

    def _set(self, error: Error) -> None:
        if self.watch.set(error) and self._on_death is not None:
            self._on_death(error)
