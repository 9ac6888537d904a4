//! Ops of recordings that no program calls.

use super::Allocator;
use super::gate::Request;
use super::out_of_memory::fold_refusal;
use super::restore::RevivedPlace;
use crate::config::errors::UnknownError;
use crate::config::op::{Contents, Op, Refusal};
use crate::config::restore_error::{LayoutError, RestoreError};
use crate::history::layout::AllocationLayout;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::handle::Allocation;
use crate::types::ids::{PoolId, StreamId};
use crate::types::units::SEGMENT_BYTES_MAX;
use smallvec::SmallVec;

/// The ops that no program calls: recovery from a failed request, failures that are in the digest, and revivals. A replay
/// makes them, and so do layers that fail before they reach the allocator on one rank, such as a registrar.
pub struct ReplayOps<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Returns the ops that a replay of a recording needs, in addition to those of a program.
    pub fn replay(&self) -> ReplayOps<'_, B, L> {
        ReplayOps { allocator: self }
    }
}

impl<B: Backend, L: Lock> ReplayOps<'_, B, L> {
    /// Releases memory for a recorded request that failed: [`Op::Reclaim`]. Has no effect for a request above the
    /// maximum size of a segment, as in [`refuse`](Self::refuse).
    ///
    /// # Errors
    /// Returns an error if the pool or the stream of a smaller request is unknown.
    pub fn reclaim(&self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Result<(), UnknownError> {
        if size_bytes > SEGMENT_BYTES_MAX {
            return Ok(());
        }
        let allocator = self.allocator;
        let mut gate = allocator.gate();
        let (entry, heap) = (allocator.pool(pool)?, allocator.heap_for(pool, stream)?);
        allocator.reclaim(entry, heap, size_bytes, &mut gate);
        gate.note(Op::Reclaim { pool, stream, size_bytes });
        Ok(())
    }

    /// Records a request that failed, which is in the digest: [`Op::Refuse`]. Has no effect for a request above the
    /// maximum size of a segment: such a request is an error before it is an op
    /// ([`AllocateError::TooLarge`](crate::config::errors::AllocateError::TooLarge)), and a digest has no room for its
    /// size. Recordings of other allocators contain such requests.
    ///
    /// # Errors
    /// Returns an error if the pool or the stream of a smaller request is unknown.
    pub fn refuse(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
        refusal: Refusal,
    ) -> Result<(), UnknownError> {
        if size_bytes > SEGMENT_BYTES_MAX {
            return Ok(());
        }
        let mut gate = self.allocator.gate();
        let heap = self.allocator.heap_for(pool, stream)?;
        fold_refusal(heap, Request { pool, stream, size_bytes }, refusal, &mut gate);
        Ok(())
    }

    /// Records a sleep or wake that failed, which is in the digest: [`Op::Stay`].
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn stay(&self, pool: PoolId, asked: Option<Contents>) -> Result<(), UnknownError> {
        let mut gate = self.allocator.gate();
        self.allocator.pool(pool)?.heaps().for_each(|heap| heap.lock().note_asked(asked));
        gate.note(Op::Stay { pool, asked });
        Ok(())
    }

    /// Revives an allocation at its placement, in a block of `block_bytes`. It counts as an op of the program.
    ///
    /// # Errors
    /// Returns [`RestoreError::Gone`] if there is no memory at the placement, or not enough for such a block,
    /// [`RestoreError::UnknownLive`] if another allocation is live there, and others. Nothing has changed then, unless
    /// it is [`RestoreError::Fence`].
    pub fn revive(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
        place: RevivedPlace,
        name: Option<&str>,
    ) -> Result<Allocation, RestoreError> {
        let allocator = self.allocator;
        allocator.known_stream(stream)?;
        let mut gate = allocator.gate();
        let entry = allocator.pool(pool)?;
        entry.check_layout_holds()?;
        let mut heap = allocator.heap_for(pool, stream)?.lock();
        if heap.has_stitched() {
            return Err(LayoutError::Stitched { pool }.into());
        }
        let saved = AllocationLayout {
            offset_bytes: place.placement.offset_bytes,
            size_bytes: place.block_bytes,
            requested_bytes: size_bytes,
            stream,
            used_by: SmallVec::new(),
            name: name.map(Into::into),
        };
        let revived = heap.revive(&allocator.context, place.placement, &saved)?;
        drop(heap);
        allocator.note_revived(pool, &revived, &mut gate);
        Ok(revived.allocation)
    }
}
