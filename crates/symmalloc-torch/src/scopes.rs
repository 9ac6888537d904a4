//! Scopes: where allocations go that do not name a pool.
//!
//! Two kinds. PyTorch begins to allocate to a pool and says with a filter which streams that concerns (a graph capture, or
//! `use_mem_pool` of this thread). A program pushes a pool for what this thread allocates. A pushed pool comes first, since it
//! is the program's explicit word; then what was begun last. While no scope is open on the device, one load says so.

use crate::cxx_abi::StreamFilter;
use crate::error::Error;
use crate::streams::RawStream;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use symmalloc_core::PoolId;
use symmalloc_cuda::CaptureWatch;

/// PyTorch's name of a private pool.
pub(crate) type MempoolId = (u64, u64);

/// What PyTorch began.
pub(crate) struct Begun {
    pub(crate) id: MempoolId,
    pub(crate) pool: PoolId,
    pub(crate) filter: StreamFilter,
    /// The scope may be a capture's.
    pub(crate) _watch: CaptureWatch,
}

/// The open scopes of one allocator.
pub(crate) struct Scopes {
    /// Tells this allocator's pushed pools from another's.
    serial: u64,
    /// Open scopes of both kinds. A thread sees those that it opened, and others when it has synchronised with their threads.
    open: Arc<AtomicUsize>,
    begun: Mutex<Vec<Arc<Begun>>>,
}

static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);

/// A pool that a thread pushed. It is popped at the latest when the thread ends.
struct Pushed {
    serial: u64,
    pool: PoolId,
    open: Arc<AtomicUsize>,
}

impl Drop for Pushed {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

thread_local! {
    static PUSHED: RefCell<Vec<Pushed>> = const { RefCell::new(Vec::new()) };
}

impl Scopes {
    pub(crate) fn new() -> Self {
        Scopes { serial: NEXT_SERIAL.fetch_add(1, Ordering::Relaxed), open: Arc::default(), begun: Mutex::default() }
    }

    /// Whether any scope is open, on any thread.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.open.load(Ordering::Relaxed) != 0
    }

    /// Where an allocation of the calling thread for a stream goes; `None`: to the default pool. Calls PyTorch's filters,
    /// which may throw: nothing is locked meanwhile.
    #[cold]
    pub(crate) fn pool_for(&self, stream: RawStream) -> Option<PoolId> {
        let pushed = PUSHED.try_with(|pushed| {
            let pushed = pushed.borrow();
            pushed.iter().rev().find(|pushed| pushed.serial == self.serial).map(|pushed| pushed.pool)
        });
        if let Ok(Some(pool)) = pushed {
            return Some(pool);
        }
        let begun = self.begun().clone();
        begun.iter().rev().find(|begun| begun.filter.accepts(stream.handle())).map(|begun| begun.pool)
    }

    pub(crate) fn begin(&self, begun: Begun) {
        self.begun().push(Arc::new(begun));
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends what was begun last for the pool. Whether there was anything.
    pub(crate) fn end(&self, id: MempoolId) -> bool {
        let mut all = self.begun();
        let Some(at) = all.iter().rposition(|begun| begun.id == id) else { return false };
        let ended = all.remove(at);
        self.open.fetch_sub(1, Ordering::Relaxed);
        drop(all);
        // Runs the destructor of PyTorch's filter.
        drop(ended);
        true
    }

    /// Sends this thread's allocations to a pool until [`pop`](Self::pop).
    pub(crate) fn push(&self, pool: PoolId) {
        let pushed = Pushed { serial: self.serial, pool, open: Arc::clone(&self.open) };
        self.open.fetch_add(1, Ordering::Relaxed);
        // A thread that ends keeps no scopes: the pool is popped at once.
        let _pushed = PUSHED.try_with(|all| all.borrow_mut().push(pushed));
    }

    /// Takes back this thread's last push.
    pub(crate) fn pop(&self, device: usize) -> Result<(), Error> {
        let popped = PUSHED.try_with(|all| {
            let mut all = all.borrow_mut();
            let at = all.iter().rposition(|pushed| pushed.serial == self.serial)?;
            Some(all.remove(at))
        });
        match popped {
            Ok(Some(_)) => Ok(()),
            _ => Err(Error::NoScope { device, scope: "pushed pool" }),
        }
    }

    fn begun(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Begun>>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
