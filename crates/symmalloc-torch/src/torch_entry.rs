//! PyTorch's entry points: the functions for `CUDAPluggableAllocator` and its setters, as of PyTorch 2.11.
//!
//! | PyTorch | here |
//! |---|---|
//! | `alloc_fn`, `free_fn` | [`symmalloc_torch_alloc`], [`symmalloc_torch_free`] |
//! | `set_init_fn` | [`symmalloc_torch_init`] |
//! | `set_reset_fn` (`empty_cache`) | [`symmalloc_torch_reset`] |
//! | `set_memory_fraction_fn` | [`symmalloc_torch_memory_fraction`] |
//! | `set_base_alloc_fn` | [`symmalloc_torch_base_alloc`] |
//! | `set_record_stream_fn` | [`symmalloc_torch_record_stream`] |
//! | `set_begin_allocate_to_pool`, `set_end_allocate_to_pool_fn`, `set_release_pool` | the three functions of the same names |
//!
//! Failures throw a C++ exception, see `cxx_abi.rs`. `free` never throws, because PyTorch frees in destructors.

use crate::c_interface::arguments::{required_text, write};
use crate::complaints;
use crate::cxx_abi::{ExceptionKind, FunctionFilter, throw};
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::filter::StreamFilter;
use crate::forks;
use crate::guard::{guarded, guarded_or, not_in_callback, release, report};
use crate::process;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::ffi::{c_char, c_int, c_void};
use symmalloc_core::PoolId;
use symmalloc_core::backend::DeviceAddress;

/// Throws an error as a C++ exception. The unwinding drops the locals of all frames below PyTorch's.
///
/// # Safety
/// Called outside of any `catch_unwind`, from a function that is `extern "C-unwind"`.
#[cold]
pub(crate) unsafe fn raise(error: Error) {
    let is_out_of_memory = error.status() == symmalloc_status::SYMMALLOC_OUT_OF_MEMORY;
    let kind = if is_out_of_memory { ExceptionKind::OutOfMemory } else { ExceptionKind::Other };
    let message = format!("symmalloc: {error}");
    drop(error);
    // SAFETY: the caller's contract. The unwinding drops the message.
    unsafe { throw(kind, &message) };
}

/// Allocates for work on a stream: PyTorch's `alloc_fn`. Returns a null pointer for zero bytes.
///
/// Throws `c10::OutOfMemoryError` if there is no memory, and `c10::Error` for any other failure.
///
/// # Safety
/// The stream is one of the device's primary context and lives as long as the process.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_alloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // SAFETY: the caller's contract.
    match unsafe { allocate(size, device, stream) } {
        Ok(pointer) => pointer,
        Err(error) => {
            // SAFETY: outside of any `catch_unwind`.
            unsafe { raise(*error) };
            std::ptr::null_mut()
        }
    }
}

/// # Safety
/// As [`symmalloc_torch_alloc`].
#[inline]
unsafe fn allocate(size: isize, device: c_int, stream: *mut c_void) -> Result<*mut c_void, Box<Error>> {
    let Ok(size_bytes) = u64::try_from(size) else { return Err(Box::new(Error::Size { size: size as i64 })) };
    let stream = RawStream::new(stream);
    let allocator = match process::existing(device) {
        Some(allocator) => allocator,
        None => guarded(|| process::allocator(device))?,
    };
    if allocator.scopes().any() {
        // SAFETY: the caller's contract.
        return unsafe { allocate_in_scope(allocator, size_bytes, stream) };
    }
    // SAFETY: the caller's contract.
    guarded_or(
        || Ok(Ok(unsafe { allocator.allocate(PoolId::DEFAULT, size_bytes, stream) }?)),
        |error| Err(Box::new(error)),
    )
}

/// # Safety
/// As [`symmalloc_torch_alloc`].
#[cold]
unsafe fn allocate_in_scope(
    allocator: &DeviceAllocator,
    size_bytes: u64,
    stream: RawStream,
) -> Result<*mut c_void, Box<Error>> {
    let name = allocator.scopes().name();
    // SAFETY: the caller's contract.
    let allocate = |place| unsafe { allocator.allocate_at(place, size_bytes, stream, name.as_deref()) };
    // Outside of the guard, because a filter of PyTorch may throw.
    allocator.allocate_in_scope(stream, None, allocate).map_err(Box::new)
}

/// Frees an allocation: PyTorch's `free_fn`. Never throws: failures are counted and logged, and standard error shows the first one.
///
/// # Safety
/// None: a pointer that is not a live allocation of the device is an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_free(pointer: *mut c_void, _size: isize, device: c_int, _stream: *mut c_void) {
    let Some(allocator) = process::existing(device) else {
        if !pointer.is_null() && !forks::is_forked() {
            complaints::complain(&Error::UnknownPointer { address: pointer as u64, device: device.max(0) as usize });
        }
        return;
    };
    guarded_or(|| allocator.free(pointer), |error| allocator.note(&error));
}

/// Checks the settings when PyTorch initializes CUDA. Allocators are created on first use.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_init(_device_count: c_int) {
    if let Err(error) = guarded(process::settings) {
        // SAFETY: outside of any `catch_unwind`.
        unsafe { raise(error) };
    }
}

/// Releases free memory of all devices, except that of private pools that a graph uses: `torch.cuda.empty_cache()`.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_reset() {
    for allocator in process::all() {
        if let Err(error) = guarded(|| allocator.trim()) {
            allocator.note(&error);
        }
    }
}

/// Limits the device's memory: `torch.cuda.set_per_process_memory_fraction(fraction, device)`.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_memory_fraction(fraction: f64, device: c_int) {
    if let Err(error) = guarded(|| process::allocator(device)?.set_memory_fraction(fraction)) {
        // SAFETY: outside of any `catch_unwind`.
        unsafe { raise(error) };
    }
}

/// Returns the first byte of the segment that contains a pointer, and writes its size if `size` is not null. Returns the pointer itself if
/// no segment contains it.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_base_alloc(pointer: *mut c_void, size: *mut usize) -> *mut c_void {
    let position = process::all()
        .find_map(|allocator| guarded(|| Ok(allocator.segment_at(DeviceAddress(pointer as u64)))).ok().flatten());
    let (base, size_bytes) = position.map_or((pointer as u64, 0), |position| (position.base.0, position.size_bytes));
    if !size.is_null() {
        // SAFETY: the caller's contract.
        unsafe { size.write(size_bytes as usize) };
    }
    base as *mut c_void
}

/// Records a use on a stream: `tensor.record_stream(stream)`. Ignores pointers of other allocators, as PyTorch does.
///
/// # Safety
/// The stream is one of the primary context of the pointer's device and lives as long as the process.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    if pointer.is_null() {
        return;
    }
    let owner = guarded(|| Ok(process::all().find(|allocator| allocator.owns(pointer))));
    let Some(allocator) = owner.ok().flatten() else { return };
    // SAFETY: the caller's contract.
    if let Err(error) = guarded(|| unsafe { allocator.record_use(pointer, RawStream::new(stream)) }) {
        // SAFETY: outside of any `catch_unwind`.
        unsafe { raise(error) };
    }
}

/// Directs later allocations on the streams that the filter accepts to the private pool of this id, and creates the pool if necessary. The
/// two words of the id are passed in two registers, as PyTorch's `MempoolId_t` is.
///
/// # Safety
/// `filter` is null or points to a living `std::function<bool(cudaStream_t)>` of libstdc++.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_begin_allocate_to_pool(
    device: c_int,
    id_first: u64,
    id_second: u64,
    filter: *mut c_void,
) {
    // SAFETY: the caller's contract.
    let filter = StreamFilter::Function(unsafe { FunctionFilter::copy(filter.cast()) });
    // Not guarded, because the filter may throw. A panic unwinds as an exception that ends the process.
    let id = (id_first, id_second);
    let allocator = not_in_callback().and_then(|()| process::allocator(device));
    let begun = allocator.and_then(|allocator| allocator.begin_private(id, filter).map(drop));
    if let Err(error) = begun {
        // SAFETY: outside of any `catch_unwind`.
        unsafe { raise(error) };
    }
}

/// Ends the last scope of the private pool of this id.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_end_allocate_to_pool(device: c_int, id_first: u64, id_second: u64) {
    with_existing(device, |allocator| allocator.end_private((id_first, id_second)));
}

/// Releases one use of the private pool of this id. After the last one, the next `empty_cache` releases its memory, or an allocation that
/// would fail otherwise.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_release_pool(device: c_int, id_first: u64, id_second: u64) {
    with_existing(device, |allocator| allocator.release_private((id_first, id_second)));
}

/// Reports an error of a call that PyTorch makes in destructors.
fn with_existing(device: c_int, act: impl FnOnce(&DeviceAllocator) -> Result<(), Error>) {
    let Some(allocator) = process::existing(device) else { return };
    if let Err(error) = guarded(|| act(allocator)) {
        allocator.note(&error);
    }
}

/// Configures the allocators behind the entry points, instead of `SYMMALLOC_CONF`. Call it before the first use of CUDA memory.
///
/// # Safety
/// `conf` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_configure(conf: *const c_char) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| process::configure(unsafe { required_text(conf, "conf") }?))
}

/// Writes the process's allocator for a device, which PyTorch and other runtimes share. The first use creates it, configured by
/// `SYMMALLOC_CONF`. The library owns it: do not destroy it.
///
/// # Safety
/// `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_process_allocator(device: i32, out: *mut *mut DeviceAllocator) -> symmalloc_status {
    report(|| {
        let allocator = process::allocator(device)?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", std::ptr::from_ref(allocator).cast_mut()) }
    })
}

/// Directs this thread's allocations on the device without an explicit pool to this one, until [`symmalloc_torch_pop_pool`]. Calls nest. As
/// with PyTorch's own allocator, the innermost scope applies: a pool pushed within a capture takes precedence over the capture's pool, and
/// a capture within a pushed pool's scope uses the capture's pool.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_push_pool(device: i32, pool: u32) -> symmalloc_status {
    report(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().push_pool(allocator.known_pool(pool)?);
        Ok(())
    })
}

/// Pops the pool that this thread pushed last on the device.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_pop_pool(device: i32) -> symmalloc_status {
    release(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().pop_pool(allocator.ordinal())
    })
}

/// Names this thread's allocations on the device through PyTorch, for snapshots, traces and reports, until [`symmalloc_torch_pop_name`].
/// Calls nest: the innermost name applies. Names do not affect placements or digests.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_push_name(device: i32, name: *const c_char) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let name = unsafe { required_text(name, "name") }?;
        process::allocator(device)?.scopes().push_name(name);
        Ok(())
    })
}

/// Pops the name that this thread pushed last on the device.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_pop_name(device: i32) -> symmalloc_status {
    release(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().pop_name(allocator.ordinal())
    })
}
