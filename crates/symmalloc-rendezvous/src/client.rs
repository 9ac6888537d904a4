//! The other ranks' side of the rendezvous: they try all endpoints at the same time until rank 0 answers.
//!
//! ```text
//!  request_id                 one thread for each network address, and one for all sockets of this machine
//!      │ starts ────────────►  connect ─► hello ─► answer of rank 0 ─► join ──┐
//!      │                          ▲         │ anything else                   │ only the first thread
//!      │                          └─ pause ◄┘ is kept as an answer            │
//!      ▼ waits until the deadline ◄───────────────────────────────────────────┘
//! ```
//!
//! A stranger may occupy an address, and be silent, be slow or lie. With a secret, it costs only the time of the thread that asks it; without
//! one, its answer is believed. On a network with a secret, no refusal is final unless it proves that it comes from rank 0: the right rank 0
//! may arrive at another address until the deadline. The error then contains the answer of each address.

use crate::deadline::Deadline;
use crate::endpoint::{ConnectError, Endpoint, read_until, write_until};
use crate::error::{EndpointAnswer, RendezvousError};
use crate::handshake::{DecodeError, Exchange, HEAD_BYTES, Hello, JOIN, Shared, TailMessage, Verdict};
use crate::meeting::{HANDSHAKE_LIMIT, Meeting};
use crate::secret::random;
use crate::version::VERSION;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::panic::catch_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use symmalloc_watchdog::{Connection, threads};
use zerocopy::{FromZeros, IntoBytes};

/// Shortest pause between two attempts, because each attempt sends a packet.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// Longest pause between two attempts. A thousand ranks without the secret must not occupy rank 0 until their deadlines.
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// Time limit for an attempt if a thread tries several endpoints in turn, which another process of this user may occupy.
const TURN_LIMIT: Duration = Duration::from_secs(1);

/// A search for rank 0.
struct Search {
    meeting: Meeting,
    rank: u32,
    session: u64,
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
    /// The process that answered is not rank 0, or refused this rank.
    Answer(EndpointAnswer),
    /// Rank 0 rejected this rank permanently.
    RankTwice,
    /// The socket belongs to another user.
    Foreign(u32),
    /// The system provides no random numbers.
    Random(RendezvousError),
}

impl Meeting {
    /// Tries the endpoints until the right rank 0 answers. Returns the id and the connection to rank 0.
    pub(super) fn request_id(
        &self,
        endpoints: &[Endpoint],
        rank: u32,
        deadline: &Deadline,
    ) -> Result<(Shared, Connection), RendezvousError> {
        let search = Arc::new(Search {
            meeting: self.clone(),
            rank,
            session: u64::from_le_bytes(random()?),
            end: Instant::now() + deadline.left(),
            state: Mutex::default(),
            found: Condvar::new(),
        });
        let (local, network): (Vec<_>, Vec<_>) =
            endpoints.iter().cloned().partition(|endpoint| matches!(endpoint, Endpoint::Local(_)));
        let addresses: Vec<SocketAddr> = network.iter().filter_map(Endpoint::address).collect();
        let lanes = network.into_iter().map(|endpoint| vec![endpoint]).chain([local]);
        for lane in lanes.filter(|lane| !lane.is_empty()) {
            let of_lane = Arc::clone(&search);
            if let Err(error) = threads::run(move || of_lane.try_in_turn(&lane)) {
                search.state().is_over = true;
                return Err(RendezvousError::Thread { kind: error.kind() });
            }
        }
        let is_searching = |state: &mut State| state.outcome.is_none();
        let waited = search.found.wait_timeout_while(search.state(), deadline.left(), is_searching);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.is_over = true;
        state.outcome.take().unwrap_or_else(|| {
            let waited = deadline.waited();
            if addresses.is_empty() {
                return Err(RendezvousError::NoLocalAnswer { foreign_user: state.foreign_user, waited });
            }
            let unreachable = EndpointAnswer::Unreachable { kind: io::ErrorKind::TimedOut };
            let answer = |address| (address, state.answers.get(&address).copied().unwrap_or(unreachable));
            Err(RendezvousError::NoAnswer { answers: addresses.into_iter().map(answer).collect(), waited })
        })
    }
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
        let begun = Instant::now();
        loop {
            for endpoint in endpoints {
                let left = self.end.saturating_duration_since(Instant::now());
                if left.is_zero() || self.state().is_over {
                    return;
                }
                let outcome = match self.attempt(endpoint, limit.min(left)) {
                    Ok(found) => self.join(found).map_err(AttemptError::Answer),
                    Err(error) => Err(error),
                };
                if self.is_last(endpoint, outcome) {
                    return;
                }
            }
            // Pauses for an eighth of the elapsed time, so long waits make few attempts.
            std::thread::sleep((begun.elapsed() / 8).clamp(PAUSE_MIN, PAUSE_MAX));
        }
    }

    /// Joins the meeting, unless another thread has done so.
    fn join(&self, (id, mut connection): (Shared, Connection)) -> Result<(), EndpointAnswer> {
        // The lock is held during the write, so that this rank joins once. The byte fits into the socket's buffer, which is empty.
        let mut state = self.state();
        if !state.is_over && state.outcome.is_none() {
            write_until(&mut connection, &[JOIN], Instant::now() + TURN_LIMIT).map_err(|_| EndpointAnswer::Silent)?;
            state.outcome = Some(Ok((id, connection)));
            self.found.notify_all();
        }
        Ok(())
    }

    /// Records the outcome of an attempt. Returns `true` if the search has ended.
    fn is_last(&self, endpoint: &Endpoint, outcome: Result<(), AttemptError>) -> bool {
        let mut state = self.state();
        let error = match outcome {
            Ok(()) => return true,
            Err(AttemptError::RankTwice) => RendezvousError::RankTwice { rank: self.rank },
            Err(AttemptError::Random(error)) => error,
            Err(AttemptError::Foreign(user)) => {
                let (is_new, is_over) = (state.foreign_user.replace(user) != Some(user), state.is_over);
                drop(state);
                if is_new {
                    log_foreign(user);
                }
                return is_over;
            }
            Err(AttemptError::Answer(answer)) => match endpoint {
                Endpoint::Network(address) => {
                    state.note(*address, answer);
                    return state.is_over;
                }
                // The system guarantees that a socket on this machine belongs to the same user, so a refusal is final.
                Endpoint::Local(_) => match refusal(answer) {
                    Some(error) => error,
                    None => return state.is_over,
                },
            },
        };
        state.outcome.get_or_insert(Err(error));
        self.found.notify_all();
        true
    }

    /// Tries one endpoint. The caller must [join](Self::join).
    fn attempt(&self, endpoint: &Endpoint, limit: Duration) -> Result<(Shared, Connection), AttemptError> {
        let Meeting { job, ranks, secret } = &self.meeting;
        let end = Instant::now() + limit;
        let hello = Hello {
            job: *job,
            ranks: *ranks,
            rank: self.rank,
            session: self.session,
            has_secret: secret.is_some(),
            nonce: random().map_err(AttemptError::Random)?,
        };
        let mut connection = endpoint.connect(limit)?;
        if let Some(address) = endpoint.address() {
            // The search may end before the attempt does.
            self.state().note(address, EndpointAnswer::Silent);
        }
        write_until(&mut connection, &hello.bytes(), end)?;
        let mut exchange = Exchange { hello, nonce: [0; 32], endpoint: endpoint.number() };
        let mut verdict = read_verdict(&mut connection, end)?;
        let challenged = secret.as_ref().filter(|_| verdict == Verdict::Challenge);
        if let Some(secret) = challenged {
            read_until(&mut connection, &mut exchange.nonce, end)?;
            write_until(&mut connection, &exchange.proof(secret), end)?;
            verdict = read_verdict(&mut connection, end)?;
        }
        let answer = match verdict {
            Verdict::Welcome | Verdict::RankTwice => {
                let mut tail = TailMessage::new_zeroed();
                read_until(&mut connection, tail.as_mut_bytes(), end)?;
                let id = tail.id;
                // With a secret, only a proof shows that the answer is rank 0's.
                let is_proof = |secret| exchange.is_answer_proof(secret, &tail.proof, verdict, &id);
                let is_proven = secret.is_none() || challenged.is_some_and(is_proof);
                match verdict {
                    Verdict::Welcome if is_proven => return Ok((id, connection)),
                    _ if is_proven => return Err(AttemptError::RankTwice),
                    _ => EndpointAnswer::Contradiction,
                }
            }
            Verdict::OtherJob => EndpointAnswer::OtherJob,
            Verdict::SecretNeeded if secret.is_none() => EndpointAnswer::SecretNeeded,
            Verdict::NoSecret if secret.is_some() && challenged.is_none() => EndpointAnswer::NoSecret,
            Verdict::WrongSecret if challenged.is_some() => EndpointAnswer::OtherSecret,
            // No rank 0 gives these answers to this rank.
            _ => EndpointAnswer::Contradiction,
        };
        Err(AttemptError::Answer(answer))
    }
}

/// Logs another user's socket. The program's subscriber may panic, which must not end the search.
fn log_foreign(user: u32) {
    let _panicked = catch_unwind(|| tracing::warn!(name: "rendezvous.foreign_socket", target: "symmalloc", user));
}

/// Returns the error of a rank that rank 0 refuses on this machine, or `None` if the process may not be rank 0.
fn refusal(answer: EndpointAnswer) -> Option<RendezvousError> {
    match answer {
        EndpointAnswer::OtherVersion { version } => Some(RendezvousError::OtherVersion { version, expected: VERSION }),
        EndpointAnswer::SecretNeeded => Some(RendezvousError::SecretMissing),
        EndpointAnswer::NoSecret => Some(RendezvousError::SecretMissingAtRank0),
        EndpointAnswer::OtherSecret => Some(RendezvousError::WrongSecret),
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
            DecodeError::OtherVersion { version } => EndpointAnswer::OtherVersion { version },
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
    fn only_the_first_thread_joins_and_only_before_the_search_has_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let connected = || {
            let ours = TcpStream::connect(listener.local_addr().expect("bound")).expect("listening");
            (Connection::from(ours), listener.accept().expect("connected").0)
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
                meeting: Meeting { job: 1, ranks: 2, secret: None },
                rank: 1,
                session: 2,
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
            assert_eq!(received, if joins { vec![JOIN] } else { vec![] }, "{has_failed} {has_joined} {is_over}");
        }
    }
}
