//! Queries about contexts, streams and pointers, and the allocation calls that symmalloc itself never uses.

use crate::external::stream_key;
use crate::model::{self, Code, THREAD};
use crate::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, answer, call, call_in_context};
use crate::{call_outside_capture, here};
use std::ffi::{c_int, c_uint, c_void};

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ALREADY_ENABLED: Code = Code(704);

/// Writes one attribute of the memory at an address. `None` denotes an address without memory.
///
/// # Safety
/// `value` must be valid for writing the attribute's type.
unsafe fn write_attribute(value: *mut c_void, attribute: c_int, found: Option<(u64, u64, c_int)>, pool: u64) {
    let (base, size, device) = found.unwrap_or((0, 0, 0));
    // SAFETY: guaranteed by the caller.
    unsafe {
        match attribute {
            1 => answer(value.cast(), if found.is_some() { model::context_of(device) } else { 0 }),
            2 => answer(value.cast(), if found.is_some() { 2_u32 } else { 0 }),
            7 | 11 => answer(value.cast(), base),
            9 => answer(value.cast(), if found.is_some() { device } else { -2 }),
            10 => answer(value.cast(), u8::from(found.is_some())),
            12 => answer(value.cast(), size),
            17 => answer(value.cast(), pool),
            _ => {}
        }
    }
}

stub! {
    call cuCtxCreate_v2(context: *mut usize, flags: c_uint, device: c_int) |state| {
        state.own_contexts += 1;
        let own = model::context_of(device) + state.own_contexts;
        THREAD.with_borrow_mut(|thread| thread.contexts.push(own));
        answer(context, own);
        Ok(())
    };
    call cuCtxDestroy_v2(context: usize) |state| {
        THREAD.with_borrow_mut(|thread| thread.contexts.retain(|current| *current != context));
        Ok(())
    };
    call cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) |state| {
        answer(flags, 0);
        answer(active, c_int::from(state.retained_of.get(&device).is_some_and(|count| *count > 0)));
        Ok(())
    };
    call cuDevicePrimaryCtxReset_v2(device: c_int) |state| {
        state.free_all(device);
        Ok(())
    };
    call_in_context cuCtxEnablePeerAccess(context: usize, flags: c_uint) |state| {
        let peer = model::device_of(context);
        if state.peers.insert((here(), peer)) { Ok(()) } else { Err(ALREADY_ENABLED) }
    };
    call cuStreamGetCtx(stream: u64, context: *mut usize) |state| {
        let device = state.stream(stream_key(stream)).ok_or(INVALID_HANDLE)?.device;
        answer(context, model::context_of(device));
        Ok(())
    };
    call_outside_capture cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint) |state| {
        let row = width.next_multiple_of(512);
        answer(address, state.allocate((row * height) as u64, here()).ok_or(OUT_OF_MEMORY)?);
        answer(pitch, row);
        Ok(())
    };
    call_outside_capture cuMemAllocManaged(address: *mut u64, size: usize, flags: c_uint) |state| {
        answer(address, state.allocate(size as u64, here()).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_in_context cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) |state| {
        let (at, bytes, _) = state.memory.allocation(address).ok_or(INVALID_VALUE)?;
        answer(base, at);
        answer(size, bytes as usize);
        Ok(())
    };
    call cuPointerGetAttribute(value: *mut c_void, attribute: c_int, address: u64) |state| {
        // For mapped memory, the driver reports the whole mapping and no context.
        let found = state.memory.allocation(address);
        let mapped = state.is_mapped(address);
        if found.is_none() && !mapped { return Err(INVALID_VALUE); }
        if found.is_none() && attribute == 1 { return Err(INVALID_VALUE); }
        let pool = found.and_then(|(base, ..)| state.pooled.get(&base).copied()).unwrap_or(0);
        write_attribute(value, attribute, found.or(Some((0, 0, 0))), pool);
        Ok(())
    };
    call cuPointerGetAttributes(count: c_uint, attributes: *const c_int, values: *const *mut c_void, address: u64) |state| {
        let found = state.memory.allocation(address);
        let pool = found.and_then(|(base, ..)| state.pooled.get(&base).copied()).unwrap_or(0);
        for at in 0..count as usize {
            write_attribute(values.add(at).read(), attributes.add(at).read(), found, pool);
        }
        Ok(())
    };
    call_in_context cuIpcGetMemHandle(handle: *mut c_void, address: u64) |state| {
        let (base, ..) = state.memory.allocation(address).ok_or(INVALID_VALUE)?;
        if state.pooled.contains_key(&base) { return Err(NOT_SUPPORTED); }
        answer(handle.cast(), base);
        Ok(())
    };
}
