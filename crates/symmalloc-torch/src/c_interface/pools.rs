//! Pools, and operations on all of them.

use super::arguments::{living, not_null, text, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::{release, release_or_defer, report};
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::{c_char, c_void};
use symmalloc_core::PoolId;
use symmalloc_files::is_forked;

/// Creates a pool. `conf` has the pool keys of SYMMALLOC_CONF; NULL selects the default pool's settings, but private, without groups of
/// streams and without a base. Create pools in the same order on every rank.
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
        let pool = allocator.create_pool(None, conf)?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", pool.0) }
    })
}

/// Creates a pool like `symmalloc_pool_create`, whose number is the key that the program chose: from 1 to 65535, and used once. The
/// number then does not depend on the timing of threads that create pools. Other pools get the number after the highest one so far.
/// Returns `SYMMALLOC_INVALID_ARGUMENT` if the key is out of range or was used before.
///
/// # Safety
/// As `symmalloc_pool_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_pool_create_with_key(
    allocator: *mut DeviceAllocator,
    key: u32,
    conf: *const c_char,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, conf) = unsafe { (living(allocator)?, text(conf, "conf")?) };
        allocator.create_pool(Some(PoolId(key)), conf).map(drop)
    })
}

/// Frees all allocations of a pool at once, and keeps its memory for later ones. Makes no driver call, unless the pool has a release
/// threshold. Later work on the memory waits on the device for the work so far. Writes the number of freed allocations; `freed` may be NULL.
/// No pointer of these allocations may be used or freed afterwards.
///
/// # Safety
/// `allocator` is live; `freed` is NULL or valid for writing. Nothing uses the pool's allocations later, such as a tensor or a buffer of
/// another library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_pool_reset(
    allocator: *mut DeviceAllocator,
    pool: u32,
    freed: *mut u64,
) -> symmalloc_status {
    release(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        let allocations = allocator.reset_pool(allocator.known_pool(pool)?)?;
        if freed.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { write(freed, "freed", allocations) }
    })
}

/// Destroys a pool. Further allocations in it fail. The first trim after its last allocation was freed releases its memory. So
/// does an allocation that the limit over all pools would refuse, unless the pool is symmetric.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_pool_destroy(allocator: *mut DeviceAllocator, pool: u32) -> symmalloc_status {
    // SAFETY: the caller's contract.
    release_or_defer(move || unsafe { living(allocator) }?.destroy_pool(PoolId(pool)))
}

/// Grows a stream's device memory in a pool to at least `bytes`, for later allocations.
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

/// Releases the free memory of all pools to the device, except that of mempools that a graph uses. Waits for streams that used
/// it. `released_bytes` may be NULL.
///
/// This is an op of symmetric pools that are awake: call it at the same point on every rank. One rank alone calls `symmalloc_trim_private`.
///
/// # Safety
/// `allocator` is live; `released_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_trim(allocator: *mut DeviceAllocator, released_bytes: *mut u64) -> symmalloc_status {
    // SAFETY: the caller's contract, in both.
    unsafe { trimmed(released_bytes, || living(allocator)?.trim()) }
}

/// Releases the free memory of pools that are neither symmetric nor a graph's, as an allocation does before it fails. Memory of a quota, and
/// memory that the driver does not take back, stays. It is an op of no symmetric pool, so one rank alone may call it. Waits for streams that
/// used the memory. `released_bytes` may be NULL.
///
/// # Safety
/// `allocator` is live; `released_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_trim_private(
    allocator: *mut DeviceAllocator,
    released_bytes: *mut u64,
) -> symmalloc_status {
    // SAFETY: the caller's contract, in both.
    unsafe { trimmed(released_bytes, || Ok(living(allocator)?.trim_private())) }
}

/// Runs a trim, and writes the number of bytes that it released: 0 in a forked child.
///
/// # Safety
/// `released_bytes` is NULL or valid for writing.
unsafe fn trimmed(released_bytes: *mut u64, trim: impl FnOnce() -> Result<u64, Error>) -> symmalloc_status {
    report(|| {
        let bytes = if is_forked() { 0 } else { trim()? };
        if released_bytes.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { write(released_bytes, "released_bytes", bytes) }
    })
}

/// Grants another device read and write access to the allocator's present and future memory.
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
