//! Ops that occur in recordings, but that programs do not call themselves.

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

/// The ops that programs do not call themselves: recovery from a failed request, failures that are in the digest, and
/// revivals. A replay calls these ops. So does a layer above the allocator, such as a registrar, if a request fails in
/// this layer on one rank and never reaches the allocator.
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

    /// Records a request that failed, as [`Op::Refuse`]. The failure is in the digest. Has no effect for a request
    /// above the maximum size of a segment: such a request is an error before it is an op
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

    /// Records a sleep or wake that failed, as [`Op::Stay`]. The attempt is in the digest.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn stay(&self, pool: PoolId, asked: Option<Contents>) -> Result<(), UnknownError> {
        let mut gate = self.allocator.gate();
        self.allocator.pool(pool)?.heaps().for_each(|heap| heap.lock().note_asked(asked));
        gate.note(Op::Stay { pool, asked });
        Ok(())
    }

    /// Revives an allocation at its placement, in a block of `block_bytes`. The revival counts as an op of the program.
    ///
    /// # Errors
    /// See [`RestoreError`]. For example, returns [`RestoreError::Gone`] if there is no memory at the placement, or not
    /// enough for such a block, and [`RestoreError::UnknownLive`] if another allocation is live there. After any error
    /// except [`RestoreError::Fence`], nothing has changed.
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
