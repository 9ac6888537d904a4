//! Checkpoints of mempools, for trees of CUDA graphs.
//!
//! A tree replays graphs without the allocator's knowledge, and then captures another branch. The pool must then have the allocations of
//! the replayed path at the same addresses. A restore to a checkpoint frees all live allocations and makes those of the checkpoint live
//! again. Memory that other branches captured stays.

use crate::c_interface::arguments::{not_null, write};
use crate::device::DeviceAllocator;
use crate::error::{Error, complain};
use crate::guard::{call_back, report};
use crate::handles::{hand_out, take_back};
use crate::mempools::{ForeignPool, MempoolId, PoolTarget};
use crate::process;
use crate::status::symmalloc_status;
use std::ffi::c_void;
use std::sync::Arc;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::{Layout, PoolConfig, PoolId};
use symmalloc_files::is_forked;

/// A checkpoint of a mempool's allocations.
pub struct PoolCheckpoint {
    id: MempoolId,
    layout: Layout,
}

/// Receives the allocations that were live before a restore (`is_live` 0), and then those that are live after it (1). Calls of this
/// library inside it return an error, except for frees, which take effect later.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_restored_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, pointer: *mut c_void, requested_bytes: u64, is_live: u32)>;

/// Returns the pool's id of a mempool in use, and the allocator that it belongs to.
fn found(allocator: &'static DeviceAllocator, id: MempoolId) -> Result<(Owner, PoolId), Error> {
    let missing = Error::NoScope { device: allocator.ordinal(), scope: "mempool with this id in use" };
    let known = allocator.mempools().list().into_iter().find(|known| known.id == id && known.uses > 0);
    match known.and_then(|known| known.target).ok_or(missing)? {
        PoolTarget::Own(pool) => Ok((Owner::Device(allocator), pool)),
        PoolTarget::Foreign(other) => Ok((Owner::Foreign(other), DeviceAllocator::POOL)),
    }
}

enum Owner {
    Device(&'static DeviceAllocator),
    Foreign(Arc<DeviceAllocator>),
}

impl Owner {
    fn allocator(&self) -> &DeviceAllocator {
        match self {
            Owner::Device(allocator) => allocator,
            Owner::Foreign(allocator) => allocator,
        }
    }
}

/// Writes a checkpoint of the mempool with this id. Destroy it with `symmalloc_torch_checkpoint_destroy`.
///
/// # Safety
/// `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_checkpoint(
    device: i32,
    id_first: u64,
    id_second: u64,
    out: *mut *mut PoolCheckpoint,
) -> symmalloc_status {
    report(|| {
        not_null(out, "out")?;
        let id = (id_first, id_second);
        let (owner, pool) = found(process::allocator(device)?, id)?;
        let layout = owner.allocator().core().save_layout(pool)?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", hand_out(PoolCheckpoint { id, layout })) }
    })
}

/// Destroys a checkpoint. NULL has no effect. Never fails, because PyTorch calls it in destructors.
///
/// # Safety
/// The checkpoint came from `symmalloc_torch_checkpoint` and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_checkpoint_destroy(checkpoint: *mut PoolCheckpoint) {
    if is_forked() {
        return;
    }
    match take_back(checkpoint, "checkpoint") {
        Ok(checkpoint) => drop(checkpoint),
        Err(error) => complain(&error),
    }
}

/// Restores exactly the allocations that the mempool had at the checkpoint. The pool keeps memory that it reserved since. Reports
/// every allocation that was live before, and then every allocation that is live after the call.
///
/// # Safety
/// The checkpoint is live, and no other thread uses the pool; `callback` may be called with `context` until the call returns, and frees none
/// of the pool's pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_restore(
    device: i32,
    checkpoint: *const PoolCheckpoint,
    callback: symmalloc_restored_fn,
    context: *mut c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let checkpoint = unsafe { checkpoint.as_ref() }.ok_or(Error::Null { argument: "checkpoint" })?;
        let emit = |address: u64, requested_bytes: u64, is_live: bool| {
            if let Some(callback) = callback {
                // SAFETY: the caller's contract.
                call_back(|| unsafe { callback(context, address as *mut c_void, requested_bytes, is_live.into()) });
            }
        };
        let (owner, pool) = found(process::allocator(device)?, checkpoint.id)?;
        let allocator = owner.allocator();
        let mut kept = Vec::new();
        for live in live_in(allocator, pool) {
            emit(live.address, live.requested_bytes, false);
            if live.is_in(&checkpoint.layout) {
                kept.push(live.address);
            } else {
                allocator.free_block(live.address as *mut c_void)?;
            }
        }
        let restored = allocator.core().revive_layout(pool, &checkpoint.layout)?;
        for revived in restored.allocations() {
            let address = revived.allocation.address.0;
            if !kept.contains(&address) {
                allocator.count_revived(revived.allocation.size_bytes);
            }
            emit(address, revived.requested_bytes, true);
        }
        Ok(())
    })
}

/// A live allocation, as a layout identifies it.
struct Live {
    address: u64,
    group: symmalloc_core::ids::StreamGroup,
    owner: symmalloc_core::StreamId,
    segment: symmalloc_core::SegmentId,
    offset_bytes: u64,
    size_bytes: u64,
    requested_bytes: u64,
}

impl Live {
    fn is_in(&self, layout: &Layout) -> bool {
        let heap = layout.heaps().iter().find(|heap| heap.group == self.group);
        let segment = heap.and_then(|heap| heap.segments.iter().find(|segment| segment.id == self.segment));
        segment.is_some_and(|segment| {
            segment.allocations.iter().any(|saved| {
                (saved.offset_bytes, saved.size_bytes) == (self.offset_bytes, self.size_bytes)
                    && (saved.stream, saved.requested_bytes) == (self.owner, self.requested_bytes)
            })
        })
    }
}

fn live_in(allocator: &DeviceAllocator, pool: PoolId) -> Vec<Live> {
    let debug = allocator.core().pool_config(pool).map(PoolConfig::debug).unwrap_or_default();
    let segments = allocator.core().snapshot().segments.into_iter().filter(|segment| segment.heap.pool == pool);
    let live = segments.flat_map(|segment| {
        let (base, id, group) = (segment.base.0, segment.segment, segment.heap.group);
        segment.blocks.into_iter().filter_map(move |block| match block.state {
            BlockStateSnapshot::Allocated { stream: owner, requested_bytes, .. } => Some(Live {
                address: base + block.offset_bytes,
                group,
                owner,
                segment: id,
                offset_bytes: block.offset_bytes,
                size_bytes: block.size_bytes,
                // As in a layout.
                requested_bytes: debug.grown_bytes(requested_bytes),
            }),
            _ => None,
        })
    });
    live.collect()
}
