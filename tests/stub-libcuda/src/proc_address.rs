//! `cuGetProcAddress`, for the calls that test programs look up with it.
//!
//! A name denotes the newest call of the version that the program requests. With `STUB_TRAMPOLINES`, some lookups return addresses that are
//! not exported, which a program must tolerate.

use crate::model::with;
use std::ffi::{CStr, c_char, c_int, c_void};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;
/// `CU_GET_PROC_ADDRESS_SUCCESS`, `..._SYMBOL_NOT_FOUND`, `..._VERSION_NOT_SUFFICIENT`.
const STATUS: [c_int; 3] = [0, 1, 2];

/// Base name, version that introduced the call, whether it is per thread, and the call.
type Row = (&'static str, c_int, bool, *const ());

macro_rules! rows {
    ($($base:literal $since:literal $kind:ident $call:path;)*) => { [$(($base, $since, rows!(@ $kind), $call as *const ())),*] };
    (@ plain) => { false };
    (@ per_thread) => { true };
}

fn rows() -> [Row; 44] {
    rows! {
        "cuInit" 2000 plain crate::cuInit;
        "cuDeviceGet" 2000 plain crate::cuDeviceGet;
        "cuDevicePrimaryCtxRetain" 7000 plain crate::cuDevicePrimaryCtxRetain;
        "cuDevicePrimaryCtxRelease" 11000 plain crate::cuDevicePrimaryCtxRelease_v2;
        "cuDevicePrimaryCtxReset" 11000 plain crate::questions::cuDevicePrimaryCtxReset_v2;
        "cuCtxSetCurrent" 4000 plain crate::cuCtxSetCurrent;
        "cuCtxSynchronize" 2000 plain crate::cuCtxSynchronize;
        "cuMemAlloc" 2000 plain cuMemAlloc;
        "cuMemAlloc" 3020 plain crate::cuMemAlloc_v2;
        "cuMemFree" 3020 plain crate::cuMemFree_v2;
        "cuMemAllocPitch" 3020 plain crate::questions::cuMemAllocPitch_v2;
        "cuMemGetInfo" 3020 plain crate::cuMemGetInfo_v2;
        "cuMemGetAddressRange" 3020 plain crate::questions::cuMemGetAddressRange_v2;
        "cuPointerGetAttribute" 4000 plain crate::questions::cuPointerGetAttribute;
        "cuMemAllocAsync" 11020 plain crate::pools::cuMemAllocAsync;
        "cuMemAllocAsync" 11020 per_thread crate::pools::cuMemAllocAsync_ptsz;
        "cuMemAllocFromPoolAsync" 11020 plain crate::pools::cuMemAllocFromPoolAsync;
        "cuMemAllocFromPoolAsync" 11020 per_thread crate::pools::cuMemAllocFromPoolAsync_ptsz;
        "cuMemFreeAsync" 11020 plain crate::pools::cuMemFreeAsync;
        "cuMemFreeAsync" 11020 per_thread crate::pools::cuMemFreeAsync_ptsz;
        "cuDeviceGetDefaultMemPool" 11020 plain crate::pools::cuDeviceGetDefaultMemPool;
        "cuDeviceSetMemPool" 11020 plain crate::pools::cuDeviceSetMemPool;
        "cuMemPoolCreate" 11020 plain crate::pools::cuMemPoolCreate;
        "cuMemPoolDestroy" 11020 plain crate::pools::cuMemPoolDestroy;
        "cuMemPoolGetAttribute" 11020 plain crate::pools::cuMemPoolGetAttribute;
        "cuMemPoolSetAttribute" 11020 plain crate::pools::cuMemPoolSetAttribute;
        "cuMemPoolTrimTo" 11020 plain crate::pools::cuMemPoolTrimTo;
        "cuMemsetD32Async" 3020 plain crate::cuMemsetD32Async;
        "cuMemsetD8Async" 3020 plain crate::cuMemsetD8Async;
        "cuMemcpyDtoHAsync" 3020 plain crate::cuMemcpyDtoHAsync_v2;
        "cuStreamCreate" 2000 plain crate::cuStreamCreate;
        "cuStreamDestroy" 4000 plain crate::cuStreamDestroy_v2;
        "cuStreamSynchronize" 2000 plain crate::cuStreamSynchronize;
        "cuStreamBeginCapture" 10010 plain crate::cuStreamBeginCapture_v2;
        "cuStreamEndCapture" 10000 plain crate::cuStreamEndCapture;
        "cuStreamIsCapturing" 10000 plain crate::cuStreamIsCapturing;
        "cuEventCreate" 2000 plain crate::cuEventCreate;
        "cuEventRecord" 2000 plain crate::cuEventRecord;
        "cuEventDestroy" 4000 plain crate::cuEventDestroy_v2;
        "cuStreamWaitEvent" 3020 plain crate::cuStreamWaitEvent;
        "cuGraphDestroy" 10000 plain crate::cuGraphDestroy;
        "cuIpcGetMemHandle" 4010 plain crate::questions::cuIpcGetMemHandle;
        "cuGetProcAddress" 11030 plain cuGetProcAddress;
        "cuGetProcAddress" 12000 plain cuGetProcAddress_v2;
    }
}

/// `cuMemAlloc` from before CUDA 3.2, with 32-bit addresses. It always fails, because no address fits.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc(_address: *mut u32, _size: u32) -> c_int {
    2
}

unsafe extern "C" fn other_cu_mem_alloc(address: *mut u64, size: usize) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { crate::cuMemAlloc_v2(address, size) }
}

unsafe extern "C" fn other_cu_mem_free(address: u64) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { crate::cuMemFree_v2(address) }
}

unsafe extern "C" fn other_cu_mem_alloc_async(address: *mut u64, size: usize, stream: u64) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { crate::pools::cuMemAllocAsync(address, size, stream) }
}

unsafe extern "C" fn other_cu_mem_alloc_async_ptsz(address: *mut u64, size: usize, stream: u64) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { crate::pools::cuMemAllocAsync_ptsz(address, size, stream) }
}

fn other(base: &str, since: c_int, is_per_thread: bool) -> Option<*const ()> {
    match (base, since, is_per_thread) {
        ("cuMemAlloc", 3020, _) => Some(other_cu_mem_alloc as *const ()),
        ("cuMemFree", ..) => Some(other_cu_mem_free as *const ()),
        ("cuMemAllocAsync", _, false) => Some(other_cu_mem_alloc_async as *const ()),
        ("cuMemAllocAsync", _, true) => Some(other_cu_mem_alloc_async_ptsz as *const ()),
        _ => None,
    }
}

/// Returns the call, or the reason there is none, as an index into [`STATUS`].
fn find(name: &str, version: c_int, flags: u64) -> Result<*const (), usize> {
    let rows = rows();
    let named = rows.iter().filter(|row| row.0 == name);
    let wants_own = flags & PER_THREAD != 0;
    let is_told_apart = named.clone().any(|row| row.2);
    let fitting = named.clone().filter(|row| row.1 <= version && row.2 == (wants_own && is_told_apart));
    match fitting.max_by_key(|row| row.1) {
        Some((base, since, is_per_thread, call)) => {
            let has_trampolines = with(|state| state.options.has_trampolines);
            Ok(other(base, *since, *is_per_thread).filter(|_| has_trampolines).unwrap_or(*call))
        }
        None if named.count() > 0 => Err(2),
        None => Err(1),
    }
}

/// Looks up a call, as in CUDA 11.3.
///
/// # Safety
/// See the CUDA driver API.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let found = find(&name, version, flags);
    // SAFETY: guaranteed by the caller.
    unsafe { function.write(found.map_or(std::ptr::null_mut(), |call| call as *mut c_void)) };
    if found.is_ok() { 0 } else { 500 }
}

/// Looks up a call, as in CUDA 12.
///
/// # Safety
/// See the CUDA driver API.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let found = find(&name, version, flags);
    // SAFETY: guaranteed by the caller; the status may be null.
    unsafe {
        function.write(found.map_or(std::ptr::null_mut(), |call| call as *mut c_void));
        if !status.is_null() {
            status.write(STATUS[found.map_or_else(|reason| reason, |_| 0)]);
        }
    }
    if found.is_ok() { 0 } else { 500 }
}
