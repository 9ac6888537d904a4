"""A PyTorch with functions that this package does not know: the functions are reported, and throw if they are called."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import unittest
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import needs
from symmalloc import TorchError, pytorch_class, unknown_functions

FAKES = Path(__file__).resolve().parent / "fakes" / "pytorch"
NAMES = ["attachInventedObserver", "inventedSizes", "inventedPointer", "twoOnALine", "operator()", "moveTo"]
COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]


@unittest.skipUnless(COMPILERS, "needs a C++ compiler")
class Compiled(unittest.TestCase):
    """Compiles a class for an interface similar to PyTorch's, with the functions that compile the real one."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()
        sources = self.folder / "sources"
        shutil.copytree(pytorch_class.SOURCES, sources)
        shutil.copy(pytorch_class._header() / "symmalloc.h", sources / "symmalloc.h")
        shutil.copy(FAKES / "allocator.cpp", sources)
        self.include = self.folder / "torch" / "include"
        shutil.copytree(FAKES / "include", self.include)
        (self.folder / "torch" / "lib").mkdir()
        (self.folder / "torch" / "lib" / "libc10_cuda.so").write_bytes(b"")
        cuda = self.folder / "cuda" / "include"
        cuda.mkdir(parents=True)
        (cuda / "cuda_runtime_api.h").write_text("")
        environment = {"CUDA_HOME": str(cuda.parent), "XDG_CACHE_HOME": str(self.folder / "cache")}
        for patch in (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(pytorch_class, "SOURCES", sources),
            mock.patch.object(pytorch_class, "_libraries", lambda torch: []),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        version = SimpleNamespace(cuda="13.0", git_version="none")
        self.torch: Any = SimpleNamespace(
            __file__=str(self.folder / "torch" / "__init__.py"), __version__="2.99.0+cu130", version=version
        )

    def built(self) -> int:
        with pytorch_class._cache() as folder:
            return pytorch_class.built(self.torch, folder)[0]

    def interface(self, change: str, to: str) -> None:
        header = self.include / "c10" / "cuda" / "CUDACachingAllocator.h"
        text = header.read_text()
        self.assertIn(change, text)
        header.write_text(text.replace(change, to))

    def test_unknown_functions_throw_and_all_others_work(self) -> None:
        for compiler in COMPILERS:
            with self.subTest(compiler), mock.patch.dict(os.environ, {"CXX": compiler}):
                compiled: Any = ctypes.CDLL(f"/proc/self/fd/{self.built()}")
                self.assertEqual(compiled.symmalloc_install_class(None), 0)
                compiled.symmalloc_unknown_functions.restype = ctypes.c_char_p
                said = compiled.symmalloc_unknown_functions().decode().split(", ")
                self.assertEqual(sorted(said), sorted(NAMES))
                for number, name in enumerate(NAMES):
                    text = ctypes.create_string_buffer(500)
                    compiled.call_unknown(number, text, ctypes.c_size_t(len(text)))
                    version = pytorch_class.VERSION
                    self.assertIn(f"{name} is not supported by symmalloc {version} on PyTorch 2.99.0", text.value.decode())

    def test_install_warns_once_about_missing_functions(self) -> None:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            pytorch_class.install(self.torch, None)
        (warning,) = heard
        for said in (*NAMES, "PyTorch 2.99.0+cu130", "pip install --upgrade symmalloc", "2.11, 2.12, 2.13, 2.14, 2.15"):
            self.assertIn(said, str(warning.message))

    def test_a_known_interface_causes_no_warning(self) -> None:
        for name in ("attachInventedObserver", "inventedSizes", "inventedPointer", "twoOnALine", "operator()", "moveTo"):
            self.assertIn(name, (self.include / "c10" / "cuda" / "CUDACachingAllocator.h").read_text())
        header = self.include / "c10" / "cuda" / "CUDACachingAllocator.h"
        known = header.read_text().replace(" = 0;", " { throw 1; }").replace("initialized() { throw 1; }", "initialized() = 0;")
        header.write_text(known)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pytorch_class.install(self.torch, None)

    def test_an_unknown_signature_is_named(self) -> None:
        self.interface("virtual int twoOnALine() = 0;", "PURE(int, twoOnALine)")
        self.interface("enum class Invented", "#define PURE(type, name) virtual type name() = 0;\nenum class Invented")
        with self.assertRaisesRegex(TorchError, "CUDACachingAllocator.h:.*is not supported"):
            self.built()

    def test_other_compiler_errors_are_printed_unchanged(self) -> None:
        self.interface("virtual std::string name() = 0;", "virtual std::string name(int) = 0;")
        with self.assertRaisesRegex(TorchError, "name.*marked.*override"):
            self.built()
        self.assertEqual(list((self.folder / "cache").rglob("*.so")), [])

    def test_other_compiler_notes_name_no_function(self) -> None:
        self.assertEqual(unknown_functions.find("a.cpp:1:2: error: virtual\nb.h:1:1: note: in file included from c.h"), [])


@needs.torch
@needs.device
@needs.stand_ins
@needs.compilation
class OnPyTorch(unittest.TestCase):
    def test_a_function_that_a_newer_pytorch_has_is_reported_and_everything_else_works(self) -> None:
        import torch

        header = Path("c10", "cuda", "CUDACachingAllocator.h")
        with tempfile.TemporaryDirectory() as folder:
            text = (Path(torch.__file__).parent / "include" / header).read_text()
            last = "  virtual std::string name() = 0;\n"
            self.assertEqual(text.count(last), 1)
            # The function is added at the end, so that the others keep their positions in the table.
            (Path(folder) / header).parent.mkdir(parents=True)
            (Path(folder) / header).write_text(text.replace(last, f"{last}  virtual SnapshotInfo invented(MempoolId_t pool = {{0, 0}}) = 0;\n"))
            done = needs.process(
                """
                import torch, symmalloc
                symmalloc.install()
                x = torch.empty(1000, device="cuda")
                print(torch.cuda.memory_allocated())
                """,
                XDG_CACHE_HOME=folder, CPATH=folder,
            )  # fmt: skip
        self.assertEqual((done.returncode, done.stdout), (0, "4096\n"), done.stderr)
        self.assertEqual(done.stderr.count("does not know: invented. They raise"), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
