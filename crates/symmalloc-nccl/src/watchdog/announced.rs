//! The announcement that this rank is creating a communicator.

use crate::watchdog::connecting::Connecting;
use crate::watchdog::settings::WatchSettings;
use crate::watchdog::thread::{announce_pending, fail_pending, withdraw_pending};
use crate::watchdog::watched::MeetingId;
use std::sync::Arc;
use symmalloc_watchdog::{CommunicatorId, FailureReport};

/// Announces to the other ranks, until it is dropped, that this rank is creating a communicator.
#[derive(Debug)]
pub(crate) struct Announced(Arc<Connecting>);

impl Announced {
    /// Announces the communicator. `rank` is this rank's number in it, or in the communicator that is split.
    pub(crate) fn new(
        name: &Arc<str>,
        meeting: Option<MeetingId>,
        rank: u32,
        ranks: Option<u32>,
        communicator: CommunicatorId,
        settings: &WatchSettings,
    ) -> Self {
        let connecting = Arc::new(Connecting::new(name, meeting, rank, ranks, communicator, settings));
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
        withdraw_pending(&self.0);
    }
}
