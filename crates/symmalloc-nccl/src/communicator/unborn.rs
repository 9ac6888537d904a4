//! Announcement of a communicator that ranks are about to create.

use super::order::CommOrder;
use crate::watch::{self, MeetingId, UNBORN};
use symmalloc_watchdog::{CommunicatorId, RankId};

/// Announces to other ranks that this one will be in a communicator, until dropped. Other ranks thereby also detect a rank that dies after
/// NCCL has created the communicator and before it is watched.
pub(super) struct Unborn {
    met: Option<MeetingId>,
    rank: RankId,
}

impl Unborn {
    /// Announces the communicator. `rank` is this rank's number, or its number in the communicator that is split.
    pub(super) fn new(met: Option<MeetingId>, rank: u32, order: &CommOrder) -> Self {
        let communicator = CommunicatorId::of(order.as_bytes());
        let unborn = Unborn { met, rank: RankId { communicator, rank: rank | UNBORN } };
        watch::expect(unborn.met, unborn.rank);
        unborn
    }
}

impl Drop for Unborn {
    fn drop(&mut self) {
        watch::withdraw(self.met, self.rank);
    }
}
