//! Placements, statistics, snapshots and traces.

use super::arguments::{copied, hand_out_text, living, not_null, required_text, write};
use crate::device::DeviceAllocator;
use crate::guard::{release, report};
use crate::statistics;
use crate::status::symmalloc_status;
use crate::trace;
use std::ffi::{c_char, c_void};
use std::path::Path;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::{DeviceAddress, PoolId};
use symmalloc_import::export::export_allocator;
use symmalloc_watchdog::MemoryRecord;

/// The position of an allocation. Equal on all ranks that ran the same program.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_placement {
    /// The pool.
    pub pool: u32,
    /// The stream of the heap, numbered in order of first use. If the streams of a group share the heap, the number of the first of them
    /// plus 65,536. If all streams of the pool share it, `UINT32_MAX`.
    pub stream: u32,
    /// The segment, by birth ordinal in its heap.
    pub segment: u64,
    /// The offset from the segment's first byte.
    pub offset_bytes: u64,
    /// Usable bytes: the requested size, rounded up.
    pub size_bytes: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
}

/// Writes the position of a live allocation.
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
            stream: found.position.heap.group.code(),
            segment: found.allocation.placement.segment.0.into(),
            offset_bytes: found.allocation.placement.offset_bytes,
            size_bytes: found.allocation.size_bytes,
            requested_bytes: found.requested_bytes,
        };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", placement) }
    })
}

/// Writes all counters as JSON. Free the text with `symmalloc_release_bytes`.
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

/// Resets all peaks to the current values.
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

/// Writes the digest of a pool's history, which is equal on two ranks exactly when their ops and placements in the pool are equal.
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

/// Writes a pickle of the allocator's memory in the format of PyTorch's memory snapshots. Free the bytes with
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

/// Checks the memory of pools with the debugging options `canary` and `poison`, and writes the number of checked guards. Waits for the
/// streams of their allocations. Without these options, checks nothing. See `docs/memory-errors.md`.
///
/// Returns `SYMMALLOC_INVALID_STATE` if memory was damaged; the error names the allocation. Each damage is returned once.
///
/// # Safety
/// `allocator` is live; `checked` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_check_memory(
    allocator: *mut DeviceAllocator,
    checked: *mut u64,
) -> symmalloc_status {
    report(|| {
        not_null(checked, "checked")?;
        // SAFETY: the caller's contract.
        let guards = unsafe { living(allocator) }?.core().check_memory()?;
        // SAFETY: the caller's contract.
        unsafe { write(checked, "checked", guards) }
    })
}

/// Writes what the allocator knows about a device address: the allocation that contains it, its neighbors, and, in pools with debugging
/// options, freed allocations that contained it. The address need not be valid. Free the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `allocator` is live; `text` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_explain_address(
    allocator: *mut DeviceAllocator,
    address: u64,
    text: *mut *mut c_char,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let explained = unsafe { living(allocator) }?.core().explain_address(DeviceAddress(address));
        // SAFETY: the caller's contract.
        unsafe { hand_out_text(text, "text", &explained.to_string()) }
    })
}

/// Writes the live allocations, and those that were freed in pools with debugging options, as a JSON array: the key `memory` of a flight
/// record, for `symmalloc address`. Free the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `allocator` is live; `json` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_memory_record(
    allocator: *mut DeviceAllocator,
    json: *mut *mut c_char,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let records = memory_records(unsafe { living(allocator) }?);
        let text = serde_json::to_string(&records).expect("the records contain only strings and numbers");
        // SAFETY: the caller's contract.
        unsafe { hand_out_text(json, "json", &text) }
    })
}

fn memory_records(allocator: &DeviceAllocator) -> Vec<MemoryRecord> {
    let (core, device) = (allocator.core(), allocator.ordinal() as u32);
    let freed = core.freed_last(usize::MAX);
    let freed = freed.iter().rev().map(|freed| MemoryRecord {
        device,
        address: freed.address.0,
        size_bytes: freed.requested_bytes,
        name: freed.name.as_deref().map(str::to_owned),
        pool: freed.pool.0,
        stream: freed.stream.0,
        used_by: Vec::new(),
        allocated_at_op: Some(freed.allocated_at_op),
        freed_at_op: freed.freed_at_op,
    });
    let live = core.snapshot().segments.into_iter().flat_map(|segment| {
        let (base, pool) = (segment.base.0, segment.heap.pool.0);
        segment.blocks.into_iter().filter_map(move |block| match block.state {
            BlockStateSnapshot::Allocated { stream, requested_bytes, name, used_by } => Some(MemoryRecord {
                device,
                address: base + block.offset_bytes,
                size_bytes: requested_bytes,
                name: name.as_deref().map(str::to_owned),
                pool,
                stream: stream.0,
                used_by: used_by.iter().map(|stream| stream.0).collect(),
                allocated_at_op: None,
                freed_at_op: None,
            }),
            _ => None,
        })
    });
    freed.chain(live).collect()
}

/// Writes a readable list of the live allocations, largest first. Free the text with `symmalloc_release_bytes`.
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

/// Writes the canonical text of the settings, including defaults. Free the text with `symmalloc_release_bytes`.
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

/// Frees a text or bytes that another call wrote. NULL has no effect.
///
/// # Safety
/// The pointer came from this library, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_release_bytes(bytes: *mut c_void) {
    // SAFETY: the pointer came from `copied`.
    unsafe { libc::free(bytes) };
}

/// Records every later op to a file for `symmalloc replay`: as text, or compressed if its name ends in `.zst` or `.gz`. Call it before
/// the first allocation, while no other thread uses the allocator. Recording slows ops down.
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

/// Ends the recording and writes the rest of it to disk. Destroying the allocator does the same.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_trace_stop(allocator: *mut DeviceAllocator) -> symmalloc_status {
    // SAFETY: the caller's contract.
    release(|| trace::stop(unsafe { living(allocator) }?.allocator()))
}
