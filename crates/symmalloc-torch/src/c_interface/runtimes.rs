//! The process's allocators, memory for runtimes that do not name a stream, and ONNX Runtime's external allocator.

use super::arguments::{living, not_null, write};
use crate::device::DeviceAllocator;
use crate::error::{Error, complain};
use crate::guard::{guarded_or, release_or_defer, report};
use crate::process;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use symmalloc_core::PoolId;
use symmalloc_cuda::CudaDevice;
use symmalloc_files::is_forked;

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

/// Allocates memory for work on any stream, now or later, for callers that do not know a stream. It comes from a separate pool. Free
/// it with `symmalloc_free_unordered`. Writes a null pointer for zero bytes.
///
/// # Safety
/// `allocator` is live; `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_allocate_unordered(
    allocator: *mut DeviceAllocator,
    bytes: usize,
    out: *mut *mut c_void,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        not_null(out, "out")?;
        let pointer = allocator.allocate_unordered(bytes as u64)?;
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", pointer) }
    })
}

/// Blocks until all work submitted to the device so far has completed, as cuMemFree does, and frees an allocation. NULL has no effect.
/// Fails during a stream capture, and the allocation stays live.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_free_unordered(
    allocator: *mut DeviceAllocator,
    pointer: *mut c_void,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    release_or_defer(move || unsafe { living(allocator) }?.free_unordered(pointer))
}

/// Frees an allocation after the work submitted to this stream so far, regardless of the stream of its allocation, for callers that
/// free on a stream. Memory of `symmalloc_allocate_unordered` is freed by `symmalloc_free_unordered`. NULL has no effect.
///
/// # Safety
/// As `symmalloc_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_free_on(
    allocator: *mut DeviceAllocator,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    release_or_defer(move || unsafe { living(allocator)?.free_on(pointer, RawStream::new(stream)) })
}

/// The stream of ONNX Runtime's sessions, by device.
static ORT_STREAMS: Mutex<BTreeMap<usize, RawStream>> = Mutex::new(BTreeMap::new());

/// Declares that sessions of ONNX Runtime on this device use only this stream, their `user_compute_stream`. Their later allocations are
/// ordered by the stream, and `symmalloc_ort_free` does not block. Otherwise, memory comes from `symmalloc_allocate_unordered`.
///
/// # Safety
/// The stream is one of the device's primary context and lives as long as the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_ort_use_stream(device: i32, stream: *mut c_void) -> symmalloc_status {
    report(|| {
        let ordinal = process::allocator(device)?.ordinal();
        ort_streams().insert(ordinal, RawStream::new(stream));
        Ok(())
    })
}

fn ort_streams() -> std::sync::MutexGuard<'static, BTreeMap<usize, RawStream>> {
    ORT_STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates on the device of the current context, from the allocator of PyTorch's entry points: ONNX Runtime's `gpu_external_alloc`.
/// Returns NULL if there is no memory, which ONNX Runtime reports as an error. Standard error shows the first failure, and the
/// statistics count all.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_ort_alloc(bytes: usize) -> *mut c_void {
    guarded_or(
        || {
            let allocator = current_allocator()?;
            let stream = ort_streams().get(&allocator.ordinal()).copied();
            let allocated = match stream {
                // SAFETY: the contract of `symmalloc_ort_use_stream`.
                Some(stream) => unsafe { allocator.allocate(PoolId::DEFAULT, stream, bytes as u64, None) },
                None => allocator.allocate_unordered(bytes as u64),
            };
            allocated.or_else(|error| {
                allocator.note(&error);
                Ok(std::ptr::null_mut())
            })
        },
        |error| {
            complain(&error);
            std::ptr::null_mut()
        },
    )
}

/// Frees memory: ONNX Runtime's `gpu_external_free`. Blocks until the device is idle, unless the memory was allocated for a stream of
/// `symmalloc_ort_use_stream`. Standard error shows the first failure, and the statistics count all.
///
/// # Safety
/// The pointer is NULL, or came from `symmalloc_ort_alloc` and is not used by work that is submitted after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_ort_free(pointer: *mut c_void) {
    if pointer.is_null() || is_forked() {
        return;
    }
    match process::all().find(|allocator| allocator.owns(pointer)) {
        Some(allocator) => guarded_or(|| allocator.free_any(pointer), |error| allocator.note(&error)),
        None => complain(&Error::UnknownPointer { address: pointer as u64, device: 0 }),
    }
}

/// Releases free memory of all devices, and waits for streams that used it: ONNX Runtime's `gpu_external_empty_cache`.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_ort_empty_cache() {
    for allocator in process::all() {
        guarded_or(|| allocator.trim().map(|_released| ()), |error| allocator.note(&error));
    }
}

/// Returns the allocator of the current context's device. Without a context, it is the first device, as in CUDA's runtime.
fn current_allocator() -> Result<&'static DeviceAllocator, Error> {
    if is_forked() {
        return Err(Error::Forked);
    }
    process::allocator(CudaDevice::current()?.unwrap_or(0) as i32)
}
