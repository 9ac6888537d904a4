"""A folder that only this user and root can write, opened once and used through its descriptor.

A path can name a different folder between check and use. The walk therefore opens every component relative to the one before it,
checks the opened entry, and keeps the last descriptor. Files are opened, renamed and removed relative to that descriptor.

    /          home       me             .cache         symmalloc
    each belongs to this user or root, and others cannot write to it

The walk may pass a world-writable folder if it is sticky, such as `/tmp`: others cannot replace an entry that belongs to this
user or to root. It follows a symbolic link that belongs to either of them, and checks its target in the same way.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

# Opens a link itself, not its target. A folder needs no read permission.
ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
LINKS_MAXIMUM = 40
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_private(status: os.stat_result) -> bool:
    """Returns `True` if only this user or root can write to a file or a folder."""
    return _is_trusted(status.st_uid) and not status.st_mode & OTHERS_WRITE


class Untrusted(Exception):
    """Another user can change the target of a path. The text names the component, and states what to do."""


class PrivateFolder:
    """An open folder that only this user and root can write. Use it in a `with` statement, which closes it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> PrivateFolder:
        """Opens a folder by its absolute path and creates the missing part of it. Raises `Untrusted` and `OSError`."""
        folder = _walk(path)
        try:
            if not is_private(os.fstat(folder)):
                raise Untrusted(f"others can write {_path_of(folder)}: run `chmod go-w` on it")
        except BaseException:
            os.close(folder)
            raise
        return cls(folder)

    @property
    def path(self) -> Path:
        """The path, for messages only: it may already name a different folder."""
        return Path(_path_of(self.descriptor))

    def file(self, name: str, flags: int) -> int:
        """Opens a file in the folder. It never follows a symbolic link. Raises `OSError`."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)

    def replace(self, source: str, target: str) -> None:
        """Renames a file within the folder. Raises `OSError`."""
        os.replace(source, target, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def unlink(self, name: str) -> None:
        """Removes a file of the folder. Raises `OSError`."""
        os.unlink(name, dir_fd=self.descriptor)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.descriptor)


def _walk(path: Path) -> int:
    """Opens each component relative to the one before it. Returns the descriptor of the last."""
    names = list(reversed(path.parts[1:]))
    folder = os.open("/", ENTRY)
    links = 0
    try:
        _check(folder)
        while names:
            entry = _entry(folder, name := names.pop())
            try:
                _check(entry)
            except BaseException:
                os.close(entry)
                raise
            if stat.S_ISLNK(os.fstat(entry).st_mode):
                target = Path(os.readlink("", dir_fd=entry))
                os.close(entry)
                if (links := links + 1) > LINKS_MAXIMUM:
                    raise Untrusted(f"{path} has too many symbolic links")
                names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                if not target.is_absolute():
                    continue
                entry = os.open("/", ENTRY)
            elif not stat.S_ISDIR(os.fstat(entry).st_mode):
                os.close(entry)
                raise NotADirectoryError(f"{_path_of(folder)}/{name} is not a folder")
            os.close(folder)
            folder = entry
    except BaseException:
        os.close(folder)
        raise
    return folder


def _entry(folder: int, name: str) -> int:
    """Opens an entry of a folder. Creates a folder if there is no such entry."""
    try:
        return os.open(name, ENTRY, dir_fd=folder)
    except FileNotFoundError:
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            pass  # another process of this user was faster
        return os.open(name, ENTRY, dir_fd=folder)


def _check(entry: int) -> None:
    """Raises `Untrusted` if a third user can replace the entries of a folder, or owns a symbolic link."""
    status = os.fstat(entry)
    if not _is_trusted(status.st_uid):
        raise Untrusted(f"{_path_of(entry)} belongs to user {status.st_uid}")
    if stat.S_ISDIR(status.st_mode) and status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise Untrusted(f"others can write {_path_of(entry)}: run `chmod go-w` on it")


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid())


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
