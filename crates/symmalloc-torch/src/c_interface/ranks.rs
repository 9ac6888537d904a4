//! Comparison of ranks, announcements to the watchdog and flight records.

use super::arguments::{hand_out_text, living, not_forked, not_null, required_text, write};
use crate::alignment::{self, Gathering, symmalloc_gather_fn};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::{release, report};
use crate::handles::{hand_out, take_back};
use crate::registrations::{PoolRegistration, RankAnnouncement};
use crate::status::symmalloc_status;
use std::ffi::{c_char, c_void};

/// Compares this rank's history in symmetric pools with the histories of all other ranks. Every rank calls this function at the same point
/// of the program.
///
/// Returns `SYMMALLOC_MISALIGNED` on every rank if histories differ. The message names the first op that differs.
///
/// # Safety
/// `allocator` is live; `gather` meets the contract of its type with `context`.
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

/// Compares symmetric pools like `symmalloc_agree`, and then the heaps of all other pools. The other pools keep no history, so for them the
/// message names only the heaps that differ, not the op.
///
/// # Safety
/// Same as for `symmalloc_agree`.
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

/// Announces to the watchdog a collective that the program itself submits on all ranks of the registrar's communicator. The program submits
/// the collective to the stream after this call and before `symmalloc_announce_end`, in the same order on every rank. In flight records, it
/// counts as one of the communicator's collectives, and it has the communicator's deadline. If a rank misses the deadline, a message on
/// standard error, a flight record and the error of the next sync name that rank.
///
/// `kind` and `elements` are the collective's name and size in flight records. Both must be equal on every rank. If the size may differ
/// between ranks, pass 0 as `elements`.
///
/// # Safety
/// The registrar is live; `kind` is a C string; `stream` belongs to its device and lives as long as the registrar; `out` is valid for
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
        unsafe { write(out, "out", hand_out(announcement)) }
    })
}

/// Ends an announcement. Call it after the program has submitted the collective, or has failed to submit it. NULL has no effect.
///
/// # Safety
/// The announcement is live and not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_announce_end(announcement: *mut RankAnnouncement) -> symmalloc_status {
    release(|| take_back(announcement, "announcement").map(drop))
}

/// Writes a flight record as JSON: the last collectives of each communicator, their progress, and the state of other ranks. The command
/// `symmalloc diff` compares the records of all ranks. The watchdog also writes such a record if a communicator fails, and on the signal
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
