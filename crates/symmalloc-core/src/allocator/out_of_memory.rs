//! The out-of-memory path: steps 3 to 5 of an allocation. [`crate::allocator`] lists all steps.

use super::gate::{Gate, Request};
use super::pool::{HeapCell, PoolRef};
use super::recorder::RecordingEnd;
use super::{Allocator, Retry};
use crate::config::errors::{
    AllocateError, LimitScope, OutOfMemory, OutOfMemoryCause, PoolSleeps, Remedy, UnknownError,
};
use crate::config::op::{Op, Refusal};
use crate::config::{PoolConfig, Reclaim, SegmentPolicy};
use crate::heap::trim::Released;
use crate::heap::{Heap, Shortage};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::base::SLOT_BYTES;
use crate::types::ids::PoolId;
use crate::types::units::bytes;
use smallvec::SmallVec;
use std::sync::Arc;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Sets the callback that runs before an allocation fails. No lock is held during the call, so the callback can use
    /// the allocator. It is not called for a request that would fail even if the program freed all memory, because the
    /// request exceeds the limit, the part of the limit that reserved segments leave, or the heap's only segment. If an
    /// allocation inside the callback fails, it calls the callback again. To keep ranks equal, the callback's actions
    /// must depend only on the program.
    pub fn set_failure_callback(&self, callback: impl Fn(&Self, &OutOfMemory) -> Retry + Send + Sync + 'static) {
        *self.failure_callback.lock() = Some(Arc::new(callback));
    }

    /// Runs steps 3 to 5 of the [module documentation](self).
    #[cold]
    #[inline(never)]
    #[allow(clippy::boxed_local, reason = "the callers have a box, and unboxing would cost them a copy")]
    pub(super) fn retry<'a, T>(
        &'a self,
        request: Request,
        heap: &HeapCell<L>,
        mut shortage: Box<Shortage>,
        gate: Option<&mut Gate<'a, L>>,
        attempt: impl Fn(&mut Heap<L>) -> Result<T, Box<Shortage>>,
    ) -> Result<T, AllocateError> {
        let Request { pool, stream, size_bytes } = request;
        let mut open = self.recorder.open_gate();
        let gate = gate.unwrap_or(&mut open);
        let entry = self.pool(pool)?;
        let span = tracing::debug_span!(
            target: "symmalloc",
            "memory.shortage",
            pool = pool.0,
            stream = stream.0,
            requested_bytes = size_bytes,
        );
        let _entered = span.enter();
        let mut retries = 0;
        let mut may_reclaim = true;
        // Bytes released for this request. They are recorded only if the request fails. If the request succeeds, a
        // replay releases these bytes without a record.
        let mut unrecorded_bytes: SmallVec<[u64; 2]> = SmallVec::new();
        loop {
            let (missing, demand, cause, released_bytes) = match *shortage {
                Shortage::Memory { missing, demand, cause, released_bytes } => (missing, demand, cause, released_bytes),
                Shortage::Fence(error) => {
                    gate.end(RecordingEnd::Driver(error.clone()));
                    return Err(AllocateError::Fence { stream: request.stream, error });
                }
                Shortage::Asleep => return Err(PoolSleeps { pool: request.pool }.into()),
                Shortage::Closed => return Err(UnknownError::DestroyedPool { pool: request.pool }.into()),
            };
            let is_hopeless = self.is_hopeless(entry, heap, bytes(demand), &cause);
            let can_help = match cause {
                _ if is_hopeless => false,
                // Private pools, which differ between ranks, also use up this limit. It must not move a symmetric
                // pool's blocks.
                OutOfMemoryCause::Limit { scope: LimitScope::Allocator, .. } => !entry.config().symmetric(),
                OutOfMemoryCause::Limit { .. } => true,
                _ => false,
            };
            let is_over_all = matches!(cause, OutOfMemoryCause::Limit { scope: LimitScope::Allocator, .. });
            let has_dropped = is_over_all && !is_hopeless && self.has_abandoned() && {
                // The records must be in the order of the events.
                for size_bytes in unrecorded_bytes.drain(..) {
                    gate.note(Op::Reclaim { pool: request.pool, stream: request.stream, size_bytes });
                }
                self.destroy_abandoned_for(pool, gate) > 0
            };
            let after = if has_dropped {
                "dropped"
            } else if can_help && may_reclaim {
                // Free memory next to the request's place may have been released. More is then missing than before, and
                // the next round releases that too. If less than the missing amount was released, nothing is left to
                // release.
                may_reclaim = self.reclaim(entry, heap, bytes(missing), gate) >= bytes(missing);
                unrecorded_bytes.push(bytes(missing));
                "reclaim"
            } else {
                for size_bytes in unrecorded_bytes.drain(..) {
                    gate.note(Op::Reclaim { pool: request.pool, stream: request.stream, size_bytes });
                }
                let error = self.out_of_memory(entry, heap, request, bytes(missing.min(demand)), cause);
                let callback = self.failure_callback.lock().clone();
                let may_retry = retries < self.config().retries_max() && !is_hopeless;
                match callback.filter(|_| may_retry).map(|callback| gate.pause(|| callback(self, &error))) {
                    Some(Retry::Again) => retries += 1,
                    Some(Retry::IfReleased) if self.context.budget.released_bytes() > released_bytes => retries += 1,
                    Some(Retry::GiveUp | Retry::IfReleased) | None => {
                        return Err(self.refuse(heap, request, error, gate));
                    }
                }
                "callback"
            };
            tracing::debug!(
                name: "memory.retry",
                target: "symmalloc",
                pool = pool.0,
                stream = stream.0,
                requested_bytes = size_bytes,
                missing_bytes = bytes(missing),
                after,
            );
            let mut heap = heap.lock();
            if heap.id().pool != pool {
                return Err(UnknownError::DestroyedPool { pool }.into());
            }
            heap.count_retry();
            match attempt(&mut heap) {
                Ok(done) => return Ok(done),
                Err(again) => shortage = again,
            }
        }
    }

    /// Returns `true` if a request that needs `demand_bytes` of memory in its heap fails even if the program frees
    /// every allocation and trims every pool: the memory exceeds the part of the limit that reserved segments leave, or
    /// the heap's only segment, or its range. The answer depends only on the configuration, the limits and the ops.
    fn is_hopeless(
        &self,
        entry: PoolRef<'_, L>,
        heap: &HeapCell<L>,
        demand_bytes: u64,
        cause: &OutOfMemoryCause,
    ) -> bool {
        let staying_bytes = |pool: PoolRef<'_, L>| match pool.config().segments() {
            SegmentPolicy::Reserved { .. } => pool.budget().reserved_bytes(),
            _ => 0,
        };
        match cause {
            OutOfMemoryCause::Limit { scope, limit_bytes } => {
                let mut fixed_bytes = staying_bytes(entry);
                // Only the default pool cannot be destroyed.
                if *scope == LimitScope::Allocator
                    && entry.id() != PoolId::DEFAULT
                    && let Ok(default) = self.pool(PoolId::DEFAULT)
                {
                    fixed_bytes += staying_bytes(default);
                }
                // A heap that holds more than a lowered limit can still serve the request from what it holds.
                demand_bytes > limit_bytes.saturating_sub(fixed_bytes).max(heap.lock().mapped_bytes())
            }
            // A quota can be raised.
            OutOfMemoryCause::SegmentFull { segment_bytes } => {
                !entry.config().has_quota() && demand_bytes > *segment_bytes
            }
            OutOfMemoryCause::AddressesFull { needed_bytes, .. } => *needed_bytes > SLOT_BYTES,
            OutOfMemoryCause::Driver(_) => false,
        }
    }

    /// Step 3: releases the memory that `reclaim` allows, up to the missing amount. Returns the released bytes. If the
    /// driver fails to release memory, this memory still counts as reserved, the call is not repeated, and the result
    /// is 0.
    pub(super) fn reclaim(
        &self,
        entry: PoolRef<'_, L>,
        heap: &HeapCell<L>,
        missing_bytes: u64,
        gate: &mut Gate<'_, L>,
    ) -> u64 {
        let goal_bytes = Some(missing_bytes);
        let released = match entry.config().reclaim() {
            Reclaim::Never => Released::default(),
            Reclaim::Heap => heap.lock().trim(&self.context, goal_bytes),
            Reclaim::Pool => self.release_free(entry, goal_bytes),
        };
        gate.note_released(&released);
        if released.error.is_none() { released.bytes } else { 0 }
    }

    fn out_of_memory(
        &self,
        entry: PoolRef<'_, L>,
        heap: &HeapCell<L>,
        request: Request,
        missing_bytes: u64,
        cause: OutOfMemoryCause,
    ) -> OutOfMemory {
        let allocated_bytes: u64 = entry.heaps().map(|heap| heap.lock().ledger().usage().allocated_bytes()).sum();
        let free_bytes = entry.budget().reserved_bytes().saturating_sub(allocated_bytes);
        let heap = heap.lock();
        let free_in_heap_bytes = heap.mapped_bytes().saturating_sub(heap.ledger().usage().allocated_bytes());
        OutOfMemory {
            pool: request.pool,
            stream: request.stream,
            requested_bytes: request.size_bytes,
            missing_bytes,
            reserved_bytes: entry.budget().reserved_bytes(),
            allocated_bytes,
            largest_free_bytes: heap.largest_free_bytes(),
            remedy: remedy(entry.config(), request, free_bytes, free_in_heap_bytes),
            cause,
        }
    }

    /// Step 5: records the refusal and returns the error.
    fn refuse(
        &self,
        heap: &HeapCell<L>,
        request: Request,
        error: OutOfMemory,
        gate: &mut Gate<'_, L>,
    ) -> AllocateError {
        fold_refusal(heap, request, Refusal::from(&error.cause), gate);
        tracing::warn!(
            name: "memory.refused",
            target: "symmalloc",
            pool = request.pool.0,
            stream = request.stream.0,
            requested_bytes = request.size_bytes,
            missing_bytes = error.missing_bytes,
            reserved_bytes = error.reserved_bytes,
            allocated_bytes = error.allocated_bytes,
            largest_free_bytes = error.largest_free_bytes,
            cause = ?error.cause,
        );
        AllocateError::OutOfMemory(Box::new(error))
    }
}

/// Returns the remedy to suggest for a pool that has `free_bytes` free, `free_in_heap_bytes` of them in the heap of the
/// request.
fn remedy(config: &PoolConfig, request: Request, free_bytes: u64, free_in_heap_bytes: u64) -> Option<Remedy> {
    if free_bytes < request.size_bytes {
        return None;
    }
    let can_stitch = !config.symmetric() && config.stitching().is_none() && !config.has_quota();
    Some(match config.segments() {
        _ if free_in_heap_bytes < request.size_bytes => Remedy::ShareStreams { free_bytes },
        SegmentPolicy::Fixed(fixed) if !fixed.unsplit => Remedy::Expand { free_bytes },
        SegmentPolicy::Expandable(_) if can_stitch => Remedy::Stitch { free_bytes },
        _ => Remedy::Trim { free_bytes },
    })
}

/// Adds the refusal of a request to the digest and the recording.
pub(super) fn fold_refusal<L: Lock>(heap: &HeapCell<L>, request: Request, refusal: Refusal, gate: &mut Gate<'_, L>) {
    let Request { pool, stream, size_bytes } = request;
    heap.lock().note_refusal(refusal, stream, size_bytes);
    gate.note(Op::Refuse { pool, stream, size_bytes, refusal });
}
