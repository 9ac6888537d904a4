//! Communicators that are being created.
//!
//! NCCL's initialization waits for all ranks without a time limit, and a communicator is watched only once it exists. Until then, each rank
//! [announces](crate::Announced) that it is connecting. If a rank's process ends or its call fails, the other ranks stop waiting.

use crate::ids::{CommunicatorId, RankId};
use crate::watching::failure::{Failure, FailureCause, PENDING_COMM};
use crate::watching::settings::{WatchSettings, WatchdogMode};
use crate::watching::watched::MeetingId;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A communicator that this rank is creating.
#[derive(Debug)]
pub struct Connecting {
    name: Arc<str>,
    meeting: Option<MeetingId>,
    /// This rank, marked with [`PENDING_COMM`]. In a split, its number is that in the parent, and otherwise that in the new communicator.
    rank: RankId,
    /// Number of ranks; `None` if it is unknown until the communicator exists.
    ranks: Option<u32>,
    /// `true` if the failure of another rank ends the creation.
    ends_early: bool,
    /// The failure of another rank.
    failure: OnceLock<Arc<Failure>>,
}

impl Connecting {
    /// Creates the state of a creation. In a split, `rank` is this rank's number in the parent, and otherwise that in the new communicator.
    pub fn new(
        name: &Arc<str>,
        meeting: Option<MeetingId>,
        rank: u32,
        ranks: Option<u32>,
        communicator: CommunicatorId,
        settings: &WatchSettings,
    ) -> Self {
        Connecting {
            name: Arc::clone(name),
            meeting,
            rank: RankId { communicator, rank: rank | PENDING_COMM },
            ranks,
            ends_early: settings.mode() != WatchdogMode::Off,
            failure: OnceLock::new(),
        }
    }

    /// Returns the failure of another rank that ends the creation.
    pub fn failure(&self) -> Option<&Arc<Failure>> {
        self.failure.get()
    }

    /// Returns the meeting of the ranks, if any.
    pub fn meeting(&self) -> Option<MeetingId> {
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
