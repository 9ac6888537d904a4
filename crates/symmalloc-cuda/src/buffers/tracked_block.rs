//! A block of device memory that knows which streams used it.
//!
//! A block that only its own stream uses, which is common, pays one load for this. [`Uses`] is made when a second stream
//! takes its pointer.

use super::block::OwnedBlock;
use super::uses::{AccessMode, Uses};
use crate::backend::CudaBackend;
use crate::error::DropError;
use crate::streams::is_same;
use cudarc::driver::{CudaStream, SyncOnDrop};
use once_cell::race::OnceBox;
use std::sync::Arc;
use symmalloc_core::backend::BackendError;

pub(super) struct TrackedBlock {
    block: OwnedBlock<CudaBackend>,
    uses: OnceBox<Uses>,
}

impl TrackedBlock {
    #[inline]
    pub(super) fn new(block: OwnedBlock<CudaBackend>) -> Self {
        TrackedBlock { block, uses: OnceBox::new() }
    }

    #[inline]
    pub(super) fn block(&self) -> &OwnedBlock<CudaBackend> {
        &self.block
    }

    /// The stream that it was allocated on.
    #[inline]
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        self.block.pool_stream().stream().expect("device memory is not the host's")
    }

    /// Notes a use by work that is submitted to the stream while the guard lives.
    #[inline]
    pub(super) fn begin<'a>(&'a self, stream: &'a CudaStream, access: AccessMode) -> SyncOnDrop<'a> {
        if self.block.address() == 0 || (self.uses.get().is_none() && is_same(self.stream(), stream)) {
            return SyncOnDrop::Record(None);
        }
        self.uses.get_or_init(|| Box::new(Uses::new(self.block.pool_stream().id()))).begin(&self.block, stream, access)
    }

    /// Notes a use by work that is submitted to its own stream next.
    #[inline]
    pub(super) fn use_on_own_stream(&self, access: AccessMode) {
        if let Some(uses) = self.uses.get() {
            // A registered stream leaves nothing to do after its work.
            drop(uses.begin(&self.block, self.stream(), access));
        }
    }

    /// Brings every use behind the block's own stream that freeing does not cover: those of streams that are not registered.
    fn settle(&self) -> Result<(), BackendError> {
        match self.uses.get() {
            Some(uses) => uses.order_behind_foreign(&self.block, self.stream()),
            None => Ok(()),
        }
    }

    /// Leaves the block to the holder of its handle. If its uses cannot be ordered, it stays here.
    pub(super) fn disown(&mut self) -> Result<(), BackendError> {
        self.settle()?;
        self.block.disown();
        Ok(())
    }

    /// Never frees the block.
    pub(super) fn leak(&mut self) {
        self.settle_or_keep();
        self.block.disown();
    }

    /// Before the block is freed. If nothing orders the next user behind a stream that may still use the memory, it stays
    /// allocated.
    #[cold]
    fn settle_or_keep(&mut self) {
        if !self.block.is_owned() {
            return;
        }
        if let Err(error) = self.settle() {
            self.block.state().note_drop_error(DropError::Order(error));
            self.block.disown();
        }
    }
}

impl Drop for TrackedBlock {
    #[inline]
    fn drop(&mut self) {
        if self.uses.get().is_some() {
            self.settle_or_keep();
        }
    }
}
