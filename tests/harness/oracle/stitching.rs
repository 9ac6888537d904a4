//! Stitching in the oracle: recomputed granule by granule.

use super::heap::{Headroom, Heap, Shortage};
use super::segment::{Block, Content, Segment};
use std::collections::BTreeSet;
use symmalloc_core::StreamId;
use symmalloc_core::config::{ExpandableSegments, Stitching};

/// Home of a granule: the ordinal of its segment, and an offset.
type Home = (u32, u64);

impl Heap {
    /// Stitches a block if that takes less memory than growing. Returns `true` if there is a block of this size now.
    pub(super) fn stitch(
        &mut self,
        knobs: &ExpandableSegments,
        stitching: &Stitching,
        headroom: Headroom,
        granule: u64,
        stream: StreamId,
        size: u64,
    ) -> Result<bool, Shortage> {
        let mut gathered = self.clone();
        gathered.gather(granule);
        let fits = |block: &Block| block.is_free() && block.size >= size;
        if gathered.segments.iter().flat_map(|segment| &segment.blocks).any(fits) {
            *self = gathered;
            return Ok(true);
        }
        let count = size.div_ceil(granule);
        let free = gathered.free_granules(granule);
        let missing = count.saturating_sub(free.len() as u64) * granule;
        let last = self.segments.iter().rfind(|segment| segment.grows(granule));
        let at_end = last.and_then(|segment| segment.blocks.last()).filter(|block| block.is_free());
        let growth = (size - at_end.map_or(0, |block| block.size)).next_multiple_of(granule);
        if size < stitching.least_bytes || missing >= growth {
            return Ok(false);
        }
        let is_free = |home: &Option<Home>| home.is_some_and(|home| free.contains(&home));
        let again = gathered.segments.iter().find(|segment| {
            let first = segment.stitched.as_ref().and_then(|homes| homes.get(..count as usize));
            first.is_some_and(|first| first.iter().all(is_free))
        });
        if let Some(segment) = again.map(|segment| segment.ordinal) {
            *self = gathered;
            self.lend(segment, count, granule, stream);
            return Ok(true);
        }
        let most = u64::from(stitching.aliases_max);
        let in_use = gathered.segments.iter().filter(|segment| !segment.is_all_elsewhere()).map(Segment::aliases);
        if count > stitching.maps_max.into() || in_use.sum::<u64>() + count > most {
            return Ok(false);
        }
        if missing > 0 {
            gathered.grow(headroom, granule, knobs.range_bytes, granule, missing)?;
        }
        *self = gathered;
        self.make_room(count, most);
        let mut homes = self.free_granules(granule);
        homes.truncate(count as usize);
        let whole = Block { offset: 0, size: count * granule, content: Content::Elsewhere, users: BTreeSet::new() };
        let stitched = Some(homes.into_iter().map(Some).collect());
        let ordinal = self.born;
        self.segments.push(Segment { ordinal, range: whole.size, blocks: vec![whole], is_small: false, stitched });
        self.born += 1;
        self.lend(ordinal, count, granule, stream);
        Ok(true)
    }

    fn by_ordinal(&mut self, ordinal: u32) -> &mut Segment {
        self.segments.iter_mut().find(|segment| segment.ordinal == ordinal).expect("the allocation should be live")
    }

    /// Returns the homes of all granules that are free at home, those of smaller blocks first.
    fn free_granules(&self, granule: u64) -> Vec<Home> {
        let mut blocks = Vec::new();
        for segment in self.segments.iter().filter(|segment| segment.stitched.is_none()) {
            let free = segment.blocks.iter().filter(|block| block.is_free());
            blocks.extend(free.map(|block| (block.size, segment.ordinal, block.offset)));
        }
        blocks.sort_unstable();
        let granules = blocks.into_iter().flat_map(|(size, ordinal, offset)| {
            let whole = (offset / granule..=(offset + size) / granule).map(move |index| index * granule);
            whole.filter(move |at| *at >= offset && at + granule <= offset + size).map(move |at| (ordinal, at))
        });
        granules.collect()
    }

    /// Makes the first granules of a stitched range free there. `stream` waits for their users, so that the next user only needs to wait
    /// for `stream`.
    fn lend(&mut self, ordinal: u32, count: u64, granule: u64, stream: StreamId) {
        let homes = self.by_ordinal(ordinal).stitched.clone().expect("a stitched range");
        for (index, home) in homes.into_iter().take(count as usize).enumerate() {
            let (home, at) = home.expect("its home is free");
            let mut users = self.by_ordinal(home).set(at, at + granule, Content::Elsewhere, BTreeSet::new());
            users.insert(stream);
            let from = index as u64 * granule;
            self.by_ordinal(ordinal).set(from, from + granule, Content::Free, users);
        }
    }

    /// Returns free granules of stitched ranges to their homes.
    pub(super) fn gather(&mut self, granule: u64) {
        self.gather_from(granule, |_| true);
    }

    /// Returns the granules of a stitched range to their homes if none of its blocks is in use.
    pub(super) fn empty_if_unused(&mut self, ordinal: u32, granule: u64) {
        self.gather_from(granule, |segment| segment.ordinal == ordinal && !segment.has_live());
    }

    fn gather_from(&mut self, granule: u64, is_meant: impl Fn(&Segment) -> bool) {
        let meant = self.segments.iter().filter(|segment| is_meant(segment));
        let stitched: Vec<(u32, Vec<Option<Home>>)> =
            meant.filter_map(|segment| Some((segment.ordinal, segment.stitched.clone()?))).collect();
        for (ordinal, homes) in stitched {
            for (index, home) in homes.into_iter().enumerate() {
                let (from, to) = (index as u64 * granule, (index as u64 + 1) * granule);
                let segment = self.by_ordinal(ordinal);
                if segment.is_free(from, to) {
                    let users = segment.set(from, to, Content::Elsewhere, BTreeSet::new());
                    let (home, at) = home.expect("free granules are mapped");
                    self.by_ordinal(home).set(at, at + granule, Content::Free, users);
                }
            }
        }
    }

    /// Removes unused stitched ranges, oldest first, until `count` more granules may be mapped a second time.
    fn make_room(&mut self, count: u64, most: u64) {
        let mut aliases: u64 = self.segments.iter().map(Segment::aliases).sum();
        if aliases + count > most {
            self.segments.retain(|segment| {
                let goes = segment.is_all_elsewhere() && aliases > (most - most / 8).min(most - count);
                aliases -= if goes { segment.aliases() } else { 0 };
                !goes
            });
        }
    }

    /// First part of a trim: removes stitched ranges that are unused, and the unused parts of the others.
    pub(super) fn forget_stitched(&mut self, granule: u64) {
        self.gather(granule);
        self.segments.retain(|segment| !segment.is_all_elsewhere());
        for segment in &mut self.segments {
            let is_elsewhere = |block: &&Block| block.content == Content::Elsewhere;
            let unused: Vec<Block> = segment.blocks.iter().filter(is_elsewhere).cloned().collect();
            for home in segment.stitched.iter_mut().flatten().enumerate() {
                let at = home.0 as u64 * granule;
                if unused.iter().any(|block| block.offset <= at && at < block.offset + block.size) {
                    *home.1 = None;
                }
            }
        }
    }
}

impl Segment {
    fn aliases(&self) -> u64 {
        self.stitched.iter().flatten().flatten().count() as u64
    }

    fn is_all_elsewhere(&self) -> bool {
        self.stitched.is_some() && self.blocks.iter().all(|block| block.content == Content::Elsewhere)
    }

    fn is_free(&self, from: u64, to: u64) -> bool {
        self.blocks.iter().any(|block| block.is_free() && block.offset <= from && to <= block.offset + block.size)
    }

    /// Changes the content of a part of one block. Returns its users.
    fn set(&mut self, from: u64, to: u64, content: Content, users: BTreeSet<StreamId>) -> BTreeSet<StreamId> {
        let around = |block: &Block| block.offset <= from && to <= block.offset + block.size;
        let index = self.blocks.iter().position(around).expect("a part of one block");
        let whole = self.blocks[index].clone();
        let lower = Block { size: from - whole.offset, ..whole.clone() };
        let middle = Block { offset: from, size: to - from, content, users };
        let upper = Block { offset: to, size: whole.offset + whole.size - to, ..whole.clone() };
        self.replace(index, [lower, middle, upper]);
        whole.users
    }
}
