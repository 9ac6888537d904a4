"""Collectives that the program announces, on a communicator of the stub of libnccl and without PyTorch."""

from __future__ import annotations

import json
import unittest

import needs

# A registrar on a communicator of one rank, as `MemPool.register()` makes it.
BEGIN = """
import json
import time
from ctypes import CDLL, Structure, byref, c_byte, c_int, c_void_p
from types import SimpleNamespace

import symmalloc
from symmalloc import library, pool

class UniqueId(Structure):
    _fields_ = [("internal", c_byte * 128)]

nccl, unique_id, communicator = CDLL("libnccl.so.2"), UniqueId(), c_void_p()
allocator = symmalloc.Allocator(0)
nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]
assert nccl.ncclGetUniqueId(byref(unique_id)) == 0
assert nccl.ncclCommInitRank(byref(communicator), 1, unique_id, 0) == 0
registrar, backend, stream = c_void_p(), object(), SimpleNamespace(cuda_stream=0)
symmetric = allocator.create_pool("symmetric:true,segments:fixed")
library.call("registrar_create", allocator._handle, symmetric, communicator, 5000, None, byref(registrar))
pool._nccl_backend = lambda group, device: backend if group is None else group

class Pool:
    _registrars = {id(backend): (backend, registrar)}

pool._registered[Pool()] = None

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

    def test_what_is_announced_is_in_the_flight_record_and_is_done_when_its_stream_is(self) -> None:
        inside, after = self.run_program(
            """
with symmalloc.announce("all_reduce", elements=1024, stream=stream, device=0):
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
    with symmalloc.announce("broken", stream=stream, device=0):
        raise ValueError
except ValueError:
    pass
print(json.dumps(["elements" in collectives()[0], collectives()[0]["state"]]))
"""
        )
        has_elements, state = json.loads(states)
        self.assertFalse(has_elements)
        self.assertNotEqual(state, "submitting")

    def test_a_group_without_a_registered_pool_is_refused(self) -> None:
        (said,) = self.run_program(
            """
try:
    with symmalloc.announce("all_reduce", stream=stream, device=0, group=object()):
        print("it is run")
except symmalloc.InvalidState as error:
    print(error)
"""
        )
        self.assertIn("register() comes before announce()", said)


if __name__ == "__main__":
    unittest.main()
