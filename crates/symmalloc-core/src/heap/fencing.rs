//! Fencing orders a block's next user behind its earlier users (rule D3). A part of [`Heap`].
//!
//! While a block is allocated, its uses by other streams are recorded. When it is freed, they become events, which stay
//! with the free block until the stream that takes it waits for them. Only this file makes these driver calls.

use super::{DynContext, Heap, Live};
use crate::blocks::table::{Block, BlockState, Slot};
use crate::config::errors::HandleError;
use crate::history::digest::{Mark, op_word};
use crate::streams::fences::{Fence, FenceSetId, FenceTable, Fences};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::BackendError;
use crate::types::handle::Handle;
use crate::types::ids::StreamId;
use smallvec::SmallVec;

impl<L: Lock> Heap<L> {
    /// Records that work on `stream` uses the allocation.
    pub(crate) fn record_use(&mut self, handle: Handle, stream: StreamId) -> Result<(), HandleError> {
        let Live { stream: owner, .. } = self.live(handle)?;
        let block = self.table.block_mut(handle.slot());
        if stream != owner {
            block.fences = self.fences.add(block.fences, Fence::of(stream));
        }
        let location = block.location;
        self.fold(op_word(Mark::RecordUse, stream, 0), location.word());
        if let Some(journal) = &mut self.journal
            && let Some(name) = self.names.find(handle.slot())
        {
            journal.name_newest(name);
        }
        Ok(())
    }

    /// Records an event on every other stream that used an allocated block: all events or none.
    pub(super) fn fence_uses(&mut self, context: &DynContext<'_, L>, slot: Slot) -> Result<(), BackendError> {
        let set = self.table.block(slot).fences;
        let uses = self.fences.fences(set);
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

    /// Orders `stream` behind all earlier users of the free block, on the device. After an error, the next attempt
    /// performs the remaining waits.
    pub(super) fn wait_for_earlier_users(
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
        let owner = Fence { stream: owner, tick: since, event: None };
        for fence in self.fences.fences(set) {
            order_behind(context, stream, *fence)?;
        }
        if self.identity.stream.is_some() {
            // No other stream takes from this heap, so no stream waits for these fences again.
            self.fences.clear(set);
            self.table.block_mut(slot).fences = FenceSetId::EMPTY;
        } else {
            order_behind(context, stream, owner)?;
        }
        self.recycle_spent(context);
        Ok(())
    }

    /// Merges the fences of one free block into those of another, so that users of the second wait for both.
    #[inline(never)]
    pub(super) fn merge_fences(table: &mut FenceTable, blocks: &mut [Block], from: Slot, to: Slot) {
        let (giver, taker) = (&blocks[from as usize], &blocks[to as usize]);
        let (BlockState::Free { stream: other, since: other_since }, BlockState::Free { stream, since }) =
            (giver.state, taker.state)
        else {
            unreachable!("only free blocks are merged");
        };
        let mut fences = table.union(taker.fences, giver.fences);
        let state = if stream == other {
            BlockState::Free { stream, since: since.max(other_since) }
        } else if since == 0 {
            // Memory that no stream has used yet takes over its neighbor's owner.
            BlockState::Free { stream: other, since: other_since }
        } else {
            if other_since != 0 {
                fences = table.add(fences, Fence { stream: other, tick: other_since, event: None });
            }
            BlockState::Free { stream, since }
        };
        blocks[from as usize].fences = FenceSetId::EMPTY;
        let taker = &mut blocks[to as usize];
        (taker.fences, taker.state) = (fences, state);
    }

    /// Returns the events that no fence refers to any more to the backend.
    #[inline(always)]
    pub(crate) fn recycle_spent(&mut self, context: &DynContext<'_, L>) {
        self.fences.drain_spent(|event| context.backend.recycle(event));
    }

    /// Drops the fences that have completed, according to the backend. This does not affect placement. Returns the
    /// number of dropped fences.
    pub(crate) fn drop_completed_fences(&mut self, context: &DynContext<'_, L>) -> Result<u64, BackendError> {
        let mut dropped = 0;
        let places = self.places().to_vec();
        for slot in self.all_blocks().into_iter().chain(places) {
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

/// Orders `stream` behind a fence, unless it has already waited for it.
fn order_behind<L: Lock>(context: &DynContext<'_, L>, stream: StreamId, fence: Fence) -> Result<(), BackendError> {
    if context.clocks.lock().covers(stream, fence.stream, fence.tick) {
        return Ok(());
    }
    match fence.event {
        Some(event) => {
            context.backend.wait(stream, event)?;
            context.clocks.lock().waits_for_tick(stream, fence.stream, fence.tick);
        }
        None => {
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
