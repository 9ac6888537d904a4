//! The memory debugger of one heap: which blocks it watches, the work that it submits to the device, and the damage
//! that it found. A part of [`Heap`](super::Heap), under the heap's lock.
//!
//! ```text
//!        block of a request of n bytes                        next block
//!  ┌──────────────────────┬──────────────────────────────┬─────────────
//!  │ n bytes: NEW, FREED  │ guard: GUARD, 512 B or more  │
//!  └──────────────────────┴──────────────────────────────┴─────────────
//!                          └─ also guards the start of the next block
//!
//!  allocate ─► fill what the stream freed with FREED ─► fill NEW, fill GUARD
//!  free     ─► compare the guards after and before the block ─► [quarantine ─► compare FREED] ─► reuse
//! ```
//! Every block has a guard behind it, so the guard of the block in front detects an underrun. A guard in front of each
//! block would move its address. An underrun into memory that no block of the pool owns is found only with a sanitizer.
//!
//! **One lock.** A block's memory exists while the block is live or in quarantine, because only free memory is released, and a
//! heap that sleeps submits nothing. Freed memory is filled only if it is still free at its place. The heap's lock is held
//! from that decision until the work is submitted, so no other thread can release or reuse the memory in between.
//!
//! **Order.** Work is submitted to the block's stream. Before freed memory is filled, the stream waits for the other streams
//! that used the block. The host waits for no comparison here. Results are read in the order in which the comparisons
//! were submitted, so the damage that a heap reports, and its order, do not depend on when the device completes them.
//!
//! **Freed memory is filled at its stream's next allocation**, not at its free. Until then, no one else gets the memory in an
//! allocator that reuses memory per stream, and correct programs rely on it. PyTorch's FSDP, for example, updates parameters on
//! the main stream with gradients of a side stream, frees them without `record_stream`, and makes the side stream wait before
//! it allocates again. A fill at the free would run before the update and change its result. Memory that is no longer free
//! at its place by then is not filled. In a shared heap, a fill is a use of the free block, for which its next user waits.
//!
//! **Captures.** While a stream is captured, nothing is filled or compared on it, because a graph would repeat that work at
//! every launch, when the memory may belong to another block. A block that was allocated on a captured stream is never
//! filled or compared, because launches write to it at any time. If a capture includes another stream that used a
//! freed block, the block's guard is compared and the block is not filled.
//!
//! A driver call that fails is reported to `tracing` and fails no op: the bytes in question stay unchecked. No decision
//! of the heap depends on the device. The quarantine delays the reuse of blocks, and depends only on the heap's ops.

use crate::blocks::table::{Location, Slot};
use crate::config::DebugOptions;
use crate::config::damage::{DebugRecord, MemoryDamage};
use crate::streams::fences::Fence;
use crate::types::backend::{Backend, BackendError, Bytes, COMPARED_BYTES_MAX, Compared, Comparison};
use crate::types::ids::StreamId;
use crate::types::units::{UNIT_BYTES, Units, units};
use crate::types::work;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Fills new memory. NaN in f64, f32, bf16, f16 and both formats of f8.
const NEW: u32 = 0x7FFF_7FFF;
/// Fills freed memory. NaN as well, and negative as an integer.
const FREED: u32 = 0xFFFF_7FFF;
/// Fills guards. NaN in f64, f32, bf16 and f16, so that a read past the end shows too.
const GUARD: u32 = 0xFFBD_7FBD;

/// The bytes of a guard that are compared. Blocks that were rounded up further have a longer guard.
const COMPARED_GUARD_BYTES: u64 = 2 * UNIT_BYTES;
/// Memory on the host for comparisons in progress, beyond which the host waits for them.
const PENDING_BYTES_MAX: u64 = 16 << 20;
/// Freed blocks that a heap remembers for reports.
const FREED_MAX: usize = 1 << 14;
/// Damage that a heap reports. A program that damages more is found by what was reported.
const DAMAGE_MAX: usize = 1 << 10;

/// Totals over the heaps of an allocator.
#[derive(Debug, Default)]
pub(crate) struct DebugTotals {
    /// Memory on the host that comparisons in progress take.
    pending_bytes: AtomicU64,
    /// Number of frees so far, which orders the freed blocks of all heaps.
    frees: AtomicU64,
}

impl DebugTotals {
    /// Returns `true` if the host must wait for comparisons before more of them begin.
    pub(crate) fn has_backlog(&self) -> bool {
        self.pending_bytes.load(Ordering::Relaxed) > PENDING_BYTES_MAX
    }
}

/// A freed block, with its number among the frees of all heaps.
pub(crate) type FreedBlock = (u64, Arc<DebugRecord>);

/// A block that the program has allocated or that waits in the quarantine.
#[derive(Debug)]
struct DebuggedBlock {
    slot: Slot,
    record: Arc<DebugRecord>,
    /// Bytes of the block in its heap.
    size_bytes: u64,
    /// Bytes that the program may use. The guard begins after them.
    usable_bytes: u64,
    /// `false` if a capture allocated it: launches of the graph use its memory, also after its free.
    is_checked: bool,
    /// `true` if the bytes after the usable ones hold [`GUARD`].
    is_guarded: bool,
    /// `true` if the block is in the quarantine, and its usable bytes hold [`FREED`].
    is_poisoned: bool,
}

impl DebuggedBlock {
    fn usable(&self) -> Bytes {
        Bytes { address: self.record.address, size_bytes: self.usable_bytes }
    }

    /// Returns the first `size_bytes` of the guard, or fewer if it is shorter.
    fn guard(&self, size_bytes: u64) -> Bytes {
        let size_bytes = (self.size_bytes - self.usable_bytes).min(size_bytes);
        Bytes { address: self.record.address.plus(self.usable_bytes), size_bytes }
    }
}

/// A freed block whose memory is not filled yet.
#[derive(Debug)]
struct Unfilled {
    usable: Bytes,
    size: Units,
}

/// A comparison in progress.
#[derive(Debug)]
struct Check {
    comparison: Comparison,
    stream: StreamId,
    /// Memory on the host that it takes.
    host_bytes: u64,
    /// Offset of the first compared byte, from which the damage counts.
    offset_bytes: u64,
    block: Arc<DebugRecord>,
    checked: Checked,
    /// The number of ops of the heap.
    op: u64,
}

#[derive(Debug)]
enum Checked {
    /// The guard of a block, and the block after it.
    Guard { next: Option<Arc<DebugRecord>> },
    /// The contents of a block in the quarantine.
    Quarantined,
}

/// The state of the heap at an op.
#[derive(Clone, Copy)]
pub(super) struct Moment<'a> {
    pub(super) backend: &'a dyn Backend,
    /// The number of ops of the heap.
    pub(super) op: u64,
    /// `false` while the pool sleeps: the memory does not exist then.
    pub(super) is_mapped: bool,
}

impl Moment<'_> {
    /// Returns `true` if work on a block can be submitted to its stream now.
    fn may_submit(&self, stream: StreamId) -> bool {
        self.is_mapped && !self.backend.is_captured(stream)
    }

    /// Makes a freed block's stream wait, on the device, for the other streams that used the block. Returns `false` if
    /// it does not.
    fn is_after(&self, stream: StreamId, uses: &[Fence]) -> bool {
        uses.iter().all(|fence| {
            let is_ordered = |event| noted("wait", self.backend.wait(stream, event)).is_some();
            // The wait for an event of a capture has no effect.
            !self.backend.is_captured(fence.stream) && fence.event.is_some_and(is_ordered)
        })
    }

    fn fill(&self, stream: StreamId, bytes: Bytes, pattern: u32) -> bool {
        noted("fill", self.backend.fill(stream, bytes, pattern)).is_some()
    }
}

/// The debugger of a heap whose pool has debugging options.
#[derive(Debug)]
pub(crate) struct HeapDebugger {
    options: DebugOptions,
    totals: Arc<DebugTotals>,
    /// Live and quarantined blocks, except allocations that a layout restored.
    blocks: BTreeMap<Location, DebuggedBlock>,
    /// The quarantined blocks, oldest first.
    quarantine: VecDeque<Location>,
    quarantined_bytes: u64,
    /// Freed blocks that are filled at the next allocation of their stream. They do not overlap.
    unfilled: BTreeMap<StreamId, BTreeMap<Location, Unfilled>>,
    /// Comparisons in progress, oldest first.
    checks: VecDeque<Check>,
    /// Damage that no call has returned yet, oldest first.
    found: VecDeque<MemoryDamage>,
    /// The reported damage, by the op of the block's allocation. `true` for a guard.
    reported: BTreeSet<(u64, bool)>,
    /// Freed blocks, oldest first.
    freed: VecDeque<FreedBlock>,
}

impl HeapDebugger {
    pub(super) fn new(options: DebugOptions, totals: Arc<DebugTotals>) -> Self {
        HeapDebugger {
            options,
            totals,
            blocks: BTreeMap::new(),
            quarantine: VecDeque::new(),
            quarantined_bytes: 0,
            unfilled: BTreeMap::new(),
            checks: VecDeque::new(),
            found: VecDeque::new(),
            reported: BTreeSet::new(),
            freed: VecDeque::new(),
        }
    }

    /// Adds a new block of `size_bytes`, fills it, and writes its guard. Returns the bytes that the program may use.
    pub(super) fn begin(
        &mut self,
        moment: Moment<'_>,
        (at, slot): (Location, Slot),
        record: DebugRecord,
        size_bytes: u64,
    ) -> u64 {
        let usable_bytes = if self.options.canary { record.requested_bytes } else { size_bytes };
        let stream = record.stream;
        self.forget_unfilled_in(at, units(size_bytes));
        let mut block = DebuggedBlock {
            slot,
            record: Arc::new(record),
            size_bytes,
            usable_bytes,
            is_checked: moment.may_submit(stream),
            is_guarded: false,
            is_poisoned: false,
        };
        if block.is_checked {
            if self.options.poison {
                moment.fill(stream, block.usable(), NEW);
            }
            guard(&mut block, moment);
        }
        self.blocks.insert(at, block);
        usable_bytes
    }

    /// Returns the bytes that the program may use of a block.
    pub(super) fn usable_bytes(&self, at: Location) -> Option<u64> {
        Some(self.blocks.get(&at)?.usable_bytes)
    }

    /// Fills the memory of the blocks that a stream freed. `is_unused` returns `true` if the memory of a freed block is
    /// still free at its place. Its next user then waits for the fill.
    pub(super) fn fill_freed(
        &mut self,
        moment: Moment<'_>,
        stream: StreamId,
        mut is_unused: impl FnMut(Location, Units) -> bool,
    ) {
        if self.unfilled.is_empty() || !moment.may_submit(stream) {
            return;
        }
        for (at, Unfilled { usable, size }) in self.unfilled.remove(&stream).into_iter().flatten() {
            // Of the blocks that the debugger knows, only one in the quarantine has been freed.
            let mut quarantined = self.blocks.get_mut(&at);
            if (quarantined.is_some() || is_unused(at, size))
                && moment.fill(stream, usable, FREED)
                && let Some(block) = &mut quarantined
            {
                block.is_poisoned = true;
            }
        }
    }

    /// Forgets the freed blocks that are not filled yet, because free memory moves to other addresses.
    pub(super) fn forget_unfilled(&mut self) {
        self.unfilled.clear();
    }

    /// Forgets the freed blocks that overlap a new one.
    fn forget_unfilled_in(&mut self, at: Location, size: Units) {
        let end = at.plus(size);
        work::count(self.unfilled.len());
        self.unfilled.retain(|_, freed| {
            while let Some((&start, _)) =
                freed.range(..end).next_back().filter(|(start, freed)| at < start.plus(freed.size))
            {
                freed.remove(&start);
            }
            !freed.is_empty()
        });
    }

    /// Notes that the program frees a block, which other streams used. Checks its guards. If `is_delayed`, adds it to
    /// the quarantine. Nothing here fails.
    pub(super) fn free(&mut self, moment: Moment<'_>, at: Location, uses: &[Fence], is_delayed: bool) {
        let Some(stream) = self.blocks.get(&at).map(|block| block.record.stream) else {
            // A layout restored the block, possibly in memory that was freed before.
            self.forget_unfilled();
            return;
        };
        let may_submit = moment.may_submit(stream);
        let is_after_uses = may_submit && moment.is_after(stream, uses);
        if may_submit {
            self.check_guard(moment, at);
            self.check_guard_before(moment, at);
        }
        let mut block = self.blocks.remove(&at).expect("it was found above");
        if self.options.poison && block.is_checked && is_after_uses {
            let unfilled = Unfilled { usable: block.usable(), size: units(block.size_bytes) };
            self.unfilled.entry(stream).or_default().insert(at, unfilled);
        }
        block.record = Arc::new(DebugRecord { freed_at_op: Some(moment.op), ..DebugRecord::clone(&block.record) });
        if self.freed.len() == FREED_MAX {
            self.freed.pop_front();
        }
        let number = self.totals.frees.fetch_add(1, Ordering::Relaxed);
        self.freed.push_back((number, Arc::clone(&block.record)));
        if is_delayed {
            self.quarantined_bytes += block.size_bytes;
            self.quarantine.push_back(at);
            self.blocks.insert(at, block);
        }
    }

    /// Removes the oldest block of a quarantine with more than `bytes_max`, and returns its slot. Compares it before,
    /// because its memory can then be reused.
    pub(super) fn leave(&mut self, moment: Moment<'_>, bytes_max: u64) -> Option<Slot> {
        let at = *self.quarantine.front().filter(|_| self.quarantined_bytes > bytes_max)?;
        if moment.may_submit(self.blocks[&at].record.stream) {
            self.check_guard(moment, at);
            self.check_quarantined(moment, at);
        }
        self.quarantine.pop_front();
        let block = self.blocks.remove(&at).expect("quarantined blocks are known");
        self.quarantined_bytes -= block.size_bytes;
        Some(block.slot)
    }

    /// Returns the maximum size of the quarantine.
    pub(super) fn quarantine_max(&self) -> u64 {
        self.options.quarantine_bytes
    }

    /// Returns the bytes of the blocks in the quarantine.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        self.quarantined_bytes
    }

    /// Returns the live and quarantined blocks, each with the op of its allocation, in the order of their placements.
    pub(super) fn blocks(&self) -> Vec<(Location, u64)> {
        self.blocks.iter().map(|(at, block)| (*at, block.record.allocated_at_op)).collect()
    }

    /// Starts to compare the guards of these blocks, and the contents of those in the quarantine. Skips a block that no
    /// longer exists. Returns the number of guards.
    pub(super) fn check(&mut self, moment: Moment<'_>, blocks: &[(Location, u64)]) -> u64 {
        let mut guards = 0;
        for (at, op) in blocks {
            let Some(block) = self.blocks.get(at).filter(|block| block.record.allocated_at_op == *op) else { continue };
            if moment.may_submit(block.record.stream) {
                guards += u64::from(self.check_guard(moment, *at));
                self.check_quarantined(moment, *at);
            }
        }
        guards
    }

    /// Writes all guards again after the pool's contents were dropped or restored, and forgets which blocks are
    /// poisoned.
    pub(super) fn rewrite(&mut self, moment: Moment<'_>) {
        for block in self.blocks.values_mut() {
            (block.is_guarded, block.is_poisoned) = (false, false);
            if block.is_checked && moment.may_submit(block.record.stream) {
                guard(block, moment);
            }
        }
    }

    /// Starts to compare the guard of a block. Returns `true` if it has one.
    fn check_guard(&mut self, moment: Moment<'_>, at: Location) -> bool {
        let block = &self.blocks[&at];
        if !block.is_guarded {
            return false;
        }
        let next = self.blocks.get(&at.plus(units(block.size_bytes)));
        let next = next.map(|next| Arc::clone(&next.record));
        let (record, bytes) = (Arc::clone(&block.record), block.guard(COMPARED_GUARD_BYTES));
        self.compare(moment, (bytes, GUARD), 0, record, Checked::Guard { next });
        true
    }

    /// Starts to compare the end of the guard in front of a block, if there is one. The guard of another stream's block
    /// is not ordered before work of this stream.
    fn check_guard_before(&mut self, moment: Moment<'_>, at: Location) {
        let block = &self.blocks[&at];
        let before = self.blocks.range(..at).next_back();
        let Some((_, before)) = before.filter(|(start, before)| start.plus(units(before.size_bytes)) == at) else {
            return;
        };
        if !before.is_guarded || before.record.stream != block.record.stream {
            return;
        }
        // The last unit of the guard contains no byte of its owner, which other streams may use.
        let bytes =
            Bytes { address: before.record.address.plus(before.size_bytes - UNIT_BYTES), size_bytes: UNIT_BYTES };
        let offset_bytes = before.size_bytes - UNIT_BYTES - before.usable_bytes;
        let (record, next) = (Arc::clone(&before.record), Some(Arc::clone(&block.record)));
        self.compare(moment, (bytes, GUARD), offset_bytes, record, Checked::Guard { next });
    }

    /// Starts to check that nothing wrote to a block in the quarantine: to its first and to its last bytes.
    fn check_quarantined(&mut self, moment: Moment<'_>, at: Location) {
        let block = &self.blocks[&at];
        if !block.is_poisoned {
            return;
        }
        let (record, Bytes { address, size_bytes }) = (Arc::clone(&block.record), block.usable());
        let first_bytes = size_bytes.min(COMPARED_BYTES_MAX);
        let last_bytes = (size_bytes - first_bytes).min(COMPARED_BYTES_MAX);
        for (offset_bytes, part_bytes) in [(0, first_bytes), (size_bytes - last_bytes, last_bytes)] {
            if part_bytes > 0 {
                let bytes = Bytes { address: address.plus(offset_bytes), size_bytes: part_bytes };
                self.compare(moment, (bytes, FREED), offset_bytes, Arc::clone(&record), Checked::Quarantined);
            }
        }
    }

    fn compare(
        &mut self,
        moment: Moment<'_>,
        (bytes, pattern): (Bytes, u32),
        offset_bytes: u64,
        block: Arc<DebugRecord>,
        checked: Checked,
    ) {
        let stream = block.stream;
        if let Some(Some(comparison)) = noted("compare", moment.backend.compare(stream, bytes, pattern)) {
            let host_bytes =
                if bytes.size_bytes > COMPARED_GUARD_BYTES { COMPARED_BYTES_MAX } else { COMPARED_GUARD_BYTES };
            self.totals.pending_bytes.fetch_add(host_bytes, Ordering::Relaxed);
            let op = moment.op;
            self.checks.push_back(Check { comparison, stream, host_bytes, offset_bytes, block, checked, op });
        }
    }

    /// Returns the streams of the comparisons in progress.
    pub(super) fn checked_streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.checks.iter().map(|check| check.stream)
    }

    /// Reads the results of comparisons up to the first that the device has not reached.
    pub(super) fn collect(&mut self, backend: &dyn Backend) {
        while let Some(check) = self.checks.front() {
            let compared = noted("compared", backend.compared(check.comparison));
            if compared == Some(Compared::Pending) {
                return;
            }
            let check = self.checks.pop_front().expect("the front exists");
            self.totals.pending_bytes.fetch_sub(check.host_bytes, Ordering::Relaxed);
            if let Some(Compared::Different { offset_bytes }) = compared {
                self.note_damage(check, offset_bytes);
            }
        }
    }

    /// Reports damage once for each block and kind.
    fn note_damage(&mut self, check: Check, offset_bytes: u64) {
        let Check { block, checked, op: checked_at_op, .. } = check;
        let offset_bytes = check.offset_bytes + offset_bytes;
        let key = (block.allocated_at_op, matches!(checked, Checked::Guard { .. }));
        if self.reported.len() == DAMAGE_MAX || !self.reported.insert(key) {
            return;
        }
        let damage = match checked {
            Checked::Guard { next } => MemoryDamage::Guard { block, next, offset_bytes, checked_at_op },
            Checked::Quarantined => MemoryDamage::WrittenAfterFree { block, offset_bytes, checked_at_op },
        };
        tracing::error!(name: "memory.damaged", target: "symmalloc", %damage);
        self.found.push_back(damage);
    }

    /// Removes and returns the oldest damage that no call has returned yet.
    pub(super) fn take_damage(&mut self) -> Option<MemoryDamage> {
        self.found.pop_front()
    }

    /// Returns the freed blocks, newest first.
    pub(super) fn freed(&self) -> impl Iterator<Item = &FreedBlock> {
        self.freed.iter().rev()
    }
}

/// Fills the guard of a block. From then on it is compared.
fn guard(block: &mut DebuggedBlock, moment: Moment<'_>) {
    let bytes = block.guard(u64::MAX);
    block.is_guarded = bytes.size_bytes > 0 && moment.fill(block.record.stream, bytes, GUARD);
}

/// Reports a failed driver call. The op that made it succeeds, because its bytes are only left unchecked.
fn noted<T>(call: &'static str, outcome: Result<T, BackendError>) -> Option<T> {
    outcome.inspect_err(|error| tracing::warn!(name: "debug.failed", target: "symmalloc", call, %error)).ok()
}
