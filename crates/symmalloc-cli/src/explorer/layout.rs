//! A layout: where each allocation of a job lies, and which memory is reserved, over the ops.
//!
//! Addresses are compacted for drawing. Adjacent ranges of a heap form a *block of addresses*, which exists as long as any of its memory
//! does. In its heap's lane, each block gets the lowest position of the smallest gap that is free at that time and large enough:
//!
//! ```text
//! lane   ▲ │      ┌───────────── a second segment ───
//!        │ │ ┌────────── the first segment ──────┐ ┌─ a third one, where the first was ─
//!        └─┴─┴───────────────────────────────────┴─┴──► ops
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Range;
use symmalloc_core::ids::AllocationId;
use symmalloc_core::ids::HeapId;

/// Upper bound of a lane's height, small enough that JavaScript's numbers are exact: 1 PiB.
const LANE_BYTES_MAX: u64 = 1 << 50;

/// An address: a range of the device, and the offset in the range. Ranges never touch each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) range: u64,
    pub(super) offset_bytes: u64,
}

/// Part of a lane over a range of ops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rectangle {
    pub(crate) lane: usize,
    pub(crate) position_bytes: u64,
    pub(crate) size_bytes: u64,
    pub(crate) ops: Range<usize>,
}

/// Position of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) lane: usize,
    pub(crate) position_bytes: u64,
}

/// A heap's lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) owner: HeapId,
    pub(crate) height_bytes: u64,
}

/// A layout of a job. See the [module documentation](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    /// One sentence about where the layout comes from.
    pub(crate) origin: &'static str,
    /// Lanes by pool and stream.
    pub(crate) lanes: Vec<Lane>,
    /// Positions by allocation; `None` for an allocation without bytes, or one that was refused.
    pub(crate) positions: Vec<Option<Position>>,
    /// Reserved memory.
    pub(crate) reserved: Vec<Rectangle>,
}

/// Memory of one heap during a range of ops, before compaction.
#[derive(Clone, Debug)]
struct Extent {
    address: Address,
    size_bytes: u64,
    ops: Range<usize>,
}

impl Extent {
    fn end(&self) -> Address {
        Address { offset_bytes: self.address.offset_bytes.saturating_add(self.size_bytes), ..self.address }
    }
}

/// Adjacent addresses of a heap, and their position in the lane.
#[derive(Clone, Debug)]
struct AddressBlock {
    extent: Extent,
    position_bytes: u64,
}

/// A layout that is being recorded, op by op.
#[derive(Debug)]
pub(super) struct LayoutDraft {
    op_count: usize,
    /// Reserved memory that still exists, by address.
    mapped: BTreeMap<Address, (HeapId, u64, usize)>,
    /// Reserved memory that no longer exists.
    unmapped: Vec<(HeapId, Extent)>,
    /// Heap and extent of each allocation.
    allocations: Vec<Option<(HeapId, Extent)>>,
}

impl LayoutDraft {
    pub(super) fn new(op_count: usize, allocation_count: usize) -> Self {
        LayoutDraft {
            op_count,
            mapped: BTreeMap::new(),
            unmapped: Vec::new(),
            allocations: vec![None; allocation_count],
        }
    }

    /// Adds reserved memory from an op on.
    pub(super) fn map(&mut self, owner: HeapId, address: Address, size_bytes: u64, op: usize) {
        self.mapped.insert(address, (owner, size_bytes, op));
    }

    /// Ends reserved memory at an op. Memory that was mapped in several parts may be unmapped in different parts.
    pub(super) fn unmap(&mut self, address: Address, size_bytes: u64, op: usize) {
        let start = address.offset_bytes;
        let end = start.saturating_add(size_bytes);
        let last = Address { offset_bytes: end, ..address };
        while let Some((&at, &(owner, size, from))) = self.mapped.range(..last).next_back() {
            let stop = at.offset_bytes.saturating_add(size);
            if at.range != address.range || stop <= start {
                break;
            }
            self.mapped.remove(&at);
            let kept = [(at.offset_bytes, start.min(stop)), (end.max(at.offset_bytes), stop)];
            for (left, right) in kept.into_iter().filter(|(left, right)| left < right) {
                self.mapped.insert(Address { offset_bytes: left, ..at }, (owner, right - left, from));
            }
            let (left, right) = (at.offset_bytes.max(start), stop.min(end));
            let address = Address { offset_bytes: left, ..at };
            self.unmapped.push((owner, Extent { address, size_bytes: right - left, ops: from..op }));
            if at.offset_bytes < start {
                break;
            }
        }
    }

    /// Adds an allocation from an op on.
    pub(super) fn allocate(&mut self, id: AllocationId, owner: HeapId, address: Address, size_bytes: u64, op: usize) {
        let ops = op..self.op_count;
        self.allocations[id.index()] = Some((owner, Extent { address, size_bytes, ops }));
    }

    /// Ends an allocation at an op.
    pub(super) fn free(&mut self, id: AllocationId, op: usize) {
        if let Some((_, extent)) = &mut self.allocations[id.index()] {
            extent.ops.end = op;
        }
    }

    /// Reserves only the memory that the allocations show. Each range of addresses extends to the end of its furthest allocation, and
    /// exists from its first allocation to its last free.
    pub(super) fn reserve_around_allocations(&mut self) {
        let mut ranges: BTreeMap<(HeapId, u64), Extent> = BTreeMap::new();
        for (owner, extent) in self.allocations.iter().flatten() {
            let start = Address { offset_bytes: 0, ..extent.address };
            let whole = ranges.entry((*owner, extent.address.range));
            let whole = whole.or_insert_with(|| Extent { address: start, size_bytes: 0, ops: extent.ops.clone() });
            whole.size_bytes = whole.size_bytes.max(extent.end().offset_bytes);
            whole.ops = whole.ops.start.min(extent.ops.start)..whole.ops.end.max(extent.ops.end);
        }
        self.unmapped.extend(ranges.into_iter().map(|((owner, _), extent)| (owner, extent)));
    }

    /// Returns the layout; `None` if its addresses exceed those of any device.
    pub(super) fn finish(mut self, name: &'static str, origin: &'static str) -> Option<Layout> {
        let op_count = self.op_count;
        let mapped = std::mem::take(&mut self.mapped).into_iter();
        self.unmapped.extend(
            mapped.map(|(address, (owner, size_bytes, from))| {
                (owner, Extent { address, size_bytes, ops: from..op_count })
            }),
        );
        let mut by_owner: BTreeMap<HeapId, Vec<&Extent>> = BTreeMap::new();
        for (owner, extent) in self.unmapped.iter().chain(self.allocations.iter().flatten()) {
            by_owner.entry(*owner).or_default().push(extent);
        }
        let mut lanes = Vec::new();
        let mut blocks: BTreeMap<HeapId, (usize, Vec<AddressBlock>)> = BTreeMap::new();
        for (number, (owner, extents)) in by_owner.into_iter().enumerate() {
            let (found, height_bytes) = positioned(extents);
            if height_bytes > LANE_BYTES_MAX {
                return None;
            }
            lanes.push(Lane { owner, height_bytes });
            blocks.insert(owner, (number, found));
        }
        let position = |owner: &HeapId, address: Address| {
            let (lane, blocks) = &blocks[owner];
            let after = blocks.partition_point(|block| block.extent.address <= address);
            let block = &blocks[after - 1];
            let position_bytes = block.position_bytes + (address.offset_bytes - block.extent.address.offset_bytes);
            Position { lane: *lane, position_bytes }
        };
        let positions = self
            .allocations
            .iter()
            .map(|allocation| allocation.as_ref().map(|(owner, extent)| position(owner, extent.address)));
        let positions = positions.collect();
        self.unmapped.sort_by_key(|(owner, extent)| (extent.ops.start, *owner, extent.address));
        let reserved = self.unmapped.iter().map(|(owner, Extent { address, size_bytes, ops })| {
            let Position { lane, position_bytes } = position(owner, *address);
            Rectangle { lane, position_bytes, size_bytes: *size_bytes, ops: ops.clone() }
        });
        Some(Layout { name, origin, lanes, positions, reserved: reserved.collect() })
    }
}

/// Joins adjacent extents into blocks, and gives each block the smallest gap that is free during its ops. Returns the blocks by address,
/// and the height of the lane.
fn positioned(mut extents: Vec<&Extent>) -> (Vec<AddressBlock>, u64) {
    extents.sort_by_key(|extent| extent.address);
    let mut blocks: Vec<AddressBlock> = Vec::new();
    for extent in extents {
        if let Some(AddressBlock { extent: last, .. }) = blocks.last_mut()
            && last.end() >= extent.address
        {
            let end = last.end().offset_bytes.max(extent.end().offset_bytes);
            last.size_bytes = end - last.address.offset_bytes;
            last.ops = last.ops.start.min(extent.ops.start)..last.ops.end.max(extent.ops.end);
            continue;
        }
        blocks.push(AddressBlock { extent: extent.clone(), position_bytes: 0 });
    }
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&index| (blocks[index].extent.ops.start, index));
    let mut gaps = Gaps::new();
    // Blocks that exist now, each as its last op, position and end. The block that ends first is on top.
    let mut standing: BinaryHeap<Reverse<(usize, u64, u64)>> = BinaryHeap::new();
    let mut height_bytes = 0;
    for index in order {
        let Extent { size_bytes, ops, .. } = &blocks[index].extent;
        while let Some(&Reverse((last, start, end))) = standing.peek()
            && last <= ops.start
        {
            standing.pop();
            gaps.release(start, end);
        }
        let Some(at) = gaps.take(*size_bytes) else { return (blocks, u64::MAX) };
        let end = at + size_bytes;
        standing.push(Reverse((ops.end, at, end)));
        height_bytes = height_bytes.max(end);
        blocks[index].position_bytes = at;
    }
    (blocks, height_bytes)
}

/// Free positions of a lane: gaps between blocks, and everything above them.
struct Gaps {
    /// End of each gap, by start. Gaps do not touch.
    ends: BTreeMap<u64, u64>,
    /// Size and start of each gap.
    sizes: BTreeSet<(u64, u64)>,
}

impl Gaps {
    fn new() -> Self {
        Gaps { ends: BTreeMap::from([(0, u64::MAX)]), sizes: BTreeSet::from([(u64::MAX, 0)]) }
    }

    /// Takes the lowest position of the smallest gap that fits; `None` if no gap does.
    fn take(&mut self, size_bytes: u64) -> Option<u64> {
        let &(_, start) = self.sizes.range((size_bytes, 0)..).next()?;
        let end = self.remove(start);
        self.insert(start + size_bytes, end);
        Some(start)
    }

    /// Frees positions, and joins the gap with its neighbors.
    fn release(&mut self, mut start: u64, mut end: u64) {
        if let Some((&below, &below_end)) = self.ends.range(..start).next_back()
            && below_end == start
        {
            self.remove(below);
            start = below;
        }
        if self.ends.contains_key(&end) {
            end = self.remove(end);
        }
        self.insert(start, end);
    }

    fn insert(&mut self, start: u64, end: u64) {
        if start < end {
            self.ends.insert(start, end);
            self.sizes.insert((end - start, start));
        }
    }

    /// Removes the gap at a position, and returns its end.
    fn remove(&mut self, start: u64) -> u64 {
        let end = self.ends.remove(&start).expect("a gap starts here");
        self.sizes.remove(&(end - start, start));
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::ids::{PoolId, StreamId};

    const HEAP: HeapId = HeapId { pool: PoolId::DEFAULT, group: StreamGroup::One(StreamId(0)) };

    fn at(range: u64, offset_bytes: u64) -> Address {
        Address { range, offset_bytes }
    }

    #[test]
    fn a_segment_takes_the_place_of_one_that_is_gone() {
        let mut draft = LayoutDraft::new(10, 3);
        draft.map(HEAP, at(0, 0), 100, 0);
        draft.allocate(AllocationId(0), HEAP, at(0, 20), 50, 1);
        draft.map(HEAP, at(1, 0), 40, 2);
        draft.allocate(AllocationId(1), HEAP, at(1, 0), 40, 2);
        draft.free(AllocationId(0), 4);
        draft.unmap(at(0, 0), 100, 4);
        draft.map(HEAP, at(2, 0), 60, 5);
        draft.allocate(AllocationId(2), HEAP, at(2, 10), 50, 5);
        let layout = draft.finish("a", "").unwrap();
        let positions: Vec<u64> = layout.positions.iter().map(|position| position.unwrap().position_bytes).collect();
        assert_eq!(positions, [20, 100, 10]);
        assert_eq!(layout.lanes, [Lane { owner: HEAP, height_bytes: 140 }]);
        let reserved = |position_bytes, size_bytes, ops| Rectangle { lane: 0, position_bytes, size_bytes, ops };
        assert_eq!(layout.reserved, [reserved(0, 100, 0..4), reserved(100, 40, 2..10), reserved(0, 60, 5..10)]);
    }

    #[test]
    fn parts_that_touch_stay_together_and_unmapping_a_part_keeps_the_rest() {
        let mut draft = LayoutDraft::new(10, 1);
        draft.map(HEAP, at(0, 0), 20, 0);
        draft.map(HEAP, at(0, 20), 20, 1);
        draft.unmap(at(0, 10), 20, 3);
        draft.allocate(AllocationId(0), HEAP, at(0, 30), 10, 4);
        let layout = draft.finish("a", "").unwrap();
        let found: Vec<(u64, u64, Range<usize>)> =
            layout.reserved.iter().map(|part| (part.position_bytes, part.size_bytes, part.ops.clone())).collect();
        assert_eq!(found, [(0, 10, 0..10), (10, 10, 0..3), (20, 10, 1..3), (30, 10, 1..10)]);
        assert_eq!(layout.lanes[0].height_bytes, 40);
        assert_eq!(layout.positions, [Some(Position { lane: 0, position_bytes: 30 })]);
    }

    #[test]
    fn addresses_of_no_device_have_no_layout() {
        let mut draft = LayoutDraft::new(2, 1);
        draft.allocate(AllocationId(0), HEAP, at(0, u64::MAX - 5), 10, 0);
        draft.reserve_around_allocations();
        assert_eq!(draft.finish("a", ""), None);
    }
}
