//! Forked children, which cannot use CUDA and have no allocators.

use std::sync::atomic::{AtomicBool, Ordering};

/// `true` in a child of the process that created the allocators.
static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Returns `true` in a forked child of a process that created allocators.
#[inline]
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Relaxed)
}

/// Records in a child that it was forked. Only stores to an atomic, as a child of a process with threads may.
pub(crate) fn note_fork() {
    IS_FORKED.store(true, Ordering::Relaxed);
}
