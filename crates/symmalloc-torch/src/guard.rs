//! The boundary of the C interface: it contains panics, and stores the messages of errors.

use crate::error::Error;
use crate::status::symmalloc_status;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use symmalloc_files::is_forked;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// The number of callbacks that run now on any thread, plus the number of deferred releases. For most calls, one load shows that there
/// are none.
static PENDING: AtomicUsize = AtomicUsize::new(0);

type Release = Box<dyn FnOnce() -> Result<(), Error>>;

/// The releases that this thread's callbacks requested, in order. Each thread runs its own, so that their order among the ops of a heap follows
/// from the program of that thread.
struct Deferred(RefCell<Vec<Release>>);

thread_local! {
    static DEFERRED: Deferred = const { Deferred(RefCell::new(Vec::new())) };
}

impl Drop for Deferred {
    fn drop(&mut self) {
        self.run();
    }
}

impl Deferred {
    fn run(&self) {
        for release in self.0.take() {
            PENDING.fetch_sub(1, Ordering::Relaxed);
            // In a forked child, the objects belong to the parent.
            if is_forked() {
                continue;
            }
            if let Err(error) = guarded(release) {
                tracing::warn!(name: "free.deferred", target: "symmalloc", error = %error, "a callback requested a free that failed");
            }
        }
    }
}

thread_local! {
    /// `true` while the thread runs a callback.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Calls a function of the program. Calls of this library inside it return errors: they could wait indefinitely for a lock that
/// the thread holds, call the function again without end, or change the state that it is called about. Only frees succeed, and take
/// effect later, see [`free_or_defer`]. The function may unwind.
pub(crate) fn call_back<T>(call: impl FnOnce() -> T) -> T {
    struct Running(bool);
    impl Drop for Running {
        fn drop(&mut self) {
            IN_CALLBACK.set(self.0);
            PENDING.fetch_sub(1, Ordering::Relaxed);
        }
    }
    PENDING.fetch_add(1, Ordering::Relaxed);
    let _running = Running(IN_CALLBACK.replace(true));
    call()
}

/// Returns an error for a call inside a callback.
#[inline]
pub(crate) fn not_in_callback() -> Result<(), Error> {
    if PENDING.load(Ordering::Relaxed) != 0 && IN_CALLBACK.get() { Err(Error::InCallback) } else { Ok(()) }
}

/// Starts a call of the C interface, outside of the library's locks: runs deferred releases. Returns an error inside a callback.
#[inline]
pub(crate) fn enter() -> Result<(), Error> {
    if PENDING.load(Ordering::Relaxed) == 0 { Ok(()) } else { enter_after_deferred() }
}

#[cold]
#[inline(never)]
fn enter_after_deferred() -> Result<(), Error> {
    not_in_callback()?;
    // The storage of an exiting thread may be destroyed already.
    let _run = DEFERRED.try_with(Deferred::run);
    Ok(())
}

/// Runs a call of the C interface that frees something. Inside a callback, the call succeeds, and `later` runs before this thread's next call
/// outside of callbacks, or at the end of the thread: the collectors of Python and other languages run whenever a callback allocates an
/// object, and their destructors cannot handle an error.
#[inline]
pub(crate) fn free_or_defer(
    now: impl FnOnce() -> Result<(), Error>,
    later: impl FnOnce() -> Result<(), Error> + Copy + 'static,
) -> symmalloc_status {
    let failed = |error| match error {
        Error::InCallback if IN_CALLBACK.get() && defer(later) => symmalloc_status::SYMMALLOC_OK,
        error => store_error(&error),
    };
    guarded_or(|| now().map(|()| symmalloc_status::SYMMALLOC_OK), failed)
}

/// Returns `false` if the storage of this thread is destroyed already.
#[cold]
fn defer(release: impl FnOnce() -> Result<(), Error> + 'static) -> bool {
    let kept = DEFERRED.try_with(|deferred| deferred.0.borrow_mut().push(Box::new(release)));
    PENDING.fetch_add(kept.is_ok().into(), Ordering::Relaxed);
    kept.is_ok()
}

/// Runs a call of the C interface that releases something. In a forked child it succeeds without effect: the object belongs to the parent,
/// and threads that the child does not have may hold its locks. Destructors also run in a child, and cannot handle an error.
#[inline]
pub(crate) fn release(act: impl FnOnce() -> Result<(), Error>) -> symmalloc_status {
    if is_forked() { symmalloc_status::SYMMALLOC_OK } else { report(act) }
}

/// Runs a call of the C interface that frees something, as [`release`] in a forked child, and as [`free_or_defer`] inside a callback.
#[inline]
pub(crate) fn release_or_defer(act: impl FnOnce() -> Result<(), Error> + Copy + 'static) -> symmalloc_status {
    if is_forked() { symmalloc_status::SYMMALLOC_OK } else { free_or_defer(act, act) }
}

/// Runs a call of the C interface. Converts a panic to an error, and stores the message of an error.
#[inline]
pub(crate) fn report(act: impl FnOnce() -> Result<(), Error>) -> symmalloc_status {
    guarded_or(|| act().map(|()| symmalloc_status::SYMMALLOC_OK), |error| store_error(&error))
}

#[cold]
#[inline(never)]
fn store_error(error: &Error) -> symmalloc_status {
    remember(&error.to_string());
    error.status()
}

/// Converts a panic to an error. A panic is a failed assertion: the allocator's state is inconsistent.
#[inline]
pub(crate) fn guarded<T>(act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    not_in_callback()?;
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(outcome) => outcome,
        Err(panic) => Err(internal(panic.as_ref())),
    }
}

/// Runs as [`guarded`], and maps an error to a result inside the guard. An error is large, and a successful call should not need
/// stack space for one.
#[inline]
pub(crate) fn guarded_or<T>(act: impl FnOnce() -> Result<T, Error>, otherwise: impl Fn(Error) -> T) -> T {
    let answer = || match enter().and_then(|()| act()) {
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
    // The storage of an exiting thread may be destroyed already.
    let _kept = MESSAGE.try_with(|message| message.replace(text));
}

/// Returns the message of the calling thread's last error; empty if there was none. It stays valid until this thread's next error.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_error_message() -> *const c_char {
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
