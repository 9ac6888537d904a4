//! State and message exchange of a sleep or wake in progress on one rank.

use crate::communicator::{CommOrder, Communicator};
use crate::registrar::attached_comm::{AttachedComm, SyncState};
use crate::registrar::ended::{EndedComm, id_of};
use crate::registrar::{Registrar, not_attached};
use crate::sleep::communicators::{self, combine};
use crate::sleep::error::{CollectiveSleepError, Obstacle, RankObstacle, SleepDifference, SleepStep};
use crate::sleep::message::{
    AgreeFields, AgreeMessage, CommunicatorRow, ExchangeError, Row, SUSPENDING, VerdictMessage, WAKE, call_of, exchange,
};
use crate::sync::error::SyncError;
use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use symmalloc_agreement::{
    AgreementError, Disagreement, Exchange, Gathered, Point, ProtocolError, RankHistory, Transport,
};
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use zerocopy::{FromBytes, IntoBytes};

/// A reason to end the op after `Agree`.
enum AgreeFailure {
    Differ(SleepDifference),
    Disagreed(Box<Disagreement>),
    Broken(SyncError),
}

/// The result of `Agree`.
pub(super) struct Agreed {
    pub(super) messages: Vec<AgreeMessage>,
    /// Communicators of this rank that are unusable on at least one of their ranks.
    pub(super) broken: BTreeSet<u64>,
    /// Ended communicators that were removed on this rank.
    pub(super) ended: Vec<EndedComm>,
}

impl Agreed {
    /// Returns `true` if the pool is in this phase on every rank.
    pub(super) fn all_are(&self, phase: Phase) -> bool {
        self.messages.iter().all(|message| message.is_in(phase))
    }
}

/// One communicator of the op.
pub(super) struct LockedComm<'a> {
    pub(super) attachment: &'a AttachedComm,
    /// Identifier in messages to other ranks.
    pub(super) id: u64,
    pub(super) state: MutexGuard<'a, SyncState>,
}

/// A sleep or wake in progress on this rank. Its communicators cannot be synced meanwhile.
pub(super) struct PhaseChange<'a> {
    pub(super) registrar: &'a Registrar,
    pub(super) pool: PoolId,
    /// The requested treatment of the contents in a sleep; `None` for a wake.
    contents: Option<Contents>,
    /// `true` for a sleep that suspends the communicators.
    pub(super) suspends: bool,
    /// Names of the communicators that this op has resumed.
    pub(super) resumed: Vec<String>,
    /// The communicator of the exchange, and then the others in their global order.
    pub(super) comms: Vec<LockedComm<'a>>,
}

impl Registrar {
    /// Checks that the call can begin. Returns the pool's communicators, starting with the given one, followed by the others in their
    /// global order.
    pub(super) fn begin_collective_op(
        &self,
        over: &Communicator,
        pool: PoolId,
        contents: Option<Contents>,
    ) -> Result<Vec<Arc<AttachedComm>>, CollectiveSleepError> {
        self.allocator().core().phase(pool)?;
        let comms = self.comms_of(over, pool).map_err(|error| match error {
            SyncError::Gone { communicator, state, cause } => {
                // The call is part of the history even though it fails.
                self.record_op(pool, contents);
                CollectiveSleepError::Gone { communicator, state, cause }
            }
            _ => CollectiveSleepError::NotAttached { communicator: over.name().to_owned(), pool },
        })?;
        let refusal = match self.allocator().is_capturing() {
            Ok(false) => return Ok(comms),
            Ok(true) => CollectiveSleepError::Capturing,
            Err(error) => CollectiveSleepError::Cuda { communicator: over.name().to_owned(), error },
        };
        self.record_op(pool, contents);
        Err(refusal)
    }

    fn comms_of(&self, over: &Communicator, pool: PoolId) -> Result<Vec<Arc<AttachedComm>>, SyncError> {
        let first = self.attachment(over)?;
        if !first.view().pools.contains(&pool) {
            return Err(SyncError::NotAttached { communicator: over.name().to_owned(), pool: Some(pool) });
        }
        let mut all = self.attachments_of(pool);
        all.sort_by(|one, other| one.comm.order().cmp(other.comm.order()));
        all.sort_by_key(|other| !Arc::ptr_eq(other, &first));
        match over.check() {
            Ok(()) => Ok(all),
            Err(_) => Err(not_attached(over)),
        }
    }

    /// Folds an op that the core has not recorded into the digest.
    pub(super) fn record_op(&self, pool: PoolId, contents: Option<Contents>) {
        // The pool existed when the call began. If it has been removed since, so has its digest.
        let _known = self.allocator().core().replay().stay(pool, contents);
    }
}

impl<'a> PhaseChange<'a> {
    /// Locks all of the pool's communicators, in one global order so that concurrent runs do not deadlock.
    pub(super) fn new(
        registrar: &'a Registrar,
        pool: PoolId,
        contents: Option<Contents>,
        attachments: &'a [Arc<AttachedComm>],
    ) -> Self {
        let orders: Vec<&CommOrder> = attachments.iter().map(|attachment| attachment.comm.order()).collect();
        let mut locked: Vec<(usize, LockedComm<'a>)> = lock_order(&orders)
            .into_iter()
            .map(|at| {
                let attachment = &*attachments[at];
                (at, LockedComm { attachment, id: id_of(&attachment.comm), state: attachment.lock() })
            })
            .collect();
        locked.sort_by_key(|(at, _)| *at);
        let resumed = Vec::new();
        PhaseChange {
            registrar,
            pool,
            contents,
            suspends: false,
            resumed,
            comms: locked.into_iter().map(|(_, comm)| comm).collect(),
        }
    }

    /// Makes a sleep suspend the communicators.
    pub(super) fn suspending(mut self) -> Self {
        self.suspends = true;
        self
    }

    pub(super) fn over(&self) -> &'a Communicator {
        &self.comms[0].attachment.comm
    }

    pub(super) fn is_ready(&self, at: usize) -> bool {
        let LockedComm { attachment, state, .. } = &self.comms[at];
        attachment.is_ready(state)
    }

    /// Runs one collective over the first communicator.
    pub(super) fn all_gather(&mut self, message: &[u8]) -> Result<Gathered, SyncError> {
        let LockedComm { attachment, state, .. } = &mut self.comms[0];
        if !attachment.is_ready(state) {
            return Err(attachment.gone());
        }
        let communicator = || attachment.comm.name().to_owned();
        let transport = attachment.transport(state)?;
        let gathered = transport.all_gather(message);
        let gathered = gathered.map_err(|error| SyncError::Transport { communicator: communicator(), error })?;
        gathered
            .check_shape(transport.ranks(), message.len())
            .map_err(|error| SyncError::Protocol { communicator: communicator(), error })?;
        self.registrar.counters().rounds.add(1);
        Ok(gathered)
    }

    /// Ends a communicator on this rank.
    pub(super) fn end(&mut self, at: usize) {
        let LockedComm { attachment, state, .. } = &mut self.comms[at];
        attachment.end(state, self.registrar.allocator());
    }

    pub(super) fn end_all(&mut self) {
        (0..self.comms.len()).for_each(|at| self.end(at));
    }

    /// Folds the op, which the core has not recorded, into the digest.
    pub(super) fn record_op(&self) {
        self.registrar.record_op(self.pool, self.contents);
    }

    /// Calls [`record_op`](Self::record_op) for an op that an obstacle prevents, and returns the obstacle.
    pub(super) fn record_obstacle(&self, obstacle: Obstacle) -> Obstacle {
        self.record_op();
        obstacle
    }

    /// Ends the op because the ranks can no longer communicate.
    pub(super) fn broken(&mut self, step: SleepStep, error: SyncError) -> CollectiveSleepError {
        self.registrar.counters().failures.add(1);
        let communicator = self.over().name();
        tracing::error!(name: "sleep.failed", target: "symmalloc", communicator, pool = self.pool.0, %step, %error);
        self.end(0);
        let is_asleep = self.registrar.phase(self.pool).is_ok_and(|phase| phase != Phase::Awake);
        CollectiveSleepError::Broken { communicator: communicator.to_owned(), step, is_asleep, error: Box::new(error) }
    }

    /// Executes `Agree`. On an error, folds the op into the digest.
    pub(super) fn agree(&mut self) -> Result<Agreed, CollectiveSleepError> {
        self.exchange_states().map_err(|stop| {
            self.record_op();
            let communicator = self.over().name().to_owned();
            match stop {
                AgreeFailure::Differ(difference) => {
                    CollectiveSleepError::Differ { communicator, difference: Box::new(difference) }
                }
                AgreeFailure::Disagreed(disagreement) => CollectiveSleepError::Disagreed { communicator, disagreement },
                AgreeFailure::Broken(error) => self.broken(SleepStep::Agree, error),
            }
        })
    }

    /// Exchanges the op, the phase of the pool, and its communicators.
    fn exchange_states(&mut self) -> Result<Agreed, AgreeFailure> {
        let suspending = if self.suspends { SUSPENDING } else { 0 };
        let call = self.contents.map_or(WAKE, |contents| call_of(contents) + suspending);
        let (registrar, pool) = (self.registrar, self.pool);
        let core = registrar.allocator().core();
        let ended = registrar.ended().of(pool);
        let number = {
            let LockedComm { attachment, state, .. } = &mut self.comms[0];
            attachment.next_sleep(state)
        };
        let own = AgreeMessage::new(&AgreeFields {
            call,
            number,
            pool: core.symmetric_ordinal(pool),
            phase: core.phase(pool).ok(),
            windows: self.windows_digest(0),
            communicators: self.comms.len() - 1 + ended.len(),
            compared: self.compares_histories(),
        });
        let messages = self.compare(&own)?;
        let mut broken = BTreeSet::new();
        if messages.iter().any(AgreeMessage::has_communicators) {
            let rows = self.exchange(&self.communicator_rows(&ended)).map_err(AgreeFailure::Broken)?;
            if let Some(difference) = communicators::compare(call, &rows) {
                return Err(AgreeFailure::Differ(difference));
            }
            // After all ranks have removed a communicator, no rank names it again.
            let reports = combine(&rows);
            let is_broken = |id: &u64| reports.get(id).is_none_or(|reports| !reports.is_ready());
            broken = self.comms[1..].iter().map(|locked| locked.id).filter(is_broken).collect();
            registrar.ended().forget(|id| reports.get(&id).is_some_and(|reports| reports.is_over()));
        }
        Ok(Agreed { messages, broken, ended })
    }

    /// Returns `true` if this rank compares the pool's history with the other ranks.
    fn compares_histories(&self) -> bool {
        let LockedComm { attachment, state, .. } = &self.comms[0];
        let is_symmetric = self.registrar.allocator().core().symmetric_ordinal(self.pool).is_some();
        is_symmetric && attachment.compares(state, self.pool)
    }

    /// Compares the properties that must be equal on all ranks: the call and, if configured, the histories.
    fn compare(&mut self, own: &AgreeMessage) -> Result<Vec<AgreeMessage>, AgreeFailure> {
        let (registrar, pool) = (self.registrar, self.pool);
        let core = registrar.allocator().core();
        let history = self.compares_histories().then(|| RankHistory::of_pools(core, Point::Sync, &[pool]));
        // A wake does not compare shared settings, because one rank alone may have raised the allocator's limit to make room for the wake.
        let history = if self.contents.is_none() { history.map(RankHistory::without_shared_settings) } else { history };
        let counters = registrar.counters();
        let LockedComm { attachment, state, .. } = &mut self.comms[0];
        if !attachment.is_ready(state) {
            return Err(AgreeFailure::Broken(attachment.gone()));
        }
        let name = attachment.comm.name();
        let failed = |error| match error {
            AgreementError::Disagreed(disagreement) => AgreeFailure::Disagreed(disagreement),
            error => AgreeFailure::Broken(SyncError::of_exchange(name, error)),
        };
        let transport = attachment.transport(state).map_err(AgreeFailure::Broken)?;
        let exchange = Exchange::begin(transport, history.as_ref(), own.as_bytes()).map_err(failed)?;
        counters.rounds.add(1);
        let decode = |(rank, message): (u32, &[u8])| {
            AgreeMessage::read_from_bytes(message).map_err(|_| failed(ProtocolError::Garbled { rank }.into()))
        };
        let messages: Vec<AgreeMessage> = (0..).zip(exchange.extras()).map(decode).collect::<Result<_, _>>()?;
        if let Some(difference) = AgreeMessage::compare(&messages) {
            return Err(AgreeFailure::Differ(difference));
        }
        let exchanged = exchange.finish().map_err(failed)?;
        counters.rounds.add(exchanged.rounds - 1);
        Ok(messages)
    }

    fn windows_digest(&self, at: usize) -> u64 {
        let LockedComm { attachment, state, .. } = &self.comms[at];
        attachment.windows_digest(state, self.registrar.allocator(), self.pool)
    }

    /// Returns this rank's reports on the pool's other communicators, including ended ones.
    fn communicator_rows(&self, ended: &[EndedComm]) -> Vec<CommunicatorRow> {
        let present = (1..self.comms.len()).map(|at| {
            let LockedComm { attachment, id, .. } = &self.comms[at];
            let windows = self.is_ready(at).then(|| self.windows_digest(at));
            CommunicatorRow::new(*id, attachment.comm.ranks(), windows)
        });
        let ended = ended.iter().map(|ended| CommunicatorRow::new(ended.id, ended.ranks, None));
        present.chain(ended).collect()
    }

    /// Sends these rows to all ranks and returns the rows of every rank.
    pub(super) fn exchange<R: Row>(&mut self, rows: &[R]) -> Result<Vec<Vec<R>>, SyncError> {
        exchange(rows, |message| self.all_gather(message)).map_err(|error| match error {
            ExchangeError::Transport(error) => error,
            ExchangeError::Protocol(error) => self.invalid(error),
        })
    }

    fn invalid(&self, error: ProtocolError) -> SyncError {
        SyncError::Protocol { communicator: self.over().name().to_owned(), error }
    }

    /// Executes `Decide`: sends this rank's verdict and returns the obstacles of all ranks.
    pub(super) fn decide(&mut self, obstacle: Option<Obstacle>) -> Result<Vec<RankObstacle>, SyncError> {
        let gathered = self.all_gather(VerdictMessage::new(obstacle).as_bytes())?;
        let mut obstacles = Vec::new();
        for (rank, message) in (0..).zip(gathered.iter()) {
            let verdict = VerdictMessage::read_from_bytes(message);
            let verdict = verdict.map_err(|_| self.invalid(ProtocolError::Garbled { rank }))?;
            obstacles.extend(verdict.obstacle().map(|obstacle| RankObstacle { rank, obstacle }));
        }
        Ok(obstacles)
    }

    /// Returns `true` if an NCCL call still runs on a communicator that has registrations of the pool.
    pub(super) fn is_held(&self) -> bool {
        self.comms.iter().any(|locked| locked.attachment.holds(&locked.state, self.pool))
    }
}

/// Returns the indexes of communicators in their global order. Every sleep and wake locks communicators in this order, no matter over which
/// of them it runs.
fn lock_order(orders: &[&CommOrder]) -> Vec<usize> {
    let mut indexes: Vec<usize> = (0..orders.len()).collect();
    indexes.sort_by_key(|index| orders[*index]);
    indexes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicators_are_locked_in_their_global_order() {
        let [dp, tp, world] = ["dp", "tp", "world"].map(CommOrder::borrowed);
        assert_eq!(lock_order(&[&dp, &tp, &world]), [0, 1, 2]);
        assert_eq!(
            lock_order(&[&world, &dp, &tp]),
            [1, 2, 0],
            "the first communicator of the call is not locked first"
        );
    }
}
