//! The driver's calls that no safe interface of cudarc's has.

use cudarc::driver::CudaStream;
use cudarc::driver::result;
use cudarc::driver::sys::{CUcontext, CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE};
use symmalloc_cuda::{CudaDevice, DriverError};

/// The driver's refusal of this call.
pub(crate) fn refused(call: &'static str) -> impl Fn(result::DriverError) -> DriverError {
    move |error| DriverError { call, code: error.0 as i32 }
}

/// The device's primary context. It is retained and released again, so it lives only if other code holds it.
pub(crate) fn primary_context(device: &CudaDevice) -> Result<CUcontext, DriverError> {
    let device = device.context().cu_device();
    // SAFETY: a device that exists; released below.
    let primary = unsafe { result::primary_ctx::retain(device) }.map_err(refused("cuDevicePrimaryCtxRetain"))?;
    // SAFETY: retained above; the context is only compared after this.
    unsafe { result::primary_ctx::release(device) }.map_err(refused("cuDevicePrimaryCtxRelease"))?;
    Ok(primary)
}

/// Whether the stream is being captured into a graph. Its context is current.
pub(crate) fn is_captured(stream: &CudaStream) -> Result<bool, DriverError> {
    // SAFETY: the stream lives.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) };
    Ok(status.map_err(refused("cuStreamIsCapturing"))? != CU_STREAM_CAPTURE_STATUS_NONE)
}

/// As [`is_captured`], whatever context is current. Streams name theirs, so it is asked for only where the driver did not find it.
/// The default streams have the same names in all contexts, 0 to 2, and mean the current one's.
pub(crate) fn is_captured_on(device: &CudaDevice, stream: &CudaStream) -> Result<bool, DriverError> {
    if stream.cu_stream() as usize > 2
        && let Ok(is_captured) = is_captured(stream)
    {
        return Ok(is_captured);
    }
    let _current = device.enter()?;
    is_captured(stream)
}

/// Whether the driver only refuses because of a capture (900 to 908), perhaps of another library's.
pub(crate) fn is_capture_in_the_way(error: &DriverError) -> bool {
    matches!(error.code, 900..=908)
}

/// Ends the process at once, without the handlers of `exit`: the driver's waits for kernels that never end.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: nothing of this process runs afterwards.
    unsafe { libc::_exit(code) }
}

/// Copies between two addresses of the device, whose context is current. The caller holds the guards of both buffers, which do not
/// overlap there.
pub(crate) fn copy(stream: &CudaStream, from: u64, to: u64, size_bytes: u64) -> Result<(), DriverError> {
    // SAFETY: both buffers are in use on the stream, and the ranges lie within them.
    let copied = unsafe { result::memcpy_dtod_async(to, from, size_bytes as usize, stream.cu_stream()) };
    copied.map_err(refused("cuMemcpyDtoDAsync"))
}
