//! The journal: the recent ops of a heap in a symmetric pool, which ranks compare when their digests differ.
//!
//! A digest shows *that* two histories differ. To find *where* they differ, ranks compare the digests of earlier
//! moments. To find *what* differs, they compare the ops themselves. A journal keeps the last `history_ops` ops, and a
//! sparse series of older digests, which bounds the position of an older difference.
//!
//! ```text
//!  op number   0 ............ 40960 ..... 45056 ..... 49152 ─────────────────── 53248
//!              │                 │           │           │ op op op op op op ... │
//!              agreed        checkpoints: digests only   base     entries        now
//!              (all ranks are known to have had this digest)
//! ```
//!
//! A successful agreement proves that everything before it is equal, so the journal forgets everything before it and
//! starts again there. Its size is always bounded: 32 bytes per op, up to 112 more if the allocation has a name, and
//! [`CHECKPOINTS_MAX`] checkpoints.

use crate::history::digest::{Digest, Mark, unpack_op};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Maximum length of a name in a journal, in bytes. Longer names are truncated.
pub const NAME_BYTES_MAX: usize = 64;

/// Maximum number of digests kept from before the oldest op in the journal.
pub const CHECKPOINTS_MAX: usize = 32;

/// Initial distance between checkpoints, in ops. It doubles whenever there are too many checkpoints, which happens at
/// the same op on every rank.
const CHECKPOINT_OPS: u64 = 64;

/// The numbering of the ops of all symmetric pools of one allocator, in execution order. With one host thread, this is
/// the program order. The numbers show which of several heaps differed first. They are not part of any digest.
#[derive(Debug)]
pub struct ProgramOrder {
    next: AtomicU64,
    /// The next number at the time of the last agreement.
    agreed: AtomicU64,
    is_exclusive: bool,
}

impl ProgramOrder {
    pub(crate) fn new(is_exclusive: bool) -> Self {
        ProgramOrder { next: AtomicU64::new(0), agreed: AtomicU64::new(0), is_exclusive }
    }

    fn take(&self) -> u64 {
        if self.is_exclusive {
            let number = self.next.load(Relaxed);
            self.next.store(number + 1, Relaxed);
            number
        } else {
            self.next.fetch_add(1, Relaxed)
        }
    }

    /// Returns the number of the next op.
    pub fn next(&self) -> u64 {
        self.next.load(Relaxed)
    }

    /// Records that all ranks agreed when `next` was the number of the next op. Counting restarts there, so that a rank
    /// that joined later counts like the others.
    pub fn agree(&self, next: u64) {
        self.agreed.store(next, Relaxed);
    }

    /// Converts an op's number to a number that is counted from the last agreement.
    pub fn since_agreed(&self, number: u64) -> u64 {
        number.saturating_sub(self.agreed.load(Relaxed))
    }
}

/// One op in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// The op as one word; see [`unpack_op`].
    pub op: u64,
    /// The decision as one word.
    pub decision: u64,
    /// The heap's digest after the op.
    pub digest: u64,
    /// The op's number in the rank's program order.
    pub order: u64,
}

/// The recent ops of a heap.
#[derive(Debug)]
pub struct Journal {
    /// Maximum number of entries; at least 1.
    capacity: usize,
    /// The ops from number `base.ops` on.
    entries: VecDeque<JournalEntry>,
    /// The digest before the first entry.
    base: Digest,
    /// The newest digest that all ranks agreed on; before any agreement, the digest of the empty history.
    agreed: Digest,
    /// Digests between `agreed` and `base`, ascending, at multiples of `stride`.
    checkpoints: Vec<Digest>,
    stride: u64,
    /// Names of allocations by op number, ascending.
    names: VecDeque<(u64, Box<str>)>,
    order: Arc<ProgramOrder>,
}

impl Journal {
    /// Creates the journal of a heap whose digest is `now`. Every rank's heap is known to have this digest at the same
    /// op.
    pub(crate) fn new(history_ops: u32, now: Digest, order: Arc<ProgramOrder>) -> Self {
        Journal {
            capacity: history_ops.max(1) as usize,
            entries: VecDeque::new(),
            base: now,
            agreed: now,
            checkpoints: Vec::new(),
            stride: CHECKPOINT_OPS,
            names: VecDeque::new(),
            order,
        }
    }

    /// Forgets everything, because the heap adopted another history. Its digest, `now`, is known to be equal on every
    /// rank.
    pub(crate) fn begin(&mut self, now: Digest) {
        *self = Journal::new(self.capacity as u32, now, Arc::clone(&self.order));
    }

    /// Adds an op, its decision and the resulting digest.
    #[inline(never)]
    pub(crate) fn note(&mut self, op: u64, decision: u64, after: Digest) {
        debug_assert_eq!(after.ops, self.ops() + 1, "an op was folded without being noted");
        if self.entries.len() == self.capacity {
            self.forget_oldest();
        } else if self.entries.len() == self.entries.capacity() {
            self.make_room();
        }
        self.entries.push_back(JournalEntry { op, decision, digest: after.value, order: self.order.take() });
    }

    /// Reserves memory for more entries, up to the capacity.
    #[cold]
    fn make_room(&mut self) {
        let len = self.entries.len();
        self.entries.reserve_exact(len.max(16).min(self.capacity - len));
    }

    fn forget_oldest(&mut self) {
        let Some(oldest) = self.entries.pop_front() else { return };
        self.base = Digest { ops: self.base.ops + 1, value: oldest.digest };
        while self.names.front().is_some_and(|(op, _)| *op < self.base.ops) {
            self.names.pop_front();
        }
        if self.base.ops.is_multiple_of(self.stride) {
            self.add_checkpoint();
        }
    }

    fn add_checkpoint(&mut self) {
        if self.checkpoints.len() == CHECKPOINTS_MAX {
            self.stride *= 2;
            let stride = self.stride;
            self.checkpoints.retain(|checkpoint| checkpoint.ops.is_multiple_of(stride));
        }
        if self.base.ops.is_multiple_of(self.stride) {
            self.checkpoints.push(self.base);
        }
    }

    /// Names the newest op's allocation.
    pub(crate) fn name_newest(&mut self, name: &str) {
        self.name(self.ops() - 1, name);
    }

    /// Names the newest allocation with this placement.
    pub(crate) fn name_allocation(&mut self, placed: u64, name: &str) {
        let is_it = |entry: &JournalEntry| {
            entry.decision == placed && matches!(unpack_op(entry.op), Some((Mark::Allocate, _, _)))
        };
        if let Some(index) = self.entries.iter().rposition(is_it) {
            self.name(self.base.ops + index as u64, name);
        }
    }

    fn name(&mut self, op: u64, name: &str) {
        let name = cut_name(name, NAME_BYTES_MAX).into();
        let at = self.names.partition_point(|(named, _)| *named < op);
        match self.names.get_mut(at) {
            Some((named, old)) if *named == op => *old = name,
            _ => self.names.insert(at, (op, name)),
        }
    }

    /// Returns the number of ops so far.
    pub(crate) fn ops(&self) -> u64 {
        self.base.ops + self.entries.len() as u64
    }

    /// Returns the number of the first op in the journal, or of the next op if it is empty.
    pub fn oldest(&self) -> u64 {
        self.base.ops
    }

    /// Returns the digest after `ops` ops, if it is known.
    pub fn digest_at(&self, ops: u64) -> Option<u64> {
        let index = ops.checked_sub(self.base.ops)?;
        match index.checked_sub(1) {
            None => Some(self.base.value),
            Some(last) => self.entries.get(last as usize).map(|entry| entry.digest),
        }
    }

    /// Returns the op with this number, if it is in the journal.
    pub fn entry(&self, op: u64) -> Option<&JournalEntry> {
        self.entries.get(usize::try_from(op.checked_sub(self.base.ops)?).ok()?)
    }

    /// Returns the name of the allocation of the op with this number.
    pub fn name_of(&self, op: u64) -> Option<&str> {
        let at = self.names.binary_search_by_key(&op, |(named, _)| *named).ok()?;
        Some(&self.names[at].1)
    }

    /// Returns the digests that the journal keeps from before its oldest op, ascending. The last one is the digest
    /// directly before this op.
    pub fn checkpoints(&self) -> impl Iterator<Item = Digest> + '_ {
        let first = (self.agreed.ops < self.base.ops).then_some(self.agreed);
        let last = self.checkpoints.last().is_none_or(|last| last.ops < self.base.ops).then_some(self.base);
        first.into_iter().chain(self.checkpoints.iter().copied()).chain(last)
    }

    /// Records that all ranks had the same digest after its number of ops, and forgets everything before.
    pub(crate) fn agree(&mut self, digest: Digest) {
        while self.base.ops < digest.ops && !self.entries.is_empty() {
            self.forget_oldest();
        }
        self.agreed = digest;
        self.checkpoints.retain(|checkpoint| checkpoint.ops > digest.ops);
        if self.checkpoints.is_empty() {
            self.stride = CHECKPOINT_OPS;
        }
    }

    /// Frees unused memory, because the heap gets no more ops.
    pub(crate) fn close(&mut self) {
        self.entries.shrink_to_fit();
        self.names.shrink_to_fit();
    }

    /// Returns the memory that the journal holds, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let entries = self.entries.capacity() * size_of::<JournalEntry>();
        let checkpoints = self.checkpoints.capacity() * size_of::<Digest>();
        let names = self.names.capacity() * size_of::<(u64, Box<str>)>();
        let letters: usize = self.names.iter().map(|(_, name)| name.len()).sum();
        (entries + checkpoints + names + letters) as u64
    }
}

/// Returns as many whole characters of a name as fit into `bytes_max` bytes.
pub(crate) fn cut_name(name: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests;
