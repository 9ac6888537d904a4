"""The allocator as a class of PyTorch's: C++ that is compiled against the PyTorch that is installed, once, and kept.

PyTorch's allocators have no stable binary form, so no wheel can bring one that fits every PyTorch. `pytorch/allocator.cpp` is
compiled at the first `install()` with a PyTorch, which takes some seconds. From then on it lies in `$XDG_CACHE_HOME/symmalloc`
(`~/.cache/symmalloc`), under a name of PyTorch, compiler and sources. Needed are a C++ compiler (`CXX`, or `c++`, `g++`,
`clang++`) and CUDA's headers, which come with PyTorch's wheels.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .callers import tell
from .library import VERSION, library_path

VARIABLE = "SYMMALLOC_TORCH_CLASS"
"""`auto`: the class where it can be had. `require`: an error where not. `off`: PyTorch's class for pluggable allocators."""

SOURCES = Path(__file__).resolve().parent / "pytorch"
STANDARDS = ("-std=c++17", "-std=c++20")
FLAGS = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
COMPILE_SECONDS = 300
# How much of what a compiler says is told.
LINES_TOLD = 6


class Unavailable(Exception):
    """The class cannot be had here; the text says why and what to do."""


def mode() -> str:
    """What the environment asks for. Raises `Unavailable` for what it does not know."""
    value = os.environ.get(VARIABLE, "auto").strip() or "auto"
    if value not in ("auto", "require", "off"):
        raise Unavailable(f"{VARIABLE}={value!r}: use auto, require or off")
    return value


def install(torch: Any) -> None:
    """Makes the class PyTorch's allocator. Raises `Unavailable`; PyTorch is as it was then."""
    path = built(torch)
    # The class finds the library's functions among those that everybody sees.
    ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)
    try:
        compiled = ctypes.CDLL(str(path))
        status = compiled.symmalloc_install_class()
    except (OSError, AttributeError) as error:
        with suppress(OSError):
            path.unlink()
        raise Unavailable(f"{path} cannot be loaded ({error}); it was removed, and is compiled anew next time") from error
    if status != 0:
        raise Unavailable("PyTorch has used CUDA already")
    tell(compiled)


def place(torch: Any) -> tuple[Path, str]:
    """Where the compiled class for this PyTorch lies or would lie, and its compiler. Raises `Unavailable`."""
    compiler = _compiler()
    return _folder() / f"torch-{torch.__version__.replace('/', '_')}-{_key(torch, compiler)}.so", compiler


def built(torch: Any) -> Path:
    """The compiled class for this PyTorch. Compiles it if there is none. Raises `Unavailable`."""
    path, compiler = place(torch)
    if path.is_file():
        return path
    with _alone(path.with_suffix(".lock")):
        # Another rank may have been faster.
        if not path.is_file():
            _compile(torch, compiler, path)
    return path


def _compile(torch: Any, compiler: str, path: Path) -> None:
    """Compiles into place: whoever looks sees the whole file or none."""
    command = [compiler, *FLAGS, str(SOURCES / "allocator.cpp"), *_includes(torch)]
    libraries = _libraries(torch)
    said = ""
    for standard in STANDARDS:
        file, temporary = tempfile.mkstemp(prefix=".", suffix=".so", dir=path.parent)
        os.close(file)
        try:
            run = subprocess.run(
                [*command, standard, "-o", temporary, *libraries],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=COMPILE_SECONDS,
            )  # fmt: skip
            if run.returncode == 0:
                os.chmod(temporary, 0o755)
                os.replace(temporary, path)
                return
            said = run.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        finally:
            with suppress(OSError):
                os.unlink(temporary)
    lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()
    told = "\n  ".join(lines[:LINES_TOLD])
    raise Unavailable(f"{compiler} cannot compile the class for PyTorch {torch.__version__}:\n  {told}")


def _compiler() -> str:
    if given := os.environ.get("CXX"):
        if found := shutil.which(given):
            return found
        raise Unavailable(f"CXX={given} is no program on the PATH")
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise Unavailable("there is no C++ compiler on the PATH: install g++ or clang++, or set CXX")


def _key(torch: Any, compiler: str) -> str:
    """Equal for what gives the same file."""
    parts = hashlib.sha256()
    real = os.stat(compiler)
    parts.update(repr((VERSION, torch.__version__, torch.version.git_version, FLAGS)).encode())
    parts.update(repr((os.path.realpath(compiler), real.st_size, real.st_mtime_ns)).encode())
    # Another build of the same version.
    parts.update(repr(os.stat(_torch_folder(torch) / "lib" / "libc10_cuda.so").st_size).encode())
    for source in [*sorted(SOURCES.rglob("*.[ch]*")), _header() / "symmalloc.h"]:
        parts.update(source.read_bytes())
    return parts.hexdigest()[:16]


def _torch_folder(torch: Any) -> Path:
    return Path(torch.__file__).resolve().parent


def _header() -> Path:
    """The folder of the library's header: in the package, or in the checkout that it runs from."""
    for folder in (SOURCES, Path(__file__).resolve().parents[2] / "include"):
        if (folder / "symmalloc.h").is_file():
            return folder
    raise Unavailable(f"symmalloc.h is missing in {SOURCES}: install the package anew")


def _includes(torch: Any) -> list[str]:
    cuda = _cuda_headers(torch)
    # The wheels of CUDA's headers lack some that a C++ compiler hardly needs.
    ours = [] if (cuda / "crt" / "host_defines.h").is_file() else ["-isystem", str(SOURCES / "cuda")]
    return [f"-I{_header()}", *ours, "-isystem", str(_torch_folder(torch) / "include"), "-isystem", str(cuda)]


def _cuda_headers(torch: Any) -> Path:
    site = _torch_folder(torch).parent
    major = str(torch.version.cuda).split(".")[0]
    folders = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [site / "nvidia" / f"cu{major}" / "include", site / "nvidia" / "cuda_runtime" / "include"]
    folders += [Path("/usr/local/cuda/include"), Path(f"/usr/local/cuda-{torch.version.cuda}/include")]
    # Distributions, and CUDA's packages of conda.
    folders += [Path(os.environ.get("CONDA_PREFIX", "/usr")) / "targets/x86_64-linux/include", Path("/usr/include")]
    for folder in folders:
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise Unavailable("CUDA's headers are missing: pip install nvidia-cuda-runtime, or set CUDA_HOME")


def _libraries(torch: Any) -> list[str]:
    """PyTorch's libraries and CUDA's runtime, as files: they are loaded already, and found by their names then."""
    folder = _torch_folder(torch) / "lib"
    return [str(folder / "libc10.so"), str(folder / "libc10_cuda.so"), *_loaded("libcudart.so")]


def _loaded(name: str) -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if f"/{name}" in line}
    return sorted(path for path in paths if os.path.isfile(path))[:1]


def _folder() -> Path:
    """Where compiled classes are kept: a folder that belongs to this user and that others do not write."""
    places = [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "symmalloc"]
    places.append(Path(tempfile.gettempdir()) / f"symmalloc-{os.getuid()}")
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = place.stat()
        except OSError:
            continue
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(place, os.W_OK):
            return place
    raise Unavailable(f"no folder can be written of {', '.join(map(str, places))}: set XDG_CACHE_HOME")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One rank compiles while the others wait, where the file system can lock; otherwise each compiles, which is as good."""
    import fcntl

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
        with suppress(OSError):
            path.unlink()
