//! An allocator and its memory.

use super::arguments::{living, not_forked, not_null, text, write};
use crate::device::{DeviceAllocator, Tracing};
use crate::error::Error;
use crate::guard::{release, release_or_defer, report};
use crate::handles::{hand_out, take_back};
use crate::process;
use crate::settings::TorchSettings;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::{c_char, c_void};

/// Returns the version of the library and its package.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Creates an allocator for a device. `conf` has the syntax of SYMMALLOC_CONF. NULL selects the defaults,
/// which stitch large blocks.
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
        let settings: TorchSettings = unsafe { text(conf, "conf") }?.unwrap_or_default().parse()?;
        not_null(out, "out")?;
        process::watch_forks();
        let allocator = DeviceAllocator::new(ordinal, settings, Tracing::OnRequest)?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", hand_out(allocator)) }
    })
}

/// Destroys an allocator of `symmalloc_create`, and releases all of its memory, including live allocations. NULL has no effect. Returns
/// `SYMMALLOC_INVALID_ARGUMENT` for any other pointer, such as an allocator of `symmalloc_process_allocator`, which the library owns.
///
/// # Safety
/// No other thread uses the allocator, and it is not used after this; work on its memory has completed; it has no registrar.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_destroy(allocator: *mut DeviceAllocator) -> symmalloc_status {
    release(|| take_back(allocator, "allocator").map(drop))
}

/// Allocates from a pool for work on a stream. Writes a null pointer for zero bytes.
///
/// # Safety
/// `allocator` is live; the stream is one of the device's primary context and lives as long as the allocator; `out` is valid for
/// writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_allocate(
    allocator: *mut DeviceAllocator,
    pool: u32,
    stream: *mut c_void,
    bytes: usize,
    out: *mut *mut c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        not_null(out, "out")?;
        let pool = allocator.known_pool(pool)?;
        // SAFETY: the caller's contract.
        let pointer = unsafe { allocator.allocate(pool, RawStream::new(stream), bytes as u64, None) }?;
        // SAFETY: the caller's contract, and it is not null.
        unsafe { out.write(pointer) };
        Ok(())
    })
}

/// Allocates as `symmalloc_allocate`, with a name for snapshots and reports.
///
/// # Safety
/// As `symmalloc_allocate`; `name` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_allocate_named(
    allocator: *mut DeviceAllocator,
    pool: u32,
    stream: *mut c_void,
    bytes: usize,
    name: *const c_char,
    out: *mut *mut c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, name) = unsafe { (living(allocator)?, text(name, "name")?) };
        not_null(out, "out")?;
        let pool = allocator.known_pool(pool)?;
        // SAFETY: the caller's contract.
        let pointer = unsafe { allocator.allocate(pool, RawStream::new(stream), bytes as u64, name) }?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", pointer) }
    })
}

/// Registers a stream in a new group. Without this call, a stream is registered at its first use: in the process's allocators, those of
/// the main thread and of autograd's threads form one group; in all other allocators, each stream forms a group. In pools with
/// `streams:grouped`, the streams of a group share memory. Returns `SYMMALLOC_INVALID_ARGUMENT` if the stream joined another group before.
///
/// # Safety
/// `allocator` is live; the stream is one of the device's primary context and lives as long as the allocator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_register_stream(
    allocator: *mut DeviceAllocator,
    stream: *mut c_void,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| unsafe { living(allocator)?.register_stream(RawStream::new(stream), None) })
}

/// Registers a stream in the group of another one, which is registered first if necessary. Returns `SYMMALLOC_INVALID_ARGUMENT` if the stream
/// has another group already: call it before the stream's first use.
///
/// # Safety
/// As `symmalloc_register_stream`, for both streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_register_stream_in(
    allocator: *mut DeviceAllocator,
    stream: *mut c_void,
    member: *mut c_void,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| unsafe { living(allocator)?.register_stream(RawStream::new(stream), Some(RawStream::new(member))) })
}

/// Frees an allocation without blocking. Its next user waits on the device for its recorded uses. NULL has no effect.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_free(allocator: *mut DeviceAllocator, pointer: *mut c_void) -> symmalloc_status {
    // SAFETY: the caller's contract.
    release_or_defer(move || unsafe { living(allocator) }?.free(pointer))
}

/// Records that work on another stream uses the allocation. After the free, the next user of the memory waits for that work on the
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
