//! The other ranks' side of the handshake: they ask the sockets of this machine, and then all network addresses at the same time, until
//! rank 0 answers.
//!
//! ```text
//!  search                     one thread for each network address, up to 64, and one for all sockets of this machine
//!      │ starts ────────────►  connect ─► hello ─► answer of rank 0 ─► join ──┐
//!      │                          ▲         │ anything else                   │ only the first thread
//!      │                          └─ pause ◄┘ is kept as an answer            │
//!      ▼ waits until the deadline ◄───────────────────────────────────────────┘
//! ```
//!
//! A stranger may occupy an address, and be silent, be slow or lie. With a key, it costs only the time of the thread that asks it; without
//! one, its answer is believed. On a network, a refusal is final only if it proves that it comes from rank 0: the right rank 0 may arrive at
//! another address until the deadline. The error then contains the answer of each address.

use crate::admission::HANDSHAKE_LIMIT;
use crate::deadline::{Deadline, Pauses};
use crate::endpoint::{ConnectError, Endpoint, read_until, write_until};
use crate::error::{EndpointAnswer, RendezvousError};
use crate::handshake::{
    DecodeError, Exchange, HEAD_BYTES, Hello, SHARED_BYTES, Shared, TailMessage, Terms, Verdict, join_bytes,
};
use crate::secret::{Secret, random};
use crate::version::VERSION;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::panic::catch_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use symmalloc_watchdog::{Connection, threads};
use zerocopy::{FromZeros, IntoBytes};

/// First and longest pause between two attempts: each sends a packet, and a thousand ranks without the secret must not occupy rank 0 until
/// their deadlines.
const PAUSE: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];

/// Time limit for an attempt if a thread tries several endpoints in turn, which another process of this user may occupy.
const TURN_LIMIT: Duration = Duration::from_secs(1);

/// Maximum number of threads for network addresses. If there are more addresses, a thread tries several of them in turn.
const LANES_MAX: usize = 64;

/// A process that searches for rank 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) rank: u32,
    /// Equal for all connections of one process.
    pub(crate) session: u64,
    /// Until when the process waits for the other ranks.
    pub(crate) deadline: Deadline,
}

impl Identity {
    /// Returns a new identity of this process.
    pub(crate) fn new(rank: u32, deadline: &Deadline) -> Result<Self, RendezvousError> {
        Ok(Identity { rank, session: u64::from_le_bytes(random()?), deadline: *deadline })
    }
}

/// The reason a search did not find rank 0.
#[derive(Debug)]
pub(crate) enum SearchError {
    /// Rank 0 refused this rank, or the system failed. No later search can succeed.
    Final(RendezvousError),
    /// No rank 0 answered before the deadline.
    Nobody {
        /// Each network address that was tried, with its most informative answer.
        answers: Vec<(SocketAddr, EndpointAnswer)>,
        /// Another user that owns a socket of rank 0's name.
        foreign_user: Option<u32>,
    },
}

impl SearchError {
    /// Returns the most informative answer.
    pub(crate) fn most_informative(&self) -> EndpointAnswer {
        let answers = match self {
            SearchError::Final(_) => &[][..],
            SearchError::Nobody { answers, .. } => answers,
        };
        answers.iter().map(|(_, answer)| *answer).max().unwrap_or(EndpointAnswer::NotListening)
    }

    /// Returns the error of a rank that waited this long.
    pub(crate) fn after(self, waited: Duration) -> RendezvousError {
        match self {
            SearchError::Final(error) => error,
            SearchError::Nobody { answers, foreign_user } if answers.is_empty() => {
                RendezvousError::NoLocalAnswer { foreign_user, waited }
            }
            SearchError::Nobody { answers, .. } => RendezvousError::NoAnswer { answers, waited },
        }
    }
}

/// A search for rank 0.
struct Search {
    terms: Terms,
    identity: Identity,
    end: Instant,
    state: Mutex<State>,
    found: Condvar,
}

#[derive(Default)]
struct State {
    /// The result, once there is one.
    outcome: Option<Result<(Shared, Connection), RendezvousError>>,
    /// `true` once the search has ended. No thread may join then.
    is_over: bool,
    /// The most informative answer of each network address.
    answers: BTreeMap<SocketAddr, EndpointAnswer>,
    /// Another user that owns a socket of rank 0's name.
    foreign_user: Option<u32>,
}

/// The reason an attempt did not reach rank 0.
enum AttemptError {
    /// The process that answered is not rank 0, or refused this rank without a proof.
    Answer(EndpointAnswer),
    /// Rank 0 proved that it refuses this rank.
    Refused(EndpointAnswer),
    /// Rank 0 rejected this rank because there is another process with its number.
    RankTwice,
    /// The socket belongs to another user.
    Foreign(u32),
    /// The system provides no random numbers.
    Random(RendezvousError),
}

/// Tries the endpoints until the right rank 0 answers. Returns what rank 0 shares and the connection to it.
pub(crate) fn search(
    terms: &Terms,
    endpoints: &[Endpoint],
    identity: Identity,
    deadline: &Deadline,
) -> Result<(Shared, Connection), SearchError> {
    let search = Arc::new(Search {
        terms: terms.clone(),
        identity,
        end: Instant::now() + deadline.left(),
        state: Mutex::default(),
        found: Condvar::new(),
    });
    let (local, network): (Vec<_>, Vec<_>) =
        endpoints.iter().cloned().partition(|endpoint| matches!(endpoint, Endpoint::Local(_)));
    let addresses: Vec<SocketAddr> = network.iter().filter_map(Endpoint::address).collect();
    // A socket of this machine is preferred: it is asked before the network addresses. From another machine, nothing listens there.
    let is_found = !network.is_empty() && local.iter().any(|endpoint| search.try_once(endpoint, TURN_LIMIT));
    for lane in lanes(&network).chain([local]).filter(|lane| !lane.is_empty() && !is_found) {
        let of_lane = Arc::clone(&search);
        if let Err(error) = threads::run(move || of_lane.try_in_turn(&lane)) {
            search.state().is_over = true;
            return Err(SearchError::Final(RendezvousError::Thread { kind: error.kind() }));
        }
    }
    let is_searching = |state: &mut State| state.outcome.is_none();
    let waited = search.found.wait_timeout_while(search.state(), deadline.left(), is_searching);
    let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
    state.is_over = true;
    if let Some(outcome) = state.outcome.take() {
        return outcome.map_err(SearchError::Final);
    }
    let unreachable = EndpointAnswer::Unreachable { kind: io::ErrorKind::TimedOut };
    let answer = |address| (address, state.answers.get(&address).copied().unwrap_or(unreachable));
    Err(SearchError::Nobody { answers: addresses.into_iter().map(answer).collect(), foreign_user: state.foreign_user })
}

/// Returns the endpoints that each thread tries.
fn lanes(network: &[Endpoint]) -> impl Iterator<Item = Vec<Endpoint>> {
    (0..LANES_MAX).map(|lane| network.iter().skip(lane).step_by(LANES_MAX).cloned().collect())
}

impl State {
    /// Records an answer, unless a more informative one is known.
    fn note(&mut self, address: SocketAddr, answer: EndpointAnswer) {
        let known = self.answers.entry(address).or_insert(answer);
        *known = answer.max(*known);
    }
}

impl Search {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries these endpoints until the search ends.
    fn try_in_turn(&self, endpoints: &[Endpoint]) {
        let limit = if endpoints.len() > 1 { TURN_LIMIT } else { HANDSHAKE_LIMIT };
        let mut pauses = Pauses::new(PAUSE);
        loop {
            for endpoint in endpoints {
                if self.try_once(endpoint, limit) {
                    return;
                }
            }
            pauses.wait(&self.identity.deadline);
        }
    }

    /// Tries one endpoint, and joins. Returns `true` if the search has ended.
    fn try_once(&self, endpoint: &Endpoint, limit: Duration) -> bool {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() || self.state().is_over {
            return true;
        }
        let outcome = match self.attempt(endpoint, limit.min(left)) {
            Ok(found) => self.join(found).map_err(AttemptError::Answer),
            Err(error) => Err(error),
        };
        self.is_last(endpoint, outcome)
    }

    /// Joins the meeting, unless another thread has done so.
    fn join(&self, (id, mut connection): (Shared, Connection)) -> Result<(), EndpointAnswer> {
        // The lock is held during the write, so that this rank joins once. The message fits into the socket's buffer, which is empty.
        let mut state = self.state();
        if !state.is_over && state.outcome.is_none() {
            let message = join_bytes(self.identity.deadline.left());
            write_until(&mut connection, &message, Instant::now() + TURN_LIMIT).map_err(|_| EndpointAnswer::Silent)?;
            state.outcome = Some(Ok((id, connection)));
            self.found.notify_all();
        }
        Ok(())
    }

    /// Records the outcome of an attempt. Returns `true` if the search has ended.
    fn is_last(&self, endpoint: &Endpoint, outcome: Result<(), AttemptError>) -> bool {
        let mut state = self.state();
        // The system guarantees that a socket on this machine belongs to the same user, so a refusal is final there.
        let is_final = matches!(endpoint, Endpoint::Local(_)) || matches!(outcome, Err(AttemptError::Refused(_)));
        let error = match outcome {
            Ok(()) => return true,
            Err(AttemptError::RankTwice) => RendezvousError::RankTwice { rank: self.identity.rank },
            Err(AttemptError::Random(error)) => error,
            Err(AttemptError::Foreign(user)) => {
                let (is_new, is_over) = (state.foreign_user.replace(user) != Some(user), state.is_over);
                drop(state);
                if is_new {
                    log_foreign(user);
                }
                return is_over;
            }
            Err(AttemptError::Answer(answer) | AttemptError::Refused(answer)) => {
                if let Endpoint::Network(address) = endpoint {
                    state.note(*address, answer);
                }
                match refusal(answer).filter(|_| is_final) {
                    Some(error) => error,
                    None => return state.is_over,
                }
            }
        };
        state.outcome.get_or_insert(Err(error));
        self.found.notify_all();
        true
    }

    /// Tries one endpoint. The caller must [join](Self::join).
    fn attempt(&self, endpoint: &Endpoint, limit: Duration) -> Result<(Shared, Connection), AttemptError> {
        let Terms { job, ranks, has_secret, ref key, ref refusal_key } = self.terms;
        let end = Instant::now() + limit;
        let Identity { rank, session, .. } = self.identity;
        let hello = Hello { job, ranks, rank, session, has_secret, nonce: random().map_err(AttemptError::Random)? };
        let mut connection = endpoint.connect(limit)?;
        if let Some(address) = endpoint.address() {
            // The search may end before the attempt does.
            self.state().note(address, EndpointAnswer::Silent);
        }
        write_until(&mut connection, &hello.bytes(), end)?;
        let mut exchange = Exchange { hello, nonce: [0; 32], endpoint: endpoint.number() };
        let mut verdict = read_verdict(&mut connection, end)?;
        let challenged = key.as_ref().filter(|_| verdict == Verdict::Challenge);
        if let Some(key) = challenged {
            read_until(&mut connection, &mut exchange.nonce, end)?;
            write_until(&mut connection, &exchange.proof(key), end)?;
            verdict = read_verdict(&mut connection, end)?;
        }
        let answer = match verdict {
            Verdict::Welcome | Verdict::RankTwice => {
                let TailMessage { id, proof } = read_tail(&mut connection, end)?;
                // With a key, only a proof shows that the answer is rank 0's.
                let is_proof = |key: &Secret| exchange.is_answer_proof(key, &proof, verdict, &id);
                let is_proven = key.is_none() || challenged.is_some_and(is_proof);
                match verdict {
                    Verdict::Welcome if is_proven => return Ok((id, connection)),
                    _ if is_proven => return Err(AttemptError::RankTwice),
                    _ => EndpointAnswer::Contradiction,
                }
            }
            Verdict::DifferentJob => EndpointAnswer::DifferentJob,
            Verdict::SecretNeeded if !has_secret => EndpointAnswer::SecretNeeded,
            Verdict::NoSecret if has_secret && challenged.is_none() => EndpointAnswer::NoSecret,
            Verdict::WrongSecret if challenged.is_some() => EndpointAnswer::SecretMismatch,
            // No rank 0 gives these answers to this rank.
            _ => EndpointAnswer::Contradiction,
        };
        if let Some(refusal_key) = refusal_key
            && refusal(answer).is_some()
        {
            let TailMessage { proof, .. } = read_tail(&mut connection, end)?;
            if exchange.is_answer_proof(refusal_key, &proof, verdict, &[0; SHARED_BYTES]) {
                return Err(AttemptError::Refused(answer));
            }
        }
        Err(AttemptError::Answer(answer))
    }
}

fn read_tail(connection: &mut Connection, end: Instant) -> Result<TailMessage, AttemptError> {
    let mut tail = TailMessage::new_zeroed();
    read_until(connection, tail.as_mut_bytes(), end)?;
    Ok(tail)
}

/// Logs another user's socket. The program's subscriber may panic, which must not end the search.
fn log_foreign(user: u32) {
    let _panicked = catch_unwind(|| tracing::warn!(name: "rendezvous.foreign_socket", target: "symmalloc", user));
}

/// Returns the error of a rank that rank 0 refuses on this machine, or `None` if the process may not be rank 0.
fn refusal(answer: EndpointAnswer) -> Option<RendezvousError> {
    match answer {
        EndpointAnswer::VersionMismatch { version } => {
            Some(RendezvousError::VersionMismatch { version, expected: VERSION })
        }
        EndpointAnswer::SecretNeeded => Some(RendezvousError::SecretMissing),
        EndpointAnswer::NoSecret => Some(RendezvousError::SecretMissingAtRank0),
        EndpointAnswer::SecretMismatch => Some(RendezvousError::WrongSecret),
        _ => None,
    }
}

impl From<ConnectError> for AttemptError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Io(io::ErrorKind::ConnectionRefused) => AttemptError::Answer(EndpointAnswer::NotListening),
            ConnectError::Io(kind) => AttemptError::Answer(EndpointAnswer::Unreachable { kind }),
            ConnectError::Foreign(user) => AttemptError::Foreign(user),
        }
    }
}

impl From<io::Error> for AttemptError {
    /// Converts an error after the connection was established.
    fn from(_: io::Error) -> Self {
        AttemptError::Answer(EndpointAnswer::Silent)
    }
}

fn read_verdict(connection: &mut Connection, end: Instant) -> Result<Verdict, AttemptError> {
    let mut head = [0; HEAD_BYTES];
    read_until(connection, &mut head, end)?;
    Verdict::from_head(head).map_err(|error| {
        AttemptError::Answer(match error {
            DecodeError::Foreign => EndpointAnswer::Foreign,
            DecodeError::VersionMismatch { version } => EndpointAnswer::VersionMismatch { version },
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::SHARED_BYTES;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_host_with_many_addresses_does_not_take_many_threads() {
        for count in [0, 1, 24, 64, 65, 8000] {
            let endpoint = |port| Endpoint::Network(([192, 0, 2, 1], port).into());
            let network: Vec<_> = (0..count).map(endpoint).collect();
            let lanes: Vec<_> = lanes(&network).filter(|lane| !lane.is_empty()).collect();
            assert_eq!(lanes.len(), usize::from(count).min(LANES_MAX));
            let tried: std::collections::BTreeSet<_> = lanes.concat().iter().map(Endpoint::number).collect();
            assert!(tried.into_iter().eq(0..count.into()), "each endpoint is tried");
        }
    }

    #[test]
    fn only_the_first_thread_joins_and_only_before_the_search_has_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let connected = || {
            let ours = TcpStream::connect(listener.local_addr().expect("the socket should be bound"))
                .expect("a process should listen");
            (Connection::from(ours), listener.accept().expect("the connection should succeed").0)
        };
        let id = [7; SHARED_BYTES];
        for (has_failed, has_joined, is_over) in [
            (false, false, false),
            (false, false, true),
            (false, true, false),
            (false, true, true),
            (true, false, false),
        ] {
            let error = RendezvousError::Thread { kind: io::ErrorKind::OutOfMemory };
            let earlier = connected();
            let outcome = if has_joined { Some(Ok((id, earlier.0))) } else { has_failed.then_some(Err(error)) };
            let search = Search {
                terms: Terms { job: 1, ranks: 2, has_secret: false, key: None, refusal_key: None },
                identity: Identity { rank: 1, session: 2, deadline: Deadline::after(Duration::ZERO) },
                end: Instant::now(),
                state: Mutex::new(State { outcome, is_over, ..State::default() }),
                found: Condvar::new(),
            };
            let (ours, mut theirs) = connected();
            search.join((id, ours)).expect("rank 0 listens");
            let joins = !has_failed && !has_joined && !is_over;
            assert_eq!(matches!(search.state().outcome, Some(Ok(_))), joins || has_joined);
            drop(search);
            let mut received = Vec::new();
            theirs.read_to_end(&mut received).expect("closed");
            assert_eq!(
                received,
                if joins { join_bytes(Duration::ZERO).to_vec() } else { vec![] },
                "{has_failed} {has_joined} {is_over}"
            );
        }
    }
}
