"""Stand-ins for CUDA's libraries, with which a real PyTorch runs without a GPU: `tests --stub ... --stand-ins HEADERS`.

PyTorch's wheel links against a dozen of CUDA's libraries. Tests of an allocator need only the runtime, which is
`tests/cxx/cudart.c` over the stub of libcuda. This module builds the other libraries, with every function that PyTorch imports
from them. These functions have no effect. Tensors can be allocated and freed, and streams, events, captures and processes work,
but kernels compute nothing.

A PyTorch without its dependencies is sufficient (`pip install --no-deps torch`, then the packages that `import torch` misses),
with the headers of `nvidia-cuda-runtime`.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "tests" / "cxx"
CLASS = Path(__file__).resolve().parents[1] / "symmalloc" / "pytorch"
SYSTEM = ("libc.so", "libm.so", "libdl.", "libpthread.", "librt.", "ld-linux", "libstdc++", "libgcc_s", "libz.so", "libcuda.so")
# Prefixes of functions in libraries without symbol versions.
PREFIXES = {"libcudnn": "cudnn", "libcufile": "cuFile", "libcurand": "curand", "libcusparseLt": "cusparseLt", "libnccl": "nccl"}


def make(folder: Path, cuda_headers: Path) -> None:
    """Builds all stand-ins in a folder that contains the stub of libcuda."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    libraries = sorted((Path(spec.origin).parent / "lib").glob("*.so*"))
    versioned, plain, needed = _asked_for(libraries)
    for name in sorted(needed):
        if name.startswith("libcudart"):
            _runtime(folder, name, cuda_headers)
        else:
            _empty(folder, name, versioned, plain)


def _asked_for(libraries: list[Path]) -> tuple[dict[str, set[str]], set[str], set[str]]:
    """Returns symbols by version, unversioned symbols that none of the libraries defines, and missing libraries."""
    versioned: dict[str, set[str]] = defaultdict(set)
    undefined, defined, needed = set(), set(), set()
    for library in libraries:
        for line in _output("nm", "-D", str(library)).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.replace("@@", "@").partition("@")
            if kind not in ("U", "w"):
                defined.add(name)
            elif version:
                versioned[version].add(name)
            else:
                undefined.add(name)
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-d", str(library))))
    ours = {library.name for library in libraries}
    return versioned, undefined - defined, {name for name in needed - ours if not name.startswith(SYSTEM)}


def _empty(folder: Path, name: str, versioned: dict[str, set[str]], plain: set[str]) -> None:
    stem = name.split(".so")[0]
    named = {version: symbols for version, symbols in versioned.items() if version.split(".so")[0] == stem}
    if stem == "libnvshmem_host":
        named = {version: symbols for version, symbols in versioned.items() if version == "NVSHMEM"}
    prefix = PREFIXES.get(stem)
    free = {symbol for symbol in plain if prefix and symbol.startswith(prefix)}
    functions = set().union(free, *named.values())
    source, versions = folder / "stand_in.c", folder / "stand_in.map"
    source.write_text("".join(f"int {symbol}(void) {{ return 1; }}\n" for symbol in sorted(functions)))
    versions.write_text("".join(f"{version} {{ {'; '.join(sorted(symbols))}; }};\n" for version, symbols in named.items()))
    script = [f"-Wl,--version-script={versions}"] if named else []
    _compile(str(source), "-o", str(folder / name), f"-Wl,-soname,{name}", *script)


def _runtime(folder: Path, name: str, cuda_headers: Path) -> None:
    versions = folder / "stand_in.map"
    versions.write_text(f"{name} {{ *; }};\n")
    complete = (cuda_headers / "crt" / "host_defines.h").is_file()
    headers = [] if complete else [f"-I{CLASS / 'cuda'}"]
    _compile(
        *headers, f"-I{cuda_headers}", str(SOURCES / "cudart.c"), str(SOURCES / "cudart_refused.c"), "-o", str(folder / name),
        f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}", f"-L{folder}", "-lcuda",
    )  # fmt: skip


def _compile(*arguments: str) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-fno-builtin", *arguments], check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
