//! Where things lie, what was counted, what was done.

use super::arguments::{copied, hand_out_text, living, not_null, required_text, write};
use crate::device::DeviceAllocator;
use crate::guard::report;
use crate::statistics;
use crate::status::symmalloc_status;
use crate::trace;
use std::ffi::{c_char, c_void};
use std::path::Path;
use symmalloc_core::PoolId;
use symmalloc_import::export::export_allocator;

/// Where an allocation lies. Equal on all ranks that ran the same program.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_placement {
    /// The pool.
    pub pool: u32,
    /// The stream of the heap, in the order of first use; `UINT32_MAX` where the pool's streams share.
    pub stream: u32,
    /// The segment, by birth ordinal in its heap.
    pub segment: u64,
    /// Bytes from the segment's first byte.
    pub offset_bytes: u64,
    /// Bytes that may be used: the request, rounded up.
    pub size_bytes: u64,
    /// Bytes that were asked for.
    pub requested_bytes: u64,
}

/// Where a live allocation lies.
///
/// # Safety
/// `allocator` is live; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_placement_of(
    allocator: *mut DeviceAllocator,
    pointer: *const c_void,
    out: *mut symmalloc_placement,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let found = unsafe { living(allocator) }?.find(pointer)?;
        let placement = symmalloc_placement {
            pool: found.pool.0,
            stream: found.position.stream.map_or(u32::MAX, |stream| stream.0.into()),
            segment: found.allocation.placement.segment.0.into(),
            offset_bytes: found.allocation.placement.offset_bytes,
            size_bytes: found.allocation.size_bytes,
            requested_bytes: found.requested_bytes,
        };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", placement) }
    })
}

/// Everything that is counted, as JSON. Free the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `allocator` is live; `json` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_stats_json(
    allocator: *mut DeviceAllocator,
    json: *mut *mut c_char,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let stats = statistics::as_json(unsafe { living(allocator) }?);
        // SAFETY: the caller's contract.
        unsafe { hand_out_text(json, "json", &stats.to_string()) }
    })
}

/// Starts all peaks anew at the current values.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_reset_peaks(allocator: *mut DeviceAllocator) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        unsafe { living(allocator) }?.reset_peaks();
        Ok(())
    })
}

/// The history of a pool as one number: equal on two ranks exactly when their ops and placements in it are.
///
/// # Safety
/// `allocator` is live; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_digest(
    allocator: *mut DeviceAllocator,
    pool: u32,
    out: *mut u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let digest = unsafe { living(allocator) }?.allocator().digest(PoolId(pool))?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", digest.value) }
    })
}

/// What the allocator holds now, as a pickle in the form of PyTorch's memory snapshots. Free the bytes with
/// `symmalloc_release_bytes`.
///
/// # Safety
/// `allocator` is live; `bytes` and `len` are valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_snapshot(
    allocator: *mut DeviceAllocator,
    bytes: *mut *mut u8,
    len: *mut usize,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        not_null(bytes, "bytes")?;
        not_null(len, "len")?;
        let mut pickle = Vec::new();
        export_allocator(allocator.core(), &mut pickle)?;
        let copy = copied(&pickle)?;
        // SAFETY: the caller's contract.
        unsafe {
            write(bytes, "bytes", copy)?;
            write(len, "len", pickle.len())
        }
    })
}

/// The live allocations, largest first, for people. Free the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `allocator` is live; `text` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_leak_report(
    allocator: *mut DeviceAllocator,
    text: *mut *mut c_char,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let leaks = unsafe { living(allocator) }?.core().leak_report();
        // SAFETY: the caller's contract.
        unsafe { hand_out_text(text, "text", &leaks.to_string()) }
    })
}

/// The settings as canonical text: every value that is set, defaults too. Free the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `allocator` is live; `text` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_config(allocator: *mut DeviceAllocator, text: *mut *mut c_char) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let settings = unsafe { living(allocator) }?.settings().to_string();
        // SAFETY: the caller's contract.
        unsafe { hand_out_text(text, "text", &settings) }
    })
}

/// Frees what another call handed out. NULL is no op.
///
/// # Safety
/// It was handed out by this library and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_release_bytes(bytes: *mut c_void) {
    // SAFETY: made by `copied`.
    unsafe { libc::free(bytes) };
}

/// Records every op from now on to a file, as text, or compressed where its name ends in `.zst` or `.gz`: what `symmalloc replay`
/// reads. Begin before the first allocation, while no other thread uses the allocator. Ops take longer meanwhile.
///
/// # Safety
/// `allocator` is live; `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_trace_start(
    allocator: *mut DeviceAllocator,
    path: *const c_char,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, path) = unsafe { (living(allocator)?, required_text(path, "path")?) };
        trace::start(allocator.allocator(), Path::new(path))
    })
}

/// Ends the recording. What was recorded is on disk then. Ending the allocator does the same.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_trace_stop(allocator: *mut DeviceAllocator) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| trace::stop(unsafe { living(allocator) }?.allocator()))
}
