//! The watched communicators of the process.

use crate::watchdog::watched::Watched;
use std::sync::{Arc, Mutex, PoisonError, Weak};

static WATCHED: Mutex<Vec<Weak<Watched>>> = Mutex::new(Vec::new());

/// Registers a communicator, which stays registered until it is dropped.
pub(super) fn add(watched: &Arc<Watched>) {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(watched));
}

/// Returns all watched communicators in the order in which they were connected.
pub(super) fn all() -> Vec<Arc<Watched>> {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.retain(|it| it.strong_count() > 0);
    watched.iter().filter_map(Weak::upgrade).collect()
}
