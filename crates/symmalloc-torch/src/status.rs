//! What a call of the C interface returns, and the text that goes with it.

use crate::error::Error;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

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
    /// A file could not be written.
    SYMMALLOC_IO = 10,
    /// The call does not fit what was called before: scopes that do not nest, settings after the first allocation.
    SYMMALLOC_INVALID_STATE = 11,
    /// An assertion of this library failed. Please report it.
    SYMMALLOC_INTERNAL = 12,
}

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Carries out a call of the C interface: no panic leaves it, and what went wrong can be read.
#[inline]
pub(crate) fn report(act: impl FnOnce() -> Result<(), Error>) -> symmalloc_status {
    guarded_or(|| act().map(|()| symmalloc_status::SYMMALLOC_OK), |error| tell(&error))
}

#[cold]
#[inline(never)]
fn tell(error: &Error) -> symmalloc_status {
    remember(&error.to_string());
    error.status()
}

/// Makes an error of a panic. A panic is a failed assertion: the allocator is wrong about its own blocks.
#[inline]
pub(crate) fn guarded<T>(act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(outcome) => outcome,
        Err(panic) => Err(internal(panic.as_ref())),
    }
}

/// As [`guarded`], with an answer in place of an error. It is made inside of the guard: an error is large, and a call that
/// succeeds should not have to make room for one.
#[inline]
pub(crate) fn guarded_or<T>(act: impl FnOnce() -> Result<T, Error>, otherwise: impl Fn(Error) -> T) -> T {
    let answer = || match act() {
        Ok(answer) => answer,
        Err(error) => otherwise(error),
    };
    match catch_unwind(AssertUnwindSafe(answer)) {
        Ok(answer) => answer,
        Err(panic) => otherwise(internal(panic.as_ref())),
    }
}

#[cold]
#[inline(never)]
fn internal(panic: &(dyn Any + Send)) -> Error {
    Error::Internal { message: text_of(panic) }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}

fn remember(message: &str) {
    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no place for it any more.
    let _kept = MESSAGE.try_with(|place| place.replace(text));
}

/// The message of the calling thread's last failure; empty if there was none. It stays until this thread's next failure.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_error_message() -> *const c_char {
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
