//! Lookup of raw streams, from a handle to the known stream, without a lock.
//!
//! ```text
//!  CUstream ── hash ──► cache[256] ── hit ──► KnownStream { raw, context, id }
//!                          │ miss                    ▲
//!                          └──► known, under a lock ─┘  assigns a number at the first use, see `numbers.rs`
//! ```
//!
//! The handles 0, 1 and 2 refer to different streams in each context, and 2 also to a different stream in each thread. These handles are
//! resolved with the current context.
//!
//! A destroyed stream is removed from the cache before the driver destroys it. The entry of a number is never freed, and is reused for the
//! next stream that gets the number.

use crate::context::{Context, KnownStream};
use crate::contexts;
use crate::libcuda;
use crate::numbers::StreamName;
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const CACHE_BITS: u32 = 8;

/// `CU_STREAM_LEGACY`.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: usize = 2;

/// Returns the name of the stream that a handle refers to in the current context and thread.
pub(crate) fn name_of(raw: usize) -> StreamName {
    match raw {
        0 | LEGACY => StreamName::Legacy,
        PER_THREAD => StreamName::PerThread(thread_number()),
        raw => StreamName::Handle(raw),
    }
}

/// The reason a stream is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotServed {
    /// The driver must serve the stream: the handle is invalid, or the stream's context is not served.
    Driver,
    /// A necessary driver call failed.
    Refused(c_int),
}

static CACHE: [AtomicPtr<KnownStream>; 1 << CACHE_BITS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; 1 << CACHE_BITS];

/// Streams that the program created, by handle.
static KNOWN: Mutex<Option<FxHashMap<usize, &'static KnownStream>>> = Mutex::new(None);

fn known() -> MutexGuard<'static, Option<FxHashMap<usize, &'static KnownStream>>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(raw: usize) -> &'static AtomicPtr<KnownStream> {
    &CACHE[((raw as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - CACHE_BITS)) as usize]
}

/// Returns the stream of a handle, and assigns a number at the first use.
#[inline]
pub(crate) fn find(raw: usize) -> Result<&'static KnownStream, NotServed> {
    // SAFETY: the pointer is null, or points to a leaked stream.
    match unsafe { place(raw).load(Ordering::Acquire).as_ref() } {
        Some(stream) if stream.raw() == raw && raw > PER_THREAD => Ok(stream),
        _ => find_slowly(raw),
    }
}

#[inline(never)]
fn find_slowly(raw: usize) -> Result<&'static KnownStream, NotServed> {
    match raw {
        0 | LEGACY => {
            let context = contexts::current().ok_or(NotServed::Driver)?;
            context.legacy().map_err(NotServed::Refused)
        }
        PER_THREAD => find_per_thread(),
        raw => find_or_number(raw),
    }
}

#[cold]
fn find_or_number(raw: usize) -> Result<&'static KnownStream, NotServed> {
    let mut known = known();
    let known = known.get_or_insert_with(FxHashMap::default);
    let stream = match known.entry(raw) {
        Entry::Occupied(entry) => *entry.get(),
        Entry::Vacant(entry) => {
            let mut context = 0;
            let driver = libcuda::driver().ok_or(NotServed::Driver)?;
            // SAFETY: the pointer is valid for writing; the driver checks the handle.
            unsafe { driver.stream_context(raw, &raw mut context) }.map_err(|_| NotServed::Driver)?;
            let context = contexts::of(context).ok_or(NotServed::Driver)?;
            let stream = context.number(StreamName::Handle(raw)).map_err(NotServed::Refused)?;
            stream.set_raw(raw);
            *entry.insert(stream)
        }
    };
    place(raw).store(std::ptr::from_ref(stream).cast_mut(), Ordering::Release);
    Ok(stream)
}

/// Forgets a stream that the program is about to destroy. Returns the driver's code if the stream's remaining work cannot be tracked.
pub(crate) fn forget(raw: usize) -> Result<(), c_int> {
    let mut known = known();
    let Some(stream) = known.as_mut().and_then(|known| known.remove(&raw)) else { return Ok(()) };
    if let Err(code) = stream.context.take_back(StreamName::Handle(raw)) {
        known.as_mut().expect("the map was just accessed").insert(raw, stream);
        return Err(code);
    }
    stream.set_raw(0);
    place(raw).store(std::ptr::null_mut(), Ordering::Release);
    Ok(())
}

/// Forgets the streams of a context that is gone.
pub(crate) fn forget_all_of(context: &'static Context) {
    let mut known = known();
    let Some(known) = known.as_mut() else { return };
    known.retain(|raw, stream| {
        let is_gone = std::ptr::eq(stream.context, context);
        if is_gone {
            stream.set_raw(0);
            place(*raw).store(std::ptr::null_mut(), Ordering::Release);
        }
        !is_gone
    });
}

/// A thread's default streams, one per context. When the thread ends, their numbers become free for other streams.
struct OwnStreams {
    thread: u64,
    streams: Vec<&'static KnownStream>,
}

impl OwnStreams {
    fn new() -> Self {
        static THREADS: AtomicU64 = AtomicU64::new(0);
        OwnStreams { thread: THREADS.fetch_add(1, Ordering::Relaxed), streams: Vec::new() }
    }
}

impl Drop for OwnStreams {
    fn drop(&mut self) {
        for stream in self.streams.iter().filter(|stream| !stream.context.is_gone()) {
            stream.context.release(StreamName::PerThread(self.thread));
        }
    }
}

thread_local! {
    static OWN: RefCell<OwnStreams> = RefCell::new(OwnStreams::new());
}

/// Returns the number of the calling thread, which is unique within the process.
fn thread_number() -> u64 {
    OWN.try_with(|own| own.try_borrow().map_or(u64::MAX, |own| own.thread)).unwrap_or(u64::MAX)
}

fn find_per_thread() -> Result<&'static KnownStream, NotServed> {
    let context = contexts::current().ok_or(NotServed::Driver)?;
    // If a thread frees memory in its last destructors, the driver serves it.
    OWN.try_with(|own| {
        let mut own = own.try_borrow_mut().map_err(|_| NotServed::Driver)?;
        if let Some(stream) = own.streams.iter().find(|stream| std::ptr::eq(stream.context, context)) {
            return Ok(*stream);
        }
        let stream = context.number(StreamName::PerThread(own.thread)).map_err(NotServed::Refused)?;
        own.streams.retain(|stream| !stream.context.is_gone());
        own.streams.push(stream);
        Ok(stream)
    })
    .unwrap_or(Err(NotServed::Driver))
}
