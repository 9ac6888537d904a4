//! The segments and blocks of a snapshot.
//!
//! PyTorch calls each contiguous range of mapped memory a segment, so an expandable segment with holes is exported as
//! several segments:
//!
//! ```text
//! ours      ┌─ block ─┬─ block ─┐╌╌ hole ╌╌┌─ block ─┐
//! PyTorch's └── segment, blocks ┘          └ segment ┘
//! ```

use std::collections::BTreeMap;
use std::io::{self, Write};

use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::config::{PoolConfig, SegmentPolicy};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::report::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot, Snapshot};
use symmalloc_core::units::MIB;

use super::writer::SnapshotWriter;
use crate::rerun::MemoryChange;

/// Size of PyTorch's segments for small requests, in bytes.
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;

/// The stream for which each range of memory was obtained, by the range's address.
#[derive(Default)]
pub(super) struct Origins(BTreeMap<DeviceAddress, StreamId>);

impl Origins {
    pub(super) fn note(&mut self, changes: &[MemoryChange]) {
        self.0.extend(changes.iter().filter(|change| change.is_mapped).map(|change| (change.address, change.stream)));
    }

    /// Returns the stream for which the memory at an address was obtained, if known.
    fn stream(&self, address: DeviceAddress) -> Option<StreamId> {
        self.0.range(..=address).next_back().map(|(_, stream)| *stream)
    }
}

/// A contiguous range of mapped memory.
struct Stretch<'a> {
    segment: &'a SegmentSnapshot,
    blocks: &'a [BlockSnapshot],
}

impl Stretch<'_> {
    fn address(&self) -> u64 {
        self.segment.base.0 + self.blocks[0].offset_bytes
    }

    fn sum(&self, bytes: impl Fn(&BlockSnapshot) -> u64) -> u64 {
        self.blocks.iter().map(bytes).sum()
    }
}

impl<W: Write> SnapshotWriter<'_, W> {
    /// Writes `segments`, sorted by address as in PyTorch.
    pub(super) fn state(
        &mut self,
        snapshot: &Snapshot,
        origins: &Origins,
        pool_config: &dyn Fn(PoolId) -> Option<PoolConfig>,
    ) -> io::Result<()> {
        let mut stretches: Vec<Stretch<'_>> = snapshot.segments.iter().flat_map(stretches_of).collect();
        stretches.sort_by_key(Stretch::address);
        self.pickle.text("segments")?;
        self.pickle.open_list()?;
        for (number, stretch) in stretches.iter().enumerate() {
            self.pickle.item(number)?;
            self.stretch(stretch, origins, pool_config(stretch.segment.heap.pool).as_ref())?;
        }
        self.pickle.close_list()
    }

    fn stretch(&mut self, stretch: &Stretch<'_>, origins: &Origins, config: Option<&PoolConfig>) -> io::Result<()> {
        self.summary.segments += 1;
        let heap = stretch.segment.heap;
        let address = stretch.address();
        let stream = heap.stream().or_else(|| origins.stream(DeviceAddress(address)));
        let stream = stream.or(heap.group.first()).unwrap_or_default();
        let total_bytes = stretch.sum(|block| block.size_bytes);
        let active_bytes = stretch.sum(|block| if is_live(block) { block.size_bytes } else { 0 });
        let is_pending = |block: &BlockSnapshot| self.pending.contains(&block_address(block, stretch.segment));
        let pending_bytes = stretch.sum(|block| if is_pending(block) { block.size_bytes } else { 0 });
        let policy = config.map(PoolConfig::segments);
        let is_small = matches!(policy, Some(SegmentPolicy::Fixed(_))) && total_bytes == SMALL_SEGMENT_BYTES;
        self.pickle.open_dict()?;
        self.field("device", 0)?;
        self.field("address", address)?;
        self.field("total_size", total_bytes)?;
        self.field("allocated_size", active_bytes - pending_bytes)?;
        self.field("active_size", active_bytes)?;
        self.field("requested_size", stretch.sum(requested_bytes))?;
        self.field("stream", stream.0.into())?;
        self.pickle.text("segment_type")?;
        self.pickle.text(if is_small { "small" } else { "large" })?;
        self.pickle.text("segment_pool_id")?;
        self.pickle.integer(0)?;
        self.pickle.integer(heap.pool.0.into())?;
        self.pickle.pair()?;
        self.pickle.text("is_expandable")?;
        self.pickle.boolean(matches!(policy, Some(SegmentPolicy::Expandable(_))))?;
        self.frames(None)?;
        self.pickle.text("blocks")?;
        self.pickle.open_list()?;
        for (number, block) in stretch.blocks.iter().enumerate() {
            self.pickle.item(number)?;
            self.block(block, stretch.segment)?;
        }
        self.pickle.close_list()?;
        self.pickle.close_dict()
    }

    fn block(&mut self, block: &BlockSnapshot, segment: &SegmentSnapshot) -> io::Result<()> {
        self.summary.blocks += 1;
        let address = block_address(block, segment);
        let state = match is_live(block) {
            true if self.pending.contains(&address) => "active_pending_free",
            true => "active_allocated",
            false => "inactive",
        };
        self.pickle.open_dict()?;
        self.field("address", address.0)?;
        self.field("size", block.size_bytes)?;
        self.field("requested_size", requested_bytes(block))?;
        self.pickle.text("state")?;
        self.pickle.text(state)?;
        let name = match &block.state {
            BlockStateSnapshot::Allocated { name, .. } => name.as_deref(),
            _ => None,
        };
        self.frames(name.map(|name| (segment.heap.pool, name)))?;
        self.pickle.close_dict()
    }
}

fn stretches_of(segment: &SegmentSnapshot) -> impl Iterator<Item = Stretch<'_>> {
    // Memory that is mapped at several addresses appears once, at the address where it is in use or free.
    let is_elsewhere =
        |block: &BlockSnapshot| matches!(block.state, BlockStateSnapshot::Hole | BlockStateSnapshot::Elsewhere);
    let mapped = segment.blocks.split(is_elsewhere).filter(|blocks| !blocks.is_empty());
    mapped.map(move |blocks| Stretch { segment, blocks })
}

fn block_address(block: &BlockSnapshot, segment: &SegmentSnapshot) -> DeviceAddress {
    DeviceAddress(segment.base.0 + block.offset_bytes)
}

fn is_live(block: &BlockSnapshot) -> bool {
    matches!(block.state, BlockStateSnapshot::Allocated { .. })
}

fn requested_bytes(block: &BlockSnapshot) -> u64 {
    match block.state {
        BlockStateSnapshot::Allocated { requested_bytes, .. } => requested_bytes,
        _ => 0,
    }
}
