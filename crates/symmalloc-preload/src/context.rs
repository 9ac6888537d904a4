//! A served context: a device's primary context with its allocator.
//!
//! ```text
//!  p0       cuMemAlloc, on the host's stream: any stream may use its memory immediately, so the host waits before
//!  p1       the device's default memory pool: cuMemAllocAsync, a heap per stream
//!  p2 ...   memory pools that the program created, in the order of their first use
//! ```
//!
//! `contexts.rs` creates a [`Context`] at the first allocation. The [`Context`] lives until the process exits, because a program may free
//! memory during its exit. When the program resets the CUDA context (`ending.rs`), the memory is released. The next CUDA context gets a new
//! [`Context`], even if it has the same handle.
//!
//! This library does not serve contexts that a program creates with `cuCtxCreate`; the driver does (see `docs/run.md`).

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

/// Maximum number of contexts over the lifetime of a process.
const CONTEXTS_MAX: usize = 256;

static CONTEXTS: [AtomicPtr<Context>; CONTEXTS_MAX] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CONTEXTS_MAX];

/// A numbered stream.
pub(crate) struct KnownStream {
    /// Handle of the stream; 0 for default streams, and while no stream has this number.
    raw: AtomicUsize,
    pub(crate) context: &'static Context,
    pub(crate) id: StreamId,
}

impl KnownStream {
    fn new(context: &'static Context, id: StreamId) -> Self {
        KnownStream { raw: AtomicUsize::new(0), context, id }
    }

    /// Returns the handle of the stream.
    #[inline]
    pub(crate) fn raw(&self) -> usize {
        self.raw.load(Ordering::Relaxed)
    }

    pub(crate) fn set_raw(&self, raw: usize) {
        self.raw.store(raw, Ordering::Relaxed);
    }
}

/// A served context. See the module documentation.
pub(crate) struct Context {
    raw: usize,
    device: c_int,
    allocator: CudaAllocator,
    /// The stream that stands for the host, for `cuMemAlloc`.
    pub(crate) host: StreamId,
    /// The device's default pool.
    default_pool: &'static MemPool,
    /// The pool that `cuMemAllocAsync` allocates from; null if the driver serves it.
    current_pool: AtomicPtr<MemPool>,
    numbering: Mutex<Numbering>,
    legacy: OnceLock<&'static KnownStream>,
    is_gone: AtomicBool,
}

struct Numbering {
    numbers: Numbers<StreamName>,
    /// Streams by number.
    streams: FxHashMap<u16, &'static KnownStream>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// Returns a context by its handle, if it already has an allocator.
    #[inline]
    pub(crate) fn existing(raw: usize) -> Option<&'static Context> {
        Self::all().find(|context| context.raw == raw && !context.is_gone())
    }

    /// Returns the context of a device, if it already has an allocator.
    pub(crate) fn of_device(device: c_int) -> Option<&'static Context> {
        Self::all().find(|context| context.device == device && !context.is_gone())
    }

    /// Returns all contexts that were ever served, in creation order.
    pub(crate) fn all() -> impl Iterator<Item = &'static Context> {
        // SAFETY: the pointer is null, or points to a leaked context.
        CONTEXTS.iter().map_while(|place| unsafe { place.load(Ordering::Acquire).as_ref() })
    }

    /// Makes a context visible to all threads. Returns `false` if the table is full. Only one thread at a time may call it.
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

    /// Returns the id of the context, which differs from the ids of all others, including later contexts with the same handle.
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

    /// Returns the device's default pool.
    pub(crate) fn default_pool(&self) -> &'static MemPool {
        self.default_pool
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Returns the pool of `cuMemAllocAsync`, if it is served.
    #[inline]
    pub(crate) fn current_pool(&self) -> Option<&'static MemPool> {
        // SAFETY: the pointer is null, or points to a leaked pool.
        unsafe { self.current_pool.load(Ordering::Acquire).as_ref() }
    }

    /// Updates the pool that the device allocates from, because the program may have set a different one.
    pub(crate) fn find_current_pool(&self, driver: &Driver) {
        let mut handle = 0;
        // SAFETY: the pointer is valid for writing.
        let known = unsafe { driver.current_pool(&raw mut handle, self.device) };
        let is_default = known.is_err() || handle == self.default_pool.raw();
        let pool = if is_default { Some(self.default_pool) } else { MemPool::find(handle) };
        let pool = pool.filter(|pool| pool.is_served()).map_or(std::ptr::null(), std::ptr::from_ref);
        self.current_pool.store(pool.cast_mut(), Ordering::Release);
    }

    /// Returns the default stream that all threads share.
    pub(crate) fn legacy(&'static self) -> Result<&'static KnownStream, c_int> {
        match self.legacy.get() {
            Some(stream) => Ok(stream),
            None => {
                let stream = self.number(StreamName::Legacy)?;
                Ok(self.legacy.get_or_init(|| stream))
            }
        }
    }

    /// Returns a stream by its name, and assigns it a number if it has none. A per-thread default stream must belong to the calling thread.
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
                // SAFETY: the stream belongs to this context. It is alive until `take_back`; default streams are alive as long as anything
                // waits for them.
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

    /// Releases the number of a stream that is about to be destroyed. The stream's remaining work stays tracked.
    pub(crate) fn take_back(&self, name: StreamName) -> Result<(), c_int> {
        let mut numbering = lock(&self.numbering);
        if let Some(number) = numbering.numbers.get(name) {
            let returned = self.allocator.return_stream(StreamId(number));
            returned.map_err(|error| outcome::code_of_cuda(&error))?;
            numbering.numbers.take_back(name);
        }
        Ok(())
    }

    /// Releases the number of a thread's default stream that is no longer used. The driver tracks the stream's remaining work.
    pub(crate) fn release(&self, name: StreamName) {
        lock(&self.numbering).numbers.take_back(name);
    }

    /// Marks the context as gone. It is about to be reset, and has no allocations left.
    pub(crate) fn close(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }

    /// Returns the number of bytes that the allocator holds but no allocation uses: cached memory, memory that the driver has not released
    /// yet, and prefetched memory.
    pub(crate) fn cached_bytes(&self) -> u64 {
        let (stats, backend) = (self.allocator.stats(), self.allocator.core().backend());
        let cached = stats.reserved_bytes.current.saturating_sub(stats.usage.all.allocated_bytes.current);
        cached + backend.idle_bytes() + backend.spare_bytes()
    }

    /// Releases free memory to the device. Returns `true` if any was released.
    pub(crate) fn trim(&self) -> bool {
        match self.allocator.core().trim_all() {
            Ok(released_bytes) | Err(TrimError::Backend { released_bytes, .. }) => released_bytes > 0,
            Err(_) => false,
        }
    }

    /// The pool of `cuMemAlloc`.
    pub(crate) const SYNCHRONOUS: PoolId = PoolId::DEFAULT;
}
