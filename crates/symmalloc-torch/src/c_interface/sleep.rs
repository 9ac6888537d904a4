//! Sleep, wake and resize of pools.

use super::arguments::{living, not_null, required_text, write};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::report;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::{c_char, c_void};
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{DeviceMemory, ImageStorage, SavedBytes};
use symmalloc_files::is_forked;
use symmalloc_nccl::{Slept, Woken};

/// `contents` of a sleep: the contents of live allocations are copied to the pool's storage on the host, and restored on wake.
pub const SYMMALLOC_CONTENTS_KEEP: u32 = 0;

/// `contents` of a sleep: the contents of live allocations are discarded, and are undefined after the wake.
pub const SYMMALLOC_CONTENTS_DROP: u32 = 1;

/// `contents` of a sleep: the contents of live allocations are discarded, and are zero after the wake.
pub const SYMMALLOC_CONTENTS_ZERO: u32 = 2;

/// The pool is awake: it has its memory.
pub const SYMMALLOC_PHASE_AWAKE: u32 = 0;

/// The pool sleeps: it has no memory, but keeps its addresses.
pub const SYMMALLOC_PHASE_ASLEEP: u32 = 1;

/// The pool sleeps, but the driver or a window still holds some memory. Another sleep tries again to release that memory. A wake reuses
/// that memory. A registered pool, however, must sleep again before it can wake.
pub const SYMMALLOC_PHASE_HELD: u32 = 2;

/// The result of a sleep.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_slept {
    /// Bytes released to the device.
    pub released_bytes: u64,
    /// Bytes copied to the host.
    pub kept_bytes: u64,
    /// Windows and buffers that were deregistered.
    pub deregistrations: u64,
    /// Bytes that NCCL released because communicators were suspended.
    pub suspended_bytes: u64,
}

/// The result of a wake.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_woken {
    /// Bytes that were mapped to memory again.
    pub remapped_bytes: u64,
    /// Windows and buffers that were registered again.
    pub registrations: u64,
    /// Windows whose handle changed on any rank. Recapture graphs that use them.
    pub changed: u64,
    /// Communicators that failed during the sleep. Register the pool on new communicators.
    pub lost: u64,
    /// Communicators that were resumed.
    pub resumed: u64,
}

/// The used memory of a device in bytes, by owner. The parts add up to `used_bytes`, unless memory is allocated or released during the
/// call.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_memory {
    /// Bytes in use by all processes, as the driver reports them.
    pub used_bytes: u64,
    /// Bytes of awake pools, including their free blocks, except for those in `graph_bytes`.
    pub awake_bytes: u64,
    /// Bytes of awake mempools: graphs' pools and PyTorch's `MemPool`s.
    pub graph_bytes: u64,
    /// Bytes that sleeping pools still hold, because the driver or a window did not release them.
    pub asleep_bytes: u64,
    /// Bytes of sleeping pools that other processes have mapped, or that a dma-buf holds.
    pub exported_bytes: u64,
    /// Bytes of idle chunks and of prefetched memory.
    pub idle_bytes: u64,
    /// Bytes that NCCL holds for the communicators of registrars. 0 if NCCL is older than 2.29.7.
    pub communicators_bytes: u64,
    /// All other bytes: contexts and their modules, other libraries, other allocators and other processes.
    pub other_bytes: u64,
}

/// Puts a pool to sleep: releases its memory to the device, and keeps its addresses, allocations and graphs for use after the wake.
/// Blocks until the device is idle. `contents` is one of `SYMMALLOC_CONTENTS_...`. Until the pool wakes, no work may use its memory, and
/// no graph that uses it may be launched. Allocating from the pool is an error; freeing is allowed.
///
/// A pool with registrars sleeps on all ranks together: call this at the same point on every rank, when no collective in its windows is
/// running. The call first deregisters the windows. The ranks communicate over the pool's communicator with the most ranks, which must
/// include the ranks of all its other communicators. If several communicators have the most ranks, the one that was registered last is
/// used. `out` may be NULL.
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
        unsafe { write_out(out, slept_of(&slept)) };
        Ok(())
    })
}

/// Puts a pool to sleep like `symmalloc_sleep`, and then suspends the communicators of its registrars: NCCL releases the communicators'
/// memory until the next sleep or wake of the pool, which resumes them. Until then, neither this library nor the program may use the
/// communicators, and no graph with their collectives may be launched. Returns `SYMMALLOC_INVALID_STATE`, and leaves the pool awake, if
/// NCCL is older than 2.29.7 or if an awake pool is registered on one of the communicators. To suspend communicators of several pools, call
/// `symmalloc_suspend` once all of these pools sleep.
///
/// If the pool has no registrars, the call only puts it to sleep. Wake the pool before its registrars or communicators are destroyed. `out`
/// may be NULL.
///
/// # Safety
/// Same as for `symmalloc_sleep`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_sleep_and_suspend(
    allocator: *mut DeviceAllocator,
    pool: u32,
    contents: u32,
    out: *mut symmalloc_slept,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let slept = unsafe { living(allocator) }?.sleep_and_suspend(PoolId(pool), contents_of(contents)?)?;
        // SAFETY: the caller's contract.
        unsafe { write_out(out, slept_of(&slept)) };
        Ok(())
    })
}

/// Suspends the communicators of all registered pools that sleep, like `symmalloc_sleep_and_suspend`. If a sleeping pool shares a
/// communicator with an awake pool, none of the sleeping pool's communicators are suspended. Communicators that are already suspended stay
/// so. All ranks call this function at the same point. Returns `SYMMALLOC_INVALID_STATE` if NCCL is older than 2.29.7. `suspended_bytes`
/// may be NULL.
///
/// # Safety
/// `allocator` is live; `suspended_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_suspend(
    allocator: *mut DeviceAllocator,
    suspended_bytes: *mut u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let bytes = unsafe { living(allocator) }?.suspend()?;
        // SAFETY: the caller's contract.
        unsafe { write_out(suspended_bytes, bytes) };
        Ok(())
    })
}

/// Writes the used memory of the device by owner, for example to see what remains on the device while pools sleep. Waits for NCCL calls of
/// other threads.
///
/// # Safety
/// `allocator` is live; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_device_memory(
    allocator: *mut DeviceAllocator,
    out: *mut symmalloc_memory,
) -> symmalloc_status {
    report(|| {
        not_null(out, "out")?;
        // SAFETY: the caller's contract.
        let memory = memory_of(unsafe { living(allocator) }?.device_memory()?);
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", memory) }
    })
}

/// Wakes a pool at its previous addresses, and restores the kept contents. Returns `SYMMALLOC_OUT_OF_MEMORY` if the device lacks memory.
/// The pool then stays asleep and keeps its contents, and the wake can be retried. A pool with registrars wakes on all ranks or on none,
/// and its windows are registered again. `out` may be NULL.
///
/// # Safety
/// Same as for `symmalloc_sleep`.
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
        unsafe { write_out(out, woken_of(&woken)) };
        Ok(())
    })
}

/// Puts the pools whose configuration has the tag (such as `tag:weights`) to sleep, like `symmalloc_sleep`, in the order of their ids. If a
/// pool fails, the pools before it stay asleep, and another call continues with the rest. Returns `SYMMALLOC_UNKNOWN_POOL` if no pool has
/// the tag.
///
/// # Safety
/// Same as for `symmalloc_sleep`; `tag` is a C string.
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
        unsafe { write_out(out, slept_of(&slept)) };
        Ok(())
    })
}

/// Wakes the pools whose configuration has the tag, like `symmalloc_wake`, in the order of their ids. If a pool fails, the pools before it
/// stay awake, and another call continues with the rest. Returns `SYMMALLOC_UNKNOWN_POOL` if no pool has the tag.
///
/// # Safety
/// Same as for `symmalloc_sleep`; `tag` is a C string.
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
        unsafe { write_out(out, woken_of(&woken)) };
        Ok(())
    })
}

/// Writes the sleep state of a pool, which is one of `SYMMALLOC_PHASE_...`.
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
            Phase::Held => SYMMALLOC_PHASE_HELD,
        };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", phase) }
    })
}

/// Sets the memory of a pool with a quota to `bytes`, rounded up to granules. The size is fixed until the next call. A pool created with
/// `growth_mb:0,streams:shared` has a quota; `range_mb` is its maximum. Such a pool starts empty. Live allocations stay in place. If they
/// need more memory than `bytes`, the call returns `SYMMALLOC_INVALID_STATE` and leaves the pool unchanged. When a pool shrinks, the call
/// waits for the streams that used the pool's free memory. `reserved_bytes` may be NULL.
///
/// # Safety
/// Same as for `symmalloc_allocate`; `reserved_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_resize(
    allocator: *mut DeviceAllocator,
    pool: u32,
    stream: *mut c_void,
    bytes: usize,
    reserved_bytes: *mut u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        let pool = allocator.known_pool(pool)?;
        // SAFETY: the caller's contract.
        let reserved = unsafe { allocator.resize(pool, RawStream::new(stream), bytes as u64) }?;
        // SAFETY: the caller's contract.
        unsafe { write_out(reserved_bytes, reserved) };
        Ok(())
    })
}

/// Reserves pinned host memory for the kept contents of sleeping pools, so that the first sleep does not have to reserve it. Reserving
/// takes much longer than copying.
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

/// Releases pinned host memory that contains no saved contents. `released_bytes` may be NULL.
///
/// # Safety
/// `allocator` is live; `released_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_release_host_memory(
    allocator: *mut DeviceAllocator,
    released_bytes: *mut u64,
) -> symmalloc_status {
    report(|| {
        let bytes = match is_forked() {
            true => 0,
            // SAFETY: the caller's contract.
            false => unsafe { living(allocator) }?.allocator().release_host_memory()?,
        };
        // SAFETY: the caller's contract.
        unsafe { write_out(released_bytes, bytes) };
        Ok(())
    })
}

/// `storage` of saved contents: pinned host memory.
pub const SYMMALLOC_STORAGE_PINNED: u32 = 0;

/// `storage` of saved contents: pageable host memory, which returns to the system when the pool wakes.
pub const SYMMALLOC_STORAGE_PAGEABLE: u32 = 1;

/// `storage` of saved contents: an unnamed file, which disappears with the process and is verified when it is read.
pub const SYMMALLOC_STORAGE_FOLDER: u32 = 2;

/// Sets the storage for a pool's saved contents, from its next sleep on. `storage` is one of `SYMMALLOC_STORAGE_...`; `folder` is the
/// folder of the file, and must be NULL for all other kinds of storage. A sleep returns `SYMMALLOC_IO` if the folder does not exist or its
/// disk is full, and leaves the pool awake. A wake returns `SYMMALLOC_IO` if the file was modified, and leaves the pool asleep.
///
/// # Safety
/// `allocator` is live; `folder` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_save_in(
    allocator: *mut DeviceAllocator,
    pool: u32,
    storage: u32,
    folder: *const c_char,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        let storage = match storage {
            SYMMALLOC_STORAGE_PINNED => ImageStorage::Pinned,
            SYMMALLOC_STORAGE_PAGEABLE => ImageStorage::Pageable,
            // SAFETY: the caller's contract.
            SYMMALLOC_STORAGE_FOLDER => ImageStorage::Folder(unsafe { required_text(folder, "folder") }?.into()),
            value => {
                let expected = "one of SYMMALLOC_STORAGE_PINNED, _PAGEABLE and _FOLDER";
                return Err(Error::Argument { argument: "storage", value: value.into(), expected });
            }
        };
        allocator.phase(PoolId(pool))?;
        allocator.allocator().save_in(PoolId(pool), storage);
        Ok(())
    })
}

/// Sets whether a pool's saved contents stay in host memory after its next wake. With 0, the wake releases them. Retained contents remain
/// readable, and the next sleep reuses their memory. Files are never retained.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_retain_saved(
    allocator: *mut DeviceAllocator,
    pool: u32,
    retain: u32,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        allocator.phase(PoolId(pool))?;
        allocator.allocator().retain_saved(PoolId(pool), retain != 0);
        Ok(())
    })
}

/// Writes the host address of the saved contents of the `bytes` bytes at `pointer`, or NULL if there are none. Saved contents exist while a
/// pool sleeps and, if they are retained, after it wakes. The address is valid until the pool sleeps, wakes or is destroyed. Returns
/// `SYMMALLOC_INVALID_STATE` if the contents are in a file or not contiguous: copy them with `symmalloc_saved_copy`.
///
/// # Safety
/// `allocator` is live; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_saved_pointer(
    allocator: *mut DeviceAllocator,
    pointer: *const c_void,
    bytes: usize,
    out: *mut *const c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let found = unsafe { living(allocator) }?.allocator().saved_at(pointer as u64, bytes as u64);
        let address = match found {
            None => std::ptr::null(),
            Some(SavedBytes::Contiguous(address)) => address.cast(),
            Some(SavedBytes::Scattered) => return Err(Error::Scattered),
        };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", address) }
    })
}

/// Copies the saved contents of the `bytes` bytes at `pointer` to host memory. Writes 1 to `found`, or 0 if there are no saved contents.
/// Returns `SYMMALLOC_IO` if the contents are in a file that cannot be read or was modified.
///
/// # Safety
/// `allocator` is live; `to` is valid for writing `bytes` bytes; `found` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_saved_copy(
    allocator: *mut DeviceAllocator,
    pointer: *const c_void,
    bytes: usize,
    to: *mut c_void,
    found: *mut u32,
) -> symmalloc_status {
    report(|| {
        if to.is_null() {
            return Err(Error::Null { argument: "to" });
        }
        // No memory is larger than `isize::MAX`, so `to` cannot be valid for more.
        if isize::try_from(bytes).is_err() {
            let expected = "at most the size of the memory at `to`";
            return Err(Error::Argument { argument: "bytes", value: i64::MAX, expected });
        }
        // SAFETY: the caller's contract.
        let (allocator, to) = unsafe { (living(allocator)?, std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes)) };
        let is_found = allocator.allocator().copy_saved(pointer as u64, to).map_err(Error::Saved)?;
        // SAFETY: the caller's contract.
        unsafe { write(found, "found", u32::from(is_found)) }
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

fn slept_of(slept: &Slept) -> symmalloc_slept {
    symmalloc_slept {
        released_bytes: slept.memory.released_bytes,
        kept_bytes: slept.memory.kept_bytes,
        deregistrations: slept.deregistrations,
        suspended_bytes: slept.suspended_bytes,
    }
}

fn woken_of(woken: &Woken) -> symmalloc_woken {
    symmalloc_woken {
        remapped_bytes: woken.memory.remapped_bytes,
        registrations: woken.registrations,
        changed: woken.changed.len() as u64,
        lost: woken.lost.len() as u64,
        resumed: woken.resumed.len() as u64,
    }
}

fn memory_of(memory: DeviceMemory) -> symmalloc_memory {
    symmalloc_memory {
        used_bytes: memory.used_bytes,
        awake_bytes: memory.awake_bytes,
        graph_bytes: memory.graph_bytes,
        asleep_bytes: memory.asleep_bytes,
        exported_bytes: memory.exported_bytes,
        idle_bytes: memory.idle_bytes,
        communicators_bytes: memory.communicators_bytes,
        other_bytes: memory.other_bytes,
    }
}

/// # Safety
/// `out` is NULL or valid for writing.
unsafe fn write_out<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller's contract.
        unsafe { out.write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_a_sleep_and_a_wake_has_its_own_field() {
        let mut slept = Slept::default();
        (slept.memory.released_bytes, slept.memory.kept_bytes) = (1, 2);
        (slept.deregistrations, slept.suspended_bytes) = (3, 4);
        let expected = symmalloc_slept { released_bytes: 1, kept_bytes: 2, deregistrations: 3, suspended_bytes: 4 };
        assert_eq!(slept_of(&slept), expected);
        let mut woken = Woken::default();
        (woken.memory.remapped_bytes, woken.registrations) = (4, 5);
        woken.lost = vec!["lost".to_owned(); 2];
        woken.resumed = vec!["resumed".to_owned(); 3];
        let expected = symmalloc_woken { remapped_bytes: 4, registrations: 5, changed: 0, lost: 2, resumed: 3 };
        assert_eq!(woken_of(&woken), expected);
    }
}
