"""The library and its header match the package."""

from __future__ import annotations

import ctypes
import json
import re
import tempfile
import unittest
from pathlib import Path

import needs
import symmalloc
from symmalloc import errors, library

HEADER = Path(__file__).resolve().parents[2] / "include" / "symmalloc.h"


class Library(unittest.TestCase):
    def test_the_library_loads_and_has_the_packages_version(self) -> None:
        self.assertEqual(library.library().symmalloc_version().decode(), symmalloc.__version__)

    def test_the_header_has_the_packages_version(self) -> None:
        self.assertIn(f'#define SYMMALLOC_VERSION "{symmalloc.__version__}"', HEADER.read_text())

    def test_every_status_of_the_header_has_its_own_error(self) -> None:
        numbers = {
            int(number) for number in re.findall(r"^\s*SYMMALLOC_\w+ = (\d+),$", enum("symmalloc_status"), re.MULTILINE)
        }
        self.assertEqual(numbers, {0, *errors.BY_STATUS})
        self.assertEqual(len(set(errors.BY_STATUS.values())), len(errors.BY_STATUS))

    def test_the_header_declares_every_call_with_its_number_of_arguments(self) -> None:
        header = re.sub(r"/\*.*?\*/|//[^\n]*", "", HEADER.read_text(), flags=re.DOTALL)
        for name, types in library.CALLS.items():
            declared = re.search(rf"\bsymmalloc_{name}\(([^;]*?)\);", header)
            self.assertIsNotNone(declared, name)
            self.assertEqual(declared.group(1).count(",") + 1, len(types), name)

    def test_the_placement_has_the_headers_fields_in_the_headers_order(self) -> None:
        struct = re.search(
            r"typedef struct symmalloc_placement \{(.*?)\} symmalloc_placement;", HEADER.read_text(), re.DOTALL
        )
        declared = re.findall(r"^\s*uint(\d\d)_t (\w+);$", struct.group(1), re.MULTILINE)
        fields = [(str(8 * ctypes.sizeof(kind)), name) for name, kind in library.PlacementStruct._fields_]
        self.assertEqual(declared, fields)

    def test_a_flight_record_is_a_dict_and_a_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "record.json"
            record = symmalloc.flight_record(path, reason="a test")
            self.assertEqual(record, json.loads(path.read_text()))
        self.assertEqual((record["symmalloc_flight_record"], record["reason"]), (1, "a test"))
        self.assertEqual(record["communicators"], [])

    def test_a_wrong_path_is_reported_with_the_remedy(self) -> None:
        done = needs.process("import symmalloc; symmalloc.Allocator()", SYMMALLOC_LIBRARY="/nowhere/lib.so")
        self.assertIn("LibraryNotFound: /nowhere/lib.so is not a file (SYMMALLOC_LIBRARY names it)", done.stderr)

    def test_another_library_is_refused(self) -> None:
        # libc is a library that every process has.
        maps = Path("/proc/self/maps").read_text()
        theirs = re.search(r"/\S*/(?:libc[.-]|ld-musl)\S*$", maps, re.MULTILINE).group()
        done = needs.process("import symmalloc; symmalloc.Allocator()", SYMMALLOC_LIBRARY=theirs)
        self.assertIn(f"LibraryNotFound: {theirs} cannot be used", done.stderr)


def enum(name: str) -> str:
    return re.search(rf"{name}[^{{;]*\{{(.*?)\}}", HEADER.read_text(), re.DOTALL).group(1)


if __name__ == "__main__":
    unittest.main()
