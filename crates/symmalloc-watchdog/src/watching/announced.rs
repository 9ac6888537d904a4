//! The announcement that this rank is creating a communicator.

use crate::message::FailureReport;
use crate::watching::connecting::Connecting;
use crate::watching::thread::{announce_pending, blame_silent, fail_pending, withdraw_pending};
use std::sync::Arc;
use symmalloc_files::is_forked;

/// Announces to the other ranks, until it is dropped, that this rank is creating a communicator.
#[derive(Debug)]
pub struct Announced(Arc<Connecting>);

impl Announced {
    /// Announces the creation. Waits up to a second until the announcement has been sent.
    pub fn new(connecting: Connecting) -> Self {
        let connecting = Arc::new(connecting);
        announce_pending(&connecting);
        Announced(connecting)
    }

    /// Returns the state of the creation, which other ranks may end.
    pub fn connecting(&self) -> &Arc<Connecting> {
        &self.0
    }

    /// Looks for the cause of a creation that took too long: a process of the meeting that is stopped or cannot be reached is the
    /// [failure](Connecting::failure) then. Waits up to a second.
    pub fn blame_silent(&self) {
        blame_silent(&self.0);
    }

    /// Notifies the other ranks that this rank will not create the communicator. Waits up to a second until the notification has been sent.
    pub fn fail(&self, report: FailureReport) {
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
