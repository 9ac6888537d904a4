//! Pools that sleep and wake, and pools of which a part is given up.

use super::arguments::{living, required_text, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::report;
use crate::slept::{Slept, Woken};
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::{c_char, c_void};
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;

/// What becomes of the bytes in live allocations: they are copied to pinned host memory, and back.
pub const SYMMALLOC_CONTENTS_KEEP: u32 = 0;

/// What becomes of the bytes in live allocations: they are gone, and undefined after waking.
pub const SYMMALLOC_CONTENTS_DROP: u32 = 1;

/// What becomes of the bytes in live allocations: they are zero after waking.
pub const SYMMALLOC_CONTENTS_ZERO: u32 = 2;

/// The pool has its memory.
pub const SYMMALLOC_PHASE_AWAKE: u32 = 0;

/// The pool sleeps: it has no memory, and all of its addresses.
pub const SYMMALLOC_PHASE_ASLEEP: u32 = 1;

/// The pool sleeps, but the driver or a window holds some of its memory: another sleep tries to give that back, a wake uses it.
pub const SYMMALLOC_PHASE_FAILED: u32 = 2;

/// What a sleep did.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_slept {
    /// Bytes that went back to the device.
    pub released_bytes: u64,
    /// Bytes that were copied to the host.
    pub kept_bytes: u64,
    /// Windows and buffers that were taken away.
    pub deregistered: u64,
}

/// What a wake did.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_woken {
    /// Bytes that have memory again.
    pub remapped_bytes: u64,
    /// Windows and buffers that were made again.
    pub registered: u64,
    /// Windows that have another handle than before, on any rank: capture again what uses them.
    pub changed: u64,
    /// Communicators that ended since: register on new ones.
    pub lost: u64,
}

/// Puts a pool to sleep: its memory goes back to the device, and its addresses, allocations and graphs stay what they are, to be used when
/// it is awake again. Waits for the device. `contents` is one of `SYMMALLOC_CONTENTS_...`. Until it wakes nothing may use the pool's memory,
/// and no graph that uses it may be launched; allocating from it is an error, and freeing is not.
///
/// A pool with registrars sleeps on all ranks together: call it at the same point on every rank, once no collective in its windows is
/// running. Its windows go first. The ranks talk over the communicator with the most ranks, of those the one that was registered last; it
/// must have all ranks of all others. `out` may be NULL.
///
/// # Safety
/// `allocator` is live; `out` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_sleep(
    allocator: *mut DeviceAllocator,
    pool: u32,
    contents: u32,
    out: *mut symmalloc_slept,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let slept = unsafe { living(allocator) }?.sleep(PoolId(pool), contents_of(contents)?)?;
        // SAFETY: the caller's contract.
        unsafe { tell(out, slept_of(slept)) };
        Ok(())
    })
}

/// Wakes a pool: it has memory at the addresses that it had, with what was kept. `SYMMALLOC_OUT_OF_MEMORY` where the device has no
/// room: it sleeps on, nothing is lost, and another call may succeed. A pool with registrars wakes on all ranks or on none, and has its
/// windows again. `out` may be NULL.
///
/// # Safety
/// As `symmalloc_sleep`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_wake(
    allocator: *mut DeviceAllocator,
    pool: u32,
    out: *mut symmalloc_woken,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let woken = unsafe { living(allocator) }?.wake(PoolId(pool))?;
        // SAFETY: the caller's contract.
        unsafe { tell(out, woken_of(woken)) };
        Ok(())
    })
}

/// As `symmalloc_sleep`, for the pools whose configuration has the tag (`tag:weights`), in the order in which they were made. When one of
/// them fails, those before it sleep: another call goes on. `SYMMALLOC_UNKNOWN_POOL` when there are none.
///
/// # Safety
/// As `symmalloc_sleep`; `tag` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_sleep_tagged(
    allocator: *mut DeviceAllocator,
    tag: *const c_char,
    contents: u32,
    out: *mut symmalloc_slept,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, tag) = unsafe { (living(allocator)?, required_text(tag, "tag")?) };
        let slept = allocator.sleep_tagged(tag, contents_of(contents)?)?;
        // SAFETY: the caller's contract.
        unsafe { tell(out, slept_of(slept)) };
        Ok(())
    })
}

/// As `symmalloc_wake`, for the pools whose configuration has the tag, in the order in which they were made. When one of them fails, those
/// before it are awake: another call goes on. `SYMMALLOC_UNKNOWN_POOL` when there are none.
///
/// # Safety
/// As `symmalloc_sleep`; `tag` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_wake_tagged(
    allocator: *mut DeviceAllocator,
    tag: *const c_char,
    out: *mut symmalloc_woken,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, tag) = unsafe { (living(allocator)?, required_text(tag, "tag")?) };
        let woken = allocator.wake_tagged(tag)?;
        // SAFETY: the caller's contract.
        unsafe { tell(out, woken_of(woken)) };
        Ok(())
    })
}

/// Whether a pool is awake: writes one of `SYMMALLOC_PHASE_...`.
///
/// # Safety
/// `allocator` is live; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_phase(
    allocator: *mut DeviceAllocator,
    pool: u32,
    out: *mut u32,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let phase = match unsafe { living(allocator) }?.phase(PoolId(pool))? {
            Phase::Awake => SYMMALLOC_PHASE_AWAKE,
            Phase::Asleep => SYMMALLOC_PHASE_ASLEEP,
            Phase::Failed => SYMMALLOC_PHASE_FAILED,
        };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", phase) }
    })
}

/// Makes a pool with a quota hold so many bytes, rounded up to granules: no more and no less, whatever is allocated and freed in it until
/// the next call. A pool has a quota where it was made with `growth_mb:0,streams:shared`; `range_mb` is the most that it can hold. It holds
/// nothing at first. Live allocations stay where they are; `SYMMALLOC_INVALID_STATE` when they need more than that, and then the pool is as
/// it was. A pool that gets smaller waits for the streams that used its free memory. `held_bytes` may be NULL.
///
/// # Safety
/// As `symmalloc_allocate`; `held_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_resize(
    allocator: *mut DeviceAllocator,
    pool: u32,
    stream: *mut c_void,
    bytes: usize,
    held_bytes: *mut u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        let pool = allocator.known_pool(pool)?;
        // SAFETY: the caller's contract.
        let held = unsafe { allocator.resize(pool, RawStream::new(stream), bytes as u64) }?;
        // SAFETY: the caller's contract.
        unsafe { tell(held_bytes, held) };
        Ok(())
    })
}

/// Obtains pinned host memory for what pools will keep while they sleep, so that the first sleep does not: that takes much longer than
/// copying.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_reserve_host_memory(
    allocator: *mut DeviceAllocator,
    bytes: usize,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| Ok(unsafe { living(allocator) }?.allocator().reserve_host_memory(bytes as u64)?))
}

/// Gives pinned host memory back that no sleeping pool needs. `released_bytes` may be NULL.
///
/// # Safety
/// `allocator` is live; `released_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_release_host_memory(
    allocator: *mut DeviceAllocator,
    released_bytes: *mut u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let bytes = unsafe { living(allocator) }?.allocator().release_host_memory()?;
        // SAFETY: the caller's contract.
        unsafe { tell(released_bytes, bytes) };
        Ok(())
    })
}

fn contents_of(contents: u32) -> Result<Contents, Error> {
    match contents {
        SYMMALLOC_CONTENTS_KEEP => Ok(Contents::Keep),
        SYMMALLOC_CONTENTS_DROP => Ok(Contents::Drop),
        SYMMALLOC_CONTENTS_ZERO => Ok(Contents::Zero),
        value => {
            let expected = "one of SYMMALLOC_CONTENTS_KEEP, _DROP and _ZERO";
            Err(Error::Argument { argument: "contents", value: value.into(), expected })
        }
    }
}

fn slept_of(slept: Slept) -> symmalloc_slept {
    let Slept { released_bytes, kept_bytes, deregistered } = slept;
    symmalloc_slept { released_bytes, kept_bytes, deregistered }
}

fn woken_of(woken: Woken) -> symmalloc_woken {
    let Woken { remapped_bytes, registered, changed, lost } = woken;
    symmalloc_woken { remapped_bytes, registered, changed, lost }
}

/// # Safety
/// `out` is NULL or valid for writing.
unsafe fn tell<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller's contract.
        unsafe { out.write(value) };
    }
}
