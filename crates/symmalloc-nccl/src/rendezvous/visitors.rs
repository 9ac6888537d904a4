//! Rank 0's side of the rendezvous: the visitors that have not yet proven that they belong to the job. Rank 0 does not block on any of
//! them.

use crate::backoff::Backoff;
use crate::rendezvous::endpoint::{Guest, Listener};
use crate::rendezvous::error::RendezvousError;
use crate::rendezvous::handshake::{Exchange, HELLO_BYTES, Hello, TAIL_BYTES, TailMessage, Unknown, VERSION, Verdict};
use crate::rendezvous::meeting::{Meeting, VISITOR_LIMIT};
use crate::rendezvous::secret::{PROOF_BYTES, random};
use crate::rendezvous::unique_id::UniqueId;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::time::Instant;
use symmalloc_watchdog::Connection;
use zerocopy::IntoBytes;

/// Maximum number of visitors at a time. One more evicts the oldest: a rank introduces itself immediately, so the oldest visitor is not a
/// rank.
const VISITORS_MAX: usize = 1024;
/// Maximum number of visitors at a time from one network address, which may be that of a machine with many ranks.
const VISITORS_PER_ADDRESS_MAX: usize = 256;
/// Maximum number of connections that are accepted between two checks of the visitors.
const ACCEPTS_MAX: usize = 64;
/// Maximum number of refusals that are logged. Otherwise, any process that can connect could fill the log.
const LOGGED_MAX: u32 = 32;

/// A connection whose origin is not known yet.
struct Visitor {
    connection: Connection,
    from: Option<IpAddr>,
    since: Instant,
    heard: Vec<u8>,
    /// The exchange of a visitor that has introduced itself and must prove that it knows the secret.
    challenged: Option<Exchange>,
}

/// The visitors; see the [module documentation](self).
struct Visitors<'a> {
    meeting: &'a Meeting,
    id: &'a UniqueId,
    door: u32,
    /// Visitors in the order of their arrival.
    visitors: Vec<Visitor>,
    logged: u32,
}

impl Meeting {
    /// Sends the id to every other rank once. Returns the connections to these ranks.
    pub(super) fn give(
        &self,
        listener: &Listener,
        id: &UniqueId,
        backoff: &Backoff,
    ) -> Result<Vec<(u32, Connection)>, RendezvousError> {
        // The visit of each rank that has arrived, by rank.
        let mut came: Vec<Option<u64>> = vec![None; self.ranks as usize];
        let mut connections: BTreeMap<u32, Connection> = BTreeMap::new();
        let mut visitors = Visitors::new(self, id, listener.number());
        while came.iter().skip(1).any(Option::is_none) {
            visitors.accept(listener);
            connections.extend(visitors.listen(&mut came));
            if !backoff.pause() {
                let missing = (1..self.ranks).filter(|rank| came[*rank as usize].is_none()).collect();
                return Err(RendezvousError::Missing { missing, waited: backoff.waited() });
            }
        }
        Ok(connections.into_iter().collect())
    }
}

/// State of a visit.
enum Visit {
    /// More bytes must arrive.
    Open,
    /// A rank that may join.
    Rank(Hello),
    /// Rejected.
    Over,
}

impl<'a> Visitors<'a> {
    fn new(meeting: &'a Meeting, id: &'a UniqueId, door: u32) -> Self {
        Visitors { meeting, id, door, visitors: Vec::new(), logged: 0 }
    }

    /// Accepts connections.
    fn accept(&mut self, listener: &Listener) {
        for _ in 0..ACCEPTS_MAX {
            match listener.accept() {
                Ok(Guest::Stranger(connection, from)) => self.admit(connection, from),
                Ok(Guest::Foreign(user)) => self.log(None, &format!("it is a process of user {user}")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {}
            }
        }
    }

    fn admit(&mut self, connection: Connection, from: Option<IpAddr>) {
        let since = Instant::now();
        self.visitors.push(Visitor { connection, from, since, heard: Vec::new(), challenged: None });
        let is_neighbor = |visitor: &Visitor| from.is_some() && visitor.from == from;
        if self.visitors.iter().filter(|visitor| is_neighbor(visitor)).count() > VISITORS_PER_ADDRESS_MAX {
            let oldest = self.visitors.iter().position(is_neighbor);
            oldest.map(|oldest| self.visitors.remove(oldest));
        } else if self.visitors.len() > VISITORS_MAX {
            self.visitors.remove(0);
        }
    }

    /// Reads from all visitors. Returns the ranks that may join, each with its visit and its connection. `came` contains the visits of
    /// ranks that joined earlier, by rank.
    fn listen(&mut self, came: &mut [Option<u64>]) -> Vec<(u32, Connection)> {
        let mut welcome = Vec::new();
        for mut visitor in std::mem::take(&mut self.visitors) {
            match self.hear(&mut visitor, came) {
                Ok(Visit::Open) => self.visitors.push(visitor),
                Ok(Visit::Rank(hello)) => {
                    came[hello.rank as usize] = Some(hello.visit);
                    welcome.push((hello.rank, visitor.connection));
                }
                Ok(Visit::Over) | Err(_) => {}
            }
        }
        welcome
    }

    /// Reads from one visitor and answers it.
    fn hear(&mut self, visitor: &mut Visitor, came: &[Option<u64>]) -> io::Result<Visit> {
        if let Some(exchange) = visitor.challenged {
            let Some(proof) = visitor.read(PROOF_BYTES)? else { return Ok(Visit::Open) };
            let knows = |secret| exchange.is_proof(secret, &proof);
            if !self.meeting.secret.as_ref().is_some_and(knows) {
                self.log(Some(exchange.hello.rank), "it does not know the job secret");
                return visitor.refuse(Verdict::WrongSecret);
            }
            return self.answer(visitor, &exchange, came);
        }
        let Some(bytes) = visitor.read(HELLO_BYTES)? else { return Ok(Visit::Open) };
        let hello = match Hello::from_bytes(&bytes) {
            Ok(hello) => hello,
            // Do not answer a stranger.
            Err(Unknown::Foreign) => return Ok(Visit::Over),
            Err(Unknown::OtherVersion { version }) => {
                self.log(None, &format!("it uses version {version} of the rendezvous, and rank 0 {VERSION}"));
                return visitor.refuse(Verdict::OtherVersion);
            }
        };
        if !self.meeting.is_of(&hello) {
            return visitor.refuse(Verdict::OtherJob);
        }
        let mut exchange = Exchange { hello, nonce: [0; 32], door: self.door };
        match (&self.meeting.secret, hello.has_secret) {
            (None, false) => self.answer(visitor, &exchange, came),
            (None, true) => {
                self.log(Some(hello.rank), "it has a job secret, and rank 0 has none");
                visitor.refuse(Verdict::NoSecret)
            }
            (Some(_), false) => {
                self.log(Some(hello.rank), "it has no job secret");
                visitor.refuse(Verdict::SecretNeeded)
            }
            (Some(_), true) => {
                exchange.nonce = random().map_err(|_| io::ErrorKind::Other)?;
                visitor.connection.write_all(&[&Verdict::Challenge.head()[..], &exchange.nonce].concat())?;
                visitor.challenged = Some(exchange);
                Ok(Visit::Open)
            }
        }
    }

    fn answer(&self, visitor: &mut Visitor, exchange: &Exchange, came: &[Option<u64>]) -> io::Result<Visit> {
        let hello = exchange.hello;
        let verdict = match came[hello.rank as usize] {
            // The same process asks again because the answer did not reach it.
            Some(visit) if visit != hello.visit => Verdict::RankTwice,
            _ => Verdict::Welcome,
        };
        let id = if verdict == Verdict::Welcome { *self.id } else { UniqueId::from_bytes([0; UniqueId::BYTES]) };
        let proof = self.meeting.secret.as_ref().map(|secret| exchange.answer_proof(secret, verdict, &id));
        let tail = TailMessage { id: *id.as_bytes(), proof: proof.unwrap_or_default() };
        // The answer fits into the socket's buffer, which is empty.
        visitor.connection.write_all(&[&verdict.head()[..], tail.as_bytes()].concat())?;
        Ok(if verdict == Verdict::Welcome { Visit::Rank(hello) } else { Visit::Over })
    }

    fn log(&mut self, rank: Option<u32>, reason: &str) {
        self.logged += 1;
        if self.logged <= LOGGED_MAX {
            tracing::warn!(name: "rendezvous.refused", target: "symmalloc", ?rank, reason);
        }
    }
}

impl Visitor {
    /// Returns `count` bytes once they have arrived, or an error if the connection must be closed.
    fn read(&mut self, count: usize) -> io::Result<Option<Vec<u8>>> {
        let mut rest = [0; HELLO_BYTES];
        let missing = count - self.heard.len();
        match self.connection.read(&mut rest[..missing]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.heard.extend_from_slice(&rest[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if self.heard.len() == count {
            return Ok(Some(std::mem::take(&mut self.heard)));
        }
        if self.since.elapsed() > VISITOR_LIMIT { Err(io::ErrorKind::TimedOut.into()) } else { Ok(None) }
    }

    fn refuse(&mut self, verdict: Verdict) -> io::Result<Visit> {
        self.connection.write_all(&[&verdict.head()[..], &[0; TAIL_BYTES]].concat())?;
        Ok(Visit::Over)
    }
}
