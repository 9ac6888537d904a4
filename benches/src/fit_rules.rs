//! Rules by which a growing range could place large blocks, and the result of each rule on a recorded job.
//!
//! This is a separate model of the core: the free blocks of one range ordered by offset and by size, merged
//! immediately, split at 512 bytes, with growth at the end in granules. Small blocks are placed by best fit, like all
//! blocks in the core. A rule determines the placement of blocks from a minimum size on.
//!
//! ```text
//!           free      ────────         ───────────────        ─────────            range ends here ─┐
//!  best fit           ▓▓▓▓▓▓                                                                         grows
//!  lowest offset      ▓▓▓▓▓▓           (the first that is large enough, even if another fits better)
//!  far end                                                       ▓▓▓▓▓▓    (the end of the last one)
//! ```
//!
//! In addition to reserved memory, the model counts *touched* granules, which contain live bytes. These would be mapped
//! if every whole free granule were released immediately and mapped again when the rule places a block in it.

use crate::workload::{Step, Workload};
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::config::StreamPolicy;

/// The unit to which the core rounds sizes, in bytes.
const UNIT_BYTES: u64 = 512;
/// The unit of mapping, in bytes.
pub const GRANULE_BYTES: u64 = 2 << 20;

/// The placement of a large block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Large {
    /// In the smallest free block that is large enough; among equals, the lowest. This is the core's rule for all
    /// blocks.
    BestFit,
    /// In the free block with the lowest offset that is large enough.
    LowestOffset,
    /// At the end of the free block with the highest offset that is large enough.
    FarEnd,
    /// By best fit, in a separate range for large blocks.
    Apart,
    /// By best fit, in whole granules: it starts at a granule and its size is rounded up to whole granules.
    WholeGranules,
}

/// A rule for blocks from a minimum size on. All others are placed by best fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitRule {
    /// Placement of large blocks.
    pub large: Large,
    /// Minimum size of a large block in bytes.
    pub from_bytes: u64,
}

/// The result of a rule on a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Sum of the final sizes of all ranges.
    pub reserved_bytes: u64,
    /// Peak of granules that contain live bytes, in bytes.
    pub touched_bytes: u64,
}

impl FitRule {
    /// The core's rule.
    pub const BEST_FIT: FitRule = FitRule { large: Large::BestFit, from_bytes: 0 };

    /// Places every allocation of a job once.
    ///
    /// # Panics
    /// Panics if the job frees an allocation that it did not make.
    pub fn place(self, job: &Workload, streams: StreamPolicy) -> Extent {
        let heaps = if streams == StreamPolicy::Shared { 1 } else { usize::from(job.streams()) };
        // Two ranges per heap. The second one stays empty unless large blocks are placed apart.
        let mut ranges = vec![Range::default(); 2 * heaps];
        let mut placed: Vec<Option<Placed>> = vec![None; job.allocations()];
        let (mut extent, mut touched) = (Extent::default(), 0_i64);
        for step in job.steps() {
            match *step {
                Step::Allocate { number, stream, size_bytes } => {
                    let size = size_bytes.next_multiple_of(UNIT_BYTES);
                    let large = if size >= self.from_bytes { self.large } else { Large::BestFit };
                    let range = 2 * (stream.index() % heaps) + usize::from(large == Large::Apart);
                    let (offset, size) = ranges[range].allocate(large, size);
                    touched += ranges[range].touch(offset, size, 1);
                    placed[number as usize] = Some(Placed { range, offset, size });
                }
                Step::Free { number, .. } => {
                    let Placed { range, offset, size } =
                        placed[number as usize].take().expect("the allocation should have been made before");
                    touched += ranges[range].touch(offset, size, -1);
                    ranges[range].free(offset, size);
                }
                Step::RecordUse { .. } => {}
            }
            extent.touched_bytes = extent.touched_bytes.max(touched.unsigned_abs() * GRANULE_BYTES);
        }
        extent.reserved_bytes = ranges.iter().map(|range| range.end).sum();
        extent
    }
}

/// The location of an allocation, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// Index of the range.
    pub(crate) range: usize,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

/// A range that grows at its end. Bytes throughout.
#[derive(Clone, Debug, Default)]
pub(crate) struct Range {
    end: u64,
    /// Size by offset. Free blocks are never adjacent.
    free: BTreeMap<u64, u64>,
    /// The same blocks, as (size, offset).
    by_size: BTreeSet<(u64, u64)>,
    /// Number of live blocks that overlap each granule.
    pub(crate) live: Vec<i32>,
}

impl Range {
    /// Allocates a block. Returns its offset and the size that it occupies.
    pub(crate) fn allocate(&mut self, large: Large, size: u64) -> (u64, u64) {
        let (alignment, size) = match large {
            Large::WholeGranules => (GRANULE_BYTES, size.next_multiple_of(GRANULE_BYTES)),
            _ => (UNIT_BYTES, size),
        };
        let first_place = |offset: u64| offset.next_multiple_of(alignment);
        let fits = |(offset, free): &(u64, u64)| first_place(*offset) + size <= offset + free;
        let by_offset = || self.free.iter().map(|(offset, free)| (*offset, *free));
        let found = match large {
            Large::LowestOffset => by_offset().find(fits),
            Large::FarEnd => by_offset().rev().find(fits),
            Large::BestFit | Large::Apart | Large::WholeGranules => {
                self.by_size.range((size, 0)..).map(|(free, offset)| (*offset, *free)).find(fits)
            }
        };
        let (block, at) = match found {
            Some((offset, free)) if large == Large::FarEnd => ((offset, free), offset + free - size),
            Some((offset, free)) => ((offset, free), first_place(offset)),
            None => {
                let block = self.grow(first_place, size);
                (block, first_place(block.0))
            }
        };
        self.take(block, at, size);
        (at, size)
    }

    /// Grows the range until the block fits at its end. Returns the free block there.
    fn grow(&mut self, first_place: impl Fn(u64) -> u64, size: u64) -> (u64, u64) {
        let last = self.free.last_key_value().map(|(offset, free)| (*offset, *free));
        let (offset, free) = last.filter(|(offset, free)| offset + free == self.end).unwrap_or((self.end, 0));
        let end = (first_place(offset) + size).next_multiple_of(GRANULE_BYTES);
        self.remove(offset, free);
        self.insert(offset, end - offset);
        self.end = end;
        (offset, end - offset)
    }

    /// Removes `size` bytes at `at` from a free block.
    fn take(&mut self, (offset, free): (u64, u64), at: u64, size: u64) {
        self.remove(offset, free);
        self.insert(offset, at - offset);
        self.insert(at + size, offset + free - (at + size));
    }

    pub(crate) fn free(&mut self, offset: u64, size: u64) {
        let (mut start, mut end) = (offset, offset + size);
        if let Some((&lower, &free)) = self.free.range(..offset).next_back()
            && lower + free == offset
        {
            self.remove(lower, free);
            start = lower;
        }
        if let Some(&free) = self.free.get(&end) {
            self.remove(end, free);
            end += free;
        }
        self.insert(start, end - start);
    }

    /// Inserts a free block unless it is empty.
    fn insert(&mut self, offset: u64, size: u64) {
        if size > 0 {
            self.free.insert(offset, size);
            self.by_size.insert((size, offset));
        }
    }

    fn remove(&mut self, offset: u64, size: u64) {
        if size > 0 {
            assert!(self.free.remove(&offset) == Some(size) && self.by_size.remove(&(size, offset)));
        }
    }

    /// Counts a block that is allocated (1) or freed (-1). Returns the change in the number of touched granules.
    pub(crate) fn touch(&mut self, offset: u64, size: u64, change: i32) -> i64 {
        let granules = granules_of(offset, size);
        if self.live.len() < granules.end {
            self.live.resize(granules.end, 0);
        }
        let mut more = 0;
        for live in &mut self.live[granules] {
            let before = *live;
            *live += change;
            more += i64::from(*live > 0) - i64::from(before > 0);
        }
        more
    }
}

/// Returns the granules that a block overlaps.
pub(crate) fn granules_of(offset: u64, size: u64) -> std::ops::Range<usize> {
    (offset / GRANULE_BYTES) as usize..(offset + size).div_ceil(GRANULE_BYTES) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::StreamId;

    const MIB: u64 = 1 << 20;
    const STREAM: StreamId = StreamId(0);

    fn rule(large: Large) -> FitRule {
        FitRule { large, from_bytes: 4 * MIB }
    }

    /// Creates free runs of 6, 9 and 7 MiB, each separated by a live MiB.
    fn runs() -> Workload {
        let mut job = Workload::default();
        for size in [6, 1, 9, 1, 7, 1] {
            job.allocate(STREAM, size * MIB);
        }
        [0, 2, 4].into_iter().for_each(|number| job.free(number));
        job
    }

    fn offset_of(large: Large, size_mib: u64) -> u64 {
        let mut range = Range::default();
        let mut blocks = Vec::new();
        for size in [6, 1, 9, 1, 7, 1] {
            blocks.push(range.allocate(Large::BestFit, size * MIB));
        }
        [0, 2, 4].into_iter().for_each(|number: usize| range.free(blocks[number].0, blocks[number].1));
        range.allocate(large, size_mib * MIB).0 / MIB
    }

    #[test]
    fn each_rule_selects_a_different_free_block() {
        assert_eq!(offset_of(Large::BestFit, 7), 17);
        assert_eq!(offset_of(Large::LowestOffset, 7), 7);
        assert_eq!(offset_of(Large::FarEnd, 6), 18);
        assert_eq!(offset_of(Large::WholeGranules, 5), 0);
        assert_eq!(offset_of(Large::WholeGranules, 7), 8);
    }

    #[test]
    fn a_block_that_fits_nowhere_grows_the_range_at_its_free_end() {
        let mut job = runs();
        job.allocate(STREAM, 10 * MIB);
        let best = rule(Large::BestFit).place(&job, StreamPolicy::Separate);
        // The new block starts at 25 MiB, in what was the last granule.
        assert_eq!(best.reserved_bytes, 36 * MIB);
        // The peak is before the frees. At the end it is lower: three granules, and five more for the new block.
        assert_eq!(best.touched_bytes, 26 * MIB);
    }

    #[test]
    fn separated_large_blocks_get_a_range_of_their_own() {
        let mut job = Workload::default();
        job.allocate(STREAM, 3 * MIB);
        job.allocate(STREAM, 5 * MIB);
        assert_eq!(rule(Large::BestFit).place(&job, StreamPolicy::Separate).reserved_bytes, 8 * MIB);
        assert_eq!(rule(Large::Apart).place(&job, StreamPolicy::Separate).reserved_bytes, 10 * MIB);
    }
}
