//! Fencing orders a block's next user after its earlier users (rule D3). A part of [`Arena`].
//!
//! While a block is allocated, the arena records the block's uses by other streams. When the block is freed, these uses
//! become events. The events stay with the free block until the stream that takes the block waits for them. Only this
//! file makes these driver calls.

use super::Arena;
use crate::blocks::table::{BlockState, Slot};
use crate::pointers::SegmentDirectory;
use crate::stats::budget::Budget;
use crate::streams::clocks::{StreamClocks, Tick, WAITS_MAX};
use crate::streams::fences::{Fence, FenceSetId, Fences};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError};
use crate::types::ids::StreamId;
use crate::types::work;
use smallvec::SmallVec;

/// The state that all heaps share. Only the budget influences decisions.
pub(crate) struct Context<B: ?Sized, L: Lock> {
    pub(crate) clocks: L::Cell<StreamClocks>,
    pub(crate) directory: L::Cell<SegmentDirectory>,
    /// The budget over all pools.
    pub(crate) budget: Budget<L>,
    pub(crate) backend: B,
}

/// The context without the backend's type, for code that calls the driver and need not be compiled once for each
/// backend.
pub(crate) type DynContext<'a, L> = Context<dyn Backend + 'a, L>;

impl Arena {
    /// Records that work on `stream`, which is not the owner, uses an allocated block.
    #[inline]
    pub(crate) fn add_use(&mut self, slot: Slot, stream: StreamId) {
        let block = self.table.block_mut(slot);
        block.fences = self.fences.add(block.fences, Fence::of(stream));
    }

    /// Records that work on `stream`, up to a tick, uses a free block after its earlier users.
    pub(crate) fn add_use_of_free(&mut self, slot: Slot, stream: StreamId, tick: Tick) {
        let block = self.table.block_mut(slot);
        let BlockState::Free { stream: owner, since } = block.state else { unreachable!("the block is free") };
        if owner == stream || since == 0 {
            block.state = BlockState::Free { stream, since: since.max(tick) };
        } else {
            block.fences = self.fences.add(block.fences, Fence { stream, tick, event: None });
        }
    }

    /// Records an event on every other stream that used an allocated block. If one call fails, no event remains.
    #[inline]
    pub(crate) fn fence_uses<L: Lock>(&mut self, context: &DynContext<'_, L>, slot: Slot) -> Result<(), BackendError> {
        let set = self.table.block(slot).fences;
        let uses = self.fences.fences(set);
        work::count(uses.len());
        let mut fences = Fences::new();
        for stream in uses.iter().map(|fence| fence.stream) {
            // The tick ends before the event is recorded, so that the event covers all of it.
            let tick = context.clocks.lock().advance(stream);
            match context.backend.record(stream) {
                Ok(event) => fences.push(Fence { stream, tick, event: Some(event) }),
                Err(error) => {
                    fences.iter().filter_map(|fence| fence.event).for_each(|event| context.backend.recycle(event));
                    return Err(error);
                }
            }
        }
        self.fences.replace(set, fences);
        Ok(())
    }

    /// Gives every other stream that used an allocated block a fence with the stream's current tick and without an
    /// event. A next user that has not waited for this tick waits for all work that the stream has by then. Makes no
    /// driver call.
    pub(crate) fn fence_uses_by_clock<L: Lock>(&mut self, context: &DynContext<'_, L>, slot: Slot) {
        let set = self.table.block(slot).fences;
        if set.is_empty() {
            return;
        }
        let clocks = context.clocks.lock();
        let uses = self.fences.fences(set).iter();
        let fences = uses.map(|fence| Fence { tick: clocks.now(fence.stream), ..*fence }).collect();
        self.fences.replace(set, fences);
    }

    /// Orders `stream` after all earlier users of the free block, on the device. If a call fails, another attempt
    /// performs the remaining waits.
    pub(crate) fn wait_for_earlier_users<L: Lock>(
        &mut self,
        context: &DynContext<'_, L>,
        slot: Slot,
        stream: StreamId,
    ) -> Result<(), BackendError> {
        let block = self.table.block(slot);
        if block.is_ready_for(stream) {
            return Ok(());
        }
        let BlockState::Free { stream: owner, since } = block.state else {
            unreachable!("the free index names only free blocks");
        };
        let set = block.fences;
        work::count(self.fences.fences(set).len());
        let owner = Fence { stream: owner, tick: since, event: None };
        for fence in self.fences.fences(set) {
            order_after(context, stream, *fence)?;
        }
        if self.stream.is_some() {
            // No other stream takes from this heap, so no stream waits for these fences again.
            self.fences.clear(set);
            self.table.block_mut(slot).fences = FenceSetId::EMPTY;
        } else {
            order_after(context, stream, owner)?;
        }
        self.recycle_spent(context);
        Ok(())
    }

    /// Drops the fences of a free block, for which its next user has waited.
    pub(crate) fn drop_fences<L: Lock>(&mut self, context: &DynContext<'_, L>, slot: Slot) {
        let fences = std::mem::replace(&mut self.table.block_mut(slot).fences, FenceSetId::EMPTY);
        if !fences.is_empty() {
            self.fences.clear(fences);
            self.recycle_spent(context);
        }
    }

    /// Returns to the backend the events to which no fence refers any more.
    #[inline(always)]
    pub(crate) fn recycle_spent<L: Lock>(&mut self, context: &DynContext<'_, L>) {
        self.fences.drain_spent(|event| context.backend.recycle(event));
    }

    /// Drops the fences that have completed, according to the backend. This does not affect placement. Returns the
    /// number of dropped fences. `places` are the places of plans.
    pub(crate) fn drop_completed_fences<L: Lock>(
        &mut self,
        context: &DynContext<'_, L>,
        places: &[Slot],
    ) -> Result<u64, BackendError> {
        let mut dropped = 0;
        for slot in self.all_blocks().into_iter().chain(places.iter().copied()) {
            let set = self.table.block(slot).fences;
            let mut completed = SmallVec::<[StreamId; 2]>::new();
            for fence in self.fences.fences(set) {
                if let Some(event) = fence.event
                    && context.backend.query(event)?
                {
                    completed.push(fence.stream);
                }
            }
            dropped += completed.len() as u64;
            let left = self.fences.drop_over(set, |fence| completed.contains(&fence.stream));
            self.table.block_mut(slot).fences = left;
            self.recycle_spent(context);
        }
        Ok(dropped)
    }
}

/// Orders `stream` after a fence, unless it has already waited for it.
fn order_after<L: Lock>(context: &DynContext<'_, L>, stream: StreamId, fence: Fence) -> Result<(), BackendError> {
    if context.clocks.lock().covers(stream, fence.stream, fence.tick) {
        return Ok(());
    }
    match fence.event {
        Some(event) => {
            work::count(WAITS_MAX);
            context.backend.wait(stream, event)?;
            context.clocks.lock().waits_for_tick(stream, fence.stream, fence.tick);
        }
        None => {
            // Merging the clocks compares each entry of one with all of the other, several at once.
            work::count(WAITS_MAX * WAITS_MAX / 16);
            let moment = context.clocks.lock().moment(fence.stream);
            let event = context.backend.record(fence.stream)?;
            let waited = context.backend.wait(stream, event);
            context.backend.recycle(event);
            waited?;
            context.clocks.lock().waits_for(stream, &moment);
        }
    }
    Ok(())
}

/// Blocks the host until the stream's work so far has completed.
pub(crate) fn synchronize<L: Lock>(context: &DynContext<'_, L>, stream: StreamId) -> Result<(), BackendError> {
    let moment = context.clocks.lock().moment(stream);
    context.backend.synchronize(stream)?;
    context.clocks.lock().synchronized(&moment);
    Ok(())
}
