//! A range of virtual memory and the memory behind its addresses, under one lock that gives callers priority over the prefetch thread.
//!
//! Callers map and unmap. A background thread may prefetch chunks, one at a time. It takes the lock only while no caller waits, so a caller
//! waits for at most one chunk, not for the whole prefetch.

use super::chunks::{Chunks, Part};
use super::exported::ExportedMemory;
use super::prefetch_window::PrefetchWindow;
use super::share_page::ExportState;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use symmalloc_core::backend::Range;

/// A range of addresses and its backing memory.
pub(crate) struct Backing {
    pub(super) range: Range,
    /// `true` if the addresses belong to a pool with a base, and are not a reservation of their own.
    pub(super) is_carved: bool,
    backed: Mutex<Backed>,
    /// Number of callers that wait for the lock. They take precedence.
    callers: AtomicUsize,
}

/// State of the memory behind a range's addresses.
#[derive(Default)]
pub(super) struct Backed {
    pub(super) chunks: Chunks,
    pub(super) window: PrefetchWindow,
    /// Exported parts, and the exports to notify when their part is unmapped.
    exported: Vec<(Part, Weak<ExportedMemory>)>,
}

impl Backed {
    /// Notifies `memory` when one of the parts is unmapped.
    pub(super) fn watch(&mut self, parts: impl Iterator<Item = Part>, memory: &Arc<ExportedMemory>) {
        self.exported.retain(|(_, memory)| memory.strong_count() > 0);
        self.exported.extend(parts.map(|part| (part, Arc::downgrade(memory))));
    }

    /// Notes that the allocator is about to release `run`. The other parts of the chunks that back `run` are unaffected.
    pub(super) fn note_unmapped(&mut self, run: &Part) {
        self.exported.retain(|(part, memory)| {
            let goes = part.start < run.end && run.start < part.end;
            if let Some(memory) = memory.upgrade().filter(|_| goes) {
                memory.page().leave_live(ExportState::Unmapped);
            }
            !goes
        });
    }
}

impl Backing {
    pub(super) fn new(range: Range, is_carved: bool) -> Self {
        Backing { range, is_carved, backed: Mutex::default(), callers: AtomicUsize::new(0) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Backed> {
        self.callers.fetch_add(1, Ordering::Relaxed);
        let backed = self.look();
        self.callers.fetch_sub(1, Ordering::Relaxed);
        backed
    }

    /// Locks the state for the prefetch thread. Returns `None` if a caller waits.
    pub(super) fn lock_behind_callers(&self) -> Option<MutexGuard<'_, Backed>> {
        (self.callers.load(Ordering::Relaxed) == 0).then(|| self.look())
    }

    /// Locks the state for a reader, which does not count as a caller.
    pub(super) fn look(&self) -> MutexGuard<'_, Backed> {
        self.backed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
