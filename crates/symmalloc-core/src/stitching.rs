//! Stitched ranges: addresses of a heap that map memory a second time, so that free pieces form a large block.
//!
//! A heap's memory lies in ordinary segments, its *home*. A stitched range is a segment without memory: its granules
//! are mapped onto home granules, in any order.
//!
//! ```text
//!  home      │ a │ 1 │ 2 │   b   │ 3 │ 4 │ 5 │ c │
//!                └───┴───────────┴───┴───┴───┴─────── blocks that are elsewhere, a granule each
//!  stitched  │ 3   4   5   1   2 │                    one block, free or in use
//! ```
//! A granule of memory may be mapped into any number of stitched ranges. It is allocated or free at exactly one of its
//! addresses. At the others, it is covered by an [`Elsewhere`](crate::blocks::table::BlockState::Elsewhere) block.
//!
//! This component moves granules between their addresses in the [`Arena`]. A heap decides when to stitch, maps and
//! unmaps ranges, waits for earlier users, and records what happened. Nothing here calls the driver.

use crate::arena::Arena;
use crate::blocks::FreeKey;
use crate::blocks::table::{BlockState, Slot};
use crate::config::size_rules::SizeClass;
use crate::streams::fences::FenceSetId;
use crate::types::backend::Range;
use crate::types::ids::StreamId;
use crate::types::units::{Units, bytes};
use crate::types::work;
use smallvec::SmallVec;

/// A range of granule indices in a segment.
type Part = std::ops::Range<usize>;

/// The position of a granule of memory, ordered by segment slot and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Granule {
    /// Slot of the segment in the table; never a stitched one.
    pub(crate) segment: u32,
    pub(crate) offset: Units,
}

/// One stitched range.
#[derive(Debug)]
pub(crate) struct StitchedRange {
    /// Slot of its segment in the table.
    segment: u32,
    /// The memory to which each granule of its addresses is mapped; `None` if the granule was unmapped.
    granules: Vec<Option<Granule>>,
    /// Streams that used its addresses, in addition to those of its blocks; ascending.
    users: SmallVec<[StreamId; 2]>,
}

impl StitchedRange {
    /// Returns the memory to which a part of the addresses is mapped, in order. Returns `None` if some of it is
    /// unmapped or out of range.
    fn home(&self, part: Part) -> Option<Vec<Granule>> {
        self.granules.get(part)?.iter().copied().collect()
    }

    /// Returns the number of mapped granules.
    fn aliases(&self) -> usize {
        self.granules.iter().flatten().count()
    }

    /// Returns the slot of its segment in the table.
    pub(crate) fn segment(&self) -> u32 {
        self.segment
    }

    /// Returns the memory to which each granule of its addresses is mapped; `None` if the granule was unmapped.
    pub(crate) fn granules(&self) -> &[Option<Granule>] {
        &self.granules
    }

    /// Returns the streams that used its addresses, in addition to those of its blocks.
    pub(crate) fn users(&self) -> &[StreamId] {
        &self.users
    }

    /// Returns the mapped parts of the addresses, as offset and size in bytes.
    pub(crate) fn mapped(&self, granule: Units) -> SmallVec<[(u64, u64); 1]> {
        let mut mapped: SmallVec<[(u64, u64); 1]> = SmallVec::new();
        for at in (0..self.granules.len()).filter(|at| self.granules[*at].is_some()) {
            let offset_bytes = at as u64 * bytes(granule);
            match mapped.last_mut() {
                Some((offset, size)) if *offset + *size == offset_bytes => *size += bytes(granule),
                _ => mapped.push((offset_bytes, bytes(granule))),
            }
        }
        mapped
    }
}

/// The free memory of a heap, as it would be if every free granule of a stitched range were at home.
#[derive(Debug)]
pub(crate) struct Home {
    /// The largest free run.
    pub(crate) largest: Units,
    /// All whole free granules.
    pub(crate) free: FreeGranules,
}

/// A set of free granules at home, as runs. A free block has up to half a million granules, and is one run.
#[derive(Debug, Default)]
pub(crate) struct FreeGranules {
    /// The first granule of each run and the offset at its end; ascending, and without overlap.
    runs: Vec<(Granule, Units)>,
    /// Number of granules in all runs.
    count: usize,
}

impl FreeGranules {
    fn new(mut runs: Vec<(Granule, Units)>, granule: Units) -> Self {
        runs.sort_unstable();
        let count = runs.iter().map(|(first, end)| ((end - first.offset) / granule) as usize).sum();
        FreeGranules { runs, count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    fn contains(&self, granule: Granule) -> bool {
        let after = self.runs.partition_point(|(first, _)| *first <= granule);
        let run = after.checked_sub(1).map(|before| self.runs[before]);
        run.is_some_and(|(first, end)| first.segment == granule.segment && granule.offset < end)
    }
}

/// Number of granules that count as one unit of work.
const GRANULES_PER_UNIT: usize = 16;

/// The stitched ranges of a heap. Between two calls, these invariants hold:
///
/// - Of the addresses that map one granule, exactly one is free or in use; the others are elsewhere (I11).
/// - A stitched segment of the arena has exactly one range here, which maps only memory of other segments.
/// - A granule that was unmapped is elsewhere at that address.
#[derive(Debug, Default)]
pub(crate) struct StitchedRanges {
    /// Oldest first. Empty unless the pool stitches.
    ranges: Vec<StitchedRange>,
}

impl StitchedRanges {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the ranges, oldest first.
    pub(crate) fn ranges(&self) -> &[StitchedRange] {
        &self.ranges
    }

    /// Returns the number of granules that are mapped a second time.
    pub(crate) fn aliases(&self) -> usize {
        self.ranges
            .iter()
            .inspect(|range| work::count(1 + range.granules.len() / GRANULES_PER_UNIT))
            .map(StitchedRange::aliases)
            .sum()
    }

    /// Returns the segments of unused ranges, oldest first, each with the number of its mapped granules.
    pub(crate) fn unused(&self, arena: &Arena) -> Vec<(u32, usize)> {
        let is_in_use = |slot| matches!(arena.block(slot).state, BlockState::Allocated { .. } | BlockState::Planned);
        let unused = self.ranges.iter().filter(|range| !arena.blocks_of(range.segment).any(is_in_use));
        unused.map(|range| (range.segment, range.aliases())).collect()
    }

    /// Returns the free memory at home as it would be after [`gather`](Self::gather).
    pub(crate) fn look_home(&self, arena: &Arena) -> Home {
        let granule_size = arena.rules().granule;
        let free_blocks = self.free_blocks(arena).into_iter();
        let mut free: Vec<_> =
            free_blocks.flat_map(|(at, _, part)| self.ranges[at].home(part).unwrap_or_default()).collect();
        // Sorting a granule takes longer than counting one.
        work::count(free.len());
        free.sort_unstable();
        let mut largest = 0;
        for segment in arena.backed_segments() {
            let mut run = 0;
            for block in arena.blocks_of(segment).map(|slot| arena.block(slot)) {
                let granule = Granule { segment, offset: block.offset() };
                let is_free = block.is_free() || block.is_elsewhere() && free.binary_search(&granule).is_ok();
                run = if is_free { run + block.size } else { 0 };
                largest = largest.max(run);
            }
        }
        let single = free.into_iter().map(|granule| (granule, granule.offset + granule_size));
        let runs: Vec<_> = single.chain(free_runs(arena)).collect();
        work::count(runs.len());
        Home { largest, free: FreeGranules::new(runs, granule_size) }
    }

    /// Returns the free blocks of stitched ranges, oldest range first: each with the index of its range and the
    /// granules that it covers entirely.
    fn free_blocks(&self, arena: &Arena) -> Vec<(usize, Slot, Part)> {
        let free = |(at, range): (usize, &StitchedRange)| {
            let slots = arena.blocks_of(range.segment).filter(|slot| arena.block(*slot).is_free());
            slots.map(move |slot| (at, slot, whole_granules_of(arena, slot))).collect::<Vec<_>>()
        };
        self.ranges.iter().enumerate().flat_map(free).filter(|(.., part)| !part.is_empty()).collect()
    }

    /// Moves the free granules of stitched ranges back home.
    pub(crate) fn gather(&mut self, arena: &mut Arena) {
        let granule_size = arena.rules().granule;
        for (at, slot, part) in self.free_blocks(arena) {
            let users = arena.streams_of(slot);
            let range = &mut self.ranges[at];
            range.users.extend_from_slice(&users);
            range.users.sort_unstable();
            range.users.dedup();
            let mut home = range.home(part.clone()).expect("what is free is mapped");
            home.sort_unstable();
            let (free, fences) = (arena.block(slot).state, arena.block(slot).fences);
            home.into_iter().fold(None, |lower, granule| {
                let there = block_around(arena, lower, granule);
                Some(arena.bring_back(there, free, fences))
            });
            for granule in part {
                send_away(arena, slot, granule as Units * granule_size);
            }
        }
    }

    /// Returns the first `count` granules of the oldest range in which all of these are `free` at home.
    pub(crate) fn find_again(&self, count: usize, free: &FreeGranules) -> Option<(u32, Vec<Granule>)> {
        let is_free = |granule: &Granule| free.contains(*granule);
        let found = |range: &StitchedRange| {
            let home = range.home(0..count);
            work::count(home.as_ref().map_or(1, |home| 1 + home.len() / GRANULES_PER_UNIT));
            Some((range.segment, home?))
        };
        self.ranges.iter().filter_map(found).find(|(_, home)| home.iter().all(is_free))
    }

    /// Returns the blocks around free granules at home. A stream that gets the granules elsewhere waits for their users.
    pub(crate) fn blocks_around(&self, arena: &Arena, granules: &[Granule]) -> Vec<Slot> {
        let mut lower = None;
        let around = granules.iter().map(|granule| *lower.insert(block_around(arena, lower, *granule)));
        around.collect()
    }

    /// Marks free granules at home, in ascending order, as elsewhere.
    pub(crate) fn leave_home(&mut self, arena: &mut Arena, granules: &[Granule]) {
        let mut lower = None;
        for granule in granules {
            let around = block_around(arena, lower, *granule);
            lower = Some(send_away(arena, around, granule.offset));
        }
    }

    /// Makes the first `count` granules of a range one free block. They have left home. Returns the block.
    pub(crate) fn reuse(&mut self, arena: &mut Arena, segment: u32, count: usize, free: BlockState) -> Slot {
        let mut slot = arena.bring_back(arena.first_block(segment), free, FenceSetId::EMPTY);
        for _ in 1..count {
            slot = arena.bring_back(arena.block(slot).next, free, FenceSetId::EMPTY);
        }
        slot
    }

    /// Adds a range of addresses that are mapped onto these granules, which have left home. Returns its free block.
    pub(crate) fn add(&mut self, arena: &mut Arena, range: Range, granules: Vec<Granule>, free: BlockState) -> Slot {
        let slot = arena.add_stitched(range, free);
        let segment = arena.block(slot).segment;
        let granules = granules.into_iter().map(Some).collect();
        self.ranges.push(StitchedRange { segment, granules, users: SmallVec::new() });
        slot
    }

    /// Removes and returns the range of a segment that is removed; `None` if the segment is not stitched.
    pub(crate) fn remove(&mut self, segment: u32) -> Option<StitchedRange> {
        work::count(self.ranges.len());
        let at = self.ranges.iter().position(|range| range.segment == segment)?;
        Some(self.ranges.remove(at))
    }

    /// Passes every mapped granule that is elsewhere, with its range and offset, to `unmap`, until it fails. It first
    /// passes the users of the addresses, each once, to `wait`.
    pub(crate) fn unmap_unused<E>(
        &mut self,
        arena: &Arena,
        mut wait: impl FnMut(StreamId) -> Result<(), E>,
        mut unmap: impl FnMut(Range, Units) -> Result<(), E>,
    ) -> Result<(), E> {
        for StitchedRange { segment, granules, users } in &mut self.ranges {
            let range = arena.segment(*segment).range;
            for slot in arena.blocks_of(*segment).filter(|slot| arena.block(*slot).is_elsewhere()) {
                let offset = arena.block(slot).offset();
                let granule = &mut granules[(offset / arena.rules().granule) as usize];
                if granule.is_some() {
                    while let Some(stream) = users.last().copied() {
                        wait(stream)?;
                        users.pop();
                    }
                    unmap(range, offset)?;
                    *granule = None;
                }
            }
        }
        Ok(())
    }
}

/// Returns every granule that is entirely free at home, in the order of rule D2's blocks.
pub(crate) fn free_granules(arena: &Arena) -> impl Iterator<Item = Granule> + '_ {
    let granule = arena.rules().granule;
    free_runs(arena).flat_map(move |(Granule { segment, offset }, end)| {
        (offset..end).step_by(granule as usize).map(move |offset| Granule { segment, offset })
    })
}

/// Returns the whole granules of each free block at home, in the order of rule D2's blocks: the first one and the offset at their end.
fn free_runs(arena: &Arena) -> impl Iterator<Item = (Granule, Units)> + '_ {
    let slots = arena.free_keys(SizeClass::Large).map(FreeKey::slot);
    let at_home = slots.filter(|slot| !arena.segment(arena.block(*slot).segment).is_stitched);
    let runs = at_home.map(|slot| {
        let (part, granule) = (whole_granules_of(arena, slot), arena.rules().granule);
        let first = Granule { segment: arena.block(slot).segment, offset: part.start as Units * granule };
        (first, part.end as Units * granule)
    });
    runs.filter(|(first, end)| first.offset < *end)
}

/// Returns the granules of its segment that a block covers entirely.
fn whole_granules_of(arena: &Arena, slot: Slot) -> Part {
    let (block, granule) = (arena.block(slot), arena.rules().granule);
    block.offset().div_ceil(granule) as usize..(block.end() / granule) as usize
}

/// Returns the block that contains a granule. The search starts at `lower`, the block of a lower granule.
fn block_around(arena: &Arena, lower: Option<Slot>, granule: Granule) -> Slot {
    let lower = lower.filter(|slot| arena.block(*slot).segment == granule.segment);
    let mut slot = lower.unwrap_or_else(|| arena.first_block(granule.segment));
    while arena.block(slot).end() <= granule.offset {
        slot = arena.block(slot).next;
    }
    slot
}

/// Marks a granule of a free block as elsewhere. The rest after it keeps the slot.
fn send_away(arena: &mut Arena, slot: Slot, offset: Units) -> Slot {
    arena.carve(slot, offset, offset + arena.rules().granule, BlockState::Elsewhere)
}

#[cfg(test)]
mod tests;
