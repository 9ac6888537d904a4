//! Calls on memory pools. The driver applies each call to its own pool, and this file then updates the allocator's pool accordingly.

use crate::context::Context;
use crate::libcuda;
use crate::outcome::SUCCESS;
use crate::peers;
use crate::pools::{MemPool, PoolProperties};
use crate::settings::settings;
use crate::{contexts, exit};
use std::ffi::{c_int, c_void};

/// `CUmemPool_attribute`.
mod attribute_number {
    use std::ffi::c_int;
    pub(super) const RESERVED: c_int = 5;
    pub(super) const RESERVED_PEAK: c_int = 6;
    pub(super) const USED: c_int = 7;
    pub(super) const USED_PEAK: c_int = 8;
}

/// Returns `true` if memory pools are served.
fn are_served() -> bool {
    settings().is_some_and(|settings| !settings.is_watched)
}

/// Returns a pool by its handle, if it is served.
fn served(raw: usize) -> Option<&'static MemPool> {
    if !are_served() {
        return None;
    }
    // The handle may be the default pool of a device on which nothing has been allocated yet.
    let known = MemPool::find(raw).or_else(|| contexts::current().and_then(|_| MemPool::find(raw)));
    known.filter(|pool| pool.is_served())
}

/// Serves `cuMemPoolCreate`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn create(
    driver: unsafe extern "C" fn(*mut usize, *const PoolProperties) -> c_int,
    pool: *mut usize,
    properties: *const PoolProperties,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(pool, properties) };
    if code == SUCCESS && are_served() {
        // SAFETY: the driver read the properties and wrote the pool.
        unsafe { MemPool::of_program(pool.read(), &*properties) };
    }
    code
}

/// Serves `cuMemPoolDestroy`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn destroy(driver: unsafe extern "C" fn(usize) -> c_int, pool: usize) -> c_int {
    let known = MemPool::take(pool);
    // SAFETY: the caller's contract.
    let code = unsafe { driver(pool) };
    match known {
        Some(known) if code == SUCCESS => {
            // The destroyed pool may have been the device's current pool, from which other threads allocate.
            find_current(known.device());
            known.end();
        }
        Some(known) => known.put_back(),
        None => {}
    }
    code
}

/// Serves `cuMemPoolGetAttribute`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn attribute(
    driver: unsafe extern "C" fn(usize, c_int, *mut c_void) -> c_int,
    pool: usize,
    attribute: c_int,
    value: *mut c_void,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(pool, attribute, value) };
    let stats = if code == SUCCESS { served(pool).and_then(MemPool::stats) } else { None };
    let Some(stats) = stats else { return code };
    let ours = match attribute {
        attribute_number::RESERVED => stats.reserved_bytes.current,
        attribute_number::RESERVED_PEAK => stats.reserved_bytes.peak,
        attribute_number::USED => stats.usage.all.allocated_bytes.current,
        attribute_number::USED_PEAK => stats.usage.all.allocated_bytes.peak,
        _ => return code,
    };
    let value = value.cast::<u64>();
    // SAFETY: the driver wrote an eight-byte number.
    unsafe { value.write_unaligned(value.read_unaligned() + ours) };
    code
}

/// Serves `cuMemPoolSetAttribute`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn set_attribute(
    driver: unsafe extern "C" fn(usize, c_int, *mut c_void) -> c_int,
    pool: usize,
    attribute: c_int,
    value: *mut c_void,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(pool, attribute, value) };
    if code == SUCCESS
        && matches!(attribute, attribute_number::RESERVED_PEAK | attribute_number::USED_PEAK)
        && let Some(pool) = served(pool)
    {
        if let Some(context) = Context::of_device(pool.device()) {
            exit::keep_peaks(context);
        }
        pool.reset_peaks();
    }
    code
}

/// Serves `cuMemPoolTrimTo`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn trim_to(driver: unsafe extern "C" fn(usize, usize) -> c_int, pool: usize, keep: usize) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(pool, keep) };
    if code == SUCCESS
        && let Some(pool) = served(pool)
    {
        pool.trim_to(keep as u64);
    }
    code
}

/// Serves `cuMemPoolSetAccess`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn set_access(
    driver: unsafe extern "C" fn(usize, *const [c_int; 3], usize) -> c_int,
    pool: usize,
    access: *const [c_int; 3],
    count: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(pool, access, count) };
    let Some(pool) = served(pool).filter(|_| code == SUCCESS) else { return code };
    // An entry consists of the kind of location, the device and the access flags. Revoking access has no effect here, because access was
    // granted to all of the device's memory, not only to this pool's.
    for at in 0..count {
        // SAFETY: the driver read `count` entries.
        let [kind, device, flags] = unsafe { access.add(at).read() };
        let context = Context::of_device(pool.device());
        if let Some(context) = context.filter(|_| kind == 1 && flags != 0)
            && let Err(code) = peers::grant_now(context, device)
        {
            return code;
        }
    }
    code
}

/// Updates the pool that serves `cuMemAllocAsync` on a device.
fn find_current(device: c_int) {
    if let (Some(context), Some(driver)) = (Context::of_device(device), libcuda::driver()) {
        context.find_current_pool(driver);
    }
}

/// Serves `cuDeviceSetMemPool`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn set_current(
    driver: unsafe extern "C" fn(c_int, usize) -> c_int,
    device: c_int,
    pool: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(device, pool) };
    find_current(device);
    code
}

/// Serves `cuMemSetMemPool`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn set_current_of_location(
    driver: unsafe extern "C" fn(*const [c_int; 2], c_int, usize) -> c_int,
    location: *const [c_int; 2],
    kind: c_int,
    pool: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(location, kind, pool) };
    if code == SUCCESS && !location.is_null() {
        // SAFETY: the driver read the location.
        find_current(unsafe { location.read() }[1]);
    }
    code
}
