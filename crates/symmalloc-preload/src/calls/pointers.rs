//! Queries about pointers. They give the same kind of answers for served memory as for the driver's own memory.
//!
//! A served allocation is a part of a larger mapped range, for which the driver would report the whole range, and no context. This file
//! therefore answers the attributes that depend on the allocation. The driver answers all others.

use crate::ledger::Found;
use crate::live::{LIVE, Live};
use crate::outcome::{INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::pools::MemPool;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Once;
use symmalloc_files::say;

/// The values of `CUpointer_attribute` that are answered here.
mod attribute_number {
    use std::ffi::c_int;
    pub(super) const CONTEXT: c_int = 1;
    pub(super) const BUFFER_ID: c_int = 7;
    pub(super) const IS_LEGACY_IPC_CAPABLE: c_int = 10;
    pub(super) const RANGE_START: c_int = 11;
    pub(super) const RANGE_SIZE: c_int = 12;
    pub(super) const MEMPOOL: c_int = 17;
}

/// Serves `cuMemGetAddressRange_v2`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn address_range(
    driver: unsafe extern "C" fn(*mut u64, *mut usize, u64) -> c_int,
    base: *mut u64,
    size: *mut usize,
    address: u64,
) -> c_int {
    let Some(found) = LIVE.around(address) else {
        // SAFETY: the caller's contract.
        return unsafe { driver(base, size, address) };
    };
    // SAFETY: each pointer is null or valid for writing.
    unsafe {
        if !base.is_null() {
            base.write(found.address);
        }
        if !size.is_null() {
            size.write(found.size_bytes as usize);
        }
    }
    SUCCESS
}

/// Writes an attribute that depends on the allocation. Returns `true` if it wrote one.
///
/// # Safety
/// `value` is valid for writing the attribute's type.
unsafe fn answer(found: &Found<Live>, attribute: c_int, value: *mut c_void) -> bool {
    let Live { context, handle, pool, .. } = found.known;
    let number = match attribute {
        attribute_number::CONTEXT => context.raw() as u64,
        attribute_number::BUFFER_ID => handle.into_raw().1,
        attribute_number::RANGE_START => found.address,
        attribute_number::RANGE_SIZE => found.size_bytes,
        attribute_number::MEMPOOL => pool.map_or(0, MemPool::raw) as u64,
        attribute_number::IS_LEGACY_IPC_CAPABLE => {
            // SAFETY: by the caller's contract, `value` is valid for writing the attribute, a C bool.
            unsafe { value.cast::<u8>().write(0) };
            return true;
        }
        _ => return false,
    };
    // SAFETY: by the caller's contract, `value` is valid for writing the attribute: eight bytes, whether it is a handle, an address, a size
    // or a number.
    unsafe { value.cast::<u64>().write_unaligned(number) };
    true
}

/// Serves `cuPointerGetAttribute`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn attribute(
    driver: unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int,
    value: *mut c_void,
    attribute: c_int,
    address: u64,
) -> c_int {
    if value.is_null() {
        return INVALID_VALUE;
    }
    if let Some(found) = LIVE.around(address) {
        // SAFETY: the caller's contract.
        if unsafe { answer(&found, attribute, value) } {
            return SUCCESS;
        }
    }
    // SAFETY: the caller's contract.
    unsafe { driver(value, attribute, address) }
}

/// Serves `cuPointerGetAttributes`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn attributes(
    driver: unsafe extern "C" fn(c_uint, *const c_int, *const *mut c_void, u64) -> c_int,
    count: c_uint,
    attributes: *const c_int,
    values: *const *mut c_void,
    address: u64,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(count, attributes, values, address) };
    if code == SUCCESS
        && let Some(found) = LIVE.around(address)
    {
        for at in 0..count as usize {
            // SAFETY: the driver read `count` entries of both arrays, and wrote to each value.
            unsafe { answer(&found, attributes.add(at).read(), values.add(at).read()) };
        }
    }
    code
}

/// Exports memory through legacy IPC. Served memory does not support it, because it is a part of a larger mapping.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn ipc_handle(
    driver: unsafe extern "C" fn(*mut c_void, u64) -> c_int,
    handle: *mut c_void,
    address: u64,
) -> c_int {
    if LIVE.around(address).is_none() {
        // SAFETY: the caller's contract.
        return unsafe { driver(handle, address) };
    }
    static IS_SAID: Once = Once::new();
    IS_SAID.call_once(|| {
        say(format_args!(
            "cuIpcGetMemHandle: this memory is a part of a larger mapping, which legacy IPC handles do not support; start the \
             program with `symmalloc run --ipc`, which leaves cuMemAlloc to the driver"
        ));
    });
    NOT_SUPPORTED
}
