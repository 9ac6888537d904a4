//! Keys for state that is cached per segment (channels, contexts, captured graphs), and a log of their invalidation.
//!
//! A tensor's address and size change from step to step, and so do split sizes, but the tensor's segment stays the same. Peer access is set
//! up per segment, so cache state for peer access by segment:
//!
//! ```text
//!   segment   ├─────────────┬──────────┬────────────────────┤   one key
//!   tensors   │   x[0..n]   │  x[n..]  │      experts       │   any number, any sizes
//! ```

use crate::windows::segment::HeapSegment;
use std::collections::VecDeque;
use std::fmt;

/// The identity of a segment in its current extent. Equal keys denote the same memory at the same address and of the same size. A key is
/// valid only in the process that created it, because addresses differ between ranks.
///
/// The key changes when the segment grows, because state that covered the segment no longer covers all of it. A key is never reused after
/// the segment is released, even if another segment gets its address. [`Registrar::invalidations`](crate::Registrar::invalidations) reports
/// the invalidated keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct SegmentKey {
    /// Address of the segment's first byte.
    pub base: u64,
    /// Bytes from `base` to the end of the segment's last memory, including holes.
    pub size_bytes: u64,
    /// Identity of the segment, which distinguishes it from earlier segments at this address.
    pub segment: HeapSegment,
}

impl fmt::Display for SegmentKey {
    /// Writes `p1 s0 g7 (2097152 bytes at 0x7f0000000000)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes at {:#x})", self.segment, self.size_bytes, self.base)
    }
}

/// Maximum number of retained keys. A cache that lags further behind must drop everything.
const KEYS_MAX: usize = 4096;

/// A cache's position in the invalidation log. The default position is before the first entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InvalidationCursor {
    next: u64,
    /// Number of times that everything was invalidated.
    epoch: u64,
}

/// The entries that a cache must drop.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a cache that keeps invalidated keys uses released memory"]
pub enum Invalidated {
    /// Entries with these keys, in invalidation order: the same on every rank except for the addresses.
    Keys(Vec<SegmentKey>),
    /// All entries: the communicator has ended, or the cursor is too old.
    Everything,
}

/// The invalidated keys of one communicator.
#[derive(Debug, Default)]
pub(crate) struct Invalidations {
    kept: VecDeque<SegmentKey>,
    /// Number of older keys that are no longer retained.
    forgotten: u64,
    epoch: u64,
}

impl Invalidations {
    pub(crate) fn extend(&mut self, keys: impl IntoIterator<Item = SegmentKey>) {
        self.kept.extend(keys);
        while self.kept.len() > KEYS_MAX {
            self.kept.pop_front();
            self.forgotten += 1;
        }
    }

    /// Invalidates everything.
    pub(crate) fn invalidate_all(&mut self) {
        self.forgotten += self.kept.len() as u64;
        self.kept.clear();
        self.epoch += 1;
    }

    /// Returns the invalidations since the cursor and advances the cursor.
    pub(crate) fn since(&self, cursor: &mut InvalidationCursor) -> Invalidated {
        let now = InvalidationCursor { next: self.forgotten + self.kept.len() as u64, epoch: self.epoch };
        let before = std::mem::replace(cursor, now);
        if before.epoch != self.epoch || before.next < self.forgotten {
            return Invalidated::Everything;
        }
        Invalidated::Keys(self.kept.iter().skip((before.next - self.forgotten) as usize).copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::{HeapId, StreamGroup};
    use symmalloc_core::{PoolId, SegmentId};

    fn key(segment: u32) -> SegmentKey {
        let segment =
            HeapSegment { heap: HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All }, id: SegmentId(segment) };
        SegmentKey { base: 0, size_bytes: 1, segment }
    }

    #[test]
    fn every_cursor_reads_every_key_once_and_in_order() {
        let mut log = Invalidations::default();
        let (mut early, mut late) = (InvalidationCursor::default(), InvalidationCursor::default());
        log.extend([key(3), key(1)]);
        assert_eq!(log.since(&mut early), Invalidated::Keys(vec![key(3), key(1)]));
        log.extend([key(2)]);
        assert_eq!(log.since(&mut early), Invalidated::Keys(vec![key(2)]));
        assert_eq!(log.since(&mut early), Invalidated::Keys(vec![]));
        assert_eq!(log.since(&mut late), Invalidated::Keys(vec![key(3), key(1), key(2)]));
    }

    #[test]
    fn a_cursor_that_is_too_old_drops_everything() {
        let mut log = Invalidations::default();
        let mut cursor = InvalidationCursor::default();
        log.extend((0..=KEYS_MAX as u32).map(key));
        assert_eq!(log.since(&mut cursor), Invalidated::Everything);
        log.extend([key(9)]);
        assert_eq!(log.since(&mut cursor), Invalidated::Keys(vec![key(9)]));
    }

    #[test]
    fn the_end_of_a_communicator_invalidates_everything() {
        let mut log = Invalidations::default();
        let mut cursor = InvalidationCursor::default();
        log.extend([key(0)]);
        log.invalidate_all();
        assert_eq!(log.since(&mut cursor), Invalidated::Everything);
        assert_eq!(log.since(&mut cursor), Invalidated::Keys(vec![]));
    }
}
