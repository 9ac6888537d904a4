//! What a call of the C interface returns.

/// How a call ended. After anything but `SYMMALLOC_OK`, `symmalloc_error_message` says what happened and what to do.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum symmalloc_status {
    /// Done.
    SYMMALLOC_OK = 0,
    /// An argument is missing or means nothing: a null pointer, a text that is not UTF-8, a device below 0.
    SYMMALLOC_INVALID_ARGUMENT = 1,
    /// A configuration is not understood; the message names the byte.
    SYMMALLOC_INVALID_SETTINGS = 2,
    /// There is no memory within the limits, or the driver refused it.
    SYMMALLOC_OUT_OF_MEMORY = 3,
    /// The pointer is no live allocation of this allocator.
    SYMMALLOC_UNKNOWN_POINTER = 4,
    /// There is no such pool, or it was given up.
    SYMMALLOC_UNKNOWN_POOL = 5,
    /// libcuda cannot be used, a call of it failed, or there is no such device.
    SYMMALLOC_CUDA = 6,
    /// The ranks differ; the message says where.
    SYMMALLOC_MISALIGNED = 7,
    /// The ranks could not hear each other.
    SYMMALLOC_TRANSPORT = 8,
    /// libnccl cannot be used, or a call of it failed or took too long.
    SYMMALLOC_NCCL = 9,
    /// A file could not be read or written.
    SYMMALLOC_IO = 10,
    /// The call does not fit what was called before: scopes that do not nest, settings after the first allocation.
    SYMMALLOC_INVALID_STATE = 11,
    /// An assertion of this library failed. Please report it.
    SYMMALLOC_INTERNAL = 12,
}
