//! The driver's names of its error codes, for messages.

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

/// The type of `cuGetErrorName`, with an integer in place of the enum.
pub(crate) type GetErrorName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

static GET_ERROR_NAME: OnceLock<GetErrorName> = OnceLock::new();

/// Sets the function that later messages use. Only the first call in the process has an effect.
///
/// # Safety
/// `call` must be `cuGetErrorName` of a library that stays loaded.
pub(crate) unsafe fn set_call(call: GetErrorName) {
    GET_ERROR_NAME.get_or_init(|| call);
}

/// Returns the driver's name of a code. Returns `None` if the driver has none, or no driver is loaded.
pub(crate) fn error_name(code: c_int) -> Option<&'static str> {
    let call = *GET_ERROR_NAME.get()?;
    let mut name = std::ptr::null();
    // SAFETY: the library is loaded, and the pointer is valid for writing. The call accepts every code.
    let answer = unsafe { call(code, &raw mut name) };
    if answer != 0 || name.is_null() {
        return None;
    }
    // SAFETY: on success, the driver returns a C string of the library.
    unsafe { CStr::from_ptr(name) }.to_str().ok()
}
