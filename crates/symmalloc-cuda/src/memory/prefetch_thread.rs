//! Virtual memory that a background thread prefetches before a range grows into it.
//!
//! ```text
//!  caller   map ── takes prefetched chunks, makes the rest ── requests more ──► continues
//!  thread                                                       │
//!                                          a chunk: create, map, access ── a chunk ── ... until enough is made
//! ```
//!
//! The amount to prefetch depends only on the past growth of the ranges (`prefetch_window.rs`). The thread's timing and the results of
//! driver calls only determine which thread creates a chunk. The allocator sees no difference, because prefetched memory lies beyond the
//! end of the memory that it has mapped.
//!
//! A chunk is created under its range's lock, so a caller that needs the range waits for at most one chunk, and then uses that chunk.
//! Callers take precedence. The thread is started at the first request. It ends when the backend is dropped, after its current driver call.

use super::backing::Backing;
use super::chunks::Part;
use super::exported::ExportedMemory;
use super::handle::{DmaBufRefusal, ExportedHandle, HandleKind, HeldDmaBuf};
use super::interface::BackendMemory;
use super::spare::{self, Prefetched};
use super::virtual_memory::VirtualMemory;
use crate::error::{CudaError, DriverError};
use std::collections::VecDeque;
use std::ffi::c_ulonglong;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use symmalloc_core::backend::{BackendError, Range};
use symmalloc_core::base::{Base, BaseError};
use symmalloc_core::ids::PoolId;

pub(crate) struct Prefetching {
    memory: Arc<VirtualMemory>,
    work: Arc<Work>,
    /// `None` until prefetching is first requested.
    thread: Mutex<Option<Thread>>,
}

struct Thread {
    handle: JoinHandle<()>,
    /// Id of the process that the thread runs in: a forked child has no such thread.
    process: u32,
}

/// State that the thread shares with callers.
#[derive(Default)]
struct Work {
    tasks: Mutex<Tasks>,
    changed: Condvar,
}

#[derive(Default)]
struct Tasks {
    /// Ranges to prefetch for, without duplicates.
    ranges: VecDeque<Arc<Backing>>,
    is_over: bool,
}

impl Prefetching {
    pub(crate) fn new(memory: VirtualMemory) -> Self {
        let memory = Arc::new(memory);
        spare::announce(&memory);
        Prefetching { memory, work: Arc::default(), thread: Mutex::default() }
    }

    /// Asks the thread to prefetch for the range, and starts the thread if necessary.
    fn ask(&self, backing: Arc<Backing>) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let (work, memory) = (Arc::clone(&self.work), Arc::clone(&self.memory));
            let name = "symmalloc-prefetch".to_owned();
            match std::thread::Builder::new().name(name).spawn(move || work.run(&memory)) {
                Ok(handle) => *thread = Some(Thread { handle, process: std::process::id() }),
                // Without the thread, a growth creates its memory itself. The next growth tries to start the thread again.
                Err(error) => {
                    tracing::warn!(name: "memory.prefetch_unstarted", target: "symmalloc", %error);
                    return;
                }
            }
        }
        drop(thread);
        self.work.push(backing);
    }
}

impl Work {
    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, backing: Arc<Backing>) {
        let mut tasks = self.tasks();
        if !tasks.ranges.iter().any(|known| Arc::ptr_eq(known, &backing)) {
            tasks.ranges.push_back(backing);
            self.changed.notify_one();
        }
    }

    /// Waits for the next range. Returns `None` when the backend ends.
    fn pop(&self) -> Option<Arc<Backing>> {
        let mut tasks = self.tasks();
        loop {
            if tasks.is_over {
                return None;
            }
            if let Some(backing) = tasks.ranges.pop_front() {
                return Some(backing);
            }
            tasks = self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Creates one chunk at a time, alternating between ranges.
    fn run(&self, memory: &VirtualMemory) {
        while let Some(backing) = self.pop() {
            if memory.prefetch_chunk(&backing) {
                self.push(backing);
            }
        }
    }
}

impl BackendMemory for Prefetching {
    fn granularity_bytes(&self) -> u64 {
        self.memory.granularity_bytes()
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        self.memory.reserve(size_bytes)
    }

    fn reserve_at(&self, base: Base, pool: PoolId) -> Result<Range, BaseError> {
        self.memory.reserve_at(base, pool)
    }

    fn carve(&self, part: Range) -> Result<(), BackendError> {
        self.memory.carve(part)
    }

    fn release_space(&self, space: Range) -> Result<(), BackendError> {
        self.memory.release_space(space)
    }

    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.memory.map(range, offset_bytes, size_bytes)?;
        if let Some(backing) = self.memory.wants_prefetch(range) {
            self.ask(backing);
        }
        Ok(())
    }

    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.memory.unmap(range, offset_bytes, size_bytes)
    }

    fn release(&self, range: Range) -> Result<(), BackendError> {
        self.memory.release(range)
    }

    fn chunks_behind(&self, parts: &[Part], memory: Option<&Arc<ExportedMemory>>) -> Option<Vec<Part>> {
        self.memory.chunks_behind(parts, memory)
    }

    fn export_chunk(&self, chunk: &Part, kind: HandleKind) -> Result<ExportedHandle, DriverError> {
        self.memory.export_chunk(chunk, kind)
    }

    fn hold_dma_buf(&self, part: &Part, memory: &Arc<ExportedMemory>) -> Result<HeldDmaBuf, DmaBufRefusal> {
        self.memory.hold_dma_buf(part, memory)
    }

    fn release_held(&self, handles: &[c_ulonglong]) {
        self.memory.release_held(handles);
    }

    fn grant_access(&self, peer: usize) -> Result<(), CudaError> {
        self.memory.grant_access(peer)
    }

    fn idle_bytes(&self) -> u64 {
        self.memory.idle_bytes()
    }

    fn spare_bytes(&self) -> u64 {
        self.memory.spare_bytes()
    }

    fn release_spare(&self) -> u64 {
        self.memory.release_spare()
    }
}

impl Drop for Prefetching {
    fn drop(&mut self) {
        self.work.tasks().is_over = true;
        self.work.changed.notify_all();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|thread| thread.process == std::process::id()) {
            // The thread itself does not panic. If a subscriber to its tracing events panics, there is nothing left to do here.
            let _ended = thread.handle.join();
        }
        self.memory.release_prefetched();
    }
}
