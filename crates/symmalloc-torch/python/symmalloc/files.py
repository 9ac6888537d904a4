"""Files that the package writes as a whole, like the crate `symmalloc-files`."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], contents: bytes) -> None:
    """Atomically writes a file that only this user can read and write (mode 0600).

    Replaces an existing file or symbolic link of that name once the new file is complete. The target of a link is unchanged.
    Raises `OSError`, and leaves no temporary file then.
    """
    descriptor, draft = tempfile.mkstemp(prefix=".symmalloc-", suffix=".part", dir=Path(path).parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(contents)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
