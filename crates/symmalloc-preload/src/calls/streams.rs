//! Calls that destroy or capture streams.

use crate::captures;
use crate::contexts;
use crate::libcuda;
use crate::outcome::SUCCESS;
use crate::settings::settings;
use crate::streams::{self, PER_THREAD, find};
use crate::watch;
use std::ffi::{c_int, c_void};

fn own(stream: usize) -> usize {
    if stream == 0 { PER_THREAD } else { stream }
}

fn is_watched() -> bool {
    settings().is_some_and(|settings| settings.is_watched)
}

/// Destroys a stream. Before the driver destroys it, the stream's remaining work is recorded, so that later users of the memory can wait
/// for this work.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn destroy(driver: unsafe extern "C" fn(usize) -> c_int, stream: usize) -> c_int {
    if is_watched() {
        watch::destroyed(stream);
    } else {
        if let Err(code) = streams::forget(stream) {
            return code;
        }
    }
    captures::end(stream);
    // SAFETY: the caller's contract.
    unsafe { driver(stream) }
}

/// Begins a capture. The allocator tracks captures from before the driver begins the first one until the last one has ended.
fn begin(stream: usize, call: impl FnOnce() -> c_int) -> c_int {
    let context = if is_watched() {
        None
    } else if stream > PER_THREAD {
        find(stream).ok().map(|stream| stream.context)
    } else {
        contexts::current()
    };
    captures::begin(stream, context);
    let code = call();
    if code != SUCCESS {
        captures::end(stream);
    }
    code
}

/// Ends a capture. A capture has ended if its graph was created or if it was invalidated. A call from the wrong thread does not end the
/// capture.
fn end(stream: usize, call: impl FnOnce() -> c_int) -> c_int {
    let code = call();
    if !libcuda::driver().is_some_and(|driver| driver.is_captured(stream)) {
        captures::end(stream);
    }
    code
}

/// Serves `cuStreamBeginCapture`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn begin_capture_first(driver: unsafe extern "C" fn(usize) -> c_int, stream: usize) -> c_int {
    // SAFETY: the caller's contract.
    begin(stream, || unsafe { driver(stream) })
}

/// Serves `cuStreamBeginCapture_ptsz`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn begin_capture_first_per_thread(
    driver: unsafe extern "C" fn(usize) -> c_int,
    stream: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    begin(own(stream), || unsafe { driver(stream) })
}

/// Serves `cuStreamBeginCapture_v2`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn begin_capture(
    driver: unsafe extern "C" fn(usize, c_int) -> c_int,
    stream: usize,
    mode: c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    begin(stream, || unsafe { driver(stream, mode) })
}

/// Serves `cuStreamBeginCapture_v2_ptsz`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn begin_capture_per_thread(
    driver: unsafe extern "C" fn(usize, c_int) -> c_int,
    stream: usize,
    mode: c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    begin(own(stream), || unsafe { driver(stream, mode) })
}

type BeginToGraph = unsafe extern "C" fn(usize, usize, *const c_void, *const c_void, usize, c_int) -> c_int;

/// Serves `cuStreamBeginCaptureToGraph`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn begin_capture_to_graph(
    driver: BeginToGraph,
    stream: usize,
    graph: usize,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    begin(stream, || unsafe { driver(stream, graph, dependencies, data, count, mode) })
}

/// Serves `cuStreamBeginCaptureToGraph_ptsz`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn begin_capture_to_graph_per_thread(
    driver: BeginToGraph,
    stream: usize,
    graph: usize,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    begin(own(stream), || unsafe { driver(stream, graph, dependencies, data, count, mode) })
}

/// Serves `cuStreamEndCapture`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn end_capture(
    driver: unsafe extern "C" fn(usize, *mut usize) -> c_int,
    stream: usize,
    graph: *mut usize,
) -> c_int {
    // SAFETY: the caller's contract.
    end(stream, || unsafe { driver(stream, graph) })
}

/// Serves `cuStreamEndCapture_ptsz`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn end_capture_per_thread(
    driver: unsafe extern "C" fn(usize, *mut usize) -> c_int,
    stream: usize,
    graph: *mut usize,
) -> c_int {
    // SAFETY: the caller's contract.
    end(own(stream), || unsafe { driver(stream, graph) })
}
