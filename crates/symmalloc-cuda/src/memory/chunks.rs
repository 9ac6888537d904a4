//! The backed parts of a range, and the physical chunks behind them.
//!
//! The driver releases memory only in the chunks in which it was mapped; it cannot split a chunk. The allocator, however, may release any
//! granule. Therefore chunks and mapped parts are tracked separately:
//!
//! ```text
//!  range    0        2        4        6        8 MiB
//!  chunks   ├────────┼─────────────────┤                   physical, never cut
//!  mapped   ├────────┤        ├────────┤                   in use by the allocator
//!                    └─ idle ─┘                            released by the allocator, kept until the whole chunk is unused
//! ```
//!
//! C1: every mapped part lies in chunks. When no part of a chunk is mapped anymore, the chunk is released to the driver. Until then, its
//! unmapped parts are idle, and mapping them again allocates no memory. With chunks of one granule, nothing is ever idle. Prefetched chunks
//! (`prefetch_window.rs`) are the exception: no part of them is mapped yet.

use std::collections::BTreeMap;
use std::ops::Range;

/// Offsets in bytes from the start of the range.
pub(crate) type Part = Range<u64>;

#[derive(Debug, Default)]
pub(crate) struct Chunks {
    /// Physical chunks: the end of each chunk, by its start. Chunks are disjoint.
    chunks: BTreeMap<u64, u64>,
    /// Mapped parts: the end of each part, by its start. Parts are disjoint, and no two are adjacent.
    mapped: BTreeMap<u64, u64>,
    /// Chunks that could neither be made accessible nor released: the end of each, by its start. No part of them is mapped.
    closed: BTreeMap<u64, u64>,
}

impl Chunks {
    /// Returns the subranges of `part` that no chunk covers, in order.
    pub(crate) fn gaps(&self, part: &Part) -> Vec<Part> {
        let mut gaps = Vec::new();
        let mut at = part.start;
        for (start, end) in overlapping(&self.chunks, part) {
            if at < start {
                gaps.push(at..start);
            }
            at = at.max(end);
        }
        if at < part.end {
            gaps.push(at..part.end);
        }
        gaps
    }

    pub(crate) fn add_chunk(&mut self, chunk: &Part) {
        self.chunks.insert(chunk.start, chunk.end);
    }

    /// Removes the chunks that tile `run`.
    pub(crate) fn remove_chunks(&mut self, run: &Part) {
        self.chunks.retain(|start, _| !run.contains(start));
        self.closed.retain(|start, _| !run.contains(start));
    }

    /// Marks the chunks that tile `run` as inaccessible.
    pub(crate) fn close(&mut self, run: &Part) {
        let closed = overlapping(&self.chunks, run).collect::<Vec<_>>();
        self.closed.extend(closed);
    }

    /// Returns an inaccessible chunk that overlaps `part`.
    pub(crate) fn first_closed(&self, part: &Part) -> Option<Part> {
        overlapping(&self.closed, part).next().map(|(start, end)| start..end)
    }

    /// Marks a chunk as accessible.
    pub(crate) fn open(&mut self, chunk: &Part) {
        self.closed.remove(&chunk.start);
    }

    /// Marks `part`, which chunks cover, as in use by the allocator.
    pub(crate) fn map(&mut self, part: &Part) {
        let mut merged = part.clone();
        if let Some((&start, &end)) = self.mapped.range(..part.start).next_back()
            && end == part.start
        {
            merged.start = start;
        }
        if let Some(&end) = self.mapped.get(&part.end) {
            self.mapped.remove(&part.end);
            merged.end = end;
        }
        self.mapped.insert(merged.start, merged.end);
    }

    /// Marks `part` as released by the allocator.
    pub(crate) fn unmap(&mut self, part: &Part) {
        let touched: Vec<(u64, u64)> = overlapping(&self.mapped, part).collect();
        for (start, end) in touched {
            self.mapped.remove(&start);
            if start < part.start {
                self.mapped.insert(start, part.start);
            }
            if part.end < end {
                self.mapped.insert(part.end, end);
            }
        }
    }

    /// Returns `true` if all of `part` is mapped.
    pub(crate) fn is_mapped(&self, part: &Part) -> bool {
        overlapping(&self.mapped, part).any(|(start, end)| start <= part.start && part.end <= end)
    }

    /// Returns `true` if any of `part` is mapped.
    pub(crate) fn is_any_mapped(&self, part: &Part) -> bool {
        overlapping(&self.mapped, part).next().is_some()
    }

    /// Returns the chunks that overlap `part` and have no mapped part, in order, with neighbors merged.
    pub(crate) fn unused_runs(&self, part: &Part) -> Vec<Part> {
        let mut runs: Vec<Part> = Vec::new();
        for (start, end) in overlapping(&self.chunks, part) {
            if self.is_any_mapped(&(start..end)) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == start => run.end = end,
                _ => runs.push(start..end),
            }
        }
        runs
    }

    /// Returns the chunks that overlap `part`, in order.
    pub(crate) fn overlapping_chunks(&self, part: &Part) -> impl Iterator<Item = Part> {
        overlapping(&self.chunks, part).map(|(start, end)| start..end)
    }

    /// Returns all chunks, in order, with neighbors merged.
    pub(crate) fn runs(&self) -> Vec<Part> {
        let mut runs: Vec<Part> = Vec::new();
        for (&start, &end) in &self.chunks {
            match runs.last_mut() {
                Some(run) if run.end == start => run.end = end,
                _ => runs.push(start..end),
            }
        }
        runs
    }

    /// Returns the end of the highest mapped part.
    pub(crate) fn mapped_end(&self) -> u64 {
        self.mapped.last_key_value().map_or(0, |(_, end)| *end)
    }

    /// Returns the end of the chunks that continue from `at` without a gap.
    pub(crate) fn backed_end(&self, at: u64) -> u64 {
        let mut end = self.chunks.range(..at).next_back().map_or(at, |(_, end)| at.max(*end));
        while let Some(next) = self.chunks.get(&end) {
            end = *next;
        }
        end
    }

    /// Returns the total size of the chunks in bytes.
    pub(crate) fn backed_bytes(&self) -> u64 {
        sum(&self.chunks)
    }

    /// Returns the number of bytes that are backed but not mapped.
    pub(crate) fn idle_bytes(&self) -> u64 {
        self.backed_bytes() - sum(&self.mapped)
    }
}

fn sum(intervals: &BTreeMap<u64, u64>) -> u64 {
    intervals.iter().map(|(start, end)| end - start).sum()
}

/// Returns the intervals that overlap `part`, in order.
fn overlapping<'a>(intervals: &'a BTreeMap<u64, u64>, part: &Part) -> impl Iterator<Item = (u64, u64)> + 'a {
    let (from, to) = (part.start, part.end);
    let first = intervals.range(..=from).next_back().filter(|(_, end)| **end > from).map_or(from, |(start, _)| *start);
    intervals.range(first..to.max(first)).map(|(start, end)| (*start, *end))
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of parts, some with a single element")]
mod tests {
    use super::*;

    fn mapped_in(chunks: &[Part]) -> Chunks {
        let mut state = Chunks::default();
        for chunk in chunks {
            state.add_chunk(chunk);
            state.map(chunk);
        }
        state
    }

    #[test]
    fn a_chunk_is_released_with_its_last_byte() {
        let mut state = mapped_in(&[0..6]);
        for (part, idle) in [(2..4, 2), (0..1, 3), (5..6, 4), (4..5, 5)] {
            state.unmap(&part);
            assert_eq!(state.unused_runs(&part), [], "{part:?}");
            assert_eq!(state.idle_bytes(), idle);
        }
        state.unmap(&(1..2));
        assert_eq!(state.unused_runs(&(1..2)), [0..6]);
        state.remove_chunks(&(0..6));
        assert_eq!(state.idle_bytes(), 0);
        assert_eq!(state.gaps(&(0..6)), [0..6]);
    }

    #[test]
    fn neighboring_chunks_are_released_in_one_run() {
        let mut state = mapped_in(&[0..2, 2..4, 4..6, 6..8]);
        state.unmap(&(2..6));
        assert_eq!(state.unused_runs(&(2..6)), [2..6]);
        assert!(state.is_mapped(&(0..2)) && state.is_mapped(&(6..8)) && !state.is_any_mapped(&(2..6)));
    }

    #[test]
    fn idle_memory_is_mapped_again_without_new_chunks() {
        let mut state = mapped_in(&[0..8]);
        state.unmap(&(2..6));
        assert_eq!(state.gaps(&(2..10)), [8..10]);
        state.map(&(2..6));
        assert_eq!(state.idle_bytes(), 0);
        assert!(state.is_mapped(&(0..8)));
    }

    #[test]
    fn memory_ends_at_the_next_gap() {
        let mut state = mapped_in(&[0..6, 6..8, 10..12]);
        state.unmap(&(4..8));
        let ends = [0, 3, 5, 6, 8, 9, 10, 12].map(|at| state.backed_end(at));
        assert_eq!(ends, [8, 8, 8, 8, 8, 9, 12, 12]);
        assert_eq!((state.mapped_end(), state.backed_bytes()), (12, 10));
    }

    /// Compares intervals with a model of one bit per byte, over random sequences of operations.
    #[test]
    fn intervals_agree_with_single_bytes() {
        const END: u64 = 24;
        let mut seed = 1_u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..300 {
            let mut state = Chunks::default();
            let (mut backed, mut mapped) = ([0_u64; END as usize], [false; END as usize]);
            let mut serial = 0;
            for _ in 0..40 {
                let from = next(END);
                let part = from..from + 1 + next(END - from);
                let bytes = || part.clone().map(|at| at as usize);
                assert_eq!(state.is_mapped(&part), bytes().all(|at| mapped[at]));
                assert_eq!(state.is_any_mapped(&part), bytes().any(|at| mapped[at]));
                if bytes().all(|at| !mapped[at]) {
                    for gap in state.gaps(&part) {
                        serial += 1;
                        assert!(gap.clone().all(|at| backed[at as usize] == 0));
                        gap.clone().for_each(|at| backed[at as usize] = serial);
                        state.add_chunk(&gap);
                    }
                    state.map(&part);
                    bytes().for_each(|at| mapped[at] = true);
                } else if bytes().all(|at| mapped[at]) {
                    state.unmap(&part);
                    bytes().for_each(|at| mapped[at] = false);
                    for run in state.unused_runs(&part) {
                        run.clone().for_each(|at| {
                            assert!(backed[at as usize] != 0 && !mapped[at as usize]);
                            backed[at as usize] = 0;
                        });
                        state.remove_chunks(&run);
                    }
                }
                let idle = (0..END as usize).filter(|at| backed[*at] != 0 && !mapped[*at]).count();
                assert_eq!(state.idle_bytes(), idle as u64);
                // No chunk without a mapped part remains.
                assert_eq!(state.unused_runs(&(0..END)), []);
            }
        }
    }
}
