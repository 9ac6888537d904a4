//! The amount of memory to prefetch ahead of a range's growth, and the chunks that it consists of.
//!
//! ```text
//!  range    0                    end                               target
//!  mapped   ├─────────────────────┤
//!  ahead                          ├─ unit ─┼─ unit ─┼─ unit ─┤ ─ ─ ─ ┤     chunks that are not in use yet
//! ```
//!
//! The rule depends only on the range's past growth:
//!
//! - After each growth, the amount to prefetch equals the range's extent, limited by the configuration and by the addresses that remain in
//!   the range.
//! - Memory is created in chunks of one *unit*: the greatest common divisor of the largest chunk size and all growth sizes of the range. A
//!   range that always grows by the same amount therefore takes whole chunks, and no unused remainder of a chunk occupies memory that
//!   another range may need.
//! - If a growth would take only a part of a chunk, it gets new memory, and the prefetched memory is released. The unit becomes smaller
//!   each time, so this happens at most as often as a chunk can be divided.
//! - When memory of the range is released, the prefetched memory is released too, and prefetching pauses until the range grows again.
//!
//! A1: no part of the prefetched memory is mapped, chunks tile it, and no mapping begins or ends inside one of them. All of it can be
//! released at any time.

use super::chunks::Part;

/// The configured limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefetchRule {
    /// Maximum number of bytes to prefetch for one range; at least one chunk.
    pub(crate) most_bytes: u64,
    /// Size of the largest chunk in bytes.
    pub(crate) chunk_bytes: u64,
}

/// The prefetched memory of one range. See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct PrefetchWindow {
    /// The prefetched part. If it is empty, its position is the start of the next chunk.
    made: Part,
    /// Chunk size in bytes; 0 before the first growth.
    unit_bytes: u64,
    wanted_end: u64,
}

impl PrefetchWindow {
    /// Returns the prefetched part, which can be released.
    pub(crate) fn made(&self) -> &Part {
        &self.made
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.made.end - self.made.start
    }

    /// Returns the next chunk to create.
    pub(crate) fn next(&self) -> Option<Part> {
        let next = self.made.end..self.made.end + self.unit_bytes;
        (self.unit_bytes > 0 && next.end <= self.wanted_end).then_some(next)
    }

    /// Records that the next chunk is created.
    pub(crate) fn add(&mut self, chunk: &Part) {
        debug_assert_eq!(chunk.start, self.made.end);
        self.made.end = chunk.end;
    }

    /// Returns `true` if a growth to `end` would take only a part of a chunk.
    pub(crate) fn is_cut_at(&self, end: u64) -> bool {
        self.made.start < end && end < self.made.end && !(end - self.made.start).is_multiple_of(self.unit_bytes)
    }

    /// Stops prefetching until the range grows.
    pub(crate) fn want_nothing(&mut self) {
        self.wanted_end = 0;
    }

    /// Empties the window and stops prefetching until the range grows. Returns the previously prefetched part.
    pub(crate) fn take(&mut self) -> Part {
        self.want_nothing();
        std::mem::take(&mut self.made)
    }

    /// Records that the range grew by `growth`, which ends at the range's mapped end. The range is backed as far as `backed_end`.
    pub(crate) fn grow(&mut self, growth: &Part, backed_end: u64, range_bytes: u64, rule: &PrefetchRule) {
        debug_assert!(!self.is_cut_at(growth.end));
        let grown_bytes = growth.end - growth.start;
        let so_far = if self.unit_bytes == 0 { rule.chunk_bytes } else { self.unit_bytes };
        self.unit_bytes = greatest_common_divisor(so_far, grown_bytes);
        self.made = if growth.end < self.made.end {
            self.made.start.max(growth.end)..self.made.end
        } else {
            backed_end..backed_end
        };
        self.wanted_end = growth.end.saturating_add(growth.end.min(rule.most_bytes)).min(range_bytes);
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: PrefetchRule = PrefetchRule { most_bytes: 40, chunk_bytes: 20 };

    /// Creates all requested chunks and returns them.
    fn make(ahead: &mut PrefetchWindow) -> Vec<Part> {
        let mut chunks = Vec::new();
        while let Some(chunk) = ahead.next() {
            ahead.add(&chunk);
            chunks.push(chunk);
        }
        chunks
    }

    #[test]
    fn the_window_is_as_large_as_the_range_and_at_most_the_configured_size() {
        let mut ahead = PrefetchWindow::default();
        assert_eq!(ahead.next(), None, "the range has not grown yet");
        ahead.grow(&(0..10), 10, 1000, &RULE);
        assert_eq!(make(&mut ahead), vec![10..20]);
        ahead.grow(&(10..20), 20, 1000, &RULE);
        assert_eq!(make(&mut ahead), [20..30, 30..40]);
        ahead.grow(&(20..60), 60, 1000, &RULE);
        assert_eq!(make(&mut ahead), [60..70, 70..80, 80..90, 90..100]);
        assert_eq!(*ahead.made(), 60..100);
    }

    #[test]
    fn nothing_is_prefetched_beyond_the_end_of_the_range() {
        let mut ahead = PrefetchWindow::default();
        ahead.grow(&(0..20), 20, 50, &RULE);
        assert_eq!(make(&mut ahead), vec![20..40], "another unit would exceed the range");
        let mut whole = PrefetchWindow::default();
        whole.grow(&(0..20), 20, 20, &RULE);
        assert_eq!(whole.next(), None);
    }

    #[test]
    fn a_growth_of_another_size_makes_the_unit_smaller() {
        let mut ahead = PrefetchWindow::default();
        ahead.grow(&(0..60), 60, 1000, &RULE);
        assert_eq!(make(&mut ahead), [60..80, 80..100]);
        assert!(ahead.is_cut_at(66) && !ahead.is_cut_at(80) && !ahead.is_cut_at(100) && !ahead.is_cut_at(106));
        assert_eq!(ahead.take(), 60..100);
        ahead.grow(&(60..66), 66, 1000, &RULE);
        assert_eq!(make(&mut ahead).len(), 20, "units of 2 bytes");
        ahead.grow(&(66..76), 106, 1000, &RULE);
        assert_eq!((ahead.made().clone(), ahead.next()), (76..106, Some(106..108)));
    }

    #[test]
    fn growth_into_retained_memory_leaves_prefetched_memory() {
        let mut ahead = PrefetchWindow::default();
        ahead.grow(&(0..10), 18, 1000, &RULE);
        assert_eq!(ahead.next(), None, "8 of 10 bytes are already backed");
        ahead.grow(&(10..20), 20, 1000, &RULE);
        assert_eq!(make(&mut ahead), [20..30, 30..40]);
        ahead.grow(&(20..90), 90, 1000, &RULE);
        assert_eq!(ahead.bytes(), 0, "the growth took all prefetched memory");
        assert_eq!(ahead.next(), Some(90..100));
    }

    #[test]
    fn taken_memory_is_not_prefetched_again_until_the_range_grows() {
        let mut ahead = PrefetchWindow::default();
        ahead.grow(&(0..20), 20, 1000, &RULE);
        make(&mut ahead);
        assert_eq!((ahead.take(), ahead.bytes(), ahead.next()), (20..40, 0, None));
        ahead.grow(&(20..40), 40, 1000, &RULE);
        assert_eq!(ahead.next(), Some(40..60));
    }
}
