//! The messages by which rank 0 and another rank identify each other. All integers are little-endian.
//!
//! ```text
//!  rank r                                                       rank 0
//!    │ ── HelloMessage, 65 bytes ──────────────────────────────►  │
//!    │ ◄── HeadMessage, 9 bytes: challenge; nonce, 32 bytes ────  │   only with a key
//!    │ ── proof of r, 32 bytes: hello, nonce, endpoint ────────►  │   only with a key
//!    │ ◄── HeadMessage; TailMessage, 160 bytes ─────────────────  │   the proof of 0 covers all before it
//!    │ ── JoinMessage, 9 bytes: time that r can wait ──────────►  │   only if welcome
//! ```
//!
//! The same messages open a connection to rank 0's [own store](crate::own) and one to its [meeting](crate::meeting). The
//! [terms](Terms) say what each side must know. After them, a store gets requests, and a meeting ends with one outcome.
//!
//! A rank tries several endpoints at the same time and gives up slow attempts, so rank 0 may answer connections that the rank no longer
//! uses. A rank therefore counts as arrived once it has joined, on the one connection that it keeps.
//!
//! A message is untrusted. Both sides check the magic number and the version first. Rank 0 answers a rank of another version with its own
//! version, and does not answer a process that sends anything else.
//!
//! Proofs are HMAC-SHA256 with a key of the terms. Each covers the nonces of both sides, so it is valid for one connection, and begins with its
//! direction, so that it cannot be reflected. It also covers the number of the endpoint, so a process that listens on another port of rank 0's
//! host and relays messages is detected. A relay at another address with the same host and port is not detected.

use crate::secret::{NONCE_BYTES, PROOF_BYTES, Purpose, Secret};
use crate::version::VERSION;
use std::time::Duration;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

const MAGIC: [u8; 7] = *b"symmncc";

/// The first bytes of a hello and of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Protocol {
    magic: [u8; 7],
    /// The version as an ASCII digit.
    version: u8,
}

const PROTOCOL: Protocol = Protocol { magic: MAGIC, version: b'0' + VERSION };

/// The reason a message is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeError {
    /// It is not a message of this protocol, or contradicts it.
    Foreign,
    /// Its sender uses another version.
    VersionMismatch { version: u8 },
}

impl Protocol {
    fn check(self) -> Result<(), DecodeError> {
        match self {
            PROTOCOL => Ok(()),
            Protocol { magic: MAGIC, version } => {
                Err(DecodeError::VersionMismatch { version: version.wrapping_sub(b'0') })
            }
            Protocol { .. } => Err(DecodeError::Foreign),
        }
    }
}

/// Size of a hello in bytes.
pub(crate) const HELLO_BYTES: usize = size_of::<HelloMessage>();
/// Size of the start of an answer in bytes.
pub(crate) const HEAD_BYTES: usize = size_of::<HeadMessage>();
/// Size of the rest of an answer in bytes.
pub(crate) const TAIL_BYTES: usize = size_of::<TailMessage>();

/// Number of bytes that rank 0 sends to the others.
pub(crate) const SHARED_BYTES: usize = 128;

/// The bytes that rank 0 sends to the others, such as NCCL's unique id.
pub type Shared = [u8; SHARED_BYTES];

/// Size of a rank's last message in bytes.
pub(crate) const JOIN_BYTES: usize = size_of::<JoinMessage>();

/// The number in a [`JoinMessage`].
const JOIN: u8 = 1;

/// The last message of a rank, on the connection that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct JoinMessage {
    /// Always [`JOIN`].
    join: u8,
    /// The time that the rank can wait for the others, in milliseconds.
    left_ms: U64,
}

/// Returns the last message of a rank that can wait this long.
pub(crate) fn join_bytes(left: Duration) -> [u8; JOIN_BYTES] {
    let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    transmute!(JoinMessage { join: JOIN, left_ms: left_ms.into() })
}

/// Returns the time that a rank can wait, or `None` if the message is not its last one.
pub(crate) fn left_of_join(bytes: &[u8]) -> Option<Duration> {
    let JoinMessage { join, left_ms } = JoinMessage::read_from_bytes(bytes).ok()?;
    (join == JOIN).then(|| Duration::from_millis(left_ms.get()))
}

/// The identity of a job, and the keys that its ranks must know.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Identifies the job and its turn.
    pub(crate) job: u64,
    pub(crate) ranks: u32,
    /// `true` if this process has the job secret. It must be equal on both sides.
    pub(crate) has_secret: bool,
    /// Proves that both sides belong to the job. `None`: any process that connects is believed.
    pub(crate) key: Option<Secret>,
    /// Proves that a refusal is rank 0's, to a rank that lacks the key. `None`: refusals are not authenticated.
    pub(crate) refusal_key: Option<Secret>,
}

impl Terms {
    /// Returns `true` if the peer is a rank of this job other than 0.
    pub(crate) fn is_of(&self, hello: &Hello) -> bool {
        (hello.job, hello.ranks) == (self.job, self.ranks) && (1..self.ranks).contains(&hello.rank)
    }
}

/// Rank 0's answer to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Welcome,
    DifferentJob,
    RankTwice,
    /// The peer must first prove that it knows the secret.
    Challenge,
    /// Rank 0 has a secret, and the peer has none.
    SecretNeeded,
    /// The peer has a secret, and rank 0 has none.
    NoSecret,
    /// The peer has another secret.
    WrongSecret,
    /// The peer uses another version of the messages.
    VersionMismatch,
}

/// The start of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeadMessage {
    protocol: Protocol,
    /// [`Verdict`] as a number.
    verdict: u8,
}

impl Verdict {
    pub(crate) const ALL: [Verdict; 8] = [
        Verdict::Welcome,
        Verdict::DifferentJob,
        Verdict::RankTwice,
        Verdict::Challenge,
        Verdict::SecretNeeded,
        Verdict::NoSecret,
        Verdict::WrongSecret,
        Verdict::VersionMismatch,
    ];

    /// Returns the start of an answer.
    pub(crate) fn head(self) -> [u8; HEAD_BYTES] {
        transmute!(HeadMessage { protocol: PROTOCOL, verdict: self as u8 })
    }

    pub(crate) fn from_head(head: [u8; HEAD_BYTES]) -> Result<Self, DecodeError> {
        let HeadMessage { protocol, verdict } = transmute!(head);
        protocol.check()?;
        Verdict::ALL.into_iter().find(|it| *it as u8 == verdict).ok_or(DecodeError::Foreign)
    }
}

/// The rest of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct TailMessage {
    /// Zeros if the rank is rejected, or connects to a store.
    pub(crate) id: Shared,
    /// Zeros without a key.
    pub(crate) proof: [u8; PROOF_BYTES],
}

/// The introduction of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) job: u64,
    pub(crate) ranks: u32,
    pub(crate) rank: u32,
    /// Equal for all sessions of one process.
    pub(crate) session: u64,
    pub(crate) has_secret: bool,
    pub(crate) nonce: [u8; NONCE_BYTES],
}

/// The bytes of a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloMessage {
    protocol: Protocol,
    job: U64,
    ranks: U32,
    rank: U32,
    session: U64,
    /// 0 or 1.
    has_secret: u8,
    nonce: [u8; NONCE_BYTES],
}

impl Hello {
    pub(crate) fn bytes(&self) -> [u8; HELLO_BYTES] {
        let Hello { job, ranks, rank, session, has_secret, nonce } = *self;
        transmute!(HelloMessage {
            protocol: PROTOCOL,
            job: job.into(),
            ranks: ranks.into(),
            rank: rank.into(),
            session: session.into(),
            has_secret: has_secret.into(),
            nonce,
        })
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let message = HelloMessage::read_from_bytes(bytes).map_err(|_| DecodeError::Foreign)?;
        let HelloMessage { protocol, job, ranks, rank, session, has_secret, nonce } = message;
        protocol.check()?;
        if has_secret > 1 {
            return Err(DecodeError::Foreign);
        }
        let (job, ranks, rank, session) = (job.get(), ranks.get(), rank.get(), session.get());
        Ok(Hello { job, ranks, rank, session, has_secret: has_secret == 1, nonce })
    }
}

/// The data of one exchange, identical on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    pub(crate) hello: Hello,
    /// Nonce of rank 0.
    pub(crate) nonce: [u8; NONCE_BYTES],
    pub(crate) endpoint: u32,
}

impl Exchange {
    /// Returns the proof of the peer.
    pub(crate) fn proof(&self, secret: &Secret) -> [u8; PROOF_BYTES] {
        secret.prove(Purpose::RankToRank0, &[&self.hello.bytes(), &self.nonce, &self.endpoint.to_le_bytes()])
    }

    /// Returns `true` if the peer knows the secret.
    pub(crate) fn is_proof(&self, secret: &Secret, proof: &[u8]) -> bool {
        secret.is_proof(proof, Purpose::RankToRank0, &[&self.hello.bytes(), &self.nonce, &self.endpoint.to_le_bytes()])
    }

    /// Returns the proof of rank 0 for its answer.
    pub(crate) fn answer_proof(&self, secret: &Secret, verdict: Verdict, id: &Shared) -> [u8; PROOF_BYTES] {
        let (hello, endpoint) = (self.hello.bytes(), self.endpoint.to_le_bytes());
        secret.prove(Purpose::Rank0ToRank, &[&hello, &self.nonce, &endpoint, &verdict.head(), id])
    }

    /// Returns `true` if the answer comes from a rank 0 that knows the secret.
    pub(crate) fn is_answer_proof(&self, secret: &Secret, proof: &[u8], verdict: Verdict, id: &Shared) -> bool {
        let (hello, endpoint) = (self.hello.bytes(), self.endpoint.to_le_bytes());
        let parts: [&[u8]; 5] = [&hello, &self.nonce, &endpoint, &verdict.head(), id];
        secret.is_proof(proof, Purpose::Rank0ToRank, &parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello =
        Hello { job: 0x0102, ranks: 3, rank: 2, session: 4, has_secret: true, nonce: [9; NONCE_BYTES] };

    #[test]
    fn messages_have_the_documented_layout() {
        assert_eq!([HELLO_BYTES, HEAD_BYTES, TAIL_BYTES, JOIN_BYTES], [65, 9, 160, 9]);
        let expected = b"symmncc6\x02\x01\0\0\0\0\0\0\x03\0\0\0\x02\0\0\0\x04\0\0\0\0\0\0\0\x01";
        assert_eq!(HELLO.bytes()[..], [&expected[..], &[9; NONCE_BYTES]].concat());
        assert_eq!(Verdict::Challenge.head(), *b"symmncc6\x03");
        assert_eq!(join_bytes(Duration::from_millis(0x0102)), *b"\x01\x02\x01\0\0\0\0\0\0");
    }

    #[test]
    fn decoding_inverts_encoding() {
        for hello in [HELLO, Hello { has_secret: false, ..HELLO }] {
            assert_eq!(Hello::from_bytes(&hello.bytes()), Ok(hello));
        }
        for verdict in Verdict::ALL {
            assert_eq!(Verdict::from_head(verdict.head()), Ok(verdict));
        }
        let left = Duration::from_millis(1234);
        assert_eq!(left_of_join(&join_bytes(left)), Some(left));
        assert_eq!(left_of_join(&[0; JOIN_BYTES]), None);
    }

    #[test]
    fn another_version_is_distinguished_from_another_protocol() {
        let mut hello = HELLO.bytes();
        hello[7] = b'7';
        assert_eq!(Hello::from_bytes(&hello), Err(DecodeError::VersionMismatch { version: 7 }));
        hello[0] = b'S';
        assert_eq!(Hello::from_bytes(&hello), Err(DecodeError::Foreign));
        let mut head = Verdict::Welcome.head();
        head[7] = b'1';
        assert_eq!(Verdict::from_head(head), Err(DecodeError::VersionMismatch { version: 1 }));
    }

    #[test]
    fn garbage_is_rejected() {
        let mut hello = HELLO.bytes();
        hello[32] = 2;
        assert_eq!(Hello::from_bytes(&hello), Err(DecodeError::Foreign));
        assert_eq!(Hello::from_bytes(&HELLO.bytes()[..64]), Err(DecodeError::Foreign));
        let mut head = Verdict::Welcome.head();
        head[8] = Verdict::ALL.len() as u8;
        assert_eq!(Verdict::from_head(head), Err(DecodeError::Foreign));
    }

    const EXCHANGE: Exchange = Exchange { hello: HELLO, nonce: [7; NONCE_BYTES], endpoint: 29500 };

    /// Exchanges that differ from [`EXCHANGE`] in one argument.
    fn other_exchanges() -> [(&'static str, Exchange); 8] {
        let hello = |hello| Exchange { hello, ..EXCHANGE };
        [
            ("job", hello(Hello { job: 0x0103, ..HELLO })),
            ("ranks", hello(Hello { ranks: 4, ..HELLO })),
            ("rank", hello(Hello { rank: 1, ..HELLO })),
            ("session", hello(Hello { session: 5, ..HELLO })),
            ("has_secret", hello(Hello { has_secret: false, ..HELLO })),
            ("the rank's nonce", hello(Hello { nonce: [8; NONCE_BYTES], ..HELLO })),
            ("rank 0's nonce", Exchange { nonce: [8; NONCE_BYTES], ..EXCHANGE }),
            ("endpoint", Exchange { endpoint: 29501, ..EXCHANGE }),
        ]
    }

    #[test]
    fn each_argument_of_an_exchange_is_in_both_proofs() {
        let [secret, other] =
            ["sixteen or more bytes", "another long secret"].map(|text| Secret::new(text.into()).expect("long enough"));
        let id = |byte| [byte; SHARED_BYTES];
        let proof = EXCHANGE.proof(&secret);
        let answer = EXCHANGE.answer_proof(&secret, Verdict::Welcome, &id(1));
        let is_answer = |exchange: &Exchange, secret: &Secret, verdict, id: &Shared| {
            exchange.is_answer_proof(secret, &answer, verdict, id)
        };
        assert!(EXCHANGE.is_proof(&secret, &proof) && is_answer(&EXCHANGE, &secret, Verdict::Welcome, &id(1)));
        for (what, exchange) in other_exchanges() {
            assert!(!exchange.is_proof(&secret, &proof), "{what} is not in the proof");
            assert!(!is_answer(&exchange, &secret, Verdict::Welcome, &id(1)), "{what} is not in the answer's proof");
        }
        assert!(!EXCHANGE.is_proof(&other, &proof) && !is_answer(&EXCHANGE, &other, Verdict::Welcome, &id(1)));
        assert!(!is_answer(&EXCHANGE, &secret, Verdict::Welcome, &id(2)), "the id");
        for verdict in Verdict::ALL.into_iter().filter(|verdict| *verdict != Verdict::Welcome) {
            assert!(!is_answer(&EXCHANGE, &secret, verdict, &id(1)), "{verdict:?} passes with the proof of a welcome");
        }
        // Neither proof passes for the other one.
        assert!(!EXCHANGE.is_proof(&secret, &answer));
        assert!(!EXCHANGE.is_answer_proof(&secret, &proof, Verdict::Welcome, &id(1)));
    }
}
