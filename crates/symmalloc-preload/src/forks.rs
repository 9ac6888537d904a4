//! Detection of forked children. CUDA does not work in them, so every driver call fails, and this library passes all calls through.
//!
//! This does not affect a child of a process that had not used CUDA before the fork.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Returns `true` if this process was forked from a process that this library served or watched.
#[inline]
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Relaxed)
}

/// Installs a handler that marks children forked from now on.
pub(crate) fn watch() {
    static IS_WATCHING: Once = Once::new();
    IS_WATCHING.call_once(|| {
        // SAFETY: the handler only stores to an atomic, which is allowed in a child of a multithreaded process. If registration fails for
        // lack of memory, a child is mistaken for its parent; its driver calls fail in any case.
        let _refused = unsafe { libc::pthread_atfork(None, None, Some(forget)) };
    });
}

unsafe extern "C" fn forget() {
    IS_FORKED.store(true, Ordering::Relaxed);
}
