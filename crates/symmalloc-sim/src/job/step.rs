//! Execution of single steps on one rank, including the reaction to failed driver calls.
//!
//! If a failed call had no effect (a fence that could not be recorded or waited for), it is retried, as a program would
//! do. Refused memory is a decision: the program continues without the memory, and from then on its rank differs from
//! the other ranks.

use crate::device::Race;
use crate::job::context::Deviation;
use crate::job::decision::{DecidedRefusal, Decision};
use crate::job::device_work::{LiveBlock, waits};
use crate::job::rank::{Rank, RankJob};
use crate::job::steps::JobStep;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::errors::{AllocateError, FreeError};
use symmalloc_core::lock::Lock;
use symmalloc_core::sleep::{Phase, SleepCause, SleepError};
use symmalloc_core::{Op, StreamId};

/// Maximum number of attempts to make a driver call that fails.
const ATTEMPTS_MAX: usize = 100;

impl<L: Lock> Rank<L> {
    /// Runs one step. Driver calls that fail without an effect are retried.
    pub(crate) fn step(&mut self, job: &RankJob, number: usize) -> Result<Decision, Race> {
        let JobStep { op, name, .. } = &job.program.steps[number];
        let slot = job.program.slots[number] as usize;
        let refused = |refusal| Ok(Decision::Refused(refusal));
        match *op {
            Op::Allocate { id, pool, stream, size_bytes } => {
                self.live[slot] = None;
                let size_bytes = match self.context.deviation {
                    Some(Deviation::DifferentSize { id: other, size_bytes }) if other == id => size_bytes,
                    _ => size_bytes,
                };
                let pool = self.pools[pool.index()];
                let allocate = || match name {
                    None => self.allocator.allocate(pool, stream, size_bytes),
                    Some(name) => self.allocator.allocate_sharing_name(pool, stream, size_bytes, name),
                };
                match retry(allocate, |error| matches!(error, AllocateError::Fence { .. })) {
                    Err(error) => return refused(DecidedRefusal::from(&error)),
                    Ok(allocation) => {
                        self.live[slot] = Some(LiveBlock::begin(self.allocator.backend(), stream, &allocation)?);
                        return Ok(Decision::Placed(allocation.placement));
                    }
                }
            }
            Op::Free { id } => {
                let Some(live) = self.live[slot] else { return refused(DecidedRefusal::NotLive) };
                if self.context.deviation == Some(Deviation::KeepAllocation { id }) {
                    return Ok(Decision::Done);
                }
                if let Some(handle) = live.handle {
                    let free = || match live.address().filter(|_| self.uses_address(number)) {
                        Some(address) => self.allocator.free_at(address).map(drop),
                        None => self.allocator.free(handle),
                    };
                    if let Err(error) = retry(free, |error| matches!(error, FreeError::Fence(_))) {
                        let is_lost = matches!(error, FreeError::Handle(_)) && live.address().is_some();
                        assert!(!is_lost, "a live allocation was not found: {error}");
                        return refused(DecidedRefusal::from(&error));
                    }
                }
                self.live[slot] = None;
            }
            Op::RecordUse { id, stream } => {
                let is_by_address = self.uses_address(number);
                let Some(live) = &mut self.live[slot] else { return refused(DecidedRefusal::NotLive) };
                let noted = match (live.address().filter(|_| is_by_address), live.handle) {
                    (Some(address), _) => self.allocator.record_use_at(address, stream),
                    (None, Some(handle)) => self.allocator.record_use(handle, stream),
                    (None, None) => Ok(()),
                };
                if let Err(error) = noted {
                    return refused(DecidedRefusal::from(&error));
                }
                // The memory of a sleeping pool must not be used.
                if self.allocator.phase(self.pools[job.program.homes[&id].0.index()]) == Ok(Phase::Awake) {
                    live.shared(self.allocator.backend(), stream)?;
                }
            }
            Op::Wait { stream, on } => {
                let backend = self.allocator.backend();
                if (0..ATTEMPTS_MAX).any(|_| waits(backend, stream, on)) {
                    self.allocator.note_stream_wait(stream, on).expect("both streams are registered");
                }
            }
            Op::Synchronize { stream } => {
                let backend = self.allocator.backend();
                if retry(|| backend.synchronize(stream), |_| true).is_ok() {
                    self.allocator.note_synchronized(stream).expect("the stream is registered");
                }
            }
            _ => return Ok(self.step_uncommon(op)),
        }
        Ok(Decision::Done)
    }

    /// Returns `true` if the op refers to its allocation by address. Ops and ranks alternate between addresses and
    /// handles, which must not affect any decision.
    fn uses_address(&self, number: usize) -> bool {
        (number + self.context.rank as usize) % 2 == 1
    }

    fn step_uncommon(&mut self, op: &Op) -> Decision {
        let refused = |refusal| Decision::Refused(refusal);
        match op {
            Op::Reserve { pool, stream, size_bytes } => {
                let pool = self.pools[pool.index()];
                let reserve = || self.allocator.reserve(pool, *stream, *size_bytes);
                match retry(reserve, |error| matches!(error, AllocateError::Fence { .. })) {
                    Ok(()) => Decision::Done,
                    Err(error) => refused(DecidedRefusal::from(&error)),
                }
            }
            Op::Trim { pool } => {
                let trimmed = match pool {
                    Some(pool) => self.allocator.trim_pool(self.pools[pool.index()]),
                    None => self.allocator.trim_all(),
                };
                match trimmed {
                    Ok(_) => Decision::Done,
                    Err(error) => refused(DecidedRefusal::from(&error)),
                }
            }
            Op::RegisterStream { stream, group } => {
                self.register_stream((group != stream).then_some(*group));
                Decision::Done
            }
            Op::CreatePool { config, .. } => {
                self.create_pool(config);
                Decision::Done
            }
            Op::DestroyPool { pool } => match self.allocator.destroy_pool(self.pools[pool.index()]) {
                Ok(_) => Decision::Done,
                Err(error) => refused(DecidedRefusal::from(&error)),
            },
            Op::ResetPool { pool } => match self.allocator.reset_pool(self.pools[pool.index()]) {
                Ok(freed) => {
                    if freed.allocations > 0 {
                        let is_live =
                            |live: &LiveBlock| live.handle.is_none_or(|handle| self.allocator.is_live(handle));
                        self.live.iter_mut().for_each(|live| *live = live.filter(is_live));
                    }
                    Decision::Done
                }
                Err(error) => refused(DecidedRefusal::from(&AllocateError::from(error))),
            },
            // Each attempt is added to the digest, so a rank that needs several attempts differs from the other ranks.
            Op::Sleep { pool, contents } => {
                let pool = self.pools[pool.index()];
                match retry(|| self.allocator.sleep(pool, *contents), |error| !is_misuse(error)) {
                    Ok(_) => Decision::Done,
                    Err(error) => refused(DecidedRefusal::from(&error)),
                }
            }
            Op::Wake { pool } => {
                let pool = self.pools[pool.index()];
                match retry(|| self.allocator.wake(pool), |error| !is_misuse(error)) {
                    Ok(_) => Decision::Done,
                    Err(error) => refused(DecidedRefusal::from(&error)),
                }
            }
            Op::BeginStep { pool, key } => match self.allocator.begin_step(self.pools[pool.index()], *key) {
                Ok(()) => Decision::Done,
                Err(error) => refused(DecidedRefusal::from(&error)),
            },
            Op::EndStep { pool } => match self.allocator.end_step(self.pools[pool.index()]) {
                Ok(report) => {
                    self.planned += report.planned;
                    self.differing += u64::from(report.difference.is_some());
                    let differs_at = report.difference.map(|difference| difference.number);
                    Decision::Ended { planned: report.planned as u32, differs_at }
                }
                Err(error) => refused(DecidedRefusal::from(&error)),
            },
            _ => Decision::Done,
        }
    }

    /// Registers the program's next stream, in the given group or in a new one.
    pub(crate) fn register_stream(&mut self, group: Option<StreamId>) {
        let registered = match group {
            None => self.allocator.register_stream(),
            Some(group) => self.allocator.register_stream_in(group),
        };
        registered.expect("a program has few streams, and names existing groups");
        self.streams += 1;
    }

    /// Creates the program's next pool.
    pub(crate) fn create_pool(&mut self, config: &PoolConfig) {
        self.pools.push(self.allocator.create_pool(config.clone()).expect("creating a pool cannot fail"));
    }
}

fn is_misuse(error: &SleepError) -> bool {
    matches!(error.cause, SleepCause::Unknown(_) | SleepCause::StepOpen)
}

/// Retries a failed attempt while its error may be transient.
fn retry<T, E>(attempt: impl Fn() -> Result<T, E>, is_transient: impl Fn(&E) -> bool) -> Result<T, E> {
    for _ in 1..ATTEMPTS_MAX {
        match attempt() {
            Err(error) if is_transient(&error) => {}
            done => return done,
        }
    }
    attempt()
}
