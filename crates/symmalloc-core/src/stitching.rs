//! Stitched ranges: address ranges at which a heap maps memory a second time, so that scattered free pieces form one
//! large block.
//!
//! A heap's memory lies in ordinary segments, its *home*. A stitched range is a segment without its own memory: its
//! granules are mapped onto home granules, in any order.
//!
//! ```text
//!  home      │ a │ 1   2 │   b   │ 3   4   5 │ c │
//!                └───────┴───────┴───────────┴─────── blocks that are elsewhere, one for each piece
//!  stitched  │ 3   4   5   1   2 │                    one block, free or in use
//! ```
//! A granule of memory may be mapped into any number of stitched ranges. It is allocated or free at exactly one of its
//! addresses. At its other addresses, an [`Elsewhere`](crate::blocks::table::BlockState::Elsewhere) block covers it.
//!
//! When the last block of a range is freed, its memory returns home. The layout of free memory then depends only on the
//! live allocations, so a program that repeats its steps finds the same ranges again. Moving a block takes a few
//! operations for each of its pieces, and even a large block has few pieces.
//!
//! This component moves each granule between the granule's addresses in the [`Arena`]. The heap decides when to stitch,
//! maps and unmaps ranges, waits for earlier users, and records what happened. Nothing here calls the driver.

use crate::arena::Arena;
use crate::blocks::table::{BlockState, Slot};
use crate::config::size_rules::SizeClass;
use crate::streams::fences::FenceSetId;
use crate::types::backend::Range;
use crate::types::ids::StreamId;
use crate::types::units::{Units, bytes};
use crate::types::work;
use smallvec::SmallVec;

/// Units of work for each piece that moves between two addresses.
const WORK_PER_MOVE: usize = 8;

/// The position of a granule of memory, ordered by segment slot and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Granule {
    /// Slot of the segment in the table; never a stitched segment.
    pub(crate) segment: u32,
    pub(crate) offset: Units,
}

/// A contiguous run of whole granules in a home segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Run {
    pub(crate) start: Granule,
    pub(crate) size: Units,
}

impl Run {
    fn end(&self) -> Units {
        self.start.offset + self.size
    }

    /// Returns the first `size` units.
    fn front(self, size: Units) -> Run {
        Run { size, ..self }
    }

    /// Returns the part after the first `size` units.
    fn after(self, size: Units) -> Run {
        let start = Granule { offset: self.start.offset + size, ..self.start };
        Run { start, size: self.size - size }
    }
}

/// A part of a stitched range whose memory is contiguous at home.
#[derive(Clone, Copy, Debug)]
struct Piece {
    home: Run,
    state: PieceState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceState {
    /// The memory is at the addresses of the range, free or in use. `covered_by` is the `Elsewhere` block at home.
    Here { covered_by: Slot },
    /// The memory is at home, or in another range. The addresses stay mapped.
    Home,
    /// The addresses are not mapped.
    Unmapped,
}

/// The segment, pieces and users of one stitched range.
#[derive(Debug)]
pub(crate) struct StitchedRange {
    /// Slot of its segment in the table.
    segment: u32,
    /// The parts of the range, in address order.
    pieces: Vec<Piece>,
    /// `true` if some of the memory is at the range's own addresses, free or in use, rather than at home.
    has_memory: bool,
    /// Streams that used the range's addresses, in addition to the users of its current blocks; ascending.
    users: SmallVec<[StreamId; 2]>,
}

impl StitchedRange {
    /// Returns the number of mapped granules.
    fn aliases(&self, granule: Units) -> usize {
        work::count(self.pieces.len());
        self.mapped_pieces().map(|(_, run)| (run.size / granule) as usize).sum()
    }

    /// Returns the home memory of the first `size` units, up to the first part that is not mapped.
    fn front(&self, size: Units) -> impl Iterator<Item = Run> {
        let is_front = move |(offset, piece): &(Units, &Piece)| *offset < size && piece.state != PieceState::Unmapped;
        let front = self.offsets().take_while(is_front);
        front.map(move |(offset, piece)| piece.home.front(piece.home.size.min(size - offset)))
    }

    /// Splits the piece that contains an offset, so that a piece starts at the offset. Returns the index of the piece
    /// that starts there.
    fn divide(&mut self, arena: &mut Arena, offset: Units) -> usize {
        let (mut at, mut start) = (0, 0);
        while at < self.pieces.len() && start + self.pieces[at].home.size <= offset {
            start += self.pieces[at].home.size;
            at += 1;
        }
        // Inserting a piece moves the pieces after it.
        work::count(self.pieces.len());
        if start == offset {
            return at;
        }
        let Piece { home, state } = self.pieces[at];
        let lower = match state {
            PieceState::Here { covered_by } => {
                PieceState::Here { covered_by: arena.divide_elsewhere(covered_by, offset - start) }
            }
            state => state,
        };
        self.pieces[at] = Piece { home: home.after(offset - start), state };
        self.pieces.insert(at, Piece { home: home.front(offset - start), state: lower });
        at + 1
    }

    /// Marks the range as empty, and joins pieces that are adjacent at home.
    fn mark_empty(&mut self, arena: &mut Arena) {
        self.has_memory = false;
        work::count(self.pieces.len());
        arena.join_elsewhere(self.segment);
        self.pieces.dedup_by(|next, piece| {
            let end = Granule { offset: piece.home.end(), ..piece.home.start };
            let is_same = next.home.start == end && next.state == piece.state && piece.state == PieceState::Home;
            piece.home.size += if is_same { next.home.size } else { 0 };
            is_same
        });
    }

    /// Returns the slot of its segment in the table.
    pub(crate) fn segment(&self) -> u32 {
        self.segment
    }

    /// Returns its pieces, each with its offset.
    fn offsets(&self) -> impl Iterator<Item = (Units, &Piece)> {
        self.pieces.iter().scan(0, |end, piece| {
            *end += piece.home.size;
            Some((*end - piece.home.size, piece))
        })
    }

    /// Returns the offset and the home memory of each mapped part.
    pub(crate) fn mapped_pieces(&self) -> impl Iterator<Item = (Units, Run)> {
        let mapped = self.offsets().filter(|(_, piece)| piece.state != PieceState::Unmapped);
        mapped.map(|(offset, piece)| (offset, piece.home))
    }

    /// Returns the parts whose memory is at the range's own addresses: the offset of each part, its home memory, and
    /// the block that covers this memory at home. For the invariants.
    pub(crate) fn filled_pieces(&self) -> impl Iterator<Item = (Units, Run, Slot)> {
        self.offsets().filter_map(|(offset, piece)| match piece.state {
            PieceState::Here { covered_by } => Some((offset, piece.home, covered_by)),
            PieceState::Home | PieceState::Unmapped => None,
        })
    }

    /// Returns the streams that used the range's addresses, in addition to the users of its current blocks.
    pub(crate) fn users(&self) -> &[StreamId] {
        &self.users
    }

    /// Returns the mapped parts of the addresses, as offset and size in bytes.
    pub(crate) fn mapped(&self) -> SmallVec<[(u64, u64); 1]> {
        let mut mapped: SmallVec<[(u64, u64); 1]> = SmallVec::new();
        for (offset, run) in self.mapped_pieces() {
            match mapped.last_mut() {
                Some((start, size)) if *start + *size == bytes(offset) => *size += bytes(run.size),
                _ => mapped.push((bytes(offset), bytes(run.size))),
            }
        }
        mapped
    }
}

/// The free memory of a heap, as it would be if all free granules of stitched ranges were at home.
#[derive(Debug)]
pub(crate) struct Home {
    /// The largest free block that would result from returning granules home; 0 if no granule would return.
    pub(crate) largest_joined: Units,
    /// All whole free granules.
    pub(crate) free: FreeRuns,
}

/// The whole free granules at home, as runs.
#[derive(Debug, Default)]
pub(crate) struct FreeRuns {
    /// Ascending, and without overlap.
    runs: Vec<Run>,
    /// The sum of their sizes.
    size: u64,
}

impl FreeRuns {
    fn new(mut runs: Vec<Run>) -> Self {
        work::count_sort(runs.len());
        runs.sort_unstable();
        FreeRuns { size: runs.iter().map(|run| u64::from(run.size)).sum(), runs }
    }

    /// Returns the size of all runs.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns `true` if all of this memory is free.
    fn contains(&self, run: Run) -> bool {
        work::count_search(self.runs.len());
        let first = self.runs.partition_point(|free| free.start <= run.start).checked_sub(1);
        let Some(first) = first else { return false };
        let mut offset = run.start.offset;
        for free in &self.runs[first..] {
            work::count(1);
            let is_next = free.start.segment == run.start.segment && free.start.offset <= offset && offset < free.end();
            if !is_next {
                return false;
            }
            offset = free.end();
            if run.end() <= offset {
                return true;
            }
        }
        false
    }
}

/// The free blocks at home that contain whole granules, by position.
#[derive(Debug)]
pub(crate) struct FreeAtHome(Vec<(Run, Slot)>);

impl FreeAtHome {
    pub(crate) fn new(arena: &Arena) -> Self {
        let mut blocks: Vec<_> = free_blocks_at_home(arena).collect();
        work::count_sort(blocks.len());
        blocks.sort_unstable();
        FreeAtHome(blocks)
    }

    /// Splits free memory at the boundaries of blocks. Returns each part with the block that contains it.
    fn by_block(&self, mut run: Run) -> impl Iterator<Item = (Run, Slot)> {
        std::iter::from_fn(move || {
            work::count_search(self.0.len());
            let after = self.0.partition_point(|(block, _)| block.start <= run.start);
            let (block, slot) = *self.0.get(after.checked_sub(1)?).filter(|_| run.size > 0)?;
            debug_assert!(block.start.segment == run.start.segment && run.start.offset < block.end());
            let front = run.front(run.size.min(block.end() - run.start.offset));
            run = run.after(front.size);
            Some((front, slot))
        })
    }

    /// Returns the blocks that contain free memory. A stream that gets the memory at other addresses waits for the
    /// users of these blocks.
    pub(crate) fn blocks_around<'a>(&'a self, runs: &'a [Run]) -> impl Iterator<Item = Slot> + 'a {
        runs.iter().flat_map(|run| self.by_block(*run)).map(|(_, slot)| slot)
    }
}

/// The stitched ranges of a heap. Between two calls, these invariants hold:
///
/// - Of the addresses that map one granule, exactly one is free or in use; at the others, the granule is elsewhere
///   (I11).
/// - A stitched segment of the arena has exactly one range here, which maps only memory of other segments, each granule
///   at most once.
/// - In a stitched range, an `Elsewhere` block covers every address that is not mapped.
/// - An empty range is one `Elsewhere` block.
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
    pub(crate) fn aliases(&self, arena: &Arena) -> usize {
        self.ranges.iter().map(|range| range.aliases(arena.rules().granule)).sum()
    }

    /// Returns the segments of unused ranges, oldest first, each with the number of its mapped granules.
    pub(crate) fn unused(&self, arena: &Arena) -> Vec<(u32, usize)> {
        let ranges = self.ranges.iter().inspect(|_| work::count(1));
        let unused = ranges.filter(|range| !range.has_memory || is_unused(arena, range.segment));
        unused.map(|range| (range.segment, range.aliases(arena.rules().granule))).collect()
    }

    /// Returns the free memory at home as it would be after [`gather`](Self::gather).
    pub(crate) fn look_home(&self, arena: &Arena) -> Home {
        let mut runs: Vec<Run> = free_blocks_at_home(arena).map(|(run, _)| run).collect();
        // Each free piece of a stitched range, with its free neighbors at home.
        let mut joined = Vec::new();
        for range in self.ranges.iter().inspect(|_| work::count(1)).filter(|range| range.has_memory) {
            let mut parts = free_parts(arena, range.segment).peekable();
            for (offset, piece) in range.offsets().inspect(|_| work::count(1)) {
                let PieceState::Here { covered_by } = piece.state else { continue };
                let piece_end = offset + piece.home.size;
                while let Some(&(_, (start, end))) = parts.peek().filter(|(_, (start, _))| *start < piece_end) {
                    let (from, to) = (offset.max(start), piece_end.min(end));
                    let run = piece.home.after(from - offset).front(to - from);
                    let block = arena.block(covered_by);
                    let before = if run.start == piece.home.start { arena.free_size(block.prev) } else { 0 };
                    let after = if run.end() == piece.home.end() { arena.free_size(block.next) } else { 0 };
                    runs.push(run);
                    joined.push((run.start.segment, run.start.offset - before, run.end() + after));
                    // The rest of the part is in the next piece.
                    if end > piece_end {
                        break;
                    }
                    parts.next();
                }
            }
        }
        work::count_sort(joined.len());
        joined.sort_unstable();
        let (mut largest_joined, mut last) = (0, (u32::MAX, 0, 0));
        for (segment, start, end) in joined {
            let is_adjacent = segment == last.0 && start <= last.2;
            last = if is_adjacent { (segment, last.1, end.max(last.2)) } else { (segment, start, end) };
            largest_joined = largest_joined.max(last.2 - last.1);
        }
        Home { largest_joined, free: FreeRuns::new(runs) }
    }

    /// Moves the free granules of stitched ranges back home.
    pub(crate) fn gather(&mut self, arena: &mut Arena) {
        for at in 0..self.ranges.len() {
            work::count(1);
            if !self.ranges[at].has_memory {
                continue;
            }
            let segment = self.ranges[at].segment;
            let parts: Vec<_> = free_parts(arena, segment).collect();
            for (slot, part) in parts {
                self.send_home(arena, at, slot, part);
            }
            if is_unused(arena, segment) {
                self.ranges[at].mark_empty(arena);
            }
        }
    }

    /// Moves the memory of a range back home if no block of it is in use. The segment is stitched.
    #[cold]
    pub(crate) fn empty_if_unused(&mut self, arena: &mut Arena, segment: u32) {
        if !is_unused(arena, segment) {
            return;
        }
        let at = self.position(segment).expect("the segment is stitched");
        let parts: Vec<_> = free_parts(arena, segment).collect();
        for (slot, part) in parts {
            self.send_home(arena, at, slot, part);
        }
        self.ranges[at].mark_empty(arena);
    }

    /// Returns the index of a segment's range; `None` if the segment is not stitched.
    fn position(&self, segment: u32) -> Option<usize> {
        self.ranges.iter().inspect(|_| work::count(1)).position(|range| range.segment == segment)
    }

    /// Moves whole granules of a free block of a range back home.
    fn send_home(&mut self, arena: &mut Arena, at: usize, slot: Slot, (start, end): (Units, Units)) {
        let range = &mut self.ranges[at];
        work::count_sort(range.users.len());
        range.users.extend_from_slice(&arena.streams_of(slot));
        range.users.sort_unstable();
        range.users.dedup();
        let first = range.divide(arena, start);
        let after = range.divide(arena, end);
        work::count(WORK_PER_MOVE * (after - first));
        let (free, fences) = (arena.block(slot).state, arena.block(slot).fences);
        for piece in &mut range.pieces[first..after] {
            let PieceState::Here { covered_by } = piece.state else { unreachable!("free memory is here") };
            arena.bring_back(covered_by, free, fences);
            piece.state = PieceState::Home;
        }
        arena.carve(slot, start, end, BlockState::Elsewhere);
    }

    /// Returns the oldest range whose first `size` units are all `free` at home.
    pub(crate) fn find_again(&self, size: Units, free: &FreeRuns) -> Option<u32> {
        let is_free = |range: &&StitchedRange| {
            work::count(1);
            let mut found = 0;
            let mut front = range.front(size).inspect(|run| found += run.size);
            front.all(|run| {
                work::count(1);
                free.contains(run)
            }) && found == size
        };
        self.ranges.iter().find(is_free).map(|range| range.segment)
    }

    /// Returns the memory of the first `size` units of a range, which are mapped.
    pub(crate) fn home_of_front(&self, segment: u32, size: Units) -> Vec<Run> {
        let at = self.position(segment).expect("the segment is stitched");
        self.ranges[at].front(size).inspect(|_| work::count(1)).collect()
    }

    /// Turns the first `size` units of a range into one free block. Their memory is free at home. Returns the block.
    pub(crate) fn reuse(
        &mut self,
        arena: &mut Arena,
        home: &FreeAtHome,
        segment: u32,
        size: Units,
        free: BlockState,
    ) -> Slot {
        let at = self.position(segment).expect("the segment is stitched");
        let range = &mut self.ranges[at];
        let after = range.divide(arena, size);
        let runs: Vec<Run> = range.pieces.drain(..after).map(|piece| piece.home).collect();
        range.pieces.splice(..0, leave_home(arena, home, &runs));
        range.has_memory = true;
        let mut slot = arena.first_block(segment);
        let mut filled = 0;
        while filled < size {
            let next = if filled == 0 { slot } else { arena.block(slot).next };
            let part = arena.block(next).size.min(size - filled);
            let front = if part < arena.block(next).size { arena.divide_elsewhere(next, part) } else { next };
            slot = arena.bring_back(front, free, FenceSetId::EMPTY);
            filled += part;
        }
        slot
    }

    /// Adds a range that is mapped onto `runs`, which are free at home. Returns the range's free block.
    pub(crate) fn add(
        &mut self,
        arena: &mut Arena,
        home: &FreeAtHome,
        range: Range,
        runs: &[Run],
        free: BlockState,
    ) -> Slot {
        let pieces = leave_home(arena, home, runs);
        let slot = arena.add_stitched(range, free);
        let segment = arena.block(slot).segment;
        self.ranges.push(StitchedRange { segment, pieces, has_memory: true, users: SmallVec::new() });
        slot
    }

    /// Removes and returns the range of a segment; `None` if the segment is not stitched.
    pub(crate) fn remove(&mut self, segment: u32) -> Option<StitchedRange> {
        let at = self.position(segment)?;
        // The ranges after it move.
        work::count(self.ranges.len() - at);
        Some(self.ranges.remove(at))
    }

    /// Unmaps the parts whose memory is at home or in another range, and stops at the first error. Before it unmaps a
    /// part, it waits for each user of the range's addresses.
    pub(crate) fn unmap_unused<E>(
        &mut self,
        arena: &Arena,
        mut wait: impl FnMut(StreamId) -> Result<(), E>,
        mut unmap: impl FnMut(Range, Units, Units) -> Result<(), E>,
    ) -> Result<(), E> {
        for StitchedRange { segment, pieces, users, .. } in &mut self.ranges {
            work::count(pieces.len());
            let range = arena.segment(*segment).range;
            let mut offset = 0;
            for piece in pieces {
                if piece.state == PieceState::Home {
                    while let Some(stream) = users.last().copied() {
                        wait(stream)?;
                        users.pop();
                    }
                    unmap(range, offset, piece.home.size)?;
                    piece.state = PieceState::Unmapped;
                }
                offset += piece.home.size;
            }
        }
        Ok(())
    }
}

/// Marks memory that is free at home as elsewhere. Returns it as pieces of a range, in the order of `runs`.
fn leave_home(arena: &mut Arena, home: &FreeAtHome, runs: &[Run]) -> Vec<Piece> {
    let parts: Vec<(Run, Slot)> = runs.iter().flat_map(|run| home.by_block(*run)).collect();
    work::count_sort(parts.len());
    work::count(WORK_PER_MOVE * parts.len());
    // The rest of a block after a carved part keeps the block's slot, so the parts of a block are carved in ascending
    // order.
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_unstable_by_key(|at| parts[*at].0);
    let mut pieces: Vec<Piece> = parts.iter().map(|(run, _)| Piece { home: *run, state: PieceState::Home }).collect();
    for at in order {
        let (run, block) = parts[at];
        let covered_by = arena.carve(block, run.start.offset, run.end(), BlockState::Elsewhere);
        pieces[at].state = PieceState::Here { covered_by };
    }
    pieces
}

/// Returns the first `size` units of whole granules that are free at home, in the order of their blocks (rule D2).
/// Returns less if fewer units are free.
pub(crate) fn first_free(arena: &Arena, size: Units) -> Vec<Run> {
    let mut missing = size;
    let mut runs = Vec::new();
    for (run, _) in free_blocks_at_home(arena) {
        if missing == 0 {
            break;
        }
        let front = run.front(run.size.min(missing));
        missing -= front.size;
        runs.push(front);
    }
    runs
}

/// Returns the free blocks at home that contain whole granules, in the order of rule D2: the whole granules of each
/// block, and its slot.
fn free_blocks_at_home(arena: &Arena) -> impl Iterator<Item = (Run, Slot)> + '_ {
    let slots = arena.free_at_least(SizeClass::Large, arena.rules().granule).inspect(|_| work::count(1));
    let at_home = slots.filter(|slot| !arena.segment(arena.block(*slot).segment).is_stitched);
    let runs = at_home.map(|slot| {
        let (start, end) = whole_granules_of(arena, slot);
        let segment = arena.block(slot).segment;
        (Run { start: Granule { segment, offset: start }, size: end.saturating_sub(start) }, slot)
    });
    runs.filter(|(run, _)| run.size > 0)
}

/// Returns the start and end offset of the granules that a block covers entirely. If there are none, the start is not
/// less than the end.
fn whole_granules_of(arena: &Arena, slot: Slot) -> (Units, Units) {
    let (block, granule) = (arena.block(slot), arena.rules().granule);
    (block.offset().next_multiple_of(granule), block.end() / granule * granule)
}

/// Returns the free blocks of a segment that contain whole granules, in address order: each block, and the start and
/// end offset of its granules.
fn free_parts(arena: &Arena, segment: u32) -> impl Iterator<Item = (Slot, (Units, Units))> + '_ {
    let free = arena.blocks_of(segment).filter(|slot| arena.block(*slot).is_free());
    free.map(|slot| (slot, whole_granules_of(arena, slot))).filter(|(_, (start, end))| start < end)
}

/// Returns `true` if no block of a segment is in use.
fn is_unused(arena: &Arena, segment: u32) -> bool {
    let is_in_use = |slot| matches!(arena.block(slot).state, BlockState::Allocated { .. } | BlockState::Planned);
    !arena.blocks_of(segment).any(is_in_use)
}

#[cfg(test)]
mod tests;
