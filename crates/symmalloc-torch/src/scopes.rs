//! Scopes, which select the pool of allocations that do not name one.
//!
//! There are two kinds. PyTorch begins a scope of a pool, with a filter for the affected streams (a graph capture, or this thread's
//! `use_mem_pool`). A program pushes a pool or a name for this thread's allocations. As with PyTorch's own allocator, the innermost scope
//! that covers an allocation applies. Without an open scope on the device, the lookup is one load.
//!
//! ```text
//!  push A ── begin B(capture of s) ── push C          on s      on another stream
//!    1            2                      3             C          C
//!    1            2                                    B          A
//! ```
//!
//! A failed capture leaves its scope open, because PyTorch 2.11 raises before it ends the scope. The next begin ends it, if the capture
//! allocated memory here. Otherwise its stream is unknown, and the scope stays open. Its pool stays in use, as in PyTorch's own allocator.

use crate::error::Error;
use crate::guard::{call_back, not_in_callback};
use crate::mempools::{MempoolId, PoolTarget};
use crate::streams::RawStream;
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::PoolId;
use symmalloc_cuda::CaptureWatch;

/// Returns `true` if the scope covers allocations on a stream. May throw a C++ exception. Allocations call it, so calls of this
/// library inside it return an error, except for frees, which take effect later.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_filter_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Destroys the context of a callback.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_destroy_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void)>;

/// The filter of an open scope.
pub(crate) struct StreamFilter {
    accepts: symmalloc_filter_fn,
    context: *mut c_void,
    destroy: symmalloc_destroy_fn,
}

// SAFETY: PyTorch's own allocator keeps and calls its filters on any thread.
unsafe impl Send for StreamFilter {}
// SAFETY: as above; a filter mutates nothing.
unsafe impl Sync for StreamFilter {}

impl StreamFilter {
    /// # Safety
    /// The functions may be called with the context on any thread until the destructor has run.
    pub(crate) unsafe fn new(
        accepts: symmalloc_filter_fn,
        context: *mut c_void,
        destroy: symmalloc_destroy_fn,
    ) -> Self {
        StreamFilter { accepts, context, destroy }
    }

    /// Returns `true` if the filter accepts the stream. Without a function, it accepts all. Propagates exceptions of the filter.
    pub(crate) fn accepts(&self, stream: *mut c_void) -> bool {
        // SAFETY: the contract of `new`.
        self.accepts.is_none_or(|accepts| call_back(|| unsafe { accepts(self.context, stream) }))
    }
}

impl Drop for StreamFilter {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the contract of `new`; the filter is not called after this.
            call_back(|| unsafe { destroy(self.context) });
        }
    }
}

/// The purpose of a begun scope, inferred from its filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScopePurpose {
    /// A capture. The filter accepts its captured streams, and the scope is over when they are no longer captured.
    Capture,
    /// A thread's allocations, or a capture without a known stream. The scope is over when PyTorch ends it.
    Unknown,
}

/// A scope that PyTorch began.
struct Begun<F> {
    order: u64,
    id: MempoolId,
    target: PoolTarget<F>,
    filter: StreamFilter,
    purpose: ScopePurpose,
    /// The last stream that the filter accepted.
    taken: Mutex<Option<RawStream>>,
    /// Watch for captures, because the scope may belong to one.
    _watch: CaptureWatch,
}

impl<F> Begun<F> {
    /// Returns `true` if the scope covers allocations on the stream. Propagates exceptions of the filter.
    fn takes(&self, stream: RawStream) -> bool {
        let takes = self.filter.accepts(stream.handle());
        if takes {
            *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
        }
        takes
    }

    /// Returns `true` if the scope belongs to a capture that is over.
    fn is_over(&self, is_captured: impl Fn(RawStream) -> bool) -> bool {
        let taken = *self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        self.purpose == ScopePurpose::Capture && taken.is_some_and(|stream| !is_captured(stream))
    }
}

/// The open scopes of one allocator.
pub(crate) struct Scopes<F> {
    /// Number that distinguishes the pushed pools of this allocator from those of others.
    serial: u64,
    /// The number of open scopes of both kinds. A thread sees its own scopes, and those of the threads that it has synchronized with.
    open: Arc<AtomicUsize>,
    /// The number of the next scope, from 1. It orders scopes of both kinds.
    opened: AtomicU64,
    begun: Mutex<Vec<Arc<Begun<F>>>>,
    /// The scopes of failed captures that this allocator ended and PyTorch has not ended yet. It may never end them.
    ended_early: Mutex<Vec<MempoolId>>,
}

static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);

/// The pushed pools and names of a thread. The end of the thread pops them.
struct Pushed {
    serial: u64,
    order: u64,
    what: What,
    open: Arc<AtomicUsize>,
}

enum What {
    Pool(PoolId),
    Name(Arc<str>),
}

impl Drop for Pushed {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

thread_local! {
    static PUSHED: RefCell<Vec<Pushed>> = const { RefCell::new(Vec::new()) };
}

impl<F> Scopes<F> {
    pub(crate) fn new() -> Self {
        Scopes {
            serial: NEXT_SERIAL.fetch_add(1, Ordering::Relaxed),
            open: Arc::default(),
            opened: AtomicU64::new(1),
            begun: Mutex::default(),
            ended_early: Mutex::default(),
        }
    }

    /// Returns `true` if any scope is open, on any thread.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.open.load(Ordering::Relaxed) != 0
    }

    /// Returns the pool for an allocation of the calling thread on a stream. Calls PyTorch's filters without a lock, because they may
    /// throw. `inherited` is the number of a scope of another thread on whose behalf this one works, as in a backward pass.
    ///
    /// Inside a callback, calls no filter and returns any pool, because the allocation returns an error.
    #[cold]
    pub(crate) fn target_for(&self, stream: RawStream, inherited: Option<u64>) -> PoolTarget<F> {
        if not_in_callback().is_err() {
            return PoolTarget::Own(PoolId::DEFAULT);
        }
        let pushed = self.last(|pushed| match pushed.what {
            What::Pool(pool) => Some((pushed.order, pool)),
            What::Name(_) => None,
        });
        let begun = self.begun().clone();
        let mut since = begun.iter().rev().take_while(|begun| pushed.is_none_or(|(order, _)| begun.order > order));
        let taker = since.find(|begun| inherited == Some(begun.order) || begun.takes(stream));
        let pool = pushed.map_or(PoolId::DEFAULT, |(_, pool)| pool);
        taker.map_or(PoolTarget::Own(pool), |begun| begun.target.clone())
    }

    /// Opens a scope for PyTorch. Returns its number.
    pub(crate) fn begin(
        &self,
        (id, target): (MempoolId, PoolTarget<F>),
        filter: StreamFilter,
        purpose: ScopePurpose,
        watch: CaptureWatch,
    ) -> u64 {
        let mut all = self.begun();
        let order = self.next();
        let begun = Begun { order, id, target, filter, purpose, taken: Mutex::default(), _watch: watch };
        all.push(Arc::new(begun));
        self.open.fetch_add(1, Ordering::Relaxed);
        order
    }

    /// Ends the pool's last begun scope. Returns `true` if there was one.
    pub(crate) fn end(&self, id: MempoolId) -> bool {
        let mut all = self.begun();
        let Some(at) = all.iter().rposition(|begun| begun.id == id) else {
            let mut early = self.ended_early();
            let at = early.iter().position(|ended| *ended == id);
            return at.map(|at| early.remove(at)).is_some();
        };
        let ended = all.remove(at);
        self.open.fetch_sub(1, Ordering::Relaxed);
        drop(all);
        // Runs the destructor of PyTorch's filter.
        drop(ended);
        true
    }

    /// Ends the scopes of captures whose accepted stream is no longer captured.
    pub(crate) fn end_failed(&self, is_captured: impl Fn(RawStream) -> bool) {
        let mut all = self.begun();
        let failed: Vec<_> = all.extract_if(.., |begun| begun.is_over(&is_captured)).collect();
        self.open.fetch_sub(failed.len(), Ordering::Relaxed);
        self.ended_early().extend(failed.iter().map(|begun| begun.id));
        drop(all);
        // Runs the destructors of PyTorch's filters.
        drop(failed);
    }

    /// Returns the name for this thread's allocations.
    pub(crate) fn name(&self) -> Option<Arc<str>> {
        self.last(|pushed| match &pushed.what {
            What::Name(name) => Some(Arc::clone(name)),
            What::Pool(_) => None,
        })
    }

    /// Directs this thread's allocations to a pool until [`pop_pool`](Self::pop_pool).
    pub(crate) fn push_pool(&self, pool: PoolId) {
        self.push(What::Pool(pool));
    }

    /// Names this thread's allocations until [`pop_name`](Self::pop_name).
    pub(crate) fn push_name(&self, name: &str) {
        self.push(What::Name(name.into()));
    }

    /// Pops the pool that this thread pushed last.
    pub(crate) fn pop_pool(&self, device: usize) -> Result<(), Error> {
        let popped = self.pop(|what| matches!(what, What::Pool(_)));
        popped.ok_or(Error::NoScope { device, scope: "pushed pool" })
    }

    /// Pops the name that this thread pushed last.
    pub(crate) fn pop_name(&self, device: usize) -> Result<(), Error> {
        let popped = self.pop(|what| matches!(what, What::Name(_)));
        popped.ok_or(Error::NoScope { device, scope: "pushed name" })
    }

    fn push(&self, what: What) {
        let pushed = Pushed { serial: self.serial, order: self.next(), what, open: Arc::clone(&self.open) };
        self.open.fetch_add(1, Ordering::Relaxed);
        // An exiting thread keeps no scopes, so a push is popped immediately.
        let _pushed = PUSHED.try_with(|all| all.borrow_mut().push(pushed));
    }

    fn pop(&self, is_meant: impl Fn(&What) -> bool) -> Option<()> {
        let popped = PUSHED.try_with(|all| {
            let mut all = all.borrow_mut();
            let at = all.iter().rposition(|pushed| pushed.serial == self.serial && is_meant(&pushed.what))?;
            Some(all.remove(at))
        });
        popped.ok().flatten().map(drop)
    }

    /// Returns this thread's last matching push on this allocator.
    fn last<T>(&self, look: impl Fn(&Pushed) -> Option<T>) -> Option<T> {
        let found = PUSHED.try_with(|all| {
            let all = all.borrow();
            all.iter().rev().filter(|pushed| pushed.serial == self.serial).find_map(look)
        });
        found.ok().flatten()
    }

    fn next(&self) -> u64 {
        self.opened.fetch_add(1, Ordering::Relaxed)
    }

    fn begun(&self) -> MutexGuard<'_, Vec<Arc<Begun<F>>>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended_early(&self) -> MutexGuard<'_, Vec<MempoolId>> {
        self.ended_early.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
