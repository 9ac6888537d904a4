//! Calls that allocate and free memory.

use crate::context::Context;
use crate::outcome::{OUT_OF_MEMORY, SUCCESS};
use crate::served::{self, Outcome};
use crate::settings::settings;
use crate::streams::PER_THREAD;
use crate::{contexts, exit};
use crate::{tally, watch};
use std::ffi::{c_int, c_uint, c_void};

type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type AllocatePitch = unsafe extern "C" fn(*mut u64, *mut usize, usize, usize, c_uint) -> c_int;
type AllocateManaged = unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int;
type Create = unsafe extern "C" fn(*mut u64, usize, *const c_void, u64) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;
type AllocateAsync = unsafe extern "C" fn(*mut u64, usize, usize) -> c_int;
type AllocateFromPool = unsafe extern "C" fn(*mut u64, usize, usize, usize) -> c_int;
type FreeAsync = unsafe extern "C" fn(u64, usize) -> c_int;
type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;

/// Replaces stream 0 with the per-thread default stream.
fn own(stream: usize) -> usize {
    if stream == 0 { PER_THREAD } else { stream }
}

/// Makes a driver call. If the driver is out of memory, releases cached memory and repeats the call.
fn with_trim(call: impl Fn() -> c_int) -> c_int {
    tally::passed_on();
    let code = call();
    if code != OUT_OF_MEMORY {
        return code;
    }
    // Trims every device, because the call does not reveal which one is full.
    let contexts = Context::all().filter(|context| !context.is_gone());
    let went = contexts.fold(false, |went, context| context.trim() | went);
    if went { call() } else { code }
}

/// Allocates from the allocator, or from the driver if the allocator does not serve the request.
///
/// # Safety
/// `address` is valid for writing.
unsafe fn served_or(
    address: *mut u64,
    size: usize,
    serve: impl FnOnce(u64) -> Outcome<u64>,
    driver: impl Fn() -> c_int,
) -> c_int {
    // The driver handles calls with size 0 or a null result pointer.
    let outcome = if size == 0 || address.is_null() { Outcome::Driver } else { tally::timed(|| serve(size as u64)) };
    match outcome {
        Outcome::Done(allocated) => {
            // SAFETY: the caller passes an address that is valid for writing, and it is not null.
            unsafe { address.write(allocated) };
            SUCCESS
        }
        Outcome::Failed(code) => code,
        Outcome::Driver => with_trim(driver),
    }
}

fn is_watched() -> bool {
    settings().is_some_and(|settings| settings.is_watched)
}

/// Serves `cuMemAlloc_v2`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn allocate(driver: Allocate, address: *mut u64, size: usize) -> c_int {
    exit::begin();
    // SAFETY: the caller's contract.
    let call = || unsafe { driver(address, size) };
    if is_watched() {
        // SAFETY: the driver wrote to the address if it succeeded.
        return unsafe { watch::allocated(call(), address, size as u64, None) };
    }
    let is_ipc = settings().is_some_and(|settings| settings.is_ipc);
    let serve = |size| if is_ipc { Outcome::Driver } else { served::allocate(size) };
    // SAFETY: the caller's contract.
    unsafe { served_or(address, size, serve, call) }
}

/// Serves `cuMemAllocPitch_v2`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn allocate_pitch(
    driver: AllocatePitch,
    address: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> c_int {
    // SAFETY: the caller's contract.
    let call = || unsafe { driver(address, pitch, width, height, element) };
    if is_watched() {
        let code = call();
        // SAFETY: the driver wrote to the address if it succeeded.
        let row = if code == SUCCESS { unsafe { pitch.read() } } else { width };
        // SAFETY: as above.
        return unsafe { watch::allocated(code, address, (row * height) as u64, None) };
    }
    with_trim(call)
}

/// Passes `cuMemAllocManaged` to the driver. Releases cached memory if the device is full.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn allocate_managed(driver: AllocateManaged, address: *mut u64, size: usize, flags: c_uint) -> c_int {
    // SAFETY: the caller's contract.
    with_trim(|| unsafe { driver(address, size, flags) })
}

/// Passes `cuMemCreate` to the driver. Releases cached memory if the device is full.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn create(
    driver: Create,
    handle: *mut u64,
    size: usize,
    properties: *const c_void,
    flags: u64,
) -> c_int {
    // SAFETY: the caller's contract.
    with_trim(|| unsafe { driver(handle, size, properties, flags) })
}

/// Serves `cuMemAllocAsync`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn allocate_async(driver: AllocateAsync, address: *mut u64, size: usize, stream: usize) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { allocate_on(address, size, stream, None, || driver(address, size, stream)) }
}

/// Serves `cuMemAllocAsync_ptsz`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn allocate_async_per_thread(
    driver: AllocateAsync,
    address: *mut u64,
    size: usize,
    stream: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { allocate_on(address, size, own(stream), None, || driver(address, size, stream)) }
}

/// Serves `cuMemAllocFromPoolAsync`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn allocate_from_pool(
    driver: AllocateFromPool,
    address: *mut u64,
    size: usize,
    pool: usize,
    stream: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { allocate_on(address, size, stream, Some(pool), || driver(address, size, pool, stream)) }
}

/// Serves `cuMemAllocFromPoolAsync_ptsz`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn allocate_from_pool_per_thread(
    driver: AllocateFromPool,
    address: *mut u64,
    size: usize,
    pool: usize,
    stream: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { allocate_on(address, size, own(stream), Some(pool), || driver(address, size, pool, stream)) }
}

/// Serves an allocation on a stream.
///
/// # Safety
/// See the driver's call, which the closure `call` makes.
unsafe fn allocate_on(
    address: *mut u64,
    size: usize,
    stream: usize,
    pool: Option<usize>,
    call: impl Fn() -> c_int,
) -> c_int {
    exit::begin();
    if is_watched() {
        // SAFETY: the driver wrote to the address if it succeeded.
        return unsafe { watch::allocated(call(), address, size as u64, Some(stream)) };
    }
    // SAFETY: the caller's contract.
    unsafe { served_or(address, size, |size| served::allocate_async(size, stream, pool), call) }
}

/// Serves `cuMemFree_v2`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn free(driver: Free, address: u64) -> c_int {
    // SAFETY: the caller's contract.
    let call = || unsafe { driver(address) };
    if is_watched() {
        return watch::freed(address, None, call);
    }
    match tally::timed(|| served::free(address)) {
        Outcome::Done(()) => SUCCESS,
        Outcome::Failed(code) => code,
        Outcome::Driver => call(),
    }
}

/// Serves `cuMemFreeAsync`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn free_async(driver: FreeAsync, address: u64, stream: usize) -> c_int {
    // SAFETY: the caller's contract.
    free_on(address, stream, || unsafe { driver(address, stream) })
}

/// Serves `cuMemFreeAsync_ptsz`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn free_async_per_thread(driver: FreeAsync, address: u64, stream: usize) -> c_int {
    // SAFETY: the caller's contract.
    free_on(address, own(stream), || unsafe { driver(address, stream) })
}

fn free_on(address: u64, stream: usize, call: impl Fn() -> c_int) -> c_int {
    if is_watched() {
        return watch::freed(address, Some(stream), call);
    }
    match tally::timed(|| served::free_async(address, stream)) {
        Outcome::Done(()) => SUCCESS,
        Outcome::Failed(code) => code,
        Outcome::Driver => call(),
    }
}

/// Serves `cuMemGetInfo_v2`: reports the memory that the program can still allocate. This is the free device memory and
/// the free cached memory, within the limit.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn info(driver: Info, free: *mut usize, total: *mut usize) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(free, total) };
    let context = if code == SUCCESS && !is_watched() { contexts::current() } else { None };
    let Some(context) = context.filter(|_| !free.is_null() && !total.is_null()) else { return code };
    let stats = context.allocator().stats();
    let cached = context.cached_bytes() as usize;
    // SAFETY: the driver wrote to both pointers.
    unsafe {
        free.write((free.read() + cached).min(total.read()));
        if let Some(limit) = context.allocator().core().total_limit_bytes() {
            let left = limit.saturating_sub(stats.usage.all.allocated_bytes.current);
            free.write(free.read().min(left as usize));
            total.write(total.read().min(limit as usize));
        }
    }
    code
}
