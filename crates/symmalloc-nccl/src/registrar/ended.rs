//! Communicators that have ended, of which other ranks may still speak.

use symmalloc_core::PoolId;

/// A communicator that ended and that this rank has let go of.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(super) name: String,
    /// What it is called to other ranks.
    pub(super) communicator: u64,
    pub(super) ranks: u32,
    /// The pools that were attached to it.
    pub(super) pools: Vec<PoolId>,
}
