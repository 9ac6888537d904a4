//! Logging that cannot end a thread of this crate.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Emits an event and catches panics. The program's subscriber may panic, for example because standard error is closed, and such a panic
/// must not reach the caller, which may be ending a communicator or already unwinding.
pub(crate) fn log(event: impl FnOnce()) {
    let _panicked = catch_unwind(AssertUnwindSafe(event));
}
