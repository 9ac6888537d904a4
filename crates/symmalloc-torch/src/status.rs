//! The statuses of the C interface.

/// The result of a call. After any status but `SYMMALLOC_OK`, `symmalloc_error_message` returns the problem and what to do.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum symmalloc_status {
    /// Success.
    SYMMALLOC_OK = 0,
    /// An argument is missing or invalid, such as a null pointer, a text that is not UTF-8, or a negative device.
    SYMMALLOC_INVALID_ARGUMENT = 1,
    /// A configuration text is invalid. The message names the byte offset.
    SYMMALLOC_INVALID_SETTINGS = 2,
    /// The limits leave no memory, or the driver failed to provide it.
    SYMMALLOC_OUT_OF_MEMORY = 3,
    /// The pointer is not a live allocation of this allocator.
    SYMMALLOC_UNKNOWN_POINTER = 4,
    /// The pool does not exist, or was destroyed.
    SYMMALLOC_UNKNOWN_POOL = 5,
    /// libcuda cannot be loaded, a CUDA call failed, or the device does not exist.
    SYMMALLOC_CUDA = 6,
    /// The histories of the ranks differ. The message names the first difference.
    SYMMALLOC_MISALIGNED = 7,
    /// The ranks failed to communicate.
    SYMMALLOC_TRANSPORT = 8,
    /// libnccl cannot be loaded, or an NCCL call failed or timed out.
    SYMMALLOC_NCCL = 9,
    /// A file could not be read or written.
    SYMMALLOC_IO = 10,
    /// The call is invalid in the current state, such as scopes that do not nest or settings after the first allocation.
    SYMMALLOC_INVALID_STATE = 11,
    /// An assertion of this library failed. Please report it.
    SYMMALLOC_INTERNAL = 12,
}
