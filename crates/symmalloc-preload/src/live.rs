//! What is allocated and ours, over all contexts.

use crate::context::Context;
use crate::ledger::Ledger;
use crate::pools::MemPool;
use symmalloc_core::{Handle, StreamId};

/// What is known of an allocation of ours.
#[derive(Clone, Copy)]
pub(crate) struct Live {
    pub(crate) context: &'static Context,
    pub(crate) handle: Handle,
    pub(crate) stream: StreamId,
    /// The pool that the program took it from; `None` for `cuMemAlloc`.
    pub(crate) pool: Option<&'static MemPool>,
}

/// All of them.
pub(crate) static LIVE: Ledger<Live> = Ledger::new();
