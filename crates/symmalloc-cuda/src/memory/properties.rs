//! Properties of the device's virtual memory: granularity and supported handle types.

use super::spare::with_spare;
use crate::device::CudaDevice;
use crate::driver::{HANDLE_FABRIC, HANDLE_POSIX_FD, MemLocation, MemProperties};
use crate::error::{CudaError, DriverError, INVALID_VALUE, OUT_OF_MEMORY};
use std::path::Path;

pub(super) fn granularity_of(device: &CudaDevice, properties: &MemProperties) -> Result<u64, DriverError> {
    let _current = device.enter()?;
    let mut bytes = 0_usize;
    // SAFETY: `bytes` is valid for writing, the properties for reading. The flag 1 selects the recommended granularity.
    unsafe { device.driver().granularity(&raw mut bytes, &raw const *properties, 1) }?;
    Ok(bytes as u64)
}

/// Returns the most capable properties that the device actually supports. A device may report support for a handle type that the system
/// then rejects, so each type is tried with one granule. Fabric handles are tried only if the process can see an IMEX channel: without a
/// channel the driver rejects them, and compute-sanitizer reports every failed call.
pub(super) fn supported_properties(
    device: &CudaDevice,
    location: MemLocation,
    imex_channels: &Path,
) -> Result<MemProperties, CudaError> {
    let features = device.features();
    let posix_fd = if features.posix_fd { HANDLE_POSIX_FD } else { 0 };
    let fabric = if features.fabric && is_inhabited(imex_channels) { HANDLE_FABRIC } else { 0 };
    let rdma = u8::from(features.gpu_direct_rdma);
    let properties = |handle_types, gpu_direct_rdma| MemProperties::of(location, handle_types, gpu_direct_rdma);
    let candidates = [(posix_fd | fabric, rdma), (posix_fd, rdma), (posix_fd, 0), (0, 0)];
    let _current = device.enter()?;
    let _relaxed = device.driver().relax_capture();
    let mut refusal = None;
    for (handle_types, gpu_direct_rdma) in candidates {
        let candidate = properties(handle_types, gpu_direct_rdma);
        match with_spare(device, || try_one_granule(device, &candidate)) {
            Ok(()) => return Ok(candidate),
            // A failure because the device is full reveals nothing about handle types.
            Err(DriverError { code: OUT_OF_MEMORY, .. }) => return Ok(properties(posix_fd, rdma)),
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.map_or(CudaError::Driver(DriverError { call: "cuMemCreate", code: INVALID_VALUE }), Into::into))
}

fn is_inhabited(folder: &Path) -> bool {
    folder.read_dir().is_ok_and(|mut entries| entries.next().is_some())
}

fn try_one_granule(device: &CudaDevice, properties: &MemProperties) -> Result<(), DriverError> {
    let size = granularity_of(device, properties)? as usize;
    let mut handle = 0;
    // SAFETY: `handle` is valid for writing, the properties are valid, the size is one granule.
    unsafe { device.driver().create(&raw mut handle, size, &raw const *properties, 0) }?;
    // SAFETY: just created, and not used again.
    unsafe { device.driver().release(handle) }
}
