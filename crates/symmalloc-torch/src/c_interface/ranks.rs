//! Ranks that compare themselves, and what the watchdog is told of them.

use super::arguments::{hand_out_text, living, not_forked, not_null, required_text, write};
use crate::alignment::{self, Gathering, symmalloc_gather_fn};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::report;
use crate::registrations::{PoolRegistration, RankAnnouncement};
use crate::status::symmalloc_status;
use std::ffi::{c_char, c_void};

/// Compares this rank's history in symmetric pools with all other ranks'. Every rank calls it, at the same point of its program.
///
/// `SYMMALLOC_MISALIGNED` when they differ: on every rank, and the message names the first op that differs.
///
/// # Safety
/// `allocator` is live; `gather` does what its type says with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_agree(
    allocator: *mut DeviceAllocator,
    rank: u32,
    world: u32,
    gather: symmalloc_gather_fn,
    context: *mut c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, ranks) = unsafe { (living(allocator)?, Gathering::new(rank, world, gather, context)?) };
        alignment::compare_symmetric(allocator, &ranks)
    })
}

/// As `symmalloc_agree`, and then compares the heaps of all other pools, whose histories nobody keeps: the message names the
/// heaps that differ.
///
/// # Safety
/// As `symmalloc_agree`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_agree_all(
    allocator: *mut DeviceAllocator,
    rank: u32,
    world: u32,
    gather: symmalloc_gather_fn,
    context: *mut c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, ranks) = unsafe { (living(allocator)?, Gathering::new(rank, world, gather, context)?) };
        alignment::compare_symmetric(allocator, &ranks)?;
        alignment::compare_private(allocator, &ranks)
    })
}

/// Tells the watchdog of work that the program gives to a stream by itself and that all ranks of the registrar's communicator give
/// alike: a collective of the library that owns it. The program gives it to the stream after this and before
/// `symmalloc_announce_end`, in the same order on every rank. It is numbered among the communicator's collectives in flight records,
/// and has its deadline: a rank that does not come is named on stderr, in a flight record and at the next sync.
///
/// `kind` says what it is, and `elements` how large, as in flight records: the same on every rank; 0 where ranks may differ.
///
/// # Safety
/// The registrar is live; `kind` is a C string; `stream` is one of its device and lives as long as the registrar; `out` is valid for
/// writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_announce_begin(
    registrar: *mut PoolRegistration,
    kind: *const c_char,
    elements: u64,
    stream: *mut c_void,
    out: *mut *mut RankAnnouncement,
) -> symmalloc_status {
    report(|| {
        not_forked()?;
        not_null(out, "out")?;
        // SAFETY: the caller's contract.
        let registrar = unsafe { registrar.as_ref() }.ok_or(Error::Null { argument: "registrar" })?;
        // SAFETY: the caller's contract.
        let kind = unsafe { required_text(kind, "kind") }?;
        // SAFETY: the caller's contract.
        let announcement = unsafe { registrar.announce(kind, (elements > 0).then_some(elements), stream) }?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", Box::into_raw(Box::new(announcement))) }
    })
}

/// What was announced is in its stream, or the program failed to give it to it. NULL is no op.
///
/// # Safety
/// The announcement is live and not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_announce_end(announcement: *mut RankAnnouncement) -> symmalloc_status {
    report(|| {
        not_forked()?;
        if !announcement.is_null() {
            // SAFETY: the caller's contract; it came from `Box::into_raw`.
            drop(unsafe { Box::from_raw(announcement) });
        }
        Ok(())
    })
}

/// What this process knows of its communicators: the last collectives of each, how far it is with them, and what became of other
/// ranks. JSON, which `symmalloc diff` takes from all ranks. A record is also written when a communicator fails, and at the signal
/// that `SYMMALLOC_FLIGHT_SIGNAL` names. Free the text with `symmalloc_release_bytes`.
///
/// # Safety
/// `reason` is a C string; `json` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_flight_record(reason: *const c_char, json: *mut *mut c_char) -> symmalloc_status {
    report(|| {
        not_forked()?;
        // SAFETY: the caller's contract.
        let reason = unsafe { required_text(reason, "reason") }?;
        // SAFETY: the caller's contract.
        unsafe { hand_out_text(json, "json", &symmalloc_nccl::flight_record(reason).to_json()) }
    })
}
