//! What is made ahead of a range's growth: how much, and in which chunks.
//!
//! ```text
//!  range    0                    end                               wanted
//!  mapped   ├─────────────────────┤
//!  ahead                          ├─ unit ─┼─ unit ─┼─ unit ─┤ ─ ─ ─ ┤     chunks that nobody has yet
//! ```
//!
//! The rule, out of what the range grew by and nothing else:
//!
//! - After each growth as much is wanted ahead as the range reaches, at most what the program gave, and nothing behind the end
//!   of its addresses.
//! - It is made in chunks of one *unit*: the greatest common divisor of the largest chunk and of all that the range grew by. So
//!   growth that goes on as before takes whole chunks, and nothing of a chunk is left over that another range would lack.
//! - A growth that does not take whole chunks gets memory of its own, and what was ahead goes back. The unit is smaller
//!   from then on, so that this happens at most as often as a chunk can be divided.
//! - When memory of the range goes back, what is ahead of it does too, and nothing is wanted until it grows again.
//!
//! A1: nothing of what is ahead is mapped, chunks tile it, and no range begins or ends inside one of them: all of it can go back
//! at any time.

use super::chunks::Part;

/// What the program gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefetchRule {
    /// The most that is made ahead of one range; at least a chunk.
    pub(crate) most_bytes: u64,
    /// The largest chunk.
    pub(crate) chunk_bytes: u64,
}

/// See the file's comment.
#[derive(Debug, Default)]
pub(crate) struct PrefetchWindow {
    /// What is made. Empty: it is where the next chunk will begin.
    made: Part,
    /// 0 before the first growth.
    unit_bytes: u64,
    wanted_end: u64,
}

impl PrefetchWindow {
    /// What is made, and can be given back.
    pub(crate) fn made(&self) -> &Part {
        &self.made
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.made.end - self.made.start
    }

    /// The chunk to be made next.
    pub(crate) fn next(&self) -> Option<Part> {
        let next = self.made.end..self.made.end + self.unit_bytes;
        (self.unit_bytes > 0 && next.end <= self.wanted_end).then_some(next)
    }

    /// Notes that the next chunk is made.
    pub(crate) fn add(&mut self, chunk: &Part) {
        debug_assert_eq!(chunk.start, self.made.end);
        self.made.end = chunk.end;
    }

    /// Whether a growth to `end` would take a part of a chunk.
    pub(crate) fn is_cut_at(&self, end: u64) -> bool {
        self.made.start < end && end < self.made.end && !(end - self.made.start).is_multiple_of(self.unit_bytes)
    }

    /// No more is wanted until the range grows.
    pub(crate) fn want_nothing(&mut self) {
        self.wanted_end = 0;
    }

    /// Nothing is ahead any more, nor wanted, until the range grows. Returns what was.
    pub(crate) fn take(&mut self) -> Part {
        self.want_nothing();
        std::mem::take(&mut self.made)
    }

    /// Notes that the range grew by `growth`, up to its end, behind which there is memory up to `backed_end`.
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

    /// Makes all that is wanted; returns the chunks.
    fn make(ahead: &mut PrefetchWindow) -> Vec<Part> {
        let mut chunks = Vec::new();
        while let Some(chunk) = ahead.next() {
            ahead.add(&chunk);
            chunks.push(chunk);
        }
        chunks
    }

    #[test]
    fn as_much_as_the_range_reaches_is_wanted_and_at_most_what_the_program_gave() {
        let mut ahead = PrefetchWindow::default();
        assert_eq!(ahead.next(), None, "it did not grow yet");
        ahead.grow(&(0..10), 10, 1000, &RULE);
        assert_eq!(make(&mut ahead), vec![10..20]);
        ahead.grow(&(10..20), 20, 1000, &RULE);
        assert_eq!(make(&mut ahead), [20..30, 30..40]);
        ahead.grow(&(20..60), 60, 1000, &RULE);
        assert_eq!(make(&mut ahead), [60..70, 70..80, 80..90, 90..100]);
        assert_eq!(*ahead.made(), 60..100);
    }

    #[test]
    fn nothing_is_wanted_behind_the_end_of_the_addresses() {
        let mut ahead = PrefetchWindow::default();
        ahead.grow(&(0..20), 20, 50, &RULE);
        assert_eq!(make(&mut ahead), vec![20..40], "another unit would end behind it");
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
        assert_eq!(make(&mut ahead).len(), 20, "units of 2");
        ahead.grow(&(66..76), 106, 1000, &RULE);
        assert_eq!((ahead.made().clone(), ahead.next()), (76..106, Some(106..108)));
    }

    #[test]
    fn growth_into_memory_that_was_kept_leaves_what_is_ahead() {
        let mut ahead = PrefetchWindow::default();
        ahead.grow(&(0..10), 18, 1000, &RULE);
        assert_eq!(ahead.next(), None, "8 of 10 are there already");
        ahead.grow(&(10..20), 20, 1000, &RULE);
        assert_eq!(make(&mut ahead), [20..30, 30..40]);
        ahead.grow(&(20..90), 90, 1000, &RULE);
        assert_eq!(ahead.bytes(), 0, "all of it was taken");
        assert_eq!(ahead.next(), Some(90..100));
    }

    #[test]
    fn what_is_taken_is_not_made_again_until_the_range_grows() {
        let mut ahead = PrefetchWindow::default();
        ahead.grow(&(0..20), 20, 1000, &RULE);
        make(&mut ahead);
        assert_eq!((ahead.take(), ahead.bytes(), ahead.next()), (20..40, 0, None));
        ahead.grow(&(20..40), 40, 1000, &RULE);
        assert_eq!(ahead.next(), Some(40..60));
    }
}
