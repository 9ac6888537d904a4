//! The ledger of a heap: the record of its decisions.
//!
//! ```text
//!  decision ─► usage        counts, for statistics
//!           ─► digest       one hash over all ops and decisions, which ranks compare
//!           ─► journal      the recent ops, with names, to find the first one that differs
//!           ─► names        of live allocations, given by the program
//!           ─► pointers     live allocations by address, if configured
//! ```
//! A heap reports each decision to the ledger after making it. The ledger contains neither blocks nor free memory, so
//! the search for free memory never reads it. Decisions use only two values from the ledger: the allocated bytes, for a
//! release threshold, and the block at an address, for a free by address. Serials and allocations of zero bytes are
//! also kept here, because handles outlive their pool: a heap that replaces the heap of a destroyed pool takes over
//! both.

use crate::blocks::table::{Location, Slot};
use crate::config::errors::HandleError;
use crate::config::op::Refusal;
use crate::history::digest::{Digest, Mark, op_word};
use crate::history::journal::{Journal, ProgramOrder};
use crate::pointers::PointerMap;
use crate::stats::usage::{RareCounts, Usage};
use crate::types::backend::DeviceAddress;
use crate::types::handle::{Handle, Serials};
use crate::types::ids::StreamId;
use crate::types::look_up::LookUp;
use crate::types::units::Units;
use smallvec::SmallVec;
use std::mem;
use std::num::NonZeroU64;
use std::sync::Arc;

/// The record of one heap's decisions. Between two ops, these invariants hold (`docs/architecture.md` lists their
/// names):
///
/// - `usage` is the sum over live allocations (I5).
/// - Only live allocations have names, and `serials` issued the serial of every live allocation (I7).
/// - `pointers` contains exactly the live allocations of at least one byte (I9).
/// - The journal ends with the op that the digest folded last.
pub(crate) struct Ledger {
    digest: Digest,
    /// The recent ops that agreement compares. Only heaps of symmetric pools have one.
    journal: Option<Box<Journal>>,
    usage: Usage,
    /// Counts of rare events. They are separate from `usage`, so that a cache hit does not touch them.
    rare: RareCounts,
    serials: Serials,
    /// Allocations of zero bytes.
    zero_sized: ZeroSized,
    /// Names of live allocations, given by the program.
    names: LookUp<Slot, Arc<str>>,
    /// Live allocations by address, if configured.
    pointers: Option<PointerMap>,
    /// Number of ops up to the destruction of the pool; `None` while the pool exists.
    closed_after_ops: Option<u64>,
    /// `true` if all ranks agreed on the whole history up to the destruction. Ranks do not compare it again, because a
    /// rank that restarts later does not have this heap.
    is_settled: bool,
}

/// Allocations of zero bytes that are live, by serial.
#[derive(Default)]
pub(crate) struct ZeroSized {
    live: LookUp<NonZeroU64, ()>,
    /// Live allocations of destroyed pools whose heaps this heap has replaced. Freeing one is not an op of this heap.
    earlier: LookUp<NonZeroU64, ()>,
    /// Serials of a restored pool. A layout does not record how many allocations of zero bytes were live, so each
    /// serial can be freed any number of times.
    restored: SmallVec<[NonZeroU64; 1]>,
}

impl ZeroSized {
    /// Moves the live allocations to `earlier`, so that they can still be freed after another heap has replaced this
    /// one.
    fn into_earlier(mut self) -> Self {
        self.earlier.extend(self.live);
        ZeroSized { earlier: self.earlier, ..ZeroSized::default() }
    }

    fn has(&self, serial: NonZeroU64) -> bool {
        self.live.find(serial).is_some() || self.earlier.find(serial).is_some() || self.restored.contains(&serial)
    }
}

impl Ledger {
    /// Creates the ledger of a heap that has no ops yet. `digest` covers only the heap's inputs, such as its
    /// configuration.
    pub(crate) fn new(digest: Digest) -> Self {
        Ledger {
            digest,
            journal: None,
            usage: Usage::default(),
            rare: RareCounts::default(),
            serials: Serials::default(),
            zero_sized: ZeroSized::default(),
            names: LookUp::default(),
            pointers: None,
            closed_after_ops: None,
            is_settled: false,
        }
    }

    /// Starts to index allocations by address.
    pub(crate) fn enable_pointers(&mut self) {
        self.pointers = Some(PointerMap::default());
    }

    /// Starts to remember the last ops, for agreement.
    pub(crate) fn enable_journal(&mut self, history_ops: u32, order: Arc<ProgramOrder>) {
        self.journal = Some(Box::new(Journal::new(history_ops, self.digest, order)));
    }

    /// Folds an op and its decision into the digest, and notes them in the journal.
    #[inline(always)]
    pub(crate) fn fold(&mut self, op: u64, decision: u64) {
        self.digest.fold(op, decision);
        if let Some(journal) = &mut self.journal {
            journal.note(op, decision, self.digest);
        }
    }

    /// Returns the serial of the next allocation.
    #[inline(always)]
    pub(crate) fn next_serial(&mut self) -> NonZeroU64 {
        self.serials.next()
    }

    /// Returns the error for a handle that is not live.
    pub(crate) fn misuse_of(&self, handle: Handle) -> HandleError {
        if self.serials.gave(handle.serial()) { HandleError::Stale { handle } } else { HandleError::Foreign { handle } }
    }

    pub(crate) fn has_issued(&self, serial: NonZeroU64) -> bool {
        self.serials.gave(serial)
    }

    /// Records an allocation at a location.
    #[inline(always)]
    pub(crate) fn note_allocation(&mut self, location: Location, size: Units, stream: StreamId, requested: u64) {
        self.usage.allocate(size, requested);
        self.fold(op_word(Mark::Allocate, stream, requested), location.word());
    }

    /// Records the free of the allocation at a location.
    #[inline(always)]
    pub(crate) fn note_free(
        &mut self,
        (slot, location): (Slot, Location),
        size: Units,
        stream: StreamId,
        requested: u64,
    ) {
        self.usage.free(size, requested);
        self.fold(op_word(Mark::Free, stream, 0), location.word());
        if !self.names.is_empty() {
            self.forget_name(slot);
        }
    }

    /// Removes the name of a freed allocation, if it has one.
    #[inline(never)]
    fn forget_name(&mut self, slot: Slot) {
        if let Some(name) = self.names.take(slot)
            && let Some(journal) = &mut self.journal
        {
            journal.name_newest(&name);
        }
    }

    /// Records the use of an allocation by another stream.
    #[inline]
    pub(crate) fn note_use(&mut self, (slot, location): (Slot, Location), stream: StreamId) {
        self.fold(op_word(Mark::RecordUse, stream, 0), location.word());
        if let Some(journal) = &mut self.journal
            && let Some(name) = self.names.find(slot)
        {
            journal.name_newest(name);
        }
    }

    /// Counts an allocation that becomes live without an op, because a layout is restored.
    pub(crate) fn note_restored(&mut self, size: Units, requested: u64) {
        self.usage.allocate(size, requested);
    }

    /// Names a live allocation.
    pub(crate) fn set_name(&mut self, (slot, location): (Slot, Location), name: &Arc<str>) {
        if let Some(journal) = &mut self.journal {
            journal.name_allocation(location.word(), name);
        }
        self.names.insert(slot, Arc::clone(name));
    }

    /// Gives a live allocation its saved name, or removes its name if none was saved.
    pub(crate) fn restore_name(&mut self, slot: Slot, name: Option<&str>) {
        match name {
            Some(name) => self.names.insert(slot, name.into()),
            None => drop(self.names.take(slot)),
        }
    }

    pub(crate) fn name_of(&self, slot: Slot) -> Option<&Arc<str>> {
        self.names.find(slot)
    }

    /// Returns the number of names, for the invariants.
    pub(crate) fn name_count(&self) -> usize {
        self.names.len()
    }

    /// Adds a live allocation to the pointer map, if look-up by pointer is configured.
    #[inline(always)]
    pub(crate) fn note_pointer(&mut self, slot: Slot, address: impl FnOnce() -> DeviceAddress) {
        if let Some(pointers) = &mut self.pointers {
            pointers.insert(address(), slot);
        }
    }

    /// Removes a freed allocation from the pointer map, if look-up by pointer is configured.
    #[inline(always)]
    pub(crate) fn forget_pointer(&mut self, address: impl FnOnce() -> DeviceAddress) {
        if let Some(pointers) = &mut self.pointers {
            pointers.take(address());
        }
    }

    /// Removes and returns the live allocation at an address.
    #[inline(always)]
    pub(crate) fn take_at(&mut self, address: DeviceAddress) -> Option<Slot> {
        self.pointers.as_mut()?.take(address)
    }

    /// Returns the pointer map, if look-up by pointer is configured.
    pub(crate) fn pointers(&self) -> Option<&PointerMap> {
        self.pointers.as_ref()
    }

    /// Records an allocation of zero bytes, and returns its serial.
    #[cold]
    pub(crate) fn allocate_nothing(&mut self, stream: StreamId) -> NonZeroU64 {
        self.fold(op_word(Mark::AllocateNothing, stream, 0), 0);
        let serial = self.serials.next();
        self.zero_sized.live.insert(serial, ());
        serial
    }

    /// Returns a serial that represents every allocation of zero bytes that was live when the heap was saved.
    pub(crate) fn restore_nothing(&mut self) -> NonZeroU64 {
        let serial = self.serials.next();
        self.zero_sized.restored.push(serial);
        serial
    }

    /// Checks that an allocation of zero bytes is live.
    pub(crate) fn check_nothing(&self, handle: Handle) -> Result<(), HandleError> {
        if self.zero_sized.has(handle.serial()) { Ok(()) } else { Err(self.misuse_of(handle)) }
    }

    /// Frees a live allocation of zero bytes.
    pub(crate) fn free_nothing(&mut self, handle: Handle) -> Result<(), HandleError> {
        self.check_nothing(handle)?;
        if self.zero_sized.earlier.take(handle.serial()).is_none() {
            self.zero_sized.live.take(handle.serial());
            self.fold(op_word(Mark::FreeNothing, StreamId(0), 0), 0);
        }
        Ok(())
    }

    /// Takes over the serials and the allocations of zero bytes of the heap that this heap replaces, so that handles of
    /// that heap are still recognized.
    pub(crate) fn inherit_handles(&mut self, earlier: &mut Ledger) {
        self.serials = mem::take(&mut earlier.serials);
        self.zero_sized = mem::take(&mut earlier.zero_sized).into_earlier();
    }

    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns `true` if the heap has executed an op. A heap without ops was created for a request that failed early,
    /// for example because its pool was destroyed at the same time. It counts as absent, because other ranks do not
    /// have this heap, nor does this rank after a restart.
    pub(crate) fn has_history(&self) -> bool {
        self.digest.ops > 0
    }

    /// Replaces the heap's history with the one that `digest` represents. The heap's own ops no longer count, and the
    /// journal drops them.
    pub(crate) fn begin_history(&mut self, digest: Digest) {
        self.digest = digest;
        if let Some(journal) = &mut self.journal {
            journal.begin(digest);
        }
    }

    /// Records that the pool is destroyed, which is the last op of the heap's history that ranks compare.
    pub(crate) fn close(&mut self) {
        if self.has_history() {
            self.fold(op_word(Mark::Destroy, StreamId(0), 0), 0);
        }
        self.closed_after_ops = Some(self.digest.ops);
    }

    /// Records that the pool was reset, after the frees of its live allocations.
    pub(crate) fn note_reset(&mut self) {
        if self.has_history() {
            self.fold(op_word(Mark::Reset, StreamId(0), 0), 0);
        }
    }

    /// Records that all ranks had this digest at this op, and forgets the history before it.
    pub(crate) fn settle(&mut self, digest: Digest) {
        // Depends on the digest that all ranks agreed on, not on later ops of this rank.
        self.is_settled = self.closed_after_ops.is_some_and(|ops| ops <= digest.ops);
        if let Some(journal) = &mut self.journal {
            journal.agree(digest);
            if self.is_settled {
                journal.close();
            }
        }
    }

    /// Returns `true` if agreement has compared the whole history to its end.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Folds the refusal of a request for `size_bytes`.
    pub(crate) fn fold_refusal(&mut self, refusal: Refusal, stream: StreamId, size_bytes: u64) {
        self.fold(op_word(refusal.into(), stream, size_bytes), 0);
        self.rare.refusals += 1;
    }

    pub(crate) fn count_retry(&mut self) {
        self.rare.retries += 1;
    }

    pub(crate) fn count_trim(&mut self) {
        self.rare.trims += 1;
    }

    pub(crate) fn count_growth(&mut self) {
        self.rare.growths += 1;
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_deref()
    }

    pub(crate) fn take_journal(&mut self) -> Option<Box<Journal>> {
        self.journal.take()
    }

    pub(crate) fn usage(&self) -> &Usage {
        &self.usage
    }

    pub(crate) fn usage_mut(&mut self) -> &mut Usage {
        &mut self.usage
    }

    pub(crate) fn counts(&self) -> &RareCounts {
        &self.rare
    }
}

#[cfg(test)]
mod tests;
