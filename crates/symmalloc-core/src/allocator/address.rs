//! Reports on device addresses: the allocation that contains one, its neighbors, and freed allocations that contained
//! it.

use super::Allocator;
use super::lookup::SegmentPosition;
use super::report::BlockStateSnapshot;
use crate::config::damage::DebugRecord;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, DeviceAddress};
use crate::types::ids::StreamId;
use crate::types::units::Amount;
use std::fmt;
use std::sync::Arc;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Returns what the allocator knows about a device address: the allocation that contains it, its neighbors, and, in
    /// pools with debugging options, the freed allocations that contained it. Takes O(blocks of the heap).
    ///
    /// # Examples
    /// ```
    /// use symmalloc::{Allocator, Config, DeviceAddress, PoolId};
    /// use symmalloc::sim::SimBackend;
    ///
    /// let allocator = Allocator::new(SimBackend::builder().build(), "debug:poison".parse::<Config>()?)?;
    /// let stream = allocator.register_stream()?;
    /// let scores = allocator.allocate_named(PoolId::DEFAULT, stream, 4000, "scores")?;
    /// allocator.free(scores.handle)?;
    /// let report = allocator.explain_address(DeviceAddress(scores.address.0 + 16));
    /// assert_eq!(report.freed[0].name.as_deref(), Some("scores"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn explain_address(&self, address: DeviceAddress) -> AddressReport {
        let segment = self.segment_at(address);
        let mut report = AddressReport {
            address,
            segment,
            block: None,
            before: None,
            after: None,
            freed: self.freed_around(address),
        };
        let Some(position) = segment else { return report };
        let Ok(entry) = self.pool(position.heap.pool) else { return report };
        let snapshots = entry.heaps().map(|heap| heap.lock().snapshot());
        let snapshot = snapshots.flatten().find(|snapshot| snapshot.base == position.base);
        let Some(snapshot) = snapshot else { return report };
        let base = snapshot.base;
        let blocks = snapshot.blocks.into_iter().map(|block| {
            let address = DeviceAddress(base.0 + block.offset_bytes);
            AddressBlock { address, size_bytes: block.size_bytes, state: block.state }
        });
        for block in blocks {
            let is_live = matches!(block.state, BlockStateSnapshot::Allocated { .. });
            if block.contains(address) {
                report.block = Some(block);
            } else if is_live && block.address < address {
                report.before = Some(block);
            } else if is_live && report.after.is_none() {
                report.after = Some(block);
            }
        }
        report
    }

    /// Returns the freed allocations that contained an address, newest first.
    fn freed_around(&self, address: DeviceAddress) -> Vec<Arc<DebugRecord>> {
        let contains = |record: &DebugRecord| {
            let offset_bytes = address.0.checked_sub(record.address.0);
            offset_bytes.is_some_and(|offset_bytes| offset_bytes < record.requested_bytes.max(1))
        };
        self.freed_blocks(contains).into_iter().map(|(_, record)| record).collect()
    }
}

/// A block of an [`AddressReport`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddressBlock {
    /// Address of its first byte.
    pub address: DeviceAddress,
    /// Its size in bytes, with its guard.
    pub size_bytes: u64,
    /// Its state, with the program's requested bytes. A block in a quarantine is `Free`.
    pub state: BlockStateSnapshot,
}

impl AddressBlock {
    fn contains(&self, address: DeviceAddress) -> bool {
        address.0.checked_sub(self.address.0).is_some_and(|offset| offset < self.size_bytes)
    }
}

impl fmt::Display for AddressBlock {
    /// Writes `the allocation "weights" of 4.00 KiB at 0x7f0000000000 for s1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, size) = (self.address.0, Amount(self.size_bytes));
        match &self.state {
            BlockStateSnapshot::Allocated { stream, requested_bytes, name, used_by } => {
                match name {
                    Some(name) => write!(f, "the allocation {name:?}")?,
                    None => f.write_str("an unnamed allocation")?,
                }
                write!(f, " of {} at {address:#x} for {stream}", Amount(*requested_bytes))?;
                if used_by.is_empty() {
                    return Ok(());
                }
                f.write_str(", used by ")?;
                write!(f, "{}", used_by.iter().map(StreamId::to_string).collect::<Vec<_>>().join(" and "))
            }
            BlockStateSnapshot::Free { .. } => write!(f, "a free block of {size} at {address:#x}"),
            BlockStateSnapshot::Hole => write!(f, "a hole of {size} at {address:#x}, whose memory was released"),
            BlockStateSnapshot::Elsewhere => write!(f, "{size} at {address:#x} that are in use under other addresses"),
        }
    }
}

/// The allocations at a device address, and their neighbors, from [`Allocator::explain_address`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddressReport {
    /// The address.
    pub address: DeviceAddress,
    /// The live segment that contains it.
    pub segment: Option<SegmentPosition>,
    /// The block that contains it.
    pub block: Option<AddressBlock>,
    /// The nearest live allocation before that block in its segment.
    pub before: Option<AddressBlock>,
    /// The nearest live allocation after that block in its segment.
    pub after: Option<AddressBlock>,
    /// Freed allocations that contained the address, newest first. Known for pools with debugging options.
    pub freed: Vec<Arc<DebugRecord>>,
}

impl fmt::Display for AddressReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}: ", self.address.0)?;
        match (&self.segment, &self.block) {
            (Some(segment), Some(block)) => {
                let offset_bytes = self.address.0 - block.address.0;
                writeln!(f, "byte {offset_bytes} of {block}, in {} of {}", segment.segment, segment.heap)?;
                if matches!(block.state, BlockStateSnapshot::Allocated { requested_bytes, .. } if offset_bytes >= requested_bytes)
                {
                    writeln!(f, "  the address lies past the requested bytes")?;
                }
            }
            _ => writeln!(f, "in no segment of this allocator")?,
        }
        for (word, neighbor) in [("before", &self.before), ("after", &self.after)] {
            if let Some(neighbor) = neighbor {
                writeln!(f, "  {word} it: {neighbor}")?;
            }
        }
        for freed in &self.freed {
            writeln!(f, "  earlier: {freed}")?;
        }
        if self.freed.is_empty()
            && !matches!(&self.block, Some(AddressBlock { state: BlockStateSnapshot::Allocated { .. }, .. }))
        {
            writeln!(
                f,
                "  freed allocations are remembered in pools with `debug:poison`, or another debugging option"
            )?;
        }
        Ok(())
    }
}
