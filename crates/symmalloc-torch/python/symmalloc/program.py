"""The program `symmalloc`, which the wheel installs next to the Python of its environment."""

from __future__ import annotations

import os
import sysconfig
from importlib import metadata
from pathlib import Path

from .errors import ProgramNotFound

PROGRAM = "symmalloc"


def program_path() -> Path:
    """Returns the path of the program that was installed with this package. Raises `ProgramNotFound`.

    A program of that name on the PATH may have another version, and is not used.
    """
    folder = Path(sysconfig.get_path("scripts"))
    # pip installs programs elsewhere with --user, --prefix or --target, and records where.
    candidates = [folder / PROGRAM, *recorded()]
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise ProgramNotFound(
        f"the program {PROGRAM} is not in {folder}: install the package with `pip install ./crates/symmalloc-torch`, or run "
        "`cargo run --release --` with this command in a checkout"
    )


def recorded() -> list[Path]:
    """Returns the paths of this package's programs in the record of its installation; none in a checkout."""
    try:
        files = metadata.files("symmalloc") or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == PROGRAM and file.parent.name in ("bin", "Scripts")]
