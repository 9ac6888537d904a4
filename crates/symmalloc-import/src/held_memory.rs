//! The memory that a recorded allocator had obtained from the device at one moment: the part in use, and the free part,
//! in whole segments and in blocks.

use symmalloc_core::ids::{PoolId, StreamId};

/// Device memory of a recorded allocator at one moment. Blocks are counted with their sizes, which are the requested sizes rounded up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldMemory {
    /// Bytes obtained from the device.
    pub reserved_bytes: u64,
    /// Bytes in use, including freed blocks that other streams still use.
    pub allocated_bytes: u64,
    /// Number of segments that are entirely free. `torch.cuda.empty_cache()` releases them to the device.
    pub free_segments: u64,
    /// Bytes in these segments.
    pub free_segment_bytes: u64,
    /// Number of free blocks in segments that are in use. They are not released to the device.
    pub free_blocks: u64,
    /// Bytes in these blocks.
    pub free_block_bytes: u64,
    /// The largest contiguous free memory, in bytes.
    pub largest_free_bytes: u64,
}

impl HeldMemory {
    /// Returns the bytes that are reserved but not in use.
    pub fn free_bytes(&self) -> u64 {
        self.free_segment_bytes + self.free_block_bytes
    }

    /// Adds the memory of another heap.
    pub(crate) fn add(&mut self, other: &HeldMemory) {
        self.reserved_bytes = self.reserved_bytes.saturating_add(other.reserved_bytes);
        self.allocated_bytes = self.allocated_bytes.saturating_add(other.allocated_bytes);
        self.free_segments += other.free_segments;
        self.free_segment_bytes = self.free_segment_bytes.saturating_add(other.free_segment_bytes);
        self.free_blocks += other.free_blocks;
        self.free_block_bytes = self.free_block_bytes.saturating_add(other.free_block_bytes);
        self.largest_free_bytes = self.largest_free_bytes.max(other.largest_free_bytes);
    }

    /// Adds a segment of `size_bytes`. The items of `used` are its used blocks in ascending order: their starts, relative to the segment,
    /// and their sizes, both in bytes.
    pub(crate) fn add_segment(&mut self, size_bytes: u64, used: impl IntoIterator<Item = (u64, u64)>) {
        self.reserved_bytes = self.reserved_bytes.saturating_add(size_bytes);
        let (mut next, mut free) = (0, Vec::new());
        for (start, bytes) in used {
            let (start, end) = (start.clamp(next, size_bytes.max(next)), start.saturating_add(bytes).min(size_bytes));
            if start > next {
                free.push(start - next);
            }
            self.allocated_bytes = self.allocated_bytes.saturating_add(end.saturating_sub(start));
            next = end.max(next);
        }
        if size_bytes > next {
            free.push(size_bytes - next);
        }
        for bytes in free {
            let is_whole = bytes == size_bytes;
            let (number, sum) = match is_whole {
                true => (&mut self.free_segments, &mut self.free_segment_bytes),
                false => (&mut self.free_blocks, &mut self.free_block_bytes),
            };
            *number += 1;
            *sum = sum.saturating_add(bytes);
            self.largest_free_bytes = self.largest_free_bytes.max(bytes);
        }
    }
}

/// Memory of one heap of a recorded allocator. A heap is identified by its pool and by the stream for which the memory
/// was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldHeap {
    /// The pool of the heap; `None` if no op of the recording uses the pool.
    pub pool: Option<PoolId>,
    /// The stream of the heap; `None` if no op of the recording uses the stream.
    pub stream: Option<StreamId>,
    /// The memory of the heap.
    pub held: HeldMemory,
}

/// The last request that a recorded allocator refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedFailure {
    /// Index of the request's record, a [`Refuse`](symmalloc_core::op::Op::Refuse).
    pub record: usize,
    /// Memory that the allocator held when it refused the request, if the recording shows it (PyTorch snapshots).
    pub held: Option<HeldMemory>,
    /// Bytes that were free on the device at this time, if the recording states it (PyTorch snapshots).
    pub device_free_bytes: Option<u64>,
    /// Index of the request's Python stack in [`Stacks::stacks`](crate::Stacks::stacks).
    pub stack: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_split_into_whole_segments_and_blocks_of_used_ones() {
        let mut held = HeldMemory::default();
        held.add_segment(100, []);
        held.add_segment(100, [(10, 20), (30, 10), (90, 10)]);
        held.add_segment(50, [(0, 50)]);
        let expected = HeldMemory {
            reserved_bytes: 250,
            allocated_bytes: 90,
            free_segments: 1,
            free_segment_bytes: 100,
            free_blocks: 2,
            free_block_bytes: 60,
            largest_free_bytes: 100,
        };
        assert_eq!((held, held.free_bytes()), (expected, 160));
    }

    #[test]
    fn damaged_blocks_do_not_overflow() {
        let mut held = HeldMemory::default();
        held.add_segment(100, [(u64::MAX, u64::MAX), (0, u64::MAX), (5, 200)]);
        assert!(held.allocated_bytes + held.free_bytes() <= 200, "{held:?}");
        held.add_segment(u64::MAX, []);
        held.add_segment(u64::MAX, []);
        assert_eq!(held.reserved_bytes, u64::MAX);
    }
}
