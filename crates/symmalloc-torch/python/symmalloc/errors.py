"""What can go wrong. Every error is a `symmalloc.Error`; its text says what there was and what to do."""

from __future__ import annotations


class Error(Exception):
    """A call of the library failed."""


class InvalidArgument(Error, ValueError):
    """An argument is missing or means nothing."""


class InvalidSettings(Error, ValueError):
    """A configuration text is not understood. The message names the byte and the nearest key."""


class OutOfMemory(Error, MemoryError):
    """There is no memory within the limits, or the driver refused it.

    PyTorch's own operations raise `torch.OutOfMemoryError`, as with its own allocator.
    """


class UnknownPointer(Error, ValueError):
    """The pointer is no live allocation of this allocator."""


class UnknownPool(Error, ValueError):
    """There is no such pool, or it was given up."""


class CudaError(Error, RuntimeError):
    """libcuda cannot be used, a call of it failed, or there is no such device."""


class MisalignedError(Error, AssertionError):
    """Ranks allocated differently. The message is the report: the first op that differs, and what each rank did."""


class TransportError(Error, ConnectionError):
    """The ranks could not hear each other."""


class NcclError(Error, RuntimeError):
    """libnccl cannot be used, or a call of it failed or took too long."""


class FileError(Error, OSError):
    """A file could not be written."""


class InvalidState(Error, RuntimeError):
    """The call does not fit what was called before: scopes that do not nest, settings after the first allocation."""


class InternalError(Error, RuntimeError):
    """An assertion of the library failed. Please report it."""


class NotInstalled(Error, RuntimeError):
    """PyTorch does not use symmalloc: `symmalloc.install()` was not called."""


class TorchError(Error, RuntimeError):
    """PyTorch is missing, too old, without CUDA, or has used CUDA already."""


class LibraryNotFound(Error, ImportError):
    """`libsymmalloc_torch.so` is not where it should be, or does not fit this package."""


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
