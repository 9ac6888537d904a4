//! Collective wake of a pool on all ranks. Implements `docs/sleep-protocol.md` and uses its step names.
//!
//! ```text
//!  [Resume ─] Agree ─ Remap ─ Decide ─ [Resume ─] Register ... ─ Check
//! ```
//! Before `Decide` completes, nothing has changed that other ranks can observe. Afterwards the pool keeps its memory even if other ranks
//! fail. If a rank stops while others may continue, it ends the communicators on which the others would wait for it.

use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::registrar::ended::EndedComm;
use crate::sleep::error::{CollectiveSleepError, Obstacle, RankObstacle, SleepStep, Woken};
use crate::sleep::message::{AgreeMessage, Finding, FindingRow};
use crate::sleep::phase_change::{LockedComm, PhaseChange};
use crate::windows::segment::SymmetricSegment;
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::PoolId;
use symmalloc_core::errors::OutOfMemoryCause;
use symmalloc_core::lock::Shared;
use symmalloc_core::sleep::{Phase, SleepCause};
use symmalloc_cuda::CudaBackend;

/// The core's guard over the CUDA backend.
type Remapped<'a> = symmalloc_core::Remapped<'a, CudaBackend, Shared>;

impl Registrar {
    /// Wakes a pool on all ranks: maps memory at the old addresses, restores the saved contents, and registers the windows in their
    /// original order. Either all ranks wake the pool or none does. All ranks of `over` must call it at the same point.
    ///
    /// The next [`sync`](Self::sync) registers the segments that had no window when the pool fell asleep. On communicators that the pool
    /// was attached to since then, it registers all segments.
    ///
    /// # Determinism
    /// Like [`sleep`](Self::sleep), this is an op.
    ///
    /// # Errors
    /// See [`CollectiveSleepError`]. `docs/sleep-protocol.md` describes the resulting state of the pool and the communicators.
    pub fn wake(&self, over: &Communicator, pool: PoolId) -> Result<Woken, CollectiveSleepError> {
        let attachments = self.begin_collective_op(over, pool, None)?;
        let outcome = PhaseChange::new(self, pool, None, &attachments).wake();
        self.sweep();
        outcome
    }
}

impl<'a> PhaseChange<'a> {
    fn wake(mut self) -> Result<Woken, CollectiveSleepError> {
        let communicator = self.over().name().to_owned();
        self.resume_exchange()?;
        let agreed = self.agree()?;
        if !agreed.all_are(Phase::Asleep) {
            self.record_op();
            return match AgreeMessage::compare_phases(&agreed.messages) {
                Some(difference) => {
                    Err(CollectiveSleepError::Differ { communicator, difference: Box::new(difference) })
                }
                // The pool is already awake everywhere.
                None if agreed.all_are(Phase::Awake) => {
                    Ok(Woken { resumed: std::mem::take(&mut self.resumed), ..Woken::default() })
                }
                None => Err(CollectiveSleepError::Refused { communicator, ranks: self.all_held() }),
            };
        }
        let remapped = self.remap(&agreed.broken);
        match self.decide(remapped.as_ref().err().copied()) {
            Err(error) => {
                drop(remapped);
                return Err(self.broken(SleepStep::Decide, error));
            }
            Ok(ranks) if !ranks.is_empty() => {
                drop(remapped);
                return Err(CollectiveSleepError::Refused { communicator, ranks });
            }
            Ok(_) => {}
        }
        let Ok(remapped) = remapped else {
            unreachable!("a rank with an obstacle reports it, and receives its own report")
        };
        // From here on, the memory stays mapped even after an error: another rank may already be awake.
        let memory = remapped.resume();
        let (registrations, findings) = self.register(&agreed.broken)?;
        self.registrar.counters().registrations.add(registrations);
        let rows: Vec<FindingRow> = findings.into_iter().map(FindingRow::from).collect();
        match self.exchange(&rows) {
            Err(error) => Err(self.broken(SleepStep::Check, error)),
            Ok(rows) => Ok(self.woken(&rows, &agreed.ended, Woken { memory, registrations, ..Woken::default() })),
        }
    }

    /// Returns the obstacles of a pool whose memory is held on every rank.
    fn all_held(&self) -> Vec<RankObstacle> {
        (0..self.over().ranks()).map(|rank| RankObstacle { rank, obstacle: Obstacle::Held }).collect()
    }

    /// Executes `Remap`: maps memory at the old addresses and restores the saved contents. First checks that the windows fit.
    fn remap(&mut self, broken: &BTreeSet<u64>) -> Result<Remapped<'a>, Obstacle> {
        let (registrar, pool) = (self.registrar, self.pool);
        for locked in self.comms.iter().filter(|locked| !broken.contains(&locked.id)) {
            let room = locked.attachment.room_for(&locked.state, pool);
            room.map_err(|needed_bytes| self.record_obstacle(Obstacle::SymmetricSpace { needed_bytes }))?;
        }
        let remapped = registrar.allocator().remap(pool).map_err(|error| match error.cause {
            SleepCause::Memory { needed_bytes, cause: OutOfMemoryCause::Limit { limit_bytes, .. } } => {
                Obstacle::Limit { needed_bytes, limit_bytes }
            }
            SleepCause::Memory { needed_bytes, cause: OutOfMemoryCause::Driver(error) } => {
                Obstacle::Memory { needed_bytes, code: error.code }
            }
            SleepCause::Load(error) => Obstacle::Load { reason: error.reason, code: error.code },
            SleepCause::Busy => self.record_obstacle(Obstacle::Busy),
            _ => self.record_obstacle(Obstacle::Other { number: 0 }),
        })?;
        self.check_room(broken)?;
        Ok(remapped)
    }

    /// Executes `Register`: registers the windows again on the first communicator, then on the others. If the registration on the first one
    /// fails, all communicators are ended. If it fails on another one, only that communicator is lost.
    fn register(&mut self, broken: &BTreeSet<u64>) -> Result<(u64, Vec<Finding>), CollectiveSleepError> {
        let (mut registrations, mut findings) = (0, Vec::new());
        for at in 0..self.comms.len() {
            let (communicator, is_usable) =
                (self.comms[at].id, self.is_ready(at) && !broken.contains(&self.comms[at].id));
            let resumed = if is_usable { self.resume(at) } else { Ok(()) };
            let LockedComm { attachment, state, .. } = &mut self.comms[at];
            let back = match resumed {
                Ok(()) if is_usable => attachment.restore(state, self.pool),
                Ok(()) => Err(attachment.gone()),
                Err(error) => Err(error),
            };
            match back {
                Ok(back) => {
                    registrations += back.registrations;
                    let changed = back.changed.into_iter();
                    findings.extend(changed.map(|segment| Finding::Changed { communicator, segment }));
                }
                Err(error) if at == 0 => {
                    self.end_all();
                    return Err(self.broken(SleepStep::Register, error));
                }
                Err(error) => {
                    tracing::warn!(name: "wake.communicator_lost", target: "symmalloc", communicator = attachment.comm.name(), %error);
                    self.end(at);
                    findings.push(Finding::Lost { communicator });
                }
            }
        }
        Ok((registrations, findings))
    }

    /// Applies the result of `Check`: a window or communicator that changed or was lost on one rank counts as changed or lost on all.
    fn woken(&mut self, rows: &[Vec<FindingRow>], ended: &[EndedComm], mut woken: Woken) -> Woken {
        let mut lost: BTreeSet<u64> = BTreeSet::new();
        let mut changed: BTreeMap<u64, BTreeSet<SymmetricSegment>> = BTreeMap::new();
        for finding in rows.iter().flatten().filter_map(FindingRow::decode) {
            match finding {
                Finding::Lost { communicator } => {
                    lost.insert(communicator);
                }
                Finding::Changed { communicator, segment } => {
                    changed.entry(communicator).or_default().insert(segment);
                }
            }
        }
        for at in 0..self.comms.len() {
            let (id, communicator) = (self.comms[at].id, self.comms[at].attachment.comm.name().to_owned());
            if lost.contains(&id) {
                self.end(at);
                woken.lost.push(communicator);
            } else if let Some(segments) = changed.get(&id) {
                self.comms[at].attachment.invalidate(segments);
                woken.changed.extend(segments.iter().map(|segment| (communicator.clone(), *segment)));
            }
        }
        woken.resumed = std::mem::take(&mut self.resumed);
        let gone = ended.iter().filter(|ended| lost.contains(&ended.id));
        woken.lost.extend(gone.map(|ended| ended.name.clone()));
        woken
    }
}
