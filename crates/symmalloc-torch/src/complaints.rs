//! Lines on the error output, for errors that no call can return.

use crate::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether an error of a call that returns none was written to the error output already.
static HAS_COMPLAINED: AtomicBool = AtomicBool::new(false);

/// Writes a line to the error output. `eprintln!` would panic where nobody reads it any more, and end the process that frees.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    let _unread = writeln!(io::stderr(), "symmalloc: {line}");
}

/// Says once, on the error output, that a call failed that can return no error. All are counted and logged.
pub(crate) fn complain(error: &Error) {
    tracing::warn!(name: "call.failed", target: "symmalloc", %error);
    if !HAS_COMPLAINED.swap(true, Ordering::Relaxed) {
        say(format_args!("{error} (said once; symmalloc.stats()['errors'] counts them)"));
    }
}
