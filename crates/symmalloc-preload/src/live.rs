//! The allocations that this library serves, over all contexts.

use crate::context::Context;
use crate::ledger::Ledger;
use crate::pools::MemPool;
use symmalloc_core::{Handle, StreamId};

/// Data of a served allocation.
#[derive(Clone, Copy)]
pub(crate) struct Live {
    pub(crate) context: &'static Context,
    pub(crate) handle: Handle,
    pub(crate) stream: StreamId,
    /// The pool that the program allocated from; `None` for `cuMemAlloc`.
    pub(crate) pool: Option<&'static MemPool>,
}

/// All served allocations.
pub(crate) static LIVE: Ledger<Live> = Ledger::new();
