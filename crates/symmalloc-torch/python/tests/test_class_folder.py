"""The folder of compiled classes and the libraries in it: another user cannot choose the code that `install()` loads.

PyTorch and the compiler are stand-ins. A library appends the name of its author to the file `LOADED` when it is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from symmalloc import pytorch_class
from symmalloc.private_folder import PrivateFolder, Untrusted

TESTS = Path(__file__).resolve().parent
OTHER_USER = 12345

SOURCE = """
#include <stdlib.h>
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) {
  const char *path = getenv("LOADED");
  FILE *file = path ? fopen(path, "a") : 0;
  if (file) { fputs(WHO "\\n", file); fclose(file); }
}
int symmalloc_install_class(const char *conf) { (void)conf; return 0; }
const char *symmalloc_unknown_functions(void) { return ""; }
void symmalloc_name_callers(void *function) { (void)function; }
"""

COMPILER = """#!/bin/sh
echo compiled >>"$COMPILED"
while [ "$1" != -o ]; do shift; done
exec cc -shared -fPIC '-DWHO="victim"' -x c {source} -o "$2"
"""

PROGRAM = """
import json, os, sys, types, warnings
from pathlib import Path
from symmalloc import TorchError, pytorch_class
work = Path(sys.argv[1])
torch = types.SimpleNamespace(
    __version__="2.11.0", __file__=str(work / "torch" / "__init__.py"), version=types.SimpleNamespace(git_version="0", cuda="13.0")
)
descriptors = lambda: len(os.listdir("/proc/self/fd"))
before = descriptors()
exec(sys.argv[2])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    error = None
    try:
        pytorch_class.install(torch, None)
    except TorchError as wrong:
        error = str(wrong)
print(json.dumps({"error": error, "warnings": [str(one.message) for one in caught], "descriptors": descriptors() - before}))
"""


def needs_root(test: object) -> object:
    return unittest.skipUnless(os.geteuid() == 0, "needs root, to own files as another user")(test)  # type: ignore[type-var]


@unittest.skipUnless(shutil.which("cc"), "needs a C compiler")
class Folder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = Path(folder.name)
        (self.work / "torch" / "lib").mkdir(parents=True)
        (self.work / "torch" / "lib" / "libc10_cuda.so").write_text("")
        (self.work / "torch" / "include" / "c10" / "cuda").mkdir(parents=True)
        (self.work / "torch" / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").write_text("")
        (self.work / "cuda" / "include").mkdir(parents=True)
        (self.work / "cuda" / "include" / "cuda_runtime_api.h").write_text("")
        source = self.work / "class.c"
        source.write_text(SOURCE)
        self.compiler = self.work / "compiler"
        self.compiler.write_text(COMPILER.format(source=source))
        self.compiler.chmod(0o755)
        # The package's library must be present, but none of its functions is called.
        self.library = self.build("package", self.work / "libsymmalloc_torch.so")
        self.home = self.work / "home"
        self.home.mkdir(mode=0o755)
        self.temporary = self.work / "tmp"
        self.temporary.mkdir()
        self.cache = self.home / ".cache" / "symmalloc"

    def build(self, who: str, path: Path) -> Path:
        command = ["cc", "-shared", "-fPIC", f'-DWHO="{who}"', str(self.work / "class.c"), "-o", str(path)]
        subprocess.run(command, check=True, timeout=60)
        path.write_bytes(pytorch_class.sealed(path.read_bytes()))
        return path

    def install(self, patch: str = "", **environment: str) -> dict[str, object]:
        """Runs `install()` in a separate process. Returns its warnings and error, and the libraries that ran."""
        loaded, compiled = self.work / "loaded", self.work / "compiled"
        for file in (loaded, compiled):
            file.unlink(missing_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
        surroundings = {
            "HOME": str(self.home), "CXX": str(self.compiler), "CUDA_HOME": str(self.work / "cuda"), "TMPDIR": str(self.temporary),
            "SYMMALLOC_LIBRARY": str(self.library), "LOADED": str(loaded), "COMPILED": str(compiled),
            "PYTHONPATH": str(Path(pytorch_class.__file__).resolve().parents[1]),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(self.work), patch],
            env=inherited | surroundings | environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        said: dict[str, object] = json.loads(done.stdout)
        said["loaded"] = [who for who in _lines(loaded) if who != "package"]
        said["compiled"] = len(_lines(compiled))
        return said

    def keep(self) -> Path:
        """Compiles the class into the cache. Returns its path."""
        said = self.install()
        self.assertEqual((said["error"], said["warnings"], said["loaded"]), (None, [], ["victim"]))
        (library,) = self.cache.iterdir()
        return library

    def is_refused(self, reason: str, **environment: str) -> None:
        """Checks that the folder is not used: the process compiles its own class and leaves no file."""
        said = self.install(**environment)
        self.assertEqual((said["error"], said["loaded"], said["compiled"]), (None, ["victim"], 1))
        (warning,) = said["warnings"]  # type: ignore[misc]
        self.assertIn(reason, warning)
        self.assertIn("set XDG_CACHE_HOME", warning)
        self.assertEqual(list(self.temporary.iterdir()), [])

    def test_the_class_is_compiled_once_for_this_user_alone(self) -> None:
        old = os.umask(0)
        try:
            library = self.keep()
        finally:
            os.umask(old)
        self.assertEqual([oct(path.stat().st_mode & 0o777) for path in (library, self.cache, self.cache.parent)], ["0o700"] * 3)
        self.assertEqual(list(self.temporary.iterdir()), [])
        again = self.install()
        self.assertEqual((again["compiled"], again["loaded"], again["warnings"]), (0, ["victim"], []))
        self.assertEqual(again["descriptors"], 1, "the descriptor of the loaded library stays open")

    def test_a_child_process_finds_the_library_under_its_loaded_name(self) -> None:
        patch = f"""
import ctypes, subprocess
load = ctypes.CDLL
def checked(name, *arguments, **named):
    if str(name).startswith("/proc/"):
        subprocess.run(["cmp", name, {str(self.keep())!r}], check=True)
    return load(name, *arguments, **named)
ctypes.CDLL = checked
"""
        self.assertEqual(self.install(patch)["error"], None)

    def test_a_folder_that_others_can_write_is_refused(self) -> None:
        library = self.keep()
        self.build("attacker", library)
        for folder in (self.cache, self.cache.parent, self.home):
            for mode in (0o775, 0o757):
                with self.subTest(folder=folder, mode=oct(mode)):
                    folder.chmod(mode)
                    self.is_refused(f"others can write {folder}: run `chmod go-w` on it")
                    folder.chmod(0o755)
        self.assertEqual(self.install()["loaded"], ["attacker"], "only the permissions prevent the load")

    def test_a_sticky_folder_is_accepted_as_a_parent_only(self) -> None:
        self.keep()
        self.home.chmod(0o1777)
        self.assertEqual(self.install()["warnings"], [])
        self.cache.chmod(0o1777)
        self.is_refused("others can write")

    @needs_root
    def test_the_home_of_another_user_is_refused(self) -> None:
        library = self.keep()
        self.build("attacker", library)
        for path in (self.cache, self.cache.parent, self.home):
            with self.subTest(path=path):
                os.chown(path, OTHER_USER, OTHER_USER)
                self.is_refused(f"{path} belongs to user {OTHER_USER}")
                os.chown(path, 0, 0)

    @needs_root
    def test_a_link_that_another_user_planted_is_refused(self) -> None:
        library = self.keep()
        theirs = self.work / "theirs"
        shutil.copytree(self.cache, theirs)
        self.build("attacker", theirs / library.name)
        shutil.rmtree(self.cache)
        self.cache.symlink_to(theirs)
        os.chown(self.cache, OTHER_USER, OTHER_USER, follow_symlinks=False)
        self.is_refused(f"{self.cache} belongs to user {OTHER_USER}")

    @needs_root
    def test_the_target_of_a_link_is_checked(self) -> None:
        scratch = self.work / "scratch"
        scratch.mkdir()
        (self.home / ".cache").symlink_to("../scratch")
        self.assertEqual(self.install()["warnings"], [])
        self.assertEqual(len(list((scratch / "symmalloc").iterdir())), 1)
        os.chown(scratch, OTHER_USER, OTHER_USER)
        self.is_refused(f"{scratch} belongs to user {OTHER_USER}")

    def test_circular_links_are_refused(self) -> None:
        (self.home / ".cache").symlink_to(self.home / ".cache")
        self.is_refused("has too many symbolic links")

    def test_a_library_that_others_could_have_written_is_recompiled(self) -> None:
        library = self.keep()
        cases = {
            "writable by its group": lambda: library.chmod(0o770),
            "writable by everybody": lambda: library.chmod(0o707),
            "with two names": lambda: os.link(library, self.home / "hard link"),
            "a link": lambda: (library.rename(self.home / "elsewhere"), library.symlink_to(self.home / "elsewhere")),
            "a pipe": lambda: (library.unlink(), os.mkfifo(library)),
        }
        if os.geteuid() == 0:
            cases["of another user"] = lambda: os.chown(library, OTHER_USER, OTHER_USER)
        for name, plant in cases.items():
            with self.subTest(name):
                self.build("attacker", library)
                plant()
                said = self.install()
                self.assertEqual((said["error"], said["loaded"], said["compiled"]), (None, ["victim"], 1))

    def test_an_incomplete_or_changed_library_is_recompiled(self) -> None:
        library = self.keep()
        whole = library.read_bytes()
        size = len(whole)
        # What a crash, a full disk or a bad disk leaves: any beginning of the file, with or without zeros up to its size, and any bit.
        lengths = [0, 1, 64, 4096, size // 2, size - 8192, size - 42, size - 41, size - 1]
        damaged = {f"{length} bytes": whole[:length] for length in lengths}
        damaged |= {f"zeros from {length} on": whole[:length].ljust(size, b"\0") for length in lengths}
        for place in (0, 100, 5000, size // 2, size - 60, size - 41, size - 1):
            damaged[f"a bit of byte {place}"] = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        damaged["a byte more"] = whole + b"\0"
        for name, contents in damaged.items():
            with self.subTest(name):
                self.assertNotEqual(contents, whole)
                library.write_bytes(contents)
                said = self.install()
                self.assertEqual((said["error"], said["loaded"], said["compiled"]), (None, ["victim"], 1))
                self.assertEqual(library.read_bytes()[-41:-32], pytorch_class.SEAL)
        self.assertEqual(self.install()["compiled"], 0)

    def test_the_library_is_on_the_disk_before_it_gets_its_name(self) -> None:
        order = self.work / "order"
        patch = f"""
def noted(name):
    function = getattr(os, name)
    def call(*arguments, **named):
        with open({str(order)!r}, "a") as file:
            print(name, file=file)
        return function(*arguments, **named)
    setattr(os, name, call)
noted("fsync")
noted("replace")
"""
        self.assertEqual(self.install(patch)["error"], None)
        self.assertEqual(_lines(order), ["fsync", "replace"])

    def test_a_library_that_is_replaced_before_it_is_loaded_does_not_run(self) -> None:
        library = self.keep()
        self.build("attacker", self.work / "attacker.so")
        # Immediately before the load, another library replaces the file.
        patch = f"""
checked = pytorch_class.built
def built(*arguments):
    done = checked(*arguments)
    os.replace({str(self.work / "attacker.so")!r}, {str(library)!r})
    return done
pytorch_class.built = built
"""
        self.assertEqual(self.install(patch)["loaded"], ["victim"])
        self.assertEqual(self.install()["loaded"], ["attacker"], "the library was replaced")

    def test_a_folder_that_is_replaced_while_the_compiler_runs_gets_no_file(self) -> None:
        theirs = self.work / "theirs"
        theirs.mkdir()
        self.compiler.write_text(
            self.compiler.read_text().replace(
                "echo", f"mv {self.cache} {self.home}/moved; ln -s {theirs} {self.cache}; echo", 1
            )
        )
        said = self.install()
        self.assertEqual((said["error"], said["loaded"]), (None, ["victim"]))
        self.assertEqual(list(theirs.iterdir()), [])
        self.assertEqual(len(list((self.home / "moved").iterdir())), 1)

    def test_a_library_that_cannot_be_loaded_is_removed_and_named_by_its_path(self) -> None:
        library = self.keep()
        library.write_bytes(pytorch_class.sealed(b"no library"))
        error = str(self.install()["error"])
        self.assertIn(f"{library} cannot be loaded", error)
        self.assertNotIn("/proc/self", error)
        self.assertFalse(library.exists())

    def test_a_cache_that_is_not_a_folder_is_named(self) -> None:
        self.is_refused("class.c is not a folder", XDG_CACHE_HOME=str(self.work / "class.c"))

    def test_place_returns_the_path_that_install_uses(self) -> None:
        report = self.work / "place"
        patch = f"Path({str(report)!r}).write_text(pytorch_class.place(torch))"
        self.assertEqual(self.install(patch)["error"], None)
        (library,) = self.cache.iterdir()
        self.assertEqual(report.read_text(), f"install() compiles it once, with {self.compiler}, to {library}")


class Descriptors(unittest.TestCase):
    def test_a_refused_folder_leaves_no_descriptor_open(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name)
            (path / "open").mkdir()
            (path / "open").chmod(0o777)
            (path / "file").write_text("")
            (path / "circle").symlink_to("circle")
            before = os.listdir("/proc/self/fd")
            for inside in ("open", "open/inside", "circle", "file", "file/inside"):
                with self.assertRaises((Untrusted, NotADirectoryError)):
                    PrivateFolder.open(path / inside)
            with PrivateFolder.open(path / "new" / "folder") as folder:
                self.assertEqual(folder.path, path / "new" / "folder")
            self.assertEqual(os.listdir("/proc/self/fd"), before)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    unittest.main()
