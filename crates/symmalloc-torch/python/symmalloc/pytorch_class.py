"""The allocator as a PyTorch class: C++ that is compiled for a version of PyTorch.

PyTorch's allocators have no stable binary interface, so a class fits only the PyTorch with whose headers it was compiled.

| where | for |
|---|---|
| `pytorch/compiled` in the package | the versions in `SHIPPED`, compiled in the release. A file's name contains a digest of PyTorch's headers |
| `$XDG_CACHE_HOME/symmalloc` (`~/.cache/symmalloc`) | all others, compiled by the first `install()`, in some seconds |

Compiling needs a C++ compiler (`CXX`, or `c++`, `g++`, `clang++`) and CUDA's headers, which PyTorch's wheels include. The name of a
cached file is derived from PyTorch, compiler and sources.

A user who can write to the cache controls the code that runs here. `private_folder` opens it, and rejects a folder that another
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import unknown_functions
from .callers import register
from .errors import TorchError
from .library import VERSION, encoded, failure, library_path
from .private_folder import PrivateFolder, Untrusted, is_private

SOURCES = Path(__file__).resolve().parent / "pytorch"
COMPILED = SOURCES / "compiled"
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of PyTorch on which the class ran on a GPU, and against whose headers it is compiled each night."""
MINIMUM = TESTED[0]
"""The oldest version of PyTorch whose interface the class supports."""
SHIPPED = TESTED[-2:]
"""The versions for which wheels for x86-64 contain the class."""
# PyTorch's headers need C++20 from this version on.
CXX20_MINIMUM = (2, 14)
FLAGS = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
COMPILE_SECONDS = 300
# A compiled class ends with this mark and the SHA-256 of everything before it. The loader ignores both.
SEAL = b"symmalloc"
# The number of lines of compiler output in an error.
LINES_TOLD = 6
# The folders of PyTorch's headers on which the class depends.
HEADERS = ("c10", "torch/headeronly")
IN_USE = (
    "CUDA is in use already: call symmalloc.install() right after `import torch`, before the first CUDA tensor, "
    "torch.cuda.set_device() or init_process_group()"
)


class NoCache(TorchError):
    """No folder can store the compiled class, so every process compiles it. The text states why and what to do."""


def install(torch: Any, conf: str | None) -> None:
    """Makes the class PyTorch's allocator, with this configuration; None: that of the environment.

    Raises `TorchError`, and `InvalidSettings` for an invalid configuration, and leaves PyTorch unchanged.
    """
    compiled = _load(torch)
    # A program may turn warnings into errors, so this precedes the installation.
    _warn_of_unknown(torch, compiled)
    status = compiled.symmalloc_install_class(encoded(conf))
    if status < 0:
        raise TorchError(IN_USE)
    if status > 0:
        raise failure("torch_configure", status)
    register(compiled)


def version(torch: Any) -> tuple[int, ...]:
    """Returns PyTorch's major and minor version."""
    return _version(torch.__version__)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def check(torch: Any) -> None:
    """Raises `TorchError` for a PyTorch that no class fits: one that is too old, without CUDA, or incomplete."""
    if version(torch) < _version(MINIMUM):
        raise TorchError(f"PyTorch {torch.__version__} is not supported: install {MINIMUM} or later")
    if torch.version.cuda is None or not hasattr(torch._C, "_cuda_customAllocator"):
        raise TorchError(f"PyTorch {torch.__version__} was built without CUDA: install a CUDA build")
    for name in ("lib/libc10.so", "lib/libc10_cuda.so"):
        if not (file := _torch_folder(torch) / name).is_file():
            raise TorchError(f"{file} is missing: reinstall PyTorch")


def place(torch: Any) -> str:
    """Returns how `install()` obtains the class, for messages. Raises `TorchError` if it cannot."""
    if (path := shipped(torch)) is not None:
        return f"in the package, {path}"
    compiler = _compiler()
    _includes(torch)
    try:
        with _cache() as folder:
            path = folder.path / _name(torch, compiler)
    except NoCache as why:
        return f"install() compiles it in every process: {why}"
    return f"compiled, {path}" if path.is_file() else f"install() compiles it once, with {compiler}, to {path}"


def shipped(torch: Any) -> Path | None:
    """Returns the class in this package that was compiled with the headers of this PyTorch; None: there is none."""
    path = COMPILED / shipped_name(torch)
    return path if path.is_file() else None


def shipped_name(torch: Any) -> str:
    """Returns the file name of a class in the package: one for each version, CUDA's major version, and contents of PyTorch's headers."""
    include = _torch_folder(torch) / "include"
    digest = hashlib.sha256()
    for path in sorted(path for folder in HEADERS for path in (include / folder).rglob("*.h")):
        # Patch releases differ in this file alone, and the class depends on the numbers that are in the name.
        if path.name != "version.h":
            header = path.read_bytes()
            digest.update(f"{path.relative_to(include)}\0{len(header)}\0".encode() + header)
    numbers = ".".join(map(str, version(torch)))
    return f"torch-{numbers}-cuda{_cuda_major(torch)}-{digest.hexdigest()[:16]}.so"


def _load(torch: Any) -> ctypes.CDLL:
    """Loads the class for this PyTorch. Raises `TorchError`."""
    # The class resolves the library's functions from the global scope.
    ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)
    if (path := shipped(torch)) is not None:
        try:
            return _class_in(str(path))
        except (OSError, AttributeError) as error:
            raise TorchError(f"{path} cannot be loaded ({error}): reinstall the package") from error
    try:
        with _cache() as folder:
            return _load_from(torch, folder)
    except NoCache as why:
        return _load_uncached(torch, why)


def _class_in(path: str) -> ctypes.CDLL:
    """Loads a library, and checks that it is a class. Raises `OSError` and `AttributeError`."""
    compiled = ctypes.CDLL(path)
    compiled.symmalloc_install_class.argtypes = [ctypes.c_char_p]
    compiled.symmalloc_unknown_functions.restype = ctypes.c_char_p
    return compiled


def built(torch: Any, folder: PrivateFolder) -> tuple[int, str]:
    """Returns an open descriptor of the compiled class and its name in the folder. Compiles it if there is none.

    Raises `TorchError`.
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


def _load_uncached(torch: Any, why: NoCache) -> ctypes.CDLL:
    """Compiles into a temporary folder, and removes it after loading. A loaded library needs no file."""
    warnings.warn(f"{why}. This process compiles the allocator for itself", stacklevel=5)
    with _temporary_folder() as path:
        # The folder is new and empty. If another user replaced it, the check below fails.
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with PrivateFolder(descriptor) as folder:
            if not is_private(os.fstat(descriptor)):
                raise TorchError(f"another user replaced {path}: set TMPDIR or XDG_CACHE_HOME to a private folder")
            return _load_from(torch, folder)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="symmalloc-")
    except OSError as error:
        raise TorchError(f"no folder for temporary files ({error}): set XDG_CACHE_HOME or TMPDIR to a private folder") from error


def _load_from(torch: Any, folder: PrivateFolder) -> ctypes.CDLL:
    library, name = built(torch, folder)
    # Not /proc/self: PyTorch passes the path to a child process that resolves C++ frames.
    opened, is_loaded = f"/proc/{os.getpid()}/fd/{library}", False
    try:
        compiled = _class_in(opened)
        is_loaded = True
        return compiled
    except (OSError, AttributeError) as error:
        with suppress(OSError):
            folder.unlink(name)
        message = str(error).replace(f"{opened}: ", "")
        path = folder.path / name
        raise TorchError(f"{path} cannot be loaded ({message}): it was removed, and the next install() recompiles it") from error
    finally:
        # The loader identifies a library by its path. The descriptor number of a loaded one must not be reused.
        if not is_loaded:
            os.close(library)


def _warn_of_unknown(torch: Any, compiled: ctypes.CDLL) -> None:
    """Warns about functions of this PyTorch that raise, if any."""
    if names := compiled.symmalloc_unknown_functions().decode():
        warnings.warn(
            f"PyTorch {torch.__version__} has allocator functions that symmalloc {VERSION} does not know: {names}. They raise "
            f"NotImplementedError when they are called; everything else works. A newer symmalloc may have them: "
            f"pip install --upgrade symmalloc. Tested versions of PyTorch: {', '.join(TESTED)}",
            stacklevel=4,
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
    remedy = f"set CXX to a compiler for C++{_standards(torch)[-1][-2:]}" + _without_compiler()
    raise TorchError(f"{compiler} cannot compile the allocator for PyTorch {torch.__version__}:\n  {told}\n{remedy}")


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


def compile_command(torch: Any, compiler: str, standard: str) -> list[str]:
    """Returns the command without its output and its libraries. Raises `TorchError` if headers are missing."""
    return [compiler, *FLAGS, standard, str(SOURCES / "allocator.cpp"), *_includes(torch)]


def _compiled(torch: Any, compiler: str, standard: str, folder: PrivateFolder, output: str) -> str:
    """Compiles to a file in the folder. Functions that the class lacks throw. Returns the compiler's errors; "" on success."""
    command = [*compile_command(torch, compiler, standard), "-o", output]
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
    return ("-std=c++20",) if version(torch) >= CXX20_MINIMUM else ("-std=c++17", "-std=c++20")


def _compiler() -> str:
    if given := os.environ.get("CXX"):
        if found := shutil.which(given):
            return os.path.abspath(found)
        raise TorchError(f"CXX={given} is not a program on the PATH: set CXX to a C++ compiler{_without_compiler()}")
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return os.path.abspath(found)
    raise TorchError(f"there is no C++ compiler on the PATH: install g++ or clang++, or set CXX{_without_compiler()}")


def _without_compiler() -> str:
    """Returns the remedy that needs no compiler; "" if this package contains no class."""
    versions = sorted({path.name.split("-")[1] for path in COMPILED.glob("torch-*.so")})
    return f", or install a PyTorch that needs none: {', '.join(versions)}" if versions else ""


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


def _cuda_major(torch: Any) -> str:
    return str(torch.version.cuda).split(".")[0]


def _header() -> Path:
    """Returns the folder of the library's header: in the package, or in the checkout that contains it."""
    for folder in (SOURCES, Path(__file__).resolve().parents[2] / "include"):
        if (folder / "symmalloc.h").is_file():
            return folder
    raise TorchError(f"symmalloc.h is missing in {SOURCES}: reinstall the package")


def _includes(torch: Any) -> list[str]:
    include = _torch_folder(torch) / "include"
    if not (header := include / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        raise TorchError(f"{header} is missing: reinstall PyTorch")
    cuda = _cuda_headers(torch)
    # The wheels of CUDA's headers lack some headers that `cuda_runtime.h` includes. Stubs replace these.
    ours = [] if (cuda / "crt" / "host_defines.h").is_file() else ["-isystem", str(SOURCES / "cuda")]
    return [f"-I{_header()}", *ours, "-isystem", str(include), "-isystem", str(cuda)]


def _cuda_headers(torch: Any) -> Path:
    site = _torch_folder(torch).parent
    folders = [Path(os.environ[name]).absolute() / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [site / "nvidia" / f"cu{_cuda_major(torch)}" / "include", site / "nvidia" / "cuda_runtime" / "include"]
    folders += [Path("/usr/local/cuda/include"), Path(f"/usr/local/cuda-{torch.version.cuda}/include")]
    # These are the folders of Linux distributions and CUDA's conda packages.
    folders += [Path(os.environ.get("CONDA_PREFIX", "/usr")).absolute() / "targets/x86_64-linux/include", Path("/usr/include")]
    for folder in folders:
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise TorchError("CUDA's headers are missing: pip install nvidia-cuda-runtime, or set CUDA_HOME")


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
