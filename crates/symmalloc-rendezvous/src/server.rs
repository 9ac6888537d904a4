//! Rank 0's side of the rendezvous: the peers that have not yet proven that they belong to the job. Rank 0 does not block on any of
//! them.

use crate::deadline::Deadline;
use crate::endpoint::{Incoming, Listener};
use crate::error::RendezvousError;
use crate::handshake::{
    DecodeError, Exchange, HELLO_BYTES, Hello, JOIN, SHARED_BYTES, Shared, TAIL_BYTES, TailMessage, Verdict,
};
use crate::meeting::{HANDSHAKE_LIMIT, Meeting};
use crate::secret::{PROOF_BYTES, random};
use crate::version::VERSION;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::time::Instant;
use symmalloc_watchdog::Connection;
use zerocopy::IntoBytes;

/// Maximum number of peers at a time. One more evicts the oldest: a rank introduces itself immediately, so the oldest peer is not a
/// rank.
const PEERS_MAX: usize = 1024;
/// Maximum number of peers at a time from one network address, which may be that of a machine with many ranks.
const PEERS_PER_ADDRESS_MAX: usize = 256;
/// Maximum number of connections that are accepted between two checks of the peers.
const ACCEPTS_MAX: usize = 64;
/// Maximum number of refusals that are logged. Otherwise, any process that can connect could fill the log.
const LOGGED_MAX: u32 = 32;

/// A connection whose origin is not known yet.
struct PendingPeer {
    connection: Connection,
    from: Option<IpAddr>,
    since: Instant,
    received: Vec<u8>,
    awaited: Awaited,
}

/// The next message of a peer.
#[derive(Clone, Copy)]
enum Awaited {
    Hello,
    /// A proof that the peer knows the secret.
    Proof(Exchange),
    /// A byte, after which the rank has arrived.
    Join(Hello),
}

/// The session of each rank, by rank: of a rank that arrived, and of one that may join.
type Sessions = Vec<Option<u64>>;

/// The peers; see the [module documentation](self).
struct PendingPeers<'a> {
    meeting: &'a Meeting,
    id: &'a Shared,
    endpoint: u32,
    /// In the order of their arrival.
    peers: Vec<PendingPeer>,
    logged: u32,
}

impl Meeting {
    /// Sends the id to every other rank once. Returns the connections to these ranks.
    pub(super) fn serve_id(
        &self,
        listener: &Listener,
        id: &Shared,
        deadline: &Deadline,
    ) -> Result<Vec<(u32, Connection)>, RendezvousError> {
        // The session of each rank that has arrived, by rank.
        let mut arrived: Sessions = vec![None; self.ranks as usize];
        let mut connections: BTreeMap<u32, Connection> = BTreeMap::new();
        let mut peers = PendingPeers::new(self, id, listener.number());
        while arrived.iter().skip(1).any(Option::is_none) {
            peers.accept(listener);
            connections.extend(peers.poll(&mut arrived));
            if !deadline.pause() {
                let missing = (1..self.ranks).filter(|rank| arrived[*rank as usize].is_none()).collect();
                return Err(RendezvousError::Missing { missing, waited: deadline.waited() });
            }
        }
        Ok(connections.into_iter().collect())
    }
}

/// State of a handshake.
enum HandshakeState {
    /// More bytes must arrive.
    Pending,
    /// A rank that has joined.
    Joined(Hello),
    /// Rejected.
    Rejected,
}

impl<'a> PendingPeers<'a> {
    fn new(meeting: &'a Meeting, id: &'a Shared, endpoint: u32) -> Self {
        PendingPeers { meeting, id, endpoint, peers: Vec::new(), logged: 0 }
    }

    /// Accepts connections.
    fn accept(&mut self, listener: &Listener) {
        for _ in 0..ACCEPTS_MAX {
            match listener.accept() {
                Ok(Incoming::Unverified(connection, from)) => self.admit(connection, from),
                Ok(Incoming::Foreign(user)) => self.log(None, &format!("it is a process of user {user}")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {}
            }
        }
    }

    fn admit(&mut self, connection: Connection, from: Option<IpAddr>) {
        let since = Instant::now();
        self.peers.push(PendingPeer { connection, from, since, received: Vec::new(), awaited: Awaited::Hello });
        let is_neighbor = |peer: &PendingPeer| from.is_some() && peer.from == from;
        if self.peers.iter().filter(|peer| is_neighbor(peer)).count() > PEERS_PER_ADDRESS_MAX {
            let oldest = self.peers.iter().position(is_neighbor);
            oldest.map(|oldest| self.peers.remove(oldest));
        } else if self.peers.len() > PEERS_MAX {
            self.peers.remove(0);
        }
    }

    /// Reads from all peers. Returns the ranks that joined, with their connections, and adds them to `arrived`.
    fn poll(&mut self, arrived: &mut Sessions) -> Vec<(u32, Connection)> {
        let mut joined = Vec::new();
        let mut sessions = arrived.clone();
        for peer in &self.peers {
            if let Awaited::Join(Hello { rank, session, .. }) = peer.awaited {
                sessions[rank as usize].get_or_insert(session);
            }
        }
        for mut peer in std::mem::take(&mut self.peers) {
            match self.poll_peer(&mut peer, &mut sessions) {
                Ok(HandshakeState::Pending) => self.peers.push(peer),
                Ok(HandshakeState::Joined(Hello { rank, session, .. })) => {
                    if arrived[rank as usize].replace(session).is_none() {
                        joined.push((rank, peer.connection));
                    }
                }
                Ok(HandshakeState::Rejected) | Err(_) => {}
            }
        }
        joined
    }

    /// Reads from one peer and answers it.
    fn poll_peer(&mut self, peer: &mut PendingPeer, sessions: &mut Sessions) -> io::Result<HandshakeState> {
        match peer.awaited {
            Awaited::Hello => self.poll_hello(peer, sessions),
            Awaited::Proof(exchange) => {
                let Some(proof) = peer.read(PROOF_BYTES)? else { return Ok(HandshakeState::Pending) };
                let knows = |secret| exchange.is_proof(secret, &proof);
                if !self.meeting.secret.as_ref().is_some_and(knows) {
                    self.log(Some(exchange.hello.rank), "it does not know the job secret");
                    return peer.refuse(Verdict::WrongSecret);
                }
                self.answer(peer, &exchange, sessions)
            }
            Awaited::Join(hello) => {
                let Some(byte) = peer.read(1)? else { return Ok(HandshakeState::Pending) };
                Ok(if byte == [JOIN] { HandshakeState::Joined(hello) } else { HandshakeState::Rejected })
            }
        }
    }

    fn poll_hello(&mut self, peer: &mut PendingPeer, sessions: &mut Sessions) -> io::Result<HandshakeState> {
        let Some(bytes) = peer.read(HELLO_BYTES)? else { return Ok(HandshakeState::Pending) };
        let hello = match Hello::from_bytes(&bytes) {
            Ok(hello) => hello,
            // Do not answer a stranger.
            Err(DecodeError::Foreign) => return Ok(HandshakeState::Rejected),
            Err(DecodeError::OtherVersion { version }) => {
                self.log(None, &format!("it uses version {version} of the rendezvous, and rank 0 {VERSION}"));
                return peer.refuse(Verdict::OtherVersion);
            }
        };
        if !self.meeting.is_of(&hello) {
            return peer.refuse(Verdict::OtherJob);
        }
        let mut exchange = Exchange { hello, nonce: [0; 32], endpoint: self.endpoint };
        match (&self.meeting.secret, hello.has_secret) {
            (None, false) => self.answer(peer, &exchange, sessions),
            (None, true) => {
                self.log(Some(hello.rank), "it has a job secret, and rank 0 has none");
                peer.refuse(Verdict::NoSecret)
            }
            (Some(_), false) => {
                self.log(Some(hello.rank), "it has no job secret");
                peer.refuse(Verdict::SecretNeeded)
            }
            (Some(_), true) => {
                exchange.nonce = random().map_err(|_| io::ErrorKind::Other)?;
                peer.connection.write_all(&[&Verdict::Challenge.head()[..], &exchange.nonce].concat())?;
                peer.awaited = Awaited::Proof(exchange);
                Ok(HandshakeState::Pending)
            }
        }
    }

    fn answer(
        &self,
        peer: &mut PendingPeer,
        exchange: &Exchange,
        sessions: &mut Sessions,
    ) -> io::Result<HandshakeState> {
        let hello = exchange.hello;
        // A process may ask again, or on several connections.
        let session = *sessions[hello.rank as usize].get_or_insert(hello.session);
        let verdict = if session == hello.session { Verdict::Welcome } else { Verdict::RankTwice };
        let id = if verdict == Verdict::Welcome { *self.id } else { [0; SHARED_BYTES] };
        let proof = self.meeting.secret.as_ref().map(|secret| exchange.answer_proof(secret, verdict, &id));
        let tail = TailMessage { id, proof: proof.unwrap_or_default() };
        // The answer fits into the socket's buffer, which is empty.
        peer.connection.write_all(&[&verdict.head()[..], tail.as_bytes()].concat())?;
        peer.awaited = Awaited::Join(hello);
        Ok(if verdict == Verdict::Welcome { HandshakeState::Pending } else { HandshakeState::Rejected })
    }

    fn log(&mut self, rank: Option<u32>, reason: &str) {
        self.logged += 1;
        if self.logged <= LOGGED_MAX {
            tracing::warn!(name: "rendezvous.refused", target: "symmalloc", ?rank, reason);
        }
    }
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
        if self.since.elapsed() > HANDSHAKE_LIMIT { Err(io::ErrorKind::TimedOut.into()) } else { Ok(None) }
    }

    fn refuse(&mut self, verdict: Verdict) -> io::Result<HandshakeState> {
        self.connection.write_all(&[&verdict.head()[..], &[0; TAIL_BYTES]].concat())?;
        Ok(HandshakeState::Rejected)
    }
}
