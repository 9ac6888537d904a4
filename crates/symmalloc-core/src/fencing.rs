//! Fencing: what keeps a block's next user behind its earlier ones (rule D3). Fourth part of [`Heap`].
//!
//! Uses by other streams are noted while a block is allocated, become events when it is freed, travel with it while it
//! is free, and are waited for by the stream that takes it. Only this file makes those driver calls.

use crate::backend::{Backend, BackendError};
use crate::block_table::{Block, BlockState, Slot};
use crate::digest::{Mark, op_word};
use crate::errors::HandleError;
use crate::fence::{Fence, FenceSetId, FenceTable};
use crate::handle::Handle;
use crate::heap::{Heap, Live, Shortage, Surroundings};
use crate::ids::StreamId;
use crate::lock::{Guard, Lock, LockCell};
use crate::stream_clocks::{StreamClocks, Tick};
use smallvec::SmallVec;

/// How the uses of a block are fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fencing {
    /// By an event for this free alone.
    Apart,
    /// By an event that other frees right behind it may share.
    InRow,
}

impl Heap {
    /// Records an event on every other stream that used the block, all or none.
    #[inline(always)]
    pub(crate) fn fence_uses<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        slot: Slot,
        fencing: Fencing,
    ) -> Result<(), BackendError> {
        let uses = self.table.block(slot).fences;
        let Some(stream) = uses.stream_alone() else { return self.fence_several_uses(around, uses, fencing) };
        self.table.block_mut(slot).fences = record(around, &mut self.fences, stream, fencing)?;
        Ok(())
    }

    #[inline(never)]
    fn fence_several_uses<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        uses: FenceSetId,
        fencing: Fencing,
    ) -> Result<(), BackendError> {
        let mut unarmed = uses;
        while let Some((one, rest)) = self.fences.first(unarmed) {
            let stream = self.fences.fence(one).stream;
            match record(around, &mut self.fences, stream, fencing) {
                Ok(fence) => _ = self.fences.replace_first(unarmed, fence),
                Err(error) => {
                    self.fences.disarm(uses);
                    self.recycle_spent(around);
                    return Err(error);
                }
            }
            unarmed = rest;
        }
        Ok(())
    }

    /// Notes that work on `stream` uses the allocation.
    #[inline(always)]
    pub(crate) fn record_use(&mut self, handle: Handle, stream: StreamId) -> Result<(), HandleError> {
        let Some(Live { stream: owner, .. }) = self.find_live(handle) else { return Err(self.not_live(handle)) };
        let block = self.table.block_mut(handle.slot());
        if stream != owner {
            block.fences = self.fences.add(block.fences, Fence::of(stream));
        }
        let placed = block.place.word();
        self.fold(op_word(Mark::RecordUse, stream, 0), placed);
        if let Some(journal) = &mut self.journal
            && let Some(name) = self.names.find(handle.slot())
        {
            journal.name_newest(name);
        }
        Ok(())
    }

    /// Orders `stream` behind everyone who used the free block before, on the device.
    #[inline(always)]
    pub(crate) fn wait_for_earlier_users<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        slot: Slot,
        stream: StreamId,
    ) -> Result<(), Box<Shortage>> {
        let block = self.table.block(slot);
        let BlockState::Free { stream: owner, since } = block.state else {
            unreachable!("the free index names only free blocks");
        };
        if block.fences.is_empty() && owner == stream {
            return Ok(());
        }
        let waited = match self.stream {
            Some(_) => wait_for_users(around, &mut self.fences, stream, self.table.block_mut(slot)),
            None => self.wait_for_several(around, slot, stream, (owner, since)),
        };
        waited.map_err(|error| Box::new(Shortage::Fence(error)))
    }

    /// As [`wait_for_users`], in a heap whose streams share: another one may take what is left of the block.
    #[inline(never)]
    fn wait_for_several<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        slot: Slot,
        stream: StreamId,
        (owner, since): (StreamId, Tick),
    ) -> Result<(), BackendError> {
        for fence in self.fences.fences(self.table.block(slot).fences) {
            wait_for(around, stream, fence)?;
        }
        if owner != stream {
            wait_for(around, stream, Fence { stream: owner, tick: since, event: None })?;
        }
        self.recycle_spent(around);
        Ok(())
    }

    pub(crate) fn recycle_spent<B: Backend, L: Lock>(&mut self, around: &Surroundings<B, L>) {
        self.fences.drain_spent(|event| around.backend.recycle(event));
    }

    /// Drops the fences that are over, asking the backend. Placement does not notice.
    pub(crate) fn drop_completed_fences<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
    ) -> Result<u64, BackendError> {
        let mut dropped = 0;
        for segment in self.table.segments_in_order() {
            for slot in self.table.blocks_of(segment).collect::<Vec<_>>() {
                let set = self.table.block(slot).fences;
                let mut completed = SmallVec::<[StreamId; 2]>::new();
                for fence in self.fences.fences(set) {
                    if let Some(event) = fence.event
                        && around.backend.query(event)?
                    {
                        completed.push(fence.stream);
                    }
                }
                dropped += completed.len() as u64;
                let left = self.fences.retain(set, |fence| !completed.contains(&fence.stream));
                self.table.block_mut(slot).fences = left;
                self.recycle_spent(around);
            }
        }
        Ok(dropped)
    }
}

/// Orders `stream` behind the other streams that used a free block. No other stream takes from the block's heap: what this
/// one waits for now, nobody has to wait for again. On an error, the fences of what is not waited for are left.
#[inline(never)]
pub(crate) fn wait_for_users<B: Backend, L: Lock>(
    around: &Surroundings<B, L>,
    fences: &mut FenceTable,
    stream: StreamId,
    block: &mut Block,
) -> Result<(), BackendError> {
    while let Some((one, _)) = fences.first(block.fences) {
        if !fences.is_met(one) {
            meet(around, fences, stream, one)?;
        }
        block.fences = fences.drop_first(block.fences);
    }
    fences.drain_spent(|event| around.backend.recycle(event));
    Ok(())
}

/// Orders `stream` behind a fence, for all blocks that share it.
#[inline(never)]
fn meet<B: Backend, L: Lock>(
    around: &Surroundings<B, L>,
    fences: &mut FenceTable,
    stream: StreamId,
    one: FenceSetId,
) -> Result<(), BackendError> {
    let fence = fences.fence(one);
    let is_covered = around.clocks.lock().covers(stream, fence.stream, fence.tick);
    match fence.event {
        None if is_covered => {}
        None => wait_for_now(around, stream, fence.stream)?,
        Some(event) if is_covered => around.backend.recycle(event),
        Some(event) => {
            around.backend.wait_last(stream, event)?;
            around.clocks.lock().waits_for_tick(stream, fence.stream, fence.tick);
        }
    }
    fences.meet(one);
    Ok(())
}

/// Orders `stream` behind a fence that others may have to wait for as well.
fn wait_for<B: Backend, L: Lock>(
    around: &Surroundings<B, L>,
    stream: StreamId,
    fence: Fence,
) -> Result<(), BackendError> {
    if around.clocks.lock().covers(stream, fence.stream, fence.tick) {
        return Ok(());
    }
    let Some(event) = fence.event else { return wait_for_now(around, stream, fence.stream) };
    around.backend.wait(stream, event)?;
    around.clocks.lock().waits_for_tick(stream, fence.stream, fence.tick);
    Ok(())
}

/// Orders `stream` behind another one as that stands.
fn wait_for_now<B: Backend, L: Lock>(
    around: &Surroundings<B, L>,
    stream: StreamId,
    on: StreamId,
) -> Result<(), BackendError> {
    let moment = around.clocks.lock().moment(on);
    let event = around.backend.record(on)?;
    let waited = around.backend.wait(stream, event);
    around.backend.recycle(event);
    waited?;
    around.clocks.lock().waits_for(stream, &moment);
    Ok(())
}

/// Records an event, which covers a stream up to the tick of its fence.
///
/// The tick ends before the recording, or no other can end in between: of two threads that fence one stream, the one with the
/// later tick has the later event.
#[inline(always)]
fn record<B: Backend, L: Lock>(
    around: &Surroundings<B, L>,
    fences: &mut FenceTable,
    stream: StreamId,
    fencing: Fencing,
) -> Result<FenceSetId, BackendError> {
    match fencing {
        Fencing::Apart => {
            let tick = around.clocks.lock().advance(stream);
            let event = around.backend.record(stream)?;
            Ok(fences.hold(Fence { stream, tick, event: Some(event) }))
        }
        Fencing::InRow => {
            let clocks = around.clocks.lock();
            if let Some(row) = clocks.row(stream)
                && let Some(event) = fences.in_row(stream, row)
                && around.backend.extend_row(event)
            {
                return Ok(fences.share());
            }
            record_in_row::<B, L>(&around.backend, clocks, fences, stream)
        }
    }
}

/// As [`record`], of a free that does not share the fence of the one before.
#[inline(never)]
fn record_in_row<B: Backend, L: Lock>(
    backend: &B,
    mut clocks: Guard<'_, L, StreamClocks>,
    fences: &mut FenceTable,
    stream: StreamId,
) -> Result<FenceSetId, BackendError> {
    let (tick, event) = clocks.advance_in_row(stream, backend.record_in_row(stream)?);
    Ok(fences.hold_in_row(Fence { stream, tick, event: Some(event) }))
}
