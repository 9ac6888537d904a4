//! A context that is served: a device's primary one, with its allocator.
//!
//! ```text
//!  p0       cuMemAlloc, on the host's stream: its memory may be used by any stream at once, so the host has waited
//!  p1       the device's default memory pool: cuMemAllocAsync, a heap per stream
//!  p2 ...   memory pools that the program made, in the order of their first use
//! ```
//!
//! `contexts.rs` makes it when memory is first asked for. It lives for ever: a program may free while it ends. When the context is reset
//! (`ending.rs`), its memory goes back, and the next one is a new context, whatever its handle.
//!
//! Contexts that a program made with `cuCtxCreate` are the driver's: see `docs/run-calls.md`.

use crate::libcuda::Driver;
use crate::numbers::{Number, Numbers, StreamName};
use crate::outcome;
use crate::pools::{ContextId, MemPool};
use rustc_hash::FxHashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use symmalloc_core::errors::TrimError;
use symmalloc_core::{PoolId, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaMemory, LentStream};

/// Contexts that a process can have had.
const CONTEXTS_MAX: usize = 256;

static CONTEXTS: [AtomicPtr<Context>; CONTEXTS_MAX] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CONTEXTS_MAX];

/// What is known of a stream.
pub(crate) struct KnownStream {
    /// Its handle. 0 for default streams, and while the number is nobody's.
    raw: AtomicUsize,
    pub(crate) context: &'static Context,
    pub(crate) id: StreamId,
}

impl KnownStream {
    fn new(context: &'static Context, id: StreamId) -> Self {
        KnownStream { raw: AtomicUsize::new(0), context, id }
    }

    /// Its handle.
    #[inline]
    pub(crate) fn raw(&self) -> usize {
        self.raw.load(Ordering::Relaxed)
    }

    pub(crate) fn set_raw(&self, raw: usize) {
        self.raw.store(raw, Ordering::Relaxed);
    }
}

/// See the file's comment.
pub(crate) struct Context {
    raw: usize,
    device: c_int,
    allocator: CudaAllocator,
    /// The host's stream.
    pub(crate) host: StreamId,
    /// The device's default pool.
    default_pool: &'static MemPool,
    /// What `cuMemAllocAsync` takes memory from; null: a pool that the driver serves.
    current_pool: AtomicPtr<MemPool>,
    numbering: Mutex<Numbering>,
    legacy: OnceLock<&'static KnownStream>,
    is_gone: AtomicBool,
}

struct Numbering {
    numbers: Numbers<StreamName>,
    /// By number.
    streams: FxHashMap<u16, &'static KnownStream>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// A context that has an allocator already.
    #[inline]
    pub(crate) fn existing(raw: usize) -> Option<&'static Context> {
        Self::all().find(|context| context.raw == raw && !context.is_gone())
    }

    /// The context of a device that has an allocator already.
    pub(crate) fn of_device(device: c_int) -> Option<&'static Context> {
        Self::all().find(|context| context.device == device && !context.is_gone())
    }

    /// All contexts that were ever served, in the order in which they were made.
    pub(crate) fn all() -> impl Iterator<Item = &'static Context> {
        // SAFETY: null, or a context that was leaked.
        CONTEXTS.iter().map_while(|place| unsafe { place.load(Ordering::Acquire).as_ref() })
    }

    /// Makes a context known to all threads. Whether there was room. One thread at a time may do so.
    pub(crate) fn publish(&'static self) -> bool {
        let place = CONTEXTS.iter().find(|place| place.load(Ordering::Acquire).is_null());
        if let Some(place) = place {
            place.store(std::ptr::from_ref(self).cast_mut(), Ordering::Release);
        }
        place.is_some()
    }

    pub(crate) fn new(
        raw: usize,
        device: c_int,
        allocator: CudaAllocator,
        host: StreamId,
        default_pool: &'static MemPool,
    ) -> Self {
        Context {
            raw,
            device,
            allocator,
            host,
            default_pool,
            current_pool: AtomicPtr::new(std::ptr::null_mut()),
            numbering: Mutex::new(Numbering { numbers: Numbers::new(), streams: FxHashMap::default() }),
            legacy: OnceLock::new(),
            is_gone: AtomicBool::new(false),
        }
    }

    /// What tells it from all others, also from later ones with its handle.
    pub(crate) fn id(&'static self) -> ContextId {
        ContextId::of(self)
    }

    pub(crate) fn raw(&self) -> usize {
        self.raw
    }

    pub(crate) fn device(&self) -> c_int {
        self.device
    }

    pub(crate) fn allocator(&self) -> &CudaAllocator {
        &self.allocator
    }

    /// The device's default pool.
    pub(crate) fn default_pool(&self) -> &'static MemPool {
        self.default_pool
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// The pool of `cuMemAllocAsync`, if it is served.
    #[inline]
    pub(crate) fn current_pool(&self) -> Option<&'static MemPool> {
        // SAFETY: null, or a pool that was leaked.
        unsafe { self.current_pool.load(Ordering::Acquire).as_ref() }
    }

    /// Which pool the device's allocations come from now: the program may have set another one.
    pub(crate) fn find_current_pool(&self, driver: &Driver) {
        let mut handle = 0;
        // SAFETY: valid for writing.
        let known = unsafe { driver.current_pool(&raw mut handle, self.device) };
        let is_default = known.is_err() || handle == self.default_pool.raw();
        let pool = if is_default { Some(self.default_pool) } else { MemPool::find(handle) };
        let pool = pool.filter(|pool| pool.is_served()).map_or(std::ptr::null(), std::ptr::from_ref);
        self.current_pool.store(pool.cast_mut(), Ordering::Release);
    }

    /// The default stream that all threads share.
    pub(crate) fn legacy(&'static self) -> Result<&'static KnownStream, c_int> {
        match self.legacy.get() {
            Some(stream) => Ok(stream),
            None => {
                let stream = self.number(StreamName::Legacy)?;
                Ok(self.legacy.get_or_init(|| stream))
            }
        }
    }

    /// The stream by its number, which it gets now if it has none. A default stream must be one of the calling thread.
    pub(crate) fn number(&'static self, name: StreamName) -> Result<&'static KnownStream, c_int> {
        let lent = match name {
            StreamName::Legacy => LentStream::of(std::ptr::null_mut()),
            StreamName::PerThread(_) => LentStream::of_this_thread(),
            StreamName::Handle(raw) => LentStream::of(std::ptr::without_provenance_mut(raw)),
        };
        let mut numbering = lock(&self.numbering);
        let number = match numbering.numbers.number_for(name) {
            Number::Known(number) => return Ok(numbering.streams[&number]),
            Number::Reused(number) => {
                // SAFETY: of this context, and alive until `take_back` or, default streams, as long as anybody waits for them.
                let lent = unsafe { self.allocator.relend_stream(StreamId(number), lent) };
                lent.map_err(|error| outcome::code_of_cuda(&error))?;
                number
            }
            Number::New => {
                // SAFETY: as above.
                let id = unsafe { self.allocator.lend_stream(lent) }.map_err(|error| outcome::code_of_cuda(&error))?;
                numbering.streams.insert(id.0, Box::leak(Box::new(KnownStream::new(self, id))));
                id.0
            }
        };
        numbering.numbers.give(name, number);
        Ok(numbering.streams[&number])
    }

    /// A stream is about to be destroyed: its number becomes free, and what is left of its work stays known.
    pub(crate) fn take_back(&self, name: StreamName) -> Result<(), c_int> {
        let mut numbering = lock(&self.numbering);
        if let Some(number) = numbering.numbers.get(name) {
            let returned = self.allocator.return_stream(StreamId(number));
            returned.map_err(|error| outcome::code_of_cuda(&error))?;
            numbering.numbers.take_back(name);
        }
        Ok(())
    }

    /// A thread's default stream is used no more. The driver keeps track of what is left of its work.
    pub(crate) fn release(&self, name: StreamName) {
        lock(&self.numbering).numbers.take_back(name);
    }

    /// The context is about to be reset, and nothing is allocated in it any more.
    pub(crate) fn close(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }

    /// Bytes that the allocator holds and that nothing is allocated in: what is cached, what the driver has not taken back yet, and
    /// what was made ahead.
    pub(crate) fn cached_bytes(&self) -> u64 {
        let (stats, backend) = (self.allocator.stats(), self.allocator.core().backend());
        let cached = stats.reserved_bytes.current.saturating_sub(stats.usage.all.allocated_bytes.current);
        cached + backend.idle_bytes() + backend.spare_bytes()
    }

    /// Gives free memory back to the device. Whether any went.
    pub(crate) fn trim(&self) -> bool {
        match self.allocator.core().trim(None) {
            Ok(released_bytes) | Err(TrimError::Backend { released_bytes, .. }) => released_bytes > 0,
            Err(_) => false,
        }
    }

    /// The pool of `cuMemAlloc`.
    pub(crate) const SYNCHRONOUS: PoolId = PoolId::DEFAULT;
}
