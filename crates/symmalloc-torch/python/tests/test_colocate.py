"""Trainer and engine that take turns: their protocol, and the memory that they share on the stub of libcuda."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import needs
import test_jobs
from symmalloc import colocate, turn_peers
from symmalloc.allocator import Phase
from symmalloc.colocate import Engine, Gathering, Layout, Part, Trainer, Unmanaged
from symmalloc.descriptors import StatePage
from symmalloc.errors import (
    DeadlinePassed,
    InvalidArgument,
    InvalidState,
    PeerDied,
    PeerFailed,
    StaleImport,
    UnequalLayouts,
    WrongPeer,
    visible_line,
)
from test_class import Compiled

SECONDS = 20.0
MANY = 100_000
"""Turns that no test completes: the pairs are not ordered with each other."""

SHARED = f"""
import ctypes, json, os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from symmalloc import colocate
from symmalloc.colocate import Engine, Part, Trainer, Unmanaged
from symmalloc.errors import *

folder, SECONDS = sys.argv[1], {SECONDS}

def raises(kind, says, act):
    try:
        act()
    except kind as error:
        assert says in str(error), error
        return error
    raise AssertionError(f"{{kind.__name__}} was not raised")

class Tensor:
    \"\"\"A tensor without PyTorch.\"\"\"
    dtype = "float32"

    def __init__(self, pointer, *shape, stride=None):
        self.pointer, self.shape, self._stride = pointer, shape, stride or (1,)

    def data_ptr(self):
        return self.pointer

    def stride(self):
        return self._stride

    def element_size(self):
        return 4

def view(layout, address):
    return address, layout.size_bytes

def fill(pointer, byte, size):
    ctypes.memset(pointer, byte, size)

def holds(pointer, byte, size):
    return set(ctypes.string_at(pointer, size)) == {{byte}}
"""

ON_STUB = (
    SHARED
    + """
import symmalloc
from symmalloc import MemPool, state, use_mem_pool
state.installed_with = (None, None, True)
ours = symmalloc.Allocator.shared(0)
MIB = 1 << 20
"""
)

ON_HOST = (
    SHARED
    + f"""
import importlib.util
spec = importlib.util.spec_from_file_location("job", {str(test_jobs.JOBS / "colocate.py")!r})
job = importlib.util.module_from_spec(spec)
sys.modules["job"] = job
spec.loader.exec_module(job)
host = job.HostDescriptors()

def on_phase(phase):
    if phase == os.environ.get("DIES_IN"):
        os.kill(os.getpid(), signal.SIGKILL)
    if phase == os.environ.get("STOPS_IN"):
        os.kill(os.getpid(), signal.SIGSTOP)

options = dict(memory=Unmanaged(), device=0, descriptors=host, deadline_seconds=float(os.environ.get("DEADLINE", SECONDS)), on_phase=on_phase)
rank, ranks, turns = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
"""
)

TRAINS = (
    ON_HOST
    + """
weights = {"w": Tensor(host.allocate(8192), 2048), "b": Tensor(host.allocate(4096), 16)}
with Trainer(folder, rank, ranks, **options) as side:
    for turn in range(turns):
        fill(weights["w"].data_ptr(), turn % 255 + 1, 8192)
        side.hand_over(weights)
        side.take(deadline_seconds=options["deadline_seconds"])
print("done")
"""
)

SERVES = (
    ON_HOST
    + """
addresses = set()
with Engine(folder, rank, ranks, view=view, **options) as side:
    for turn in range(turns):
        def load(weights):
            pointer, size = weights["w"]
            assert size == 8192 and holds(pointer, turn % 255 + 1, size), "the trainer's bytes of this turn"
            addresses.add(pointer)
        side.take(load, deadline_seconds=options["deadline_seconds"])
        assert host.maps == 0, "nothing of the trainer stays"
        side.hand_over()
assert len(addresses) == 1, "the same address in every turn"
print("done")
"""
)


class Job:
    """The processes of a run."""

    def __init__(self, folder: str, ranks: int, turns: int, **dies: dict[str, str]) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for rank in range(ranks):
            for role, program in (("engine", SERVES), ("trainer", TRAINS)):
                name = f"{role}{rank}"
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-c", textwrap.dedent(program), folder, str(rank), str(ranks), str(turns)],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | dies.get(name, {}),
                )  # fmt: skip

    def ended(self) -> dict[str, tuple[int, str]]:
        """Returns the status and the output of each process. Ends those that are stopped."""
        found = {}
        for name, process in self.processes.items():
            try:
                output, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            found[name] = (process.returncode, output)
        return found


class Turns(unittest.TestCase):
    """The protocol, in processes of which none needs a device."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = str(Path(folder.name) / "turns")

    def test_the_engine_reads_the_trainers_bytes_of_each_turn_at_one_address(self) -> None:
        for name, (status, output) in Job(self.folder, 2, 4).ended().items():
            self.assertEqual((status, output.splitlines()[-1]), (0, "done"), f"{name}: {output}")
        self.assertEqual([path.name for path in Path(self.folder).iterdir()], [], "no socket stays")

    def test_a_process_killed_in_any_phase_is_named_by_all_others(self) -> None:
        for role, phases in (
            ("trainer", ("release", "update", "sleep", "wait", "wake")),
            ("engine", ("update", "wake", "generate", "sleep")),
        ):
            for phase in phases:
                with self.subTest(role=role, phase=phase):
                    begun = time.monotonic()
                    ended = Job(self.folder, 2, MANY, **{f"{role}1": {"DIES_IN": phase}}).ended()
                    self.assertLess(time.monotonic() - begun, SECONDS, "not at the deadline")
                    self.assertEqual(ended.pop(f"{role}1")[0], -signal.SIGKILL)
                    for name, (status, output) in ended.items():
                        self.assertNotEqual(status, 0, name)
                        self.assertRegex(output, rf"PeerDied: {role} 1 \(pid \d+\) died in the phase `{phase}`", name)

    def test_the_death_of_the_hub_is_noticed(self) -> None:
        ended = Job(self.folder, 2, MANY, trainer0={"DIES_IN": "update"}).ended()
        self.assertEqual(ended.pop("trainer0")[0], -signal.SIGKILL)
        for name, (status, output) in ended.items():
            self.assertNotEqual(status, 0, name)
            self.assertRegex(output, r"PeerDied: trainer 0", name)

    def test_a_stopped_process_is_named_at_the_deadline(self) -> None:
        patience = {name: {"DEADLINE": "2"} for name in ("trainer0", "trainer1", "engine0")}
        job = Job(self.folder, 2, MANY, engine1={"STOPS_IN": "update", "DEADLINE": "2"}, **patience)
        stopped = job.processes.pop("engine1")
        ended = job.ended()
        stopped.kill()
        stopped.communicate()
        self.assertRegex(ended["trainer1"][1], r"DeadlinePassed: engine 1 \(pid \d+\) did not load the weights within 2\.0 s")
        for name in ("trainer0", "engine0"):
            self.assertNotEqual(ended[name][0], 0, name)
            self.assertRegex(ended[name][1], "DeadlinePassed|PeerFailed: trainer 1|PeerDied: trainer [01]", name)

    def test_a_missing_process_is_named(self) -> None:
        with self.assertRaisesRegex(DeadlinePassed, r"engine 0, engine 1, trainer 1 did not join within 0\.3 s"):
            Trainer(self.folder, 0, 2, memory=Unmanaged(), descriptors=Host(), deadline_seconds=0.3)
        with self.assertRaisesRegex(DeadlinePassed, "trainer 0 does not listen at"):
            Engine(self.folder, 0, 2, memory=Unmanaged(), descriptors=Host(), deadline_seconds=0.3)
        self.assertEqual(threads(), [])

    def test_two_jobs_in_one_folder_and_invalid_arguments_are_errors(self) -> None:
        with pair(self.folder) as (trainer, _):
            with self.assertRaisesRegex(InvalidState, "separate folder for each job"):
                Trainer(self.folder, 0, 1, memory=Unmanaged(), descriptors=Host(), deadline_seconds=1.0)
            with self.assertRaisesRegex(InvalidArgument, "give a number above 0"):
                trainer.take(deadline_seconds=-1.0)
        with self.assertRaisesRegex(InvalidArgument, "rank 2 is not one of 2 ranks"):
            Trainer(self.folder, 2, 2, memory=Unmanaged(), descriptors=Host())
        with self.assertRaisesRegex(InvalidArgument, "107 bytes"):
            Trainer(f"{self.folder}/{'x' * 100}", 0, 1, memory=Unmanaged(), descriptors=Host())
        shared = Path(self.folder).parent / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        with self.assertRaisesRegex(InvalidState, "others can write"):
            Trainer(shared, 0, 1, memory=Unmanaged(), descriptors=Host())

    def test_text_of_others_cannot_control_a_terminal_or_forge_a_line(self) -> None:
        self.assertEqual(
            visible_line("red\x1b[31m\nsymmalloc: all ranks are done"), "red\\u{1b}[31m\\nsymmalloc: all ranks are done"
        )
        for hidden in "\t\x7f\x9b\xad\u202e\u200b\u2028\ufeff\ud800\U000e0041\U0010ffff":
            self.assertEqual(visible_line(hidden), f"\\u{{{ord(hidden):x}}}")
        for plain in ("wörter 漢字 😀", r"C:\path"):
            self.assertEqual(visible_line(plain), plain)
        forged = "\x1b[2J\nsymmalloc: done"

        def load(_: Any) -> None:
            raise ValueError(forged)

        with pair(self.folder) as (trainer, engine):
            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            told, _ = together(lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(load, deadline_seconds=5.0))
            self.assertTrue(str(told).endswith(r"ValueError: \u{1b}[2J\nsymmalloc: done"), told)
        first, second = channels(self)
        second.send(forged, turn_peers.Deadline(1.0))
        with self.assertRaises(WrongPeer) as raised:
            first.receive(turn_peers.Deadline(1.0), "hello")
        self.assertTrue(str(raised.exception).isprintable())
        for kind in (PeerDied, PeerFailed, DeadlinePassed, WrongPeer, UnequalLayouts):
            self.assertTrue(str(kind(forged)).isprintable(), kind)

    def test_a_state_page_cannot_shrink_and_an_unsealed_one_is_rejected(self) -> None:
        page = StatePage.create()
        self.addCleanup(page.close)
        for size in (0, 2 * mmap.PAGESIZE):
            with self.assertRaises(PermissionError):
                os.ftruncate(page.fileno(), size)
        before = open_files()
        unsealed = os.memfd_create("page", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, mmap.PAGESIZE)
        with self.assertRaisesRegex(ValueError, "not sealed"):
            StatePage(os.dup(unsealed), is_owner=False)
        with open(os.devnull) as file, self.assertRaises(OSError):
            StatePage(os.dup(file.fileno()), is_owner=False)
        with pair(self.folder) as (trainer, engine):
            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            with mock.patch.object(StatePage, "fileno", lambda _: unsealed):
                told, raised = together(lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(deadline_seconds=5.0))
            self.assertIsInstance(raised, WrongPeer)
            self.assertIsInstance(told, PeerFailed)
            trainer._descriptors.close()
        os.close(unsealed)
        self.assertEqual(open_files(), before)

    def test_constructors_that_fail_half_way_close_what_they_opened(self) -> None:
        turn_peers.open_folder(self.folder)
        folder, deadline = Path(self.folder), turn_peers.Deadline(5.0)
        me = turn_peers.Member("trainer", 0, os.getpid())
        before = open_files()
        broken = OSError("broken")
        listener = turn_peers.Listener(folder, "turns.0")

        def connect() -> None:
            turn_peers.Channel.connect(listener.path, None, me, deadline)

        for target, name, act in (
            (turn_peers.socket.socket, "bind", lambda: turn_peers.Listener(folder, "turns.1")),
            (turn_peers.os, "chmod", lambda: turn_peers.Hub(folder, 1)),
            (turn_peers.threading.Thread, "start", lambda: turn_peers.Hub(folder, 1)),
            (turn_peers.os, "pipe2", lambda: turn_peers.Hub(folder, 1)),
            (turn_peers, "Hub", lambda: turn_peers.Membership(folder, me, 1, deadline, None)),
            (turn_peers.Channel, "send", lambda: turn_peers.Membership(folder, me, 1, deadline, None)),
            (turn_peers, "check_user", connect),
            (turn_peers.Channel, "__init__", connect),
        ):
            with self.subTest(name), mock.patch.object(target, name, side_effect=broken), self.assertRaises(OSError):
                act()
        listener.close()
        self.assertEqual(open_files(), before)
        self.assertEqual([path.name for path in folder.iterdir()], [])
        self.assertEqual(threads(), [])

    def test_a_lock_ends_with_its_process_although_a_forked_child_lives(self) -> None:
        program = """
import os, sys, time
from pathlib import Path
from symmalloc import turn_peers
listener = turn_peers.Listener(Path(sys.argv[1]), "turns")
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(60)
print(child, flush=True)
os._exit(0)
"""
        turn_peers.open_folder(self.folder)
        done = subprocess.run([sys.executable, "-c", program, self.folder], stdout=subprocess.PIPE, text=True, timeout=30)
        try:
            turn_peers.Listener(Path(self.folder), "turns").close()
        finally:
            os.kill(int(done.stdout), signal.SIGKILL)

    def test_a_lock_file_that_its_owner_unlinked_is_no_lock(self) -> None:
        turn_peers.open_folder(self.folder)
        path = Path(self.folder) / "turns.lock"
        real, calls = turn_peers.fcntl.flock, []

        def flock(file: Any, how: int) -> None:
            if not calls:
                path.unlink()  # by the last owner, after this process has opened the file
            calls.append(file)
            real(file, how)

        with mock.patch.object(turn_peers.fcntl, "flock", flock):
            first = turn_peers.Listener(Path(self.folder), "turns")
        self.addCleanup(first.close)
        with self.assertRaisesRegex(InvalidState, "separate folder for each job"):
            turn_peers.Listener(Path(self.folder), "turns")
        self.assertEqual(len(calls), 2)

    def test_the_lock_file_is_unlinked_before_the_lock_is_released(self) -> None:
        turn_peers.open_folder(self.folder)
        listener, seen = turn_peers.Listener(Path(self.folder), "turns"), []
        real = os.unlink

        def unlink(path: str) -> None:
            with open(f"{self.folder}/turns.lock") as file, self.assertRaises(BlockingIOError):
                turn_peers.fcntl.flock(file, turn_peers.fcntl.LOCK_EX | turn_peers.fcntl.LOCK_NB)
            seen.append(Path(path).name)
            real(path)

        with mock.patch.object(turn_peers.os, "unlink", unlink):
            listener.close()
        self.assertEqual(seen, ["turns", "turns.lock"])

    def test_a_forked_child_that_leaves_does_not_end_the_turns_of_its_parent(self) -> None:
        with pair(self.folder) as (trainer, engine):
            child = os.fork()
            if child == 0:
                with suppress(BaseException), trainer, engine:
                    raise SystemExit(1)
                os._exit(0)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertTrue((Path(self.folder) / "turns").is_socket(), "the child has not unlinked it")
            self.assertEqual(together(lambda: trainer.hand_over({}), lambda: engine.take(deadline_seconds=5.0)), [None, None])
            child = os.fork()
            if child == 0:
                try:
                    trainer.take(deadline_seconds=1.0)
                except InvalidState as error:
                    os._exit(0 if "belong to the parent" in str(error) else 2)
                os._exit(3)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(together(trainer.take, engine.hand_over), [None, None])

    def test_a_process_that_ends_does_so_although_nobody_reads_its_errors(self) -> None:
        program = """
import os
from symmalloc import colocate, errors
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, bytes(65536))
except BlockingIOError:
    os.set_blocking(writer, True)
os.dup2(writer, 2)
colocate.end_process(0.3, 7)(errors.PeerDied("engine 0 died"))
"""
        begun = time.monotonic()
        done = subprocess.run([sys.executable, "-c", program], timeout=30, env=os.environ)
        self.assertEqual(done.returncode, 7)
        self.assertGreater(time.monotonic() - begun, 0.3)

    def test_an_invalid_message_to_the_hub_ends_its_process_for_the_others(self) -> None:
        for bad in (
            turn_peers.HEADER.pack(turn_peers.PROTOCOL, 1 << 31, 0),
            turn_peers.HEADER.pack(turn_peers.PROTOCOL + 1, 2, 0),
            *(
                turn_peers.HEADER.pack(turn_peers.PROTOCOL, len(body), 0) + body
                for body in (b"[]", b"{}", b"\xff", b"[" * 50_000, b'{"kind":"failed"}')
            ),
        ):
            with self.subTest(bad[:40]), pair(self.folder) as (trainer, engine):
                engine._membership._channel.socket.send(bad)
                with self.assertRaisesRegex(PeerDied, r"engine 0 \(pid \d+\) died in the phase `wait`"):
                    trainer.hand_over({}, deadline_seconds=5.0)

    def test_a_process_of_another_user_is_the_wrong_peer(self) -> None:
        first, second = socket.socketpair()
        self.addCleanup(first.close)
        self.addCleanup(second.close)
        with (
            mock.patch.object(turn_peers.os, "geteuid", lambda: os.getuid() + 1),
            self.assertRaisesRegex(WrongPeer, f"belongs to user {os.getuid()}"),
        ):
            turn_peers.check_user(first, "/run/job/turns")

    def test_another_device_or_number_of_ranks_is_the_wrong_peer(self) -> None:
        with (
            self.assertRaisesRegex(WrongPeer, "give equal ranks of trainer and engine the same device"),
            pair(self.folder, engine=Host("another")),
        ):
            pass

    def test_the_message_of_another_program_is_the_wrong_peer(self) -> None:
        first, second = socket.socketpair()
        channel = turn_peers.Channel(first, None, turn_peers.Member("engine", 0))
        self.addCleanup(first.close)
        self.addCleanup(second.close)
        second.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with self.assertRaisesRegex(WrongPeer, "invalid message"):
            channel.receive(turn_peers.Deadline(1.0), "hello")

    def test_descriptors_of_a_rejected_message_are_closed(self) -> None:
        first, second = socket.socketpair()
        self.addCleanup(first.close)
        self.addCleanup(second.close)
        channel, other = turn_peers.Channel(first, None, turn_peers.Member("engine", 0)), turn_peers.Channel(second, None)
        before = len(os.listdir("/proc/self/fd"))
        with open(os.devnull) as file:
            other.send("surprise", turn_peers.Deadline(1.0), [file.fileno()] * 3)
        with self.assertRaisesRegex(WrongPeer, "'surprise' instead of hello"):
            channel.receive(turn_peers.Deadline(1.0), "hello")
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_an_error_in_load_reaches_the_trainer_with_its_text(self) -> None:
        def load(weights: Any) -> None:
            raise UnequalLayouts("lm_head.weight differs")

        with pair(self.folder) as (trainer, engine):
            failures = together(lambda: trainer.hand_over({}), lambda: engine.take(load, deadline_seconds=5.0))
            self.assertEqual(failures, [None, None], "no weights, no load")
            together(trainer.take, engine.hand_over)
            host = trainer._descriptors
            tensor = Tensor(host.allocate(4096), 8)
            told, raised = together(lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(load, deadline_seconds=5.0))
            self.assertIsInstance(raised, UnequalLayouts)
            self.assertRegex(
                str(told), r"engine 0 \(pid \d+\) failed in the phase `update`: UnequalLayouts: lm_head.weight differs"
            )
            self.assertIsInstance(told, PeerFailed)
            self.assertEqual(engine._descriptors.maps, 0, "nothing stays mapped")
            with self.assertRaises(PeerFailed):
                trainer.take(deadline_seconds=1.0)

    def test_memory_is_released_and_restored_in_order(self) -> None:
        log: list[str] = []

        class Noted:
            def __init__(self, name: str) -> None:
                self.name = name

            def sleep(self, part: Part) -> None:
                log.append(f"{self.name} releases {part.value}")

            def wake(self, part: Part) -> None:
                log.append(f"{self.name} restores {part.value}")

        with pair(self.folder, memories=(Noted("trainer"), Noted("engine"))) as (trainer, engine):
            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            together(
                lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(lambda _: log.append("load"), deadline_seconds=5.0)
            )
            self.assertEqual(
                log,
                ["trainer releases rest", "engine restores weights", "load", "trainer releases weights", "engine restores rest"],
            )
            log.clear()
            together(trainer.take, engine.hand_over)
            self.assertEqual(
                log, ["engine releases rest", "engine releases weights", "trainer restores weights", "trainer restores rest"]
            )

    def test_kept_weights_stay_until_the_engine_hands_over(self) -> None:
        with pair(self.folder) as (trainer, engine):
            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            taken: list[Any] = []
            for _ in range(2):
                self.assertEqual(
                    together(
                        lambda: trainer.hand_over({"w": tensor}),
                        lambda: taken.append(engine.take(keep=True, deadline_seconds=5.0)),
                    ),
                    [None, None],
                )
                weights = taken[-1]
                ctypes.memset(tensor.data_ptr(), 9, 32)
                self.assertEqual(set(ctypes.string_at(weights.address("w"), 32)), {9}, "one copy of the weights")
                self.assertEqual(together(trainer.take, engine.hand_over), [None, None])
                with self.assertRaisesRegex(StaleImport, "no longer mapped"):
                    weights["w"]
            self.assertEqual(engine._descriptors.maps, 0)
            told, raised = together(
                lambda: trainer.hand_over([{"w": tensor}, {"b": tensor}]), lambda: engine.take(keep=True, deadline_seconds=5.0)
            )
            self.assertIsInstance(raised, InvalidState)
            self.assertIn("single mapping", str(told))

    def test_a_trainer_that_withdraws_makes_kept_weights_stale(self) -> None:
        with pair(self.folder) as (trainer, engine):
            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            taken: list[Any] = []
            together(lambda: trainer.hand_over({"w": tensor}), lambda: taken.append(engine.take(keep=True, deadline_seconds=5.0)))
            taken[0]["w"]
            trainer.close()
            with self.assertRaisesRegex(StaleImport, "released the memory"):
                taken[0]["w"]
            with self.assertRaises(PeerDied):
                engine.hand_over(deadline_seconds=5.0)

    def test_a_child_process_does_not_keep_the_sockets(self) -> None:
        with pair(self.folder) as (trainer, engine):
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            try:
                engine.close()
                begun = time.monotonic()
                with self.assertRaises(PeerDied):
                    trainer.hand_over({}, deadline_seconds=15.0)
                self.assertLess(time.monotonic() - begun, 10.0)
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def test_turns_need_no_right_to_call_ptrace(self) -> None:
        program = (
            ON_HOST.replace("rank, ranks, turns = ", "_ = ")
            + """
job.deny_ptrace()
assert job.is_denied()
import test_colocate, unittest
done = unittest.TestResult()
test_colocate.Turns("test_the_engine_reads_the_trainers_bytes_of_each_turn_at_one_address").run(done)
assert done.testsRun == 1 and done.wasSuccessful() and not done.skipped, done.failures + done.errors
"""
        )
        done = subprocess.run(
            [sys.executable, "-c", program, self.folder, "0", "1", "1"],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Groups(unittest.TestCase):
    """The groups of `Gathering`, and the size of its pool."""

    def test_the_pool_has_room_for_a_parameter_that_is_larger_than_a_group(self) -> None:
        pools: list[mock.MagicMock] = []

        def pool(**options: Any) -> mock.MagicMock:
            pools.append(mock.MagicMock(phase=Phase.AWAKE, options=options))
            return pools[-1]

        with (
            mock.patch.object(colocate, "MemPool", pool),
            mock.patch.object(colocate, "use_mem_pool", mock.MagicMock()),
            mock.patch.object(colocate, "device_index", lambda device: 0),
        ):
            gathering = Gathering(100)
            for sizes in ((60, 40, 70), (50, 300, 60), (120, 300)):
                named = [("plain", Plain(1000)), *((str(size), Sharded(size)) for size in sizes)]
                groups = [list(group) for group in gathering.buckets(named)]
            self.assertEqual(groups, [["plain"], ["120"], ["300"]])
        # The third pass has no larger parameter than the second, and 1,000 bytes that are not gathered need no room.
        self.assertEqual([pool.options["reserve"] for pool in pools], [101, 304])


class Plain:
    """A parameter that is not sharded."""

    is_cuda, device = True, "cuda:0"

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def numel(self) -> int:
        return self.size_bytes

    def element_size(self) -> int:
        return 1

    def detach(self) -> Plain:
        return self


class Sharded(Plain):
    """A parameter of FSDP2 over two ranks, as `Gathering` sees it."""

    device_mesh = mock.Mock(**{"size.return_value": 2})

    def full_tensor(self) -> Plain:
        return Plain(self.size_bytes)


class Host(test_jobs.job("colocate").HostDescriptors):  # type: ignore[misc]
    """Host memory of one side."""

    def __init__(self, identity: str = "host") -> None:
        super().__init__()
        self.identity = identity

    def close(self) -> None:
        for one in self._files.values():
            os.close(one)


class Tensor:
    """A tensor without PyTorch."""

    dtype = "float32"

    def __init__(self, pointer: int, *shape: int) -> None:
        self.pointer, self.shape = pointer, shape

    def data_ptr(self) -> int:
        return self.pointer

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def element_size(self) -> int:
        return 4


def channels(test: unittest.TestCase) -> tuple[turn_peers.Channel, turn_peers.Channel]:
    """Returns two ends of a connection."""
    ends = [turn_peers.Channel(one, None, turn_peers.Member("engine", 0)) for one in socket.socketpair()]
    for one in ends:
        test.addCleanup(one.close)
    return ends[0], ends[1]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("symmalloc-turns")]


def together(*acts: Callable[[], Any]) -> list[BaseException | None]:
    """Runs functions at once. Returns their errors."""
    errors: list[BaseException | None] = [None] * len(acts)

    def run(at: int) -> None:
        try:
            acts[at]()
        except BaseException as error:
            errors[at] = error

    running = [threading.Thread(target=run, args=(at,)) for at in range(len(acts))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return errors


class pair:
    """A trainer and an engine in this process."""

    def __init__(self, folder: str, *, engine: Host | None = None, memories: tuple[Any, Any] | None = None) -> None:
        sides: dict[str, Any] = {}
        memory = memories or (Unmanaged(), Unmanaged())

        def view(layout: Layout, address: int) -> int:
            return address

        def start_trainer() -> None:
            sides["trainer"] = Trainer(folder, 0, 1, memory=memory[0], descriptors=Host(), deadline_seconds=5.0)

        def start_engine() -> None:
            sides["engine"] = Engine(
                folder, 0, 1, memory=memory[1], descriptors=engine or Host(), view=view, deadline_seconds=5.0
            )

        errors = together(start_trainer, start_engine)
        self._sides = sides
        for error in errors:
            if error is not None:
                self.__exit__()
                raise error

    def __enter__(self) -> tuple[Any, Any]:
        return self._sides["trainer"], self._sides["engine"]

    def __exit__(self, *_: object) -> None:
        for side in self._sides.values():
            side.close()


@needs.device
class OnStub(unittest.TestCase):
    """The memory of symmalloc's pools, on the stub of libcuda. Its device memory is in files, which processes really share."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = str(Path(folder.name) / "turns")

    def run_pair(self, trainer: str, engine: str, **environment: str) -> None:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(ON_STUB + program), self.folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, env=os.environ | environment,
            )
            for program in (trainer, engine)
        ]  # fmt: skip
        ended = [(process.communicate(timeout=90)[0], process.returncode) for process in processes]
        for output, status in ended:
            self.assertEqual(status, 0, output)

    TRAINER = """
pool = MemPool(symmetric=False, tag="weights", device=0, conf=CONF)
rest = MemPool(symmetric=False, tag="optimizer", device=0)
held = ours.allocate(5 * MIB, pool=rest.id)
pointers = [ours.allocate(size * MIB, pool=pool.id) for size in (3, 24, 1)]
weights = {str(at): Tensor(pointer, size * MIB // 4) for at, (pointer, size) in enumerate(zip(pointers, (3, 24, 1)))}
memory = colocate.Pools(weights=["weights"], rest=["optimizer"], device=0)
"""
    CONFS = ("segments:fixed", "segments:expandable", "segments:reserved,segment_mb:64")

    def test_weights_of_pools_reach_the_engine_and_nothing_stays_in_its_turn(self) -> None:
        for conf in self.CONFS:
            with self.subTest(conf=conf):
                self.run_pair(f"CONF = {conf!r}" + self.TRAINER + """
with Trainer(folder, 0, 1, memory=memory, device=0, deadline_seconds=SECONDS) as side:
    for turn in range(4):
        for at, pointer in enumerate(pointers):
            fill(pointer, 10 * turn + at + 1, MIB)
        fill(held, turn + 1, MIB)
        update = side.hand_over(weights)
        assert update.size_bytes == 28 * MIB, update
        now = symmalloc.device_memory(0)
        assert (now.awake_bytes, now.asleep_bytes) == (0, 0), now
        assert [one.phase.name for one in (pool, rest)] == ["ASLEEP", "ASLEEP"]
        side.take(deadline_seconds=SECONDS)
        assert holds(held, turn + 1, MIB) and holds(pointers[1], 10 * turn + 2, MIB)
""", """
import ctypes
imports = ctypes.CDLL("libcuda.so.1").stub_imports
addresses = []
with Engine(folder, 0, 1, memory=Unmanaged(), device=0, view=view, deadline_seconds=SECONDS) as side:
    for turn in range(4):
        def load(given):
            assert list(given) == ["0", "1", "2"]
            for at, name in enumerate(given):
                address, size = given[name]
                assert size == (3, 24, 1)[at] * MIB and holds(address, 10 * turn + at + 1, MIB), (turn, name)
            addresses.append([given.address(name) for name in given])
        side.take(load, deadline_seconds=SECONDS)
        assert imports() == 0, "the engine holds nothing of the trainer"
        side.hand_over()
assert all(one == addresses[0] for one in addresses), addresses
""", SYMMALLOC_CONF="chunk_mb:2")  # fmt: skip

    def test_kept_weights_are_the_trainers_memory(self) -> None:
        self.run_pair(f"CONF = {self.CONFS[0]!r}" + self.TRAINER + """
with Trainer(folder, 0, 1, memory=memory, device=0, deadline_seconds=SECONDS) as side:
    for turn in range(3):
        fill(pointers[1], turn + 1, MIB)
        side.hand_over(weights)
        assert [one.phase.name for one in (pool, rest)] == ["AWAKE", "ASLEEP"], "the weights stay"
        side.take(deadline_seconds=SECONDS)
        assert rest.phase.name == "AWAKE"
""", """
with Engine(folder, 0, 1, memory=Unmanaged(), device=0, view=view, deadline_seconds=SECONDS) as side:
    for turn in range(3):
        given = side.take(keep=True, deadline_seconds=SECONDS)
        address, _ = given["1"]
        assert holds(address, turn + 1, MIB)
        side.hand_over()
        raises(StaleImport, "no longer mapped", lambda: given["1"])
""")  # fmt: skip

    def test_a_sleep_of_the_trainer_makes_kept_weights_stale(self) -> None:
        self.run_pair(f"CONF = {self.CONFS[0]!r}" + self.TRAINER + """
with Trainer(folder, 0, 1, memory=memory, device=0, deadline_seconds=SECONDS) as side:
    side.hand_over(weights)
    while not os.path.exists(folder + "/mapped"):
        time.sleep(0.01)
    symmalloc.sleep("weights", device=0)
    open(folder + "/slept", "w").close()
    symmalloc.wake("weights", device=0)
    side.take(deadline_seconds=SECONDS)
""", """
with Engine(folder, 0, 1, memory=Unmanaged(), device=0, view=view, deadline_seconds=SECONDS) as side:
    given = side.take(keep=True, deadline_seconds=SECONDS)
    given["1"]
    open(folder + "/mapped", "w").close()
    while not os.path.exists(folder + "/slept"):
        time.sleep(0.01)
    raises(StaleImport, "the trainer has released", lambda: given["1"])
    side.hand_over()
""")  # fmt: skip

    def test_memory_without_a_handle_and_sharded_tensors_are_errors(self) -> None:
        done = needs.process(
            SHARED.replace("sys.argv[1]", "''")
            + """
from symmalloc.descriptors import CudaDescriptors
descriptors = CudaDescriptors(0)
pointer = ctypes.c_uint64()
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuCtxSetCurrent(descriptors._context) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4096)) == 0
raises(InvalidArgument, "allocate it in a pool of symmalloc", lambda: descriptors.chunks(pointer.value, 4096))
class Sharded(Tensor):
    def full_tensor(self): ...
raises(InvalidArgument, "w is sharded", lambda: colocate._span("w", Sharded(0, 8)))
"""
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_driver_is_called_in_the_context_of_the_turns_device(self) -> None:
        done = needs.process(
            SHARED.replace("sys.argv[1]", "''")
            + """
from symmalloc.descriptors import CudaDescriptors, _driver
driver = _driver()
mine, other = CudaDescriptors(0), CudaDescriptors(1)
def current():
    context = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value
seen = []
class Recording:
    def __getattr__(self, name):
        def call(*arguments):
            if not name.startswith("cuCtxP"):
                seen.append((name, current()))
            return getattr(driver, name)(*arguments)
        return call
mine._driver = Recording()
for before in (None, other._context.value):
    assert driver.cuCtxSetCurrent(ctypes.c_void_p(before)) == 0
    mine.synchronize()
    mine.release(mine.reserve(1 << 21), 1 << 21)
    raises(InvalidArgument, "no handle", lambda: mine.chunks(1 << 21, 1))
    assert current() == before, "the program's context stays current"
assert {name for name, _ in seen} == {"cuCtxSynchronize", "cuMemAddressReserve", "cuMemAddressFree", "cuMemRetainAllocationHandle"}, seen
assert {context for _, context in seen} == {mine._context.value}, seen
"""
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_kill_in_the_update_leaves_no_import_in_the_engine(self) -> None:
        trainer = (
            f"CONF = {self.CONFS[0]!r}"
            + self.TRAINER
            + """
def die():
    yield weights
    os.kill(os.getpid(), signal.SIGKILL)
Trainer(folder, 0, 1, memory=memory, device=0, deadline_seconds=SECONDS).hand_over(die())
"""
        )
        engine = """
imports = ctypes.CDLL("libcuda.so.1").stub_imports
side = Engine(folder, 0, 1, memory=Unmanaged(), device=0, view=view, deadline_seconds=SECONDS)
seen = []
raises(PeerDied, "trainer 0", lambda: side.take(lambda given: seen.append(imports()), deadline_seconds=SECONDS))
assert seen[0] > 0 and imports() == 0, (seen, imports())
"""
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(ON_STUB + program), self.folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for program in (trainer, engine)
        ]
        output, _ = processes[0].communicate(timeout=60)
        self.assertEqual(processes[0].returncode, -signal.SIGKILL, output)
        output, _ = processes[1].communicate(timeout=60)
        self.assertEqual(processes[1].returncode, 0, output)


@needs.torch
class Parameters(unittest.TestCase):
    """Parameters of PyTorch's modules, on the CPU."""

    def test_unequal_layouts_name_the_parameter_and_change_nothing(self) -> None:
        done = needs.process(
            SHARED.replace("sys.argv[1]", "''")
            + """
import torch
from symmalloc.colocate import Layout, Weights, adopt, copy_into
from symmalloc.descriptors import StatePage
of = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.ones(2, 2)}
def weights(**changed):
    tensors = of | changed
    layouts = {name: Layout(at, 0, one.nbytes, str(one.dtype)[6:], tuple(one.shape), tuple(one.stride())) for at, (name, one) in enumerate(tensors.items())}
    by_address = {one.data_ptr(): one for one in tensors.values()}
    return Weights(layouts, [one.data_ptr() for one in tensors.values()], StatePage.create(), lambda layout, address: by_address[address])
own = [(name, torch.nn.Parameter(torch.zeros_like(one))) for name, one in of.items()]
before = [one.data_ptr() for _, one in own]
raises(UnequalLayouts, "b is float32 [4] with strides [1] in the engine and float64 [4]", lambda: adopt(own, weights(b=torch.ones(4, dtype=torch.float64))))
raises(UnequalLayouts, "c has the shape [2, 2] in the engine and [4, 2]", lambda: copy_into(own, weights(c=torch.ones(4, 2))))
raises(UnequalLayouts, "no parameter d", lambda: adopt([*own, ("d", own[0][1])], weights()))
assert before == [one.data_ptr() for _, one in own] and not own[0][1].any(), "nothing has changed"
copy_into(own, weights(b=torch.full((4,), 2.0, dtype=torch.float64)))
assert own[1][1].tolist() == [2.0] * 4 and own[0][1].tolist() == of["a"].tolist()
given = weights()
assert adopt(own, given) == 3 and adopt(own, given) == 0
assert [one.data_ptr() for _, one in own] == [one.data_ptr() for one in of.values()]
"""
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


@needs.torch
@needs.device
@needs.stand_ins
class Tensors(Compiled):
    """A real PyTorch on the stub of libcuda, where kernels compute nothing."""

    BEGIN = """
import ctypes, os, sys, torch, symmalloc
symmalloc.install("tag:private")
from symmalloc import colocate
MIB, SECONDS = 1 << 20, 60.0
folder, role = sys.argv[1], sys.argv[2]
fill = lambda tensor, byte: ctypes.memset(tensor.data_ptr(), byte, tensor.nbytes)
holds = lambda tensor, byte: set(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)) == {byte}
empty = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
"""
    TRAINER = """
class Mesh:
    def size(self): return 2

class Sharded:
    # A parameter of FSDP2, as `Gathering` sees it.
    is_cuda, device = True, torch.device("cuda:0")
    device_mesh = Mesh()
    def __init__(self, byte, *shape): self.byte, self.shape = byte, shape
    def numel(self): return torch.Size(self.shape).numel()
    def element_size(self): return 2
    def detach(self): return self
    def full_tensor(self):
        whole = empty(*self.shape)
        fill(whole, self.byte)
        return whole

with symmalloc.region(tag="weights", enable_cpu_backup=True):
    plain = empty(3, MIB)
with symmalloc.region(tag="optimizer", enable_cpu_backup=True):
    state = empty(5, MIB)
activations = empty(2, MIB)
gathering = colocate.Gathering(8 * MIB)
memory = colocate.Pools(weights=["weights"], rest=["optimizer", "private"])
with colocate.Trainer(folder, 0, 1, memory=memory, deadline_seconds=SECONDS) as turns:
    asleep = []
    for turn in range(1, 4):
        fill(plain, turn); fill(state, turn + 1); fill(activations, turn + 2)
        named = [("plain", plain), *((str(at), Sharded(turn + 10 * at, 2, MIB)) for at in range(1, 4))]
        named.append(("4", Sharded(turn + 40, 6, MIB)))  # larger than a group
        update = turns.hand_over(gathering.buckets(named))
        assert update.size_bytes == 2 * (3 + 2 + 2 + 2 + 6) * MIB, update
        memory_now = symmalloc.device_memory(0)
        assert memory_now.awake_bytes == 0, memory_now
        asleep.append(memory_now)
        turns.take(deadline_seconds=SECONDS)
        assert holds(plain, turn) and holds(state, turn + 1) and holds(activations, turn + 2)
    assert len(set(asleep)) == 1, asleep
"""
    ENGINE = """
with symmalloc.region(tag="weights"):
    own = {"plain": empty(3, MIB), "1": empty(2, MIB), "2": empty(2, MIB), "3": empty(2, MIB), "4": empty(6, MIB)}
with symmalloc.region(tag="kv_cache"):
    cache = empty(4, MIB)
inputs = empty(1, MIB)
fill(inputs, 9)
memory = colocate.Pools(weights=["weights"], rest=["kv_cache", "private"])
memory.sleep(colocate.Part.REST); memory.sleep(colocate.Part.WEIGHTS)
groups, addresses = [], []
with colocate.Engine(folder, 0, 1, memory=memory, deadline_seconds=SECONDS) as turns:
    for turn in range(1, 4):
        groups.append([])
        def load(weights):
            for name, tensor in weights.items():
                assert tensor.dtype == torch.bfloat16 and tensor.device == torch.device("cuda:0") and tensor.is_contiguous()
                assert tuple(tensor.shape) == tuple(own[name].shape), name
                assert holds(tensor, turn + (0 if name == "plain" else 10 * int(name))), name
                addresses.append((name, tensor.data_ptr()))
            groups[-1].append(sorted(weights))
            colocate.copy_into([(name, own[name]) for name in weights], weights)
        turns.take(load, deadline_seconds=SECONDS)
        assert holds(inputs, 9)
        turns.hand_over()
assert groups == [[["plain"], ["1", "2"], ["3"], ["4"]]] * 3, groups
assert len(set(addresses)) == 5, "the same addresses in every turn"
"""

    def test_parameters_and_gathered_groups_reach_the_engine_while_other_pools_sleep(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = f"import sys\nsys.argv[1:] = [{folder + '/turns'!r}, ROLE]\n"
            done: dict[str, Any] = {}

            def run(role: str, text: str) -> None:
                done[role] = self.run_in(self.cache.name, program.replace("ROLE", repr(role)) + self.BEGIN + text)

            together(lambda: run("trainer", self.TRAINER), lambda: run("engine", self.ENGINE))
            for role, process in done.items():
                self.assertEqual(process.returncode, 0, f"{role}: {process.stdout}{process.stderr}")


@needs.torch
class TheJob(unittest.TestCase):
    """`benches/jobs/colocate.py` on the CPU: FSDP2 and an engine with tensor parallelism, in real processes."""

    def job(self, *options: str) -> str:
        done = subprocess.run(
            [sys.executable, str(test_jobs.JOBS / "colocate.py"), "--device", "cpu", "--ranks", "2", "--deadline", "60", *options],
            capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": needs.packages()},
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertNotIn("FAIL", done.stdout)
        return done.stdout

    def test_losses_and_tokens_equal_those_of_a_copy_through_files_without_ptrace(self) -> None:
        output = self.job("--turns", "3", "--deny-ptrace")
        for bar in ("losses equal to the reference", "tokens equal to the reference", "ptrace and pidfd_getfd are denied"):
            self.assertRegex(output, f"PASS .*{bar}")

    def test_a_killed_rank_is_named_by_all_others(self) -> None:
        output = self.job("--kill", "engine:generate,trainer:wake")
        self.assertEqual(output.count("3 of 3 name it"), 2, output)


if __name__ == "__main__":
    unittest.main()
