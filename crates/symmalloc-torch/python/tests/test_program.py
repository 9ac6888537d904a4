"""`python -m symmalloc COMMAND` runs the installed program."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import needs
import symmalloc
from symmalloc import program

# Prints its arguments, and ends with the exit code of differing ranks.
PROGRAM = '#!/bin/sh\necho "program: $*"\nexit 3\n'


def place(path: Path) -> Path:
    """Writes a program that is not the installed one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def run(scripts: str, *arguments: str, packages: str = "", path: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """Runs `python -m symmalloc` in an environment whose programs are in the folder `scripts`."""
    # A folder with records of installed packages replaces those of this environment.
    text = f"""
        import runpy, sys, sysconfig
        from importlib import metadata
        sysconfig.get_path = lambda name: {scripts!r}
        files, metadata.files = metadata.files, lambda name: None
        if {packages!r}:
            [found] = metadata.distributions(path=[{packages!r}])
            metadata.files = lambda name: found.files
        sys.argv = ["symmalloc", *{arguments!r}]
        runpy.run_module("symmalloc", run_name="__main__", alter_sys=True)
    """
    return needs.process(text, PATH=path)


class Program(unittest.TestCase):
    def test_every_other_command_runs_the_installed_program_and_returns_its_exit_code(self) -> None:
        for arguments in (["replay", "gpt2", "--json"], ["--version"], ["diff", "a file", "-h"]):
            with tempfile.TemporaryDirectory() as folder:
                place(Path(folder) / "symmalloc")
                done = run(folder, *arguments)
            self.assertEqual((done.stdout, done.returncode), (f"program: {' '.join(arguments)}\n", 3), done.stderr)

    def test_a_program_that_was_installed_elsewhere_is_found_by_its_record(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "lib/symmalloc-0.1.0.dist-info/RECORD"
            record.parent.mkdir(parents=True)
            record.write_text("../bin/symmalloc,,\nsymmalloc/__init__.py,,\n")
            (record.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: symmalloc\nVersion: 0.1.0\n")
            place(Path(folder) / "bin/symmalloc")
            done = run(f"{folder}/scripts", "plan", packages=f"{folder}/lib")
        self.assertEqual((done.stdout, done.returncode), ("program: plan\n", 3), done.stderr)

    def test_a_missing_program_is_an_error_with_the_remedy(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # May have another version.
            place(Path(folder) / "elsewhere/symmalloc")
            done = run(folder, "replay", "gpt2", path=f"{folder}/elsewhere")
            self.assertEqual((done.stdout, done.returncode), ("", 2))
            message = f"python -m symmalloc replay: the program symmalloc is not in {folder}: install the package with `pip install"
            self.assertIn(message, done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_the_error_is_typed(self) -> None:
        with unittest.mock.patch("sysconfig.get_path", lambda name: "/nowhere"), unittest.mock.patch("symmalloc.program.recorded", list):
            for base in (symmalloc.ProgramNotFound, symmalloc.Error, FileNotFoundError):
                with self.assertRaises(base):
                    program.program_path()

    def test_the_wheel_contains_the_program(self) -> None:
        try:
            path = program.program_path()
        except symmalloc.ProgramNotFound as why:
            self.skipTest(str(why))
        done = [
            subprocess.run([*command, "replay", "gpt2", "--json"], capture_output=True, text=True, timeout=120, check=True)
            for command in ([path], [sys.executable, "-m", "symmalloc"])
        ]
        self.assertIn('"ops"', done[0].stdout)
        self.assertEqual(*(one.stdout.count('"digest"') for one in done))


if __name__ == "__main__":
    unittest.main()
