"""The exceptions of this package. Every error is a `symmalloc.Error`; its text states the problem and what to do."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffe\uffff"
    r"\U000e0000-\U000e007f" + "".join(rf"\U{plane:04x}fffe\U{plane:04x}ffff" for plane in range(1, 17)) + "]"
)


def visible_line(text: str) -> str:
    """Returns foreign text as one line, with hidden characters shown by number, as `symmalloc_text::visible_line` does."""
    return _HIDDEN.sub(lambda found: "\\n" if found[0] == "\n" else f"\\u{{{ord(found[0]):x}}}", text)


class Error(Exception):
    """The base class of all errors."""


class InvalidArgument(Error, ValueError):
    """An argument is missing or invalid."""


class InvalidSettings(Error, ValueError):
    """A configuration text is invalid. The message names the byte offset and the nearest key."""


class OutOfMemory(Error, MemoryError):
    """The limits leave no memory, or the driver failed to provide it.

    PyTorch's own operations raise `torch.OutOfMemoryError`, as with its own allocator.
    """


class UnknownPointer(Error, ValueError):
    """The pointer is not a live allocation of this allocator."""


class UnknownPool(Error, ValueError):
    """The pool does not exist, or was destroyed."""


class CudaError(Error, RuntimeError):
    """libcuda cannot be loaded, a CUDA call failed, or the device does not exist."""


class MisalignedError(Error, AssertionError):
    """Ranks allocated differently. The message is the report: the first op that differs, and what each rank did."""


class TransportError(Error, ConnectionError):
    """The ranks failed to communicate."""


class NcclError(Error, RuntimeError):
    """libnccl cannot be loaded, or an NCCL call failed or timed out."""


class FileError(Error, OSError):
    """A file could not be written."""


class InvalidState(Error, RuntimeError):
    """The call is invalid in the current state, such as scopes that do not nest or settings after the first allocation."""


class InternalError(Error, RuntimeError):
    """An assertion of the library failed. Please report it."""


class NotInstalled(Error, RuntimeError):
    """PyTorch does not use symmalloc: `symmalloc.install()` was not called."""


class TorchError(Error, RuntimeError):
    """PyTorch is missing, too old, without CUDA, or has used CUDA already."""


class _PeerError(Error):
    """An error whose text may come from another process. It cannot control a terminal or forge a line."""

    def __init__(self, text: str = "") -> None:
        super().__init__(visible_line(text))


class PeerDied(_PeerError, ConnectionError):
    """A process that takes turns with this one has died or left. The message names it, and the phase of its turn if the hub knows it."""


class PeerFailed(_PeerError, RuntimeError):
    """A process that takes turns with this one reported an error, which ended its turn. The message names it and the error."""


class DeadlinePassed(_PeerError, TimeoutError):
    """A process that takes turns with this one, or the device, did not answer in time. The message states what it did not do."""


class WrongPeer(_PeerError, PermissionError):
    """The process at the other end of a socket belongs to another user, job, rank or device, or sends invalid messages."""


class TooManyOpenFiles(Error, OSError):
    """The limit of open files is too low for the memory that processes share. Raise it with `ulimit -n`."""


class UnequalLayouts(_PeerError, ValueError):
    """A parameter has different layouts in two processes. The message names the parameter."""


class StaleImport(Error, RuntimeError):
    """Imported memory no longer has the exported contents, because its owner released it or withdrew it."""


class LibraryNotFound(Error, ImportError):
    """`libsymmalloc_torch.so` is missing, or its version does not match this package."""


class ProgramNotFound(Error, FileNotFoundError):
    """The program `symmalloc` is not installed with this package."""


# symmalloc_status in include/symmalloc.h.
BY_STATUS: dict[int, type[Error]] = {
    1: InvalidArgument,
    2: InvalidSettings,
    3: OutOfMemory,
    4: UnknownPointer,
    5: UnknownPool,
    6: CudaError,
    7: MisalignedError,
    8: TransportError,
    9: NcclError,
    10: FileError,
    11: InvalidState,
    12: InternalError,
}
