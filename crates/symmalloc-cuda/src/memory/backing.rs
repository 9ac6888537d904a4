//! A range of virtual memory and what is behind its addresses, under one lock with two sorts of entrants.
//!
//! Callers map and unmap; a thread may make chunks ahead of them, one at a time. It enters only while no caller waits, so that a
//! caller waits for one chunk at most, and not for all that is wanted.

use super::chunks::{Chunks, Part};
use super::exported::ExportedMemory;
use super::prefetch_window::PrefetchWindow;
use super::share_page::ExportState;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use symmalloc_core::backend::Range;

/// A range of addresses and what is behind them.
pub(crate) struct Backing {
    pub(super) range: Range,
    backed: Mutex<Backed>,
    /// How many callers wait for the lock: they go first.
    callers: AtomicUsize,
}

/// What is known of the memory behind a range's addresses.
#[derive(Default)]
pub(super) struct Backed {
    pub(super) chunks: Chunks,
    pub(super) window: PrefetchWindow,
    /// What other processes may have, and who is to be told when it goes.
    exported: Vec<(Part, Weak<ExportedMemory>)>,
}

impl Backed {
    /// Tells `memory` when one of the parts goes.
    pub(super) fn watch(&mut self, parts: impl Iterator<Item = Part>, memory: &Arc<ExportedMemory>) {
        self.exported.retain(|(_, memory)| memory.strong_count() > 0);
        self.exported.extend(parts.map(|part| (part, Arc::downgrade(memory))));
    }

    /// The allocator is about to give `run` up. What else the chunks behind it hold stays as it is.
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
    pub(super) fn new(range: Range) -> Self {
        Backing { range, backed: Mutex::default(), callers: AtomicUsize::new(0) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Backed> {
        self.callers.fetch_add(1, Ordering::Relaxed);
        let backed = self.look();
        self.callers.fetch_sub(1, Ordering::Relaxed);
        backed
    }

    /// For the thread that makes memory ahead; `None` when a caller waits.
    pub(super) fn lock_behind_callers(&self) -> Option<MutexGuard<'_, Backed>> {
        (self.callers.load(Ordering::Relaxed) == 0).then(|| self.look())
    }

    /// For readers, which do not count as callers.
    pub(super) fn look(&self) -> MutexGuard<'_, Backed> {
        self.backed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
