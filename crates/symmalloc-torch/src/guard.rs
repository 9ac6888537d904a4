//! The boundary of the C interface: no panic leaves it, and what went wrong can be read.

use crate::error::Error;
use crate::status::symmalloc_status;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

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
