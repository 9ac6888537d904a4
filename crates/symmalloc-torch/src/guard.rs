//! The boundary of the C interface: it contains panics, and stores the messages of errors.

use crate::error::Error;
use crate::status::symmalloc_status;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use symmalloc_files::is_forked;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// The number of callbacks that run now on any thread, plus the number of deferred releases. For most calls, one load shows that there
/// are none.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// Held by the thread that runs deferred releases.
static RUNNING: Mutex<()> = Mutex::new(());

/// Releases that callbacks requested, in order.
static DEFERRED: Mutex<Vec<Release>> = Mutex::new(Vec::new());

type Release = Box<dyn FnOnce() -> Result<(), Error> + Send>;

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
    // In a forked child, the objects belong to the parent, and a thread that the child does not have may hold the locks. A thread that does
    // not wait here cannot wait for a thread that runs a release and waits for a lock of this one, such as Python's.
    if !is_forked()
        && let Ok(_running) = RUNNING.try_lock()
    {
        run_deferred();
    }
    Ok(())
}

/// Runs deferred releases, and waits for another thread that runs some. For calls that end an object.
pub(crate) fn finish_deferred() {
    if PENDING.load(Ordering::Relaxed) != 0 && !is_forked() && not_in_callback().is_ok() {
        let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        run_deferred();
    }
}

fn run_deferred() {
    let deferred = std::mem::take(&mut *DEFERRED.lock().unwrap_or_else(PoisonError::into_inner));
    for release in deferred {
        if let Err(error) = guarded(release) {
            tracing::warn!(name: "free.deferred", target: "symmalloc", error = %error, "a callback requested a free that failed");
        }
        PENDING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs a call of the C interface that frees something. Inside a callback, the call succeeds, and `later` runs before the next call
/// outside of callbacks: the collectors of Python and other languages run whenever a callback allocates an object, and their destructors
/// cannot handle an error.
///
/// # Safety
/// Any thread may run `later`.
#[inline]
pub(crate) unsafe fn free_or_defer(
    now: impl FnOnce() -> Result<(), Error>,
    later: impl FnOnce() -> Result<(), Error> + Copy + 'static,
) -> symmalloc_status {
    let failed = |error| match error {
        // SAFETY: the caller's contract.
        Error::InCallback if IN_CALLBACK.get() => unsafe { defer(later) },
        error => store_error(&error),
    };
    guarded_or(|| now().map(|()| symmalloc_status::SYMMALLOC_OK), failed)
}

/// # Safety
/// Any thread may run `release`.
#[cold]
unsafe fn defer(release: impl FnOnce() -> Result<(), Error> + 'static) -> symmalloc_status {
    struct AnyThread<F>(F);
    // SAFETY: the caller's contract.
    unsafe impl<F> Send for AnyThread<F> {}
    impl<F: FnOnce() -> Result<(), Error>> AnyThread<F> {
        fn run(self) -> Result<(), Error> {
            (self.0)()
        }
    }
    let release = AnyThread(release);
    DEFERRED.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(move || release.run()));
    PENDING.fetch_add(1, Ordering::Relaxed);
    symmalloc_status::SYMMALLOC_OK
}

/// Runs a call of the C interface that releases something. In a forked child it succeeds without effect: the object belongs to the parent,
/// and threads that the child does not have may hold its locks. Destructors also run in a child, and cannot handle an error.
#[inline]
pub(crate) fn release(act: impl FnOnce() -> Result<(), Error>) -> symmalloc_status {
    if is_forked() { symmalloc_status::SYMMALLOC_OK } else { report(act) }
}

/// Runs a call of the C interface that frees something, as [`release`] in a forked child, and as [`free_or_defer`] inside a callback.
///
/// # Safety
/// Any thread may run `act`.
#[inline]
pub(crate) unsafe fn release_or_defer(act: impl FnOnce() -> Result<(), Error> + Copy + 'static) -> symmalloc_status {
    // SAFETY: the caller's contract.
    if is_forked() { symmalloc_status::SYMMALLOC_OK } else { unsafe { free_or_defer(act, act) } }
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
