"""Trainer and engine that take turns: their protocol, and the memory that they share on the stub of libcuda."""

from __future__ import annotations

import ctypes
import errno
import io
import math
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import needs
import test_jobs
from symmalloc import colocate, forks, turn_peers
from symmalloc.allocator import Phase
from symmalloc.colocate import Engine, Gathering, Layout, Part, Trainer, Unmanaged, adopt
from symmalloc.descriptors import StatePage
from symmalloc.errors import (
    DeadlinePassed,
    InvalidArgument,
    InvalidState,
    OutOfMemory,
    PeerDied,
    PeerFailed,
    StaleImport,
    TooManyOpenFiles,
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

exec(os.environ.get("BEFORE", ""))
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
        # Long enough for the start of all processes on a busy machine.
        patience = {name: {"DEADLINE": "8"} for name in ("trainer0", "trainer1", "engine0")}
        job = Job(self.folder, 2, MANY, engine1={"STOPS_IN": "update", "DEADLINE": "8"}, **patience)
        stopped = job.processes.pop("engine1")
        ended = job.ended()
        stopped.kill()
        stopped.communicate()
        self.assertRegex(ended["trainer1"][1], r"DeadlinePassed: engine 1 \(pid \d+\) did not load the weights within 8\.0 s")
        for name in ("trainer0", "engine0"):
            self.assertNotEqual(ended[name][0], 0, name)
            self.assertRegex(ended[name][1], "DeadlinePassed|PeerFailed: trainer 1|PeerDied: trainer [01]", name)

    def test_a_trainer_0_that_stops_at_the_start_is_named_by_all_others(self) -> None:
        stopping = """
from symmalloc import turn_peers
turn_peers.Hub.said = []
def stopping(act, when):
    def then(*arguments, **options):
        if when(*arguments, **options):
            os.kill(os.getpid(), signal.SIGSTOP)
        return act(*arguments, **options)
    return then
turn_peers.{0} = stopping(turn_peers.{0}, lambda *arguments, **options: {1})
"""
        # Long enough for the start of all processes on a busy machine.
        patience = {name: {"DEADLINE": "10"} for name in ("trainer1", "engine0", "engine1")}
        jobs = {}
        for at, (moment, what, when) in enumerate(
            (
                ("before it listens", "open_folder", "True"),
                ("before it joins", "Channel.connect", "arguments[0].endswith('turns')"),
                ("before it waits for all", "Membership.wait_for_all", "arguments[1] == 'join'"),
                ("while it tells that all have joined", "Hub._say", "options.get('join') == [] and not arguments[0].said.append(1) and len(arguments[0].said) == 3"),
                ("before it connects", "Listener.__init__", "arguments[2] == 'turns.0'"),
                ("after it has connected", "Membership.wait_for_all", "arguments[1] == 'connect'"),
            )
        ):  # fmt: skip
            before = stopping.format(what, when).replace("turn_peers.open_folder", "colocate.open_folder")
            jobs[moment] = Job(f"{self.folder}{at}", 2, MANY, trainer0={"BEFORE": before}, **patience)
        for moment, job in jobs.items():
            with self.subTest(moment):
                stopped = job.processes.pop("trainer0")
                ended = job.ended()
                self.assertIsNone(stopped.poll())
                stopped.kill()
                stopped.communicate()
                for name, (status, output) in ended.items():
                    self.assertNotEqual(status, 0, name)
                    self.assertRegex(
                        output.splitlines()[-1], r"DeadlinePassed: trainer 0( \(pid \d+\) did not | does not listen)", name
                    )

    def test_a_missing_process_is_named(self) -> None:
        with self.assertRaisesRegex(DeadlinePassed, r"engine 0, engine 1, trainer 1 did not join within 0\.3 s"):
            Trainer(self.folder, 0, 2, memory=Unmanaged(), descriptors=Host(), deadline_seconds=0.3)
        with self.assertRaisesRegex(DeadlinePassed, r"trainer 0 does not listen at [^:]* after 0\.3 s$"):
            Engine(self.folder, 0, 2, memory=Unmanaged(), descriptors=Host(), deadline_seconds=0.3)
        self.assertEqual(threads(), [])

    def test_a_start_after_the_death_of_trainer_0_names_it_at_the_deadline_and_can_find_its_successor(self) -> None:
        made = {"memory": Unmanaged(), "deadline_seconds": 20.0}
        job = Job(self.folder, 1, MANY, trainer0={"DIES_IN": "update"})
        self.assertEqual(job.ended()["trainer0"][0], -signal.SIGKILL)
        with self.assertRaisesRegex(DeadlinePassed, r"trainer 0 does not listen at .*: the process that listened there has died"):
            Engine(self.folder, 0, 1, descriptors=Host(), **made | {"deadline_seconds": 0.3})
        # The engine of the next job may start before its trainer.
        sides: list[Any] = []
        with after(0.3, lambda: sides.append(Trainer(self.folder, 0, 1, descriptors=Host(), **made))):
            sides.append(Engine(self.folder, 0, 1, descriptors=Host(), **made))
        self.assertEqual(len(sides), 2)
        for side in sides:
            side.close()

    def test_two_jobs_in_one_folder_and_invalid_arguments_are_errors(self) -> None:
        with pair(self.folder) as (trainer, _):
            with self.assertRaisesRegex(InvalidState, "separate folder for each job"):
                Trainer(self.folder, 0, 1, memory=Unmanaged(), descriptors=Host(), deadline_seconds=1.0)
            with self.assertRaisesRegex(InvalidArgument, "give a number above 0"):
                trainer.hand_over({}, deadline_seconds=-1.0)
        for rank in ("0", 0.0, None):
            with self.assertRaises(TypeError):
                Trainer(self.folder, rank, 1, memory=Unmanaged(), descriptors=Host())
        with self.assertRaisesRegex(DeadlinePassed, "engine 0 did not join"):
            Trainer(self.folder, Index(0), Index(1), memory=Unmanaged(), descriptors=Host(), deadline_seconds=0.1)
        with self.assertRaisesRegex(InvalidArgument, "rank 2 is not one of 2 ranks"):
            Trainer(self.folder, 2, 2, memory=Unmanaged(), descriptors=Host())
        with self.assertRaisesRegex(InvalidArgument, "107 bytes"):
            Trainer(f"{self.folder}/{'x' * 100}", 0, 1, memory=Unmanaged(), descriptors=Host())
        shared = Path(self.folder).parent / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        with self.assertRaisesRegex(InvalidState, "others can write"):
            Trainer(shared, 0, 1, memory=Unmanaged(), descriptors=Host())

    def test_a_call_out_of_turn_has_no_effect(self) -> None:
        with pair(self.folder) as (trainer, engine):
            for act in (trainer.take, engine.hand_over):
                with self.assertRaisesRegex(InvalidState, "in the phase `(train|wait)`: call hand_over"):
                    act()
            for turn in range(2):
                self.assertEqual(together(lambda: trainer.hand_over({}), lambda: engine.take(deadline_seconds=5.0)), [None, None])
                page = trainer._page
                for act in (trainer.hand_over, engine.take):
                    with self.assertRaisesRegex(InvalidState, "in the phase `(wait|generate)`"):
                        act()
                self.assertIs(trainer._page, page, f"turn {turn}")
                self.assertEqual(together(trainer.take, engine.hand_over), [None, None])

    def test_a_folder_that_cannot_hold_sockets_is_named(self) -> None:
        # On a full disk, on a file system that is read-only or has no locks or sockets, and if other files have the names.
        before = open_files()
        for target, name, code in (
            (turn_peers.os, "open", errno.ENOSPC), (turn_peers.os, "open", errno.EROFS), (turn_peers.fcntl, "flock", errno.ENOLCK),
            (turn_peers.socket.socket, "bind", errno.ENOSPC), (turn_peers.socket.socket, "bind", errno.EOPNOTSUPP),
            (turn_peers.os, "chmod", errno.EPERM),
        ):  # fmt: skip
            broken = OSError(code, os.strerror(code))
            with (
                self.subTest(f"{name}: {broken}"),
                mock.patch.object(target, name, side_effect=broken),
                self.assertRaisesRegex(InvalidState, f"{self.folder}.* cannot hold the sockets of turns: .*{os.strerror(code)}"),
            ):
                Trainer(self.folder, 0, 1, memory=Unmanaged(), descriptors=Host(), deadline_seconds=1.0)
        for name in ("turns", "turns.lock"):
            folder = Path(f"{self.folder}-{name}")
            (folder / name / "some folder").mkdir(parents=True)
            with self.subTest(name), self.assertRaisesRegex(InvalidState, rf"{folder}.*/turns cannot hold the sockets of turns"):
                Trainer(folder, 0, 1, memory=Unmanaged(), descriptors=Host(), deadline_seconds=1.0)
        self.assertEqual((open_files(), threads()), (before, []))

    def test_a_start_with_any_limit_of_open_files_names_the_limit(self) -> None:
        program = """
import os, resource, sys, threading, time
sys.path.insert(0, {tests!r})
import test_colocate
from test_colocate import Host, Unmanaged, Trainer, Engine
folder, hosts, hard = sys.argv[1], (Host(), Host()), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
test_colocate.together(*[lambda: None] * 2)
open_now = max(int(one) for one in os.listdir("/proc/self/fd"))
for more in range(99):
    sides = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + more, hard))
    errors = test_colocate.together(
        lambda: sides.append(Trainer(folder, 0, 1, memory=Unmanaged(), descriptors=hosts[0], deadline_seconds=0.8)),
        lambda: sides.append(Engine(folder, 0, 1, memory=Unmanaged(), descriptors=hosts[1], deadline_seconds=1.3)),
    )
    for side in sides:
        side.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if errors == [None, None]:
        break
    # One of both meets the limit, or both. The other one hears of it, unless it did not get into contact.
    assert any("ulimit -n" in str(error) for error in errors), (more, errors)
    assert not test_colocate.threads(), more
    assert max(int(one) for one in os.listdir("/proc/self/fd")) == open_now, more
assert 5 < more < 30, more
"""
        done = subprocess.run(
            [sys.executable, "-c", program.format(tests=str(Path(__file__).resolve().parent)), self.folder],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_second_thread_cannot_enter_a_call(self) -> None:
        with pair(self.folder) as (trainer, engine):
            errors: list[BaseException | None] = []

            def load(_: Any) -> None:
                errors.extend(together(lambda: trainer.hand_over({}), engine.take))

            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            self.assertEqual(
                together(lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(load, deadline_seconds=5.0)), [None, None]
            )
            self.assertEqual([type(error) for error in errors], [InvalidState] * 2)

    def test_a_close_in_another_thread_ends_a_call_and_keeps_what_the_call_uses(self) -> None:
        with pair(self.folder) as (trainer, engine), mock.patch.object(turn_peers, "NAMING_SECONDS", 20.0):
            begun = time.monotonic()
            with after(0.2, engine.close), self.assertRaisesRegex(InvalidState, r"close\(\) was called during this call"):
                engine.take(deadline_seconds=20.0)
            self.assertLess(time.monotonic() - begun, 10.0, "nobody names the cause, and it does not wait for that")
        with pair(self.folder) as (trainer, engine):
            never, begun = threading.Event(), time.monotonic()
            self.addCleanup(never.set)
            trainer._descriptors.synchronize = never.wait
            with after(0.2, trainer.close), self.assertRaisesRegex(InvalidState, r"close\(\) was called during this call"):
                trainer.hand_over({}, deadline_seconds=20.0)
            self.assertLess(time.monotonic() - begun, 10.0)
        for is_short in (True, False):
            with self.subTest(is_short=is_short), pair(self.folder) as (trainer, engine):
                tensor = Tensor(trainer._descriptors.allocate(4096), 8)
                loads, goes_on, seen = threading.Event(), threading.Event(), []

                def load(given: Any) -> None:
                    address = given["w"]
                    loads.set()
                    goes_on.wait()
                    seen.append(ctypes.string_at(address, 8))

                def close() -> None:
                    loads.wait()
                    try:
                        with (
                            after(0.2, goes_on.set) if is_short else nullcontext(),
                            mock.patch.object(colocate, "LEAVING_SECONDS", 10.0 if is_short else 0.2),
                        ):
                            engine.close()
                        self.assertEqual(engine._descriptors.maps, 0 if is_short else 1)
                    finally:
                        goes_on.set()

                told, raised, _ = errors = together(
                    lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(load, deadline_seconds=20.0), close
                )
                self.assertIsInstance(told, PeerDied)
                self.assertIsInstance(raised, InvalidState)
                self.assertIsNone(errors[2])
                self.assertEqual(seen, [bytes(8)], "the memory was mapped")

    def test_a_second_close_waits_for_the_first_one(self) -> None:
        for waits in (True, False):
            with (
                self.subTest(waits=waits),
                pair(self.folder) as (trainer, _),
                mock.patch.object(colocate, "CLOSE_SECONDS", 20.0 if waits else 0.2),
            ):
                begins, goes_on, leave = threading.Event(), threading.Event(), trainer._membership.close

                def close(begins: Any = begins, goes_on: Any = goes_on, leave: Any = leave) -> None:
                    begins.set()
                    goes_on.wait()
                    leave()

                trainer._membership.close = close
                first = threading.Thread(target=trainer.close)
                first.start()
                begins.wait()
                with after(0.3, goes_on.set) if waits else nullcontext(), trainer:
                    pass
                if waits:
                    turn_peers.Listener(Path(self.folder), "turns").close()  # as the next trainer of this process
                self.assertEqual(goes_on.is_set(), waits)
                goes_on.set()
                first.join()

    def test_a_second_close_does_not_wait_in_a_thread_that_the_first_one_waits_for(self) -> None:
        begun, begins, notices, returns = time.monotonic(), *(threading.Event() for _ in range(3))
        sides: list[Trainer] = []

        def on_death(_: BaseException) -> None:
            notices.set()
            begins.wait()
            sides[0].close()
            returns.set()

        with pair(self.folder, on_death=on_death) as (trainer, engine):
            sides.append(trainer)
            engine._membership._channel.shut_down()
            self.assertTrue(notices.wait(10.0))
            trainer._channel.shut_down = begins.set  # after the begin of the first call
            with mock.patch.object(turn_peers, "LEAVING_SECONDS", 10.0):
                trainer.close()
        with pair(self.folder) as (trainer, engine):
            tensor, loads, begins = Tensor(trainer._descriptors.allocate(4096), 8), threading.Event(), threading.Event()

            def load(_: Any) -> None:
                loads.set()
                begins.wait()
                engine.close()

            def close() -> None:
                loads.wait()
                shut_down = engine._channel.shut_down
                engine._channel.shut_down = lambda: (shut_down(), begins.set())
                with mock.patch.object(colocate, "LEAVING_SECONDS", 10.0):
                    engine.close()

            _, raised, _ = together(
                lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(load, deadline_seconds=20.0), close
            )
            self.assertIsInstance(raised, InvalidState)
            self.assertEqual(engine._descriptors.maps, 0)
        self.assertTrue(returns.wait(10.0))
        self.assertLess(time.monotonic() - begun, 8.0)

    def test_a_notice_that_never_returns_does_not_block_the_end(self) -> None:
        never = threading.Event()
        self.addCleanup(never.set)
        with pair(self.folder, on_death=lambda _: never.wait()) as (trainer, engine):
            engine._membership._channel.shut_down()
            with self.assertRaises(PeerDied):
                trainer.hand_over({}, deadline_seconds=20.0)
            begun = time.monotonic()
            with mock.patch.object(turn_peers, "LEAVING_SECONDS", 0.2):
                trainer.close()
            self.assertLess(time.monotonic() - begun, 5.0)

    def test_deadlines_of_zero_are_errors_without_effect_and_infinity_is_none(self) -> None:
        with pair(self.folder, seconds=math.inf) as (trainer, engine):
            for seconds in (0, 0.0, -1.0, math.nan, -math.inf):
                for act in (trainer.hand_over, engine.take):
                    with self.assertRaisesRegex(ValueError, "give a number above 0"):
                        act(deadline_seconds=seconds)
            for seconds in (math.inf, 1e300, None):
                for acts in ((trainer.hand_over, engine.take), (trainer.take, engine.hand_over)):
                    self.assertEqual(together(*(partial(act, deadline_seconds=seconds) for act in acts)), [None, None], seconds)
        with self.assertRaisesRegex(ValueError, "give a number above 0"):
            Trainer(self.folder, 0, 1, memory=Unmanaged(), descriptors=Host(), deadline_seconds=0)
        for seconds in (-1.0, math.nan, math.inf):
            with self.assertRaisesRegex(ValueError, "give a finite number of at least 0"):
                colocate.end_process(seconds)

    def test_a_wait_longer_than_the_systems_limit_waits_again(self) -> None:
        first, second = channels(self)
        with mock.patch.object(turn_peers, "WAIT_SECONDS", 0.05):
            threading.Timer(0.3, lambda: second.send("hello", turn_peers.Deadline(1.0))).start()
            self.assertEqual(first.receive(turn_peers.Deadline(5.0), "hello"), {"kind": "hello"})
            with self.assertRaisesRegex(DeadlinePassed, r"did not answer within 0\.2 s"):
                first.receive(turn_peers.Deadline(0.2), "hello")

    def test_a_start_that_fails_tells_the_others_the_cause(self) -> None:
        def on_phase(phase: str) -> None:
            raise KeyError("no such phase")

        before = open_files()
        sides: list[Engine] = []
        made = {"memory": Unmanaged(), "deadline_seconds": 5.0}
        failed, _ = together(
            lambda: Trainer(self.folder, 0, 1, descriptors=Host(), on_phase=on_phase, **made),
            lambda: sides.append(Engine(self.folder, 0, 1, descriptors=Host(), **made)),
        )
        self.assertIsInstance(failed, KeyError)
        with self.assertRaisesRegex(PeerFailed, "trainer 0 .* failed in the phase `train`: KeyError"):
            sides[0].take(deadline_seconds=5.0)
        sides[0].close()
        self.assertEqual((open_files(), threads()), (before, []))

    def test_only_an_exit_with_status_zero_leaves_in_order(self) -> None:
        for code, kind, says in (
            (3, PeerFailed, "SystemExit: 3"),
            ("no data", PeerFailed, "SystemExit: no data"),
            (0, PeerDied, "closed its connection"),
            (None, PeerDied, "closed its connection"),
        ):
            with self.subTest(code=code), pair(self.folder) as (trainer, engine):
                with self.assertRaises(SystemExit), engine:
                    sys.exit(code)
                with self.assertRaisesRegex(kind, says):
                    trainer.hand_over({}, deadline_seconds=5.0)

    def test_an_error_in_any_step_leaves_no_descriptor_open(self) -> None:
        class Fails(Unmanaged):
            def wake(self, part: Part) -> None:
                raise MemoryError("no room")

        def on_phase(phase: str) -> None:
            if phase == "update":
                raise KeyError(phase)

        full = Host()
        full.map = mock.Mock(side_effect=MemoryError)
        for options in ({"memories": (Unmanaged(), Fails())}, {"on_phase": on_phase}, {}):
            with self.subTest(**options):
                hosts = Host(), Host() if options else full
                tensor = Tensor(hosts[0].allocate(4096), 8)
                before = open_files()
                with pair(self.folder, hosts=hosts, **options) as (trainer, engine):
                    told, raised = together(lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(deadline_seconds=5.0))
                    self.assertIsInstance(raised, (MemoryError, KeyError))
                    self.assertIsInstance(told, PeerFailed)
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
            with (
                self.subTest(name),
                mock.patch.object(target, name, side_effect=broken),
                self.assertRaises((OSError, InvalidState)),
            ):
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

    ENDS = """
import os, resource, signal, sys, threading
from symmalloc import colocate, errors
{prepare}
colocate.end_process(0.3, 7)(errors.PeerDied("engine 0 died"))
{then}
"""
    FULL_PIPE = """
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, bytes(65536))
except BlockingIOError:
    os.set_blocking(writer, True)
os.dup2(writer, 2)
"""
    CLOSED_PIPE = """
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
"""
    FULL_FILE = """
file = os.memfd_create("errors")
os.write(file, bytes(10))
os.dup2(file, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
"""

    def test_a_process_that_ends_does_so_although_nobody_reads_its_errors(self) -> None:
        default = "signal.signal(signal.{}, signal.SIG_DFL)"
        for name, prepare in {
            "a pipe without a reader": self.FULL_PIPE,
            "a closed pipe": self.CLOSED_PIPE,
            "a closed pipe, SIGPIPE at its default": self.CLOSED_PIPE + default.format("SIGPIPE"),
            "a file at its limit, SIGXFSZ at its default": self.FULL_FILE + default.format("SIGXFSZ"),
            "a full device": "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
            "no file": "os.close(2)",
            "no memory for a thread": "threading.Thread.start = lambda self: exec('raise RuntimeError')",
        }.items():
            with self.subTest(name):
                begun = time.monotonic()
                program = self.ENDS.format(prepare=prepare, then="threading.Event().wait(20)")
                done = subprocess.run([sys.executable, "-c", program], timeout=30, stderr=subprocess.DEVNULL)
                self.assertEqual(done.returncode, 7)
                self.assertGreater(time.monotonic() - begun, 0.3)

    def test_a_process_that_ends_leaves_signals_and_other_files_as_they_are(self) -> None:
        caught = """
seen = []
signal.signal(signal.SIGPIPE, lambda *_: seen.append("SIGPIPE"))
"""
        unchanged = (
            "assert not seen and not signal.sigpending() and not signal.pthread_sigmask(signal.SIG_BLOCK, []); os._exit(9)"
        )
        done = subprocess.run(
            [sys.executable, "-c", self.ENDS.format(prepare=self.CLOSED_PIPE + caught, then=unchanged)], timeout=30
        )
        self.assertEqual(done.returncode, 9)
        # A program that starts without a standard error gives its number to the next file, such as a socket.
        other = "other = os.memfd_create('other')\nassert other == 2"
        program = self.ENDS.format(prepare=other, then="os._exit(9 if os.fstat(other).st_size == 0 else 8)")
        done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program], timeout=30)
        self.assertEqual(done.returncode, 9)
        # So does a program that closes it later.
        program = self.ENDS.format(prepare="os.close(2)\n" + other, then="os._exit(9 if os.fstat(other).st_size == 0 else 8)")
        self.assertEqual(subprocess.run([sys.executable, "-c", program], timeout=30).returncode, 9)

    def test_a_low_limit_of_file_sizes_is_named_and_no_signal(self) -> None:
        program = """
import resource, signal, sys
sys.path.insert(0, {path!r})
from symmalloc import descriptors, errors
resource.setrlimit(resource.RLIMIT_FSIZE, (4095, 4095))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    descriptors.StatePage.create()
except errors.InvalidState as error:
    assert "`ulimit -f unlimited`" in str(error), error
    sys.exit(7)
"""
        done = subprocess.run([sys.executable, "-c", program.format(path=needs.packages())], timeout=30)
        self.assertEqual(done.returncode, 7)

    def test_a_closed_connection_is_a_death_and_no_signal(self) -> None:
        program = """
import signal, socket, sys
sys.path.insert(0, {path!r})
from symmalloc import errors, turn_peers
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
for descriptors in ([], [0, 1]):
    ours, theirs = socket.socketpair()
    channel = turn_peers.Channel(ours, None, turn_peers.Member("engine", 0))
    theirs.close()
    try:
        channel.send("chunks", turn_peers.Deadline(1.0), descriptors)
    except errors.PeerDied:
        continue
    sys.exit(3)
"""
        done = subprocess.run([sys.executable, "-c", program.format(path=needs.packages())], timeout=30)
        self.assertEqual(done.returncode, 0)

    def join_hub(self, *members: tuple[str, int]) -> tuple[turn_peers.Hub, list[turn_peers.Channel]]:
        """Returns a hub, and the connections of some members of two pairs."""
        turn_peers.open_folder(self.folder)
        hub, channels = turn_peers.Hub(Path(self.folder), 2), []
        self.addCleanup(hub.close)
        deadline, peer = turn_peers.Deadline(10.0), turn_peers.Member("trainer", 0)
        for role, rank in members:
            one = turn_peers.Channel.connect(f"{self.folder}/turns", None, peer, deadline)
            self.addCleanup(one.close)
            one.send("join", deadline, role=role, rank=rank, pid=7)
            one.receive(deadline, "missing")
            channels.append(one)
        return hub, channels

    def test_a_death_that_the_hub_notices_while_it_sends_is_reported(self) -> None:
        hub, (trainer, _, failing) = self.join_hub(("trainer", 0), ("engine", 0), ("engine", 1))
        (stuck,) = (one for one in hub._connected if one.member == turn_peers.Member("engine", 0))
        # The smallest buffer. It does not take the next message, and engine 0 does not read.
        stuck.channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        deadline = turn_peers.Deadline(10.0)
        failing.send("failed", deadline, why="x" * 60_000)
        heard = [trainer.receive(deadline, "missing", "failed", "died") for _ in range(4)]
        self.assertEqual(
            {(said["kind"], said["of"]) for said in heard[2:]}, {("failed", "engine 1 (pid 7)"), ("died", "engine 0 (pid 7)")}
        )

    def test_a_process_that_leaves_while_the_hub_sends_has_not_died(self) -> None:
        hub, (trainer, leaving, failing) = self.join_hub(("trainer", 0), ("engine", 0), ("engine", 1))
        deadline = turn_peers.Deadline(10.0)
        with self.busy(hub, failing):
            leaving.send("phase", deadline, phase="wait")
            leaving.send("bye", deadline)
            leaving.close()
        hub.close()
        heard = [trainer.receive(deadline, "missing", "failed", "died", "ended")["kind"] for _ in range(4)]
        self.assertEqual(heard, ["missing", "missing", "failed", "ended"])

    @contextmanager
    def busy(self, hub: turn_peers.Hub, failing: turn_peers.Channel) -> Iterator[None]:
        """Lets the hub begin to report a failure, and completes the report at the end of the block."""
        begins, may_tell, tell = threading.Event(), threading.Event(), hub._tell

        def wait(kind: str, **body: Any) -> None:
            begins.set()
            may_tell.wait()
            tell(kind, **body)

        hub._tell = wait  # type: ignore[method-assign]
        failing.send("failed", turn_peers.Deadline(10.0), why="no room")
        self.assertTrue(begins.wait(10.0))
        yield
        may_tell.set()

    def test_a_hub_that_stops_first_reads_what_its_members_have_sent(self) -> None:
        hub, (trainer, engine, failing) = self.join_hub(("trainer", 0), ("engine", 0), ("engine", 1))
        deadline = turn_peers.Deadline(10.0)
        with self.busy(hub, failing):
            os.write(hub._stop, b"1")  # before the hub knows of the next message
            trainer.send("failed", deadline, why="no luck")
        hub.close()
        heard = [engine.receive(deadline, "missing", "failed", "ended") for _ in range(4)]
        self.assertEqual([said.get("why") or said["kind"] for said in heard], ["missing", "no room", "no luck", "ended"])

    def test_a_process_that_joins_late_hears_of_an_earlier_death_or_failure_at_once(self) -> None:
        made = {"memory": Unmanaged(), "deadline_seconds": 20.0}
        for how, kind, says in (
            ("died", PeerDied, r"engine 1 \(pid 7\) died in the phase `start`"),
            ("failed", PeerFailed, r"engine 1 \(pid 7\) failed in the phase `start`: no room"),
        ):
            with self.subTest(how):
                hub, (trainer, engine) = self.join_hub(("trainer", 0), ("engine", 1))
                deadline = turn_peers.Deadline(10.0)
                if how == "failed":
                    engine.send("failed", deadline, why="no room")
                engine.close()
                self.assertEqual([trainer.receive(deadline, "missing", how)["kind"] for _ in range(2)], ["missing", how])
                begun = time.monotonic()
                # The second one replaces the process that ended.
                for late in (
                    lambda: Engine(self.folder, 0, 2, descriptors=Host(), **made),
                    lambda: Engine(self.folder, 1, 2, descriptors=Host(), **made),
                ):
                    with self.assertRaisesRegex(kind, says):
                        late()
                self.assertLess(time.monotonic() - begun, 10.0)
                hub.close()
        self.assertEqual(threads(), [])

    def test_a_start_without_trainer_0_ends_at_once(self) -> None:
        for joined in (("trainer", 0), ("engine", 1)), (("trainer", 0), ("trainer", 1), ("engine", 1)):
            with self.subTest(joined):
                hub, _ = self.join_hub(*joined)
                begun = time.monotonic()
                threading.Timer(0.3, hub.close).start()
                with self.assertRaisesRegex(PeerDied, "trainer 0 has left before all processes had connected"):
                    Engine(self.folder, 0, 2, memory=Unmanaged(), descriptors=Host(), deadline_seconds=20.0)
                self.assertLess(time.monotonic() - begun, 10.0)

    def test_a_hub_at_the_limit_of_open_files_serves_its_members_and_does_not_spin(self) -> None:
        program = """
import os, resource, sys, time
sys.path.insert(0, {path!r})
from pathlib import Path
from symmalloc import turn_peers
turn_peers.open_folder(sys.argv[1])
hub = turn_peers.Hub(Path(sys.argv[1]), 2)
before = resource.getrlimit(resource.RLIMIT_NOFILE)
# One file more than are open: the list's own becomes the first member's.
resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(one) for one in os.listdir("/proc/self/fd")) + 1, before[1]))
print("limited", flush=True)
input()
begun = time.process_time()
time.sleep(1.5)
print(time.process_time() - begun, flush=True)
input()
resource.setrlimit(resource.RLIMIT_NOFILE, before)
input()
hub.close()
"""
        with subprocess.Popen(
            [sys.executable, "-c", program.format(path=needs.packages()), self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            self.addCleanup(process.kill)

            def go_on() -> None:
                process.stdin.write("\n")
                process.stdin.flush()

            self.assertEqual(process.stdout.readline(), "limited\n")
            deadline = turn_peers.Deadline(10.0)
            first, second = (
                turn_peers.Channel.connect(f"{self.folder}/turns", None, turn_peers.Member("trainer", 0), deadline)
                for _ in range(2)
            )
            self.addCleanup(first.close)
            self.addCleanup(second.close)
            first.send("join", deadline, role="engine", rank=0, pid=7)
            first.receive(deadline, "missing")
            second.send("join", deadline, role="engine", rank=1, pid=8)
            go_on()
            self.assertLess(float(process.stdout.readline()), 0.5)
            first.send("ask", deadline)
            self.assertIn("engine 1", first.receive(deadline, "missing")["join"], "it has no file for the second")
            go_on()
            self.assertNotIn("engine 1", second.receive(deadline, "missing")["join"])
            go_on()

    def test_a_connection_that_the_system_refuses_is_an_error_with_a_remedy_that_all_members_hear(self) -> None:
        real, before = socket.socket.accept, open_files()
        for code, kind, says in (
            (errno.EMFILE, TooManyOpenFiles, "ulimit -n"),
            (errno.ENOBUFS, OutOfMemory, "the limit of the control group"),
            (errno.EPERM, InvalidState, "allow this process to accept them"),
        ):
            accepted: list[socket.socket] = []
            has_trainer, named = threading.Event(), f"{errno.errorcode[code]}, .*{says}"

            def accept(
                of: socket.socket, accepted: Any = accepted, has_trainer: Any = has_trainer, code: int = code
            ) -> tuple[socket.socket, Any]:
                if len(accepted) == 2:
                    raise OSError(code, os.strerror(code))
                found = real(of)
                accepted.append(found[0])
                has_trainer.set()
                return found

            def start(role: Any, rank: int, seconds: float, has_trainer: Any = has_trainer) -> None:
                if role is Engine:
                    has_trainer.wait()
                role(self.folder, rank, 2, memory=Unmanaged(), descriptors=Host(), deadline_seconds=seconds)

            with self.subTest(errno.errorcode[code]), mock.patch.object(socket.socket, "accept", accept):
                errors = together(*(partial(start, *one) for one in ((Trainer, 0, 4.0), (Engine, 0, 20.0), (Engine, 1, 20.0))))
                raised, *others = errors
                self.assertIsInstance(raised, kind)
                self.assertRegex(str(raised), named)
                # One of both has joined. The other one's connection is closed before it was accepted.
                self.assertEqual({type(error) for error in others}, {PeerFailed, PeerDied}, others)
                self.assertRegex(
                    str(next(error for error in others if isinstance(error, PeerFailed))), f"trainer 0 .*{kind.__name__}: {named}"
                )
        self.assertEqual((open_files(), threads()), (before, []))

    def test_a_pair_whose_connection_the_system_refuses_is_an_error_with_a_remedy(self) -> None:
        real = turn_peers.Listener.accept
        for code, kind in ((errno.EMFILE, TooManyOpenFiles), (errno.ENOMEM, OutOfMemory), (errno.EPERM, InvalidState)):

            def accept(of: turn_peers.Listener, code: int = code) -> socket.socket:
                if of.path.endswith(".0"):
                    of.socket.close()
                    of.socket = mock.Mock(**{"accept.side_effect": OSError(code, os.strerror(code))})
                return real(of)

            with (
                self.subTest(errno.errorcode[code]),
                mock.patch.object(turn_peers.Listener, "accept", accept),
                self.assertRaisesRegex(kind, errno.errorcode[code]),
                pair(self.folder),
            ):
                pass

    def test_a_hub_that_does_not_read_delays_no_phase(self) -> None:
        turn_peers.open_folder(self.folder)
        listener = turn_peers.Listener(Path(self.folder), "turns")
        self.addCleanup(listener.close)
        me, deadline = turn_peers.Member("engine", 1, 7), turn_peers.Deadline(30.0)
        membership = turn_peers.Membership(Path(self.folder), me, 2, deadline, None)
        begun = time.monotonic()
        for at in range(1000):
            membership.enter(f"phase {at}")
            self.assertLess(time.monotonic() - begun, 4.0)
        hub = turn_peers.Channel(listener.accept(), None, me)
        self.addCleanup(hub.close)
        self.assertEqual(hub.receive(deadline, "join")["rank"], 1)
        threading.Timer(0.2, lambda: membership.fail(KeyError("w"))).start()
        phases = []
        while (said := hub.receive(deadline, "phase", "failed"))["kind"] == "phase":
            phases.append(said["phase"])
        self.assertEqual(phases, [f"phase {at}" for at in range(len(phases))], "whole messages")
        self.assertGreater(len(phases), 50)
        self.assertLess(len(phases), 1000, "more than the socket holds")
        membership.close()

    def test_a_hub_that_fails_is_noticed_by_its_members(self) -> None:
        hub, (trainer, engine) = self.join_hub(("trainer", 0), ("engine", 1))
        deadline = turn_peers.Deadline(10.0)
        with mock.patch.object(threading, "excepthook"), mock.patch.object(hub, "_heard", side_effect=MemoryError):
            engine.send("ask", deadline)
            hub._thread.join(10.0)
        for one in (trainer, engine):
            with self.assertRaisesRegex(PeerDied, "closed its connection"):
                while True:
                    one.receive(deadline, "missing")

    def test_a_process_that_can_no_longer_learn_of_failures_ends_its_turns(self) -> None:
        heard: list[BaseException] = []
        with pair(self.folder, on_death=heard.append) as (trainer, _), mock.patch.object(threading, "excepthook"):
            with mock.patch.object(trainer._membership, "_heard", side_effect=MemoryError("no room")):
                trainer._membership._report("ask")
                trainer._membership._thread.join(10.0)
            with self.assertRaisesRegex(PeerFailed, "this process cannot learn of failures any more: MemoryError: no room"):
                trainer.hand_over({})
            self.assertEqual([type(error) for error in heard], [PeerFailed])

    def test_a_start_waits_for_all_pairs(self) -> None:
        _, channels = self.join_hub(("trainer", 0), ("trainer", 1), ("engine", 1))
        channels[2].send("connected", turn_peers.Deadline(1.0))
        with (
            mock.patch.object(Engine, "_connect"),
            self.assertRaisesRegex(DeadlinePassed, r"^trainer 0, trainer 1 did not connect within 1\.0 s"),
        ):
            Engine(self.folder, 0, 2, memory=Unmanaged(), descriptors=Host(), deadline_seconds=1.0)

    def test_an_invalid_message_to_the_hub_ends_its_process_for_the_others(self) -> None:
        for bad in (
            turn_peers.HEADER.pack(turn_peers.PROTOCOL, 1 << 31, 0),
            turn_peers.HEADER.pack(turn_peers.PROTOCOL + 1, 2, 0),
            *(
                turn_peers.HEADER.pack(turn_peers.PROTOCOL, len(body), 0) + body
                for body in (
                    b"[]",
                    b"{}",
                    b"\xff",
                    b"[" * 50_000,
                    b'{"kind":"failed"}',
                    b'{"kind":"join","role":"engine","rank":0,"pid":7}',
                )
            ),
        ):
            with self.subTest(bad[:40]), pair(self.folder) as (trainer, engine):
                engine._membership._channel.socket.send(bad)
                with self.assertRaisesRegex(PeerDied, r"engine 0 \(pid \d+\) died in the phase `wait`"):
                    trainer.hand_over({}, deadline_seconds=5.0)

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

    def test_a_malformed_description_is_the_wrong_peer(self) -> None:
        whole, layout = [4096, 8192], ["w", 0, 0, 32, "float32", [8], [1]]
        valid: dict[str, Any] = {"number": 0, "fresh": [[whole, [8192]]], "layouts": [layout]}

        def changed(at: int, value: Any) -> dict[str, Any]:
            return {"layouts": [[*layout[:at], value, *layout[at + 1 :]]]}

        for change in (
            {"number": None}, {"number": "0"}, {"number": True}, {"number": 1, "layouts": None}, {"fresh": 3}, {"fresh": [3]},
            {"fresh": [[whole, []]]}, {"fresh": [[whole, [0, 8192]]]}, {"fresh": [[whole, [4096]]]}, {"fresh": [[whole, ["8192"]]]},
            {"fresh": [[[4096], [8192]]]}, {"fresh": [[[4096, 1 << 64], [1 << 64]]]}, {"fresh": [[[0, -1], [-1]]]},
            {"layouts": {}}, {"layouts": [layout[:-1]]}, {"layouts": [7]}, changed(0, 7), changed(1, 1), changed(1, -1), changed(2, 8192),
            changed(2, "0"), changed(3, 1 << 40), changed(4, None), changed(5, 8), changed(5, [8.5]), changed(6, [1, 1]),
            changed(3, 0), changed(5, [0]),
        ):  # fmt: skip
            with self.subTest(change=change), pair(self.folder) as (trainer, engine):
                host, page = trainer._descriptors, StatePage.create()
                host.allocate(8192)
                (chunk,) = host._files

                def lie() -> None:
                    deadline = turn_peers.Deadline(5.0)
                    trainer._channel.send("weights", deadline, **valid | change)
                    with suppress(PeerDied, PeerFailed):
                        trainer._send_descriptors([page.fileno()], [host.hold(chunk)], deadline)

                _, raised = together(lie, lambda: engine.take(deadline_seconds=5.0))
                self.assertIsInstance(raised, WrongPeer, raised)
                self.assertEqual(engine._descriptors.maps, 0)
                page.close()
        first, second = channels(self)
        deadline = turn_peers.Deadline(1.0)
        body = b"[" * 100_000
        second.socket.sendall(turn_peers.HEADER.pack(turn_peers.PROTOCOL, len(body), 0) + body)
        with self.assertRaisesRegex(WrongPeer, "invalid message"):
            first.receive(deadline, "hello")
        with mock.patch.object(turn_peers, "MESSAGE_BYTES", 100), self.assertRaisesRegex(InvalidArgument, "give them in groups"):
            first.send("hello", deadline, text="x" * 100)
        for change in ({"keeps": 1}, {}):
            with self.subTest(change=change), pair(self.folder) as (trainer, engine):
                engine._channel.send("complete", deadline, **change)
                with self.assertRaisesRegex(WrongPeer, "'keeps' in the message 'complete' is not of type bool"):
                    trainer.hand_over({}, deadline_seconds=5.0)

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

    def test_work_that_never_completes_ends_a_call_at_its_deadline(self) -> None:
        for stuck in ("trainer", "engine"):
            with self.subTest(stuck), pair(self.folder, hosts=(Host(), Host())) as (trainer, engine):
                tensor = Tensor(trainer._descriptors.allocate(4096), 8)
                never = threading.Event()
                self.addCleanup(never.set)
                begun = time.monotonic()
                with mock.patch.object(colocate, "ABANDON_SECONDS", 0.2):
                    if stuck == "trainer":
                        trainer._descriptors.synchronize = never.wait
                        with self.assertRaisesRegex(
                            DeadlinePassed, r"the device did not complete the work of this process within 0\.5 s"
                        ):
                            trainer.hand_over({"w": tensor}, deadline_seconds=0.5)
                    else:

                        def load(_: Any) -> None:
                            engine._descriptors.synchronize = never.wait
                            raise KeyError("load")

                        told, raised = together(
                            lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(load, deadline_seconds=30.0)
                        )
                        self.assertIsInstance(raised, KeyError)
                        self.assertIsInstance(told, PeerFailed)
                        self.assertEqual(engine._descriptors.maps, 1, "a kernel may still read it")
                    trainer.close()
                    engine.close()
                self.assertLess(time.monotonic() - begun, 15.0)

    def test_a_failed_engine_waits_for_the_device_once_and_unmaps_if_that_completes_later(self) -> None:
        for completes in (False, True):
            with self.subTest(completes=completes), pair(self.folder) as (trainer, engine):
                tensor = Tensor(trainer._descriptors.allocate(4096), 8)
                may_complete, before = threading.Event(), open_files()
                self.addCleanup(may_complete.set)

                def load(_: Any) -> None:
                    engine._descriptors.synchronize = may_complete.wait
                    raise KeyError("load")

                with mock.patch.object(colocate, "ABANDON_SECONDS", 1.0):
                    together(lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(load, deadline_seconds=30.0))
                    self.assertEqual((engine._descriptors.maps, open_files()), (1, before), "only the memory stays")
                    if completes:
                        may_complete.set()
                        self.assertTrue(engine._device_wait.wait(10.0))
                    begun = time.monotonic()
                    engine.close()
                self.assertLess(time.monotonic() - begun, 0.9)
                self.assertEqual(engine._descriptors.maps, 0 if completes else 1)

    def test_a_group_in_other_memory_at_an_old_address_is_read_from_the_other_memory(self) -> None:
        with pair(self.folder) as (trainer, engine):
            host = trainer._descriptors
            tensor = Tensor(host.allocate(4096), 1024)
            first = host._files[tensor.data_ptr(), 4096]
            exports, seen, weights = [], [], []
            host.export = lambda handle: exports.append(handle) or os.dup(handle)

            def groups() -> Any:
                for byte in (1, 2, 3):
                    if byte == 2:
                        host.replace(tensor.data_ptr(), 4096)
                    ctypes.memset(tensor.data_ptr(), byte, 4096)
                    yield {"w": tensor}
                host.replace(tensor.data_ptr(), 4096, first)  # back to the first memory, which the engine has unmapped
                ctypes.memset(tensor.data_ptr(), 4, 4096)
                yield {"w": tensor}

            def load(given: Any) -> None:
                address = given["w"]
                seen.append((address, set(ctypes.string_at(address, 4096))))
                self.assertEqual(host.holds, 1, "the memory that the engine reads, whose handle must stay its own")
                for earlier in weights:
                    with self.assertRaises(StaleImport):
                        earlier["w"]
                weights.append(given)

            self.assertEqual(
                together(lambda: trainer.hand_over(groups()), lambda: engine.take(load, deadline_seconds=5.0)), [None, None]
            )
            self.assertEqual([byte for _, byte in seen], [{1}, {2}, {3}, {4}])
            self.assertEqual(len({address for address, _ in seen}), 1, "at one address")
            self.assertEqual(len(exports), 3, "equal memory is exported once")
            self.assertEqual((host.holds, engine._descriptors.maps), (0, 0))

    def test_a_part_of_an_earlier_range_is_used_for_its_own_chunks_alone(self) -> None:
        with pair(self.folder) as (trainer, engine):
            host, size = trainer._descriptors, 4096
            base = host.allocate(3 * size)
            tensors = [Tensor(base + at * size, 1024) for at in range(3)]
            os.close(host._files.pop((base, 3 * size)))
            for at in range(3):
                host.replace(base + at * size, size)  # a chunk of its own
            seen: list[list[set[int]]] = []

            def groups() -> Any:
                for at in range(3):
                    ctypes.memset(base + at * size, 1, size)
                yield {"c": tensors[2]}
                yield dict(zip("abc", tensors, strict=True))
                host.replace(base + 2 * size, size)
                ctypes.memset(base + 2 * size, 9, size)
                yield {"a": tensors[0], "c": tensors[2]}

            def load(given: Any) -> None:
                seen.append([set(ctypes.string_at(given[name], size)) for name in sorted(given)])

            acts = lambda: trainer.hand_over(groups()), lambda: engine.take(load, deadline_seconds=5.0)
            self.assertEqual(together(*acts), [None, None])
            self.assertEqual(seen, [[{1}], [{1}] * 3, [{1}, {9}]])

    def test_addresses_are_released_when_a_turn_does_not_use_them_and_at_the_end(self) -> None:
        with pair(self.folder) as (trainer, engine):
            host, theirs = trainer._descriptors, engine._descriptors
            first, second = (Tensor(host.allocate(size), 8) for size in (4096, 8192))
            seen: list[int] = []
            for tensor in (first, first, None, first, second):
                weights = {} if tensor is None else {"w": tensor}
                acts = partial(trainer.hand_over, weights), partial(engine.take, lambda given: seen.append(given["w"]))
                self.assertEqual(together(*acts), [None, None])
                self.assertEqual(len(theirs.reserved), 1)
                self.assertLessEqual(len(engine._views), 1)
                self.assertEqual(together(trainer.take, engine.hand_over), [None, None])
            self.assertEqual(len(set(seen[:3])), 1, "one address while the trainer's memory stays where it is")
        self.assertEqual(theirs.reserved, {})

    def test_parameters_of_size_zero_are_adopted_as_they_are(self) -> None:
        with pair(self.folder) as (trainer, engine):
            host = trainer._descriptors
            for given in ({"z": Tensor(0, 0)}, {"z": Tensor(0, 0), "w": Tensor(host.allocate(4096), 8)}):
                taken: list[Any] = []
                errors = together(
                    lambda given=given: trainer.hand_over(given), lambda taken=taken: taken.append(engine.take(keep=True))
                )
                self.assertEqual(errors, [None, None])
                own = {name: Tensor(1, *tensor.shape) for name, tensor in given.items()}
                self.assertEqual(adopt(own.items(), taken[0]), len(given) - 1)
                self.assertFalse(hasattr(own["z"], "data"), "unchanged")
                self.assertEqual(taken[0].address("z"), 0)
                self.assertEqual(together(trainer.take, engine.hand_over), [None, None])

    def test_a_process_of_another_user_is_the_wrong_peer(self) -> None:
        first, second = socket.socketpair()
        self.addCleanup(first.close)
        self.addCleanup(second.close)
        with (
            mock.patch.object(turn_peers.os, "geteuid", lambda: os.getuid() + 1),
            self.assertRaisesRegex(WrongPeer, f"belongs to user {os.getuid()}"),
        ):
            turn_peers.check_user(first, "/run/job/turns")

    def test_a_socket_of_another_user_is_the_wrong_peer(self) -> None:
        refused = PermissionError(errno.EACCES, "Permission denied")
        before = open_files()
        with (
            mock.patch.object(turn_peers.socket.socket, "connect", side_effect=refused),
            self.assertRaisesRegex(WrongPeer, r"cannot connect to .*/turns \(.*denied\): run trainer and engine as one user"),
        ):
            Engine(self.folder, 0, 1, memory=Unmanaged(), descriptors=Host(), deadline_seconds=1.0)
        self.assertEqual(open_files(), before)

    def test_a_thread_that_cannot_start_is_an_error_with_a_remedy(self) -> None:
        refused = RuntimeError("can't start new thread")
        before, names = open_files(), []
        for failing in ("symmalloc-turns", "symmalloc-turns-watch", "symmalloc-synchronize"):
            real = threading.Thread.start

            def start(thread: threading.Thread, failing: str = failing, real: Any = real) -> None:
                names.append(thread.name)
                if thread.name == failing:
                    raise refused
                real(thread)

            with self.subTest(failing), mock.patch.object(threading.Thread, "start", start):
                with self.assertRaisesRegex(OutOfMemory, "ulimit -u"), pair(self.folder, seconds=1.0) as (trainer, _):
                    trainer.hand_over({})
                self.assertIn(failing, names)
        self.assertEqual((open_files(), threads()), (before, []))

    def test_a_thread_that_cannot_start_after_the_join_is_no_death(self) -> None:
        made = {"memory": Unmanaged(), "deadline_seconds": 10.0}
        real, has_joined = turn_peers.start_thread, threading.Event()

        def start(target: Callable[[], Any], name: str) -> threading.Thread:
            if name == "symmalloc-turns-watch" and has_joined.is_set():
                raise OutOfMemory("no room for a thread")
            thread = real(target, name)
            if name == "symmalloc-turns-watch":
                has_joined.set()
            return thread

        def join_late() -> None:
            has_joined.wait()
            Engine(self.folder, 0, 1, descriptors=Host(), **made)

        with mock.patch.object(turn_peers, "start_thread", start):
            told, raised = together(lambda: Trainer(self.folder, 0, 1, descriptors=Host(), **made), join_late)
        self.assertIsInstance(raised, OutOfMemory)
        self.assertRegex(str(told), r"engine 0 \(pid \d+\) failed in the phase `start`: OutOfMemory: no room for a thread")

    def test_a_wait_for_the_device_that_could_not_start_leaves_nothing_mapped_after_the_end(self) -> None:
        real, refuses = colocate.start_thread, threading.Event()

        def start(target: Callable[[], Any], name: str) -> threading.Thread:
            if name == "symmalloc-synchronize" and refuses.is_set():
                raise OutOfMemory("no room for a thread")
            return real(target, name)

        with pair(self.folder) as (trainer, engine), mock.patch.object(colocate, "start_thread", start):
            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            _, raised = together(
                lambda: trainer.hand_over({"w": tensor}),
                lambda: engine.take(lambda _: refuses.set(), deadline_seconds=20.0),
            )
            self.assertIsInstance(raised, OutOfMemory)
            self.assertEqual(engine._descriptors.maps, 1, "a kernel may still read it")
            refuses.clear()
            engine.close()
            self.assertEqual((engine._descriptors.maps, engine._descriptors.reserved), (0, {}))

    def test_another_device_or_number_of_ranks_is_the_wrong_peer(self) -> None:
        # Both sides notice it. One may hear of the other's error first.
        with (
            self.assertRaisesRegex((WrongPeer, PeerFailed), "give equal ranks of trainer and engine the same device"),
            pair(self.folder, hosts=(Host(), Host("another"))),
        ):
            pass

    def test_the_message_of_another_program_is_the_wrong_peer(self) -> None:
        channel, other = channels(self)
        other.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with self.assertRaisesRegex(WrongPeer, "invalid message"):
            channel.receive(turn_peers.Deadline(1.0), "hello")

    def test_descriptors_of_a_rejected_message_are_closed(self) -> None:
        channel, other = channels(self)
        before, deadline = open_files(), turn_peers.Deadline(1.0)
        for kind, count, says in (
            ("surprise", 3, "'surprise' instead of hello"),
            ("hello", 3, "3 descriptors with 'hello' instead of 0"),
        ):
            with open(os.devnull) as file:
                other.send(kind, deadline, [file.fileno()] * count)
            with self.assertRaisesRegex(WrongPeer, says):
                channel.receive(deadline, "hello")
        with open(os.devnull) as file:
            other.send("chunks", deadline, [file.fileno()] * 3)
        with self.assertRaisesRegex(WrongPeer, "3 descriptors with 'chunks' instead of 4"):
            channel.receive_descriptors(deadline, "chunks", 4)
        self.assertEqual(open_files(), before)

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
            self.assertIsInstance(raised, InvalidArgument)
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

    def test_a_child_that_another_thread_forks_at_any_time_keeps_nothing_of_a_turn(self) -> None:
        before = forked_files()
        with pair(self.folder) as (trainer, engine):
            host, theirs, forks = trainer._descriptors, engine._descriptors, Forks()
            tensors = {str(at): Tensor(host.allocate(4096), 8) for at in range(3)}
            own = forked_files()
            host.export = forks.after(host.export, "exported")
            theirs.map = forks.after(theirs.map, "mapped")
            for side in (trainer, engine):
                real = side._channel.socket
                side._channel.socket = mock.Mock(
                    wraps=real,
                    fileno=real.fileno,
                    recvmsg=forks.after(real.recvmsg, "received"),
                    sendmsg=forks.after(real.sendmsg, "sent"),
                )
            with (
                mock.patch.object(os, "memfd_create", forks.after(os.memfd_create, "created a page")),
                mock.patch.object(os, "dup", forks.after(os.dup, "duplicated a page")),
            ):
                errors = together(
                    lambda: trainer.hand_over(tensors),
                    lambda: engine.take(lambda _: forks.fork("loads"), keep=True, deadline_seconds=20.0),
                )
            self.assertEqual(errors, [None, None])
            forks.fork("keeps")
            found = forks.found()
            self.assertEqual({moment for moment, _ in found}, {
                "exported", "mapped", "received", "sent", "created a page", "duplicated a page", "loads", "keeps",
            })  # fmt: skip
            for moment, files in found:
                self.assertEqual(files, own, moment)
            self.assertEqual(own, sorted(before + ["/memfd:colocate (deleted)"] * 3), "the memory itself, which is the host's")

    def test_a_child_that_another_thread_forks_at_any_time_keeps_nothing_of_a_start(self) -> None:
        before, forks = forked_files(), Forks()
        with ExitStack() as patches:
            for of, names in ((socket.socket, ("__init__", "bind", "accept", "connect")), (turn_peers.fcntl, ("flock",))):
                for name in names:
                    patches.enter_context(mock.patch.object(of, name, forks.after(getattr(of, name), name)))
            with pair(self.folder, seconds=20.0):
                forks.fork("connected")
                found = forks.found()
        self.assertLessEqual({"__init__", "bind", "accept", "connect", "flock", "connected"}, {moment for moment, _ in found})
        for moment, files in found:
            self.assertEqual(files, before, moment)

    def test_no_thread_can_fork_while_a_socket_or_a_lock_is_closed(self) -> None:
        lock: Any = forks.lock
        seen: list[tuple[str, bool]] = []
        close_socket = socket.socket.close

        class File(io.FileIO):
            def close(self) -> None:
                if not self.closed:
                    seen.append((Path(str(self.name)).name, lock._is_owned()))
                super().close()

        def close(of: socket.socket) -> None:
            if of.fileno() >= 0:
                seen.append(("socket", lock._is_owned()))
            close_socket(of)

        made = {"memory": Unmanaged(), "deadline_seconds": 0.3}
        real, unlinked = turn_peers.fcntl.flock, []

        def flock(file: Any, how: int) -> None:
            real(file, how)
            if not unlinked:
                unlinked.append((Path(self.folder) / "turns.lock").unlink())

        def trainer() -> None:
            Trainer(self.folder, 0, 1, descriptors=Host(), **made)

        def engine() -> None:
            Engine(self.folder, 0, 1, descriptors=Host(), **made)

        with mock.patch.object(turn_peers, "io", mock.Mock(FileIO=File)), mock.patch.object(socket.socket, "close", close):
            with pair(self.folder):
                for target, name, act, kind in (
                    (turn_peers.fcntl, "flock", trainer, InvalidState),
                    (socket.socket, "bind", lambda: turn_peers.Listener(Path(self.folder), "turns.1"), InvalidState),
                    (turn_peers, "check_user", engine, OSError),
                    (socket.socket, "connect", engine, WrongPeer),
                ):
                    broken = (PermissionError if kind is WrongPeer else OSError)(errno.ENOLCK, "broken")
                    with mock.patch.object(target, name, side_effect=broken), self.assertRaises(kind):
                        act()
                with self.assertRaisesRegex(InvalidState, "separate folder"):
                    trainer()
            with mock.patch.object(turn_peers.fcntl, "flock", flock):
                turn_peers.Listener(Path(self.folder), "turns").close()
            self.assertEqual(len(unlinked), 1)
            with self.assertRaises(DeadlinePassed):
                engine()
        self.assertEqual({held for _, held in seen}, {True}, seen)
        self.assertGreater(sum(name == "socket" for name, _ in seen), 10)
        self.assertGreater(sum(name != "socket" for name, _ in seen), 5)

    def test_weights_and_exports_in_a_forked_child_are_stale_and_do_not_reach_the_parent(self) -> None:
        with pair(self.folder) as (trainer, engine):
            tensor = Tensor(trainer._descriptors.allocate(4096), 8)
            taken: list[Any] = []
            together(lambda: trainer.hand_over({"w": tensor}), lambda: taken.append(engine.take(keep=True, deadline_seconds=5.0)))
            child = os.fork()
            if child == 0:
                trainer._page.withdraw()
                try:
                    taken[0]["w"]
                except StaleImport:
                    os._exit(0)
                os._exit(3)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(taken[0].address("w"), taken[0]["w"])

    def test_a_signal_handler_may_fork_while_a_descriptor_is_opened(self) -> None:
        program = """
import os, signal, sys
sys.path.insert(0, {path!r})
from symmalloc import forks
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0 if os.fork() == 0 else 0 * os.wait()[1]))
forks.open_descriptor(lambda: os.kill(os.getpid(), signal.SIGUSR1) or 7 * sum(range(10**6)))
"""
        done = subprocess.run([sys.executable, "-c", program.format(path=needs.packages())], timeout=30)
        self.assertEqual(done.returncode, 0)

    def run_with_limit(self, files: int) -> list[tuple[int, str]]:
        """Runs a turn with 300 chunks, in an engine that may have `files` more files than it has at its start."""
        trainer = """
weights = {str(at): Tensor(host.allocate(4096), 1024) for at in range(300)}
for at, tensor in enumerate(weights.values()):
    fill(tensor.data_ptr(), at % 255 + 1, 4096)
with Trainer(folder, 0, 1, **options) as side:
    side.hand_over(weights)
    side.take(deadline_seconds=SECONDS)
print("done")
"""
        engine = f"""
import resource
def load(weights):
    for at in range(300):
        pointer, size = weights[str(at)]
        assert size == 4096 and holds(pointer, at % 255 + 1, size), at
with Engine(folder, 0, 1, view=view, **options) as side:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(one) for one in os.listdir("/proc/self/fd")) + {files}, hard))
    side.take(load, deadline_seconds=SECONDS)
    side.hand_over()
print("done")
"""
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", ON_HOST + program, self.folder, "0", "1", "1"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for program in (trainer, engine)
        ]  # fmt: skip
        return [(process.communicate(timeout=60)[0], process.returncode)[::-1] for process in processes]

    def test_few_descriptors_are_open_at_once(self) -> None:
        self.assertEqual(self.run_with_limit(80), [(0, "done\n")] * 2)

    def test_a_low_limit_of_open_files_is_no_death(self) -> None:
        (_, told), (_, raised) = self.run_with_limit(20)
        self.assertRegex(
            raised, r"TooManyOpenFiles: the system did not deliver all descriptors from trainer 0 .* `ulimit -n 65536`"
        )
        self.assertRegex(told, r"PeerFailed: engine 0 .* failed in the phase `update`: TooManyOpenFiles: .*`ulimit -n 65536`")

    def test_received_descriptors_are_not_inherited_by_programs(self) -> None:
        first, second = channels(self)
        deadline = turn_peers.Deadline(1.0)
        second.send("chunks", deadline, [0, 1])
        received = first.receive_descriptors(deadline, "chunks", 2)
        self.assertEqual([os.get_inheritable(one) for one in received], [False, False])
        turn_peers.close_all(received)

    def test_the_systems_errors_for_the_limit_of_open_files_have_one_type(self) -> None:
        before = open_files()
        for code in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS):
            broken = OSError(code, "broken")
            with (
                self.subTest(errno.errorcode[code]),
                mock.patch.object(turn_peers.os, "pipe2", side_effect=broken),
                self.assertRaisesRegex(TooManyOpenFiles, f"{errno.errorcode[code]}, .*ulimit -n"),
            ):
                Trainer(self.folder, 0, 1, memory=Unmanaged(), descriptors=Host(), deadline_seconds=1.0)
            with self.subTest(errno.errorcode[code]), pair(self.folder) as (trainer, engine):
                tensor = Tensor(trainer._descriptors.allocate(4096), 8)
                with mock.patch.object(trainer._descriptors, "export", side_effect=broken):
                    raised, told = together(lambda: trainer.hand_over({"w": tensor}), lambda: engine.take(deadline_seconds=5.0))
                self.assertIsInstance(raised, TooManyOpenFiles)
                self.assertRegex(str(told), "trainer 0 .* TooManyOpenFiles: .*ulimit -n")
                trainer._descriptors.close()
            first, _ = channels(self)
            with mock.patch.object(first, "socket") as replaced, self.assertRaises(TooManyOpenFiles):
                replaced.sendmsg.side_effect = broken
                first.send("chunks", turn_peers.Deadline(1.0), [0])
            self.doCleanups()
        self.assertEqual(open_files(), before)

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
    """Host memory of one side, which counts what is held and reserved."""

    def __init__(self, identity: str = "host") -> None:
        super().__init__()
        self.identity, self.holds = identity, 0
        self.reserved: dict[int, int] = {}

    def replace(self, address: int, size_bytes: int, file: int | None = None) -> None:
        """Maps other memory at the addresses of a chunk."""
        if file is None:
            file = os.memfd_create("colocate", os.MFD_CLOEXEC)
            os.ftruncate(file, size_bytes)
        self.map(address, size_bytes, file)
        self.maps -= 1
        self._files[address, size_bytes] = file

    def close(self) -> None:
        turn_peers.close_all(list(self._files.values()))

    def hold(self, chunk: tuple[int, int]) -> int:
        self.holds += 1
        return int(super().hold(chunk))

    def drop(self, handle: int) -> None:
        self.holds -= 1

    def reserve(self, size_bytes: int) -> int:
        address = int(super().reserve(size_bytes))
        self.reserved[address] = size_bytes
        return address

    def release(self, address: int, size_bytes: int) -> None:
        assert self.reserved.pop(address) == size_bytes
        super().release(address, size_bytes)


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


class Index:
    """An integer of another library, such as NumPy."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Forks:
    """Children that other threads fork at certain moments."""

    def __init__(self) -> None:
        self._found: list[tuple[str, list[str]]] = []
        self._threads: list[threading.Thread] = []

    def fork(self, moment: str) -> None:
        thread = threading.Thread(target=lambda: self._found.append((moment, forked_files())))
        thread.start()
        thread.join(0.2)  # it waits while this thread opens a descriptor
        self._threads.append(thread)

    def after(self, act: Callable[..., Any], moment: str) -> Callable[..., Any]:
        """Returns a function that forks before it returns."""

        def then(*arguments: Any, **options: Any) -> Any:
            result = act(*arguments, **options)
            self.fork(moment)
            return result

        return then

    def found(self) -> list[tuple[str, list[str]]]:
        """Returns the files of each child."""
        for thread in self._threads:
            thread.join()
        return self._found


def forked_files() -> list[str]:
    """Returns the memory files, the sockets and the locks of a child that this thread forks."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        names = []
        for one in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                names.append(os.readlink(f"/proc/self/fd/{one}"))
        os.write(
            writer,
            "\n".join(sorted(name for name in names if name.startswith(("/memfd:", "socket:")) or ".lock" in name)).encode(),
        )
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        found = file.read().splitlines()
    os.waitpid(child, 0)
    return found


def channels(test: unittest.TestCase) -> tuple[turn_peers.Channel, turn_peers.Channel]:
    """Returns two ends of a connection."""
    ends = [turn_peers.Channel(one, None, turn_peers.Member("engine", 0)) for one in socket.socketpair()]
    for one in ends:
        test.addCleanup(one.close)
    return ends[0], ends[1]


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


@contextmanager
def after(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Runs a function in another thread after some seconds, and waits for its end."""
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


class pair:
    """A trainer and an engine in this process."""

    def __init__(
        self,
        folder: str,
        *,
        hosts: tuple[Host, Host] | None = None,
        memories: tuple[Any, Any] | None = None,
        seconds: float = 5.0,
        on_phase: Callable[[str], None] | None = None,
        on_death: Callable[[BaseException], Any] | None = None,
    ) -> None:
        sides: dict[str, Any] = {}
        memory, host = memories or (Unmanaged(), Unmanaged()), hosts or (Host(), Host())

        def view(layout: Layout, address: int) -> int:
            return address

        def start_trainer() -> None:
            sides["trainer"] = Trainer(
                folder, 0, 1, memory=memory[0], descriptors=host[0], deadline_seconds=seconds, on_death=on_death
            )

        def start_engine() -> None:
            sides["engine"] = Engine(
                folder, 0, 1, memory=memory[1], descriptors=host[1], view=view, deadline_seconds=seconds, on_phase=on_phase
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

    def test_memory_that_is_mapped_again_between_groups_reaches_the_engine(self) -> None:
        self.run_pair(f"""
pool = MemPool(symmetric=False, tag="weights", device=0, conf={self.CONFS[1]!r})
memory = colocate.Pools(weights=["weights"], device=0)
pointers = []
def groups():
    for byte in (1, 2, 3):
        pointers.append(ours.allocate(24 * MIB, pool=pool.id))
        fill(pointers[-1], byte, MIB)
        yield {{"w": Tensor(pointers[-1], 6 * MIB)}}
        ours.free(pointers[-1])
        assert ours.trim() >= 24 * MIB
    pointers.append(ours.allocate(24 * MIB, pool=pool.id))
    symmalloc.sleep("weights", device=0)
    symmalloc.wake("weights", device=0)
    fill(pointers[-1], 4, MIB)
    yield {{"w": Tensor(pointers[-1], 6 * MIB)}}
with Trainer(folder, 0, 1, memory=memory, device=0, deadline_seconds=SECONDS) as side:
    side.hand_over(groups())
    assert len(set(pointers)) == 1, "other memory at one address"
    side.take(deadline_seconds=SECONDS)
""", """
seen, imports = [], ctypes.CDLL("libcuda.so.1").stub_imports
def load(given):
    address, _ = given["w"]
    seen.append([byte for byte in range(1, 5) if holds(address, byte, MIB)] + [address, imports()])
with Engine(folder, 0, 1, memory=Unmanaged(), device=0, view=view, deadline_seconds=SECONDS) as side:
    side.take(load, deadline_seconds=SECONDS)
    side.hand_over()
assert [one[0] for one in seen] == [1, 2, 3, 4], seen
assert len({tuple(one[1:]) for one in seen}) == 1, ("one address, and the memory of one group", seen)
""", SYMMALLOC_CONF="chunk_mb:2")  # fmt: skip

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

    def test_an_export_without_room_for_a_file_is_not_a_fault_of_the_driver(self) -> None:
        done = needs.process(
            ON_STUB.replace("sys.argv[1]", "''")
            + """
import errno, resource
from symmalloc.descriptors import CudaDescriptors
descriptors = CudaDescriptors(0)
pointer = ours.allocate(4 * MIB)
handle = descriptors.hold(descriptors.chunks(pointer, 1)[0])
os.close(descriptors.export(handle))
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(one) for one in os.listdir("/proc/self/fd")), hard))
while True:
    try:
        os.dup(0)
    except OSError:
        break
assert raises(OSError, "", lambda: descriptors.export(handle)).errno == errno.EMFILE
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

    def job(self, *options: str, ranks: int = 2) -> str:
        done = subprocess.run(
            [sys.executable, str(test_jobs.JOBS / "colocate.py"), "--device", "cpu", "--ranks", str(ranks), "--deadline", "60", *options],
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

    def test_one_rank_takes_turns(self) -> None:
        output = self.job("--turns", "3", ranks=1)
        self.assertRegex(output, "PASS .*losses equal to the reference")
        self.assertRegex(output, r"\| losses \| [0-9a-f]{16} \|")

    def test_the_only_trainer_or_engine_is_named_in_jobs_that_run_at_the_same_time(self) -> None:
        output = self.job("--kill", "trainer:train,trainer:wake,engine:generate", "--together", "2", ranks=1)
        self.assertEqual(output.count("1 of 1 name it"), 3, output)


if __name__ == "__main__":
    unittest.main()
