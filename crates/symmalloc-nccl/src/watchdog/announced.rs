//! The announcement that this rank is creating a communicator.

use crate::watchdog::connecting::Connecting;
use crate::watchdog::thread::{announce_pending, fail_pending, withdraw_pending};
use std::sync::Arc;
use symmalloc_files::is_forked;
use symmalloc_watchdog::FailureReport;

/// Announces to the other ranks, until it is dropped, that this rank is creating a communicator.
#[derive(Debug)]
pub(crate) struct Announced(Arc<Connecting>);

impl Announced {
    pub(crate) fn new(connecting: Connecting) -> Self {
        let connecting = Arc::new(connecting);
        announce_pending(&connecting);
        Announced(connecting)
    }

    /// Returns the state of the creation, which other ranks may end.
    pub(crate) fn connecting(&self) -> &Arc<Connecting> {
        &self.0
    }

    /// Notifies the other ranks that this rank will not create the communicator.
    pub(crate) fn fail(&self, report: FailureReport) {
        fail_pending(&self.0, report);
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        withdraw_pending(&self.0);
    }
}
