//! Announcement of a communicator that ranks are about to create.

use crate::communicator::order::CommOrder;
use crate::watchdog::{self, MeetingId, PENDING_COMM};
use symmalloc_watchdog::{CommunicatorId, RankId};

/// Announces to other ranks that this rank is about to join a communicator, until dropped. Other ranks therefore also detect a rank that
/// dies after NCCL has created the communicator and before the watchdog watches it.
pub(super) struct PendingCommGuard {
    met: Option<MeetingId>,
    rank: RankId,
}

impl PendingCommGuard {
    /// Announces the communicator. `rank` is this rank's number, or its number in the communicator that is split.
    pub(super) fn new(met: Option<MeetingId>, rank: u32, order: &CommOrder) -> Self {
        let communicator = CommunicatorId::of(order.as_bytes());
        let guard = PendingCommGuard { met, rank: RankId { communicator, rank: rank | PENDING_COMM } };
        watchdog::expect(guard.met, guard.rank);
        guard
    }
}

impl Drop for PendingCommGuard {
    fn drop(&mut self) {
        watchdog::withdraw(self.met, self.rank);
    }
}
