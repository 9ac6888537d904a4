//! Messages on standard error, for errors that no call can return.

use crate::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// `true` after the first message about an error that a call could not return.
static HAS_COMPLAINED: AtomicBool = AtomicBool::new(false);

/// Writes a line to standard error. `eprintln!` would panic if standard error is closed, which would end the process during a free.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    let _unread = writeln!(io::stderr(), "symmalloc: {line}");
}

/// Reports an error that a call cannot return. Logs every such error, and writes the first to standard error.
pub(crate) fn complain(error: &Error) {
    tracing::warn!(name: "call.failed", target: "symmalloc", %error);
    if !HAS_COMPLAINED.swap(true, Ordering::Relaxed) {
        say(format_args!("{error} (reported once; symmalloc.stats()['errors'] counts all)"));
    }
}
