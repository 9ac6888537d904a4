//! The other ranks' side of the rendezvous: they try to connect until rank 0 answers.

use crate::backoff::Backoff;
use crate::rendezvous::endpoint::{ConnectError, Endpoint, read_until, write_until};
use crate::rendezvous::error::RendezvousError;
use crate::rendezvous::handshake::{DecodeError, Exchange, HEAD_BYTES, Hello, TailMessage, VERSION, Verdict};
use crate::rendezvous::meeting::{HANDSHAKE_LIMIT, Meeting};
use crate::rendezvous::secret::random;
use crate::rendezvous::unique_id::UniqueId;
use std::io;
use std::time::{Duration, Instant};
use symmalloc_watchdog::Connection;
use zerocopy::{FromZeros, IntoBytes};

/// Time for which a rank that was rejected over the network looks for another rank 0, because the rejection may come from a stranger.
const REFUSED_LIMIT: Duration = Duration::from_secs(5);

impl Meeting {
    /// Tries the endpoints until the right rank 0 answers. Returns the id and the connection to rank 0.
    pub(super) fn request_id(
        &self,
        endpoints: &[Endpoint],
        rank: u32,
        backoff: &Backoff,
    ) -> Result<(UniqueId, Connection), RendezvousError> {
        let session = u64::from_le_bytes(random()?);
        let (mut refused, mut foreign, mut other_version) = (None, None, None);
        loop {
            for endpoint in endpoints {
                let limit = backoff.left().min(HANDSHAKE_LIMIT);
                if limit.is_zero() {
                    break;
                }
                let (job, ranks, has_secret) = (self.job, self.ranks, self.secret.is_some());
                let hello = Hello { job, ranks, rank, session, has_secret, nonce: random()? };
                match self.attempt(endpoint, hello, limit) {
                    Ok(found) => return Ok(found),
                    // On a network, it may be rank 0 of another job, so keep looking for the right one.
                    Err(AttemptError::Refused(error @ RendezvousError::OtherVersion { .. }))
                        if matches!(endpoint, Endpoint::Network(_)) =>
                    {
                        other_version.get_or_insert(error);
                    }
                    Err(AttemptError::Refused(error)) => {
                        // The system guarantees that a socket on this machine belongs to the same user, so the answer is final.
                        if matches!(endpoint, Endpoint::Local(_)) || error == (RendezvousError::RankTwice { rank }) {
                            return Err(error);
                        }
                        refused.get_or_insert((error, Instant::now()));
                    }
                    Err(AttemptError::Connect(ConnectError::Foreign(user))) => {
                        if foreign.replace(user) != Some(user) {
                            tracing::warn!(name: "rendezvous.foreign_socket", target: "symmalloc", user);
                        }
                    }
                    // Rank 0 does not listen yet, or the port belongs to another program or another job's rank 0.
                    Err(AttemptError::Connect(ConnectError::Io)) => {}
                }
            }
            // Connect at most a hundred times per second, regardless of the backoff, because each attempt sends a packet.
            std::thread::sleep(backoff.left().min(Duration::from_millis(10)));
            let is_over = !backoff.pause();
            if let Some((error, _)) = refused.take_if(|(_, since)| is_over || since.elapsed() > REFUSED_LIMIT) {
                return Err(error);
            }
            if is_over {
                if let Some(error) = other_version {
                    return Err(error);
                }
                let waited = backoff.waited();
                return Err(match &endpoints[0] {
                    Endpoint::Network(address) => RendezvousError::NoAnswer { address: *address, waited },
                    Endpoint::Local(_) => RendezvousError::NoLocalAnswer { foreign_user: foreign, waited },
                });
            }
        }
    }

    /// Tries one endpoint.
    fn attempt(
        &self,
        endpoint: &Endpoint,
        hello: Hello,
        limit: Duration,
    ) -> Result<(UniqueId, Connection), AttemptError> {
        let end = Instant::now() + limit;
        let mut connection = endpoint.connect(limit)?;
        write_until(&mut connection, &hello.bytes(), end)?;
        let mut exchange = Exchange { hello, nonce: [0; 32], endpoint: endpoint.number() };
        let mut verdict = read_verdict(&mut connection, end)?;
        if let (Verdict::Challenge, Some(secret)) = (verdict, &self.secret) {
            read_until(&mut connection, &mut exchange.nonce, end)?;
            write_until(&mut connection, &exchange.proof(secret), end)?;
            verdict = read_verdict(&mut connection, end)?;
        } else if self.secret.is_some() && matches!(verdict, Verdict::Welcome | Verdict::RankTwice) {
            verdict = Verdict::NoSecret;
        }
        let mut tail = TailMessage::new_zeroed();
        read_until(&mut connection, tail.as_mut_bytes(), end)?;
        let TailMessage { id, proof } = tail;
        let id = UniqueId::from_bytes(id);
        if let (Verdict::Welcome | Verdict::RankTwice, Some(secret)) = (verdict, &self.secret)
            && !exchange.is_answer_proof(secret, &proof, verdict, &id)
        {
            verdict = Verdict::WrongSecret;
        }
        match verdict {
            Verdict::Welcome => Ok((id, connection)),
            Verdict::RankTwice => Err(AttemptError::Refused(RendezvousError::RankTwice { rank: hello.rank })),
            Verdict::SecretNeeded => Err(AttemptError::Refused(RendezvousError::SecretMissing)),
            Verdict::NoSecret => Err(AttemptError::Refused(RendezvousError::SecretMissingAtRank0)),
            Verdict::WrongSecret => Err(AttemptError::Refused(RendezvousError::WrongSecret)),
            Verdict::OtherJob | Verdict::Challenge | Verdict::OtherVersion => {
                Err(AttemptError::Connect(ConnectError::Io))
            }
        }
    }
}

/// An error returned by an attempt that did not reach rank 0.
enum AttemptError {
    Connect(ConnectError),
    Refused(RendezvousError),
}

impl From<ConnectError> for AttemptError {
    fn from(error: ConnectError) -> Self {
        AttemptError::Connect(error)
    }
}

impl From<io::Error> for AttemptError {
    fn from(error: io::Error) -> Self {
        AttemptError::Connect(error.into())
    }
}

fn read_verdict(connection: &mut Connection, end: Instant) -> Result<Verdict, AttemptError> {
    let mut head = [0; HEAD_BYTES];
    read_until(connection, &mut head, end)?;
    Verdict::from_head(head).map_err(|error| match error {
        DecodeError::Foreign => AttemptError::Connect(ConnectError::Io),
        DecodeError::OtherVersion { version } => {
            AttemptError::Refused(RendezvousError::OtherVersion { version, expected: VERSION })
        }
    })
}
