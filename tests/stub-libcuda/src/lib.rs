//! A libcuda without a device: the calls that `symmalloc-cuda` and cudarc's buffers make, over host memory.
//!
//! Tests put the shared library of this package on the library path under the name `libcuda.so`. It is strict where the
//! driver is (current contexts, whole mappings, what a stream capture forbids), and its memory is real host memory, so copies
//! and zeros can be checked. Work is done when it is submitted, but *counts* as done only once somebody waited for it.
//!
//! | control | meaning |
//! |---|---|
//! | `STUB_NO_VMM`, `STUB_NO_FABRIC`, ... | environment: what the device lacks, see `model.rs` |
//! | `stub_fail(call, nth, code)` | the n-th call from now on fails, once; n = 0: all of them |
//! | `stub_heal()` | no call fails any more |
//! | `stub_calls(call)` | how often it was called; null: all calls together |
//! | `stub_live(what)` | what is left: see [`model::Live`] |

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::missing_safety_doc, reason = "each call is the driver's: see the CUDA driver API")]

pub mod model;

use model::{Access, Capture, Code, Op, State, Stream, THREAD, with};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

const OK: c_int = 0;
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

/// Makes one call: counts it, injects a fault, or acts.
fn call(name: &'static str, act: impl FnOnce(&mut State) -> Result<(), Code>) -> c_int {
    match with(|state| state.enter(name).and_then(|()| act(state))) {
        Ok(()) => OK,
        Err(Code(code)) => code,
    }
}

/// As [`call`], for calls that want a current context.
fn call_in_context(name: &'static str, act: impl FnOnce(&mut State) -> Result<(), Code>) -> c_int {
    call(name, |state| {
        let current = THREAD.with_borrow(|thread| thread.contexts.last().copied().unwrap_or(0));
        if current == 0 { Err(INVALID_CONTEXT) } else { act(state) }
    })
}

/// As [`call_in_context`], for calls that a thread-local capture on this thread forbids, and that spoil it.
fn call_outside_capture(name: &'static str, act: impl FnOnce(&mut State) -> Result<(), Code>) -> c_int {
    call_in_context(name, |state| {
        let is_relaxed = THREAD.with_borrow(|thread| thread.capture_mode == 2);
        let thread = std::thread::current().id();
        if !is_relaxed && let Some(capture) = state.captures.values_mut().find(|capture| capture.thread == thread) {
            capture.is_valid = false;
            return Err(CAPTURE_UNSUPPORTED);
        }
        act(state)
    })
}

/// Writes an answer of the driver.
///
/// # Safety
/// `to` is valid for writing.
unsafe fn answer<T>(to: *mut T, value: T) {
    // SAFETY: the caller's contract.
    unsafe { to.write(value) };
}

macro_rules! stub {
    ($($kind:ident $name:ident($($arg:ident: $type:ty),*) |$state:ident| $body:expr;)*) => {
        $(
            /// As in the CUDA driver API.
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, unused_variables, reason = "not every call writes an answer or looks at all arguments")]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                $kind(stringify!($name), |$state| {
                    // SAFETY: the caller keeps the contract of the driver's call: pointers are valid, handles are live.
                    unsafe { $body }
                })
            }
        )*
    };
}

stub! {
    call cuInit(flags: c_uint) |state| if state.options.no_device { Err(Code(100)) } else { Ok(()) };
    call cuDriverGetVersion(version: *mut c_int) |state| { answer(version, 13000); Ok(()) };
    call cuDeviceGetCount(count: *mut c_int) |state| { answer(count, state.options.devices); Ok(()) };
    call cuDeviceGet(device: *mut c_int, ordinal: c_int) |state| {
        if !(0..state.options.devices).contains(&ordinal) { return Err(INVALID_DEVICE); }
        answer(device, ordinal);
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
        answer(context, model::context_of(device));
        Ok(())
    };
    call cuDevicePrimaryCtxRelease_v2(device: c_int) |state| { state.retained -= 1; Ok(()) };
    call cuCtxGetCurrent(context: *mut usize) |state| {
        answer(context, THREAD.with_borrow(|thread| thread.contexts.last().copied().unwrap_or(0)));
        Ok(())
    };
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
    call_outside_capture cuCtxSynchronize() |state| { state.complete_all(); Ok(()) };
    call_in_context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |state| {
        answer(free, (state.options.memory_bytes - state.physical_bytes()) as usize);
        answer(total, state.options.memory_bytes as usize);
        Ok(())
    };

    call_in_context cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const c_void, option: c_int) |state| {
        answer(bytes, model::GRANULARITY as usize);
        Ok(())
    };
    call_outside_capture cuMemAddressReserve(base: *mut u64, size: usize, alignment: usize, hint: u64, flags: c_ulonglong) |state| {
        answer(base, state.reserve(size as u64).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemAddressFree(base: u64, size: usize) |state| {
        let is_empty = state.mapping_addresses().range(base..base + size as u64).next().is_none();
        if state.ranges.get(&base) != Some(&(size as u64)) || !is_empty { return Err(INVALID_VALUE); }
        state.unreserve(base);
        Ok(())
    };
    call_outside_capture cuMemCreate(handle: *mut u64, size: usize, properties: *const c_int, flags: c_ulonglong) |state| {
        // The second word of the properties: kinds of handles; the last two words: flags.
        let wants_fabric = properties.add(1).read() & 8 != 0;
        if wants_fabric && state.options.fabric_refused { return Err(NOT_SUPPORTED); }
        if !(size as u64).is_multiple_of(model::GRANULARITY) || size == 0 { return Err(INVALID_VALUE); }
        answer(handle, state.create(size as u64).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemRelease(handle: u64) |state| state.release(handle).ok_or(INVALID_VALUE);
    call_outside_capture cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) |state| {
        state.map(address, size as u64, handle).ok_or(INVALID_VALUE)
    };
    call_outside_capture cuMemSetAccess(address: u64, size: usize, access: *const c_void, count: usize) |state| {
        state.set_access(address, size as u64, Access::ReadWrite).ok_or(INVALID_VALUE)
    };
    call_outside_capture cuMemUnmap(address: u64, size: usize) |state| state.unmap(address, size as u64).ok_or(INVALID_VALUE);
    call_outside_capture cuMemAlloc_v2(address: *mut u64, size: usize) |state| {
        answer(address, state.allocate(size as u64, false).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemFree_v2(address: u64) |state| state.free(address).ok_or(INVALID_VALUE);
    call_outside_capture cuMemHostAlloc(address: *mut u64, size: usize, flags: c_uint) |state| {
        answer(address, state.allocate(size as u64, true).ok_or(OUT_OF_MEMORY)?);
        Ok(())
    };
    call_outside_capture cuMemFreeHost(address: u64) |state| state.free(address).ok_or(INVALID_VALUE);

    call_in_context cuMemsetD8Async(address: u64, value: u8, count: usize, stream: u64) |state| {
        state.submit(stream, Op::Set { address, value, count })
    };
    call_in_context cuMemcpyHtoDAsync_v2(to: u64, from: u64, count: usize, stream: u64) |state| {
        state.submit(stream, Op::Copy { to, from, count })
    };
    call_in_context cuMemcpyDtoHAsync_v2(to: u64, from: u64, count: usize, stream: u64) |state| {
        state.submit(stream, Op::Copy { to, from, count })
    };
    call_in_context cuMemcpyDtoDAsync_v2(to: u64, from: u64, count: usize, stream: u64) |state| {
        state.submit(stream, Op::Copy { to, from, count })
    };

    call_in_context cuStreamCreate(stream: *mut u64, flags: c_uint) |state| {
        let handle = state.handle();
        state.streams.insert(handle, Stream::default());
        answer(stream, handle);
        Ok(())
    };
    call_in_context cuStreamDestroy_v2(stream: u64) |state| state.streams.remove(&stream).map(|_| ()).ok_or(INVALID_HANDLE);
    call_outside_capture cuStreamSynchronize(stream: u64) |state| {
        let known = state.stream(stream).ok_or(INVALID_HANDLE)?;
        if let Some(capture) = known.capture {
            state.captures.get_mut(&capture).expect("under way").is_valid = false;
            return Err(CAPTURE_UNSUPPORTED);
        }
        let last = known.submitted;
        state.complete(stream, last);
        Ok(())
    };
    call_in_context cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) |state| {
        let event = *state.events.get(&event).ok_or(INVALID_HANDLE)?;
        let waiting = state.stream(stream).ok_or(INVALID_HANDLE)?.capture;
        match (event.capture, waiting) {
            (None, Some(_)) => return Err(CAPTURE_ISOLATION),
            (Some(capture), _) if !state.captures.contains_key(&capture) => return Err(CAPTURED_EVENT),
            (Some(capture), Some(own)) if capture != own => return Err(CAPTURE_ISOLATION),
            (Some(capture), None) => state.streams.get_mut(&stream).expect("known").capture = Some(capture),
            _ => {}
        }
        state.wait(stream, event);
        Ok(())
    };
    call_in_context cuStreamIsCapturing(stream: u64, status: *mut c_int) |state| {
        answer(status, c_int::from(state.stream(stream).ok_or(INVALID_HANDLE)?.capture.is_some()));
        Ok(())
    };
    call cuStreamGetCaptureInfo_v2(stream: u64, status: *mut c_int, id: *mut u64, graph: *mut u64, dependencies: *mut u64, count: *mut usize) |state| {
        let capture = state.stream(stream).ok_or(INVALID_HANDLE)?.capture;
        answer(status, c_int::from(capture.is_some()));
        answer(id, capture.unwrap_or(0));
        Ok(())
    };
    call_in_context cuStreamBeginCapture_v2(stream: u64, mode: c_int) |state| {
        if state.stream(stream).ok_or(INVALID_HANDLE)?.capture.is_some() { return Err(CAPTURE_UNSUPPORTED); }
        let id = state.handle();
        state.captures.insert(id, Capture::begin(stream));
        state.streams.get_mut(&stream).expect("known").capture = Some(id);
        Ok(())
    };
    call_in_context cuStreamEndCapture(stream: u64, graph: *mut u64) |state| {
        let id = state.stream(stream).ok_or(INVALID_HANDLE)?.capture.ok_or(CAPTURE_UNSUPPORTED)?;
        let is_joined = state.is_joined(id);
        let capture = state.captures.remove(&id).expect("under way");
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
        ops.into_iter().try_for_each(|op| state.submit(stream, op))
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
        state.events.insert(handle, model::Event::default());
        answer(event, handle);
        Ok(())
    };
    call_in_context cuEventDestroy_v2(event: u64) |state| state.events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE);
    call_in_context cuEventRecord(event: u64, stream: u64) |state| {
        let known = state.stream(stream).ok_or(INVALID_HANDLE)?;
        known.submitted += 1;
        let recorded = model::Event { stream, seq: known.submitted, capture: known.capture };
        *state.events.get_mut(&event).ok_or(INVALID_HANDLE)? = recorded;
        Ok(())
    };
    call_outside_capture cuEventQuery(event: u64) |state| {
        let event = *state.events.get(&event).ok_or(INVALID_HANDLE)?;
        if event.capture.is_some() { return Err(CAPTURED_EVENT); }
        if state.is_complete(event) { Ok(()) } else { Err(NOT_READY) }
    };
    call_outside_capture cuEventSynchronize(event: u64) |state| {
        let event = *state.events.get(&event).ok_or(INVALID_HANDLE)?;
        if event.capture.is_some() { return Err(CAPTURED_EVENT); }
        state.complete(event.stream, event.seq);
        Ok(())
    };
}

/// No text: callers fall back to the code.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(_code: c_int, _text: *mut *const c_char) -> c_int {
    INVALID_VALUE.0
}

/// No text: callers fall back to the code.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(_code: c_int, _text: *mut *const c_char) -> c_int {
    INVALID_VALUE.0
}

/// The `nth` call of `name` from now on fails with `code`; with 0, every call does.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_fail(name: *const c_char, nth: u64, code: c_int) {
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    with(|state| state.fail(name, nth, Code(code)));
}

/// No call fails any more.
#[unsafe(no_mangle)]
pub extern "C" fn stub_heal() {
    with(State::heal);
}

/// How often `name` was called; null: all calls together.
///
/// # Safety
/// `name` is a C string or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_calls(name: *const c_char) -> u64 {
    if name.is_null() {
        return with(|state| state.calls.values().sum());
    }
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    with(|state| state.calls.get(name.as_ref()).copied().unwrap_or(0))
}

/// How much is left of [`model::Live`] number `what`.
#[unsafe(no_mangle)]
pub extern "C" fn stub_live(what: c_int) -> u64 {
    with(|state| state.live(what))
}
