//! Streams that other code owns and may destroy while the allocator lives.
//!
//! A [`StreamId`](symmalloc_core::StreamId) lasts as long as the allocator, and a lent stream may not. So the id outlives it, and is lent to the next
//! stream:
//!
//! ```text
//!  lend_stream(A) ─► id 3 ── A ── return_stream(3): `returned` waits for A ──► id 3 ── returned ── relend_stream(3, B): B waits for
//!                                                                                       `returned` ──► id 3 ── B
//! ```
//!
//! `returned` is one stream of our own that never runs anything: it stands for the rest of the work of all streams that are gone.
//! So the work of an id is in order whatever streams it had, which is all that the core's clocks and fences count on.

use cudarc::driver::sys::CUstream;
use std::ptr;
use std::thread::{self, ThreadId};

/// `CU_STREAM_LEGACY`. All work that is put on it waits for the work of per-thread default streams.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// A stream that other code owns, see [`CachingAllocator::lend_stream`](crate::CachingAllocator::lend_stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentStream(Source);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A handle. Kept as a number: it is never looked behind.
    Handle(usize),
    /// The default stream of this thread.
    PerThread(ThreadId),
}

impl LentStream {
    /// The stream with this handle, which means the same in all threads.
    pub fn of(stream: CUstream) -> Self {
        LentStream(Source::Handle(stream as usize))
    }

    /// The calling thread's own default stream. Other threads cannot name it: where they have to wait for its work, they wait
    /// for the legacy default stream, which waits for it.
    pub fn of_this_thread() -> Self {
        LentStream(Source::PerThread(thread::current().id()))
    }

    /// The handle by which this thread names it.
    pub(super) fn raw(self) -> CUstream {
        match self.0 {
            Source::Handle(handle) => ptr::without_provenance_mut(handle),
            Source::PerThread(owner) if owner == thread::current().id() => ptr::without_provenance_mut(PER_THREAD),
            Source::PerThread(_) => ptr::without_provenance_mut(LEGACY),
        }
    }
}
