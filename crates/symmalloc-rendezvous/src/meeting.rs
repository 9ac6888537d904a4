//! A meeting: the ranks of a job find rank 0 through a store, connect to it, and all start or all fail.
//!
//! ```text
//!  rank 0   listens ─► card ─► store           accepts ranks until all have arrived or one deadline has passed ─► outcome to each
//!  rank r   store ─► card ─► search for one of the endpoints ─► join ─────────────────────────────────────────► waits for the outcome
//!                     ▲            │ nobody answers: note ─► store
//!                     └────────────┘ the next card may be that of a rank 0 that restarted
//! ```
//!
//! Every rank that arrived learns the same outcome, because rank 0 decides it alone: at the first deadline of a rank that has arrived, its own
//! included. A rank that ends before, or whose machine does not answer for five seconds, is no longer there. A new process may take its place
//! until then. Rank 0 then names the missing ranks and
//! what they noted.
//!
//! A store can have values of an earlier run. A card counts only if the rank 0 behind it knows its token, and a failed meeting is reported
//! only if no other card appears before the deadline.

use crate::admission::{Admission, Admitted};
use crate::card::{Card, ENDPOINTS_MAX, MISSING_MAX, Outcome, Token, answer_of_note, note};
use crate::deadline::{Deadline, Pauses};
use crate::endpoint::{
    Endpoint, Listener, LocalName, end_if_unreachable, hash, listen_everywhere, read_until, stay_if_unreachable,
    wait_for_any,
};
use crate::error::{EndpointAnswer, RendezvousError};
use crate::handshake::{Shared, Terms};
use crate::interfaces::own_addresses;
use crate::search::{Identity, SearchError, search};
use crate::secret::{Secret, random};
use crate::store::Store;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;

/// Interval at which deadlines are checked.
const CHECK_LIMIT: Duration = Duration::from_millis(100);
/// Time for which a rank searches at the endpoints of one card before it reads the card again: first, and at most. Each round doubles it.
const ROUND: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(5)];
/// Pause between two rounds: first, and at most.
const PAUSE: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(250)];
/// Extra time for rank 0 to report the outcome.
const GRACE: Duration = Duration::from_secs(2);
/// Time limit of the notes: those that a rank writes, and all that rank 0 reads.
const NOTES_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of missing ranks whose notes rank 0 reads.
const NOTES_MAX: usize = 64;

/// Maximum number of ranks. Rank 0 lists those that are missing. No real job has this many.
pub(crate) const RANKS_MAX: u32 = 1 << 20;

/// One meeting of the ranks of one job.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    /// Identifies the job and its turn, equal on all ranks.
    pub(crate) job: u64,
    /// At most [`RANKS_MAX`].
    pub(crate) ranks: u32,
    pub(crate) secret: Option<Secret>,
}

/// The processes that must reach rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Processes of this machine.
    Machine,
    /// Other machines.
    Network {
        /// Addresses that all ranks can reach. This machine's addresses toward them are the first ones on the card.
        toward: Vec<SocketAddr>,
        /// Addresses of rank 0 that the program names.
        named: Vec<IpAddr>,
    },
}

/// The result of a meeting.
#[derive(Debug)]
pub struct Met {
    /// The bytes that rank 0 shared, the same on all ranks.
    pub id: Shared,
    /// Connections by the other rank: those to all ranks on rank 0, and the one to rank 0 on the others.
    pub connections: Vec<(u32, Connection)>,
}

/// A rank that has joined.
struct Arrival {
    session: u64,
    /// When the rank stops waiting.
    end: Instant,
    connection: Connection,
}

impl Arrival {
    /// Returns `true` while the rank's process holds the connection. The rank sends nothing before the outcome.
    fn is_connected(&mut self) -> bool {
        let read = self.connection.read(&mut [0]);
        read.is_err_and(|error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted))
    }
}

impl Meeting {
    /// Creates a meeting. Fails if no job has this many ranks.
    pub(crate) fn new(job: u64, ranks: u32, secret: Option<Secret>) -> Result<Self, RendezvousError> {
        if ranks > RANKS_MAX {
            return Err(RendezvousError::TooManyRanks { ranks, ranks_max: RANKS_MAX });
        }
        Ok(Meeting { job, ranks, secret })
    }

    /// Meets the other ranks. Rank 0 shares what `create` returns.
    pub(crate) fn hold<E: From<RendezvousError>>(
        &self,
        store: &dyn Store,
        reach: &Reach,
        rank: u32,
        create: impl FnOnce() -> Result<Shared, E>,
        deadline: &Deadline,
    ) -> Result<Met, E> {
        if rank == 0 {
            let id = create()?;
            return Ok(Met { id, connections: self.host(store, reach, id, deadline)? });
        }
        let (id, connection) = self.join(store, Identity::new(rank, deadline)?)?;
        Ok(Met { id, connections: vec![(0, connection)] })
    }

    /// Returns the terms of a connection to an own store.
    pub(crate) fn store_terms(&self) -> Terms {
        let Meeting { job, ranks, ref secret } = *self;
        Terms { job, ranks, has_secret: secret.is_some(), key: secret.clone(), refusal_key: None }
    }

    /// Returns the terms of a connection to the rank 0 that created this token.
    pub(crate) fn terms(&self, token: &Token) -> Terms {
        Terms {
            // Strangers learn this number from a hello that they receive, which does not reveal the token.
            job: self.job ^ hash(token),
            ranks: self.ranks,
            has_secret: self.secret.is_some(),
            key: Some(Secret::with_token(token, self.secret.as_ref())),
            refusal_key: Some(Secret::with_token(token, None)),
        }
    }

    /// Returns the key of the note of a rank.
    pub(crate) fn note_key(job: u64, rank: u32) -> String {
        format!("symmalloc/{job:016x}/note/{rank}")
    }

    fn card_key(&self) -> String {
        format!("symmalloc/{:016x}/card", self.job)
    }

    /// Accepts all other ranks, as rank 0. Returns the connections to them.
    pub(crate) fn host(
        &self,
        store: &dyn Store,
        reach: &Reach,
        shared: Shared,
        deadline: &Deadline,
    ) -> Result<Vec<(u32, Connection)>, RendezvousError> {
        let token: Token = random()?;
        let (listeners, endpoints) = listen(reach)?;
        let card = Card { token, endpoints, outcome: None };
        store.set(&self.card_key(), &card.bytes(), deadline)?;
        let mut admission = Admission::new(self.terms(&token), shared);
        let mut arrived: BTreeMap<u32, Arrival> = BTreeMap::new();
        let end = Instant::now() + deadline.left();
        while arrived.len() + 1 < self.ranks as usize {
            let first_end = arrived.values().map(|it| it.end).min().unwrap_or(end).min(end);
            let left = first_end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.fail(store, card, arrived, deadline.waited());
            }
            let connections = arrived.values().map(|it| it.connection.as_fd());
            let opened = listeners.iter().map(AsFd::as_fd).chain(admission.descriptors()).chain(connections);
            let ready = wait_for_any(opened, left.min(CHECK_LIMIT));
            let (of_peers, of_arrived) = ready[listeners.len()..].split_at(admission.len());
            // In the order of their ranks, as above.
            let mut of_arrived = of_arrived.iter();
            arrived.retain(|_, it| of_arrived.next() == Some(&false) || it.is_connected());
            let is_other = |rank, session| arrived.get(&rank).is_some_and(|it: &Arrival| it.session != session);
            let admitted = admission.poll(of_peers, |rank, session, joined| {
                is_other(rank, session) || joined.iter().any(|it| it.is_other(rank, session))
            });
            listeners.iter().for_each(|listener| admission.accept(listener));
            for Admitted { rank, session, left, connection } in admitted {
                // Two processes that were welcome at the same time: the later one is refused when it tries again.
                let is_first = arrived.get(&rank).is_none_or(|it| it.session == session);
                if is_first && end_if_unreachable(&connection).is_ok() {
                    // The rank states the time, so it can be too long for the clock.
                    let end = Instant::now() + Deadline::after(left).left();
                    arrived.insert(rank, Arrival { session, end, connection });
                }
            }
        }
        Ok(tell(arrived, &Outcome::Started))
    }

    /// Reports the missing ranks to those that arrived. Returns the error.
    fn fail(
        &self,
        store: &dyn Store,
        mut card: Card,
        arrived: BTreeMap<u32, Arrival>,
        waited: Duration,
    ) -> Result<Vec<(u32, Connection)>, RendezvousError> {
        let mut absent = (1..self.ranks).filter(|rank| !arrived.contains_key(rank));
        let missing: Vec<u32> = absent.by_ref().take(MISSING_MAX).collect();
        let more = absent.count() as u32;
        let outcome = Outcome::Missing { found: self.found(store, &missing, &card.token), missing, more, waited };
        drop(tell(arrived, &outcome));
        // Ranks that come later report it. Without it, they report that nobody answers.
        card.outcome = Some(outcome.clone());
        let _stored = store.set(&self.card_key(), &card.bytes(), &Deadline::after(NOTES_LIMIT));
        outcome.result().map(|()| Vec::new())
    }

    /// Returns what missing ranks found, as far as they could note it.
    fn found(&self, store: &dyn Store, missing: &[u32], token: &Token) -> Vec<(u32, EndpointAnswer)> {
        let limit = Deadline::after(NOTES_LIMIT);
        let note = |rank: &u32| {
            let note = store.get(&Self::note_key(self.job, *rank), &limit).ok()??;
            Some((*rank, answer_of_note(&note, token)?))
        };
        missing.iter().take(NOTES_MAX).filter_map(note).collect()
    }

    /// Joins rank 0, as another rank, and waits for the outcome. Returns what rank 0 shares and the connection to it.
    pub(crate) fn join(&self, store: &dyn Store, identity: Identity) -> Result<(Shared, Connection), RendezvousError> {
        let deadline = identity.deadline;
        let (mut rounds, mut pauses) = (Pauses::new(ROUND), Pauses::new(PAUSE));
        let mut notes = Notes { store, key: Self::note_key(self.job, identity.rank), is_noted: false };
        // What this rank reports at its deadline, if no other card appears.
        let mut last: Option<RendezvousError> = None;
        loop {
            let card = match store.wait(&self.card_key(), &deadline) {
                Ok(card) => card,
                Err(error) => return Err(later(last, error)),
            };
            match Card::from_bytes(&card, self.ranks) {
                Ok(Card { outcome: Some(outcome), .. }) => last = outcome.result().err(),
                Ok(Card { token, endpoints, outcome: None }) => {
                    match search(&self.terms(&token), &endpoints, identity, &deadline.at_most(rounds.advance())) {
                        Ok((shared, connection)) => {
                            notes.clear();
                            if let Some(connection) = self.outcome(connection, &deadline)? {
                                return Ok((shared, connection));
                            }
                        }
                        Err(SearchError::Final(error)) => {
                            notes.write(&token, answer_of_refusal(&error));
                            return Err(error);
                        }
                        Err(error) => {
                            let most = error.most_informative();
                            notes.write(&token, Some(most));
                            last = Some(error.after(deadline.waited()));
                        }
                    }
                }
                // Not a card of this job, such as one of an earlier run with more ranks.
                Err(_) => {}
            }
            if deadline.is_over() {
                let (key, waited) = (self.card_key(), deadline.waited());
                return Err(last.unwrap_or(RendezvousError::KeyMissing { key, waited }));
            }
            pauses.wait(&deadline);
        }
    }

    /// Waits for the outcome. Returns the connection if all ranks have arrived, and `None` if rank 0 has ended.
    fn outcome(&self, mut connection: Connection, deadline: &Deadline) -> Result<Option<Connection>, RendezvousError> {
        let end = Instant::now() + deadline.left() + GRACE;
        let mut outcome = || {
            end_if_unreachable(&connection)?;
            let outcome = Outcome::read(self.ranks, |bytes| read_until(&mut connection, bytes, end))?;
            stay_if_unreachable(&connection).map(|()| outcome)
        };
        match outcome() {
            Ok(outcome) => outcome.result().map(|()| Some(connection)),
            Err(_) if Instant::now() < end => Ok(None),
            Err(_) => Err(RendezvousError::NoOutcome { waited: deadline.waited() }),
        }
    }
}

/// The note of this rank in the store.
struct Notes<'a> {
    store: &'a dyn Store,
    key: String,
    is_noted: bool,
}

impl Notes<'_> {
    fn write(&mut self, token: &Token, answer: Option<EndpointAnswer>) {
        if let Some(answer) = answer {
            // A note helps people and decides nothing.
            self.is_noted |=
                self.store.set(&self.key, &note(Some(token), answer), &Deadline::after(NOTES_LIMIT)).is_ok();
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_noted) {
            let _cleared = self.store.set(&self.key, &[], &Deadline::after(NOTES_LIMIT));
        }
    }
}

/// Returns the error of a rank whose store fails after it has found `last`.
fn later(last: Option<RendezvousError>, error: RendezvousError) -> RendezvousError {
    use RendezvousError::{Folder, ForeignStore, Missing, StoreUnreachable};
    match last {
        // What rank 0 decided is still true.
        Some(last @ Missing { .. }) => last,
        // The store was lost: what rank 0's addresses answered before is not the cause.
        Some(_) if matches!(error, Folder { .. } | ForeignStore { .. } | StoreUnreachable { .. }) => error,
        last => last.unwrap_or(error),
    }
}

/// Returns what a rank found that rank 0 refused.
fn answer_of_refusal(error: &RendezvousError) -> Option<EndpointAnswer> {
    match error {
        RendezvousError::VersionMismatch { version, .. } => Some(EndpointAnswer::VersionMismatch { version: *version }),
        RendezvousError::SecretMissing => Some(EndpointAnswer::SecretNeeded),
        RendezvousError::SecretMissingAtRank0 => Some(EndpointAnswer::NoSecret),
        RendezvousError::WrongSecret => Some(EndpointAnswer::SecretMismatch),
        _ => None,
    }
}

/// Tells the outcome to all ranks that arrived. Returns their connections.
fn tell(arrived: BTreeMap<u32, Arrival>, outcome: &Outcome) -> Vec<(u32, Connection)> {
    let bytes = outcome.bytes();
    let tell = |(rank, Arrival { mut connection, .. })| {
        // A rank that has ended in this moment is found by the watchdog. The bytes fit into the socket's buffer, which is empty.
        let _told = connection.write_all(&bytes).and_then(|()| stay_if_unreachable(&connection));
        (rank, connection)
    };
    arrived.into_iter().map(tell).collect()
}

/// Listens where the other ranks can reach rank 0: on a socket of this machine, and on a port of all its addresses.
fn listen(reach: &Reach) -> Result<(Vec<Listener>, Vec<Endpoint>), RendezvousError> {
    let local = Endpoint::Local(LocalName::random()?);
    let (mut listeners, mut endpoints) = (vec![local.listen()?], vec![local]);
    if let Reach::Network { toward, named } = reach {
        let listener = listen_everywhere()?;
        let port = listener.number() as u16;
        for ip in own_addresses(toward).into_iter().chain(named.iter().copied()) {
            let endpoint = Endpoint::Network(SocketAddr::new(ip, port));
            if endpoints.len() < ENDPOINTS_MAX && !ip.is_unspecified() && !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
        listeners.push(listener);
    }
    Ok((listeners, endpoints))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_with_many_addresses_has_a_card_that_others_can_read() {
        let named: Vec<IpAddr> = (0..200).flat_map(|last| [[192, 0, 2, last].into(); 8]).collect();
        let (_listeners, endpoints) =
            listen(&Reach::Network { toward: Vec::new(), named }).expect("a port should be free");
        let card = Card { token: [1; 32], endpoints, outcome: None };
        assert_eq!(card.endpoints.len(), ENDPOINTS_MAX);
        assert_eq!(Card::from_bytes(&card.bytes(), 2).expect("a card"), card);
    }
}
