//! A context that is served: a device's primary one, with its allocator.
//!
//! ```text
//!  p0       cuMemAlloc, on the host's stream: its memory may be used by any stream at once, so the host has waited
//!  p1       the device's default memory pool: cuMemAllocAsync, a heap per stream
//!  p2 ...   memory pools that the program made, in the order of their first use
//! ```
//!
//! It is made when memory is first asked for, and lives for ever: a program may free while it ends. When the context is reset
//! ([`Context::end`]), its memory goes back, and the next one is a new context, whatever its handle.
//!
//! Contexts that a program made with `cuCtxCreate` are the driver's: see `docs/run.md`.

use crate::exit;
use crate::forks;
use crate::libcuda::{self, Driver};
use crate::numbers::{Number, Numbers};
use crate::outcome;
use crate::peers;
use crate::pools::{MemPool, PoolRole};
use crate::recordings;
use crate::served::{self, Live};
use crate::settings::{Settings, say, settings};
use crate::streams::{self, KnownStream, StreamName};
use rustc_hash::FxHashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use symmalloc_core::errors::TrimError;
use symmalloc_core::{PoolId, Retry, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaDevice, CudaError, CudaMemory, LentStream};

/// Contexts that a process can have had.
const CONTEXTS_MAX: usize = 256;

static CONTEXTS: [AtomicPtr<Context>; CONTEXTS_MAX] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CONTEXTS_MAX];
/// How many of them there are. Locked while one is made.
static COUNT: Mutex<usize> = Mutex::new(0);

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
    /// The calling thread's current context, if it is served.
    #[inline]
    pub(crate) fn current() -> Option<&'static Context> {
        Self::of(libcuda::driver()?.current()?)
    }

    /// A context by its handle, if it is served.
    #[inline]
    pub(crate) fn of(raw: usize) -> Option<&'static Context> {
        match Self::existing(raw) {
            Some(context) => Some(context),
            None => Self::make(raw),
        }
    }

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

    #[cold]
    fn make(raw: usize) -> Option<&'static Context> {
        let driver = libcuda::driver()?;
        let device = driver.device_of(raw)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: valid for writing.
        unsafe { driver.primary_state(device, &raw mut flags, &raw mut active) }.ok()?;
        let settings = settings().filter(|settings| !settings.is_watched && active != 0)?;
        let mut count = lock(&COUNT);
        if let Some(context) = Self::existing(raw) {
            return Some(context);
        }
        let place = CONTEXTS.get(*count)?;
        match Self::new(driver, raw, device, settings) {
            Ok(context) => {
                place.store(std::ptr::from_ref(context?).cast_mut(), Ordering::Release);
                *count += 1;
                forks::watch();
                exit::write_at_exit();
                context
            }
            Err(error) => {
                say(format_args!("device {device} is served by the driver: {error}"));
                None
            }
        }
    }

    fn new(
        driver: &'static Driver,
        raw: usize,
        ordinal: c_int,
        settings: &Settings,
    ) -> Result<Option<&'static Context>, CudaError> {
        let device = CudaDevice::new(usize::try_from(ordinal).unwrap_or(0))?;
        if device.context().cu_ctx() as usize != raw {
            // The program's own context, beside a primary one that is in use.
            return Ok(None);
        }
        let allocator = CudaAllocator::new(&device, settings.config.clone())?;
        allocator.set_failure_callback(|core, _| match core.trim(None) {
            Ok(0) | Err(TrimError::Backend { released_bytes: 0, .. }) => Retry::GiveUp,
            Ok(_) | Err(TrimError::Backend { .. }) => Retry::Again,
            Err(_) => Retry::GiveUp,
        });
        recordings::start(&allocator, settings);
        let host = allocator.register_host_stream()?;
        let mut handle = 0;
        // SAFETY: valid for writing. Devices without pools have none, and no call that would use it.
        let _missing = unsafe { driver.default_pool(&raw mut handle, ordinal) };
        let default_pool = MemPool::of_driver(handle, ordinal, PoolRole::Default);
        let context: &'static Context = Box::leak(Box::new(Context {
            raw,
            device: ordinal,
            allocator,
            host,
            default_pool,
            current_pool: AtomicPtr::new(std::ptr::null_mut()),
            numbering: Mutex::new(Numbering { numbers: Numbers::new(), streams: FxHashMap::default() }),
            legacy: OnceLock::new(),
            is_gone: AtomicBool::new(false),
        }));
        default_pool.make(context)?;
        context.find_current_pool(driver);
        peers::grant_to(context);
        Ok(Some(context))
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

    /// The context is about to be reset: everything in it goes back to the device.
    pub(crate) fn end(&'static self) {
        if self.is_gone() {
            return;
        }
        exit::keep(self);
        // The device may still use the memory; a context that is lost refuses, and goes anyway.
        let _lost = self.allocator.device().synchronize();
        served::LIVE.all().into_iter().filter(|found| std::ptr::eq(found.known.context, self)).for_each(|found| {
            if let Some(found) = served::LIVE.take(found.address) {
                let Live { handle, .. } = found.known;
                let _refused = self.allocator.core().free(handle);
            }
        });
        let _refused = self.allocator.trim();
        let _ended = self.allocator.core().stop_recording();
        self.is_gone.store(true, Ordering::Relaxed);
        streams::forget_all_of(self);
        // The allocator is never dropped, so its own reference to the context is given back here.
        if let Some(driver) = libcuda::driver() {
            // SAFETY: `CudaDevice::new` retained it.
            let _refused = unsafe { driver.primary_release(self.device) };
        }
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
