//! Stream captures of the program that are in progress.
//!
//! If no capture is in progress, a single load detects that. Otherwise the driver reports whether a stream is part of a capture. In each
//! context with captures, the allocator watches them ([`CaptureWatch`]).

use crate::context::Context;
use crate::libcuda;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use symmalloc_cuda::CaptureWatch;

/// For each capture, the stream on which it began and the watch of the stream's context. The watch is `None` if the context is not served.
static UNDER_WAY: Mutex<Vec<(usize, Option<CaptureWatch>)>> = Mutex::new(Vec::new());
/// Number of captures in progress.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Registers a capture that the program is about to begin on a stream. `context` is `None` if the stream's context is not served.
pub(crate) fn begin(stream: usize, context: Option<&Context>) {
    let watch = context.map(|context| context.allocator().device().watch_captures());
    let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    under_way.push((stream, watch));
    COUNT.store(under_way.len(), Ordering::Release);
}

/// Unregisters the capture of a stream after it has ended or failed to begin. Does nothing for a stream without a capture.
pub(crate) fn end(stream: usize) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(at) = under_way.iter().rposition(|(captured, _)| *captured == stream) {
        drop(under_way.remove(at));
        COUNT.store(under_way.len(), Ordering::Release);
    }
}

/// Returns `true` if a stream is part of a capture.
#[inline]
pub(crate) fn has(stream: usize) -> bool {
    COUNT.load(Ordering::Acquire) > 0 && libcuda::driver().is_some_and(|driver| driver.is_captured(stream))
}
