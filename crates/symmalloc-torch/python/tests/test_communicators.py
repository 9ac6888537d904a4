"""Communicators of PyTorch's groups: ProcessGroupNCCL, and ProcessGroupNCCL2, which is "nccl" from PyTorch 2.15 on."""

from __future__ import annotations

import contextlib
import sys
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

from symmalloc import communicators
from symmalloc.errors import InvalidState, TorchError


class Backend:
    """A backend with the interface of PyTorch's: a pointer, and a call that connects before the first collective."""

    def __init__(self, *, raises: bool, connects: bool = True) -> None:
        self.pointer = 0
        self.raises, self.connects = raises, connects

    def _comm_ptr(self) -> int:
        if not self.pointer and self.raises:
            raise RuntimeError("communicator is not initialized")
        return self.pointer

    def eager_connect_single_device(self, device: Any) -> None:
        assert device == ("cuda", 1)
        self.pointer = 7 if self.connects else 0

    def name(self) -> str:
        return "nccl-lazy"


class Groups(unittest.TestCase):
    def setUp(self) -> None:
        torch = SimpleNamespace(cuda=SimpleNamespace(device=contextlib.nullcontext), device=lambda *words: words)
        patch = mock.patch.dict(sys.modules, torch=torch)
        patch.start()
        self.addCleanup(patch.stop)

    def member(self, backend: Backend) -> communicators.Member:
        with (
            mock.patch.object(communicators, "nccl_backend", lambda group, device: backend),
            mock.patch.object(communicators, "_group_name", lambda group: "group 0"),
        ):
            return communicators.Member(None, None, 1)

    def test_a_group_without_a_communicator_is_connected(self) -> None:
        for raises in (False, True):
            member = self.member(Backend(raises=raises))
            self.assertFalse(member.is_as_it_was())
            self.assertEqual(member.pointer(), 7)
            self.assertTrue(member.is_as_it_was())
            member.check_alive()

    def test_a_group_that_is_gone_is_an_error_and_never_a_null_communicator(self) -> None:
        for raises in (False, True):
            backend = Backend(raises=raises)
            member = self.member(backend)
            member.pointer()
            backend.pointer = 0
            self.assertFalse(member.is_as_it_was())
            with self.assertRaisesRegex(InvalidState, "before destroy_process_group"):
                member.check_alive()

    def test_a_new_communicator_of_a_group_has_no_windows(self) -> None:
        backend = Backend(raises=False)
        member = self.member(backend)
        member.pointer()
        backend.pointer = 8
        self.assertFalse(member.is_as_it_was())
        with self.assertRaisesRegex(InvalidState, "another communicator"):
            member.check_alive()

    def test_a_backend_that_connects_pairs_only_is_named(self) -> None:
        with self.assertRaisesRegex(TorchError, "nccl-lazy has no NCCL communicator of all ranks"):
            self.member(Backend(raises=False, connects=False)).pointer()

    def test_a_backend_without_a_communicator_is_named(self) -> None:
        for name in ("gloo", "nccl-lazy"):
            group = SimpleNamespace(_get_backend=lambda device, name=name: SimpleNamespace(name=lambda: name))
            distributed = SimpleNamespace(is_initialized=lambda: True)
            with (
                mock.patch.dict(sys.modules, {"torch.distributed": distributed}),
                mock.patch.object(sys.modules["torch"], "distributed", distributed, create=True),
                self.assertRaisesRegex(TorchError, f"backend {name} has no NCCL communicator of all ranks"),
            ):
                communicators.nccl_backend(group, 1)


if __name__ == "__main__":
    unittest.main()
