//! Sleep and wake of a pool, in steps between which other code can act. See [`crate::sleep`].
//!
//! A failed step or a dropped guard leaves the pool unchanged: awake with its memory, or asleep without it. Locks are
//! held while tables are read and changed, but not while the device or the host copies: other threads may free in the
//! meantime.

use super::Allocator;
use super::pool::PoolRef;
use crate::arena::fencing::synchronize;
use crate::config::errors::{OutOfMemoryCause, UnknownError};
use crate::config::op::{Contents, Op};
use crate::heap::trim::Released;
use crate::sleep::mappings::Mappings;
use crate::sleep::{Phase, SavedContents, SleepCause, SleepError, Slept, State, Woken};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, Part, Reason};
use crate::types::ids::PoolId;
use std::collections::BTreeSet;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Puts a pool to sleep: its memory is released, and its addresses, blocks, handles and digests stay. The contents
    /// of live allocations are kept, dropped or zeroed when the pool [wakes](Self::wake). Until then, allocating in the
    /// pool is an error and freeing is not. A pool that already sleeps stays asleep with its saved contents; memory
    /// that the driver still held is released.
    ///
    /// No work may use the pool's memory from here on. The call blocks until earlier work has completed.
    ///
    /// # Determinism
    /// This is an op: call it at the same point of the program on every rank. The digest records the request, whatever
    /// its outcome.
    ///
    /// # Errors
    /// See [`SleepError`]; the pool is unchanged, except after [`SleepCause::Held`]. An observer of a pool may have
    /// windows on its memory, so an observed pool sleeps through [`quiesce`](Self::quiesce) instead.
    pub fn sleep(&self, pool: PoolId, contents: Contents) -> Result<Slept, SleepError> {
        let observers = self.observer_count(pool);
        if observers > 0 {
            return Err(SleepError { pool, cause: SleepCause::Observed { observers } });
        }
        self.quiesce(pool, contents)?.unmap()
    }

    /// Wakes a pool: maps memory at its old addresses again and restores the saved contents. A pool that is awake stays
    /// awake.
    ///
    /// # Determinism
    /// This is an op, like [`sleep`](Self::sleep).
    ///
    /// # Errors
    /// See [`SleepError`]; the pool stays asleep, nothing is lost, and another attempt may succeed.
    pub fn wake(&self, pool: PoolId) -> Result<Woken, SleepError> {
        Ok(self.remap(pool)?.resume())
    }

    /// Starts a sleep: refuses allocations, blocks until the work of the streams that use the pool has completed, and
    /// saves the contents. The memory exists until [`Quiesced::unmap`].
    ///
    /// # Errors
    /// See [`sleep`](Self::sleep); the pool is unchanged.
    pub fn quiesce(&self, pool: PoolId, contents: Contents) -> Result<Quiesced<'_, B, L>, SleepError> {
        self.try_quiesce(pool, contents).map_err(|cause| SleepError { pool, cause })
    }

    fn try_quiesce(&self, pool: PoolId, contents: Contents) -> Result<Quiesced<'_, B, L>, SleepCause> {
        let entry = self.pool(pool)?;
        // The damage that this finds is reported by `check_memory`.
        self.check_guards_of(pool);
        let step = entry.step().lock();
        if step.is_some() {
            return Err(SleepCause::StepOpen);
        }
        let mut change = self.begin_change(pool, Some(contents))?;
        drop(step);
        if change.otherwise != Phase::Awake {
            return Ok(Quiesced { change, kept_bytes: 0 });
        }
        entry.heaps().for_each(|heap| heap.lock().fall_asleep());
        let users: BTreeSet<_> = entry.heaps().flat_map(|heap| heap.lock().users()).collect();
        for stream in users {
            synchronize(&self.context, stream).map_err(|error| SleepCause::Synchronize { stream, error })?;
        }
        if entry.heaps().any(|heap| heap.lock().has_retired_stitched(&self.context)) {
            return Err(SleepCause::Retired);
        }
        let parts = if contents == Contents::Keep { live_parts(entry) } else { Vec::new() };
        let live_bytes = parts.iter().map(|part| part.size_bytes).sum();
        let image = (live_bytes > 0).then(|| self.context.backend.save(pool, &parts)).transpose();
        let image = image.map_err(|error| SleepCause::Save { live_bytes, error })?;
        change.saved = Some(SavedContents::new(contents, image, parts));
        Ok(Quiesced { change, kept_bytes: live_bytes })
    }

    /// Starts a wake: maps memory at the old addresses and restores the saved contents. Allocations are refused until
    /// [`Remapped::resume`].
    ///
    /// # Errors
    /// See [`wake`](Self::wake); the pool stays asleep.
    pub fn remap(&self, pool: PoolId) -> Result<Remapped<'_, B, L>, SleepError> {
        self.remap_with(pool, || 0)
    }

    /// Starts a wake like [`remap`](Self::remap). If the device or a limit is full, calls `make_room`, which releases
    /// other memory and returns the released bytes, and tries once more if there are any. `make_room` is called without
    /// any lock. It must change only pools that ranks do not compare.
    ///
    /// # Determinism
    /// The wake is one op, whether or not `make_room` was called.
    ///
    /// # Errors
    /// See [`wake`](Self::wake); the pool stays asleep.
    pub fn remap_with(&self, pool: PoolId, make_room: impl FnOnce() -> u64) -> Result<Remapped<'_, B, L>, SleepError> {
        self.try_remap(pool, make_room).map_err(|cause| SleepError { pool, cause })
    }

    fn try_remap(&self, pool: PoolId, make_room: impl FnOnce() -> u64) -> Result<Remapped<'_, B, L>, SleepCause> {
        let change = self.begin_change(pool, None)?;
        let (entry, backend) = (change.entry, &self.context.backend);
        let mut remapped = Remapped { change, woken: Woken::default() };
        let needed_bytes = unmapped_bytes(entry);
        let live = live_parts(entry);
        let fill = |saved: &SavedContents| (saved.image(), saved.parts_to_fill(live));
        let (image, parts) = entry.sleep().lock().saved.as_ref().map(fill).unwrap_or_default();
        image.into_iter().for_each(|image| backend.expect_load(image, &parts));
        let mapped = self.map_all(entry).or_else(|cause| {
            let is_full = match &cause {
                OutOfMemoryCause::Driver(error) => error.reason == Reason::OutOfMemory,
                _ => true,
            };
            if is_full && make_room() > 0 { self.map_all(entry) } else { Err(cause) }
        });
        mapped.map_err(|cause| SleepCause::Memory { needed_bytes, cause })?;
        remapped.woken.remapped_bytes = needed_bytes;
        if !parts.is_empty() {
            let filled = image.map_or_else(|| backend.zero(&parts), |image| backend.load(image, &parts));
            filled.map_err(SleepCause::Load)?;
        }
        if image.is_some() {
            remapped.woken.loaded_bytes = parts.iter().map(|part| part.size_bytes).sum();
        }
        Ok(remapped)
    }

    /// Maps all memory of a sleeping pool that is not mapped. Checks the limits first.
    fn map_all(&self, entry: PoolRef<'_, L>) -> Result<(), OutOfMemoryCause> {
        let needed_bytes = unmapped_bytes(entry);
        if let Some(heap) = entry.heaps().next() {
            heap.lock().budgets(&self.context).charge(needed_bytes).map(drop)?;
        }
        entry.heaps().try_for_each(|heap| heap.lock().map_asleep(&self.context))
    }

    /// Begins a sleep or a wake.
    fn begin_change(&self, pool: PoolId, asked: Option<Contents>) -> Result<Change<'_, B, L>, SleepCause> {
        let entry = self.pool(pool)?;
        let mut sleep = entry.sleep().lock();
        // The pool may have been destroyed in the meantime.
        self.pool(pool)?;
        if sleep.is_changing {
            return Err(SleepCause::Busy);
        }
        sleep.is_changing = true;
        let otherwise = match (sleep.saved.is_some(), asked) {
            (false, _) => Phase::Awake,
            (true, None) => Phase::Asleep,
            (true, Some(_)) => Phase::Held,
        };
        Ok(Change { allocator: self, entry, pool, asked, saved: None, otherwise, has_ended: false })
    }

    /// Returns the phase of a pool. While it falls asleep it counts as awake, and while it wakes it counts as asleep.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn phase(&self, pool: PoolId) -> Result<Phase, UnknownError> {
        let entry = self.pool(pool)?;
        let sleep = entry.sleep().lock();
        let is_held = || !sleep.is_changing && held_bytes(entry) > 0;
        Ok(if sleep.saved.is_none() {
            Phase::Awake
        } else if is_held() {
            Phase::Held
        } else {
            Phase::Asleep
        })
    }

    /// Returns the number of a pool's observers.
    pub fn observer_count(&self, pool: PoolId) -> u32 {
        self.observers.lock().count(pool)
    }

    /// Returns the pools with a tag in the order of their ids. They sleep and wake together.
    pub fn pools_tagged(&self, tag: &str) -> Vec<PoolId> {
        let tagged = self.listed_pools().filter(|entry| entry.config().tag() == Some(tag) && !entry.is_destroyed());
        tagged.map(PoolRef::id).collect()
    }

    /// Discards the saved contents of a pool that was destroyed or lost its memory.
    pub(super) fn end_sleep(&self, state: &mut State) {
        let image = state.saved.take().and_then(|saved| saved.image());
        image.into_iter().for_each(|image| self.context.backend.discard(image));
    }
}

/// Returns the live parts of a pool in stream and segment order. In an image, the runs of blocks are adjacent.
fn live_parts<L: Lock>(entry: PoolRef<'_, L>) -> Vec<Part> {
    let mut parts = Vec::new();
    entry.heaps().for_each(|heap| heap.lock().add_live_parts(&mut parts));
    parts
}

/// Returns the bytes of memory that a sleeping pool needs to wake.
fn unmapped_bytes<L: Lock>(entry: PoolRef<'_, L>) -> u64 {
    entry.heaps().map(|heap| heap.lock().asleep().map_or(0, Mappings::unmapped_bytes)).sum()
}

/// Returns the bytes of memory that a sleeping pool still has.
fn held_bytes<L: Lock>(entry: PoolRef<'_, L>) -> u64 {
    entry.heaps().map(|heap| heap.lock().asleep().map_or(0, Mappings::mapped_bytes)).sum()
}

/// A sleep or a wake in progress. No other sleep or wake begins until it ends. Dropping it leaves the pool unchanged.
struct Change<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    entry: PoolRef<'a, L>,
    pool: PoolId,
    /// The requested contents; `None` for a wake.
    asked: Option<Contents>,
    /// The saved contents of a pool that was awake.
    saved: Option<SavedContents>,
    /// The phase of the pool if the change does not complete. See [`end`](Self::end).
    otherwise: Phase,
    has_ended: bool,
}

impl<B: Backend, L: Lock> Change<'_, B, L> {
    /// Ends the change, which succeeded in the phase `done`, or failed if that is `None`. The pool is then awake, or it
    /// sleeps and its memory is released ([`Phase::Asleep`]) or stays mapped ([`Phase::Held`]). Returns the released
    /// bytes.
    fn end(&mut self, done: Option<Phase>) -> Result<u64, SleepCause> {
        let Change { allocator, entry, pool, asked, otherwise, .. } = *self;
        let (after, is_done) = (done.unwrap_or(otherwise), done.is_some());
        self.has_ended = true;
        let mut gate = allocator.gate();
        let mut released = Released::default();
        if after == Phase::Asleep {
            let unmapped = entry.heaps().map(|heap| heap.lock().unmap_asleep(&allocator.context));
            released = unmapped.fold(released, Released::plus);
        }
        // Held until all heaps are awake, so that a heap created in the meantime is awake too.
        let mut sleep = entry.sleep().lock();
        for heap in entry.heaps() {
            let mut heap = heap.lock();
            if after == Phase::Awake {
                // The guards of a heap that did not sleep are evidence.
                let has_slept = heap.is_asleep();
                heap.wake_up();
                if has_slept && asked.is_none() {
                    heap.rewrite_guards(&allocator.context);
                }
            }
            heap.note_asked(asked);
        }
        sleep.saved = sleep.saved.take().or(self.saved.take());
        if after == Phase::Awake {
            allocator.end_sleep(&mut sleep);
        }
        sleep.is_changing = false;
        drop(sleep);
        gate.note(match (asked, is_done) {
            (Some(contents), true) => Op::Sleep { pool, contents },
            (None, true) => Op::Wake { pool },
            (asked, false) => Op::Stay { pool, asked },
        });
        let released_bytes = released.bytes;
        match after {
            Phase::Awake => tracing::debug!(name: "pool.woke", target: "symmalloc", pool = pool.0, is_done),
            _ => tracing::debug!(name: "pool.slept", target: "symmalloc", pool = pool.0, released_bytes, is_done),
        }
        gate.note_released(&released);
        let Some(error) = released.error else { return Ok(released_bytes) };
        let held_bytes = held_bytes(entry);
        Err(SleepCause::Held { released_bytes, held_bytes, error })
    }
}

impl<B: Backend, L: Lock> Drop for Change<'_, B, L> {
    /// Releases the memory that a wake has mapped. If the driver fails to release it, the next sleep tries again, and
    /// the next wake reuses it.
    fn drop(&mut self) {
        if !self.has_ended {
            let _as_it_was = self.end(None);
        }
    }
}

/// A quiesced pool: it refuses allocations, its work has completed, and the contents to keep are saved. Dropping it
/// makes the pool serve allocations again.
#[must_use = "dropping this cancels the sleep"]
pub struct Quiesced<'a, B: Backend, L: Lock> {
    change: Change<'a, B, L>,
    kept_bytes: u64,
}

impl<B: Backend, L: Lock> Quiesced<'_, B, L> {
    /// Releases the memory. The pool sleeps.
    ///
    /// # Errors
    /// Returns [`SleepCause::Held`] if the driver fails to release some of it. The pool sleeps in this case too.
    pub fn unmap(mut self) -> Result<Slept, SleepError> {
        let ended = self.change.end(Some(Phase::Asleep));
        let released_bytes = ended.map_err(|cause| SleepError { pool: self.change.pool, cause })?;
        Ok(Slept { released_bytes, kept_bytes: self.kept_bytes })
    }

    /// Puts the pool to sleep without releasing its memory, because a window that cannot be removed holds it. The next
    /// sleep can release the memory.
    pub fn hold(mut self) {
        let _nothing_is_unmapped = self.change.end(Some(Phase::Held));
    }
}

/// A pool whose memory is mapped again, but which does not serve allocations yet. Dropping it leaves the pool asleep.
#[must_use = "dropping this puts the pool back to sleep"]
pub struct Remapped<'a, B: Backend, L: Lock> {
    change: Change<'a, B, L>,
    woken: Woken,
}

impl<B: Backend, L: Lock> Remapped<'_, B, L> {
    /// Completes the wake. The pool is awake.
    pub fn resume(mut self) -> Woken {
        let _nothing_is_unmapped = self.change.end(Some(Phase::Awake));
        self.woken
    }
}
