//! Collective sleep of a pool on all ranks. Implements `docs/sleep-protocol.md` and uses its step names.
//!
//! ```text
//!  Agree ─ Quiesce ─ Decide ─ Deregister ... ─ Unmap ─ Check [─ Suspend ...]
//! ```
//! Before `Decide` completes, nothing has changed that other ranks can observe. Afterwards the pool falls asleep even if other ranks fail.
//! If a rank stops while others may continue, it ends the communicators on which the others would wait for it.

pub(crate) mod communicators;
pub(crate) mod error;
mod message;
mod phase_change;
mod suspension;
mod wake;

use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::sleep::error::{CollectiveSleepError, Obstacle, SleepStep, Slept};
use crate::sleep::phase_change::{LockedComm, PhaseChange};
use std::collections::BTreeSet;
use std::time::Instant;
use symmalloc_agreement::RankSet;
use symmalloc_core::PoolId;
use symmalloc_core::errors::UnknownError;
use symmalloc_core::lock::Shared;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::{Phase, SleepCause};
use symmalloc_cuda::{CudaBackend, CudaError};

/// The core's guard of a quiesced pool, for the CUDA backend.
type Quiesced<'a> = symmalloc_core::Quiesced<'a, CudaBackend, Shared>;

impl Registrar {
    /// Puts a pool to sleep on all ranks: deregisters its windows on every communicator that it is attached to, and releases its memory to
    /// the devices. Addresses, blocks and digests are preserved. All ranks of `over` must call this function at the same point of the
    /// program. `over` must contain all ranks of all communicators that the pool is attached to, and the pool must be attached to `over`.
    /// No work may use the pool until it wakes.
    ///
    /// If the pool already sleeps on some ranks, it sleeps on all ranks after this call. A [`sync`](Self::sync) skips a sleeping pool.
    ///
    /// # Determinism
    /// Like [`Allocator::sleep`](symmalloc_core::Allocator::sleep), this is an op: the digests include the request, regardless of its
    /// outcome.
    ///
    /// # Errors
    /// See [`CollectiveSleepError`]. `docs/sleep-protocol.md` describes the resulting state of the pool and the communicators.
    pub fn sleep(&self, over: &Communicator, pool: PoolId, contents: Contents) -> Result<Slept, CollectiveSleepError> {
        let attachments = self.begin_collective_op(over, pool, Some(contents))?;
        let outcome = PhaseChange::new(self, pool, Some(contents), &attachments).sleep(contents);
        self.sweep();
        outcome
    }

    /// Puts a pool to sleep like [`sleep`](Self::sleep), and then suspends its communicators: NCCL releases their memory on all ranks. A
    /// communicator is resumed by the next wake of a pool with registrations on it, and by any sleep or wake for which it is passed as
    /// `over`. Until then, the communicator's collectives and syncs return an error, and no graph that contains its collectives may be
    /// launched. All pools with registrations on these communicators must sleep.
    ///
    /// # Errors
    /// See [`sleep`](Self::sleep). [`CollectiveSleepError::Refused`] contains [`Obstacle::NoSuspension`](crate::Obstacle::NoSuspension) if
    /// NCCL is older than 2.29.7, and [`Obstacle::WindowsOfOtherPools`](crate::Obstacle::WindowsOfOtherPools) if another pool with
    /// registrations is awake.
    pub fn sleep_and_suspend(
        &self,
        over: &Communicator,
        pool: PoolId,
        contents: Contents,
    ) -> Result<Slept, CollectiveSleepError> {
        let attachments = self.begin_collective_op(over, pool, Some(contents))?;
        let outcome = PhaseChange::new(self, pool, Some(contents), &attachments).suspending().sleep(contents);
        self.sweep();
        outcome
    }

    /// Returns the phase of a pool on this rank: awake, asleep or held.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn phase(&self, pool: PoolId) -> Result<Phase, UnknownError> {
        self.allocator().core().phase(pool)
    }
}

impl<'a> PhaseChange<'a> {
    fn sleep(mut self, contents: Contents) -> Result<Slept, CollectiveSleepError> {
        let communicator = self.over().name().to_owned();
        self.resume_exchange()?;
        let agreed = self.agree()?;
        if agreed.all_are(Phase::Asleep) {
            return self.suspend_asleep(&agreed.broken);
        }
        let quiesced = self.quiesce(contents);
        let obstacle = quiesced.as_ref().err().copied();
        match self.decide(obstacle) {
            Err(error) => {
                // Other ranks may have received a unanimous decision and put the pool to sleep. No rank may use windows that a peer has
                // deregistered.
                if obstacle.is_none() {
                    self.end_all();
                }
                drop(quiesced);
                return Err(self.broken(SleepStep::Decide, error));
            }
            Ok(ranks) if !ranks.is_empty() => {
                drop(quiesced);
                return Err(CollectiveSleepError::Refused { communicator, ranks });
            }
            Ok(_) => {}
        }
        let Ok(quiesced) = quiesced else {
            unreachable!("a rank with an obstacle reports it, and receives its own report")
        };
        let deregistrations = self.deregister();
        let (slept, has_failed) = self.unmap(quiesced, deregistrations);
        self.registrar.counters().deregistrations.add(deregistrations);
        let mut message = [0; 8];
        message[0] = u8::from(has_failed);
        match self.all_gather(&message) {
            Err(error) => {
                self.end_if_others_may_suspend();
                Err(self.broken(SleepStep::Check, error))
            }
            Ok(gathered) => {
                let failed: RankSet =
                    gathered.iter().zip(0..).filter(|(said, _)| said[0] != 0).map(|(_, rank)| rank).collect();
                if !failed.is_empty() {
                    return Err(CollectiveSleepError::Held { communicator, ranks: failed });
                }
                Ok(Slept { suspended_bytes: self.suspend(&agreed.broken)?, ..slept })
            }
        }
    }

    /// Suspends the communicators of a pool that sleeps on every rank, if the call asks for it.
    fn suspend_asleep(mut self, broken: &BTreeSet<u64>) -> Result<Slept, CollectiveSleepError> {
        let obstacle = self.check_suspension().err();
        if obstacle.is_none() {
            self.record_op();
        }
        if self.suspends {
            match self.decide(obstacle) {
                Err(error) => {
                    if obstacle.is_none() {
                        self.end_if_others_may_suspend();
                    }
                    return Err(self.broken(SleepStep::Decide, error));
                }
                Ok(ranks) if !ranks.is_empty() => {
                    let communicator = self.over().name().to_owned();
                    return Err(CollectiveSleepError::Refused { communicator, ranks });
                }
                Ok(_) => {}
            }
        }
        Ok(Slept { suspended_bytes: self.suspend(broken)?, ..Slept::default() })
    }

    /// Ends all communicators if the call suspends them. Other ranks may have received the message that this rank missed, and would then
    /// wait for this rank in NCCL.
    fn end_if_others_may_suspend(&mut self) {
        if self.suspends {
            self.end_all();
        }
    }

    /// Executes `Quiesce`: waits until no kernel uses the pool, and saves the contents that must be kept.
    fn quiesce(&self, contents: Contents) -> Result<Quiesced<'a>, Obstacle> {
        let (registrar, pool) = (self.registrar, self.pool);
        let allocator = registrar.allocator();
        if self.is_held() {
            return Err(self.record_obstacle(Obstacle::Lost));
        }
        self.check_suspension()?;
        match allocator.is_capturing() {
            Ok(false) => {}
            Ok(true) => return Err(self.record_obstacle(Obstacle::Capturing)),
            Err(error) => return Err(self.record_obstacle(Obstacle::Stream { code: code_of(&error) })),
        }
        // Meanwhile, the other ranks wait in `Decide` for at most the deadline.
        let waited = self.over().deadline() / 2;
        match allocator.synchronize_all(Instant::now() + waited) {
            Ok(true) => {}
            Ok(false) => return Err(self.record_obstacle(Obstacle::Work { waited })),
            Err(error) => return Err(self.record_obstacle(Obstacle::Stream { code: code_of(&error) })),
        }
        allocator.core().quiesce(pool, contents).map_err(|error| match error.cause {
            SleepCause::StepOpen => self.record_obstacle(Obstacle::StepOpen),
            SleepCause::Busy => self.record_obstacle(Obstacle::Busy),
            SleepCause::Retired => Obstacle::Retired,
            SleepCause::Synchronize { error, .. } => Obstacle::Stream { code: error.code },
            SleepCause::Save { live_bytes, error } => {
                Obstacle::Save { live_bytes, reason: error.reason, code: error.code }
            }
            _ => self.record_obstacle(Obstacle::Other { number: 0 }),
        })
    }

    /// Executes `Deregister`: deregisters the windows on the first communicator, then on the others. A failure ends the affected
    /// communicator.
    fn deregister(&mut self) -> u64 {
        let mut deregistrations = 0;
        for at in 0..self.comms.len() {
            if !self.is_ready(at) {
                let LockedComm { attachment, state, .. } = &mut self.comms[at];
                attachment.drop_everything(state, self.registrar.allocator());
                continue;
            }
            let LockedComm { attachment, state, .. } = &mut self.comms[at];
            match attachment.save_and_deregister(state, self.registrar.allocator(), self.pool) {
                Ok(count) => deregistrations += count,
                Err(error) => {
                    tracing::error!(name: "sleep.deregister_failed", target: "symmalloc", communicator = attachment.comm.name(), %error);
                    self.end(at);
                }
            }
        }
        deregistrations
    }

    /// Executes `Unmap`: releases the memory unless a lost communicator has windows on it. The returned flag is `true` if memory is still
    /// held.
    fn unmap(&mut self, quiesced: Quiesced<'a>, deregistrations: u64) -> (Slept, bool) {
        let slept = Slept { deregistrations, ..Slept::default() };
        if self.is_held() {
            quiesced.hold();
            return (slept, true);
        }
        match quiesced.unmap() {
            Ok(memory) => (Slept { memory, ..slept }, false),
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
