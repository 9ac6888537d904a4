//! Driver calls that cudarc's safe interface lacks.

use cudarc::driver::CudaStream;
use cudarc::driver::result;
use cudarc::driver::sys::{CUcontext, CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use symmalloc_cuda::{CudaDevice, DriverError};

/// Returns a function that converts errors of this driver call.
pub(crate) fn refused(call: &'static str) -> impl Fn(result::DriverError) -> DriverError {
    move |error| DriverError { call, code: error.0 as i32 }
}

/// Returns the device's primary context without retaining it: the context stays alive only if other code holds it.
pub(crate) fn primary_context(device: &CudaDevice) -> Result<CUcontext, DriverError> {
    let device = device.context().cu_device();
    // SAFETY: the device exists; the context is released below.
    let primary = unsafe { result::primary_ctx::retain(device) }.map_err(refused("cuDevicePrimaryCtxRetain"))?;
    // SAFETY: the context was retained above, and is only compared afterwards.
    unsafe { result::primary_ctx::release(device) }.map_err(refused("cuDevicePrimaryCtxRelease"))?;
    Ok(primary)
}

/// Returns `true` if the stream is being captured into a graph. The stream's context must be current.
pub(crate) fn is_captured(stream: &CudaStream) -> Result<bool, DriverError> {
    // SAFETY: the stream is live.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) };
    Ok(status.map_err(refused("cuStreamIsCapturing"))? != CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Like [`is_captured`], but works with any current context. A stream identifies its context, so the context is made current only if the
/// query fails. The default streams have the handles 0 to 2 in all contexts, and these handles refer to the current context.
pub(crate) fn is_captured_on(device: &CudaDevice, stream: &CudaStream) -> Result<bool, DriverError> {
    if stream.cu_stream() as usize > 2
        && let Ok(is_captured) = is_captured(stream)
    {
        return Ok(is_captured);
    }
    let _current = device.enter()?;
    is_captured(stream)
}

/// Returns `true` if a driver call failed only because of a capture (codes 900 to 908), possibly a capture by another library.
pub(crate) fn is_capture_in_the_way(error: &DriverError) -> bool {
    matches!(error.code, 900..=908)
}

/// Ends the process immediately, without running the `exit` handlers, because the driver's exit handler waits for kernels that never end.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: no code of this process runs afterwards.
    unsafe { libc::_exit(code) }
}

/// Writes the buffered output of the C library's streams, as `exit` does after its handlers.
pub(crate) fn flush_output() {
    // SAFETY: a null pointer selects all streams, which the C library locks. Errors cannot be reported any more.
    let _written = unsafe { libc::fflush(null_mut()) };
}

unsafe extern "C" {
    /// Like the C library's `atexit`, but also passes the status of `exit` to the handler.
    fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Registers a handler that `exit` calls with its status. Handlers run in reverse order of their registration. If the C library has no room
/// for another handler, this one does not run. Must be called once.
pub(crate) fn at_exit(handler: fn(i32)) {
    static HANDLER: OnceLock<fn(i32)> = OnceLock::new();
    extern "C" fn call(status: c_int, _argument: *mut c_void) {
        if let Some(handler) = HANDLER.get() {
            handler(status);
        }
    }
    HANDLER.get_or_init(|| handler);
    // SAFETY: the function calls no `exit`, a panic in it aborts, and its code stays loaded because a thread of this crate never ends.
    let _full = unsafe { on_exit(call, null_mut()) };
}

/// Copies `size_bytes` bytes between two addresses of the device, whose context must be current. The caller must hold the guards of both
/// buffers, and the ranges must not overlap.
pub(crate) fn copy(stream: &CudaStream, from: u64, to: u64, size_bytes: u64) -> Result<(), DriverError> {
    // SAFETY: both buffers are in use on the stream, and the ranges lie within them.
    let copied = unsafe { result::memcpy_dtod_async(to, from, size_bytes as usize, stream.cu_stream()) };
    copied.map_err(refused("cuMemcpyDtoDAsync"))
}
