//! Streams that other code owns and may destroy while the allocator is alive.
//!
//! A [`StreamId`](symmalloc_core::StreamId) lives as long as the allocator, but a lent stream may not. The id therefore outlives the
//! stream, and can later be assigned to another stream:
//!
//! ```text
//!  lend_stream(A) ─► id 3 ── A ── return_stream(3): `returned` waits for A ──► id 3 ── returned ── relend_stream(3, B): B waits for
//!                                                                                       `returned` ──► id 3 ── B
//! ```
//!
//! `returned` is one internal stream that never runs work. It waits for the remaining work of all returned streams. The work of an id is
//! thus ordered across all of its streams, which is what the core's clocks and fences require.

use cudarc::driver::sys::CUstream;
use std::ptr;
use std::thread::{self, ThreadId};

/// `CU_STREAM_LEGACY`. All work on it waits for the work of per-thread default streams.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// A stream that other code owns, see [`CachingAllocator::lend_stream`](crate::CachingAllocator::lend_stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentStream(Source);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A handle, stored as a number because it is never dereferenced.
    Handle(usize),
    /// The per-thread default stream of the thread with this id.
    PerThread(ThreadId),
}

impl LentStream {
    /// Wraps a stream handle that refers to the same stream in all threads.
    pub fn of(stream: CUstream) -> Self {
        LentStream(Source::Handle(stream as usize))
    }

    /// Wraps the calling thread's per-thread default stream. Other threads cannot refer to it. To wait for its work, they wait for the
    /// legacy default stream, which waits for all per-thread default streams.
    pub fn of_this_thread() -> Self {
        LentStream(Source::PerThread(thread::current().id()))
    }

    /// Returns the handle by which the current thread refers to the stream.
    pub(super) fn raw(self) -> CUstream {
        match self.0 {
            Source::Handle(handle) => ptr::without_provenance_mut(handle),
            Source::PerThread(owner) if owner == thread::current().id() => ptr::without_provenance_mut(PER_THREAD),
            Source::PerThread(_) => ptr::without_provenance_mut(LEGACY),
        }
    }
}
