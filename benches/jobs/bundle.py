"""Packs an engine's wheels so small that they can be carried to a machine with GPUs, and unpacks them there.

    python bundle.py pack WHEELS PARTS --arch 90       on a machine with a registry; PARTS is a folder for parts of 49 MB
    python bundle.py unpack PARTS SITE                 on the machine with the GPUs; SITE is a folder for PYTHONPATH

`pack` unpacks the wheels, removes the code for other GPUs from fat binaries, strips libraries, leaves out what `UNUSED` names,
and compresses the rest: vLLM 0.33 with PyTorch 2.14, 2.6 GB, becomes 0.3 GB. `unpack` verifies the checksum, links the machine's
CUDA libraries next to the bundle's, and compiles bytecode. Both need `tar` and `xz`, and `pack` needs `strip`.

To fill the folder of wheels, where a registry can be reached:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \\
        $(for v in 39 38 34 31 28 27 26 24 18 17 12; do echo --platform manylinux_2_${v}_x86_64; done) \\
        --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 -d WHEELS -r vllm_wheels/0.33.0.txt
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PART_BYTES = 49_000_000
LARGE_BYTES = 1 << 20
"""Smaller files are neither pruned nor stripped."""
UNUSED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/third_party/deep_gemm", "triton/backends/amd/lib", "triton/instrumentation",
    "triton/backends/nvidia/lib/cupti*", "triton/backends/nvidia/bin/ptxas-blackwell", "triton/backends/nvidia/bin/cuobjdump",
    "triton/backends/nvidia/bin/nvdisasm", "triton/_C/libproton.so", "torch/bin/protoc*", "pycountry/locales", "jedi/third_party",
    "sgl_kernel/flash_ops*", "sgl_kernel/flashmla_ops*", "sgl_kernel/infllm_ops*", "sgl_kernel/sm100", "sglang/multimodal_gen",
    "sglang/srt/rust_extensions/*.so", "sglang/kernels/jit/benchmark",
)  # fmt: skip
"""What the jobs do not import."""
EDITS = {"sglang/srt/layers/dual_gemm.py": ("        if not is_cuda():", "        if True:  # without nvidia-cutlass-dsl")}
"""Lines that import what the lists of wheels leave out, and their replacements. They change kernels for all allocators alike."""
CHECKSUM = "SHA256"

# A fat binary is a container of entries. Each entry has the code of one kind for one architecture.
CONTAINER_MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""The magic number, a version, the size of this header, and the size of the entries."""
ENTRY = struct.Struct("<HHIQ12xI")
"""The kind, a version, the size of the header, and the size of the code; then the architecture."""
PTX, MACHINE_CODE = 1, 2
SECTIONS = (".nv_fatbin", "__nv_relfatbin")


class Broken(Exception):
    """A file is not what it should be. The text states which, and what to do."""


@dataclass(frozen=True)
class Entry:
    """The code of a fat binary for one architecture."""

    kind: int
    arch: int
    code: bytes

    def __len__(self) -> int:
        return len(self.code)


def sections(library: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Returns the start and the end of each section with fat binaries in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 40)
    count, names_at = struct.unpack_from("<HH", library, 60)
    headers = [struct.unpack_from("<I20xQQ", library, table + 64 * at) for at in range(count)]
    names = headers[names_at][1]
    for name, start, size in headers:
        end = library.find(b"\0", names + name)
        if library[names + name : end].decode() in SECTIONS:
            yield start, start + size


def entries(container: bytes, name: str) -> list[Entry]:
    """Splits the entries of a container. Raises `Broken`."""
    found, at = [], 0
    while at < len(container):
        if at + ENTRY.size > len(container):
            raise Broken(f"{name}: a fat binary ends within an entry: leave the library as it is with --keep")
        kind, _, header_bytes, code_bytes, arch = ENTRY.unpack_from(container, at)
        end = at + header_bytes + code_bytes
        if header_bytes < ENTRY.size or end > len(container):
            raise Broken(f"{name}: an entry of a fat binary has an unknown layout: leave the library as it is with --keep")
        found.append(Entry(kind, arch, container[at:end]))
        at = end
    return found


def for_arch(found: list[Entry], arch: int) -> list[Entry]:
    """Returns the machine code for an architecture; without it PTX that can be compiled for it, or else the smallest entry."""
    code = [entry for entry in found if entry.kind == MACHINE_CODE and entry.arch == arch]
    return code or [entry for entry in found if entry.kind == PTX and entry.arch <= arch] or sorted(found, key=len)[:1]


def prune(path: Path, arch: int) -> int:
    """Replaces the code for other architectures with zeros. Returns its size. The file keeps its size. Raises `Broken`."""
    removed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as library:
        if library[:5] != b"\x7fELF\x02":
            return 0
        for start, end in sections(library):
            at = start
            while at + CONTAINER.size <= end:
                magic, _, header_bytes, size = CONTAINER.unpack_from(library, at)
                if magic != CONTAINER_MAGIC:
                    if any(library[at : at + 8]):
                        raise Broken(f"{path}: no fat binary at {at:#x}: leave the library as it is with --keep")
                    at += 8
                    continue
                begin = at + header_bytes
                kept = b"".join(entry.code for entry in for_arch(entries(library[begin : begin + size], path.name), arch))
                struct.pack_into("<Q", library, at + 8, len(kept))
                library[begin : begin + size] = kept + bytes(size - len(kept))
                removed += size - len(kept)
                at = (begin + size + 7) // 8 * 8
    return removed


def unpack_wheels(wheels: list[Path], site: Path) -> None:
    """Unpacks wheels as pip installs them, without scripts."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
            # `extractall` ignores the modes. Triton runs programs of its wheel.
            for entry in archive.infolist():
                if entry.external_attr >> 16 & 0o111 and not entry.is_dir():
                    (site / entry.filename).chmod(0o755)
    for data in list(site.glob("*.data")):
        for folder in ("purelib", "platlib"):
            if (data / folder).is_dir():
                shutil.copytree(data / folder, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def slim(site: Path, arch: int, kept: list[str]) -> None:
    """Removes what the jobs do not use. Raises `Broken`."""
    for pattern in UNUSED:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, (line, replacement) in EDITS.items():
        path = site / name
        if path.exists():
            text = path.read_text()
            if text.count(line) != 1:
                raise Broken(f"{name} has changed: adapt EDITS in bundle.py")
            path.write_text(text.replace(line, replacement))
    libraries = [path for path in site.rglob("*.so*") if path.is_file() and path.stat().st_size >= LARGE_BYTES]
    for library in libraries:
        if any(library.match(pattern) for pattern in kept):
            continue
        removed = prune(library, arch)
        subprocess.run(["strip", "--strip-unneeded", str(library)], stderr=subprocess.DEVNULL, check=False)
        print(f"{library.relative_to(site)}: {removed / 1e6:.0f} MB of code for other GPUs removed", flush=True)


def pack(wheels: Path, parts: Path, arch: int, kept: list[str]) -> None:
    """Writes the bundle. Raises `Broken`."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise Broken(f"{wheels} has no wheels: fill it as the documentation of this file describes")
    parts.mkdir(parents=True, exist_ok=True)
    if any(parts.iterdir()):
        raise Broken(f"{parts} is not empty: empty it, or give another folder")
    with tempfile.TemporaryDirectory(dir=parts.parent) as folder:
        site = Path(folder)
        unpack_wheels(found, site)
        slim(site, arch, kept)
        digest, number = hashlib.sha256(), 0
        with (
            subprocess.Popen(["tar", "cf", "-", "--sort=name", "-C", str(site), "."], stdout=subprocess.PIPE) as tar,
            subprocess.Popen(["xz", "-T0", "-5"], stdin=tar.stdout, stdout=subprocess.PIPE) as xz,
        ):
            assert tar.stdout is not None and xz.stdout is not None
            tar.stdout.close()
            while part := xz.stdout.read(PART_BYTES):
                (parts / f"site.tar.xz.{number:03}").write_bytes(part)
                digest.update(part)
                number += 1
        if xz.returncode or tar.returncode:
            raise Broken("tar or xz failed, see above: is the disk full?")
    (parts / CHECKSUM).write_text(digest.hexdigest())
    print(f"{number} parts in {parts}")


def unpack(parts: Path, site: Path) -> None:
    """Unpacks a bundle. Raises `Broken`."""
    pieces, digest = sorted(parts.glob("site.tar.xz.*")), hashlib.sha256()
    if not pieces or not (parts / CHECKSUM).is_file():
        raise Broken(f"{parts} has no bundle: carry all parts and {CHECKSUM}")
    site.mkdir(parents=True, exist_ok=True)
    # `xz` may be missing where Python is not.
    xz = ["xz", "-dc", "-T0"] if shutil.which("xz") else [sys.executable, "-c", _DECOMPRESS]
    with (
        subprocess.Popen(xz, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as decompressed,
        subprocess.Popen(["tar", "xf", "-", "-C", str(site)], stdin=decompressed.stdout) as tar,
    ):
        assert decompressed.stdin is not None and decompressed.stdout is not None
        decompressed.stdout.close()
        with suppress(BrokenPipeError), decompressed.stdin:
            for piece in pieces:
                content = piece.read_bytes()
                digest.update(content)
                decompressed.stdin.write(content)
    if decompressed.returncode or tar.returncode or digest.hexdigest() != (parts / CHECKSUM).read_text():
        raise Broken(f"the parts in {parts} are damaged or incomplete: carry them again")
    link_machine(site)
    compileall.compile_dir(site, quiet=2, workers=0)


_DECOMPRESS = "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)"


def link_machine(site: Path) -> None:
    """Links the machine's CUDA libraries, which are wheels as well, where the bundle has no newer ones."""
    machine = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for folder in machine.glob("*/"):
        link = site / "nvidia" / folder.name
        if not link.exists():
            link.parent.mkdir(exist_ok=True)
            os.symlink(folder, link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    packs = commands.add_parser("pack", help="make a bundle")
    packs.add_argument("wheels", type=Path)
    packs.add_argument("parts", type=Path)
    packs.add_argument("--arch", type=int, default=90, help="the GPU's compute capability, such as 90 for 9.0, the default")
    packs.add_argument("--keep", action="append", default=[], metavar="PATTERN", help="libraries to leave as they are")
    unpacks = commands.add_parser("unpack", help="unpack a bundle")
    unpacks.add_argument("parts", type=Path)
    unpacks.add_argument("site", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "pack":
            pack(arguments.wheels, arguments.parts, arguments.arch, arguments.keep)
        else:
            unpack(arguments.parts, arguments.site)
    except (Broken, OSError) as why:
        sys.exit(f"{type(why).__name__}: {why}")


if __name__ == "__main__":
    main()
