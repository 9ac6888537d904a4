//! How a program asks for the driver's calls, and how it gets ours for some of them.
//!
//! | it asks by | here |
//! |---|---|
//! | a linked symbol | this library exports the name, and comes before libcuda |
//! | `dlsym`, `dlvsym` | `interposed.rs` |
//! | `cuGetProcAddress`, `cuGetProcAddress_v2` | `proc_address.rs` |
//!
//! `served.rs` is what a call served here is, `libc_symbols.rs` where the C library's own look-up is.

mod interposed;
mod libc_symbols;
pub(crate) mod proc_address;
pub(crate) mod served;

use std::ffi::{CStr, c_void};

/// Looks a symbol of a library up, as the C library does.
///
/// # Safety
/// The handle is of a library that is open.
pub(crate) unsafe fn real_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the caller's contract, and a C string.
    unsafe { libc_symbols::dlsym()(handle, name.as_ptr()) }
}
