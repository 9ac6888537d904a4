//! A communicator that ranks are about to make.

use super::order::CommOrder;
use crate::watch::{self, MeetingId, UNBORN};
use symmalloc_watchdog::{CommunicatorId, RankId};

/// Lets other ranks know that this one will be in a communicator, until this is dropped. One that dies after NCCL has made it and
/// before it is watched is missed as well.
pub(super) struct Unborn {
    met: Option<MeetingId>,
    rank: RankId,
}

impl Unborn {
    /// `rank` is this rank's number, or that in the communicator which is split.
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
