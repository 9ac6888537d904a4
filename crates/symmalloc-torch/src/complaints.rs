//! Messages on standard error, for errors that no call can return.

use crate::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use symmalloc_files::say;

/// `true` after the first message about an error that a call could not return.
static HAS_COMPLAINED: AtomicBool = AtomicBool::new(false);

/// Reports an error that a call cannot return. Logs every such error, and writes the first to standard error.
pub(crate) fn complain(error: &Error) {
    tracing::warn!(name: "call.failed", target: "symmalloc", %error);
    if !HAS_COMPLAINED.swap(true, Ordering::Relaxed) {
        say(format_args!("{error} (reported once; symmalloc.stats()['errors'] counts all)"));
    }
}
