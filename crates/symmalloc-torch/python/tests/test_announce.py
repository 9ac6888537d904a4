"""Announced collectives, on a communicator of the stub of libnccl and without PyTorch."""

from __future__ import annotations

import json
import unittest

import needs

# Registers a pool on a communicator of one rank.
BEGIN = """
import json
import time
from ctypes import CDLL, Structure, byref, c_byte, c_int, c_void_p
from types import SimpleNamespace

import symmalloc
from symmalloc import state

class UniqueId(Structure):
    _fields_ = [("internal", c_byte * 128)]

nccl, unique_id, communicator = CDLL("libnccl.so.2"), UniqueId(), c_void_p()
state.installed_with = (None, None, True)
pool, stream = symmalloc.MemPool(device=0), SimpleNamespace(cuda_stream=0)
nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]
assert nccl.ncclGetUniqueId(byref(unique_id)) == 0
assert nccl.ncclCommInitRank(byref(communicator), 1, unique_id, 0) == 0
pool.register(comm=communicator, mode=symmalloc.Mode.OFF, deadline_seconds=5)

def collectives():
    return symmalloc.flight_record()["communicators"][0]["collectives"]
"""


@needs.device
@needs.nccl
class Announced(unittest.TestCase):
    def run_program(self, program: str) -> list[str]:
        done = needs.process(BEGIN + program)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def test_announced_work_is_in_the_flight_record_until_its_stream_completes(self) -> None:
        inside, after = self.run_program(
            """
with symmalloc.announce("all_reduce", elements=1024, stream=stream, comm=communicator, device=0):
    print(json.dumps(collectives()))
begun = time.monotonic()
while collectives()[-1]["state"] != "finished" and time.monotonic() - begun < 20:
    time.sleep(0.01)
print(json.dumps(collectives()))
"""
        )
        (begun,), (done,) = json.loads(inside), json.loads(after)
        self.assertEqual((begun["number"], begun["kind"], begun["elements"]), (1, "all_reduce", 1024))
        self.assertEqual((begun["state"], done["state"]), ("submitting", "finished"))

    def test_an_error_inside_ends_the_announcement(self) -> None:
        (states,) = self.run_program(
            """
try:
    with symmalloc.announce("broken", stream=stream, comm=communicator, device=0):
        raise ValueError
except ValueError:
    pass
print(json.dumps(["elements" in collectives()[0], collectives()[0]["state"]]))
"""
        )
        has_elements, state = json.loads(states)
        self.assertFalse(has_elements)
        self.assertNotEqual(state, "submitting")

    def test_a_communicator_without_a_registered_pool_is_refused(self) -> None:
        (said,) = self.run_program(
            """
try:
    with symmalloc.announce("all_reduce", stream=stream, device=0, comm=communicator.value + 8):
        print("the block ran")
except symmalloc.InvalidState as error:
    print(error)
"""
        )
        self.assertIn("call MemPool.register() first", said)


if __name__ == "__main__":
    unittest.main()
