"""`install()` succeeds completely, or raises and leaves nothing behind: every way to fail, its error, and an installation after its repair.

PyTorch and the compiler are stand-ins, so these tests need neither. The library is the real one. The stand-in for the class appends the
configuration to the file `installed`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import needs
from symmalloc import pytorch_class

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
int symmalloc_torch_configure(const char *conf);
int symmalloc_torch_check(void);
int symmalloc_install_class(const char *conf) {
  if (getenv("CUDA_IN_USE")) return -1;
  int status = conf ? symmalloc_torch_configure(conf) : symmalloc_torch_check();
  if (status != 0) return status;
  FILE *file = fopen(getenv("INSTALLED"), "a");
  fprintf(file, "%s\\n", conf ? conf : "");
  fclose(file);
  return 0;
}
const char *symmalloc_unknown_functions(void) { return getenv("UNKNOWN") ? "trimTo" : ""; }
void symmalloc_name_callers(void *function) { (void)function; }
"""

COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
exec {cc} -shared -fPIC -x c {source} -o "$2"
"""

# Breaks something, fails to install, checks that nothing is left, repairs it, and installs.
PROGRAM = """
import os, sys, tempfile, types, warnings
from pathlib import Path
work, broken, repaired = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
torch = types.ModuleType("torch")
torch.__version__, torch.__file__ = "2.11.0", str(work / "torch" / "__init__.py")
torch.version = types.SimpleNamespace(git_version="0", cuda="13.0")
torch._C = types.SimpleNamespace(_cuda_customAllocator=None)
torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)
sys.modules["torch"] = torch
import symmalloc
from symmalloc import library, pytorch_class
pytorch_class.COMPILED = work / "compiled"
marks, header = work / "installed", work / "torch" / "include" / "c10" / "cuda" / "CUDACachingAllocator.h"
conf = "segments:fixed"
exec(broken)
before = dict(os.environ)
try:
    symmalloc.install(conf, trace="job.trace")
except (symmalloc.Error, UserWarning) as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("installed")
    sys.exit()
assert dict(os.environ) == before and not symmalloc.installed() and not marks.exists()
for call in (symmalloc.stats, symmalloc.allocator):
    try:
        call(0)
    except symmalloc.NotInstalled:
        continue
    raise AssertionError(call)
exec(repaired)
symmalloc.install("total_limit_mb:64")
assert symmalloc.installed() and marks.read_text() == "total_limit_mb:64\\n", marks.read_text()
settings = library.text("torch_settings")
assert "segments:fixed" not in settings and "total_limit_mb:64" in settings, settings
assert "SYMMALLOC_TRACE" not in os.environ
print("repaired")
"""

CC = shutil.which("cc")


@unittest.skipUnless(CC, "needs a C compiler")
class Failures(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = Path(folder.name)
        for name in ("torch/lib/libc10.so", "torch/lib/libc10_cuda.so", "torch/include/c10/cuda/CUDACachingAllocator.h"):
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_text("")
        (self.work / "cuda" / "include").mkdir(parents=True)
        (self.work / "cuda" / "include" / "cuda_runtime_api.h").write_text("")
        (self.work / "class.c").write_text(SOURCE)
        self.compiler = self.work / "compiler"
        self.compiler.write_text(COMPILER.format(cc=CC, source=self.work / "class.c"))
        self.compiler.chmod(0o755)
        self.cache = self.work / "cache"

    def install(self, broken: str, repaired: str = "", **environment: str) -> str:
        """Runs the program. Returns what it prints."""
        removed = ("SYMMALLOC_CONF", "SYMMALLOC_TRACE")
        inherited = {name: value for name, value in os.environ.items() if name not in removed}
        surroundings = {
            "CXX": str(self.compiler), "CUDA_HOME": str(self.work / "cuda"), "XDG_CACHE_HOME": str(self.cache),
            "INSTALLED": str(self.work / "installed"), "PYTHONPATH": needs.packages(),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(self.work), broken, repaired],
            env=inherited | surroundings | environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def fails(self, error: str, broken: str, repaired: str, **environment: str) -> None:
        """Checks the error of an installation with something broken, and that one after the repair is complete."""
        said = self.install(broken, repaired, **environment)
        self.assertTrue(said.startswith(error), said)
        self.assertTrue(said.endswith("\nrepaired\n"), said)
        (self.work / "installed").unlink()

    def test_a_missing_compiler(self) -> None:
        compiler = f"os.environ['CXX'] = {str(self.compiler)!r}"
        missing = "TorchError: CXX=/no/compiler is not a program on the PATH: set CXX to a C++ compiler\n"
        self.fails(missing, "os.environ['CXX'] = '/no/compiler'", compiler)
        shutil.rmtree(self.cache)
        none = "TorchError: there is no C++ compiler on the PATH: install g++ or clang++, or set CXX"
        broken = "del os.environ['CXX']; path = os.environ['PATH']; os.environ['PATH'] = '/nowhere'"
        self.fails(f"{none}\n", broken, f"os.environ['PATH'] = path; {compiler}")
        shutil.rmtree(self.cache)
        # With classes in the package, another version of PyTorch is a remedy as well.
        for name in ("torch-2.14-cuda13-0.so", "torch-2.15-cuda13-0.so"):
            (self.work / "compiled").mkdir(exist_ok=True)
            (self.work / "compiled" / name).write_text("")
        self.fails(f"{none}, or install a PyTorch that needs none: 2.14, 2.15\n", broken, f"os.environ['PATH'] = path; {compiler}")

    def test_errors_of_the_compiler(self) -> None:
        failing = self.work / "c++"
        failing.write_text("#!/bin/sh\necho 'allocator.cpp:1: fatal error: it is too old' >&2; exit 1\n")
        failing.chmod(0o755)
        error = (
            f"TorchError: {failing} cannot compile the allocator for PyTorch 2.11.0:\n"
            "  allocator.cpp:1: fatal error: it is too old\nset CXX to a compiler for C++20\n"
        )
        left = f"assert not list(Path({str(self.cache)!r}).rglob('*.so')); "
        self.fails(error, f"os.environ['CXX'] = {str(failing)!r}", f"{left}os.environ['CXX'] = {str(self.compiler)!r}")

    def test_missing_files(self) -> None:
        header = self.work / "torch/include/c10/cuda/CUDACachingAllocator.h"
        for name in ("torch/include/c10/cuda/CUDACachingAllocator.h", "torch/lib/libc10.so", "torch/lib/libc10_cuda.so"):
            path = self.work / name
            missing = f"TorchError: {path} is missing: reinstall PyTorch\n"
            self.fails(missing, f"Path({str(path)!r}).unlink()", f"Path({str(path)!r}).write_text('')")
            shutil.rmtree(self.cache)
        self.assertTrue(header.is_file())

    @unittest.skipIf(
        any(Path(folder, "cuda_runtime_api.h").exists() for folder in ("/usr/local/cuda/include", "/usr/include")), "CUDA is installed"
    )
    def test_missing_headers_of_cuda(self) -> None:
        missing = "TorchError: CUDA's headers are missing: pip install nvidia-cuda-runtime, or set CUDA_HOME\n"
        broken = "home = os.environ.pop('CUDA_HOME'); os.environ.pop('CUDA_PATH', None)"
        self.fails(missing, broken, "os.environ['CUDA_HOME'] = home")

    def test_an_unsupported_version(self) -> None:
        for version in ("2.10.1", "1.13.0+cu117"):
            unsupported = f"TorchError: PyTorch {version} is not supported: install 2.11 or later\n"
            self.fails(unsupported, f"torch.__version__ = {version!r}", "torch.__version__ = '2.11.0'")

    def test_a_pytorch_without_cuda(self) -> None:
        without = "TorchError: PyTorch 2.11.0 was built without CUDA: install a CUDA build\n"
        self.fails(without, "torch.version.cuda = None", "torch.version.cuda = '13.0'")
        self.fails(without, "del torch._C._cuda_customAllocator", "torch._C._cuda_customAllocator = None")

    def test_a_pytorch_that_cannot_be_imported(self) -> None:
        self.fails("TorchError: PyTorch cannot be imported", "sys.modules['torch'] = None", "sys.modules['torch'] = torch")

    def test_cuda_in_use(self) -> None:
        in_use = "TorchError: CUDA is in use already: call symmalloc.install() right after `import torch`"
        self.fails(in_use, "torch.cuda.is_initialized = lambda: True", "torch.cuda.is_initialized = lambda: False")
        # An extension used PyTorch's allocator without torch.cuda.
        self.fails(in_use, "os.environ['CUDA_IN_USE'] = '1'", "del os.environ['CUDA_IN_USE']")

    def test_an_invalid_configuration(self) -> None:
        invalid = "InvalidSettings: invalid settings in SYMMALLOC_CONF, or in the text that replaces it: byte 0: unknown key, did you"
        self.fails(invalid, "conf = 'segmens:fixed'", "")
        self.fails(invalid, "conf = None; os.environ['SYMMALLOC_CONF'] = 'segmens:fixed'", "")

    def test_a_cached_class_that_cannot_be_loaded(self) -> None:
        self.assertEqual(self.install(""), "installed\n")
        (self.work / "installed").unlink()
        (library,) = self.cache.rglob("*.so")
        for contents, problem in ((b"no library", "file too short"), (b"no library" * 100, "invalid ELF header")):
            library.write_bytes(pytorch_class.sealed(contents))
            removed = f"({problem}): it was removed, and the next install() recompiles it\n"
            self.fails(f"TorchError: {library} cannot be loaded {removed}", "", f"assert not Path({str(library)!r}).exists()")

    def test_a_class_in_the_package_that_cannot_be_loaded(self) -> None:
        broken = "path = pytorch_class.COMPILED / pytorch_class.shipped_name(torch); path.parent.mkdir(); path.write_text('no library')"
        said = self.install(broken, "path.unlink()")
        self.assertIn("cannot be loaded", said)
        self.assertIn("file too short): reinstall the package\nrepaired\n", said)

    def test_without_any_folder_for_the_class(self) -> None:
        (self.work / "file").write_text("")
        cache = f"os.environ['XDG_CACHE_HOME'] = {str(self.work / 'file')!r}"
        broken = f"{cache}; warnings.simplefilter('ignore'); tempfile.tempdir = {str(self.work / 'nowhere')!r}"
        self.fails("TorchError: no folder for temporary files (", broken, "tempfile.tempdir = None")

    def test_an_unwritable_cache_is_a_warning_and_the_installation_is_complete(self) -> None:
        (self.work / "file").write_text("")
        cache = f"os.environ['XDG_CACHE_HOME'] = {str(self.work / 'file')!r}"
        self.assertEqual(self.install(f"{cache}; warnings.simplefilter('ignore')"), "installed\n")
        (self.work / "installed").unlink()
        unwritable = "UserWarning: no folder can store the compiled class ("
        self.fails(unwritable, f"{cache}; warnings.simplefilter('error')", "warnings.simplefilter('ignore')")

    def test_a_warning_about_unknown_functions_that_is_an_error(self) -> None:
        unknown = "UserWarning: PyTorch 2.11.0 has allocator functions that symmalloc"
        self.fails(unknown, "os.environ['UNKNOWN'] = '1'; warnings.simplefilter('error')", "warnings.simplefilter('ignore')")

    def test_a_class_in_the_package_needs_no_compiler_and_no_cache(self) -> None:
        (self.work / "compiled").mkdir()
        # The name comes from the headers of this PyTorch.
        broken = (
            "import subprocess; path = pytorch_class.COMPILED / pytorch_class.shipped_name(torch); "
            "subprocess.run([os.environ['CXX'], '-o', str(path)], check=True); os.environ['CXX'] = '/no/compiler'"
        )
        self.assertEqual(self.install(broken), "installed\n")
        self.assertFalse(self.cache.exists())
        # A PyTorch with other headers, another version or for another CUDA gets its own class.
        (self.work / "installed").unlink()
        no_compiler = "TorchError: CXX=/no/compiler is not a program"
        for change in ("header.write_text('//')", "torch.__version__ = '2.12.0'", "torch.version.cuda = '12.8'"):
            header, compiler = "header.write_text('')", f"os.environ['CXX'] = {str(self.compiler)!r}"
            self.fails(no_compiler, f"{broken}; {change}", f"{header}; {compiler}")
            shutil.rmtree(self.cache, ignore_errors=True)


if __name__ == "__main__":
    unittest.main()
