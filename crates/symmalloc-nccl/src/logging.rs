//! Logging that cannot end a thread of this crate.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Emits an event. The program's subscriber may panic, for example because standard error is closed, and the caller may be ending a
/// communicator or unwinding already.
pub(crate) fn log(event: impl FnOnce()) {
    let _panicked = catch_unwind(AssertUnwindSafe(event));
}
