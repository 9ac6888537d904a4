//! Functions that check arguments and write results.

use crate::device::DeviceAllocator;
use crate::error::Error;
use std::ffi::{CStr, c_char};
use symmalloc_files::is_forked;

#[inline]
pub(super) fn not_forked() -> Result<(), Error> {
    if is_forked() { Err(Error::Forked) } else { Ok(()) }
}

/// # Safety
/// The allocator is NULL, or live while the result is used.
#[inline]
pub(super) unsafe fn living<'a>(allocator: *mut DeviceAllocator) -> Result<&'a DeviceAllocator, Error> {
    not_forked()?;
    // SAFETY: the caller's contract.
    match unsafe { allocator.as_ref() } {
        Some(allocator) => Ok(allocator),
        None => Err(Error::Null { argument: "allocator" }),
    }
}

/// # Safety
/// `text` is NULL or a C string that lives as long as the result is used.
pub(super) unsafe fn text<'a>(text: *const c_char, argument: &'static str) -> Result<Option<&'a str>, Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::NotText { argument })
}

/// # Safety
/// Same as for [`text`].
pub(crate) unsafe fn required_text<'a>(c_text: *const c_char, argument: &'static str) -> Result<&'a str, Error> {
    // SAFETY: the caller's contract.
    unsafe { text(c_text, argument) }?.ok_or(Error::Null { argument })
}

#[inline]
pub(crate) fn not_null<T>(out: *mut T, argument: &'static str) -> Result<(), Error> {
    if out.is_null() { Err(Error::Null { argument }) } else { Ok(()) }
}

/// # Safety
/// `out` is NULL or valid for writing.
#[inline]
pub(crate) unsafe fn write<T>(out: *mut T, argument: &'static str, value: T) -> Result<(), Error> {
    if out.is_null() {
        return Err(Error::Null { argument });
    }
    // SAFETY: the caller's contract.
    unsafe { out.write(value) };
    Ok(())
}

/// # Safety
/// Same as for [`write`].
pub(crate) unsafe fn hand_out_text(out: *mut *mut c_char, argument: &'static str, text: &str) -> Result<(), Error> {
    not_null(out, argument)?;
    let bytes = [text.as_bytes(), b"\0"].concat();
    // SAFETY: the caller's contract.
    unsafe { write(out, argument, copied(&bytes)?.cast()) }
}

/// Returns a copy that C can free.
pub(super) fn copied(bytes: &[u8]) -> Result<*mut u8, Error> {
    // SAFETY: `malloc` accepts any size. The size is at least one byte, so null always means out of memory.
    let copy = unsafe { libc::malloc(bytes.len().max(1)) }.cast::<u8>();
    if copy.is_null() {
        return Err(Error::Size { size: bytes.len() as i64 });
    }
    // SAFETY: both buffers have that many bytes, and the new one does not overlap the other.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy, bytes.len()) };
    Ok(copy)
}
