//! A child that was forked has no CUDA: the driver says so to every call, and this library gets out of the way.
//!
//! A child of a process that had not used CUDA yet is a process like any other.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Whether this process is a child of one that was served or watched.
#[inline]
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Relaxed)
}

/// A child that is forked from now on will know that it is one.
pub(crate) fn watch() {
    static IS_WATCHING: Once = Once::new();
    IS_WATCHING.call_once(|| {
        // SAFETY: the function stores to an atomic, which a child of a process with threads may do. Without memory for it a child
        // would be taken for its parent; the driver refuses its calls in any case.
        let _refused = unsafe { libc::pthread_atfork(None, None, Some(forget)) };
    });
}

unsafe extern "C" fn forget() {
    IS_FORKED.store(true, Ordering::Relaxed);
}
