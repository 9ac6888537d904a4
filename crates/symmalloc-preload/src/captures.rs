//! Stream captures that the program has under way.
//!
//! While there is none, one load says so. Otherwise the driver is asked whether a stream is part of one, and the allocator of each
//! context that captures began in minds them ([`CaptureWatch`]).

use crate::context::Context;
use crate::libcuda;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use symmalloc_cuda::CaptureWatch;

/// The stream that each began on.
static UNDER_WAY: Mutex<Vec<(usize, Option<CaptureWatch>)>> = Mutex::new(Vec::new());
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The program is about to capture a stream, of a context that may be served.
pub(crate) fn begin(stream: usize, context: Option<&Context>) {
    let watch = context.map(|context| context.allocator().device().watch_captures());
    let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    under_way.push((stream, watch));
    COUNT.store(under_way.len(), Ordering::Release);
}

/// The capture of a stream is over, or did not begin. A stream without one may be named.
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

/// Whether a stream is part of a capture.
#[inline]
pub(crate) fn has(stream: usize) -> bool {
    COUNT.load(Ordering::Acquire) > 0 && libcuda::driver().is_some_and(|driver| driver.is_captured(stream))
}
