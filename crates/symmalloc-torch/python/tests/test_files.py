"""Files that the package writes to a path of the program: private, complete, and never through a link that another user planted."""

from __future__ import annotations

import json
import os
import pickle
import stat
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import symmalloc

SNAPSHOT = {"segments": []}


def dump_snapshot(path: Path) -> Any:
    with mock.patch.object(symmalloc, "snapshot", return_value=SNAPSHOT):
        symmalloc.dump_snapshot(path)
    return SNAPSHOT


# Every function that writes a whole file, and the function that reads it.
WRITERS: dict[str, tuple[Callable[[Path], Any], Callable[[bytes], Any]]] = {
    "flight_record": (symmalloc.flight_record, json.loads),
    "dump_snapshot": (dump_snapshot, pickle.loads),
}


class Written(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.victim = self.folder / "victim"
        self.path = self.folder / "named by the program"
        self.addCleanup(os.umask, os.umask(0))

    def plants(self) -> dict[str, Callable[[], None]]:
        def readable() -> None:
            self.path.write_text("old")
            self.path.chmod(0o666)

        return {
            "nothing": lambda: None,
            "a file that others can write": readable,
            "a link": lambda: self.path.symlink_to(self.victim),
            "a dangling link": lambda: self.path.symlink_to(self.folder / "nowhere"),
            "a hard link": lambda: os.link(self.victim, self.path),
        }

    def test_a_file_is_new_and_private_whatever_has_its_name(self) -> None:
        for writer, (write, read) in WRITERS.items():
            for name, plant in self.plants().items():
                with self.subTest(writer=writer, planted=name):
                    self.victim.write_text("of another program")
                    self.path.unlink(missing_ok=True)
                    plant()
                    written = write(self.path)
                    status = self.path.lstat()
                    self.assertTrue(stat.S_ISREG(status.st_mode))
                    self.assertEqual((oct(status.st_mode & 0o777), status.st_nlink), ("0o600", 1))
                    self.assertEqual(read(self.path.read_bytes()), written)
                    self.assertEqual(self.victim.read_text(), "of another program")
                    self.assertEqual(sorted(self.folder.iterdir()), [self.path, self.victim])

    def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(self) -> None:
        self.path.mkdir()
        for writer, (write, _) in WRITERS.items():
            for path in (self.path, self.folder / "missing" / "file"):
                with self.subTest(writer=writer, path=path), self.assertRaises(OSError):
                    write(path)
        self.assertEqual(list(self.folder.iterdir()), [self.path])


if __name__ == "__main__":
    unittest.main()
