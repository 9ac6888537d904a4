//! A heap of the oracle: selects blocks, obtains memory, and trims.

use super::segment::{Block, Content, Segment};
use symmalloc_core::config::{PoolConfig, RoundupPower2Divisions, SegmentPolicy};
use symmalloc_core::units::{MIB, UNIT_BYTES};
use symmalloc_core::{AllocationId, LimitScope, Placement, SegmentId, StreamId};

/// A heap: one (pool, stream), or a pool that all its streams share.
#[derive(Clone, Debug, Default)]
pub struct Heap {
    /// Live segments in order of creation.
    pub segments: Vec<Segment>,
    pub(super) born: u32,
}
/// Bytes that can still be reserved under the limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headroom {
    pub(super) pool: u64,
    pub(super) all: u64,
    pub(super) is_symmetric: bool,
}

impl Headroom {
    /// Returns the part that may affect a decision. A symmetric pool ignores the limit over all pools, which other
    /// pools use up.
    pub(super) fn least(self) -> u64 {
        if self.is_symmetric { self.pool } else { self.pool.min(self.all) }
    }

    pub(super) fn charge(self, missing: u64) -> Result<(), Shortage> {
        if missing > self.pool {
            return Err(Shortage::Limit(LimitScope::Pool, missing));
        }
        if missing > self.all {
            return Err(Shortage::Limit(LimitScope::Allocator, missing));
        }
        Ok(())
    }
}

pub(super) enum Shortage {
    Limit(LimitScope, u64),
    SegmentFull,
}
impl Heap {
    pub(super) fn free_bytes(&self) -> u64 {
        let blocks = self.segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.is_free()).map(|block| block.size).sum()
    }

    /// Returns segment and block index of the best fit (rule D2).
    pub(super) fn best_fit(&self, config: &PoolConfig, size: u64) -> Option<(usize, usize)> {
        let is_small = is_small(config, size);
        let mut fits = Vec::new();
        for (s, segment) in self.segments.iter().enumerate().filter(|(_, segment)| segment.is_small == is_small) {
            for (b, block) in
                segment.blocks.iter().enumerate().filter(|(_, block)| block.is_free() && block.size >= size)
            {
                fits.push((block.size, segment.ordinal, block.offset, s, b));
            }
        }
        fits.into_iter().min().map(|(_, _, _, s, b)| (s, b))
    }

    /// Returns `true` if the best fit may serve the request: PyTorch keeps blocks of at least `max_split_size` for requests of at least
    /// that size.
    pub(super) fn accepts(&self, config: &PoolConfig, size: u64, (s, b): (usize, usize)) -> bool {
        let block = self.segments[s].blocks[b].size;
        match config.segments() {
            SegmentPolicy::Fixed(knobs) if knobs.unsplit => block == size,
            SegmentPolicy::Fixed(knobs) => match knobs.max_split_size_bytes {
                Some(max_split) if size < max_split => block < max_split,
                Some(_) => block < size + knobs.max_non_split_rounding_bytes,
                None => true,
            },
            _ => true,
        }
    }

    pub(super) fn take(
        &mut self,
        config: &PoolConfig,
        size: u64,
        (s, b): (usize, usize),
        id: AllocationId,
        stream: StreamId,
    ) -> (Placement, u64) {
        let segment = &mut self.segments[s];
        let whole = segment.blocks[b].clone();
        let rest = whole.size - size;
        let is_split = match config.segments() {
            SegmentPolicy::Fixed(knobs) if knobs.unsplit => false,
            SegmentPolicy::Fixed(knobs) if !segment.is_small => {
                knobs.max_split_size_bytes.is_none_or(|max_split| size < max_split) && rest > MIB
            }
            _ => true,
        };
        let taken = if is_split { size } else { whole.size };
        let mut lower = Block { size: taken, content: Content::Allocated(id), ..whole.clone() };
        lower.users.insert(stream);
        let upper = Block { offset: whole.offset + taken, size: whole.size - taken, ..whole };
        let placement = Placement { segment: SegmentId(segment.ordinal), offset_bytes: lower.offset };
        segment.replace(b, [lower, upper]);
        (placement, taken)
    }

    /// Obtains memory like [`obtain`](Self::obtain) or, if a limit has no room for that much, exactly as much as the
    /// block needs.
    pub(super) fn obtain_tightly(
        &mut self,
        config: &PoolConfig,
        headroom: Headroom,
        (granularity, unit): (u64, u64),
        stream: StreamId,
        size: u64,
    ) -> Result<(), Shortage> {
        let obtained = match self.first_segment(config, (granularity, unit), size) {
            Some(first) => self.create_segment(headroom, first, first, false),
            None => self.obtain(config, headroom, granularity, stream, size),
        };
        obtained.or_else(|shortage| self.squeeze(config, headroom, unit, size, shortage))
    }

    /// Returns the size of the segment that a heap that stitches creates for a small request while it has less memory
    /// than a granule.
    fn first_segment(&self, config: &PoolConfig, (granule, unit): (u64, u64), size: u64) -> Option<u64> {
        config.stitching()?;
        if !has_free_size(config) || granule == unit || config.base().is_some() {
            return None;
        }
        let mapped: u64 = self.segments.iter().map(Segment::mapped).sum();
        let first = [size, mapped, granule / 8].into_iter().max()?.next_multiple_of(unit);
        (mapped < granule && first <= granule / 2).then_some(first)
    }

    /// Creates a segment of exactly `size` bytes, in units of the device, if that is less than a limit refused.
    pub(super) fn squeeze(
        &mut self,
        config: &PoolConfig,
        headroom: Headroom,
        unit: u64,
        size: u64,
        shortage: Shortage,
    ) -> Result<(), Shortage> {
        let (exact, can_squeeze) = (size.next_multiple_of(unit), has_free_size(config));
        match shortage {
            Shortage::Limit(scope, missing)
                if can_squeeze
                    && exact < missing
                    && exact <= headroom.least()
                    && (scope == LimitScope::Pool || !headroom.is_symmetric) =>
            {
                self.create_segment(headroom, exact, exact, is_small(config, size))
            }
            shortage => Err(shortage),
        }
    }

    /// Obtains memory for a block of this size that no free block can serve.
    pub(super) fn obtain(
        &mut self,
        config: &PoolConfig,
        headroom: Headroom,
        granularity: u64,
        stream: StreamId,
        size: u64,
    ) -> Result<(), Shortage> {
        match config.segments() {
            SegmentPolicy::Fixed(knobs) if knobs.unsplit => self.create_segment(headroom, size, size, false),
            SegmentPolicy::Fixed(knobs) => {
                let segment = match size {
                    small if small <= MIB => 2 * MIB,
                    medium if medium < knobs.large_segment_bytes / 2 => knobs.large_segment_bytes,
                    large => large.next_multiple_of(2 * MIB),
                };
                let segment = segment.next_multiple_of(granularity);
                self.create_segment(headroom, segment, segment, size <= MIB)
            }
            SegmentPolicy::Reserved { segment_bytes } => {
                let segment = segment_bytes.next_multiple_of(granularity);
                if !self.segments.is_empty() || size > segment {
                    return Err(Shortage::SegmentFull);
                }
                self.create_segment(headroom, segment, segment, false)
            }
            SegmentPolicy::Expandable(knobs) if knobs.growth_bytes == 0 => Err(Shortage::SegmentFull),
            SegmentPolicy::Expandable(knobs) => {
                if let Some(stitching) = config.stitching()
                    && self.stitch(knobs, stitching, headroom, granularity, stream, size)?
                {
                    return Ok(());
                }
                if self.fill_hole(headroom, granularity, size)? {
                    return Ok(());
                }
                let newest = self.segments.iter().rfind(|segment| segment.grows(granularity));
                let at_end = newest.and_then(|segment| segment.blocks.last());
                let at_end = at_end.filter(|block| block.is_free()).map_or(0, |block| block.size);
                let range = knobs.range_bytes.next_multiple_of(granularity);
                let missing = (size - at_end).next_multiple_of(granularity);
                let has_room = newest.is_some_and(|segment| segment.end() + missing <= segment.range);
                let missing = if has_room { missing } else { size.next_multiple_of(granularity) };
                self.grow(headroom, granularity, range, knobs.growth_bytes.next_multiple_of(granularity), missing)
            }
            _ => unimplemented_policy(),
        }
    }

    /// Creates a segment.
    pub(super) fn create_segment(
        &mut self,
        headroom: Headroom,
        range: u64,
        mapped: u64,
        is_small: bool,
    ) -> Result<(), Shortage> {
        headroom.charge(mapped)?;
        let mut segment = Segment { ordinal: self.born, blocks: Vec::new(), range, is_small, stitched: None };
        segment.extend(mapped);
        self.segments.push(segment);
        self.born += 1;
        Ok(())
    }

    /// Adds `missing` bytes at the end of the newest range, or of a new one if it is full. Rounds up to a multiple of
    /// `step`, as far as the range and the limits allow.
    pub(super) fn grow(
        &mut self,
        headroom: Headroom,
        granularity: u64,
        range: u64,
        step: u64,
        missing: u64,
    ) -> Result<(), Shortage> {
        let range = range.next_multiple_of(granularity);
        let newest = self.segments.iter_mut().rfind(|segment| segment.grows(granularity));
        let newest = newest.filter(|segment| segment.end() + missing <= segment.range);
        let room = newest.as_ref().map_or(range, |segment| segment.range - segment.end());
        if missing > room {
            return Err(Shortage::SegmentFull);
        }
        let wanted = missing.next_multiple_of(step).min(room);
        let allowed = headroom.least() / granularity * granularity;
        let growth = wanted.min(allowed).max(missing);
        match newest {
            Some(segment) => {
                headroom.charge(growth)?;
                segment.extend(growth);
                Ok(())
            }
            None => self.create_segment(headroom, range, growth, false),
        }
    }

    /// Maps memory in the lowest hole that, with its free neighbors, can then hold a block of this size.
    pub(super) fn fill_hole(&mut self, headroom: Headroom, granularity: u64, size: u64) -> Result<bool, Shortage> {
        for segment in &mut self.segments {
            for index in 0..segment.blocks.len() {
                let hole = segment.blocks[index].clone();
                let free = |index: Option<usize>| {
                    let block = index.and_then(|index| segment.blocks.get(index));
                    block.filter(|block| block.is_free()).map_or(0, |block| block.size)
                };
                let (before, behind) = (free(index.checked_sub(1)), free(Some(index + 1)));
                if hole.content != Content::Hole || before + hole.size + behind < size {
                    continue;
                }
                let filled = (size - before).next_multiple_of(granularity).min(hole.size);
                headroom.charge(filled)?;
                fill(segment, index, filled);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Maps memory at the beginning of the lowest hole with `missing` bytes.
    pub(super) fn fill_lowest(&mut self, headroom: Headroom, missing: u64) -> Result<bool, Shortage> {
        for segment in &mut self.segments {
            let has_room = |block: &Block| block.content == Content::Hole && block.size >= missing;
            if let Some(index) = segment.blocks.iter().position(has_room) {
                headroom.charge(missing)?;
                fill(segment, index, missing);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Releases memory, segment by segment, until `goal` bytes are released.
    pub(super) fn trim(&mut self, config: &PoolConfig, granularity: u64, goal: Option<u64>) -> u64 {
        let mut given = 0;
        if config.stitching().is_some() {
            self.forget_stitched(granularity);
        }
        for segment in self.segments.iter_mut().filter(|segment| segment.stitched.is_none()) {
            if goal.is_some_and(|goal| given >= goal) {
                break;
            }
            let before = segment.mapped();
            match config.segments() {
                SegmentPolicy::Reserved { .. } => {}
                _ if segment.is_unused() => segment.blocks.clear(),
                SegmentPolicy::Expandable(_) => segment.shrink(granularity),
                _ => {}
            }
            given += before - segment.mapped();
        }
        self.segments.retain(|segment| !segment.blocks.is_empty());
        given
    }
}
/// Returns `true` if the size of a segment may differ from the configured one.
fn has_free_size(config: &PoolConfig) -> bool {
    match config.segments() {
        SegmentPolicy::Reserved { .. } => false,
        SegmentPolicy::Expandable(knobs) => knobs.growth_bytes > 0,
        _ => true,
    }
}

fn is_small(config: &PoolConfig, size: u64) -> bool {
    matches!(config.segments(), SegmentPolicy::Fixed(knobs) if !knobs.unsplit) && size <= MIB
}

/// PyTorch's `round_size`: rounds to 512 bytes, or to a fraction of the next lower power of two.
pub(super) fn round(requested: u64, divisions: RoundupPower2Divisions) -> u64 {
    let index = (0..15).take_while(|index| requested >= (2 * MIB) << index).count();
    let divisions = u64::from(divisions.divisions()[index]);
    if divisions > 1 && requested > UNIT_BYTES * divisions {
        let power = (0..63).map(|bit| 1 << bit).filter(|power| *power <= requested).max().expect("at least 1");
        requested.next_multiple_of(power / divisions)
    } else {
        requested.next_multiple_of(UNIT_BYTES)
    }
}

pub(super) fn unimplemented_policy() -> ! {
    panic!("the oracle does not implement this segment policy")
}

/// Maps memory at the beginning of a hole.
fn fill(segment: &mut Segment, index: usize, filled: u64) {
    let hole = segment.blocks[index].clone();
    let lower = Block { size: filled, content: Content::Free, ..hole.clone() };
    let upper = Block { offset: hole.offset + filled, size: hole.size - filled, ..hole };
    segment.replace(index, [lower, upper]);
}
