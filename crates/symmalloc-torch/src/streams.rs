//! Lock-free lookup of a stream's id by its raw handle.
//!
//! ```text
//!  CUstream ── hash ──► cache[256] ── hit ──► KnownStream { raw, id }
//!                          │ miss                    ▲
//!                          └──► known, under a lock ─┘  registers a stream at its first use: ids are in program order
//! ```
//!
//! The cache affects no decision: two streams that share a slot evict each other, and take the slower path.

use crate::error::Error;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use symmalloc_core::StreamId;
use symmalloc_cuda::CudaAllocator;

const CACHE_BITS: u32 = 8;

/// `cudaStreamLegacy`: an alias of the default stream, whose handle is null.
const LEGACY: usize = 1;

/// A raw stream handle as a number. Equal numbers are the same stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RawStream(usize);

impl RawStream {
    #[inline]
    pub(crate) fn new(stream: *mut c_void) -> Self {
        let handle = stream as usize;
        RawStream(if handle == LEGACY { 0 } else { handle })
    }

    pub(crate) fn handle(self) -> *mut c_void {
        self.0 as *mut c_void
    }

    #[inline]
    fn slot(self) -> usize {
        ((self.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - CACHE_BITS)) as usize
    }
}

/// The entry of one stream.
pub(crate) struct KnownStream {
    raw: RawStream,
    pub(crate) id: StreamId,
}

/// The streams of one allocator.
pub(crate) struct StreamRegistry {
    cache: [AtomicPtr<KnownStream>; 1 << CACHE_BITS],
    /// Only grows, and its streams do not move. It is never iterated, so its order does not matter.
    known: Mutex<HashMap<RawStream, Box<KnownStream>>>,
    allocator: CudaAllocator,
}

impl StreamRegistry {
    pub(crate) fn new(allocator: CudaAllocator) -> Self {
        let cache = [const { AtomicPtr::new(std::ptr::null_mut()) }; 1 << CACHE_BITS];
        StreamRegistry { cache, known: Mutex::default(), allocator }
    }

    /// Returns a stream that is in the cache.
    #[inline]
    pub(crate) fn cached(&self, raw: RawStream) -> Option<&KnownStream> {
        let cached = self.cache[raw.slot()].load(Ordering::Acquire);
        // SAFETY: null, or a stream of `known`, which is boxed and lives as long as `self`.
        unsafe { cached.as_ref() }.filter(|stream| stream.raw == raw)
    }

    /// Returns a stream, and registers it at its first use. Calls `begin` before it registers the first stream.
    ///
    /// # Safety
    /// The stream belongs to the device's primary context and lives as long as the registry. PyTorch never destroys its
    /// streams.
    #[cold]
    pub(crate) unsafe fn find_or_register(
        &self,
        raw: RawStream,
        begin: impl FnOnce() -> Result<(), Error>,
    ) -> Result<&KnownStream, Error> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_empty() {
            begin()?;
        }
        let stream: *const KnownStream = match known.entry(raw) {
            Entry::Occupied(entry) => &raw const **entry.into_mut(),
            // SAFETY: the caller's contract.
            Entry::Vacant(entry) => &raw const **entry.insert(Box::new(unsafe { self.register(raw) }?)),
        };
        self.cache[raw.slot()].store(stream.cast_mut(), Ordering::Release);
        // SAFETY: boxed, never removed, and `self` is borrowed for as long as the result.
        Ok(unsafe { &*stream })
    }

    /// # Safety
    /// As [`find_or_register`](Self::find_or_register).
    unsafe fn register(&self, raw: RawStream) -> Result<KnownStream, Error> {
        // SAFETY: the caller's contract.
        let id = unsafe { self.allocator.register_raw_stream(raw.handle().cast()) }?;
        Ok(KnownStream { raw, id })
    }

    /// Returns the registered streams, ordered by id.
    pub(crate) fn all(&self) -> Vec<(StreamId, RawStream)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = known.values().map(|stream| (stream.id, stream.raw)).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }
}
