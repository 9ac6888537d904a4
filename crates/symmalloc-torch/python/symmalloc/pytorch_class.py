"""The allocator as a PyTorch class: C++ that is compiled once against the installed PyTorch, and cached.

PyTorch's allocators have no stable binary interface, so no wheel can contain a class that fits every version. The first
`install()` for a version compiles `pytorch/allocator.cpp`, which takes some seconds. It stores the result in
`$XDG_CACHE_HOME/symmalloc` (`~/.cache/symmalloc`), under a name derived from PyTorch, compiler and sources. It needs a C++
compiler (`CXX`, or `c++`, `g++`, `clang++`) and CUDA's headers, which PyTorch's wheels include.

A user who can write to that folder controls the code that runs here. `private_folder` opens it, and rejects a folder that another
user can change. The compiler's output is checked and loaded through the same open descriptor, so it cannot be replaced in between.
It ends with a digest of its contents. A file that a crash or a full disk truncated is compiled again, because loading it would end the
process.
Without such a folder, every process compiles into a temporary folder and issues a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import unknown_functions
from .callers import register
from .library import VERSION, library_path
from .private_folder import PrivateFolder, Untrusted, is_private

VARIABLE = "SYMMALLOC_TORCH_CLASS"
"""`auto`: the class if possible. `require`: an error otherwise. `off`: PyTorch's class for pluggable allocators."""

SOURCES = Path(__file__).resolve().parent / "pytorch"
# PyTorch's headers need C++20 from this version on.
CXX20_MINIMUM = (2, 14)
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of PyTorch on which the class ran on a GPU, and against whose headers it is compiled each night."""
FLAGS = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
COMPILE_SECONDS = 300
# A compiled class ends with this mark and the SHA-256 of everything before it. The loader ignores both.
SEAL = b"symmalloc"
# The number of lines of compiler output in an error.
LINES_TOLD = 6


class Unavailable(Exception):
    """The class is unavailable. The text states why and what to do."""


class NoCache(Unavailable):
    """No folder can store the compiled class, so every process compiles it. The text states why and what to do."""


def mode() -> str:
    """Returns the mode in the environment. Raises `Unavailable` for an unknown value."""
    value = os.environ.get(VARIABLE, "auto").strip() or "auto"
    if value not in ("auto", "require", "off"):
        raise Unavailable(f"{VARIABLE}={value!r}: use auto, require or off")
    return value


def install(torch: Any) -> None:
    """Installs the class as PyTorch's allocator. Raises `Unavailable` on failure and leaves PyTorch unchanged."""
    try:
        with _cache() as folder:
            _install_from(torch, folder)
    except NoCache as why:
        _install_uncached(torch, why)


def place(torch: Any) -> tuple[Path, str]:
    """Returns the path of the compiled class for this PyTorch, for messages, and its compiler. The file need not exist.

    Raises `Unavailable`, and `NoCache` if `install()` compiles in every process.
    """
    compiler = _compiler()
    with _cache() as folder:
        return folder.path / _name(torch, compiler), compiler


def built(torch: Any, folder: PrivateFolder) -> tuple[int, str]:
    """Returns an open descriptor of the compiled class and its name in the folder. Compiles it if there is none.

    Raises `Unavailable`.
    """
    compiler = _compiler()
    name = _name(torch, compiler)
    library = _opened(folder, name)
    if library is None:
        with _alone(folder, f"{name}.lock"):
            # Another rank may have been faster.
            library = _opened(folder, name)
            if library is None:
                library = _compile(torch, compiler, folder, name)
    return library, name


def _install_uncached(torch: Any, why: NoCache) -> None:
    """Compiles into a temporary folder, and removes it after loading. A loaded library needs no file."""
    warnings.warn(f"{why}. This process compiles the allocator for itself", stacklevel=5)
    with _temporary_folder() as path:
        # The folder is new and empty. If another user replaced it, the check below fails.
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with PrivateFolder(descriptor) as folder:
            if not is_private(os.fstat(descriptor)):
                raise Unavailable(f"another user replaced {path}: set TMPDIR or XDG_CACHE_HOME to a private folder")
            _install_from(torch, folder)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="symmalloc-")
    except OSError as error:
        raise Unavailable(f"no folder for temporary files ({error}): set XDG_CACHE_HOME or TMPDIR to a private folder") from error


def _install_from(torch: Any, folder: PrivateFolder) -> None:
    library, name = built(torch, folder)
    # Not /proc/self: PyTorch passes the path to a child process that resolves C++ frames.
    opened, is_loaded = f"/proc/{os.getpid()}/fd/{library}", False
    try:
        # The class resolves the library's functions from the global scope.
        ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)
        compiled = ctypes.CDLL(opened)
        is_loaded = True
        status = compiled.symmalloc_install_class()
    except (OSError, AttributeError) as error:
        with suppress(OSError):
            folder.unlink(name)
        message = str(error).replace(f"{opened}: ", "")
        path = folder.path / name
        raise Unavailable(f"{path} cannot be loaded ({message}): it was removed, and the next install() recompiles it") from error
    finally:
        # The loader identifies a library by its path. The descriptor number of a loaded one must not be reused.
        if not is_loaded:
            os.close(library)
    if status != 0:
        raise Unavailable("PyTorch has used CUDA already")
    register(compiled)
    _warn_of_unknown(torch, compiled)


def _warn_of_unknown(torch: Any, compiled: ctypes.CDLL) -> None:
    """Warns about functions of this PyTorch that raise, if any."""
    function = compiled.symmalloc_unknown_functions
    function.restype = ctypes.c_char_p
    if names := function().decode():
        warnings.warn(
            f"PyTorch {torch.__version__} has allocator functions that symmalloc {VERSION} does not know: {names}. They raise "
            f"NotImplementedError when they are called; everything else works. A newer symmalloc may have them: "
            f"pip install --upgrade symmalloc. Tested versions of PyTorch: {', '.join(TESTED)}",
            stacklevel=5,
        )


def _opened(folder: PrivateFolder, name: str) -> int | None:
    """Opens a compiled class.

    Returns `None` if it is missing or incomplete, or if another user may have created it or can write it.
    """
    try:
        library = folder.file(name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    if _is_ours(os.fstat(library)) and _is_whole(_contents(library)):
        return library
    os.close(library)
    return None


def sealed(contents: bytes) -> bytes:
    """Returns a compiled class with its digest."""
    return contents + SEAL + hashlib.sha256(contents).digest()


def _is_whole(contents: bytes) -> bool:
    size = len(contents) - len(sealed(b""))
    return size >= 0 and sealed(contents[:size]) == contents


def _contents(library: int) -> bytes:
    """Returns the contents of an open file; empty if they cannot be read."""
    try:
        with open(library, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return b""


def _is_ours(status: os.stat_result) -> bool:
    """Returns `True` for a regular file with a single link that only this user or root can write."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and is_private(status)


def _compile(torch: Any, compiler: str, folder: PrivateFolder, name: str) -> int:
    """Compiles the class and renames it into place, so other ranks see the whole file or none. Returns its open descriptor."""
    message = ""
    for standard in _standards(torch):
        temporary = f".{secrets.token_hex(8)}.so"
        try:
            message = _compiled(torch, compiler, standard, folder, temporary)
            if not message:
                return _kept(folder, temporary, name)
        except OSError as error:
            message = str(error)
        finally:
            with suppress(OSError):
                folder.unlink(temporary)
    lines = [line for line in message.splitlines() if "error" in line] or message.splitlines()
    told = "\n  ".join(lines[:LINES_TOLD])
    raise Unavailable(f"{compiler} cannot compile the class for PyTorch {torch.__version__}:\n  {told}")


def _kept(folder: PrivateFolder, temporary: str, name: str) -> int:
    """Completes the compiler's output, renames it, and returns its open descriptor. Raises `OSError`."""
    _seal(folder, temporary)
    library = folder.file(temporary, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not _is_ours(os.fstat(library)) or not _is_whole(_contents(library)):
            raise OSError(f"{folder.path / temporary} changed while it was written")
        folder.replace(temporary, name)
    except BaseException:
        os.close(library)
        raise
    return library


def _seal(folder: PrivateFolder, temporary: str) -> None:
    """Appends the digest, and waits until the file is on the disk: a crash after the rename leaves the whole file. Raises `OSError`."""
    file = folder.file(temporary, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.fchmod(file, 0o700)
        if not _is_ours(os.fstat(file)):
            raise OSError(f"{folder.path / temporary} is not a regular file of this user")
        contents = _contents(file)
        os.lseek(file, 0, os.SEEK_END)
        with open(file, "wb", closefd=False) as writer:
            writer.write(sealed(contents)[len(contents) :])
        os.fsync(file)
    finally:
        os.close(file)


def _compiled(torch: Any, compiler: str, standard: str, folder: PrivateFolder, output: str) -> str:
    """Compiles to a file in the folder. Functions that the class lacks throw. Returns the compiler's errors; "" on success."""
    command = [compiler, *FLAGS, standard, str(SOURCES / "allocator.cpp"), *_includes(torch), "-o", output]
    message = _run([*command, *_libraries(torch)], folder)
    if not message:
        return ""
    try:
        functions = unknown_functions.find(message)
    except unknown_functions.Unreadable as error:
        return f"error: {error}"
    if not functions:
        return message
    return _run([*command, *unknown_functions.macros(functions), *_libraries(torch)], folder)


def _run(command: list[str], folder: PrivateFolder) -> str:
    """Runs a compiler. Returns its output if it fails; an empty text otherwise."""
    try:
        # The compiler starts in the open folder, so no path can redirect it.
        run = subprocess.run(
            command, cwd=f"/proc/self/fd/{folder.descriptor}", env=os.environ | {"LC_ALL": "C"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=COMPILE_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    return "" if run.returncode == 0 else run.stdout or f"error: {command[0]} ended with {run.returncode}"


def _standards(torch: Any) -> tuple[str, ...]:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return ("-std=c++20",) if version >= CXX20_MINIMUM else ("-std=c++17", "-std=c++20")


def _compiler() -> str:
    if given := os.environ.get("CXX"):
        if found := shutil.which(given):
            return os.path.abspath(found)
        raise Unavailable(f"CXX={given} is not a program on the PATH: set CXX to a C++ compiler")
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return os.path.abspath(found)
    raise Unavailable("there is no C++ compiler on the PATH: install g++ or clang++, or set CXX")


def _name(torch: Any, compiler: str) -> str:
    return f"torch-{torch.__version__.replace('/', '_')}-{_key(torch, compiler)}.so"


def _key(torch: Any, compiler: str) -> str:
    """Returns a hash of all inputs of the compilation."""
    parts = hashlib.sha256()
    real = os.stat(compiler)
    parts.update(repr((VERSION, torch.__version__, torch.version.git_version, FLAGS)).encode())
    parts.update(repr((os.path.realpath(compiler), real.st_size, real.st_mtime_ns)).encode())
    # The library's size distinguishes builds of the same version.
    parts.update(repr(os.stat(_torch_folder(torch) / "lib" / "libc10_cuda.so").st_size).encode())
    for source in [*sorted(SOURCES.rglob("*.[ch]*")), _header() / "symmalloc.h"]:
        parts.update(source.read_bytes())
    return parts.hexdigest()[:16]


def _torch_folder(torch: Any) -> Path:
    return Path(torch.__file__).resolve().parent


def _header() -> Path:
    """Returns the folder of the library's header: in the package, or in the checkout that contains it."""
    for folder in (SOURCES, Path(__file__).resolve().parents[2] / "include"):
        if (folder / "symmalloc.h").is_file():
            return folder
    raise Unavailable(f"symmalloc.h is missing in {SOURCES}: reinstall the package")


def _includes(torch: Any) -> list[str]:
    cuda = _cuda_headers(torch)
    # The wheels of CUDA's headers lack some headers that `cuda_runtime.h` includes. Stubs replace these.
    ours = [] if (cuda / "crt" / "host_defines.h").is_file() else ["-isystem", str(SOURCES / "cuda")]
    return [f"-I{_header()}", *ours, "-isystem", str(_torch_folder(torch) / "include"), "-isystem", str(cuda)]


def _cuda_headers(torch: Any) -> Path:
    site = _torch_folder(torch).parent
    major = str(torch.version.cuda).split(".")[0]
    folders = [Path(os.environ[name]).absolute() / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [site / "nvidia" / f"cu{major}" / "include", site / "nvidia" / "cuda_runtime" / "include"]
    folders += [Path("/usr/local/cuda/include"), Path(f"/usr/local/cuda-{torch.version.cuda}/include")]
    # These are the folders of Linux distributions and CUDA's conda packages.
    folders += [Path(os.environ.get("CONDA_PREFIX", "/usr")).absolute() / "targets/x86_64-linux/include", Path("/usr/include")]
    for folder in folders:
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise Unavailable("CUDA's headers are missing: pip install nvidia-cuda-runtime, or set CUDA_HOME")


def _libraries(torch: Any) -> list[str]:
    """Returns the files of PyTorch's libraries, CUDA's runtime and the C++ library, all of which are loaded already.

    Without the C++ library's file, a compiler that has only a static one links a copy into the class. The copy has different
    locales and facets than the one that PyTorch uses.
    """
    folder = _torch_folder(torch) / "lib"
    return [str(folder / "libc10.so"), str(folder / "libc10_cuda.so"), *_loaded("libcudart.so"), *_loaded("libstdc++.so")]


def _loaded(name: str) -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if f"/{name}" in line}
    return sorted(path for path in paths if os.path.isfile(path))[:1]


def _cache() -> PrivateFolder:
    """Opens the folder of compiled classes. Raises `NoCache`."""
    path = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not path.is_absolute():
        path = Path(os.path.expanduser("~")) / ".cache"
    if not path.is_absolute():
        raise _no_cache("this user has no home folder")
    try:
        return PrivateFolder.open(path / "symmalloc")
    except (Untrusted, OSError) as why:
        raise _no_cache(why) from why


def _no_cache(why: object) -> NoCache:
    return NoCache(f"no folder can store the compiled class ({why}): set XDG_CACHE_HOME to a folder that only you can write")


@contextmanager
def _alone(folder: PrivateFolder, name: str) -> Iterator[None]:
    """Lets one rank compile while the others wait. If the file system does not support locks, each rank compiles."""
    import fcntl

    try:
        file = folder.file(name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _no_cache(f"{folder.path / name} cannot be created: {error.strerror}") from error
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
        with suppress(OSError):
            folder.unlink(name)
