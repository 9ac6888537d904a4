//! The ways in which a program looks up driver calls, and the interposition of the served calls.
//!
//! | lookup | interposed by |
//! |---|---|
//! | a linked symbol | this library exports the name, and is searched before libcuda |
//! | `dlsym`, `dlvsym` | `interposed.rs` |
//! | `cuGetProcAddress`, `cuGetProcAddress_v2` | `proc_address.rs` |
//!
//! `served.rs` describes a served call, and `libc_symbols.rs` finds the C library's own lookup functions.

mod interposed;
mod libc_symbols;
pub(crate) mod proc_address;
pub(crate) mod served;

use std::ffi::{CStr, c_void};

/// Looks up a symbol of a library with the C library's function.
///
/// # Safety
/// The handle must belong to an open library.
pub(crate) unsafe fn real_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the caller's contract, and a C string.
    unsafe { libc_symbols::dlsym()(handle, name.as_ptr()) }
}
