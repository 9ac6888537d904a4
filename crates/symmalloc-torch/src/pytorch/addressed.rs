//! Allocation at an address that the program names: PyTorch's `allocateWithAddress`.
//!
//! Only a pool with a base has addresses that a program can know before it allocates. The address must be free there, on this stream. The
//! pool grows to it if it has no memory yet, as for `reserve`. The allocation is an op like the revival of a saved allocation, so recordings
//! and digests contain it.

use crate::c_interface::arguments::{not_null, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::report;
use crate::process;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::c_void;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::base::SLOT_BYTES;
use symmalloc_core::config::{ExpandableSegments, SegmentPolicy};
use symmalloc_core::errors::UnknownError;
use symmalloc_core::ids::{HeapId, StreamGroup};
use symmalloc_core::report::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot};
use symmalloc_core::restore::{RestoreError, RevivedPlace};
use symmalloc_core::units::UNIT_BYTES;
use symmalloc_core::{Allocation, Placement, PoolId, SegmentPosition, StreamId};
use symmalloc_cuda::CudaError;

/// Allocates at exactly this address, in the pool whose base the address belongs to. Writes a null pointer for zero bytes. Returns
/// `SYMMALLOC_UNKNOWN_POOL` if the address belongs to no pool with a base, and `SYMMALLOC_INVALID_STATE` if the memory there is in use, or
/// belongs to another stream.
///
/// # Safety
/// As `symmalloc_torch_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_allocate_with_address(
    device: i32,
    stream: *mut c_void,
    bytes: usize,
    address: *const c_void,
    out: *mut *mut c_void,
) -> symmalloc_status {
    report(|| {
        not_null(out, "out")?;
        let allocator = process::allocator(device)?;
        // SAFETY: the caller's contract.
        let pointer = unsafe { allocate(allocator, RawStream::new(stream), bytes as u64, address as u64) }?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", pointer) }
    })
}

/// # Safety
/// As [`symmalloc_torch_allocate_with_address`].
unsafe fn allocate(
    allocator: &DeviceAllocator,
    stream: RawStream,
    size_bytes: u64,
    address: u64,
) -> Result<*mut c_void, Error> {
    let (pool, base) = pool_of(allocator, address).ok_or(Error::NoBase { address })?;
    if size_bytes == 0 {
        return Ok(std::ptr::null_mut());
    }
    // SAFETY: the caller's contract.
    let stream = unsafe { allocator.stream_id(stream) }?;
    let at_address = |error| Error::NotAtAddress { address, size_bytes, error: Box::new(error) };
    let block_bytes = size_bytes.checked_next_multiple_of(UNIT_BYTES);
    let end = block_bytes.and_then(|block_bytes| address.checked_add(block_bytes));
    let Some(end) = end.filter(|end| *end <= base + SLOT_BYTES) else {
        let group = group_of(allocator, pool, stream).map_err(CudaError::from)?;
        return Err(at_address(gone(HeapId { pool, group }, size_bytes)));
    };
    let request = Request { pool, stream, size_bytes, address, end };
    let made = match request.revive(allocator) {
        Err(RestoreError::Gone { .. }) if request.grow(allocator, base)? => {
            let made = request.revive(allocator);
            if made.is_err() {
                // What the heap acquired for the request is free.
                allocator.core().trim_pool(pool).map_err(CudaError::from)?;
            }
            made
        }
        outcome => outcome,
    };
    let made = made.map_err(at_address)?;
    allocator.count_revived(made.size_bytes);
    Ok(made.address.0 as *mut c_void)
}

/// Returns the error of memory that a heap does not have.
fn gone(heap: HeapId, size_bytes: u64) -> RestoreError {
    RestoreError::Gone { heap, segment: Placement::NOWHERE.segment, offset_bytes: 0, size_bytes }
}

/// Returns the streams that share the heap of this stream.
fn group_of(allocator: &DeviceAllocator, pool: PoolId, stream: StreamId) -> Result<StreamGroup, UnknownError> {
    let core = allocator.core();
    Ok(core.pool_config(pool)?.streams().group_of(stream, &core.groups()))
}

/// Returns the pool whose base the address belongs to, and the base.
fn pool_of(allocator: &DeviceAllocator, address: u64) -> Option<(PoolId, u64)> {
    let core = allocator.core();
    core.pools().into_iter().find_map(|pool| {
        let base = core.pool_config(pool).ok()?.base()?.address();
        (base..base + SLOT_BYTES).contains(&address).then_some((pool, base))
    })
}

/// A request for memory at an address.
#[derive(Clone, Copy)]
struct Request {
    pool: PoolId,
    stream: StreamId,
    size_bytes: u64,
    address: u64,
    /// End of the request's block, inside of the pool's addresses.
    end: u64,
}

impl Request {
    fn revive(self, allocator: &DeviceAllocator) -> Result<Allocation, RestoreError> {
        let Request { pool, stream, size_bytes, address, end } = self;
        let (core, block_bytes) = (allocator.core(), end - address);
        let heap = HeapId { pool, group: group_of(allocator, pool, stream)? };
        let position = core.segment_at(DeviceAddress(address)).filter(|position| position.heap == heap);
        let Some(SegmentPosition { segment, offset_bytes, .. }) = position else {
            return Err(gone(heap, block_bytes));
        };
        let place = RevivedPlace { placement: Placement { segment, offset_bytes }, block_bytes };
        core.replay().revive(pool, stream, size_bytes, place, None)
    }

    /// Grows the stream's heap up to the end of the request. Returns `false`, and changes nothing, if the heap's next memory does not lead
    /// there, or if memory on the way is in use.
    fn grow(self, allocator: &DeviceAllocator, base: u64) -> Result<bool, Error> {
        let core = allocator.core();
        let group = group_of(allocator, self.pool, self.stream).map_err(CudaError::from)?;
        let config = core.pool_config(self.pool).map_err(CudaError::from)?;
        let SegmentPolicy::Expandable(ExpandableSegments { range_bytes, .. }) = config.segments() else {
            return Ok(false);
        };
        let mut segments = core.snapshot().segments;
        segments.retain(|segment| segment.heap.pool == self.pool);
        // The heap continues its newest segment that has memory of its own; stitched segments have none. Its first segment gets the lowest
        // addresses.
        let is_backed = |segment: &&SegmentSnapshot| segment.heap.group == group && segment.mapped_bytes > 0;
        let newest = segments.iter().filter(is_backed).max_by_key(|segment| segment.segment);
        let (start, end) = match newest {
            Some(newest) => (newest.base.0, newest.base.0 + newest.size_bytes),
            None if segments.iter().all(|segment| segment.base.0 >= base + range_bytes) => (base, base),
            None => return Ok(false),
        };
        let is_on_the_way = |block: &BlockSnapshot| {
            let block_end = start + block.offset_bytes + block.size_bytes;
            block_end > self.address && !matches!(block.state, BlockStateSnapshot::Free { .. })
        };
        let is_ahead = self.address.is_multiple_of(UNIT_BYTES) && start <= self.address && end < self.end;
        let has_room = self.end <= start + range_bytes;
        if !is_ahead || !has_room || newest.is_some_and(|newest| newest.blocks.iter().any(is_on_the_way)) {
            return Ok(false);
        }
        let held = core.heap_stats(self.pool, self.stream).map_err(CudaError::from)?.reserved_bytes.current;
        core.reserve(self.pool, self.stream, held + (self.end - end)).map_err(CudaError::from)?;
        Ok(true)
    }
}
