//! Sleep and wake of a pool, in steps between which others may do theirs. See [`crate::sleep`].
//!
//! A step that fails, and a guard that is dropped, leave the pool what it was: awake with its memory, or asleep without. Locks are
//! held while tables are read and changed, and not while the device or the host copies: other threads may free meanwhile.

use super::Allocator;
use super::pool::Pool;
use crate::config::Tag;
use crate::config::errors::{OutOfMemoryCause, UnknownError};
use crate::config::op::{Contents, Op};
use crate::heap::Shortage;
use crate::heap::sleep::wait_for_all;
use crate::heap::trim::Released;
use crate::sleep::state::{Kept, State};
use crate::sleep::{Phase, SleepError, Slept, WakeError, Woken};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::PoolId;
use std::collections::BTreeSet;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Puts a pool to sleep: its memory goes back to the device, and its addresses, blocks, handles and digests stay. What is live is
    /// kept, dropped or made zero when the pool [wakes](Self::wake). Until then allocating in it is an error and freeing is not. A
    /// pool that sleeps already sleeps on, with what was kept for it; what the driver held is given back.
    ///
    /// No work may use the pool's memory from here on. The call waits on the host for the work that was given before.
    ///
    /// # Determinism
    /// An op: call it at the same point of the program on every rank. The digest says that it was asked for, whatever became of it.
    ///
    /// # Errors
    /// See [`SleepError`]; the pool is as it was, except after [`SleepError::Held`]. Whoever observes a pool may have windows on its
    /// memory, so that an observed pool sleeps by way of [`quiesce`](Self::quiesce).
    pub fn sleep(&self, pool: PoolId, contents: Contents) -> Result<Slept, SleepError> {
        let observers = self.observer_count(pool);
        if observers > 0 {
            return Err(SleepError::Observed { pool, observers });
        }
        self.quiesce(pool, contents)?.unmap()
    }

    /// Wakes a pool: it has memory at the addresses that it had, and what was kept is there again. A pool that is awake stays so.
    ///
    /// # Determinism
    /// An op, as [`sleep`](Self::sleep).
    ///
    /// # Errors
    /// See [`WakeError`]; the pool sleeps on, nothing is lost, and another attempt may succeed.
    pub fn wake(&self, pool: PoolId) -> Result<Woken, WakeError> {
        Ok(self.remap(pool)?.keep())
    }

    /// The first step of a sleep: refuses allocations, waits on the host for the work of the streams that use the pool, and saves what
    /// is to be kept. Its memory is there until [`Quiesced::unmap`].
    ///
    /// # Errors
    /// As [`sleep`](Self::sleep); the pool is as it was.
    pub fn quiesce(&self, pool: PoolId, contents: Contents) -> Result<Quiesced<'_, B, L>, SleepError> {
        let entry = self.pool(pool)?;
        let step = entry.step.lock();
        if step.is_some() {
            return Err(SleepError::StepOpen { pool });
        }
        let mut sleep = entry.sleep.lock();
        self.pool(pool)?;
        let earlier = match *sleep {
            State::Changing(_) => return Err(SleepError::Busy { pool }),
            State::Asleep(kept) => Some(kept),
            State::Awake => None,
        };
        let kept = earlier.unwrap_or(Kept { contents, image: None });
        let asked = Some(contents);
        let change = Change { allocator: self, entry, pool, asked, kept, was_asleep: earlier.is_some() };
        *sleep = State::Changing(change.phase());
        let mut quiesced = Quiesced { change: Some(change), kept_bytes: 0 };
        if earlier.is_some() {
            return Ok(quiesced);
        }
        entry.heaps().for_each(|heap| heap.lock().fall_asleep());
        drop((sleep, step));
        let users: BTreeSet<_> = entry.heaps().flat_map(|heap| heap.lock().users()).collect();
        let waited = wait_for_all(&self.context, users);
        waited.map_err(|(stream, error)| SleepError::Synchronize { pool, stream, error })?;
        if entry.heaps().any(|heap| heap.lock().has_retired_stitched(&self.context)) {
            return Err(SleepError::Retired { pool });
        }
        if contents == Contents::Keep {
            let mut live_bytes = 0;
            let mut parts = Vec::new();
            entry.heaps().for_each(|heap| parts.extend(heap.lock().parts_to_save(&mut live_bytes)));
            if live_bytes > 0 {
                let image = self.context.backend.save(&parts);
                let image = image.map_err(|error| SleepError::Save { pool, live_bytes, error })?;
                quiesced.kept_bytes = live_bytes;
                quiesced.change.as_mut().expect("until the end").kept.image = Some(image);
            }
        }
        Ok(quiesced)
    }

    /// The first step of a wake: maps memory at the old addresses, and copies back what was kept. Allocations are refused until
    /// [`Remapped::keep`].
    ///
    /// # Errors
    /// As [`wake`](Self::wake); the pool sleeps on.
    pub fn remap(&self, pool: PoolId) -> Result<Remapped<'_, B, L>, WakeError> {
        let entry = self.pool(pool)?;
        let mut sleep = entry.sleep.lock();
        self.pool(pool)?;
        let (kept, was_asleep) = match *sleep {
            State::Changing(_) => return Err(WakeError::Busy { pool }),
            State::Asleep(kept) => (kept, true),
            State::Awake => (Kept { contents: Contents::Drop, image: None }, false),
        };
        let change = Change { allocator: self, entry, pool, asked: None, kept, was_asleep };
        *sleep = State::Changing(change.phase());
        let woken = Woken { remapped_bytes: 0, loaded_bytes: 0 };
        let mut remapped = Remapped { change: Some(change), woken };
        drop(sleep);
        let needed_bytes = entry.heaps().map(|heap| heap.lock().dormant_bytes().1).sum();
        for heap in entry.heaps() {
            let mapped = heap.lock().map_asleep(&self.context);
            remapped.woken.remapped_bytes += mapped.map_err(|shortage| match *shortage {
                Shortage::Memory { cause: OutOfMemoryCause::Limit { scope, limit_bytes }, .. } => {
                    WakeError::Limit { pool, needed_bytes, scope, limit_bytes }
                }
                Shortage::Memory { cause: OutOfMemoryCause::Driver(error), .. } => {
                    WakeError::Map { pool, needed_bytes, error }
                }
                other => unreachable!("memory is mapped, or a limit or the driver refuses: {other:?}"),
            })?;
        }
        let parts: Vec<_> = entry.heaps().flat_map(|heap| heap.lock().parts_to_fill(kept.contents)).collect();
        if !parts.is_empty() {
            let backend = &self.context.backend;
            let filled = match kept.image {
                Some(image) => backend.load(image, &parts),
                None => backend.zero(&parts),
            };
            filled.map_err(|error| WakeError::Load { pool, error })?;
            if kept.image.is_some() {
                remapped.woken.loaded_bytes = parts.iter().map(|part| part.size_bytes).sum();
            }
        }
        Ok(remapped)
    }

    /// Whether a pool is awake. While it falls asleep or wakes it is what it was.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn phase(&self, pool: PoolId) -> Result<Phase, UnknownError> {
        let entry = self.pool(pool)?;
        let sleep = entry.sleep.lock();
        Ok(match *sleep {
            State::Awake => Phase::Awake,
            State::Changing(phase) => phase,
            State::Asleep(_) => phase_asleep(entry),
        })
    }

    /// How many observers a pool has.
    pub fn observer_count(&self, pool: PoolId) -> u32 {
        self.observers.lock().count(pool)
    }

    /// The pools that carry a tag, in the order of their ids: what sleeps and wakes together.
    pub fn pools_tagged(&self, tag: Tag) -> Vec<PoolId> {
        let tagged = self.pools.iter().filter(|(_, entry)| entry.config.tag() == Some(tag) && !entry.is_destroyed());
        tagged.map(|(index, _)| PoolId(index as u32)).collect()
    }

    /// Does again what a recorded sleep or wake that did not come about left in the digest: [`Op::Stay`].
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn replay_stay(&self, pool: PoolId, asked: Option<Contents>) -> Result<(), UnknownError> {
        let mut gate = self.gate();
        self.pool(pool)?.heaps().for_each(|heap| heap.lock().note_asked(asked));
        gate.note(Op::Stay { pool, asked });
        Ok(())
    }

    /// The pool is no more, or its memory is: what was kept is not needed.
    pub(super) fn end_sleep(&self, state: &mut State) {
        if let State::Asleep(Kept { image: Some(image), .. }) = std::mem::replace(state, State::Awake) {
            self.context.backend.discard(image);
        }
    }
}

fn phase_asleep<L: Lock>(entry: &Pool<L>) -> Phase {
    let is_held = entry.heaps().any(|heap| heap.lock().dormant_bytes().0 > 0);
    if is_held { Phase::Failed } else { Phase::Asleep }
}

/// A sleep or a wake that is under way. No other one begins until it ends.
struct Change<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    entry: &'a Pool<L>,
    pool: PoolId,
    /// `None` for a wake.
    asked: Option<Contents>,
    kept: Kept,
    was_asleep: bool,
}

impl<B: Backend, L: Lock> Change<'_, B, L> {
    /// What the pool was before.
    fn phase(&self) -> Phase {
        if self.was_asleep { phase_asleep(self.entry) } else { Phase::Awake }
    }

    /// The pool sleeps from here on. `unmaps`: its memory goes back. Says what went back, and what failed.
    fn end_asleep(&self, unmaps: bool, is_done: bool) -> Result<u64, SleepError> {
        let Change { allocator, entry, pool, asked, .. } = *self;
        let mut gate = allocator.gate();
        let mut released = Released::default();
        for heap in entry.heaps() {
            let mut heap = heap.lock();
            if unmaps {
                released = released.plus(heap.unmap_asleep(&allocator.context));
            }
            heap.note_asked(asked);
        }
        *entry.sleep.lock() = State::Asleep(self.kept);
        let released_bytes = released.bytes;
        let op = asked.filter(|_| is_done).map(|contents| Op::Sleep { pool, contents });
        gate.note(op.unwrap_or(Op::Stay { pool, asked }));
        tracing::debug!(name: "pool.slept", target: "symmalloc", pool = pool.0, released_bytes, is_done);
        gate.note_released(&released);
        let Some(error) = released.error else { return Ok(released_bytes) };
        let held_bytes = entry.heaps().map(|heap| heap.lock().dormant_bytes().0).sum();
        Err(SleepError::Held { pool, released_bytes, held_bytes, error })
    }

    /// The pool is awake from here on, with all of its memory.
    fn end_awake(&self, is_done: bool) {
        let Change { allocator, entry, pool, asked, .. } = *self;
        let mut gate = allocator.gate();
        let mut sleep = entry.sleep.lock();
        *sleep = State::Awake;
        for heap in entry.heaps() {
            let mut heap = heap.lock();
            heap.wake_up();
            heap.note_asked(asked);
        }
        drop(sleep);
        gate.note(if is_done { Op::Wake { pool } } else { Op::Stay { pool, asked } });
        if let Some(image) = self.kept.image {
            allocator.context.backend.discard(image);
        }
        tracing::debug!(name: "pool.woke", target: "symmalloc", pool = pool.0, is_done);
    }
}

/// A pool that is quiet: its allocations are refused, its work is done, and what is to be kept is saved. Dropping it leaves the pool
/// what it was.
#[must_use = "the pool is what it was when this is dropped"]
pub struct Quiesced<'a, B: Backend, L: Lock> {
    /// Until the end.
    change: Option<Change<'a, B, L>>,
    kept_bytes: u64,
}

impl<B: Backend, L: Lock> Quiesced<'_, B, L> {
    /// Gives the memory back. The pool sleeps.
    ///
    /// # Errors
    /// [`SleepError::Held`] when the driver does not take all of it: the pool sleeps.
    pub fn unmap(mut self) -> Result<Slept, SleepError> {
        let change = self.change.take().expect("until the end");
        Ok(Slept { released_bytes: change.end_asleep(true, true)?, kept_bytes: self.kept_bytes })
    }

    /// The pool sleeps, with all of its memory: a window that nobody can take away holds it. The next sleep can give it back.
    pub fn hold(mut self) {
        let change = self.change.take().expect("until the end");
        let _nothing_is_unmapped = change.end_asleep(false, true);
    }

    /// Bytes that were saved.
    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }
}

impl<B: Backend, L: Lock> Drop for Quiesced<'_, B, L> {
    fn drop(&mut self) {
        match self.change.take() {
            Some(change) if change.was_asleep => drop(change.end_asleep(false, false)),
            Some(change) => change.end_awake(false),
            None => {}
        }
    }
}

/// A pool that has its memory again, and serves no allocations yet. Dropping it leaves the pool what it was: asleep.
#[must_use = "the pool sleeps again when this is dropped"]
pub struct Remapped<'a, B: Backend, L: Lock> {
    /// Until the end.
    change: Option<Change<'a, B, L>>,
    woken: Woken,
}

impl<B: Backend, L: Lock> Remapped<'_, B, L> {
    /// The pool is awake.
    pub fn keep(mut self) -> Woken {
        self.change.take().expect("until the end").end_awake(true);
        self.woken
    }

    /// Bytes that were mapped.
    pub fn remapped_bytes(&self) -> u64 {
        self.woken.remapped_bytes
    }
}

impl<B: Backend, L: Lock> Drop for Remapped<'_, B, L> {
    fn drop(&mut self) {
        match self.change.take() {
            // What the driver does not take back is held: the next sleep tries again, and the next wake makes use of it.
            Some(change) if change.was_asleep => drop(change.end_asleep(true, false)),
            Some(change) => change.end_awake(false),
            None => {}
        }
    }
}
