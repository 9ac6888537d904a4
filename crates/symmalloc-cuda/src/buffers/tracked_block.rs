//! A block of device memory that tracks which streams used it.
//!
//! Most blocks are used only by the stream that they were allocated on. For them, tracking costs one load. [`Uses`] is created when a
//! second stream takes the pointer.

use super::block::OwnedBlock;
use super::uses::{AccessMode, Uses};
use crate::backend::CudaBackend;
use crate::device::CudaDevice;
use crate::error::DropError;
use crate::pools::{StreamAllocator, StreamAllocatorRef};
use crate::streams::is_same;
use cudarc::driver::{CudaStream, SyncOnDrop};
use once_cell::race::OnceBox;
use std::mem;
use std::sync::Arc;
use symmalloc_core::Handle;
use symmalloc_core::backend::BackendError;
use symmalloc_files::is_forked;

pub(super) struct TrackedBlock<A: StreamAllocatorRef<Memory = CudaBackend>> {
    block: OwnedBlock<A>,
    uses: OnceBox<Uses>,
}

/// A part of a block. Each part tracks its uses separately. The block is freed when its last part is dropped.
pub(super) struct TrackedPart<A: StreamAllocatorRef<Memory = CudaBackend>> {
    block: Arc<OwnedBlock<A>>,
    /// Address of the part's first byte; 0 if the block is empty.
    address: u64,
    uses: OnceBox<Uses>,
}

/// A reference to a tracked block, or to a part of one.
#[derive(Clone, Copy)]
pub(super) struct TrackedBlockRef<'b> {
    allocator: &'b StreamAllocator,
    handle: Handle,
    address: u64,
    uses: &'b OnceBox<Uses>,
}

impl<'b> TrackedBlockRef<'b> {
    /// Returns the address of the first byte; 0 if the block is empty.
    #[inline]
    pub(super) fn address(self) -> u64 {
        self.address
    }

    /// Returns the device.
    pub(super) fn device(self) -> &'b Arc<CudaDevice> {
        self.allocator.state().device()
    }

    /// Returns the stream that the block was allocated on.
    #[inline]
    pub(super) fn stream(self) -> &'b Arc<CudaStream> {
        self.allocator.stream().expect("device memory is allocated on a device stream")
    }

    /// Records a use by work that is submitted to the stream while the guard is alive.
    #[inline]
    pub(super) fn begin<'a>(self, stream: &'a CudaStream, access: AccessMode) -> SyncOnDrop<'a>
    where
        'b: 'a,
    {
        if self.address == 0 || (self.uses.get().is_none() && is_same(self.stream(), stream)) {
            return SyncOnDrop::Record(None);
        }
        let uses = self.uses.get_or_init(|| Box::new(Uses::new(self.allocator.stream_id())));
        uses.begin(self.allocator, self.handle, stream, access)
    }

    /// Records a use by work that the caller submits next, to the stream that the block was allocated on.
    #[inline]
    pub(super) fn use_on_own_stream(self, access: AccessMode) {
        if let Some(uses) = self.uses.get() {
            // For a registered stream, dropping the guard does nothing.
            drop(uses.begin(self.allocator, self.handle, self.stream(), access));
        }
    }

    /// Counts a lent slice of the block until [`Uses::end_lend`]. Returns `None` if the block is empty.
    pub(super) fn begin_lend(self) -> Option<&'b Uses> {
        if self.address == 0 {
            return None;
        }
        let uses = self.uses.get_or_init(|| Box::new(Uses::new(self.allocator.stream_id())));
        uses.begin_lend();
        Some(uses)
    }

    /// Makes the block's stream wait for every use that the allocator does not track: see [`Uses::settle`].
    fn settle(self) -> Result<(), BackendError> {
        match self.uses.get() {
            Some(uses) => uses.settle(self.allocator, self.stream()),
            None => Ok(()),
        }
    }
}

impl<A: StreamAllocatorRef<Memory = CudaBackend>> TrackedBlock<A> {
    #[inline]
    pub(super) fn new(block: OwnedBlock<A>) -> Self {
        TrackedBlock { block, uses: OnceBox::new() }
    }

    #[inline]
    pub(super) fn block(&self) -> &OwnedBlock<A> {
        &self.block
    }

    #[inline]
    pub(super) fn as_ref(&self) -> TrackedBlockRef<'_> {
        TrackedBlockRef {
            allocator: self.block.allocator(),
            handle: self.block.handle(),
            address: self.block.address(),
            uses: &self.uses,
        }
    }

    fn settle(&self) -> Result<(), BackendError> {
        self.as_ref().settle()
    }

    /// Converts the block into a part that spans all of it.
    pub(super) fn into_part(mut self) -> TrackedPart<A> {
        let block = Arc::new(self.block.take());
        let address = block.address();
        TrackedPart { block, address, uses: mem::take(&mut self.uses) }
    }

    /// Passes ownership of the block to the holder of its handle. If the block's uses cannot be ordered, this value keeps the ownership.
    pub(super) fn disown(&mut self) -> Result<(), BackendError> {
        self.settle()?;
        self.block.disown();
        Ok(())
    }

    /// Leaks the block.
    pub(super) fn leak(&mut self) {
        self.settle_or_keep();
        self.block.disown();
    }

    /// Orders all uses before the block is freed. If the next user cannot be ordered after a stream that may still use the memory, the
    /// memory stays allocated.
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

impl<A: StreamAllocatorRef<Memory = CudaBackend>> Drop for TrackedBlock<A> {
    #[inline]
    fn drop(&mut self) {
        if self.uses.get().is_some() && !is_forked() {
            self.settle_or_keep();
        }
    }
}

impl<A: StreamAllocatorRef<Memory = CudaBackend>> TrackedPart<A> {
    #[inline]
    pub(super) fn as_ref(&self) -> TrackedBlockRef<'_> {
        TrackedBlockRef {
            allocator: self.block.allocator(),
            handle: self.block.handle(),
            address: self.address,
            uses: &self.uses,
        }
    }

    /// Returns a reference to the address, for kernel arguments.
    #[inline]
    pub(super) fn address_ref(&self) -> &u64 {
        &self.address
    }

    /// Returns another part of the block, which begins `offset_bytes` after the start of this one. First makes the block's stream wait for
    /// all uses of this part, so that the new part starts with no uses by other streams, except uses for which the stream could not wait
    /// because of a capture.
    pub(super) fn behind(&self, offset_bytes: u64) -> Self {
        self.as_ref().use_on_own_stream(AccessMode::Write);
        let address = if self.address == 0 { 0 } else { self.address + offset_bytes };
        let uses = OnceBox::new();
        if let Some(inherited) = self.uses.get().and_then(|uses| uses.of_part(self.block.allocator().stream_id())) {
            uses.get_or_init(|| Box::new(inherited));
        }
        TrackedPart { block: Arc::clone(&self.block), address, uses }
    }

    /// Moves the start of the part to this address.
    pub(super) fn begin_at(&mut self, address: u64) {
        self.address = address;
    }
}

impl<A: StreamAllocatorRef<Memory = CudaBackend>> Drop for TrackedPart<A> {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if let Err(error) = self.as_ref().settle() {
            self.block.state().note_drop_error(DropError::Order(error));
            // The next user of the memory cannot be ordered after this part's uses, so the block is never freed.
            mem::forget(Arc::clone(&self.block));
        }
    }
}
