//! A model of moving memory on demand, a rule that the core does not have.
//!
//! The core searches for a place within mapped memory. Under a limit it releases *all* whole free granules of a heap
//! at once before it searches again. In this model addresses come first: a block is placed by best fit among all free
//! addresses, mapped or not, and then receives the memory that its granules lack. If that would exceed the limit, as
//! many free granules as are missing are unmapped elsewhere.
//!
//! ```text
//!  live      ████      ██████            ████
//!  mapped    ██████████████████          ██████        limit on the number of granules
//!  placed                        ▓▓▓▓▓▓▓▓              two are missing: two free ones are unmapped elsewhere
//! ```
//!
//! Placement therefore does not depend on the limit, and the peak number of touched granules is a sufficient limit.

use crate::fit_rules::{GRANULE_BYTES, Large, Placed, Range, granules_of};
use crate::workload::{Step, Workload};
use symmalloc_core::config::StreamPolicy;

/// The free granules that are unmapped first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victims {
    /// Granules at the lowest offset of the lowest heap.
    Lowest,
    /// Granules at the highest offset of the highest heap.
    Highest,
}

/// The device calls of one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Runs of granules mapped.
    pub maps: u64,
    /// Runs of granules unmapped.
    pub unmaps: u64,
    /// Allocations for which the host waits for streams before it unmaps memory that they used.
    pub stalls: u64,
    /// Granules mapped.
    pub mapped: u64,
    /// Granules unmapped.
    pub unmapped: u64,
}

/// Runs a job `passes` times under a limit in bytes. Returns `None` if the limit refuses an allocation.
///
/// # Panics
/// Panics if the job frees an allocation that it did not make.
pub fn move_by_need(
    job: &Workload,
    streams: StreamPolicy,
    victims: Victims,
    limit_bytes: u64,
    passes: usize,
) -> Option<Vec<Moves>> {
    let heaps = if streams == StreamPolicy::Shared { 1 } else { usize::from(job.streams()) };
    let mut memory = Memory { limit: limit_bytes / GRANULE_BYTES, held: 0, mapped: vec![Vec::new(); heaps], victims };
    let mut ranges = vec![Range::default(); heaps];
    let mut placed: Vec<Option<Placed>> = vec![None; job.allocations()];
    (0..passes)
        .map(|_| {
            let mut moves = Moves::default();
            for step in job.steps() {
                match *step {
                    Step::Allocate { number, stream, size_bytes } => {
                        let range = stream.index() % heaps;
                        let (offset, size) = ranges[range].allocate(Large::BestFit, size_bytes.next_multiple_of(512));
                        ranges[range].touch(offset, size, 1);
                        memory.back(&ranges, range, granules_of(offset, size), &mut moves)?;
                        placed[number as usize] = Some(Placed { range, offset, size });
                    }
                    Step::Free { number, .. } => {
                        let Placed { range, offset, size } =
                            placed[number as usize].take().expect("the allocation should have been made before");
                        ranges[range].touch(offset, size, -1);
                        ranges[range].free(offset, size);
                    }
                    Step::RecordUse { .. } => {}
                }
            }
            Some(moves)
        })
        .collect()
}

/// The granules that are backed by memory.
#[derive(Debug)]
struct Memory {
    /// Maximum number of mapped granules.
    limit: u64,
    held: u64,
    /// Mapped granules, by range and granule.
    mapped: Vec<Vec<bool>>,
    victims: Victims,
}

impl Memory {
    /// Maps the granules that are not mapped. Returns `None` if the limit prevents it.
    fn back(
        &mut self,
        ranges: &[Range],
        range: usize,
        granules: std::ops::Range<usize>,
        moves: &mut Moves,
    ) -> Option<()> {
        let mapped = &mut self.mapped[range];
        if mapped.len() < granules.end {
            mapped.resize(granules.end, false);
        }
        let missing = mapped[granules.clone()].iter().filter(|is_mapped| !**is_mapped).count() as u64;
        if missing == 0 {
            return Some(());
        }
        let excess = (self.held + missing).saturating_sub(self.limit);
        if excess > 0 {
            self.unmap(ranges, excess, moves)?;
        }
        let mapped = &mut self.mapped[range];
        let mut before = None;
        for at in granules {
            if !mapped[at] {
                moves.maps += u64::from(before.is_none_or(|before| before + 1 != at));
                mapped[at] = true;
                before = Some(at);
            }
        }
        moves.mapped += missing;
        self.held += missing;
        Some(())
    }

    /// Unmaps `excess` free granules.
    fn unmap(&mut self, ranges: &[Range], mut excess: u64, moves: &mut Moves) -> Option<()> {
        let mapped = |range: usize| self.mapped[range].iter().enumerate().filter(|(_, is_mapped)| **is_mapped);
        let is_free = |range: &usize, at: &usize| ranges[*range].live.get(*at).is_none_or(|live| *live == 0);
        let mut free: Vec<(usize, usize)> = (0..ranges.len())
            .flat_map(|range| mapped(range).map(move |(at, _)| (range, at)))
            .filter(|(range, at)| is_free(range, at))
            .collect();
        if self.victims == Victims::Highest {
            free.reverse();
        }
        let mut before = None;
        for (range, at) in free.into_iter().take(excess as usize) {
            let is_next = |(other, before): (usize, usize)| other == range && before.abs_diff(at) == 1;
            moves.unmaps += u64::from(!before.is_some_and(is_next));
            self.mapped[range][at] = false;
            before = Some((range, at));
            excess -= 1;
            self.held -= 1;
            moves.unmapped += 1;
        }
        moves.stalls += 1;
        (excess == 0).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::StreamId;

    const MIB: u64 = 1 << 20;

    /// Returns a job that requests 10 MiB when 8 MiB are free between two live blocks.
    fn job() -> Workload {
        let mut job = Workload::default();
        for size in [2, 8, 2] {
            job.allocate(StreamId(0), size * MIB);
        }
        job.free(1);
        job.allocate(StreamId(0), 10 * MIB);
        job
    }

    #[test]
    fn only_missing_memory_is_moved() {
        let job = job();
        let under = |limit| move_by_need(&job, StreamPolicy::Separate, Victims::Lowest, limit * MIB, 1);
        let moved = |maps, unmaps, stalls, mapped, unmapped| Moves { maps, unmaps, stalls, mapped, unmapped };
        assert_eq!(under(22), Some(vec![moved(4, 0, 0, 11, 0)]));
        assert_eq!(under(18), Some(vec![moved(4, 1, 1, 11, 2)]));
        assert_eq!(under(14), Some(vec![moved(4, 1, 1, 11, 4)]));
        assert_eq!(under(12), None);
    }

    #[test]
    fn the_order_of_victims_decides_which_granules_are_unmapped() {
        for (victims, gone) in [(Victims::Lowest, 1), (Victims::Highest, 4)] {
            let mut range = Range::default();
            range.touch(0, 2 * MIB, 1);
            let mut memory =
                Memory { limit: 4, held: 4, mapped: vec![vec![true, true, false, false, true, true]], victims };
            range.touch(10 * MIB, 2 * MIB, 1);
            memory.unmap(&[range], 1, &mut Moves::default()).expect("two granules are free");
            assert!(!memory.mapped[0][gone]);
        }
    }
}
