//! Enumeration of segments and blocks, for PyTorch's snapshots.
//!
//! PyTorch shows an expandable segment as its contiguous mapped parts, so a hole ends a segment here.

use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::{call_back, report};
use crate::mempools::MempoolId;
use crate::process;
use crate::status::symmalloc_status;
use std::ffi::c_void;
use symmalloc_core::config::SegmentPolicy;
use symmalloc_core::report::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot};
use symmalloc_core::units::MIB;
use symmalloc_core::{PoolId, StreamId};

/// The maximum size of PyTorch's small blocks, in bytes.
const SMALL_BYTES_MAX: u64 = MIB;

/// The first word of the id that snapshots show for pools without an id in PyTorch. The second word is the pool's number.
const OUR_POOLS: u64 = u32::MAX as u64;

/// A contiguous part of a segment.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct symmalloc_segment {
    /// The address of the first byte.
    pub address: u64,
    /// The size in bytes.
    pub bytes: u64,
    /// The stream of the heap. If streams share memory: the stream of the first allocation, or NULL.
    pub stream: *mut c_void,
    /// The first word of the pool's id in PyTorch: (0, 0) for the default pool.
    pub id_first: u64,
    /// The second word of the id.
    pub id_second: u64,
    /// `true` if the segment can grow.
    pub is_expandable: bool,
    /// `true` if the segment serves large requests, or all.
    pub is_large: bool,
}

/// A block of the segment that was visited before it.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct symmalloc_block {
    /// The address of the first byte.
    pub address: u64,
    /// The size in bytes.
    pub bytes: u64,
    /// Requested bytes; 0 for a free block.
    pub requested_bytes: u64,
    /// `true` for a live allocation.
    pub is_allocated: bool,
}

/// Receives a segment (`block` is NULL), and then its blocks (`segment` is NULL). Calls of this library inside it return an error, except for frees, which take effect later.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_visit_fn = Option<
    unsafe extern "C" fn(context: *mut c_void, segment: *const symmalloc_segment, block: *const symmalloc_block),
>;

/// Visits every segment and block of a device, pool by pool. With an id other than (0, 0), visits only those of one mempool.
///
/// # Safety
/// `visit` may be called with `context` until the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_visit(
    device: i32,
    id_first: u64,
    id_second: u64,
    visit: symmalloc_visit_fn,
    context: *mut c_void,
) -> symmalloc_status {
    report(|| {
        let visit = visit.ok_or(Error::Null { argument: "visit" })?;
        let Some(allocator) = process::existing(device) else { return Ok(()) };
        let only = ((id_first, id_second) != (0, 0)).then_some((id_first, id_second));
        let mut emit = |segment: *const symmalloc_segment, block: *const symmalloc_block| {
            // SAFETY: the caller's contract.
            call_back(|| unsafe { visit(context, segment, block) });
        };
        let mempools = allocator.mempools().list();
        let id_of = |pool: PoolId| match mempools.iter().find(|known| known.own() == Some(pool)) {
            _ if pool == PoolId::DEFAULT => (0, 0),
            Some(known) => known.id,
            None => (OUR_POOLS, pool.0.into()),
        };
        show(allocator, only, &id_of, &mut emit);
        for (id, other) in allocator.mempools().foreign() {
            show(&other, only, &|_| id, &mut emit);
        }
        Ok(())
    })
}

fn show(
    allocator: &DeviceAllocator,
    only: Option<MempoolId>,
    id_of: &dyn Fn(PoolId) -> MempoolId,
    emit: &mut dyn FnMut(*const symmalloc_segment, *const symmalloc_block),
) {
    for segment in allocator.core().snapshot().segments {
        let id = id_of(segment.heap.pool);
        if only.is_some_and(|only| only != id) {
            continue;
        }
        let is_expandable = allocator
            .core()
            .pool_config(segment.heap.pool)
            .is_ok_and(|config| matches!(config.segments(), SegmentPolicy::Expandable(_)));
        for part in parts(&segment) {
            let first = &part[0];
            let bytes: u64 = part.iter().map(|block| block.size_bytes).sum();
            let stream = segment.heap.stream().or_else(|| part.iter().find_map(stream_of));
            let stream = stream.or(segment.heap.group.first());
            let is_large = is_expandable || bytes > 2 * SMALL_BYTES_MAX || part.iter().any(is_large);
            let shown = symmalloc_segment {
                address: segment.base.0 + first.offset_bytes,
                bytes,
                stream: stream.map_or(std::ptr::null_mut(), |stream| allocator.raw_stream(stream)),
                id_first: id.0,
                id_second: id.1,
                is_expandable,
                is_large,
            };
            emit(&raw const shown, std::ptr::null());
            for block in part {
                let requested_bytes = match &block.state {
                    BlockStateSnapshot::Allocated { requested_bytes, .. } => Some(*requested_bytes),
                    _ => None,
                };
                let shown = symmalloc_block {
                    address: segment.base.0 + block.offset_bytes,
                    bytes: block.size_bytes,
                    requested_bytes: requested_bytes.unwrap_or(0),
                    is_allocated: requested_bytes.is_some(),
                };
                emit(std::ptr::null(), &raw const shown);
            }
        }
    }
}

/// Returns the runs of mapped blocks.
fn parts(segment: &SegmentSnapshot) -> impl Iterator<Item = &[BlockSnapshot]> {
    let has_memory =
        |block: &BlockSnapshot| !matches!(block.state, BlockStateSnapshot::Hole | BlockStateSnapshot::Elsewhere);
    segment.blocks.split(move |block| !has_memory(block)).filter(|part| !part.is_empty())
}

fn is_large(block: &BlockSnapshot) -> bool {
    matches!(block.state, BlockStateSnapshot::Allocated { .. }) && block.size_bytes > SMALL_BYTES_MAX
}

fn stream_of(block: &BlockSnapshot) -> Option<StreamId> {
    match &block.state {
        BlockStateSnapshot::Allocated { stream, .. } => Some(*stream),
        _ => None,
    }
}
