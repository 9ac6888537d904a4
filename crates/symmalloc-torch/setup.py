"""Builds the wheel: cargo builds the libraries and the command line, and setuptools packages them with the Python files.

The package calls a C interface through ctypes, so one wheel fits every Python 3. Its tag names the minimum C library
(`py3-none-manylinux_2_34_x86_64`), which depends on the machine that builds it. `CARGO_TARGET_DIR` is respected.
`SYMMALLOC_CARGO_PROFILE` (default `release`) selects the profile; published wheels are built with `shipped`, which takes longer. To package a
library that was built already, run `SYMMALLOC_LIBRARY=/path/to/libsymmalloc_torch.so pip install ./crates/symmalloc-torch`. The command line
and the library that it preloads are taken from the same folder, if it has them.

`SYMMALLOC_TORCH_CLASSES` names a folder with compiled classes for versions of PyTorch, which `.ci/torch-headers --build` writes. Without
it, the wheel contains none, and the first `install()` compiles the class for any PyTorch.

    package symmalloc   libsymmalloc_torch.so, the library of the package; in pytorch/compiled, the classes
    bin                 symmalloc, the command line
    lib                 libsymmalloc_preload.so, which `symmalloc run` finds there

    checkout  crates/symmalloc-torch/setup.py        the Rust workspace is two folders up
    sdist     setup.py, python/, include/, rust/     the crates that these are made of, and their Cargo.lock
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.install_scripts import install_scripts
from setuptools.command.sdist import sdist

CRATE = Path(__file__).resolve().parent
RUST = CRATE / "rust"
WORKSPACE = RUST if RUST.is_dir() else CRATE.parent.parent
PACKAGES = ("symmalloc-torch", "symmalloc-cli", "symmalloc-preload")
LIBRARY = "libsymmalloc_torch.so"
PROGRAM = "symmalloc"
PRELOAD = "libsymmalloc_preload.so"
HEADER = "symmalloc.h"
# The time of a first build, see docs/measured/speed.md.
EXPECTED = "about 3 minutes on two cores"


def of_workspace(key: str) -> str:
    """Returns a text of the workspace's `[workspace.package]`, which the crates inherit."""
    manifest = WORKSPACE / "Cargo.toml"
    if not manifest.exists():
        raise SystemExit(f"{manifest} is missing: install from a checkout of the whole repository, or from an sdist")
    package = manifest.read_text().split("[workspace.package]", 1)[1]
    return re.search(rf'^{key} = "(.*)"$', package, re.MULTILINE).group(1)


def urls() -> dict[str, str]:
    """Returns the project's addresses: none until it is public."""
    repository = of_workspace("repository")
    return {"Repository": repository} if repository else {}


@functools.cache
def built() -> dict[str, Path]:
    """Runs cargo, and returns the paths of the libraries and the program by name."""
    names = (LIBRARY, PROGRAM, PRELOAD)
    if given := os.environ.get("SYMMALLOC_LIBRARY"):
        beside = {name: Path(given).parent / name for name in names[1:]}
        return {LIBRARY: Path(given)} | {name: path for name, path in beside.items() if path.is_file()}
    if shutil.which("cargo") is None:
        raise SystemExit("cargo is not on the PATH: install Rust (https://rustup.rs), or set SYMMALLOC_LIBRARY")
    command = ["cargo", "build", "--locked", *(word for package in PACKAGES for word in ("-p", package))]
    command += ["--profile", os.environ.get("SYMMALLOC_CARGO_PROFILE", "release")]
    command += ["--message-format", "json-render-diagnostics"]
    progress = terminal() or sys.stderr
    print(f"symmalloc: {' '.join(command[:2])} takes {EXPECTED} the first time", file=progress, flush=True)
    messages = subprocess.run(command, cwd=WORKSPACE, check=True, stdout=subprocess.PIPE, stderr=progress, text=True).stdout
    artifacts = (json.loads(line) for line in messages.splitlines())
    files = [Path(file) for artifact in artifacts for file in artifact.get("filenames", [])]
    return {file.name: file for file in files if file.name in names}


@functools.cache
def classes() -> list[Path]:
    """Returns the compiled classes for the wheel, and prints a note if there are none."""
    given = os.environ.get("SYMMALLOC_TORCH_CLASSES")
    if given is None:
        text = "symmalloc: SYMMALLOC_TORCH_CLASSES is not set, so the wheel has no compiled class: the first install() compiles it"
        print(text, file=terminal() or sys.stderr, flush=True)
        return []
    found = sorted(Path(given).glob("torch-*.so"))
    if not found:
        raise SystemExit(f"SYMMALLOC_TORCH_CLASSES={given} contains no torch-*.so: build them with .ci/torch-headers, or unset it")
    return found


def terminal() -> TextIO | None:
    """Opens the user's terminal if standard error is something else: without -v, pip hides what a build prints there."""
    if sys.stderr.isatty():
        return None
    try:
        return open("/dev/tty", "w")  # noqa: SIM115, closed when the process ends
    except OSError:
        return None


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        # An editable install runs from the sources, so the library is copied there.
        package = CRATE / "python" / "symmalloc" if self.editable_mode else Path(self.build_lib) / "symmalloc"
        package.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built()[LIBRARY], package / LIBRARY)
        if not self.editable_mode:
            # The class for PyTorch is compiled against this header. A checkout uses the crate's header.
            shutil.copyfile(CRATE / "include" / HEADER, package / "pytorch" / HEADER)
            compiled = package / "pytorch" / "compiled"
            # The folder may contain classes of an earlier build.
            shutil.rmtree(compiled, ignore_errors=True)
            for path in classes():
                compiled.mkdir(exist_ok=True)
                shutil.copy(path, compiled)


class BuildProgram(Distribution().get_command_class("build_scripts")):
    """Copies the command line, which the base class would read as a Python script."""

    def run(self) -> None:
        self.mkpath(self.build_dir)
        if PROGRAM in built():
            self.copy_file(str(built()[PROGRAM]), self.build_dir)

    def get_source_files(self) -> list[str]:
        return []


class InstallProgram(install_scripts):
    """Also installs the library that the command line preloads. `data_files` would list it among the sources."""

    def run(self) -> None:
        super().run()
        if PRELOAD in built():
            folder = Path(self.get_finalized_command("install").install_data) / "lib"
            self.mkpath(str(folder))
            self.copy_file(str(built()[PRELOAD]), str(folder))


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", manylinux([*built().values(), *classes()], platform)


# The libraries that every Linux with glibc has (PEP 600), those of PyTorch, with which classes are linked, and the oldest glibc
# that the tag supports.
EVERYWHERE = re.compile(r"(lib(c|m|dl|pthread|rt|util|gcc_s|stdc\+\+)|ld-linux-[a-z0-9-]+)\.so\.[0-9]+")
OF_PYTORCH = re.compile(r"libc10(_cuda)?\.so|libcudart\.so\.[0-9]+")
GLIBC_MINOR_LEAST = 17


def manylinux(files: Iterable[Path], platform: str) -> str:
    """Returns the tag for the glibc that the files need, by their symbol versions; `platform` if they need other libraries."""
    command = ["readelf", "-W", "-d", "-V", *map(str, files)]
    try:
        read = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform
    needed, versions = re.findall(r"\(NEEDED\).*\[(.+)\]", read), re.findall(r"Name: GLIBC_2\.(\d+)", read)
    if not versions or not all(EVERYWHERE.fullmatch(name) or OF_PYTORCH.fullmatch(name) for name in needed):
        return platform
    minor = max(GLIBC_MINOR_LEAST, *map(int, versions))
    return platform.replace("linux_", f"manylinux_2_{minor}_", 1)


class WithRust(sdist):
    """Adds the library's crates, so that the source distribution is self-contained."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        there, rust = Path(base_dir), Path(base_dir) / "rust"
        (there / "include").mkdir(exist_ok=True)
        shutil.copyfile(CRATE / "include" / HEADER, there / "include" / HEADER)
        if RUST.is_dir():
            shutil.copytree(RUST, rust, ignore=shutil.ignore_patterns("target"), dirs_exist_ok=True)
            return
        folders = crates()
        for folder in folders:
            target = rust / folder.relative_to(WORKSPACE)
            for part in ("src", "jobs"):
                if (folder / part).is_dir():
                    shutil.copytree(folder / part, target / part, dirs_exist_ok=True)
            for file in ("build.rs", "README.md", "LICENSE-MIT", "LICENSE-APACHE"):
                if (folder / file).exists():
                    shutil.copyfile(folder / file, target / file)
            (target / "Cargo.toml").write_text(without_tests((folder / "Cargo.toml").read_text()))
        root = without_members((WORKSPACE / "Cargo.toml").read_text(), [str(folder.relative_to(WORKSPACE)) for folder in folders])
        (rust / "Cargo.toml").write_text(root)
        # The command line names the commit, as in a published crate.
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=WORKSPACE, capture_output=True, text=True).stdout.strip()
        if commit:
            (rust / "crates/symmalloc-cli/.cargo_vcs_info.json").write_text(json.dumps({"git": {"sha1": commit}}))
        # Names the CUDA headers of the bindings.
        shutil.copytree(WORKSPACE / ".cargo", rust / ".cargo", dirs_exist_ok=True)
        shutil.copyfile(WORKSPACE / "Cargo.lock", rust / "Cargo.lock")
        # Cargo removes unused packages, because building the wheel fails if the lock file would change.
        subprocess.run(["cargo", "metadata", "--format-version", "1"], cwd=rust, check=True, stdout=subprocess.DEVNULL)
        added = locked(rust) - locked(WORKSPACE)
        if added:
            raise SystemExit(f"cargo selected packages that are not in Cargo.lock, {sorted(added)}: build with network access")


def crates() -> list[Path]:
    """Returns the folders of the crates that the wheel is made of."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"]
    packages = json.loads(subprocess.run(command, cwd=WORKSPACE, check=True, stdout=subprocess.PIPE).stdout)["packages"]
    by_name = {package["name"]: package for package in packages}
    found: set[str] = set()
    left = list(PACKAGES)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            dependencies = by_name[name]["dependencies"]
            left += [one["name"] for one in dependencies if one["kind"] != "dev" and one["name"] in by_name and one.get("path")]
    return [Path(by_name[name]["manifest_path"]).parent for name in sorted(found)]


def without_tests(manifest: str) -> str:
    """Returns a crate's manifest without tests, examples, benchmarks and their dependencies."""
    sections = re.split(r"^(?=\[)", manifest, flags=re.MULTILINE)
    is_of_tests = re.compile(r"\[(\[(test|bench|example)\]|(target\..*\.)?dev-dependencies)")
    return "".join(section for section in sections if not is_of_tests.match(section))


def without_members(manifest: str, members: list[str]) -> str:
    """Returns the workspace's manifest with only these members."""
    manifest = re.sub(r"^members = .*$", f"members = {json.dumps(members)}", manifest, flags=re.MULTILINE)
    return re.sub(r"^(default-members|exclude) = .*\n", "", manifest, flags=re.MULTILINE)


def locked(workspace: Path) -> set[tuple[str, str]]:
    """Returns the names and versions of the packages in a lock file."""
    text = (workspace / "Cargo.lock").read_text()
    return set(re.findall(r'^name = "(.+)"\nversion = "(.+)"$', text, re.MULTILINE))


class WithLibrary(Distribution):
    """A distribution with machine code, so that the wheel is platform-specific."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    version=of_workspace("version"),
    project_urls=urls(),
    scripts=[PROGRAM],
    distclass=WithLibrary,
    cmdclass={
        "build_py": BuildWithLibrary,
        "build_scripts": BuildProgram,
        "install_scripts": InstallProgram,
        "bdist_wheel": PlatformWheel,
        "sdist": WithRust,
    },
)
