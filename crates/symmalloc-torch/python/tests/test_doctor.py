"""`python -m symmalloc doctor` and `show()`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import needs
import symmalloc
from symmalloc import doctor

MIB = 1 << 20


def examined(**environment: str) -> tuple[int, dict[str, dict[str, object]]]:
    command = [sys.executable, "-m", "symmalloc", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}


class Doctor(unittest.TestCase):
    def test_a_missing_driver_is_reported_with_the_remedy(self) -> None:
        code, findings = examined(LD_LIBRARY_PATH="")
        if findings["NVIDIA driver"]["works"]:
            self.skipTest("this machine has a libcuda")
        self.assertEqual(code, 1)
        self.assertIn("install the NVIDIA driver", str(findings["NVIDIA driver"]["what"]))

    def test_an_invalid_configuration_is_found(self) -> None:
        code, findings = examined(SYMMALLOC_CONF="max_split_size_mbb:200")
        self.assertEqual(code, 1)
        self.assertFalse(findings["SYMMALLOC_CONF"]["works"])
        self.assertIn("max_split_size_mb", str(findings["SYMMALLOC_CONF"]["what"]))
        self.assertTrue(examined(SYMMALLOC_CONF="streams:shared")[1]["SYMMALLOC_CONF"]["works"])

    def test_a_setting_that_has_no_effect_is_named_and_not_counted(self) -> None:
        code, findings = examined(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        other_code, _ = examined()
        finding = findings["PYTORCH_CUDA_ALLOC_CONF"]
        self.assertFalse(finding["works"])
        self.assertIn("SYMMALLOC_CONF", str(finding["what"]))
        self.assertEqual(code, other_code)

    def test_a_pytorch_that_cannot_be_imported_is_reported_with_its_first_error(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            failing = "import sys\nsys.tries = getattr(sys, 'tries', 0) + 1\nraise ImportError(f'attempt {sys.tries}')\n"
            (Path(folder) / "torch.py").write_text(failing)
            _, findings = examined(PYTHONPATH=f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        for name in ("PyTorch", "allocator class"):
            self.assertIn("cannot be imported (attempt 1)", str(findings[name]["what"]))

    def test_the_table_has_a_line_for_each_finding_and_a_verdict(self) -> None:
        findings = [doctor.Finding("one", True, "there"), doctor.Finding("two", False, "missing", is_needed=False)]
        self.assertEqual(
            doctor.table(findings), "ok   one  there\n-    two  missing\n\nsymmalloc.install() will work"
        )
        self.assertTrue(doctor.table([doctor.Finding("one", False, "gone")]).endswith("will not work here"))

    @needs.device
    def test_the_devices_are_named(self) -> None:
        _, findings = examined()
        self.assertTrue(findings["NVIDIA driver"]["works"], findings["NVIDIA driver"]["what"])
        self.assertIn("device 1", str(findings["NVIDIA driver"]["what"]))


@needs.device
class Show(unittest.TestCase):
    def test_the_table_has_a_row_for_each_pool_and_a_total(self) -> None:
        with symmalloc.Allocator(0) as allocator:
            pool = allocator.create_pool()
            allocator.allocate(3 * MIB)
            allocator.allocate(5 * MIB, pool=pool)
            table = symmalloc.show(of=allocator)
            self.assertEqual([name for name, _ in table.rows], ["pool 0", f"pool {pool}", "all"])
            self.assertEqual(table.rows[0][1][:2], ["3.0 MiB", "3.0 MiB"])
            self.assertEqual(table.rows[-1][1][0], "8.0 MiB")
            self.assertIn("peak reserved", str(table))
            self.assertIn("<td>5.0 MiB</td>", table._repr_html_())

    def test_show_without_install_is_an_error(self) -> None:
        with self.assertRaises(symmalloc.NotInstalled):
            symmalloc.show()


if __name__ == "__main__":
    unittest.main()
