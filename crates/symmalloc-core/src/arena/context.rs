//! The state that all heaps of an allocator share.

use crate::pointers::SegmentDirectory;
use crate::stats::budget::Budget;
use crate::streams::clocks::StreamClocks;
use crate::sync::lock::Lock;
use crate::types::backend::Backend;

/// The state that all heaps share. Only the budget influences decisions.
pub(crate) struct Context<B: ?Sized, L: Lock> {
    pub(crate) clocks: L::Cell<StreamClocks>,
    pub(crate) directory: L::Cell<SegmentDirectory>,
    /// The budget over all pools.
    pub(crate) budget: Budget<L>,
    pub(crate) backend: B,
}

/// The context without the backend's type, for code that calls the driver and need not be monomorphized.
pub(crate) type DynContext<'a, L> = Context<dyn Backend + 'a, L>;
