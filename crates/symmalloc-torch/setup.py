"""Builds the wheel: cargo makes the library, setuptools puts it beside the Python files.

The package is ctypes on a C interface, so one wheel fits every Python 3 (`py3-none-linux_*`). `CARGO_TARGET_DIR` is
respected. `SYMMALLOC_CARGO_PROFILE` (default `shipped`) chooses the profile. A library that was built already is taken
with `SYMMALLOC_LIBRARY=/path/to/libsymmalloc_torch.so pip install ./crates/symmalloc-torch`.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CRATE = Path(__file__).resolve().parent
WORKSPACE = CRATE.parent.parent
LIBRARY = "libsymmalloc_torch.so"
HEADER = "symmalloc.h"


def workspace_version() -> str:
    manifest = WORKSPACE / "Cargo.toml"
    if not manifest.exists():
        raise SystemExit(f"{manifest} is missing: install from a checkout of the whole repository")
    package = manifest.read_text().split("[workspace.package]", 1)[1]
    return re.search(r'^version = "(.+)"$', package, re.MULTILINE).group(1)


def built_library() -> Path:
    """Runs cargo, and returns where it put the library."""
    if given := os.environ.get("SYMMALLOC_LIBRARY"):
        return Path(given)
    if shutil.which("cargo") is None:
        raise SystemExit("cargo is not on the PATH: install Rust (https://rustup.rs), or set SYMMALLOC_LIBRARY")
    command = ["cargo", "rustc", "--locked", "-p", "symmalloc-torch", "--lib", "--crate-type", "cdylib"]
    command += ["--profile", os.environ.get("SYMMALLOC_CARGO_PROFILE", "shipped")]
    command += ["--message-format", "json-render-diagnostics"]
    messages = subprocess.run(command, cwd=WORKSPACE, check=True, stdout=subprocess.PIPE, text=True).stdout
    artifacts = (json.loads(line) for line in messages.splitlines())
    files = [file for artifact in artifacts for file in artifact.get("filenames", []) if file.endswith("/" + LIBRARY)]
    return Path(files[-1])


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        # An editable install runs from the sources, so the library goes there.
        package = CRATE / "python" / "symmalloc" if self.editable_mode else Path(self.build_lib) / "symmalloc"
        package.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built_library(), package / LIBRARY)
        if not self.editable_mode:
            # The class for PyTorch is compiled against it; in a checkout it finds the one of the crate.
            shutil.copyfile(CRATE / "include" / HEADER, package / "pytorch" / HEADER)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    """Says that there is machine code in it, so that the wheel is one for a platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    version=workspace_version(),
    distclass=WithLibrary,
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
)
