//! Pools, and what holds for all of them.

use super::arguments::{living, not_null, text, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::report;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::{c_char, c_void};
use symmalloc_core::PoolId;

/// Makes a pool with a policy of its own, the keys of a pool as in SYMMALLOC_CONF. NULL: as the default pool, but private.
/// Make pools in the same order on every rank.
///
/// # Safety
/// `allocator` is live; `conf` is NULL or a C string; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_pool_create(
    allocator: *mut DeviceAllocator,
    conf: *const c_char,
    out: *mut u32,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, conf) = unsafe { (living(allocator)?, text(conf, "conf")?) };
        not_null(out, "out")?;
        let pool = allocator.create_pool(conf)?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", pool.0) }
    })
}

/// Gives a pool up. Nothing can be allocated in it any more; its memory goes back with the first trim after its last
/// allocation was freed.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_pool_destroy(allocator: *mut DeviceAllocator, pool: u32) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| unsafe { living(allocator) }?.destroy_pool(PoolId(pool)))
}

/// Brings the device memory that a stream has in a pool to at least so many bytes, so that later allocations find it.
///
/// # Safety
/// As `symmalloc_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_reserve(
    allocator: *mut DeviceAllocator,
    pool: u32,
    stream: *mut c_void,
    bytes: usize,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        let pool = allocator.known_pool(pool)?;
        // SAFETY: the caller's contract.
        unsafe { allocator.reserve(pool, RawStream::new(stream), bytes as u64) }
    })
}

/// Gives the free memory of all pools back to the device, but not that of private pools that a graph uses. Waits for streams
/// that used it. `released_bytes` may be NULL.
///
/// # Safety
/// `allocator` is live; `released_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_trim(allocator: *mut DeviceAllocator, released_bytes: *mut u64) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let bytes = unsafe { living(allocator) }?.trim()?;
        if released_bytes.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { write(released_bytes, "released_bytes", bytes) }
    })
}

/// Lets another device read and write the allocator's memory: what there is, and what will be.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_grant_access(allocator: *mut DeviceAllocator, peer: i32) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        let wrong = |_| Error::Argument { argument: "peer", value: peer.into(), expected: "a device number" };
        allocator.grant_access(usize::try_from(peer).map_err(wrong)?)
    })
}
