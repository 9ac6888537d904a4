//! Lock-free lookup of a stream's id by its raw handle.
//!
//! ```text
//!  CUstream ── hash ──► cache[256] ── hit ──► KnownStream { raw, id }
//!                          │ miss                    ▲
//!                          └──► known, under a lock ─┘  registers a stream at its first use: ids are in program order
//! ```
//!
//! The cache affects no decision: two streams that share a slot evict each other, and take the slower path.
//!
//! # Groups
//! The core does not know threads: the program names the group when it registers a stream. In the process's allocators, the streams that
//! the main thread or one of autograd's threads uses first form one group, because these threads do not run at the same time: the main
//! thread blocks while autograd runs a backward pass. Any other thread may run at the same time, so each stream that it uses first forms a
//! separate group, unless the program names one.
//!
//! ```text
//!  first use by   main     pt_autograd_0     a data loader's thread     main
//!  stream         s0       s1 in s0          s2                         s3 in s0
//! ```
//!
//! Only pools with `streams:grouped` have a heap per group. In such a pool, another thread may use the stream later. This is safe, but the
//! threads then share the group's lock, and the order of their ops determines placements.

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

/// A raw stream handle as a number. Equal numbers denote the same stream.
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

/// The rule for streams whose group the program does not name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grouping {
    /// Each stream forms a group.
    Alone,
    /// The streams that the main thread or autograd's threads use first form one group.
    ByThread,
}

/// The group that a stream joins when it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joins {
    /// The group that the allocator's [`Grouping`] selects.
    Default,
    /// A new group.
    None,
    /// The group whose first stream is this one.
    Group(StreamId),
}

/// The streams of one allocator.
pub(crate) struct StreamRegistry {
    cache: [AtomicPtr<KnownStream>; 1 << CACHE_BITS],
    known: Mutex<KnownStreams>,
    allocator: CudaAllocator,
    grouping: Grouping,
}

/// The registered streams.
#[derive(Default)]
struct KnownStreams {
    /// The map only grows, and its streams do not move. Only `all` iterates over it, and sorts the result, so the map's order does not
    /// matter.
    by_handle: HashMap<RawStream, Box<KnownStream>>,
    /// The group of the main thread and autograd's threads.
    of_main: Option<StreamId>,
}

impl StreamRegistry {
    pub(crate) fn new(allocator: CudaAllocator, grouping: Grouping) -> Self {
        let cache = [const { AtomicPtr::new(std::ptr::null_mut()) }; 1 << CACHE_BITS];
        StreamRegistry { cache, known: Mutex::default(), allocator, grouping }
    }

    /// Returns a stream that is in the cache.
    #[inline]
    pub(crate) fn cached(&self, raw: RawStream) -> Option<&KnownStream> {
        let cached = self.cache[raw.slot()].load(Ordering::Acquire);
        // SAFETY: the pointer is null, or points to a stream of `known`, which is boxed and lives as long as `self`.
        unsafe { cached.as_ref() }.filter(|stream| stream.raw == raw)
    }

    /// Returns a stream, and registers it at its first use. Calls `begin` before it registers the first stream. A known stream stays in its
    /// group.
    ///
    /// # Safety
    /// The stream belongs to the device's primary context and lives as long as the registry. PyTorch never destroys its
    /// streams.
    #[cold]
    pub(crate) unsafe fn find_or_register(
        &self,
        raw: RawStream,
        joins: Joins,
        begin: impl FnOnce() -> Result<(), Error>,
    ) -> Result<&KnownStream, Error> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let KnownStreams { by_handle, of_main } = &mut *known;
        if by_handle.is_empty() {
            begin()?;
        }
        let stream: *const KnownStream = match by_handle.entry(raw) {
            Entry::Occupied(entry) => &raw const **entry.into_mut(),
            // SAFETY: the caller's contract.
            Entry::Vacant(entry) => &raw const **entry.insert(Box::new(unsafe { self.register(raw, joins, of_main) }?)),
        };
        self.cache[raw.slot()].store(stream.cast_mut(), Ordering::Release);
        // SAFETY: the stream is boxed and never removed, and `self` is borrowed for as long as the result.
        Ok(unsafe { &*stream })
    }

    /// # Safety
    /// Same as for [`find_or_register`](Self::find_or_register).
    unsafe fn register(
        &self,
        raw: RawStream,
        joins: Joins,
        of_main: &mut Option<StreamId>,
    ) -> Result<KnownStream, Error> {
        let is_of_main = joins == Joins::Default && self.grouping == Grouping::ByThread && is_main_or_autograd();
        let group = match joins {
            Joins::Group(first) => Some(first),
            _ => of_main.filter(|_| is_of_main),
        };
        let handle = raw.handle().cast();
        let id = match group {
            // SAFETY: the caller's contract.
            Some(first) => unsafe { self.allocator.register_raw_stream_in(handle, first) }?,
            // SAFETY: the caller's contract.
            None => unsafe { self.allocator.register_raw_stream(handle) }?,
        };
        if is_of_main && of_main.is_none() {
            *of_main = self.allocator.core().group_of(id).ok();
        }
        Ok(KnownStream { raw, id })
    }

    /// Returns `true` if the group whose first stream is `first` has other streams, or if other streams may join it at their first use.
    pub(crate) fn others_may_join(&self, first: StreamId) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let groups = self.allocator.core().groups();
        let mut streams = (0..groups.stream_count()).map(|stream| StreamId(stream as u16));
        known.of_main == Some(first) || streams.any(|other| other != first && groups.first_of(other) == first)
    }

    /// Returns the registered streams, ordered by id.
    pub(crate) fn all(&self) -> Vec<(StreamId, RawStream)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = known.by_handle.values().map(|stream| (stream.id, stream.raw)).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }
}

/// The beginning of the names of autograd's threads, such as `pt_autograd_0`.
const AUTOGRAD: &[u8] = b"pt_autograd";

/// Returns `true` if the calling thread is the process's first one, or one of autograd's.
fn is_main_or_autograd() -> bool {
    // SAFETY: neither call has arguments.
    let (process, thread) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_gettid)) };
    if i64::from(process) == thread {
        return true;
    }
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes.
    let status = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    status == 0 && name.starts_with(AUTOGRAD)
}
