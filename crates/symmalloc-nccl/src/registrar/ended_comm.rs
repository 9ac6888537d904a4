//! Ended communicators that other ranks may still name in their messages.

use symmalloc_core::PoolId;

/// A communicator that ended and was removed on this rank.
#[derive(Clone, Debug)]
pub(crate) struct EndedComm {
    pub(super) name: String,
    /// Identifier of the communicator in messages to other ranks.
    pub(super) communicator: u64,
    pub(super) ranks: u32,
    /// Pools that were attached to it.
    pub(super) pools: Vec<PoolId>,
}
