//! A libcuda without a device: the calls that `symmalloc-cuda` and cudarc's buffers make, over host memory.
//!
//! Tests put the shared library of this package on the library path under the name `libcuda.so`. The stub is as strict as the driver about
//! current contexts, whole mappings, and calls that a stream capture forbids. Its memory is real host memory, so tests can check copies and
//! zeros. Work takes effect when it is submitted, or with `STUB_LAZY` when something waits for it. It *completes* only once a host wait covers
//! it; see `streams.rs`. The stub of libnccl submits its own work to the streams; see `external.rs`.
//!
//! | control | meaning |
//! |---|---|
//! | `STUB_NO_VMM`, `STUB_NO_FABRIC`, ... | environment: features that the device lacks; see `model.rs` |
//! | `STUB_LAZY` | environment: work takes effect only when something waits for it |
//! | `STUB_REUSE_STREAMS` | environment: a new stream gets the handle of a destroyed one |
//! | `STUB_TRAMPOLINES` | environment: `cuGetProcAddress` returns different addresses from those of the exported calls |
//! | `stub_fail(call, nth, code)` | makes the n-th call from now on fail once; n = 0: every call |
//! | `stub_fail_elsewhere(call, nth, code)` | the same, except for calls of this thread |
//! | `stub_fail_by_chance(one_in, seed, code)` | makes one call in `one_in` fail, on average |
//! | `stub_failed_by_chance(to, capacity)` | the names of the calls that failed by chance |
//! | `stub_advance(stream)` | runs the work of a stream until something blocks it; 1 if all of it has taken effect |
//! | `stub_heal()` | removes all faults |
//! | `stub_pause(call, nth)`, `stub_is_paused()`, `stub_resume()` | pauses the n-th call from now on after its effect; see `pause.rs` |
//! | `stub_log_begin()`, `stub_log_take(to, capacity)` | records submitted work and the waits that order it; see `log.rs` |
//! | `stub_calls(call)` | number of calls; null: of all calls |
//! | `stub_call_names(to, capacity)` | the names of all calls that were made |
//! | `stub_own_calls(call)` | number of calls by this thread |
//! | `stub_live(what)` | live resources: see [`model::Live`] |

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::missing_safety_doc, reason = "each call is the driver's: see the CUDA driver API")]

pub mod abi;
pub mod control;
pub mod external;
pub mod log;
pub mod memory;
pub mod model;
pub mod nvtx;
pub mod pause;
pub mod space;
pub mod streams;

use external::{deliver, stream_key};
use memory::Access;
use model::{Code, State, THREAD, Thread, WAIT, with, with_waiting};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use streams::{Capture, Event, Op};

const OK: c_int = 0;
/// The device number of host memory.
const HOST: c_int = -1;
const INVALID_VALUE: Code = Code(1);
const OUT_OF_MEMORY: Code = Code(2);
const INVALID_DEVICE: Code = Code(101);
const INVALID_CONTEXT: Code = Code(201);
const INVALID_HANDLE: Code = Code(400);
const NOT_READY: Code = Code(600);
const NOT_SUPPORTED: Code = Code(801);
const CAPTURE_UNSUPPORTED: Code = Code(900);
const CAPTURE_INVALIDATED: Code = Code(901);
const CAPTURE_UNJOINED: Code = Code(904);
const CAPTURE_ISOLATION: Code = Code(905);
const CAPTURED_EVENT: Code = Code(907);

/// Runs one call: counts it, then either injects a fault, or runs `act` once the work that it waits for has taken effect.
fn call(name: &'static str, mut act: impl FnMut(&mut State) -> Result<(), Code>) -> c_int {
    let (entered, time) = with(|state| (state.enter(name), state.time_of(name)));
    if !time.is_zero() {
        std::thread::sleep(time);
    }
    if entered.is_err() && name.ends_with("Synchronize") {
        // A wait that fails reports the error of earlier work, which is over.
        with(State::run_everything);
    }
    let outcome = entered.and_then(|()| with_waiting(&mut act));
    deliver();
    pause::wait_after(name);
    match outcome {
        Ok(()) => OK,
        Err(Code(code)) => code,
    }
}

/// Like [`call`], for calls that require a current context.
fn call_in_context(name: &'static str, mut act: impl FnMut(&mut State) -> Result<(), Code>) -> c_int {
    call(name, |state| if device().is_none() { Err(INVALID_CONTEXT) } else { act(state) })
}

/// Like [`call_in_context`], for calls that are unsafe during a capture. If the thread's capture mode forbids the call, the
/// call fails and invalidates the captures that forbid it.
fn call_outside_capture(name: &'static str, mut act: impl FnMut(&mut State) -> Result<(), Code>) -> c_int {
    call_in_context(name, |state| if state.spoil_captures() { Err(CAPTURE_UNSUPPORTED) } else { act(state) })
}

/// Returns the device of the current context.
fn device() -> Option<c_int> {
    THREAD.with_borrow(Thread::device)
}

/// Returns the device of the current context, inside a call that requires one.
fn here() -> c_int {
    device().expect("a context is current")
}

/// Writes an output of a driver call.
///
/// # Safety
/// `to` must be valid for writing.
unsafe fn answer<T>(to: *mut T, value: T) {
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
}

macro_rules! stub {
    ($($kind:ident $name:ident($($arg:ident: $type:ty),*) |$state:ident| $body:expr;)*) => {
        $(
            /// See the CUDA driver API.
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, unused_variables, reason = "not every call writes an output or uses all arguments")]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                $kind(stringify!($name), |$state| {
                    // SAFETY: the caller meets the contract of the driver's call: pointers are valid, and handles are live.
                    unsafe { $body }
                })
            }
        )*
    };
}

// Declared after the macro, which these modules use.
pub mod pools;
pub mod proc_address;
pub mod questions;
pub mod sharing;

stub! {
    call cuInit(flags: c_uint) |state| if state.options.no_device { Err(Code(100)) } else { Ok(()) };
    call cuDriverGetVersion(version: *mut c_int) |state| { answer(version, 13000); Ok(()) };
    call cuDeviceGetCount(count: *mut c_int) |state| { answer(count, state.options.devices); Ok(()) };
    call cuDeviceGet(device: *mut c_int, ordinal: c_int) |state| {
        if !(0..state.options.devices).contains(&ordinal) { return Err(INVALID_DEVICE); }
        answer(device, ordinal);
        Ok(())
    };
    call cuDeviceGetName(name: *mut [u8; 5], length: c_int, device: c_int) |state| {
        if length < 5 { return Err(INVALID_VALUE); }
        answer(name, *b"stub\0");
        Ok(())
    };
    call cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) |state| {
        answer(value, c_int::from(state.options.has(attribute)));
        Ok(())
    };
    call cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) |state| {
        answer(can, c_int::from(device != peer));
        Ok(())
    };
    call cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) |state| {
        state.retained += 1;
        *state.retained_of.entry(device).or_default() += 1;
        answer(context, model::context_of(device));
        Ok(())
    };
    call cuDevicePrimaryCtxRelease_v2(device: c_int) |state| {
        state.retained -= 1;
        *state.retained_of.entry(device).or_default() -= 1;
        Ok(())
    };
    call cuCtxGetCurrent(context: *mut usize) |state| {
        answer(context, THREAD.with_borrow(|thread| thread.contexts.last().copied().unwrap_or(0)));
        Ok(())
    };
    call_in_context cuCtxGetDevice(device: *mut c_int) |state| { let _ = state; answer(device, here()); Ok(()) };
    call cuCtxSetCurrent(context: usize) |state| {
        THREAD.with_borrow_mut(|thread| { thread.contexts.pop(); thread.contexts.push(context); });
        Ok(())
    };
    call cuCtxPushCurrent_v2(context: usize) |state| {
        THREAD.with_borrow_mut(|thread| thread.contexts.push(context));
        Ok(())
    };
    call cuCtxPopCurrent_v2(context: *mut usize) |state| {
        let popped = THREAD.with_borrow_mut(|thread| thread.contexts.pop()).ok_or(INVALID_CONTEXT)?;
        answer(context, popped);
        Ok(())
    };
    call_outside_capture cuCtxSynchronize() |state| {
        if state.spoil_captures_of(here()) { return Err(CAPTURE_UNSUPPORTED); }
        if !state.run_all(here()) { return Err(WAIT); }
        state.complete_all(here());
        Ok(())
    };
    call_in_context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |state| {
        answer(free, (state.options.memory_bytes - state.memory.used_bytes(here())) as usize);
        answer(total, state.options.memory_bytes as usize);
        Ok(())
    };

    call_in_context cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const c_void, option: c_int) |state| {
        answer(bytes, model::GRANULARITY as usize);
        Ok(())
    };
    call_outside_capture cuMemAddressReserve(base: *mut u64, size: usize, alignment: usize, hint: u64, flags: c_ulonglong) |state| {
        if hint.checked_add(size as u64).is_none_or(|end| end > 1 << 47) { return Err(INVALID_VALUE); }
        answer(base, state.reserve_near(hint, size as u64, here()).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemAddressFree(base: u64, size: usize) |state| {
        let is_empty = state.memory.mappings.range(base..base + size as u64).next().is_none();
        let reserved = state.memory.ranges.get(&base).map(|(size, _)| *size);
        if reserved != Some(size as u64) || !is_empty { return Err(INVALID_VALUE); }
        state.unreserve(base);
        Ok(())
    };
    call_outside_capture cuMemCreate(handle: *mut u64, size: usize, properties: *const c_int, flags: c_ulonglong) |state| {
        // The words of the properties: allocation type, handle types, location type, device.
        let (handle_types, device) = (properties.add(1).read(), properties.add(3).read());
        if handle_types & 8 != 0 && state.options.fabric_refused { return Err(NOT_SUPPORTED); }
        if !(size as u64).is_multiple_of(model::GRANULARITY) || size == 0 { return Err(INVALID_VALUE); }
        answer(handle, state.create(size as u64, device, handle_types as u32).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemRelease(handle: u64) |state| state.release(handle).ok_or(INVALID_VALUE);
    call_outside_capture cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) |state| {
        answer(handle, state.retain_at(address as u64).ok_or(INVALID_VALUE)?);
        Ok(())
    };
    call_outside_capture cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) |state| {
        state.map(address, size as u64, handle).ok_or(INVALID_VALUE)
    };
    call_outside_capture cuMemSetAccess(address: u64, size: usize, access: *const c_void, count: usize) |state| {
        // The first descriptor: location type, device, flags.
        let access = if access.cast::<c_int>().add(2).read() == 1 { Access::Read } else { Access::ReadWrite };
        state.set_access(address, size as u64, access).ok_or(INVALID_VALUE)
    };
    call_outside_capture cuMemUnmap(address: u64, size: usize) |state| state.unmap(address, size as u64).ok_or(INVALID_VALUE);
    call_outside_capture cuMemAlloc_v2(address: *mut u64, size: usize) |state| {
        answer(address, state.allocate(size as u64, here()).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemFree_v2(address: u64) |state| {
        let (base, size, _) = state.memory.allocation(address).ok_or(INVALID_VALUE)?;
        if base == address { state.forget_pooled(base, size); }
        state.free(address).ok_or(INVALID_VALUE)
    };
    call_outside_capture cuMemHostAlloc(address: *mut u64, size: usize, flags: c_uint) |state| {
        answer(address, state.allocate(size as u64, HOST).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemFreeHost(address: u64) |state| state.free(address).ok_or(INVALID_VALUE);

    call_in_context cuMemsetD8Async(address: u64, value: u8, count: usize, stream: u64) |state| {
        state.submit(stream_key(stream), Op::Set { address, value, count })
    };
    call_in_context cuMemsetD32Async(address: u64, value: c_uint, count: usize, stream: u64) |state| {
        if !address.is_multiple_of(4) { return Err(INVALID_VALUE); }
        state.submit(stream_key(stream), Op::Set32 { address, value, count })
    };
    call_in_context cuMemcpyHtoDAsync_v2(to: u64, from: u64, count: usize, stream: u64) |state| {
        if state.is_pageable(from) { return state.write(stream_key(stream), to, from, count); }
        state.submit(stream_key(stream), Op::Copy { to, from, count })
    };
    call_in_context cuMemcpyDtoHAsync_v2(to: u64, from: u64, count: usize, stream: u64) |state| {
        if state.is_pageable(to) { return state.read(stream_key(stream), to, from, count); }
        state.submit(stream_key(stream), Op::Copy { to, from, count })
    };
    call_in_context cuMemcpyDtoDAsync_v2(to: u64, from: u64, count: usize, stream: u64) |state| {
        state.submit(stream_key(stream), Op::Copy { to, from, count })
    };

    call_in_context cuStreamCreate(stream: *mut u64, flags: c_uint) |state| {
        answer(stream, state.make_stream(here()));
        Ok(())
    };
    call_in_context cuStreamDestroy_v2(stream: u64) |state| state.destroy_stream(stream).ok_or(INVALID_HANDLE);
    call_outside_capture cuStreamSynchronize(stream: u64) |state| {
        let stream = stream_key(stream);
        let known = state.stream(stream).ok_or(INVALID_HANDLE)?;
        if let Some(capture) = known.capture {
            state.captures.get_mut(&capture).expect("the capture is in progress").is_valid = false;
            return Err(CAPTURE_UNSUPPORTED);
        }
        let last = known.submitted;
        if !state.run(stream, last) { return Err(WAIT); }
        state.complete(stream, last);
        Ok(())
    };
    call_in_context cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) |state| {
        let stream = stream_key(stream);
        let event = *state.events.get(&event).ok_or(INVALID_HANDLE)?;
        let waiting = state.stream(stream).ok_or(INVALID_HANDLE)?.capture;
        match (event.capture, waiting) {
            (None, Some(_)) => return Err(CAPTURE_ISOLATION),
            (Some(capture), _) if !state.captures.contains_key(&capture) => return Err(CAPTURED_EVENT),
            (Some(capture), Some(own)) if capture != own => return Err(CAPTURE_ISOLATION),
            (Some(capture), None) => state.streams.get_mut(&stream).expect("it should be known").capture = Some(capture),
            _ => {}
        }
        state.wait(stream, event);
        Ok(())
    };
    call_in_context cuStreamIsCapturing(stream: u64, status: *mut c_int) |state| {
        answer(status, c_int::from(state.stream(stream_key(stream)).ok_or(INVALID_HANDLE)?.capture.is_some()));
        Ok(())
    };
    call cuStreamGetCaptureInfo_v2(stream: u64, status: *mut c_int, id: *mut u64, graph: *mut u64, dependencies: *mut u64, count: *mut usize) |state| {
        let capture = state.stream(stream_key(stream)).ok_or(INVALID_HANDLE)?.capture;
        answer(status, c_int::from(capture.is_some()));
        answer(id, capture.unwrap_or(0));
        Ok(())
    };
    call_in_context cuStreamBeginCapture_v2(stream: u64, mode: c_int) |state| {
        let stream = stream_key(stream);
        if state.stream(stream).ok_or(INVALID_HANDLE)?.capture.is_some() { return Err(CAPTURE_UNSUPPORTED); }
        let id = state.handle();
        state.captures.insert(id, Capture::begin(stream, mode));
        state.streams.get_mut(&stream).expect("it should be known").capture = Some(id);
        Ok(())
    };
    call_in_context cuStreamEndCapture(stream: u64, graph: *mut u64) |state| {
        let id = state.stream(stream_key(stream)).ok_or(INVALID_HANDLE)?.capture.ok_or(CAPTURE_UNSUPPORTED)?;
        let is_joined = state.is_joined(id);
        let capture = state.captures.remove(&id).expect("the capture is in progress");
        state.streams.values_mut().filter(|stream| stream.capture == Some(id)).for_each(|stream| stream.capture = None);
        answer(graph, 0);
        if !capture.is_valid { return Err(CAPTURE_INVALIDATED); }
        if !is_joined { return Err(CAPTURE_UNJOINED); }
        let handle = state.handle();
        state.graphs.insert(handle, capture.ops);
        answer(graph, handle);
        Ok(())
    };
    call cuThreadExchangeStreamCaptureMode(mode: *mut c_int) |state| {
        let before = THREAD.with_borrow_mut(|thread| std::mem::replace(&mut thread.capture_mode, mode.read()));
        answer(mode, before);
        Ok(())
    };
    call_in_context cuGraphInstantiateWithFlags(exec: *mut u64, graph: u64, flags: c_ulonglong) |state| {
        let ops = state.graphs.get(&graph).cloned().ok_or(INVALID_HANDLE)?;
        let handle = state.handle();
        state.graphs.insert(handle, ops);
        answer(exec, handle);
        Ok(())
    };
    call_in_context cuGraphLaunch(exec: u64, stream: u64) |state| {
        let ops = state.graphs.get(&exec).cloned().ok_or(INVALID_HANDLE)?;
        ops.into_iter().try_for_each(|op| state.submit(stream_key(stream), op))
    };
    call cuGraphDestroy(graph: u64) |state| state.graphs.remove(&graph).map(|_| ()).ok_or(INVALID_HANDLE);
    call cuGraphExecDestroy(graph: u64) |state| state.graphs.remove(&graph).map(|_| ()).ok_or(INVALID_HANDLE);

    call_in_context cuModuleLoadData(module: *mut u64, image: *const c_void) |state| {
        answer(module, state.handle());
        Ok(())
    };
    call cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) |state| {
        answer(function, state.handle());
        Ok(())
    };
    call cuModuleUnload(module: u64) |state| Ok(());

    call_in_context cuEventCreate(event: *mut u64, flags: c_uint) |state| {
        let handle = state.handle();
        // CU_EVENT_DISABLE_TIMING
        state.events.insert(handle, Event { has_times: flags & 2 == 0, ..Event::default() });
        answer(event, handle);
        Ok(())
    };
    call_in_context cuEventDestroy_v2(event: u64) |state| state.events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE);
    call_in_context cuEventRecord(event: u64, stream: u64) |state| {
        let has_times = state.events.get(&event).ok_or(INVALID_HANDLE)?.has_times;
        let recorded = state.record(stream_key(stream)).ok_or(INVALID_HANDLE)?;
        state.events.insert(event, Event { has_times, ..recorded });
        Ok(())
    };
    call_outside_capture cuEventQuery(event: u64) |state| {
        let known = *state.events.get(&event).ok_or(INVALID_HANDLE)?;
        if known.capture.is_some() { return Err(CAPTURED_EVENT); }
        if state.poll(event) { Ok(()) } else { Err(NOT_READY) }
    };
    call cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) |state| {
        let known = [start, end].map(|event| state.events.get(&event).copied());
        let [Some(first), Some(last)] = known else { return Err(INVALID_HANDLE) };
        let both = [first, last];
        if both.iter().any(|event| !event.is_recorded || !event.has_times) { return Err(INVALID_HANDLE); }
        if both.iter().any(|event| event.capture.is_some()) { return Err(CAPTURED_EVENT); }
        if both.iter().any(|event| !state.has_run(event.stream, event.seq)) { return Err(NOT_READY); }
        answer(milliseconds, 0.0);
        Ok(())
    };
    call_outside_capture cuEventSynchronize(event: u64) |state| {
        let event = *state.events.get(&event).ok_or(INVALID_HANDLE)?;
        if event.capture.is_some() { return Err(CAPTURED_EVENT); }
        if !state.run(event.stream, event.seq) { return Err(WAIT); }
        state.complete(event.stream, event.seq);
        Ok(())
    };
}

/// Returns the name of one code that the crates do not know, and an error for all others.
///
/// # Safety
/// `text` must be valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, text: *mut *const c_char) -> c_int {
    if code != 912 {
        return INVALID_VALUE.0;
    }
    // SAFETY: the caller passes a pointer that is valid for writing.
    unsafe { *text = c"CUDA_ERROR_EXTERNAL_DEVICE".as_ptr() };
    0
}

/// Returns an error: there is no text, and callers fall back to the code.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(_code: c_int, _text: *mut *const c_char) -> c_int {
    INVALID_VALUE.0
}
