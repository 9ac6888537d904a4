//! Stream-ordered allocation and memory pools. Memory is allocated immediately. It is freed immediately too, after the work before it.

use crate::external::stream_key;
use crate::model::{Code, Pool, State, default_pool_of};
use crate::{INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, answer, call, call_in_context};
use std::ffi::{c_int, c_void};

/// Allocates from a pool for a stream. A stream that is being captured gets memory of its graph, which belongs to no pool.
///
/// # Safety
/// `address` must be valid for writing.
unsafe fn take(state: &mut State, address: *mut u64, size: usize, pool: Option<u64>, stream: u64) -> Result<(), Code> {
    let known = state.stream(stream).ok_or(INVALID_HANDLE)?;
    let (device, is_captured) = (known.device, known.capture.is_some());
    if size == 0 {
        return Err(INVALID_VALUE);
    }
    let pool = pool.unwrap_or_else(|| state.current_pools.get(&device).copied().unwrap_or(default_pool_of(device)));
    let at = state.pools.get(&pool).ok_or(INVALID_VALUE)?.device;
    let base = state.allocate(size as u64, at).ok_or(OUT_OF_MEMORY)?;
    if !is_captured {
        state.pooled.insert(base, pool);
        let pool = state.pools.get_mut(&pool).expect("the element should exist, because it was seen above");
        pool.used += size as u64;
        pool.used_peak = pool.used_peak.max(pool.used);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { answer(address, base) };
    Ok(())
}

/// Frees memory of a pool, of a graph, or of `cuMemAlloc`.
fn give(state: &mut State, address: u64, stream: u64) -> Result<(), Code> {
    let last = state.stream(stream).ok_or(INVALID_HANDLE)?.submitted;
    state.run(stream, last);
    let (base, size, _) =
        state.memory.allocation(address).filter(|(base, ..)| *base == address).ok_or(INVALID_VALUE)?;
    state.forget_pooled(base, size);
    state.free(address).ok_or(INVALID_VALUE)
}

/// Returns the key of a stream for the calls whose default stream is per thread.
fn own_key(stream: u64) -> u64 {
    stream_key(if stream == 0 { 2 } else { stream })
}

stub! {
    call_in_context cuMemAllocAsync(address: *mut u64, size: usize, stream: u64) |state| {
        take(state, address, size, None, stream_key(stream))
    };
    call_in_context cuMemAllocAsync_ptsz(address: *mut u64, size: usize, stream: u64) |state| {
        take(state, address, size, None, own_key(stream))
    };
    call_in_context cuMemAllocFromPoolAsync(address: *mut u64, size: usize, pool: u64, stream: u64) |state| {
        take(state, address, size, Some(pool), stream_key(stream))
    };
    call_in_context cuMemAllocFromPoolAsync_ptsz(address: *mut u64, size: usize, pool: u64, stream: u64) |state| {
        take(state, address, size, Some(pool), own_key(stream))
    };
    call_in_context cuMemFreeAsync(address: u64, stream: u64) |state| give(state, address, stream_key(stream));
    call_in_context cuMemFreeAsync_ptsz(address: u64, stream: u64) |state| give(state, address, own_key(stream));

    call cuDeviceGetDefaultMemPool(pool: *mut u64, device: c_int) |state| {
        if !(0..state.options.devices).contains(&device) { return Err(INVALID_DEVICE); }
        answer(pool, default_pool_of(device));
        Ok(())
    };
    call cuDeviceGetMemPool(pool: *mut u64, device: c_int) |state| {
        answer(pool, state.current_pools.get(&device).copied().unwrap_or(default_pool_of(device)));
        Ok(())
    };
    call cuDeviceSetMemPool(device: c_int, pool: u64) |state| {
        if !state.pools.contains_key(&pool) { return Err(INVALID_VALUE); }
        state.current_pools.insert(device, pool);
        Ok(())
    };
    call cuMemPoolCreate(pool: *mut u64, properties: *const c_int) |state| {
        // The words of the properties: allocation type, handle types, location type, device.
        let device = properties.add(3).read();
        let handle = state.handle();
        state.pools.insert(handle, Pool::new(device));
        answer(pool, handle);
        Ok(())
    };
    call cuMemPoolDestroy(pool: u64) |state| {
        state.current_pools.retain(|_, current| *current != pool);
        state.pools.remove(&pool).map(|_| ()).ok_or(INVALID_VALUE)
    };
    call cuMemPoolGetAttribute(pool: u64, attribute: c_int, value: *mut c_void) |state| {
        let pool = state.pools.get(&pool).ok_or(INVALID_VALUE)?;
        match attribute {
            1..=3 => answer(value.cast(), 1_i32),
            4 => answer(value.cast(), pool.release_threshold),
            5 | 7 => answer(value.cast(), pool.used),
            6 | 8 => answer(value.cast(), pool.used_peak),
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    };
    call cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: *mut c_void) |state| {
        let pool = state.pools.get_mut(&pool).ok_or(INVALID_VALUE)?;
        match attribute {
            1..=3 => {}
            4 => pool.release_threshold = value.cast::<u64>().read(),
            6 | 8 => pool.used_peak = pool.used,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    };
    call cuMemPoolTrimTo(pool: u64, keep: usize) |state| {
        if state.pools.contains_key(&pool) { Ok(()) } else { Err(INVALID_VALUE) }
    };
    call cuMemPoolSetAccess(pool: u64, access: *const [c_int; 3], count: usize) |state| {
        if state.pools.contains_key(&pool) { Ok(()) } else { Err(INVALID_VALUE) }
    };
}

impl State {
    /// Records that memory of a pool was freed.
    pub fn forget_pooled(&mut self, base: u64, size: u64) {
        if let Some(pool) = self.pooled.remove(&base).and_then(|pool| self.pools.get_mut(&pool)) {
            pool.used -= size;
        }
    }
}
