//! A pool that sleeps and wakes on all ranks together: the protocol of `docs/sleep-protocol.md`, step by step and name by name.
//!
//! ```text
//!  sleep   Agree ─ Quiesce ─ Decide ─ Deregister ... ─ Unmap ─ Check
//!  wake    Agree ─ Remap ─── Decide ─ Register ... ─────────── Check
//! ```
//! Before `Decide` is heard nothing was done that others see. After it a sleep goes through and a wake keeps its memory, with or without
//! the others. A rank that leaves while others may go on ends the communicators on which they would miss it.

use crate::communicator::Communicator;
use crate::registrar::attachment::{Attachment, SyncState};
use crate::registrar::ended::Ended;
use crate::registrar::error::SyncError;
use crate::registrar::plan::{SegmentName, fold};
use crate::registrar::sleep_error::{
    Obstacle, RankObstacle, SleepDifference, SleepError, SleepStep, Slept, WakeError, Woken,
};
use crate::registrar::sleep_message::{
    Finding, Head, Named, Row, WAKE, call_of, compare_communicators, exchange, known, read_verdict, word_of,
    write_verdict,
};
use crate::registrar::{Registrar, not_attached};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;
use symmalloc_agreement::{
    Disagreement, Gathered, Inquiry, Mode, Point, Progress, ProtocolError, RankHistory, RankSet, Transport,
};
use symmalloc_core::PoolId;
use symmalloc_core::errors::{OutOfMemoryCause, UnknownError};
use symmalloc_core::lock::Shared;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep as core;
use symmalloc_core::sleep::{Phase, SleepCause};
use symmalloc_cuda::CudaBackend;

/// Why an op goes no further than `Agree`.
enum Stop {
    Differ(SleepDifference),
    Disagreed(Box<Disagreement>),
    Broken(SyncError),
}

/// What the ranks agreed on.
struct Agreed {
    heads: Vec<Head>,
    /// Communicators of this rank that cannot be used on all of their ranks.
    broken: BTreeSet<u64>,
    /// Those that this rank has let go of.
    ended: Vec<Ended>,
}

/// One communicator of the op.
struct Member<'a> {
    attachment: &'a Attachment,
    /// By what it is named to other ranks.
    name: u64,
    state: MutexGuard<'a, SyncState>,
}

/// A sleep or wake that is under way on this rank. No sync of its communicators comes between.
struct Run<'a> {
    registrar: &'a Registrar,
    pool: PoolId,
    /// The one that they talk over, then the others in their order.
    members: Vec<Member<'a>>,
}

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
        self.allocator.core().phase(pool)?;
        let attachments = self.members_of(over, pool).map_err(|error| self.sleep_error(error, pool, contents))?;
        if self.allocator.is_capturing().unwrap_or(true) {
            self.note(pool, Some(contents));
            return Err(SleepError::Capturing);
        }
        let outcome = Run::new(self, pool, &attachments).sleep(contents);
        self.sweep();
        outcome
    }

    /// Wakes a pool on all ranks: memory comes back at the old addresses, with what was kept, and windows are registered in the order
    /// in which they were made. All or none. All ranks of `over` call it at the same point.
    ///
    /// Segments that had no window when the pool fell asleep, and communicators that it was attached to since, get theirs at the
    /// next [`sync`](Self::sync).
    ///
    /// # Determinism
    /// An op, as [`sleep`](Self::sleep).
    ///
    /// # Errors
    /// See [`WakeError`], and `docs/sleep-protocol.md` for what becomes of the pool and of communicators.
    pub fn wake(&self, over: &Communicator, pool: PoolId) -> Result<Woken, WakeError> {
        self.allocator.core().phase(pool)?;
        let attachments = self.members_of(over, pool).map_err(|error| self.wake_error(error, pool))?;
        if self.allocator.is_capturing().unwrap_or(true) {
            self.note(pool, None);
            return Err(WakeError::Capturing);
        }
        let outcome = Run::new(self, pool, &attachments).wake();
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

    /// The communicators of a pool: the given one first, then the others in their order.
    fn members_of(&self, over: &Communicator, pool: PoolId) -> Result<Vec<Arc<Attachment>>, SyncError> {
        let first = self.attachment(over)?;
        if !first.view().pools.contains(&pool) {
            return Err(SyncError::NotAttached { communicator: over.name().to_owned(), pool: Some(pool) });
        }
        let mut all: Vec<_> =
            self.read().iter().filter(|other| other.view().pools.contains(&pool)).map(Arc::clone).collect();
        all.sort_by(|one, other| one.comm.order().cmp(other.comm.order()));
        all.sort_by_key(|other| !Arc::ptr_eq(other, &first));
        match over.check() {
            Ok(()) => Ok(all),
            Err(_) => Err(not_attached(over)),
        }
    }

    /// Notes the communicators that the list of attachments loses.
    pub(super) fn remember(&self, gone: &[Arc<Attachment>]) {
        let ended = gone.iter().map(|attachment| Ended {
            name: attachment.comm.name().to_owned(),
            communicator: name_of(&attachment.comm),
            ranks: attachment.comm.ranks(),
            pools: attachment.view().pools.to_vec(),
        });
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).extend(ended);
    }

    fn ended_of(&self, pool: PoolId) -> Vec<Ended> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.iter().filter(|ended| ended.pools.contains(&pool)).cloned().collect()
    }

    /// Who calls is told that the communicator has gone; the call counts all the same.
    fn sleep_error(&self, error: SyncError, pool: PoolId, contents: Contents) -> SleepError {
        match error {
            SyncError::Gone { communicator, state, cause } => {
                self.note(pool, Some(contents));
                SleepError::Gone { communicator, state, cause }
            }
            other => SleepError::NotAttached { communicator: communicator_of(other), pool },
        }
    }

    fn wake_error(&self, error: SyncError, pool: PoolId) -> WakeError {
        match error {
            SyncError::Gone { communicator, state, cause } => {
                self.note(pool, None);
                WakeError::Gone { communicator, state, cause }
            }
            other => WakeError::NotAttached { communicator: communicator_of(other), pool },
        }
    }

    /// Folds an op that the core has not seen.
    fn note(&self, pool: PoolId, asked: Option<Contents>) {
        // The pool was there when the call began. If it is gone, so is its digest.
        let _known = self.allocator.core().replay_stay(pool, asked);
    }
}

fn communicator_of(error: SyncError) -> String {
    match error {
        SyncError::NotAttached { communicator, .. } => communicator,
        _ => String::new(),
    }
}

/// What a communicator is called to other ranks.
fn name_of(comm: &Communicator) -> u64 {
    let bytes = comm.order().as_bytes();
    bytes.iter().fold(bytes.len() as u64, |digest, byte| fold(digest, u64::from(*byte)))
}

impl<'a> Run<'a> {
    /// Holds all of the pool's communicators, which are taken in one order, so that two of these do not wait for each other.
    fn new(registrar: &'a Registrar, pool: PoolId, attachments: &'a [Arc<Attachment>]) -> Self {
        let mut order: Vec<usize> = (0..attachments.len()).collect();
        order.sort_by(|one, other| attachments[*one].comm.order().cmp(attachments[*other].comm.order()));
        let mut locked: Vec<(usize, Member<'a>)> = order
            .into_iter()
            .map(|at| {
                let attachment = &*attachments[at];
                (at, Member { attachment, name: name_of(&attachment.comm), state: attachment.lock() })
            })
            .collect();
        locked.sort_by_key(|(at, _)| *at);
        Run { registrar, pool, members: locked.into_iter().map(|(_, member)| member).collect() }
    }

    fn over(&self) -> &'a Communicator {
        &self.members[0].attachment.comm
    }

    fn is_ready(&self, member: usize) -> bool {
        let Member { attachment, state, .. } = &self.members[member];
        attachment.is_ready(state)
    }

    /// One collective over the first communicator.
    fn all_gather(&mut self, message: &[u8]) -> Result<Gathered, SyncError> {
        let Member { attachment, state, .. } = &mut self.members[0];
        if !attachment.is_ready(state) {
            return Err(attachment.gone());
        }
        let communicator = || attachment.comm.name().to_owned();
        let transport = attachment.transport(state)?;
        let gathered = transport.all_gather(message);
        let gathered = gathered.map_err(|error| SyncError::Transport { communicator: communicator(), error })?;
        let (messages, message_bytes, ranks) = (gathered.len(), gathered.message_bytes(), transport.ranks());
        if messages != ranks as usize || message_bytes != message.len() {
            let error = ProtocolError::WrongShape { messages, message_bytes, ranks };
            return Err(SyncError::Protocol { communicator: communicator(), error });
        }
        self.registrar.counters.rounds.add(1);
        Ok(gathered)
    }

    /// Ends a communicator on this rank.
    fn end(&mut self, member: usize) {
        let Member { attachment, state, .. } = &mut self.members[member];
        attachment.end(state, &self.registrar.allocator);
    }

    fn end_all(&mut self) {
        (0..self.members.len()).for_each(|member| self.end(member));
    }

    /// The op breaks off: the ranks cannot talk any more.
    fn fail(&mut self, step: SleepStep, error: &SyncError) {
        self.registrar.counters.failures.add(1);
        let communicator = self.over().name();
        tracing::error!(name: "sleep.failed", target: "symmalloc", communicator, pool = self.pool.0, %step, %error);
        self.end(0);
    }

    /// `Agree`: the ranks say which op they are in, what the pool is, and which communicators it has.
    fn agree(&mut self, call: u64) -> Result<Agreed, Stop> {
        let (registrar, pool) = (self.registrar, self.pool);
        let core = registrar.allocator.core();
        let ended = registrar.ended_of(pool);
        let number = {
            let Member { attachment, state, .. } = &mut self.members[0];
            attachment.next_sleep(state)
        };
        let mut head = Head::new(call, number, core.symmetric_ordinal(pool).map_or(u64::MAX, u64::from));
        head.phase = core.phase(pool).map_or(u64::MAX, word_of);
        head.windows = self.windows_digest(0);
        head.communicators = (self.members.len() - 1 + ended.len()) as u64;
        let heads = self.compare(&head)?;
        let mut broken = BTreeSet::new();
        if heads.iter().any(|head| head.communicators > 0) {
            let rows = self.named(&ended);
            let told = exchange(&rows, |message| self.all_gather(message)).map_err(Stop::Broken)?;
            if call != WAKE
                && let Some(difference) = compare_communicators(&told)
            {
                return Err(Stop::Differ(difference));
            }
            let known = known(&told);
            let is_broken = |name: &u64| known.get(name).is_none_or(|known| !known.is_ready());
            broken = self.members[1..].iter().map(|member| member.name).filter(is_broken).collect();
            let mut remembered = registrar.ended.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody speaks of it again that all have let go of.
            remembered.retain(|ended| known.get(&ended.communicator).is_none_or(|known| !known.is_over()));
        }
        Ok(Agreed { heads, broken, ended })
    }

    /// Compares what must be equal on all ranks: the call and, where histories are compared, these.
    fn compare(&mut self, head: &Head) -> Result<Vec<Head>, Stop> {
        let (registrar, pool) = (self.registrar, self.pool);
        let core = registrar.allocator.core();
        let is_compared = registrar.settings.mode != Mode::Off && core.symmetric_ordinal(pool).is_some();
        let history = is_compared.then(|| RankHistory::of_pools(core, Point::Sync, &[pool]));
        let mut inquiry = Inquiry::new(self.over().ranks());
        let answer_bytes = inquiry.question().message_bytes();
        let mut message = Vec::new();
        match &history {
            Some(history) => history.answer(inquiry.question(), &mut message),
            None => message.resize(answer_bytes, 0),
        }
        head.write(&mut message);
        let gathered = self.all_gather(&message).map_err(Stop::Broken)?;
        let heads: Vec<Head> = gathered.iter().map(|message| Head::read(&message[answer_bytes..])).collect();
        if let Some(difference) = Head::compare(&heads) {
            return Err(Stop::Differ(difference));
        }
        let answers: Vec<u8> = gathered.iter().flat_map(|message| &message[..answer_bytes]).copied().collect();
        let mut gathered = Gathered::new(answers, answer_bytes);
        let Some(history) = history.filter(|_| gathered.iter().any(|answer| answer != &message[..answer_bytes])) else {
            return Ok(heads);
        };
        loop {
            let nonsense = |error| SyncError::Protocol { communicator: self.over().name().to_owned(), error };
            match inquiry.advance(&gathered).map_err(nonsense).map_err(Stop::Broken)? {
                Progress::Asked => {}
                Progress::Disagreed(disagreement) => {
                    disagreement.tell(self.over().rank());
                    return Err(Stop::Disagreed(disagreement));
                }
                _ => return Ok(heads),
            }
            message.clear();
            history.answer(inquiry.question(), &mut message);
            gathered = self.all_gather(&message).map_err(Stop::Broken)?;
        }
    }

    fn windows_digest(&self, member: usize) -> u64 {
        let Member { attachment, state, .. } = &self.members[member];
        attachment.windows_digest(state, &self.registrar.allocator, self.pool)
    }

    /// The pool's other communicators, those that are over as well.
    fn named(&self, ended: &[Ended]) -> Vec<Row> {
        let known = (1..self.members.len()).map(|at| {
            let (ranks, communicator) = (self.members[at].attachment.comm.ranks(), self.members[at].name);
            let is_ready = self.is_ready(at);
            let windows = if is_ready { self.windows_digest(at) } else { 0 };
            Named { communicator, ranks, is_ready, windows }
        });
        let over = ended.iter().map(|ended| Named {
            communicator: ended.communicator,
            ranks: ended.ranks,
            is_ready: false,
            windows: 0,
        });
        known.chain(over).map(|named| named.row()).collect()
    }

    /// `Decide`: says whether this rank could, and hears which could not.
    fn decide(&mut self, obstacle: Option<Obstacle>) -> Result<Vec<RankObstacle>, SyncError> {
        let gathered = self.all_gather(&write_verdict(obstacle))?;
        let verdicts = gathered.iter().map(read_verdict).zip(0..);
        Ok(verdicts.filter_map(|(obstacle, rank)| Some(RankObstacle { rank, obstacle: obstacle? })).collect())
    }

    /// Whether a communicator that NCCL is still inside of has something of the pool.
    fn is_held(&self) -> bool {
        self.members.iter().any(|member| member.attachment.holds(&member.state, self.pool))
    }
}

/// The core's guards over the CUDA backend.
type Quiesced<'a> = symmalloc_core::Quiesced<'a, CudaBackend, Shared>;
type Remapped<'a> = symmalloc_core::Remapped<'a, CudaBackend, Shared>;

impl<'a> Run<'a> {
    fn sleep(mut self, contents: Contents) -> Result<Slept, SleepError> {
        let communicator = self.over().name().to_owned();
        let asked = Some(contents);
        let agreed = match self.agree(call_of(contents)) {
            Ok(agreed) => agreed,
            Err(stop) => {
                self.registrar.note(self.pool, asked);
                return Err(match stop {
                    Stop::Differ(difference) => SleepError::Differ { communicator, difference: Box::new(difference) },
                    Stop::Disagreed(disagreement) => SleepError::Disagreed { communicator, disagreement },
                    Stop::Broken(error) => self.broken_sleep(SleepStep::Agree, error),
                });
            }
        };
        if agreed.heads.iter().all(|head| head.phase == word_of(Phase::Asleep)) {
            self.registrar.note(self.pool, asked);
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
                return Err(self.broken_sleep(SleepStep::Decide, error));
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
            Err(error) => Err(self.broken_sleep(SleepStep::Check, error)),
            Ok(gathered) => {
                let failed: RankSet =
                    gathered.iter().zip(0..).filter(|(said, _)| said[0] != 0).map(|(_, rank)| rank).collect();
                if failed.is_empty() { Ok(slept) } else { Err(SleepError::Held { communicator, ranks: failed }) }
            }
        }
    }

    fn broken_sleep(&mut self, step: SleepStep, error: SyncError) -> SleepError {
        self.fail(step, &error);
        let is_asleep = self.registrar.phase(self.pool).is_ok_and(|phase| phase != Phase::Awake);
        SleepError::Broken { communicator: self.over().name().to_owned(), step, is_asleep, error: Box::new(error) }
    }

    /// `Quiesce`: waits until no kernel uses the pool, and saves what is kept.
    fn quiesce(&mut self, contents: Contents) -> Result<Quiesced<'a>, Obstacle> {
        let (registrar, pool) = (self.registrar, self.pool);
        let allocator = &registrar.allocator;
        let unseen = |obstacle| {
            registrar.note(pool, Some(contents));
            obstacle
        };
        if self.is_held() {
            return Err(unseen(Obstacle::Lost));
        }
        if allocator.is_capturing().unwrap_or(true) {
            return Err(unseen(Obstacle::Capturing));
        }
        // The others wait in `Decide` meanwhile, for as long as the deadline.
        let waited = self.over().deadline() / 2;
        match allocator.synchronize_all(Instant::now() + waited) {
            Ok(true) => {}
            Ok(false) => return Err(unseen(Obstacle::Work { waited })),
            Err(error) => return Err(unseen(Obstacle::Stream { code: code_of(&error) })),
        }
        allocator.core().quiesce(pool, contents).map_err(|error| match error.cause {
            SleepCause::StepOpen => unseen(Obstacle::StepOpen),
            SleepCause::Busy => unseen(Obstacle::Busy),
            SleepCause::Retired => Obstacle::Retired,
            SleepCause::Synchronize { error, .. } => Obstacle::Stream { code: error.code },
            SleepCause::Save { live_bytes, error } => Obstacle::Save { live_bytes, code: error.code },
            _ => unseen(Obstacle::Other { number: 0 }),
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

    fn wake(mut self) -> Result<Woken, WakeError> {
        let communicator = self.over().name().to_owned();
        let agreed = match self.agree(WAKE) {
            Ok(agreed) => agreed,
            Err(stop) => {
                self.registrar.note(self.pool, None);
                return Err(match stop {
                    Stop::Differ(difference) => WakeError::Differ { communicator, difference: Box::new(difference) },
                    Stop::Disagreed(disagreement) => WakeError::Disagreed { communicator, disagreement },
                    Stop::Broken(error) => self.broken_wake(SleepStep::Agree, error),
                });
            }
        };
        let all_are = |phase| agreed.heads.iter().all(|head| head.phase == word_of(phase));
        if !all_are(Phase::Asleep) {
            self.registrar.note(self.pool, None);
            // All awake: there is nothing to do.
            let difference = Head::compare_phases(&agreed.heads).filter(|_| !all_are(Phase::Awake));
            return match difference {
                Some(difference) => Err(WakeError::Differ { communicator, difference: Box::new(difference) }),
                None if all_are(Phase::Awake) => Ok(Woken::default()),
                None => Err(WakeError::Refused { communicator, ranks: self.all_held() }),
            };
        }
        let remapped = self.remap(&agreed.broken);
        match self.decide(remapped.as_ref().err().copied()) {
            Err(error) => {
                drop(remapped);
                return Err(self.broken_wake(SleepStep::Decide, error));
            }
            Ok(ranks) if !ranks.is_empty() => {
                drop(remapped);
                return Err(WakeError::Refused { communicator, ranks });
            }
            Ok(_) => {}
        }
        let Ok(remapped) = remapped else { unreachable!("a rank that could not says so, and hears itself") };
        // From here on the memory stays, whatever happens: another rank may be awake already.
        let core::Woken { remapped_bytes, .. } = remapped.keep();
        let (registrations, findings) = self.register(&agreed.broken)?;
        self.registrar.counters.registrations.add(registrations);
        let rows: Vec<Row> = findings.into_iter().map(Finding::row).collect();
        match exchange(&rows, |message| self.all_gather(message)) {
            Err(error) => Err(self.broken_wake(SleepStep::Check, error)),
            Ok(told) => {
                Ok(self.woken(&told, &agreed.ended, Woken { remapped_bytes, registrations, ..Woken::default() }))
            }
        }
    }

    fn broken_wake(&mut self, step: SleepStep, error: SyncError) -> WakeError {
        self.fail(step, &error);
        let is_asleep = self.registrar.phase(self.pool).is_ok_and(|phase| phase != Phase::Awake);
        WakeError::Broken { communicator: self.over().name().to_owned(), step, is_asleep, error: Box::new(error) }
    }

    /// Every rank's pool has failed: there is something that holds their memory.
    fn all_held(&self) -> Vec<RankObstacle> {
        (0..self.over().ranks()).map(|rank| RankObstacle { rank, obstacle: Obstacle::Lost }).collect()
    }

    /// `Remap`: gets memory, at the old addresses, and puts back what was kept. Windows find a place on paper first.
    fn remap(&mut self, broken: &BTreeSet<u64>) -> Result<Remapped<'a>, Obstacle> {
        let (registrar, pool) = (self.registrar, self.pool);
        let unseen = |obstacle| {
            registrar.note(pool, None);
            obstacle
        };
        for member in self.members.iter().filter(|member| !broken.contains(&member.name)) {
            let room = member.attachment.room_for(&member.state, pool);
            room.map_err(|needed_bytes| unseen(Obstacle::SymmetricSpace { needed_bytes }))?;
        }
        registrar.allocator.core().remap(pool).map_err(|error| match error.cause {
            SleepCause::Memory { needed_bytes, cause: OutOfMemoryCause::Limit { limit_bytes, .. } } => {
                Obstacle::Limit { needed_bytes, limit_bytes }
            }
            SleepCause::Memory { needed_bytes, cause: OutOfMemoryCause::Driver(error) } => {
                Obstacle::Memory { needed_bytes, code: error.code }
            }
            SleepCause::Load(error) => Obstacle::Load { code: error.code },
            SleepCause::Busy => unseen(Obstacle::Busy),
            _ => unseen(Obstacle::Other { number: 0 }),
        })
    }

    /// `Register`: makes the windows again, on the first communicator, then on the others. One of these that fails is lost, and takes nothing
    /// else along; the first one takes all along.
    fn register(&mut self, broken: &BTreeSet<u64>) -> Result<(u64, Vec<Finding>), WakeError> {
        let (mut registrations, mut findings) = (0, Vec::new());
        for at in 0..self.members.len() {
            let (communicator, is_usable) =
                (self.members[at].name, self.is_ready(at) && !broken.contains(&self.members[at].name));
            let Member { attachment, state, .. } = &mut self.members[at];
            let back = if is_usable { attachment.bring_back(state, self.pool) } else { Err(attachment.gone()) };
            match back {
                Ok(back) => {
                    registrations += back.registrations;
                    let changed = back.changed.into_iter();
                    findings.extend(changed.map(|segment| Finding::Changed { communicator, segment }));
                }
                Err(error) if at == 0 => {
                    self.end_all();
                    return Err(self.broken_wake(SleepStep::Register, error));
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

    /// `Check`, heard: what changed or was lost on one rank counts as changed or lost on all.
    fn woken(&mut self, told: &[Vec<Row>], ended: &[Ended], mut woken: Woken) -> Woken {
        let mut lost: BTreeSet<u64> = BTreeSet::new();
        let mut changed: BTreeMap<u64, BTreeSet<SegmentName>> = BTreeMap::new();
        for finding in told.iter().flatten().filter_map(Finding::of) {
            match finding {
                Finding::Lost { communicator } => {
                    lost.insert(communicator);
                }
                Finding::Changed { communicator, segment } => {
                    changed.entry(communicator).or_default().insert(segment);
                }
            }
        }
        for at in 0..self.members.len() {
            let (name, communicator) = (self.members[at].name, self.members[at].attachment.comm.name().to_owned());
            if lost.contains(&name) {
                self.end(at);
                woken.lost.push(communicator);
            } else if let Some(segments) = changed.get(&name) {
                let Member { attachment, state, .. } = &self.members[at];
                attachment.invalidate(state, segments);
                woken.changed.extend(segments.iter().map(|segment| (communicator.clone(), *segment)));
            }
        }
        let gone = ended.iter().filter(|ended| lost.contains(&ended.communicator));
        woken.lost.extend(gone.map(|ended| ended.name.clone()));
        woken
    }
}

fn code_of(error: &symmalloc_cuda::CudaError) -> i32 {
    match error {
        symmalloc_cuda::CudaError::Driver(error) => error.code,
        _ => 0,
    }
}
