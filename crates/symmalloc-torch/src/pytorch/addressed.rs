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
use symmalloc_core::errors::UnknownError;
use symmalloc_core::ids::{HeapId, StreamGroup};
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
    let request = Request { pool, stream, size_bytes, address };
    let made = match request.revive(allocator) {
        Err(RestoreError::Gone { .. }) if request.grow(allocator, base)? => request.revive(allocator),
        outcome => outcome,
    };
    let made = made.map_err(|error| Error::NotAtAddress { address, size_bytes, error: Box::new(error) })?;
    allocator.count_revived(made.size_bytes);
    Ok(made.address.0 as *mut c_void)
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
}

impl Request {
    fn block_bytes(self) -> u64 {
        self.size_bytes.next_multiple_of(UNIT_BYTES)
    }

    /// Returns the streams that share the heap of this stream.
    fn group(self, allocator: &DeviceAllocator) -> Result<StreamGroup, UnknownError> {
        let core = allocator.core();
        Ok(core.pool_config(self.pool)?.streams().group_of(self.stream, &core.groups()))
    }

    fn revive(self, allocator: &DeviceAllocator) -> Result<Allocation, RestoreError> {
        let Request { pool, stream, size_bytes, address } = self;
        let (core, block_bytes) = (allocator.core(), self.block_bytes());
        let heap = HeapId { pool, group: self.group(allocator)? };
        let position = core.segment_at(DeviceAddress(address)).filter(|position| position.heap == heap);
        let Some(SegmentPosition { segment, offset_bytes, .. }) = position else {
            let segment = Placement::NOWHERE.segment;
            return Err(RestoreError::Gone { heap, segment, offset_bytes: 0, size_bytes: block_bytes });
        };
        let place = RevivedPlace { placement: Placement { segment, offset_bytes }, block_bytes };
        core.replay().revive(pool, stream, size_bytes, place, None)
    }

    /// Grows the stream's heap up to the end of the request. Returns `false` if the heap's next memory does not lead there: the preceding
    /// segment belongs to another heap, or the memory at the address was released.
    fn grow(self, allocator: &DeviceAllocator, base: u64) -> Result<bool, Error> {
        let (core, group) = (allocator.core(), self.group(allocator).map_err(CudaError::from)?);
        let segments = core.snapshot().segments.into_iter().filter(|segment| segment.heap.pool == self.pool);
        let before = segments.filter(|segment| segment.base.0 <= self.address).max_by_key(|segment| segment.base);
        if before.as_ref().is_some_and(|before| before.heap.group != group) {
            return Ok(false);
        }
        let end = before.map_or(base, |segment| segment.base.0 + segment.size_bytes);
        let missing_bytes = (self.address + self.block_bytes()).saturating_sub(end);
        if missing_bytes > 0 {
            let held = core.heap_stats(self.pool, self.stream).map_err(CudaError::from)?.reserved_bytes.current;
            core.reserve(self.pool, self.stream, held + missing_bytes).map_err(CudaError::from)?;
        }
        Ok(missing_bytes > 0)
    }
}
