//! The memory debugger: the state of the options [`DebugOptions`](crate::config::DebugOptions), and the work that they
//! submit to the device.
//!
//! ```text
//!        block of a request of n bytes                        next block
//!  ┌──────────────────────┬──────────────────────────────┬─────────────
//!  │ n bytes: NEW, FREED  │ guard: GUARD, 512 B or more  │
//!  └──────────────────────┴──────────────────────────────┴─────────────
//!                          └─ also guards the start of the next block
//!
//!  allocate ─► fill NEW, fill GUARD
//!  free     ─► compare the guards after and before the block ─► fill FREED ─► quarantine ─► compare FREED ─► the heap
//! ```
//! A heap takes the front of free blocks and never leaves two free neighbors, so the block before a new one is live, and
//! its guard is in front of the new block. The guard stays there when its owner is freed, until memory around it is
//! released or reused. Therefore no block needs a guard of its own in front, and addresses and offsets stay as they are.
//!
//! All work is submitted to the block's stream, after the work of the streams that [used](crate::Op::RecordUse) the block. The
//! host does not wait for comparisons: their results are collected by later ops. Nothing is filled or compared while one of
//! these streams is captured, because that work would be repeated by every launch of the graph, when the memory may belong to
//! another block. A block that a capture allocates is never checked, because launches write to it at any time.
//!
//! The debugger knows blocks by their addresses and decides no placement, except that it delays frees: each heap has a queue,
//! which depends on the heap's ops alone (rule D8). A failed driver call is reported to `tracing` and fails no op: the bytes
//! in question are not checked.

use crate::config::DebugOptions;
use crate::config::damage::{DebugRecord, MemoryDamage};
use crate::types::backend::{Backend, BackendError, Bytes, COMPARED_BYTES_MAX, Compared, Comparison, DeviceAddress};
use crate::types::handle::Handle;
use crate::types::ids::{HeapNumber, PoolId, StreamId};
use crate::types::units::UNIT_BYTES;
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Fills new memory. NaN in f64, f32, bf16, f16 and both formats of f8.
pub(crate) const NEW: u32 = 0x7FFF_7FFF;
/// Fills freed memory. NaN as well, and negative as an integer.
pub(crate) const FREED: u32 = 0xFFFF_7FFF;
/// Fills guards. NaN in f64, f32, bf16 and f16, so that reading past the end shows too.
pub(crate) const GUARD: u32 = 0xFFBD_7FBD;

/// The bytes of a guard that are compared. Blocks that were rounded up further have a longer guard.
const COMPARED_GUARD_BYTES: u64 = 2 * UNIT_BYTES;
/// Comparisons in progress, beyond which the host waits for the oldest one.
const COMPARISONS_MAX: usize = 4096;
/// Freed blocks that are remembered for reports.
const HISTORY_MAX: usize = 1 << 14;

/// A block that the program has allocated or that waits in a quarantine.
#[derive(Clone, Debug)]
pub(super) struct DebuggedBlock {
    pub(super) handle: Handle,
    pub(super) record: Arc<DebugRecord>,
    pub(super) options: DebugOptions,
    /// Bytes of the block in its heap.
    pub(super) size_bytes: u64,
    /// `true` if a capture allocated it: launches of the graph use its memory, also after its free. It is not checked.
    pub(super) is_of_graph: bool,
}

impl DebuggedBlock {
    fn start(&self) -> u64 {
        self.record.address.0
    }

    fn end(&self) -> u64 {
        self.start() + self.size_bytes
    }

    /// Returns the bytes that the program may use.
    pub(super) fn usable_bytes(&self) -> u64 {
        if self.options.canary { self.record.requested_bytes } else { self.size_bytes }
    }

    fn usable(&self) -> Bytes {
        Bytes { address: self.record.address, size_bytes: self.usable_bytes() }
    }
}

/// The bytes between a block's last usable byte and its end. They hold the pattern.
#[derive(Debug)]
struct WrittenGuard {
    block: Arc<DebugRecord>,
    /// `None` if the block is live. Otherwise, the bytes that the allocator had released when the block was freed: the
    /// guard's memory exists until it releases more.
    released_before: Option<u64>,
    address: u64,
}

/// The freed blocks that a heap does not reuse yet, oldest first.
#[derive(Debug, Default)]
struct Quarantine {
    blocks: VecDeque<QuarantinedBlock>,
    size_bytes: u64,
}

/// A block in a quarantine.
#[derive(Debug)]
pub(super) struct QuarantinedBlock {
    pub(super) block: DebuggedBlock,
    /// `true` if all of it holds [`FREED`].
    is_poisoned: bool,
}

/// A comparison in progress.
#[derive(Debug)]
struct Check {
    comparison: Comparison,
    stream: StreamId,
    /// Offset of the first compared byte, from which the damage counts.
    offset_bytes: u64,
    checked: Checked,
    /// The number of ops of the heap.
    op: u64,
}

#[derive(Debug)]
enum Checked {
    Guard { block: Arc<DebugRecord>, next: Option<Arc<DebugRecord>> },
    Quarantined { block: Arc<DebugRecord> },
}

/// The position of an op: its heap's number of ops, and the streams that used the block.
#[derive(Clone, Copy)]
pub(super) struct Moment<'a> {
    pub(super) op: u64,
    pub(super) users: &'a [StreamId],
    /// Bytes that the allocator has released so far.
    pub(super) released_bytes: u64,
    /// `false` if the memory does not exist, because the pool sleeps.
    pub(super) is_mapped: bool,
    /// `true` if freed guards stay as they are until memory is released: only one stream uses the heap, and its memory has no
    /// second address.
    pub(super) keeps_guards: bool,
}

/// The state of the debug mode of an allocator. It contains nothing while no pool has an option.
#[derive(Debug, Default)]
pub(super) struct Debugger {
    /// Live blocks of pools with options, by address.
    live: BTreeMap<u64, DebuggedBlock>,
    /// Blocks in quarantines, by address.
    waiting: BTreeMap<u64, Arc<DebugRecord>>,
    /// Guards by the address after their last byte, of live and of freed blocks.
    guards: BTreeMap<u64, WrittenGuard>,
    quarantines: BTreeMap<HeapNumber, Quarantine>,
    checks: VecDeque<Check>,
    /// Damage that no call has returned yet, oldest first.
    found: VecDeque<MemoryDamage>,
    /// Freed blocks, oldest first.
    freed: VecDeque<Arc<DebugRecord>>,
}

impl Debugger {
    /// Adds a new block, fills it, and writes its guard.
    pub(super) fn begin(&mut self, backend: &dyn Backend, mut block: DebuggedBlock) {
        let (start, end) = (block.start(), block.end());
        // Guards of freed blocks in this memory no longer exist.
        let overwritten: Vec<u64> = self.guards.range(start + 1..=end).map(|(end, _)| *end).collect();
        overwritten.iter().for_each(|end| drop(self.guards.remove(end)));
        let stream = block.record.stream;
        block.is_of_graph = backend.is_captured(stream);
        if !block.is_of_graph {
            if block.options.poison {
                noted("fill", backend.fill(stream, block.usable(), NEW));
            }
            self.write_guard(backend, &block);
        }
        self.live.insert(start, block);
    }

    /// Fills the guard of a live block, which is checked from now on.
    fn write_guard(&mut self, backend: &dyn Backend, block: &DebuggedBlock) {
        let (address, end) = (block.start() + block.usable_bytes(), block.end());
        if address == end {
            return;
        }
        let guard = Bytes { address: DeviceAddress(address), size_bytes: end - address };
        if noted("fill", backend.fill(block.record.stream, guard, GUARD)).is_some() {
            let guard = WrittenGuard { block: Arc::clone(&block.record), released_before: None, address };
            self.guards.insert(end, guard);
        }
    }

    /// Returns the live block at an address.
    pub(super) fn live_at(&self, address: DeviceAddress) -> Option<&DebuggedBlock> {
        self.live.get(&address.0)
    }

    /// Returns `true` if the program has freed the block at an address, and its heap does not reuse it yet.
    pub(super) fn is_quarantined(&self, address: DeviceAddress) -> bool {
        self.waiting.contains_key(&address.0)
    }

    /// Removes a live block that the program frees. Checks its guards and poisons it.
    pub(super) fn end(
        &mut self,
        backend: &dyn Backend,
        address: DeviceAddress,
        moment: Moment<'_>,
    ) -> Option<QuarantinedBlock> {
        let mut block = self.live.get(&address.0)?.clone();
        let stream = block.record.stream;
        let DebugOptions { poison, canary, .. } = block.options;
        let may_use_device = (poison || canary) && !block.is_of_graph && is_ready(backend, stream, moment);
        if may_use_device {
            self.check_guard_of(backend, &block, moment);
            self.check_guard_before(backend, &block, moment);
        }
        self.live.remove(&address.0);
        let record = DebugRecord { freed_at_op: Some(moment.op), ..DebugRecord::clone(&block.record) };
        block.record = Arc::new(record);
        match self.guards.get_mut(&block.end()) {
            Some(guard) if may_use_device && moment.keeps_guards => {
                guard.block = Arc::clone(&block.record);
                guard.released_before = Some(moment.released_bytes);
            }
            _ => drop(self.guards.remove(&block.end())),
        }
        let is_poisoned =
            may_use_device && poison && noted("fill", backend.fill(stream, block.usable(), FREED)).is_some();
        if self.freed.len() == HISTORY_MAX {
            self.freed.pop_front();
        }
        self.freed.push_back(Arc::clone(&block.record));
        Some(QuarantinedBlock { block, is_poisoned })
    }

    /// Restores a live block whose free failed.
    pub(super) fn restore(&mut self, mut block: DebuggedBlock) {
        self.freed.pop_back();
        block.record = Arc::new(DebugRecord { freed_at_op: None, ..DebugRecord::clone(&block.record) });
        self.guards.remove(&block.end());
        self.live.insert(block.start(), block);
    }

    /// Starts to compare the guard of a live block. Returns `true` if it has one.
    fn check_guard_of(&mut self, backend: &dyn Backend, block: &DebuggedBlock, moment: Moment<'_>) -> bool {
        let Some(guard) = self.guards.get(&block.end()) else { return false };
        let size_bytes = (block.end() - guard.address).min(COMPARED_GUARD_BYTES);
        let bytes = Bytes { address: DeviceAddress(guard.address), size_bytes };
        self.compare_guard(backend, block.end(), bytes, moment);
        true
    }

    /// Starts to compare the end of the guard in front of a live block, if there is one. The guard of another stream's
    /// block is not ordered before work of this stream, and a segment of another pool, which may sleep, may end in front of
    /// this one.
    fn check_guard_before(&mut self, backend: &dyn Backend, block: &DebuggedBlock, moment: Moment<'_>) {
        let end = block.start();
        let Some(guard) = self.guards.get(&end) else { return };
        let exists = guard.released_before.is_none_or(|released| released == moment.released_bytes);
        let is_of_same_heap = (guard.block.pool, guard.block.stream) == (block.record.pool, block.record.stream);
        if exists && is_of_same_heap {
            // Its last unit contains no byte of its owner, which other streams may use.
            let bytes = Bytes { address: DeviceAddress(end - UNIT_BYTES), size_bytes: UNIT_BYTES };
            self.compare_guard(backend, end, bytes, moment);
        }
    }

    /// Starts to compare a part of the guard that ends at an address.
    fn compare_guard(&mut self, backend: &dyn Backend, end: u64, bytes: Bytes, moment: Moment<'_>) {
        let block = Arc::clone(&self.guards[&end].block);
        let next = self.live.get(&end).map(|next| Arc::clone(&next.record));
        let offset_bytes = bytes.address.0 - (block.address.0 + block.requested_bytes);
        let check = Check {
            comparison: Comparison(0),
            stream: block.stream,
            offset_bytes,
            checked: Checked::Guard { block, next },
            op: moment.op,
        };
        self.compare(backend, bytes, GUARD, check);
    }

    fn compare(&mut self, backend: &dyn Backend, bytes: Bytes, pattern: u32, check: Check) {
        if let Some(Some(comparison)) = noted("compare", backend.compare(check.stream, bytes, pattern)) {
            self.checks.push_back(Check { comparison, ..check });
        }
    }

    /// Adds a freed block to its heap's quarantine.
    pub(super) fn quarantine(&mut self, heap: HeapNumber, freed: QuarantinedBlock) {
        let quarantine = self.quarantines.entry(heap).or_default();
        quarantine.size_bytes += freed.block.size_bytes;
        self.waiting.insert(freed.block.start(), Arc::clone(&freed.block.record));
        quarantine.blocks.push_back(freed);
    }

    /// Returns the oldest block of a heap's quarantine if the quarantine is larger than `bytes_max`. It stays until
    /// [`leave`](Self::leave).
    pub(super) fn oldest_above(&self, heap: HeapNumber, bytes_max: u64) -> Option<Handle> {
        let quarantine = self.quarantines.get(&heap)?;
        let oldest = quarantine.blocks.front().filter(|_| quarantine.size_bytes > bytes_max)?;
        Some(oldest.block.handle)
    }

    /// Removes the oldest block of a heap's quarantine, which its heap has freed.
    pub(super) fn leave(&mut self, heap: HeapNumber) {
        let Some(quarantine) = self.quarantines.get_mut(&heap) else { return };
        let Some(QuarantinedBlock { block, .. }) = quarantine.blocks.pop_front() else { return };
        quarantine.size_bytes -= block.size_bytes;
        self.waiting.remove(&block.start());
    }

    /// Starts to check that nothing wrote to the oldest block of a heap's quarantine, before the heap reuses it.
    pub(super) fn compare_oldest(&mut self, backend: &dyn Backend, heap: HeapNumber, moment: Moment<'_>) {
        let oldest = self.quarantines.get(&heap).and_then(|quarantine| quarantine.blocks.front());
        let Some(QuarantinedBlock { block, is_poisoned: true }) = oldest else { return };
        let (block, stream) = (block.clone(), block.record.stream);
        if !is_ready(backend, stream, moment) {
            return;
        }
        let Bytes { address, size_bytes } = block.usable();
        let first_bytes = size_bytes.min(COMPARED_BYTES_MAX);
        let last_bytes = (size_bytes - first_bytes).min(COMPARED_BYTES_MAX);
        for (offset_bytes, size_bytes) in [(0, first_bytes), (size_bytes - last_bytes, last_bytes)] {
            if size_bytes > 0 {
                let bytes = Bytes { address: address.plus(offset_bytes), size_bytes };
                let checked = Checked::Quarantined { block: Arc::clone(&block.record) };
                let check = Check { comparison: Comparison(0), stream, offset_bytes, checked, op: moment.op };
                self.compare(backend, bytes, FREED, check);
            }
        }
    }

    /// Returns the addresses of the live blocks of a pool, or of all pools.
    pub(super) fn live_in(&self, pool: Option<PoolId>) -> Vec<(Handle, DeviceAddress)> {
        let is_meant = |block: &&DebuggedBlock| pool.is_none_or(|pool| block.record.pool == pool);
        self.live.values().filter(is_meant).map(|block| (block.handle, block.record.address)).collect()
    }

    /// Starts to compare the guard of a live block. Returns the stream if there is one.
    pub(super) fn check(
        &mut self,
        backend: &dyn Backend,
        address: DeviceAddress,
        moment: Moment<'_>,
    ) -> Option<StreamId> {
        let block = self.live.get(&address.0)?.clone();
        let stream = block.record.stream;
        let is_checked =
            block.options.canary && is_ready(backend, stream, moment) && self.check_guard_of(backend, &block, moment);
        is_checked.then_some(stream)
    }

    /// Writes the guards of a pool again, whose contents may be lost, and forgets which blocks are poisoned.
    pub(super) fn rewrite(&mut self, backend: &dyn Backend, pool: PoolId) {
        self.guards.retain(|_, guard| guard.block.pool != pool);
        let quarantined = self.quarantines.values_mut().flat_map(|quarantine| &mut quarantine.blocks);
        quarantined.filter(|freed| freed.block.record.pool == pool).for_each(|freed| freed.is_poisoned = false);
        let is_guarded = |block: &&DebuggedBlock| block.record.pool == pool && !block.is_of_graph;
        let blocks: Vec<_> = self.live.values().filter(is_guarded).cloned().collect();
        for block in blocks {
            self.write_guard(backend, &block);
        }
    }

    /// Forgets the live blocks of a pool and all its guards, without checking them.
    pub(super) fn forget(&mut self, pool: PoolId) {
        self.live.retain(|_, block| block.record.pool != pool);
        self.guards.retain(|_, guard| guard.block.pool != pool);
    }

    /// Collects the results of comparisons. Waits for the oldest ones if there are too many.
    pub(super) fn collect(&mut self, backend: &dyn Backend) {
        while let Some(check) = self.checks.front() {
            if self.checks.len() > COMPARISONS_MAX {
                noted("synchronize", backend.synchronize(check.stream));
            }
            let compared = noted("compared", backend.compared(check.comparison));
            if compared == Some(Compared::Pending) {
                return;
            }
            let check = self.checks.pop_front().expect("the front exists");
            if let Some(Compared::Different { offset_bytes }) = compared {
                self.note_damage(check, offset_bytes);
            }
        }
    }

    fn note_damage(&mut self, check: Check, offset_bytes: u64) {
        let (offset_bytes, checked_at_op) = (check.offset_bytes + offset_bytes, check.op);
        let damage = match check.checked {
            Checked::Guard { block, next } => {
                // The damage is reported once.
                self.guards.retain(|_, guard| guard.block.address != block.address);
                MemoryDamage::Guard { block, next, offset_bytes, checked_at_op }
            }
            Checked::Quarantined { block } => MemoryDamage::WrittenAfterFree { block, offset_bytes, checked_at_op },
        };
        if !self.found.contains(&damage) {
            tracing::error!(name: "memory.damaged", target: "symmalloc", %damage);
            self.found.push_back(damage);
        }
    }

    /// Returns the oldest damage that no call has returned yet.
    pub(super) fn take_damage(&mut self) -> Option<MemoryDamage> {
        self.found.pop_front()
    }

    /// Returns the freed blocks that contained an address, newest first.
    pub(super) fn freed_around(&self, address: DeviceAddress) -> Vec<Arc<DebugRecord>> {
        let contains = |record: &&Arc<DebugRecord>| {
            address.0.checked_sub(record.address.0).is_some_and(|offset| offset < record.requested_bytes.max(1))
        };
        self.freed.iter().rev().filter(contains).cloned().collect()
    }

    /// Returns the blocks that were freed last, newest first.
    pub(super) fn freed_last(&self, count: usize) -> Vec<Arc<DebugRecord>> {
        self.freed.iter().rev().take(count).cloned().collect()
    }

    /// Returns the streams of the comparisons in progress.
    pub(super) fn streams_in_check(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.checks.iter().map(|check| check.stream)
    }
}

/// Returns `true` if `stream` may fill and compare a block: its memory exists, no stream is being captured, and the work
/// of the block's other users is ordered before.
fn is_ready(backend: &dyn Backend, stream: StreamId, moment: Moment<'_>) -> bool {
    moment.is_mapped
        && !backend.is_captured(stream)
        && !moment.users.iter().any(|user| backend.is_captured(*user))
        && noted("wait", order_after(backend, stream, moment.users)).is_some()
}

/// Makes `stream` wait, on the device, for the other streams that used a block.
fn order_after(backend: &dyn Backend, stream: StreamId, users: &[StreamId]) -> Result<(), BackendError> {
    for user in users.iter().filter(|user| **user != stream) {
        let event = backend.record(*user)?;
        let waited = backend.wait(stream, event);
        backend.recycle(event);
        waited?;
    }
    Ok(())
}

/// Reports a failed driver call. The op that made it succeeds, because its bytes are only left unchecked.
fn noted<T>(call: &'static str, outcome: Result<T, BackendError>) -> Option<T> {
    outcome.inspect_err(|error| tracing::warn!(name: "debug.failed", target: "symmalloc", call, %error)).ok()
}

/// The streams that used a block.
pub(super) type Users = SmallVec<[StreamId; 2]>;
