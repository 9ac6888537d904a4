//! The driver calls that this library serves. This file generates an exported function for each call in the list below.
//!
//! ```text
//!  program ── cuMemAllocAsync ─► boundary ─► memory::allocate_async(driver's call, ...) ── served, or passed to the driver
//!                                   │
//!                                   ╰ a forked child, a call that the driver makes during one of our calls,
//!                                     invalid settings ─► the driver's call
//! ```

mod contexts;
mod memory;
mod pointers;
mod pools;
mod proc_address;
mod streams;

use crate::forks;
use crate::libcuda::{self, NOT_FOUND};
use crate::outcome::UNKNOWN;
use crate::pools::PoolProperties;
use crate::served_call::ServedCall;
use crate::settings::settings;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use symmalloc_files::say;

thread_local! {
    /// `true` while this thread is inside a served call. Calls that libcuda makes in the meantime are passed to the
    /// driver.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Guard that marks the end of a served call when it is dropped.
struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        IS_INSIDE.set(false);
    }
}

/// Runs `served`, or passes the call to the driver inside another served call, in a forked child, or if the settings
/// are invalid. Catches panics, which indicate a failed internal assertion.
#[inline]
fn boundary(served: impl FnOnce() -> c_int, driver: impl FnOnce() -> c_int) -> c_int {
    if IS_INSIDE.get() || forks::is_forked() || settings().is_none() {
        return driver();
    }
    IS_INSIDE.set(true);
    let _inside = Inside;
    catch_unwind(AssertUnwindSafe(served)).unwrap_or_else(|_panic| {
        say(format_args!("internal error in symmalloc: please report it with the preceding lines"));
        UNKNOWN
    })
}

macro_rules! served {
    ($($symbol:ident($base:literal, $since:literal)($($arg:ident: $type:ty),*) => $serve:expr;)*) => {
        /// The names and addresses of each served call.
        #[allow(non_upper_case_globals, reason = "the driver's names")]
        mod known {
            use crate::served_call::ServedCall;

            $(
                pub(super) static $symbol: ServedCall = {
                    const SYMBOL: &std::ffi::CStr =
                        match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
                            Ok(symbol) => symbol,
                            Err(_) => panic!("symbol names contain no null byte"),
                        };
                    ServedCall::new(SYMBOL, $base, $since, super::$symbol as *const ())
                };
            )*
        }

        /// All served calls.
        pub(crate) static ALL: [&ServedCall; [$(stringify!($symbol)),*].len()] = [$(&known::$symbol),*];

        $(
            /// See the CUDA driver API.
            ///
            /// # Safety
            /// See the CUDA driver API.
            #[allow(non_snake_case, reason = "the driver's name")]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $symbol($($arg: $type),*) -> c_int {
                let found = libcuda::if_loaded().map_or(std::ptr::null_mut(), |library| known::$symbol.driver(library));
                if found.is_null() {
                    return NOT_FOUND;
                }
                // SAFETY: the type matches the driver's call.
                let driver = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(found) };
                // SAFETY: the caller upholds the driver's contract, which is also that of `$serve`.
                boundary(|| unsafe { ($serve)(driver, $($arg),*) }, || unsafe { driver($($arg),*) })
            }
        )*
    };
}

served! {
    cuGetProcAddress("cuGetProcAddress", 11030)
        (symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64) => |driver, symbol, function, version, flags| {
            proc_address::first(&ALL, driver, symbol, function, version, flags)
        };
    cuGetProcAddress_v2("cuGetProcAddress", 12000)
        (symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int) => |driver, symbol, function, version, flags, status| {
            proc_address::second(&ALL, driver, symbol, function, version, flags, status)
        };

    cuMemAlloc_v2("cuMemAlloc", 3020)(address: *mut u64, size: usize) => memory::allocate;
    cuMemAllocPitch_v2("cuMemAllocPitch", 3020)
        (address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint) => memory::allocate_pitch;
    cuMemAllocManaged("cuMemAllocManaged", 6000)(address: *mut u64, size: usize, flags: c_uint) => memory::allocate_managed;
    cuMemCreate("cuMemCreate", 10020)
        (handle: *mut u64, size: usize, properties: *const c_void, flags: u64) => memory::create;
    cuMemFree_v2("cuMemFree", 3020)(address: u64) => memory::free;
    cuMemAllocAsync("cuMemAllocAsync", 11020)(address: *mut u64, size: usize, stream: usize) => memory::allocate_async;
    cuMemAllocAsync_ptsz("cuMemAllocAsync", 11020)
        (address: *mut u64, size: usize, stream: usize) => memory::allocate_async_per_thread;
    cuMemAllocFromPoolAsync("cuMemAllocFromPoolAsync", 11020)
        (address: *mut u64, size: usize, pool: usize, stream: usize) => memory::allocate_from_pool;
    cuMemAllocFromPoolAsync_ptsz("cuMemAllocFromPoolAsync", 11020)
        (address: *mut u64, size: usize, pool: usize, stream: usize) => memory::allocate_from_pool_per_thread;
    cuMemFreeAsync("cuMemFreeAsync", 11020)(address: u64, stream: usize) => memory::free_async;
    cuMemFreeAsync_ptsz("cuMemFreeAsync", 11020)(address: u64, stream: usize) => memory::free_async_per_thread;
    cuMemGetInfo_v2("cuMemGetInfo", 3020)(free: *mut usize, total: *mut usize) => memory::info;

    cuMemGetAddressRange_v2("cuMemGetAddressRange", 3020)
        (base: *mut u64, size: *mut usize, address: u64) => pointers::address_range;
    cuPointerGetAttribute("cuPointerGetAttribute", 4000)
        (value: *mut c_void, attribute: c_int, address: u64) => pointers::attribute;
    cuPointerGetAttributes("cuPointerGetAttributes", 7000)
        (count: c_uint, attributes: *const c_int, values: *const *mut c_void, address: u64) => pointers::attributes;
    cuIpcGetMemHandle("cuIpcGetMemHandle", 4010)(handle: *mut c_void, address: u64) => pointers::ipc_handle;

    cuStreamDestroy_v2("cuStreamDestroy", 4000)(stream: usize) => streams::destroy;
    cuStreamBeginCapture("cuStreamBeginCapture", 10000)(stream: usize) => streams::begin_capture_first;
    cuStreamBeginCapture_ptsz("cuStreamBeginCapture", 10000)(stream: usize) => streams::begin_capture_first_per_thread;
    cuStreamBeginCapture_v2("cuStreamBeginCapture", 10010)(stream: usize, mode: c_int) => streams::begin_capture;
    cuStreamBeginCapture_v2_ptsz("cuStreamBeginCapture", 10010)
        (stream: usize, mode: c_int) => streams::begin_capture_per_thread;
    cuStreamBeginCaptureToGraph("cuStreamBeginCaptureToGraph", 12030)
        (stream: usize, graph: usize, dependencies: *const c_void, data: *const c_void, count: usize, mode: c_int)
        => streams::begin_capture_to_graph;
    cuStreamBeginCaptureToGraph_ptsz("cuStreamBeginCaptureToGraph", 12030)
        (stream: usize, graph: usize, dependencies: *const c_void, data: *const c_void, count: usize, mode: c_int)
        => streams::begin_capture_to_graph_per_thread;
    cuStreamEndCapture("cuStreamEndCapture", 10000)(stream: usize, graph: *mut usize) => streams::end_capture;
    cuStreamEndCapture_ptsz("cuStreamEndCapture", 10000)
        (stream: usize, graph: *mut usize) => streams::end_capture_per_thread;

    cuMemPoolCreate("cuMemPoolCreate", 11020)(pool: *mut usize, properties: *const PoolProperties) => pools::create;
    cuMemPoolDestroy("cuMemPoolDestroy", 11020)(pool: usize) => pools::destroy;
    cuMemPoolGetAttribute("cuMemPoolGetAttribute", 11020)
        (pool: usize, attribute: c_int, value: *mut c_void) => pools::attribute;
    cuMemPoolSetAttribute("cuMemPoolSetAttribute", 11020)
        (pool: usize, attribute: c_int, value: *mut c_void) => pools::set_attribute;
    cuMemPoolTrimTo("cuMemPoolTrimTo", 11020)(pool: usize, keep: usize) => pools::trim_to;
    cuMemPoolSetAccess("cuMemPoolSetAccess", 11020)
        (pool: usize, access: *const [c_int; 3], count: usize) => pools::set_access;
    cuDeviceSetMemPool("cuDeviceSetMemPool", 11020)(device: c_int, pool: usize) => pools::set_current;
    cuMemSetMemPool("cuMemSetMemPool", 13000)
        (location: *const [c_int; 2], kind: c_int, pool: usize) => pools::set_current_of_location;

    cuCtxEnablePeerAccess("cuCtxEnablePeerAccess", 4000)(context: usize, flags: c_uint) => contexts::enable_peer;
    cuDevicePrimaryCtxRetain("cuDevicePrimaryCtxRetain", 7000)
        (context: *mut usize, device: c_int) => contexts::retain;
    cuDevicePrimaryCtxRelease("cuDevicePrimaryCtxRelease", 7000)(device: c_int) => contexts::release;
    cuDevicePrimaryCtxRelease_v2("cuDevicePrimaryCtxRelease", 11000)(device: c_int) => contexts::release;
    cuDevicePrimaryCtxReset("cuDevicePrimaryCtxReset", 7000)(device: c_int) => contexts::reset;
    cuDevicePrimaryCtxReset_v2("cuDevicePrimaryCtxReset", 11000)(device: c_int) => contexts::reset;
}
