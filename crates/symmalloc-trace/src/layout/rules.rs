//! Validating builder: assembles a layout item by item, and rejects any item that no heap can satisfy.

use super::contradiction::Contradiction;
use symmalloc_core::base::SLOT_BYTES;
use symmalloc_core::config::{PoolConfig, SegmentPolicy};
use symmalloc_core::ids::{SegmentId, StreamGroup, StreamId};
use symmalloc_core::layout::{AllocationLayout, Extent, HeapLayout, Layout, SegmentLayout};
use symmalloc_core::op::NAME_BYTES_MAX;
use symmalloc_core::units::{SEGMENT_BYTES_MAX, UNIT_BYTES};
use symmalloc_core::{Digest, SizeClass};

/// Maximum number of ops of a heap. A heap with a million ops per second reaches it in nine years. The sum over all
/// heaps fits a digest's count.
const OPS_MAX: u64 = 1 << 48;

/// Maximum number of segments of a heap: half of all ids, so that the restored heap can create more segments.
const SEGMENTS_MAX: u32 = 1 << 31;

/// A statement of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LayoutItem {
    /// The pool's configuration. Comes first.
    Pool(PoolConfig),
    /// The backend's granularity in bytes. Comes second.
    Granularity(u64),
    /// The limit over all pools in bytes, if there is one. Precedes all heaps.
    TotalLimit(u64),
    /// The next heap.
    Heap {
        /// The streams that share the heap.
        group: StreamGroup,
        /// Digest of the heap's history.
        digest: Digest,
        /// Id of the next segment that the heap creates.
        next_segment: SegmentId,
    },
    /// The next segment of the last heap.
    Segment {
        /// The segment's id.
        id: SegmentId,
        /// Class of the requests that the segment serves.
        class: SizeClass,
        /// Distance of the segment from the pool's base in bytes, if the pool has a base.
        base_offset_bytes: Option<u64>,
    },
    /// The next extent of backed memory in the last segment.
    Memory(Extent),
    /// The next live allocation of the last segment.
    Allocation(AllocationLayout),
    /// Another stream that uses the last allocation.
    Use(StreamId),
}

/// A layout under construction. Items arrive in the order of [`LayoutItem`]'s variants, each after the item that
/// contains it.
#[derive(Debug, Default)]
pub(super) struct LayoutBuilder {
    config: Option<PoolConfig>,
    granularity_bytes: Option<u64>,
    total_limit_bytes: Option<u64>,
    heaps: Vec<HeapLayout>,
}

/// Reason to reject an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Misfit {
    /// The item is out of order.
    #[error("misplaced; expected {expected}")]
    Misplaced {
        /// The statements allowed there, as keywords of the text.
        expected: &'static str,
    },
    /// No heap can satisfy the item.
    #[error(transparent)]
    Contradiction(#[from] Contradiction),
}

const fn misplaced(expected: &'static str) -> Misfit {
    Misfit::Misplaced { expected }
}

impl LayoutBuilder {
    /// Adds the next item.
    ///
    /// # Errors
    /// Returns an error if the item is out of order or contradicts earlier items. The layout is then unchanged.
    pub(super) fn add_item(&mut self, item: LayoutItem) -> Result<(), Misfit> {
        let (Some(config), Some(granularity_bytes)) = (&self.config, self.granularity_bytes) else {
            return self.add_head(item);
        };
        match item {
            LayoutItem::TotalLimit(limit) if self.heaps.is_empty() && self.total_limit_bytes.is_none() => {
                self.total_limit_bytes = Some(limit);
            }
            LayoutItem::Heap { group, digest, next_segment } => {
                close_segment(self.heaps.last())?;
                let heap = HeapLayout { group, digest, next_segment, segments: Vec::new() };
                check_heap(config, self.heaps.last(), &heap)?;
                self.heaps.push(heap);
            }
            LayoutItem::Segment { id, class, base_offset_bytes } => {
                let heap = self.heaps.last().ok_or(misplaced("`heap`"))?;
                close_segment(Some(heap))?;
                check_segment(config, heap, id, class)?;
                check_base_offset(config, granularity_bytes, &self.heaps, id, base_offset_bytes)?;
                let (extents, allocations) = (Vec::new(), Vec::new());
                let segment = SegmentLayout { id, class, base_offset_bytes, extents, allocations };
                self.heaps.last_mut().expect("checked above").segments.push(segment);
            }
            LayoutItem::Memory(extent) => {
                let segment = open_segment(&mut self.heaps).ok_or(misplaced("`segment`"))?;
                if !segment.allocations.is_empty() {
                    return Err(misplaced("`a`, `u`, `segment`, `heap` or `end`"));
                }
                check_memory(config, granularity_bytes, segment.extents.last(), extent)?;
                segment.extents.push(extent);
            }
            LayoutItem::Allocation(allocation) => {
                let group = self.heaps.last().map_or(StreamGroup::All, |heap| heap.group);
                let segment = open_segment(&mut self.heaps).filter(|segment| !segment.extents.is_empty());
                let segment = segment.ok_or(misplaced("`memory`"))?;
                check_allocation(group, segment, &allocation)?;
                segment.allocations.push(allocation);
            }
            LayoutItem::Use(stream) => {
                let segment = open_segment(&mut self.heaps).and_then(|segment| segment.allocations.last_mut());
                let allocation = segment.ok_or(misplaced("`a`"))?;
                let is_next = allocation.used_by.last().is_none_or(|last| *last < stream);
                if stream == allocation.stream || !is_next {
                    return Err(Contradiction::UserOutOfOrder { stream }.into());
                }
                allocation.used_by.push(stream);
            }
            _ => return Err(misplaced("`heap`, or a part of one")),
        }
        Ok(())
    }

    /// Adds one of the first two items.
    fn add_head(&mut self, item: LayoutItem) -> Result<(), Misfit> {
        match (item, &self.config) {
            (LayoutItem::Pool(config), None) => self.config = Some(config),
            (_, None) => return Err(misplaced("`pool`")),
            (LayoutItem::Granularity(bytes), Some(_)) => {
                if !bytes.is_power_of_two() || !(UNIT_BYTES..=1 << 30).contains(&bytes) {
                    return Err(Contradiction::Granularity.into());
                }
                self.granularity_bytes = Some(bytes);
            }
            _ => return Err(misplaced("`granularity`")),
        }
        Ok(())
    }

    /// Returns the finished layout.
    ///
    /// # Errors
    /// Returns an error if an item is missing.
    pub(super) fn layout(self) -> Result<Layout, Misfit> {
        close_segment(self.heaps.last())?;
        let config = self.config.ok_or(misplaced("`pool`"))?;
        let granularity_bytes = self.granularity_bytes.ok_or(misplaced("`granularity`"))?;
        Ok(Layout::of_parts(config, granularity_bytes, self.total_limit_bytes, self.heaps))
    }
}

/// Returns the segment to which memory and allocations are currently added.
fn open_segment(heaps: &mut [HeapLayout]) -> Option<&mut SegmentLayout> {
    heaps.last_mut()?.segments.last_mut()
}

/// Checks that the last segment of the heap is complete.
fn close_segment(heap: Option<&HeapLayout>) -> Result<(), Contradiction> {
    match heap.and_then(|heap| heap.segments.last()) {
        Some(SegmentLayout { id, extents, .. }) if extents.is_empty() => Err(Contradiction::NoMemory { segment: *id }),
        _ => Ok(()),
    }
}

fn check_heap(config: &PoolConfig, before: Option<&HeapLayout>, heap: &HeapLayout) -> Result<(), Contradiction> {
    if !config.streams().makes(heap.group) {
        return Err(Contradiction::HeapPolicy);
    }
    if before.is_some_and(|before| before.group >= heap.group) {
        // A pool with shared streams has only one heap.
        return Err(heap
            .group
            .first()
            .map_or(Contradiction::HeapPolicy, |stream| Contradiction::HeapOutOfOrder { stream }));
    }
    if heap.digest.ops == 0 && heap.next_segment == SegmentId(0) {
        return Err(Contradiction::FreshHeap);
    }
    if heap.digest.ops > OPS_MAX {
        return Err(Contradiction::TooManyOps { max: OPS_MAX });
    }
    if heap.next_segment.0 > SEGMENTS_MAX {
        return Err(Contradiction::TooManySegments { max: SEGMENTS_MAX });
    }
    Ok(())
}

fn check_segment(
    config: &PoolConfig,
    heap: &HeapLayout,
    segment: SegmentId,
    class: SizeClass,
) -> Result<(), Contradiction> {
    if heap.segments.last().is_some_and(|before| before.id >= segment) {
        return Err(Contradiction::SegmentOutOfOrder { segment });
    }
    if segment >= heap.next_segment {
        return Err(Contradiction::SegmentNotBorn { segment, next: heap.next_segment });
    }
    if class == SizeClass::Small && !matches!(config.segments(), SegmentPolicy::Fixed(_)) {
        return Err(Contradiction::SegmentClass { segment });
    }
    if matches!(config.segments(), SegmentPolicy::Reserved { .. }) && !heap.segments.is_empty() {
        return Err(Contradiction::SecondSegment);
    }
    Ok(())
}

/// Checks the place of a segment in the addresses of a pool with a base.
fn check_base_offset(
    config: &PoolConfig,
    granularity_bytes: u64,
    heaps: &[HeapLayout],
    segment: SegmentId,
    base_offset_bytes: Option<u64>,
) -> Result<(), Contradiction> {
    if config.base().is_some() != base_offset_bytes.is_some() {
        return Err(Contradiction::BaseOffset { segment });
    }
    let Some(offset_bytes) = base_offset_bytes else { return Ok(()) };
    let is_taken =
        heaps.iter().flat_map(|heap| &heap.segments).any(|other| other.base_offset_bytes == base_offset_bytes);
    let is_inside = offset_bytes < SLOT_BYTES && offset_bytes.is_multiple_of(granularity_bytes);
    if is_inside && !is_taken { Ok(()) } else { Err(Contradiction::BaseOffset { segment }) }
}

fn check_memory(
    config: &PoolConfig,
    granularity_bytes: u64,
    before: Option<&Extent>,
    extent: Extent,
) -> Result<(), Contradiction> {
    let Extent { offset_bytes, size_bytes } = extent;
    let is_granular = |bytes: u64| bytes.is_multiple_of(granularity_bytes);
    if !is_granular(offset_bytes) || !is_granular(size_bytes) || size_bytes == 0 {
        return Err(Contradiction::MemoryGranule);
    }
    if before.is_some_and(|before| before.end_bytes() >= offset_bytes) {
        return Err(Contradiction::MemoryOutOfOrder);
    }
    let whole = |bytes: u64| bytes.next_multiple_of(granularity_bytes);
    let is_whole = before.is_none() && offset_bytes == 0;
    let (expected_bytes, fits) = match config.segments() {
        SegmentPolicy::Expandable(knobs) => (whole(knobs.range_bytes), true),
        SegmentPolicy::Reserved { segment_bytes } => {
            (whole(*segment_bytes), is_whole && size_bytes == whole(*segment_bytes))
        }
        _ => (SEGMENT_BYTES_MAX, is_whole),
    };
    let end = offset_bytes.checked_add(size_bytes).filter(|end| fits && *end <= expected_bytes);
    end.map(drop).ok_or(Contradiction::MemoryOutOfRange { expected_bytes })
}

/// Checks an allocation in a heap that these streams share.
fn check_allocation(
    group: StreamGroup,
    segment: &SegmentLayout,
    allocation: &AllocationLayout,
) -> Result<(), Contradiction> {
    let AllocationLayout { offset_bytes, size_bytes, requested_bytes, stream, .. } = *allocation;
    if !offset_bytes.is_multiple_of(UNIT_BYTES) || !size_bytes.is_multiple_of(UNIT_BYTES) || size_bytes == 0 {
        return Err(Contradiction::Unaligned);
    }
    if segment.allocations.last().is_some_and(|before| before.end_bytes() > offset_bytes) {
        return Err(Contradiction::AllocationOutOfOrder);
    }
    let at = segment.extents.partition_point(|extent| extent.end_bytes() <= offset_bytes);
    let is_inside =
        |extent: &&Extent| extent.offset_bytes <= offset_bytes && size_bytes <= extent.end_bytes() - offset_bytes;
    if segment.extents.get(at).filter(is_inside).is_none() {
        return Err(Contradiction::AllocationOutside);
    }
    if !(1..=size_bytes).contains(&requested_bytes) {
        return Err(Contradiction::Request { size_bytes });
    }
    if !group.may_include(stream) {
        return Err(Contradiction::DifferentStream { stream });
    }
    match allocation.name.as_ref().map(|name| name.len()) {
        Some(bytes) if bytes > NAME_BYTES_MAX => Err(Contradiction::NameTooLong { bytes }),
        _ => Ok(()),
    }
}
