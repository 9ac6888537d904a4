"""Bundles of an engine's wheels: fat binaries of synthetic libraries, and a bundle that is packed and unpacked."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import struct
import tempfile
import unittest
import zipfile
from pathlib import Path

from test_jobs import job

PTX, CODE = 1, 2


def entry(kind: int, arch: int, size: int) -> bytes:
    return struct.pack("<HHIQ12xI", kind, 257, 64, size, arch).ljust(64, b"\0") + bytes([kind * 16 + arch % 16]) * size


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def library(*containers: bytes, section: str = ".nv_fatbin") -> bytes:
    """Returns a 64-bit ELF file with one section of fat binaries, which are aligned to 8 bytes."""
    code = b"".join(one.ljust(-(-len(one) // 8) * 8, b"\0") for one in containers)
    names = b"\0" + section.encode() + b"\0.shstrtab\0"
    code_at, names_at = 64, 64 + len(code)
    table = names_at + len(names)
    header = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", header, 40, table)
    struct.pack_into("<HHH", header, 58, 64, 3, 2)

    def row(name: int, start: int, size: int) -> bytes:
        return struct.pack("<I20xQQ", name, start, size).ljust(64, b"\0")

    rows = row(0, 0, 0) + row(1, code_at, len(code)) + row(1 + len(section) + 1, names_at, len(names))
    return bytes(header) + code + names + rows


class Bundles(unittest.TestCase):
    def setUp(self) -> None:
        self.job = job("bundle")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def pruned(self, content: bytes, arch: int = 90) -> tuple[bytes, int]:
        path = self.folder / "library.so"
        path.write_bytes(content)
        removed = self.job.prune(path, arch)
        return path.read_bytes(), removed

    def codes(self, content: bytes) -> list[list[tuple[int, int, int]]]:
        """Returns the kind, the architecture and the size of the entries of each container."""
        found, at = [], content.find(struct.pack("<I", 0xBA55ED50))
        while at >= 0:
            size = struct.unpack_from("<Q", content, at + 8)[0]
            entries = self.job.entries(content[at + 16 : at + 16 + size], "library")
            found.append([(one.kind, one.arch, len(one) - 64) for one in entries])
            at = content.find(struct.pack("<I", 0xBA55ED50), at + 16 + size)
        return found

    def test_only_the_code_for_one_architecture_remains(self) -> None:
        for section in (".nv_fatbin", "__nv_relfatbin"):
            before = library(
                container(entry(CODE, 80, 24), entry(CODE, 90, 40), entry(PTX, 90, 8), entry(CODE, 100, 16)),
                container(entry(CODE, 80, 24), entry(PTX, 80, 12), entry(PTX, 100, 12)),
                container(entry(CODE, 100, 16), entry(CODE, 120, 8)),
                section=section,
            )
            after, removed = self.pruned(before)
            self.assertEqual(self.codes(after), [[(CODE, 90, 40)], [(PTX, 80, 12)], [(CODE, 120, 8)]])
            self.assertEqual((len(after), removed), (len(before), 6 * 64 + 24 + 8 + 16 + 24 + 12 + 16))
            self.assertEqual(self.pruned(after), (after, 0), "pruning twice changes nothing")

    def test_other_files_are_left_alone_and_damaged_ones_are_errors(self) -> None:
        for other in (b"not a library" * 10, library(container(entry(CODE, 80, 24)), section=".other_name")):
            self.assertEqual(self.pruned(other), (other, 0))
        whole = container(entry(CODE, 80, 24), entry(CODE, 90, 24))
        torn = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole) - 30) + whole[16:]
        for damaged in (torn, b"\1" * 64):
            with self.assertRaisesRegex(self.job.Broken, "--keep"):
                self.pruned(library(damaged))

    @unittest.skipUnless(all(map(shutil.which, ("xz", "tar", "strip"))), "needs tar, xz and strip")
    def test_a_bundle_has_the_files_of_its_wheels(self) -> None:
        wheels, parts, site = (self.folder / name for name in ("wheels", "parts", "site"))
        wheels.mkdir()
        with self.assertRaisesRegex(self.job.Broken, "has no wheels"):
            self.job.pack(wheels, parts, 90, [])
        with zipfile.ZipFile(wheels / "one-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("one/__init__.py", "A = 1\n")
            wheel.writestr("one-1.0.data/platlib/two/__init__.py", "B = 2\n")
            wheel.writestr("one-1.0.data/scripts/one", "#!python\n")
            wheel.writestr("triton/backends/amd/lib/driver.bc", "")
            program = zipfile.ZipInfo("one/bin/program")
            program.external_attr = 0o100755 << 16
            wheel.writestr(program, "#!/bin/sh\n")
            wheel.writestr("sglang/srt/layers/dual_gemm.py", "def mode():\n        if not is_cuda():\n            return None\n")
        with contextlib.redirect_stdout(io.StringIO()):
            self.job.pack(wheels, parts, 90, [])
        self.job.unpack(parts, site)
        self.assertEqual((site / "one" / "__init__.py").read_text(), "A = 1\n")
        self.assertEqual((site / "two" / "__init__.py").read_text(), "B = 2\n")
        self.assertFalse((site / "triton" / "backends" / "amd" / "lib").exists())
        self.assertTrue(os.access(site / "one" / "bin" / "program", os.X_OK))
        self.assertIn("if True:", (site / "sglang" / "srt" / "layers" / "dual_gemm.py").read_text())
        with self.assertRaisesRegex(self.job.Broken, "is not empty"):
            self.job.pack(wheels, parts, 90, [])
        part = parts / "site.tar.xz.000"
        part.write_bytes(part.read_bytes()[:-8])
        with self.assertRaisesRegex(self.job.Broken, "damaged or incomplete"):
            self.job.unpack(parts, self.folder / "again")
        part.unlink()
        with self.assertRaisesRegex(self.job.Broken, "has no bundle"):
            self.job.unpack(parts, self.folder / "again")


if __name__ == "__main__":
    unittest.main()
