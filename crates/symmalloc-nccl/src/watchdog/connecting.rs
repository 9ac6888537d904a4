//! Communicators that are being created.
//!
//! NCCL's initialization waits for all ranks without a limit, and a communicator is watched only once it exists. Until then, each rank
//! announces that it is connecting. A rank whose process ends, or whose call fails, therefore ends the wait of all others.

use crate::watchdog::failure::{Failure, FailureCause, PENDING_COMM};
use crate::watchdog::settings::{WatchSettings, WatchdogMode};
use crate::watchdog::thread::{announce_pending, fail_pending, withdraw_pending};
use crate::watchdog::watched::MeetingId;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use symmalloc_watchdog::{CommunicatorId, FailureReport, RankId};

/// A communicator that this rank is creating.
#[derive(Debug)]
pub(crate) struct Connecting {
    name: Arc<str>,
    meeting: Option<MeetingId>,
    /// This rank, with [`PENDING_COMM`]: its number in the communicator, or in the one that is split.
    rank: RankId,
    /// Number of ranks; `None` if it is unknown until the communicator exists.
    ranks: Option<u32>,
    /// `true` if the failure of another rank ends the creation.
    ends_early: bool,
    /// The failure of another rank.
    failure: OnceLock<Arc<Failure>>,
}

impl Connecting {
    /// Returns the failure of another rank, for which the creation must end.
    pub(crate) fn failure(&self) -> Option<&Arc<Failure>> {
        self.failure.get()
    }

    pub(super) fn meeting(&self) -> Option<MeetingId> {
        self.meeting
    }

    pub(super) fn rank(&self) -> RankId {
        self.rank
    }

    pub(super) fn ranks(&self) -> Option<u32> {
        self.ranks
    }

    /// Records why the creation must end. Only the first cause counts.
    pub(super) fn fail(&self, cause: FailureCause) {
        if !self.ends_early {
            return;
        }
        self.failure.get_or_init(|| {
            Arc::new(Failure {
                communicator: Arc::clone(&self.name),
                rank: self.rank.rank & !PENDING_COMM,
                cause: cause.with_parent_ranks(),
                collective: None,
                waited: Duration::ZERO,
            })
        });
    }
}

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
        let rank = RankId { communicator, rank: rank | PENDING_COMM };
        let (name, ends_early) = (Arc::clone(name), settings.mode() != WatchdogMode::Off);
        let connecting = Arc::new(Connecting { name, meeting, rank, ranks, ends_early, failure: OnceLock::new() });
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
