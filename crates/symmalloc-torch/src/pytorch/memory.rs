//! Allocation and free, and PyTorch's calls for caches and limits.

use crate::c_interface::arguments::{not_null, write};
use crate::device::{DeviceAllocator, Target};
use crate::error::Error;
use crate::guard::{free_or_defer, guarded, report};
use crate::mempools::PoolTarget;
use crate::process;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::{CStr, c_char, c_void};
use symmalloc_core::PoolId;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::config::SegmentPolicy;
use symmalloc_cuda::CudaError;
use symmalloc_files::is_forked;

/// Allocates for work on a stream, from the pool of the innermost scope. Writes a null pointer for zero bytes.
///
/// `inherited` is the number of a scope of the thread on whose behalf this thread works, as in a backward pass, or 0. `name` is for traces,
/// snapshots and reports, or NULL. A name that the thread pushed takes precedence. Invalid UTF-8 in the name is replaced. Exceptions of the
/// filters of open scopes propagate.
///
/// # Safety
/// The stream is one of the device's primary context and lives as long as the process; `name` is NULL or a C string; `out` is valid for
/// writing.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_allocate(
    device: i32,
    stream: *mut c_void,
    bytes: usize,
    inherited: u64,
    name: *const c_char,
    out: *mut *mut c_void,
) -> symmalloc_status {
    let (size_bytes, stream) = (bytes as u64, RawStream::new(stream));
    if out.is_null() {
        return report(|| not_null(out, "out"));
    }
    if name.is_null() && process::existing(device).is_none_or(|allocator| !allocator.scopes().any()) {
        return report(|| {
            let allocator = process::allocator(device)?;
            // SAFETY: the caller's contract.
            let pointer = match unsafe { allocator.allocate(PoolId::DEFAULT, stream, size_bytes, None) } {
                Ok(pointer) => pointer,
                // SAFETY: the caller's contract.
                Err(error) => unsafe { retry_from_helpers(allocator, stream, size_bytes, error) }?,
            };
            // SAFETY: the caller's contract, and it is not null.
            unsafe { out.write(pointer) };
            Ok(())
        });
    }
    let status = report(|| process::allocator(device).map(drop));
    let Some(allocator) = process::existing(device) else { return status };
    let pushed = allocator.scopes().name();
    // SAFETY: the caller's contract.
    let given = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy());
    let name = pushed.as_deref().or(given.as_deref());
    // SAFETY: the caller's contract.
    let allocate = |target| unsafe { allocate(allocator, target, stream, size_bytes, name) };
    // This is outside the guard, because a PyTorch filter may throw.
    let allocated = allocator.allocate_in_scope(stream, (inherited > 0).then_some(inherited), allocate);
    // SAFETY: the caller's contract.
    report(|| unsafe { write(out, "out", allocated?) })
}

/// # Safety
/// As [`symmalloc_torch_allocate`].
#[cold]
unsafe fn allocate(
    allocator: &DeviceAllocator,
    target: Target,
    stream: RawStream,
    size_bytes: u64,
    name: Option<&str>,
) -> Result<*mut c_void, Error> {
    let is_default = matches!(target, PoolTarget::Own(PoolId::DEFAULT));
    // SAFETY: the caller's contract.
    match unsafe { allocator.allocate_at(target, stream, size_bytes, name) } {
        // SAFETY: the caller's contract.
        Err(error) if is_default => unsafe { retry_from_helpers(allocator, stream, size_bytes, error) },
        outcome => outcome,
    }
}

/// Allocates after a failure from helper pools, if memory was short.
///
/// # Safety
/// As [`symmalloc_torch_allocate`].
#[cold]
unsafe fn retry_from_helpers(
    allocator: &DeviceAllocator,
    stream: RawStream,
    size_bytes: u64,
    error: Error,
) -> Result<*mut c_void, Error> {
    if error.status() != symmalloc_status::SYMMALLOC_OUT_OF_MEMORY {
        return Err(error);
    }
    // SAFETY: the caller's contract.
    unsafe { allocator.allocate_from_helpers(stream, size_bytes) }.ok_or(error)
}

/// Returns `true` in a process that was forked from one that used CUDA memory. There, calls that release something have no effect, and most
/// others fail.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_is_forked() -> bool {
    is_forked()
}

/// Frees an allocation. `device` is a hint. Writes the size of the block to `block_bytes`, which may be NULL. Failures are counted,
/// and standard error shows the first one, because PyTorch frees in destructors. Inside a callback, the free takes effect before the next
/// call of this thread outside of callbacks, and writes no size.
///
/// # Safety
/// `block_bytes` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_deallocate(
    device: i32,
    pointer: *mut c_void,
    block_bytes: *mut u64,
) -> symmalloc_status {
    let now = || {
        let bytes = deallocate(device, pointer)?;
        // SAFETY: the caller's contract.
        if block_bytes.is_null() { Ok(()) } else { unsafe { write(block_bytes, "block_bytes", bytes) } }
    };
    let later = move || deallocate(device, pointer).map(drop);
    free_or_defer(now, later)
}

/// Returns the size of the freed block; 0 for a null pointer and in a forked child.
fn deallocate(device: i32, pointer: *mut c_void) -> Result<u64, Error> {
    if pointer.is_null() || is_forked() {
        return Ok(0);
    }
    let freed = match process::existing(device) {
        Some(allocator) => match allocator.free_block(pointer) {
            Err(Error::UnknownPointer { .. }) => free_elsewhere(device, pointer),
            outcome => outcome,
        },
        None => free_elsewhere(device, pointer),
    };
    freed.inspect_err(|error| {
        if let Some(allocator) = process::existing(device).or_else(|| process::all().next()) {
            allocator.note(error);
        }
    })
}

#[cold]
fn free_elsewhere(device: i32, pointer: *mut c_void) -> Result<u64, Error> {
    let others = process::all().filter(|allocator| allocator.ordinal() as i32 != device);
    let owner = others.into_iter().find(|allocator| allocator.knows(pointer));
    let unknown = Error::UnknownPointer { address: pointer as u64, device: device.max(0) as usize };
    owner.map_or(Err(unknown), |allocator| allocator.free_block(pointer))
}

/// The properties of a live allocation.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct symmalloc_found {
    /// The device.
    pub device: i32,
    /// `true` if the pool's segments grow.
    pub is_expandable: bool,
    /// The stream of the allocation.
    pub stream: *mut c_void,
    /// The size of the block in bytes.
    pub bytes: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The first word of the pool's id in PyTorch: (0, 0) for the default pool and for pools that PyTorch did not create.
    pub id_first: u64,
    /// The second word of the id.
    pub id_second: u64,
}

/// Writes the properties of a live allocation on any device.
///
/// # Safety
/// `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_find(pointer: *const c_void, out: *mut symmalloc_found) -> symmalloc_status {
    report(|| {
        let unknown = Error::UnknownPointer { address: pointer as u64, device: 0 };
        let allocator = process::all().find(|allocator| allocator.knows(pointer)).ok_or(unknown)?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", found(allocator, pointer)?) }
    })
}

fn found(allocator: &DeviceAllocator, pointer: *const c_void) -> Result<symmalloc_found, Error> {
    let foreign = allocator.mempools().foreign().into_iter().find(|(_, other)| other.owns(pointer));
    let (id, owner) = match &foreign {
        Some((id, other)) => (Some(*id), &**other),
        None => (None, allocator),
    };
    let known = owner.find(pointer)?;
    let id = id.or_else(|| {
        let mempool = allocator.mempools().list().into_iter().find(|entry| entry.own() == Some(known.pool));
        mempool.map(|entry| entry.id)
    });
    let (id_first, id_second) = id.unwrap_or((0, 0));
    let config = owner.core().pool_config(known.pool);
    Ok(symmalloc_found {
        device: allocator.ordinal() as i32,
        is_expandable: config.is_ok_and(|config| matches!(config.segments(), SegmentPolicy::Expandable(_))),
        stream: owner.raw_stream(known.stream),
        bytes: known.allocation.size_bytes,
        requested_bytes: known.requested_bytes,
        id_first,
        id_second,
    })
}

/// Returns the device of a live allocation; -1 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_device_of(pointer: *const c_void) -> i32 {
    let owner = guarded(|| Ok(process::all().find(|allocator| allocator.knows(pointer))));
    owner.ok().flatten().map_or(-1, |allocator| allocator.ordinal() as i32)
}

/// Returns the first byte of the segment that contains a pointer, and writes its size if `size` is not null. Returns the pointer itself if
/// no segment contains it.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_base_alloc(pointer: *mut c_void, size: *mut usize) -> *mut c_void {
    let position = process::all()
        .find_map(|allocator| guarded(|| Ok(allocator.segment_at(DeviceAddress(pointer as u64)))).ok().flatten());
    let (base, size_bytes) = position.map_or((pointer as u64, 0), |position| (position.base.0, position.size_bytes));
    if !size.is_null() {
        // SAFETY: the caller's contract.
        unsafe { size.write(size_bytes as usize) };
    }
    base as *mut c_void
}

/// Records that work on another stream uses the allocation. Ignores pointers of other allocators.
///
/// # Safety
/// The stream is one of the primary context of the pointer's device and lives as long as the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_record_use(pointer: *mut c_void, stream: *mut c_void) -> symmalloc_status {
    report(|| {
        let Some(allocator) = process::all().find(|allocator| allocator.knows(pointer)) else { return Ok(()) };
        // SAFETY: the caller's contract.
        unsafe { allocator.record_use(pointer, RawStream::new(stream)) }
    })
}

/// Releases free memory. The id (0, 0) selects all memory of all devices, except mempools in use. Any other id selects that
/// pool, if the program has released it.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_trim(id_first: u64, id_second: u64) -> symmalloc_status {
    report(|| {
        let mut outcome = Ok(());
        for allocator in process::all() {
            let trimmed = match (id_first, id_second) {
                (0, 0) => allocator.trim(),
                id => allocator.trim_pool(id),
            };
            outcome = outcome.and(trimmed.map(drop));
        }
        outcome
    })
}

/// Raises `largest` to the size of the largest block that could be allocated now. The value depends on the program's ops and the device's
/// size, and never on the memory that other processes leave free (rule D4).
///
/// # Safety
/// `largest` is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_largest_block(device: i32, largest: *mut usize) -> symmalloc_status {
    report(|| {
        not_null(largest, "largest")?;
        let allocator = process::allocator(device)?;
        let total_bytes = allocator.allocator().device().memory_info().map_err(CudaError::from)?.total_bytes;
        let limit_bytes = allocator.core().total_limit_bytes().map_or(total_bytes, |limit| limit.min(total_bytes));
        let stats = allocator.core().stats();
        let bytes = limit_bytes.saturating_sub(stats.reserved_bytes.current) + stats.largest_free_bytes;
        // SAFETY: the caller's contract.
        unsafe { write(largest, "largest", (*largest).max(bytes as usize)) }
    })
}

/// Limits the device's memory to a fraction of its total.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_set_fraction(device: i32, fraction: f64) -> symmalloc_status {
    report(|| process::allocator(device)?.set_memory_fraction(fraction))
}

/// Grants a device read and write access to the memory of `owner`.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_enable_peer(device: i32, owner: i32) -> symmalloc_status {
    report(|| {
        let value = device.into();
        let wrong = |_| Error::Argument { argument: "device", value, expected: "a device number" };
        process::allocator(owner)?.grant_access(usize::try_from(device).map_err(wrong)?)
    })
}
