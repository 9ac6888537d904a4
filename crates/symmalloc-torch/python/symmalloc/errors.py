"""The exceptions of this package. Every error is a `symmalloc.Error`; its text states the problem and what to do."""

from __future__ import annotations


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


class PeerDied(Error, ConnectionError):
    """A process that takes turns with this one has died or left. The message names it and the phase of the turn."""


class PeerFailed(Error, RuntimeError):
    """A process that takes turns with this one reported an error, which ended its turn. The message names it and the error."""


class DeadlinePassed(Error, TimeoutError):
    """A process that takes turns with this one did not answer in time. The message names it and the phase of the turn."""


class WrongPeer(Error, PermissionError):
    """The process at the other end of a socket belongs to another user, another job, another rank or another device."""


class UnequalLayouts(Error, ValueError):
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
