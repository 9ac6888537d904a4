//! The C interface: what `include/symmalloc.h` declares. The functions behind PyTorch's are in `torch_entry.rs`.
//!
//! Each call checks its arguments, carries out one thing, and returns a status; no panic leaves it. What it writes through a
//! pointer it writes only when it succeeds.

use crate::alignment::{self, Gathering, symmalloc_gather_fn};
use crate::device::{DeviceAllocator, Tracing};
use crate::error::Error;
use crate::process;
use crate::registrations::PoolRegistration;
use crate::settings::Settings;
use crate::statistics;
use crate::status::{report, symmalloc_status};
use crate::streams::RawStream;
use crate::trace;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::time::Duration;

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

/// The library's version, as in its package.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Makes the allocator of a device. `conf` is a text as in SYMMALLOC_CONF; NULL: the defaults.
///
/// # Safety
/// `conf` is NULL or a C string; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_create(
    device: i32,
    conf: *const c_char,
    out: *mut *mut DeviceAllocator,
) -> symmalloc_status {
    report(|| {
        not_forked()?;
        let value = device.into();
        let wrong = |_| Error::Argument { argument: "device", value, expected: "a device number" };
        let ordinal = usize::try_from(device).map_err(wrong)?;
        // SAFETY: the caller's contract.
        let settings: Settings = unsafe { text(conf, "conf") }?.unwrap_or_default().parse()?;
        not_null(out, "out")?;
        process::watch_forks();
        let allocator = Box::into_raw(Box::new(DeviceAllocator::new(ordinal, settings, Tracing::OnRequest)?));
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", allocator) }
    })
}

/// Ends an allocator that `symmalloc_create` made. All of its memory goes back, live allocations included. NULL is no op.
///
/// # Safety
/// The allocator is used by nobody else and not after this; work on its memory is done; it has no registrar.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_destroy(allocator: *mut DeviceAllocator) -> symmalloc_status {
    report(|| {
        not_forked()?;
        if !allocator.is_null() {
            // SAFETY: the caller's contract; it came from `Box::into_raw`.
            drop(unsafe { Box::from_raw(allocator) });
        }
        Ok(())
    })
}

/// Allocates from a pool for work on a stream. Zero bytes are a null pointer.
///
/// # Safety
/// `allocator` is live; the stream is one of the device's primary context and lives as long as the allocator; `out` is valid for
/// writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_allocate(
    allocator: *mut DeviceAllocator,
    pool: u32,
    bytes: usize,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> symmalloc_status {
    // SAFETY: the caller's contract; no name.
    unsafe { symmalloc_allocate_named(allocator, pool, bytes, stream, std::ptr::null(), out) }
}

/// As `symmalloc_allocate`, with a name for snapshots and reports.
///
/// # Safety
/// As `symmalloc_allocate`; `name` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_allocate_named(
    allocator: *mut DeviceAllocator,
    pool: u32,
    bytes: usize,
    stream: *mut c_void,
    name: *const c_char,
    out: *mut *mut c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, name) = unsafe { (living(allocator)?, text(name, "name")?) };
        not_null(out, "out")?;
        let pool = allocator.known_pool(pool)?;
        // SAFETY: the caller's contract.
        let pointer = unsafe { allocator.allocate(pool, bytes as u64, RawStream::new(stream), name) }?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", pointer) }
    })
}

/// Frees an allocation: other work may use the memory at once, ordered behind this one's uses on the device. NULL is no op.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_free(allocator: *mut DeviceAllocator, pointer: *mut c_void) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| unsafe { living(allocator) }?.free(pointer))
}

/// Tells that work on another stream uses the allocation, too. Whoever takes the memory after the free waits for it on the
/// device.
///
/// # Safety
/// As `symmalloc_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_record_use(
    allocator: *mut DeviceAllocator,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| unsafe { living(allocator)?.record_use(pointer, RawStream::new(stream)) })
}

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
    report(|| unsafe { living(allocator) }?.destroy_pool(symmalloc_core::PoolId(pool)))
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
        let digest = unsafe { living(allocator) }?.allocator().digest(symmalloc_core::PoolId(pool))?;
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
        symmalloc_import::export::export_allocator(allocator.core(), &mut pickle)?;
        // SAFETY: the caller's contract.
        unsafe {
            write(len, "len", pickle.len())?;
            write(bytes, "bytes", copied(&pickle)?)
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
        trace::start(allocator, Path::new(path))
    })
}

/// Ends the recording. What was recorded is on disk then. Ending the allocator does the same.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_trace_stop(allocator: *mut DeviceAllocator) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| trace::stop(unsafe { living(allocator) }?))
}

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

/// Attaches a symmetric pool to a communicator that other code owns. Nothing is registered before the first sync. Every rank
/// of the communicator calls it. Anything that waits for other ranks ends after `deadline_ms` milliseconds; 0: NCCL's default
/// deadline of this library.
///
/// # Safety
/// `allocator` is live; `nccl_comm` is a live and ready `ncclComm_t` on its device, of the NCCL library of this process, which
/// lives until the registrar is destroyed and is not used by other threads while a call of this library uses it; `out` is valid
/// for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_create(
    allocator: *mut DeviceAllocator,
    pool: u32,
    nccl_comm: *mut c_void,
    deadline_ms: u32,
    out: *mut *mut PoolRegistration,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        not_null(out, "out")?;
        not_null(nccl_comm, "nccl_comm")?;
        let pool = allocator.known_pool(pool)?;
        let deadline = match deadline_ms {
            0 => symmalloc_nccl::Communicator::DEFAULT_DEADLINE,
            milliseconds => Duration::from_millis(milliseconds.into()),
        };
        // SAFETY: the caller's contract.
        let registration = unsafe { PoolRegistration::new(allocator, pool, nccl_comm, deadline) }?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", Box::into_raw(Box::new(registration))) }
    })
}

/// Registers new segments of the pool and deregisters dead ones, on every rank of the communicator, after the ranks have
/// compared what they did. Both counts may be NULL.
///
/// # Safety
/// The registrar is live; the counts are NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_sync(
    registrar: *mut PoolRegistration,
    registered: *mut u64,
    deregistered: *mut u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let registrar = unsafe { registrar.as_ref() }.ok_or(Error::Null { argument: "registrar" })?;
        let synced = registrar.sync()?;
        for (out, count) in [(registered, synced.registrations), (deregistered, synced.deregistrations)] {
            if !out.is_null() {
                // SAFETY: the caller's contract.
                unsafe { out.write(count) };
            }
        }
        Ok(())
    })
}

/// Deregisters everything, on every rank of the communicator, and lets go of it. NULL is no op. The registrar is gone also when
/// an error is returned.
///
/// # Safety
/// The registrar is live and not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_registrar_destroy(registrar: *mut PoolRegistration) -> symmalloc_status {
    report(|| {
        if registrar.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract; it came from `Box::into_raw`.
        unsafe { Box::from_raw(registrar) }.end()
    })
}

fn not_forked() -> Result<(), Error> {
    if process::is_forked() { Err(Error::Forked) } else { Ok(()) }
}

/// # Safety
/// The allocator is NULL or live for as long as the answer is used.
unsafe fn living<'a>(allocator: *mut DeviceAllocator) -> Result<&'a DeviceAllocator, Error> {
    not_forked()?;
    // SAFETY: the caller's contract.
    unsafe { allocator.as_ref() }.ok_or(Error::Null { argument: "allocator" })
}

/// # Safety
/// `text` is NULL or a C string that lives as long as the answer is used.
unsafe fn text<'a>(text: *const c_char, argument: &'static str) -> Result<Option<&'a str>, Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::NotText { argument })
}

/// # Safety
/// As [`text`].
pub(crate) unsafe fn required_text<'a>(c_text: *const c_char, argument: &'static str) -> Result<&'a str, Error> {
    // SAFETY: the caller's contract.
    unsafe { text(c_text, argument) }?.ok_or(Error::Null { argument })
}

fn not_null<T>(out: *mut T, argument: &'static str) -> Result<(), Error> {
    if out.is_null() { Err(Error::Null { argument }) } else { Ok(()) }
}

/// # Safety
/// `out` is NULL or valid for writing.
pub(crate) unsafe fn write<T>(out: *mut T, argument: &'static str, value: T) -> Result<(), Error> {
    if out.is_null() {
        return Err(Error::Null { argument });
    }
    // SAFETY: the caller's contract.
    unsafe { out.write(value) };
    Ok(())
}

/// # Safety
/// As [`write`].
unsafe fn hand_out_text(out: *mut *mut c_char, argument: &'static str, text: &str) -> Result<(), Error> {
    not_null(out, argument)?;
    let bytes = [text.as_bytes(), b"\0"].concat();
    // SAFETY: the caller's contract.
    unsafe { write(out, argument, copied(&bytes)?.cast()) }
}

/// A copy that C can free.
fn copied(bytes: &[u8]) -> Result<*mut u8, Error> {
    // SAFETY: any size may be asked for; one byte at least, so that null means no memory.
    let place = unsafe { libc::malloc(bytes.len().max(1)) }.cast::<u8>();
    if place.is_null() {
        return Err(Error::Size { size: bytes.len() as i64 });
    }
    // SAFETY: both places have that many bytes, and the new one overlaps nothing.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    Ok(place)
}
