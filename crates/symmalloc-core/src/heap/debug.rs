//! Allocate and free in a heap that is debugged, or whose backend reports blocks to a tool. A part of [`Heap`]. The
//! [`HeapDebugger`] owns the state.
//!
//! ```text
//!  free   fence other streams' uses (may fail; nothing has changed then)
//!         ─► tell the tool, compare guards (never fails)
//!         ─► [no quarantine] free, as in a heap without a debugger
//!            [quarantine]    recorded as freed, held back ─► the oldest blocks beyond the limit become free
//! ```
//! The quarantine is one decision of the program's free: the free is folded into the digest and removed from the usage
//! at once, and the handle is stale. Only the block stays out of the free index, with the serial
//! [`QUARANTINED`](crate::blocks::table::QUARANTINED), which no handle has. Which blocks become free, and when, depends
//! on the heap's ops alone, and no driver call decides it. Blocks that are freed in a step are not held back, because
//! plans place blocks where earlier ones were freed. A reset, the start of a step and the end of the pool empty the
//! quarantine.

use super::debugger::{DebugTotals, FreedBlock, HeapDebugger, Moment};
use super::{Freed, Heap, Live, RequestMode, Shortage};
use crate::arena::fencing::{Context, DynContext};
use crate::blocks::table::{BlockState, Location, Slot};
use crate::config::DebugOptions;
use crate::config::damage::{DebugRecord, MemoryDamage};
use crate::config::errors::FreeError;
use crate::plans::step::Step;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, Bytes};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::StreamId;
use crate::types::units::{SEGMENT_BYTES_MAX, Units, bytes};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A new allocation, and what the heap took for it.
pub(crate) struct Debugged {
    /// Its size is that of the bytes that the program may use.
    pub(crate) allocation: Allocation,
    pub(crate) size: Units,
    /// The request with its guard.
    pub(crate) requested_bytes: u64,
}

impl<L: Lock> Heap<L> {
    /// Debugs the heap if its pool has options.
    pub(crate) fn enable_debugging(&mut self, totals: &Arc<DebugTotals>) {
        let options = self.config.debug();
        self.debugger = (!options.is_off()).then(|| Box::new(HeapDebugger::new(options, Arc::clone(totals))));
    }

    pub(crate) fn debug_options(&self) -> DebugOptions {
        self.config.debug()
    }

    /// Allocates like [`allocate`](Self::allocate), with a guard if the pool has guards.
    pub(crate) fn allocate_debugged<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
        name: Option<&Arc<str>>,
    ) -> Result<Debugged, Box<Shortage>> {
        if requested > 0 {
            self.fill_freed(context, stream);
        }
        let requested_bytes = self.config.debug().grown_bytes(requested).min(SEGMENT_BYTES_MAX);
        let mut allocation = self.allocate(context, stream, requested_bytes, name)?;
        let size = (allocation.size_bytes / bytes(1)) as Units;
        if size > 0 {
            let slot = allocation.handle.slot();
            let at = self.arena.block(slot).location;
            if let (moment, Some(debugger)) = (moment(context, &self.ledger, &self.mode), &mut self.debugger) {
                let record = DebugRecord {
                    name: name.cloned(),
                    address: allocation.address,
                    requested_bytes: requested,
                    pool: self.id.pool,
                    stream,
                    allocated_at_op: moment.op,
                    freed_at_op: None,
                };
                allocation.size_bytes = debugger.begin(moment, (at, slot), record, allocation.size_bytes);
            }
            report_block(context, stream, &allocation, name.map(|name| &**name));
        }
        Ok(Debugged { allocation, size, requested_bytes })
    }

    /// Fills the memory of the blocks that a stream has freed since its last allocation.
    fn fill_freed(&mut self, context: &DynContext<'_, L>, stream: StreamId) {
        let moment = moment(context, &self.ledger, &self.mode);
        let is_shared = self.id.stream().is_none();
        let (arena, Some(debugger)) = (&mut self.arena, &mut self.debugger) else { return };
        debugger.fill_freed(moment, stream, |at, size| {
            let Some(slot) = arena.block_at(at.sequence(), at.offset()) else { return false };
            let block = arena.block(slot);
            // The memory of a plan is not in the free index, but no place of it overlaps the block. The next user of a
            // place waits only for the users of places.
            let is_unused = block.is_free() || (block.state == BlockState::Planned && !is_shared);
            if !is_unused || block.end() < at.offset() + size {
                return false;
            }
            if is_shared {
                arena.add_use_of_free(slot, stream, context.clocks.lock().now(stream));
            }
            true
        });
        self.arena.recycle_spent(context);
    }

    /// Forgets the freed blocks that the debugger has not filled yet, because free memory moves to other addresses.
    pub(super) fn forget_unfilled(&mut self) {
        if let Some(debugger) = &mut self.debugger {
            debugger.forget_unfilled();
        }
    }

    /// Frees like [`free`](Self::free). Also returns the bytes that the program could use.
    pub(crate) fn free_debugged<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        handle: Handle,
    ) -> Result<(Freed, u64), FreeError> {
        let live = match self.live(handle) {
            Ok(live) => live,
            Err(error) => return self.free_nothing(handle, error).map(|freed| (freed, 0)),
        };
        if !self.arena.block(live.slot).fences.is_empty() {
            self.arena.fence_uses(context, live.slot)?;
        }
        let usable_bytes = self.usable_bytes(live.slot);
        let is_delayed = self.delays(live.slot);
        self.end_debugged(context, live.slot, is_delayed);
        let freed = if is_delayed { self.hold_back(context, live) } else { self.make_free(context, live, true) };
        Ok((freed, usable_bytes))
    }

    /// Frees like [`free_in_reset`](Self::free_in_reset), in a heap whose quarantine is empty.
    pub(crate) fn free_debugged_in_reset<B: Backend>(&mut self, context: &Context<B, L>, handle: Handle) -> Freed {
        self.end_debugged(context, handle.slot(), false);
        self.free_in_reset(context, handle)
    }

    /// Notifies the tool and the debugger of a block that is about to be freed.
    fn end_debugged(&mut self, context: &DynContext<'_, L>, slot: Slot, is_delayed: bool) {
        if context.backend.reports_blocks() {
            context.backend.block_freed(self.arena.address(slot));
        }
        let (at, moment) = (self.arena.block(slot).location, moment(context, &self.ledger, &self.mode));
        if let Some(debugger) = &mut self.debugger {
            debugger.free(moment, at, self.arena.fences_of(slot), is_delayed);
        }
    }

    /// Returns `true` if the free of a block is delayed.
    fn delays(&self, slot: Slot) -> bool {
        let is_outside_of_steps = matches!(self.mode, RequestMode::Serving(Step::None) | RequestMode::Asleep(_));
        let is_kept = |debugger: &HeapDebugger| {
            debugger.quarantine_max() > 0 && debugger.usable_bytes(self.arena.block(slot).location).is_some()
        };
        is_outside_of_steps && !self.arena.block(slot).is_place() && self.debugger.as_deref().is_some_and(is_kept)
    }

    /// Records the free of a block, but keeps the block out of the free index until enough other blocks were freed.
    fn hold_back(&mut self, context: &DynContext<'_, L>, live: Live) -> Freed {
        let Live { slot, stream, requested } = live;
        self.arena.quarantine(slot);
        let block = self.arena.block(slot);
        let (segment, location, size) = (block.segment, block.location, block.size);
        self.ledger.forget_pointer(|| self.arena.address_at(segment, location));
        self.ledger.note_free((slot, location), size, stream, requested);
        let bytes_max = self.debugger.as_deref().map_or(0, HeapDebugger::quarantine_max);
        self.release_quarantine(context, bytes_max);
        Freed { size, requested_bytes: requested }
    }

    /// Frees the oldest quarantined blocks until at most `bytes_max` are left. Returns `true` if there were any. Makes no driver call that can fail, so
    /// all ranks do the same.
    pub(crate) fn release_quarantine(&mut self, context: &DynContext<'_, L>, bytes_max: u64) -> bool {
        let mut is_any = false;
        let moment = moment(context, &self.ledger, &self.mode);
        while let Some(slot) = self.debugger.as_deref_mut().and_then(|debugger| debugger.leave(moment, bytes_max)) {
            let stream = self.arena.quarantined_stream(slot);
            let since = if self.id.stream().is_some() { 0 } else { context.clocks.lock().now(stream) };
            let segment = self.arena.mark_free(slot, stream, since).segment;
            self.merge_free(slot, segment);
            self.arena.recycle_spent(context);
            is_any = true;
        }
        is_any
    }

    /// Returns the bytes of the blocks in the quarantine.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        self.debugger.as_deref().map_or(0, HeapDebugger::quarantined_bytes)
    }

    /// Returns the bytes that the program may use of the live block in a slot.
    pub(super) fn usable_bytes(&self, slot: Slot) -> u64 {
        let block = self.arena.block(slot);
        let usable_bytes = self.debugger.as_deref().and_then(|debugger| debugger.usable_bytes(block.location));
        usable_bytes.unwrap_or(bytes(block.size))
    }

    /// Returns the live and quarantined blocks that the debugger knows.
    pub(crate) fn debugged_blocks(&self) -> Vec<(Location, u64)> {
        self.debugger.as_deref().map_or_else(Vec::new, HeapDebugger::blocks)
    }

    /// Starts to compare the memory of these blocks. Returns the number of guards.
    pub(crate) fn check_debugged(&mut self, context: &DynContext<'_, L>, blocks: &[(Location, u64)]) -> u64 {
        let moment = moment(context, &self.ledger, &self.mode);
        self.debugger.as_deref_mut().map_or(0, |debugger| debugger.check(moment, blocks))
    }

    /// Adds the streams of the comparisons in progress.
    pub(crate) fn add_checked_streams(&self, streams: &mut BTreeSet<StreamId>) {
        streams.extend(self.debugger.iter().flat_map(|debugger| debugger.checked_streams()));
    }

    /// Reads the results of the comparisons that are complete.
    pub(crate) fn collect_checks(&mut self, context: &DynContext<'_, L>) {
        if let Some(debugger) = &mut self.debugger {
            debugger.collect(&context.backend);
        }
    }

    /// Writes the guards again after the heap has woken.
    pub(crate) fn rewrite_guards(&mut self, context: &DynContext<'_, L>) {
        let moment = moment(context, &self.ledger, &self.mode);
        if let Some(debugger) = &mut self.debugger {
            debugger.rewrite(moment);
        }
    }

    /// Removes and returns the oldest damage that no call has returned yet.
    pub(crate) fn take_damage(&mut self) -> Option<MemoryDamage> {
        self.debugger.as_deref_mut()?.take_damage()
    }

    /// Returns the freed blocks, newest first.
    pub(crate) fn freed_blocks(&self) -> impl Iterator<Item = &FreedBlock> {
        self.debugger.iter().flat_map(|debugger| debugger.freed())
    }
}

/// Returns the state at the heap's next op. A function of the fields, because the debugger is borrowed at the same
/// time.
fn moment<'a, L: Lock>(
    context: &'a DynContext<'_, L>,
    ledger: &crate::ledger::Ledger,
    mode: &RequestMode,
) -> Moment<'a> {
    Moment { backend: &context.backend, op: ledger.digest().ops, is_mapped: !matches!(mode, RequestMode::Asleep(_)) }
}

/// Notifies a backend that reports blocks of a new one.
pub(crate) fn report_block<L: Lock>(
    context: &DynContext<'_, L>,
    stream: StreamId,
    allocation: &Allocation,
    name: Option<&str>,
) {
    let Allocation { address, size_bytes, .. } = *allocation;
    if context.backend.reports_blocks() && size_bytes > 0 {
        context.backend.block_allocated(stream, Bytes { address, size_bytes }, name);
    }
}
