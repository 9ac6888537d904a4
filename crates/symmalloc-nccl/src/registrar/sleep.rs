//! A pool that falls asleep on all ranks together: the protocol of `docs/sleep-protocol.md`, step by step and name by name.
//!
//! ```text
//!  Agree ─ Quiesce ─ Decide ─ Deregister ... ─ Unmap ─ Check
//! ```
//! Before `Decide` is heard nothing was done that others see. After it the pool falls asleep, with or without the others. A rank that
//! leaves while others may go on ends the communicators on which they would miss it.

use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::registrar::sleep_error::{Obstacle, SleepError, SleepStep, Slept};
use crate::registrar::sleep_run::{Member, Run};
use std::time::Instant;
use symmalloc_agreement::RankSet;
use symmalloc_core::PoolId;
use symmalloc_core::errors::UnknownError;
use symmalloc_core::lock::Shared;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep as core;
use symmalloc_core::sleep::{Phase, SleepCause};
use symmalloc_cuda::{CudaBackend, CudaError};

/// The core's guard over the CUDA backend.
type Quiesced<'a> = symmalloc_core::Quiesced<'a, CudaBackend, Shared>;

impl Registrar {
    /// Puts a pool to sleep on all ranks: its windows are taken away on every communicator that it is attached to, and its memory goes back
    /// to the devices. Addresses, blocks and digests stay. All ranks of `over` call it at the same point; `over` has all ranks of all
    /// communicators that the pool is attached to, and the pool is attached to it. No work may use the pool from here on.
    ///
    /// A pool that sleeps on some ranks already sleeps on all afterwards. A [`sync`](Self::sync) passes a sleeping pool over.
    ///
    /// # Determinism
    /// An op, as [`Allocator::sleep`](symmalloc_core::Allocator::sleep): the digests say that it was asked for, whatever became of it.
    ///
    /// # Errors
    /// See [`SleepError`], and `docs/sleep-protocol.md` for what becomes of the pool and of communicators.
    pub fn sleep(&self, over: &Communicator, pool: PoolId, contents: Contents) -> Result<Slept, SleepError> {
        let attachments = self.begin_together(over, pool, Some(contents))?;
        let outcome = Run::new(self, pool, Some(contents), &attachments).sleep(contents);
        self.sweep();
        outcome
    }

    /// Whether a pool is awake on this rank.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn phase(&self, pool: PoolId) -> Result<Phase, UnknownError> {
        self.allocator.core().phase(pool)
    }
}

impl<'a> Run<'a> {
    fn sleep(mut self, contents: Contents) -> Result<Slept, SleepError> {
        let communicator = self.over().name().to_owned();
        if self.agree()?.all_are(Phase::Asleep) {
            self.note();
            return Ok(Slept::default());
        }
        let quiesced = self.quiesce(contents);
        let obstacle = quiesced.as_ref().err().copied();
        match self.decide(obstacle) {
            Err(error) => {
                // Others may have heard that all could, and sleep: nobody may use windows that have no counterpart.
                if obstacle.is_none() {
                    self.end_all();
                }
                drop(quiesced);
                return Err(self.broken(SleepStep::Decide, error));
            }
            Ok(ranks) if !ranks.is_empty() => {
                drop(quiesced);
                return Err(SleepError::Refused { communicator, ranks });
            }
            Ok(_) => {}
        }
        let Ok(quiesced) = quiesced else { unreachable!("a rank that could not says so, and hears itself") };
        let deregistrations = self.deregister();
        let (slept, has_failed) = self.unmap(quiesced, deregistrations);
        self.registrar.counters.deregistrations.add(deregistrations);
        let mut message = [0; 8];
        message[0] = u8::from(has_failed);
        match self.all_gather(&message) {
            Err(error) => Err(self.broken(SleepStep::Check, error)),
            Ok(gathered) => {
                let failed: RankSet =
                    gathered.iter().zip(0..).filter(|(said, _)| said[0] != 0).map(|(_, rank)| rank).collect();
                if failed.is_empty() { Ok(slept) } else { Err(SleepError::Held { communicator, ranks: failed }) }
            }
        }
    }

    /// `Quiesce`: waits until no kernel uses the pool, and saves what is kept.
    fn quiesce(&self, contents: Contents) -> Result<Quiesced<'a>, Obstacle> {
        let (registrar, pool) = (self.registrar, self.pool);
        let allocator = &registrar.allocator;
        if self.is_held() {
            return Err(self.unseen(Obstacle::Lost));
        }
        match allocator.is_capturing() {
            Ok(false) => {}
            Ok(true) => return Err(self.unseen(Obstacle::Capturing)),
            Err(error) => return Err(self.unseen(Obstacle::Stream { code: code_of(&error) })),
        }
        // The others wait in `Decide` meanwhile, for as long as the deadline.
        let waited = self.over().deadline() / 2;
        match allocator.synchronize_all(Instant::now() + waited) {
            Ok(true) => {}
            Ok(false) => return Err(self.unseen(Obstacle::Work { waited })),
            Err(error) => return Err(self.unseen(Obstacle::Stream { code: code_of(&error) })),
        }
        allocator.core().quiesce(pool, contents).map_err(|error| match error.cause {
            SleepCause::StepOpen => self.unseen(Obstacle::StepOpen),
            SleepCause::Busy => self.unseen(Obstacle::Busy),
            SleepCause::Retired => Obstacle::Retired,
            SleepCause::Synchronize { error, .. } => Obstacle::Stream { code: error.code },
            SleepCause::Save { live_bytes, error } => Obstacle::Save { live_bytes, code: error.code },
            _ => self.unseen(Obstacle::Other { number: 0 }),
        })
    }

    /// `Deregister`: takes the windows away, on the first communicator, then on the others. What fails ends its communicator.
    fn deregister(&mut self) -> u64 {
        let mut deregistrations = 0;
        for at in 0..self.members.len() {
            if !self.is_ready(at) {
                let Member { attachment, state, .. } = &mut self.members[at];
                attachment.drop_everything(state, &self.registrar.allocator);
                continue;
            }
            let Member { attachment, state, .. } = &mut self.members[at];
            match attachment.take_away(state, &self.registrar.allocator, self.pool) {
                Ok(count) => deregistrations += count,
                Err(error) => {
                    tracing::error!(name: "sleep.deregister_failed", target: "symmalloc", communicator = attachment.comm.name(), %error);
                    self.end(at);
                }
            }
        }
        deregistrations
    }

    /// `Unmap`: gives the memory back, unless a lost communicator has windows on it. Whether any of it is held.
    fn unmap(&mut self, quiesced: Quiesced<'a>, deregistrations: u64) -> (Slept, bool) {
        let slept = Slept { deregistrations, ..Slept::default() };
        if self.is_held() {
            quiesced.hold();
            return (slept, true);
        }
        match quiesced.unmap() {
            Ok(core::Slept { released_bytes, kept_bytes, .. }) => {
                (Slept { released_bytes, kept_bytes, ..slept }, false)
            }
            Err(error) => {
                tracing::warn!(name: "sleep.memory_kept", target: "symmalloc", pool = self.pool.0, %error);
                (slept, true)
            }
        }
    }
}

fn code_of(error: &CudaError) -> i32 {
    match error {
        CudaError::Driver(error) => error.code,
        _ => 0,
    }
}
