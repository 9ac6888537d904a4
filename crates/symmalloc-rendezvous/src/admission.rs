//! Rank 0's side of the handshake: the peers that have not yet proven that they belong to the job. Rank 0 does not block on any of
//! them.

use crate::endpoint::{Incoming, Listener};
use crate::error::EndpointAnswer;
use crate::handshake::{
    DecodeError, Exchange, HELLO_BYTES, Hello, JOIN_BYTES, SHARED_BYTES, Shared, TAIL_BYTES, TailMessage, Terms,
    Verdict, left_of_join,
};
use crate::secret::{PROOF_BYTES, Secret, random};
use crate::version::VERSION;
use rustix::io::Errno;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::catch_unwind;
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;
use zerocopy::IntoBytes;

/// Time limit for a peer to identify itself, and for rank 0 to answer.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of peers of one [stage](Stage) at a time. One more evicts the oldest one of its stage.
const PEERS_MAX: usize = 1024;
/// Maximum number of peers of one [stage](Stage) at a time from one network address, which may be that of a machine with many ranks.
const PEERS_PER_ADDRESS_MAX: usize = 256;
/// Pause if the system has no descriptor or memory for a new connection. The connection stays pending, so the listener remains readable.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(10);
/// Maximum number of connections that are accepted between two checks of the peers.
const ACCEPTS_MAX: usize = 64;
/// Maximum number of refusals that are logged. Otherwise, any process that can connect could fill the log.
const LOGGED_MAX: u32 = 32;
/// Maximum number of refusals that are kept between two calls that take them.
const REFUSED_MAX: usize = 1024;

/// A connection whose origin is not known yet.
struct PendingPeer {
    connection: Connection,
    from: Option<IpAddr>,
    /// Number of the endpoint to which it connected.
    endpoint: u32,
    since: Instant,
    received: Vec<u8>,
    awaited: Awaited,
}

/// The next message of a peer.
#[derive(Clone, Copy)]
enum Awaited {
    Hello,
    /// A proof that the peer knows the key.
    Proof(Exchange),
    /// Its last message, after which the rank has arrived.
    Join(Hello),
}

/// How far a peer has come. A flood evicts only peers of its own stage: silent connections do not evict a rank that was challenged, and
/// nobody evicts a rank that has proven itself and may already have joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has not introduced itself. A rank does so immediately, so the oldest of these peers is not a rank.
    Silent,
    /// It has introduced itself and proven nothing: it is challenged, or no proof is required. A rank needs one round trip.
    Unproven,
    /// It has proven that it knows the key. Strangers do not reach this stage, so it has no limit.
    Proven,
}

/// A rank that has proven what the terms require, and its connection.
pub(crate) struct Admitted {
    pub(crate) rank: u32,
    /// Equal for all connections of one process.
    pub(crate) session: u64,
    /// Time that the rank can wait for the others.
    pub(crate) left: Duration,
    pub(crate) connection: Connection,
}

/// The peers; see the [module documentation](self).
pub(crate) struct Admission {
    terms: Terms,
    /// The bytes that each rank receives.
    shared: Shared,
    /// In the order of their arrival.
    peers: Vec<PendingPeer>,
    /// Ranks that were refused, as they claim, with what they found. At most [`REFUSED_MAX`].
    refused: Vec<(u32, EndpointAnswer)>,
    logged: u32,
}

/// State of a handshake.
enum HandshakeState {
    /// More bytes must arrive.
    Pending,
    /// A rank that has joined, and the time that it can wait.
    Joined(Hello, Duration),
    /// Rejected.
    Rejected,
}

impl Admitted {
    /// Returns `true` if it is another process with this rank.
    pub(crate) fn is_other(&self, rank: u32, session: u64) -> bool {
        self.rank == rank && self.session != session
    }
}

/// Returns `true` if the system had no descriptor or memory for a new connection.
fn is_exhausted(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}

impl Admission {
    pub(crate) fn new(terms: Terms, shared: Shared) -> Self {
        Admission { terms, shared, peers: Vec::new(), refused: Vec::new(), logged: 0 }
    }

    /// Returns the number of peers.
    pub(crate) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Returns the connections of the peers, which are readable once a peer has sent something.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.peers.iter().map(|peer| peer.connection.as_fd())
    }

    /// Returns the ranks that were refused since the last call, as they claim, with what they found.
    pub(crate) fn take_refused(&mut self) -> Vec<(u32, EndpointAnswer)> {
        std::mem::take(&mut self.refused)
    }

    /// Accepts connections. Their peers are the last ones.
    pub(crate) fn accept(&mut self, listener: &Listener) {
        for _ in 0..ACCEPTS_MAX {
            match listener.accept() {
                Ok(Incoming::Unverified(connection, from)) => self.admit(connection, from, listener.number()),
                Ok(Incoming::Foreign(user)) => self.log(None, &format!("it is a process of user {user}")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_exhausted(&error) => return std::thread::sleep(EXHAUSTED_PAUSE),
                Err(_) => {}
            }
        }
    }

    fn admit(&mut self, connection: Connection, from: Option<IpAddr>, endpoint: u32) {
        let (since, received, awaited) = (Instant::now(), Vec::new(), Awaited::Hello);
        self.peers.push(PendingPeer { connection, from, endpoint, since, received, awaited });
        // Each new peer evicts at most one of each stage. Peers arrive one at a time, so that suffices for both limits.
        for stage in [Stage::Silent, Stage::Unproven] {
            let is_rival = |peer: &PendingPeer| self.stage(peer) == stage;
            let is_neighbor = |peer: &PendingPeer| from.is_some() && peer.from == from && is_rival(peer);
            let oldest = self.oldest_beyond(PEERS_PER_ADDRESS_MAX, is_neighbor);
            oldest.or_else(|| self.oldest_beyond(PEERS_MAX, is_rival)).map(|oldest| self.peers.remove(oldest));
        }
    }

    /// Returns the index of the oldest of these peers, if they are more than `limit`.
    fn oldest_beyond(&self, limit: usize, is_candidate: impl Fn(&PendingPeer) -> bool) -> Option<usize> {
        let mut candidates = self.peers.iter().enumerate().filter(|(_, peer)| is_candidate(peer));
        let (oldest, _) = candidates.next()?;
        (candidates.count() >= limit).then_some(oldest)
    }

    fn stage(&self, peer: &PendingPeer) -> Stage {
        match peer.awaited {
            Awaited::Hello => Stage::Silent,
            Awaited::Join(_) if self.terms.key.is_some() => Stage::Proven,
            Awaited::Proof(_) | Awaited::Join(_) => Stage::Unproven,
        }
    }

    /// Reads from the peers that are ready, in the order of [`descriptors`](Self::descriptors), and returns those that joined. Refuses a
    /// peer if `is_taken` returns `true` for its rank, its session and those that have joined during this call.
    pub(crate) fn poll(&mut self, ready: &[bool], is_taken: impl Fn(u32, u64, &[Admitted]) -> bool) -> Vec<Admitted> {
        let mut joined = Vec::new();
        for (mut peer, is_ready) in std::mem::take(&mut self.peers).into_iter().zip(ready) {
            if !is_ready {
                if !peer.is_late() {
                    self.peers.push(peer);
                }
                continue;
            }
            match self.poll_peer(&mut peer, &|rank, session| is_taken(rank, session, &joined)) {
                Ok(HandshakeState::Pending) => self.peers.push(peer),
                Ok(HandshakeState::Joined(Hello { rank, session, .. }, left)) => {
                    joined.push(Admitted { rank, session, left, connection: peer.connection });
                }
                Ok(HandshakeState::Rejected) | Err(_) => {}
            }
        }
        joined
    }

    /// Reads from one peer and answers it.
    fn poll_peer(
        &mut self,
        peer: &mut PendingPeer,
        is_taken: &impl Fn(u32, u64) -> bool,
    ) -> io::Result<HandshakeState> {
        match peer.awaited {
            Awaited::Hello => self.poll_hello(peer, is_taken),
            Awaited::Proof(exchange) => {
                let Some(proof) = peer.read(PROOF_BYTES)? else { return Ok(HandshakeState::Pending) };
                let knows = |key| exchange.is_proof(key, &proof);
                if !self.terms.key.as_ref().is_some_and(knows) {
                    return self.refuse(peer, &exchange, Verdict::WrongSecret);
                }
                self.answer(peer, &exchange, is_taken)
            }
            Awaited::Join(hello) => {
                let Some(bytes) = peer.read(JOIN_BYTES)? else { return Ok(HandshakeState::Pending) };
                Ok(match left_of_join(&bytes) {
                    Some(left) => HandshakeState::Joined(hello, left),
                    None => HandshakeState::Rejected,
                })
            }
        }
    }

    fn poll_hello(
        &mut self,
        peer: &mut PendingPeer,
        is_taken: &impl Fn(u32, u64) -> bool,
    ) -> io::Result<HandshakeState> {
        let Some(bytes) = peer.read(HELLO_BYTES)? else { return Ok(HandshakeState::Pending) };
        let hello = match Hello::from_bytes(&bytes) {
            Ok(hello) => hello,
            // Do not answer a stranger.
            Err(DecodeError::Foreign) => return Ok(HandshakeState::Rejected),
            Err(DecodeError::VersionMismatch { version }) => {
                self.log(None, &format!("it uses version {version} of the rendezvous, and rank 0 {VERSION}"));
                return peer.refuse(Verdict::VersionMismatch, [0; PROOF_BYTES]);
            }
        };
        if !self.terms.is_of(&hello) {
            return peer.refuse(Verdict::DifferentJob, [0; PROOF_BYTES]);
        }
        let mut exchange = Exchange { hello, nonce: [0; 32], endpoint: peer.endpoint };
        match (self.terms.has_secret, hello.has_secret) {
            (false, true) => self.refuse(peer, &exchange, Verdict::NoSecret),
            (true, false) => self.refuse(peer, &exchange, Verdict::SecretNeeded),
            _ if self.terms.key.is_none() => self.answer(peer, &exchange, is_taken),
            _ => {
                exchange.nonce = random().map_err(|_| io::ErrorKind::Other)?;
                peer.connection.write_all(&[&Verdict::Challenge.head()[..], &exchange.nonce].concat())?;
                peer.awaited = Awaited::Proof(exchange);
                Ok(HandshakeState::Pending)
            }
        }
    }

    fn answer(
        &mut self,
        peer: &mut PendingPeer,
        exchange: &Exchange,
        is_taken: &impl Fn(u32, u64) -> bool,
    ) -> io::Result<HandshakeState> {
        let Hello { rank, session, .. } = exchange.hello;
        let is_welcome = !is_taken(rank, session);
        let verdict = if is_welcome { Verdict::Welcome } else { Verdict::RankTwice };
        let id = if is_welcome { self.shared } else { [0; SHARED_BYTES] };
        let proof = proof_of(self.terms.key.as_ref(), exchange, verdict, &id);
        // The answer fits into the socket's buffer, which is empty.
        peer.connection.write_all(&[&verdict.head()[..], TailMessage { id, proof }.as_bytes()].concat())?;
        peer.awaited = Awaited::Join(exchange.hello);
        Ok(if is_welcome { HandshakeState::Pending } else { HandshakeState::Rejected })
    }

    /// Refuses a rank of this job, and records the reason.
    fn refuse(&mut self, peer: &mut PendingPeer, exchange: &Exchange, verdict: Verdict) -> io::Result<HandshakeState> {
        let (found, reason) = match verdict {
            Verdict::NoSecret => (EndpointAnswer::NoSecret, "it has a job secret, and rank 0 has none"),
            Verdict::SecretNeeded => (EndpointAnswer::SecretNeeded, "it has no job secret"),
            _ => (EndpointAnswer::SecretMismatch, "it does not know the job secret"),
        };
        let rank = exchange.hello.rank;
        self.log(Some(rank), reason);
        if self.refused.len() < REFUSED_MAX {
            self.refused.push((rank, found));
        }
        peer.refuse(verdict, proof_of(self.terms.refusal_key.as_ref(), exchange, verdict, &[0; SHARED_BYTES]))
    }

    fn log(&mut self, rank: Option<u32>, reason: &str) {
        self.logged += 1;
        if self.logged <= LOGGED_MAX {
            // The program's subscriber may panic, which must not end the server.
            let _panicked = catch_unwind(|| {
                tracing::warn!(name: "rendezvous.refused", target: "symmalloc", ?rank, reason);
            });
        }
    }
}

/// Returns the proof for an answer; zeros without a key.
fn proof_of(key: Option<&Secret>, exchange: &Exchange, verdict: Verdict, id: &Shared) -> [u8; PROOF_BYTES] {
    key.map_or([0; PROOF_BYTES], |key| exchange.answer_proof(key, verdict, id))
}

impl PendingPeer {
    /// Returns `count` bytes once they have arrived, or an error if the connection must be closed.
    fn read(&mut self, count: usize) -> io::Result<Option<Vec<u8>>> {
        let mut rest = [0; HELLO_BYTES];
        let missing = count - self.received.len();
        match self.connection.read(&mut rest[..missing]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.received.extend_from_slice(&rest[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if self.received.len() == count {
            return Ok(Some(std::mem::take(&mut self.received)));
        }
        if self.is_late() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(None) }
    }

    fn is_late(&self) -> bool {
        self.since.elapsed() > HANDSHAKE_LIMIT
    }

    fn refuse(&mut self, verdict: Verdict, proof: [u8; PROOF_BYTES]) -> io::Result<HandshakeState> {
        let tail: [u8; TAIL_BYTES] = zerocopy::transmute!(TailMessage { id: [0; SHARED_BYTES], proof });
        self.connection.write_all(&[&verdict.head()[..], &tail].concat())?;
        Ok(HandshakeState::Rejected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::join_bytes;
    use std::net::Ipv4Addr;
    use std::os::unix::net::UnixStream;

    const HELLO: Hello = Hello { job: 5, ranks: 2, rank: 1, session: 7, has_secret: false, nonce: [0; 32] };

    fn admission(has_key: bool) -> Admission {
        let key = has_key.then(|| Secret::with_token(&[1; 32], None));
        Admission::new(Terms { job: 5, ranks: 2, has_secret: false, key, refusal_key: None }, [7; SHARED_BYTES])
    }

    /// Connects a peer from one address, and returns its side.
    fn connect(admission: &mut Admission) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_nonblocking(true).expect("the socket should accept the setting");
        admission.admit(ours.into(), Some(Ipv4Addr::LOCALHOST.into()), 0);
        theirs
    }

    fn poll(admission: &mut Admission) -> Vec<u32> {
        let ready = vec![true; admission.len()];
        admission.poll(&ready, |_, _, _| false).iter().map(|it| it.rank).collect()
    }

    /// Connects more peers than rank 0 keeps, which send `bytes`.
    fn flood(admission: &mut Admission, bytes: &[u8]) -> Vec<UnixStream> {
        let flood = (0..PEERS_PER_ADDRESS_MAX + 10).map(|_| {
            let mut stranger = connect(admission);
            stranger.write_all(bytes).expect("the connection should be open");
            stranger
        });
        flood.collect()
    }

    /// Regression test: a flood evicted a rank that had joined, but whose last message had not been read.
    #[test]
    fn a_flood_evicts_no_rank_that_has_proven_itself() {
        for (has_key, stays) in [(true, true), (false, false)] {
            let mut admission = admission(has_key);
            let mut rank = connect(&mut admission);
            admission.peers[0].awaited = Awaited::Join(HELLO);
            rank.write_all(&join_bytes(Duration::ZERO)).expect("the connection should be open");
            for bytes in [&[][..], &HELLO.bytes()] {
                let _strangers = flood(&mut admission, bytes);
                // The rank's message is not read yet. Those of the strangers are.
                let mut ready = vec![true; admission.len()];
                ready[0] = false;
                assert!(admission.poll(&ready, |_, _, _| false).is_empty());
            }
            let _strangers = flood(&mut admission, &HELLO.bytes());
            assert_eq!(poll(&mut admission), if stays { vec![1] } else { vec![] }, "{has_key}");
        }
    }

    #[test]
    fn silent_connections_evict_no_rank_that_is_challenged() {
        let mut admission = admission(true);
        let mut rank = connect(&mut admission);
        rank.write_all(&HELLO.bytes()).expect("the connection should be open");
        assert!(poll(&mut admission).is_empty());
        let _strangers = flood(&mut admission, &[]);
        assert!(matches!(admission.peers[0].awaited, Awaited::Proof(_)));
        assert_eq!(admission.len(), 1 + PEERS_PER_ADDRESS_MAX);
    }

    #[test]
    fn strangers_that_introduce_themselves_leave_room_for_a_rank() {
        let mut admission = admission(true);
        for _ in 0..4 {
            let _strangers = flood(&mut admission, &[]);
            let exchange = Exchange { hello: HELLO, nonce: [0; 32], endpoint: 0 };
            admission.peers.iter_mut().for_each(|peer| peer.awaited = Awaited::Proof(exchange));
            assert!(admission.len() <= 2 * PEERS_PER_ADDRESS_MAX, "{}", admission.len());
        }
        let mut rank = connect(&mut admission);
        rank.write_all(&HELLO.bytes()).expect("the connection should be open");
        let mut ready = vec![false; admission.len()];
        *ready.last_mut().expect("the rank is the last peer") = true;
        assert!(admission.poll(&ready, |_, _, _| false).is_empty());
        let mut answer = [0; 9];
        rank.read_exact(&mut answer).expect("it is challenged");
        assert_eq!(answer, Verdict::Challenge.head());
    }
}
