//! Memory for runtimes that name no stream, and ONNX Runtime's external allocator.

use super::arguments::{living, not_null, write};
use crate::complaints;
use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::guard::{guarded_or, report};
use crate::process;
use crate::status::symmalloc_status;
use crate::streams::RawStream;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use symmalloc_core::PoolId;
use symmalloc_cuda::CudaDevice;

/// Allocates memory for work on any stream, now or later: for callers that know no stream. It comes from a pool of its own. Free it
/// with `symmalloc_free_unordered`. Zero bytes are a null pointer.
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

/// Frees an allocation when all work that was given to the device so far is done. Blocks until then, as cuMemFree does. NULL is no
/// op. Fails while a stream is captured; the allocation is live then.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_free_unordered(
    allocator: *mut DeviceAllocator,
    pointer: *mut c_void,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    report(|| unsafe { living(allocator) }?.free_unordered(pointer))
}

/// Frees an allocation behind the work that was given to this stream so far, whatever stream it was allocated for: for callers that
/// name the stream of a free. What came from `symmalloc_allocate_unordered` is freed as by `symmalloc_free_unordered`. NULL is no op.
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
    report(|| unsafe { living(allocator)?.free_on(pointer, RawStream::new(stream)) })
}

/// The stream that a session of ONNX Runtime computes on, by device.
static ORT_STREAMS: Mutex<BTreeMap<usize, RawStream>> = Mutex::new(BTreeMap::new());

/// Says that sessions of ONNX Runtime on this device work on this stream alone: its `user_compute_stream`. From then on its memory
/// is ordered by the stream, and `symmalloc_ort_free` does not wait. Without it, memory is as from `symmalloc_allocate_unordered`.
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

/// ONNX Runtime's `gpu_external_alloc`. Allocates on the device whose context is current, from the allocator that PyTorch's entry
/// points use. NULL when there is no memory, which ONNX Runtime makes an error of; what happened is on the error output once, and in
/// the statistics.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_ort_alloc(bytes: usize) -> *mut c_void {
    guarded_or(
        || {
            let allocator = current_allocator()?;
            let stream = ort_streams().get(&allocator.ordinal()).copied();
            let allocated = match stream {
                // SAFETY: the contract of `symmalloc_ort_use_stream`.
                Some(stream) => unsafe { allocator.allocate(PoolId::DEFAULT, bytes as u64, stream) },
                None => allocator.allocate_unordered(bytes as u64),
            };
            allocated.or_else(|error| {
                allocator.note(&error);
                Ok(std::ptr::null_mut())
            })
        },
        |error| {
            complaints::complain(&error);
            std::ptr::null_mut()
        },
    )
}

/// ONNX Runtime's `gpu_external_free`. Blocks until the device is idle, unless the memory was allocated for a stream that
/// `symmalloc_ort_use_stream` named. What fails is counted, and once written to the error output.
///
/// # Safety
/// The pointer is NULL, or came from `symmalloc_ort_alloc` and is not used by work that is submitted after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_ort_free(pointer: *mut c_void) {
    if pointer.is_null() || process::is_forked() {
        return;
    }
    match process::all().find(|allocator| allocator.owns(pointer)) {
        Some(allocator) => guarded_or(|| allocator.free_any(pointer), |error| allocator.note(&error)),
        None => complaints::complain(&Error::UnknownPointer { address: pointer as u64, device: 0 }),
    }
}

/// ONNX Runtime's `gpu_external_empty_cache`: gives free memory of all devices back. Waits for streams that used it.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_ort_empty_cache() {
    for allocator in process::all() {
        guarded_or(|| allocator.trim().map(|_released| ()), |error| allocator.note(&error));
    }
}

/// The allocator of the device whose context is current; of the first where none is, as CUDA's runtime has it.
fn current_allocator() -> Result<&'static DeviceAllocator, Error> {
    if process::is_forked() {
        return Err(Error::Forked);
    }
    process::allocator(CudaDevice::current()?.unwrap_or(0) as i32)
}
