//! The messages by which rank 0 and another rank identify each other.
//!
//! ```text
//!  rank r                                                       rank 0
//!    │ ── hello: magic, job, ranks, r, visit, secret?, nonce ──►  │
//!    │ ◄── magic, challenge, nonce ─────────────────────────────  │   only with a job secret
//!    │ ── proof of r: hello, nonce, door ──────────────────────►  │   only with a job secret
//!    │ ◄── magic, verdict, id, proof of 0 ──────────────────────  │   the proof covers all before it
//! ```
//!
//! Proofs are HMAC-SHA256 with the job secret. Each covers the nonces of both sides, so it is valid for one connection, and begins with its
//! direction, so that it cannot be reflected. It also covers the number of the door, so a process that listens on another port of rank 0's
//! host and relays messages is detected. A relay at another address with the same host and port is not detected.

use crate::rendezvous::secret::{NONCE_BYTES, PROOF_BYTES, Purpose, Secret};
use crate::rendezvous::unique_id::UniqueId;

/// The first bytes of every message.
pub(super) const MAGIC: [u8; 8] = *b"symmncc2";
/// Size of a hello: magic, job, ranks, rank, visit, presence of a secret, nonce.
pub(super) const HELLO_BYTES: usize = 8 + 8 + 4 + 4 + 8 + 1 + NONCE_BYTES;
/// Size of the start of an answer: magic, verdict.
pub(super) const HEAD_BYTES: usize = 8 + 1;
/// Size of the rest of an answer: id, proof.
pub(super) const TAIL_BYTES: usize = UniqueId::BYTES + PROOF_BYTES;

/// Rank 0's answer to a visitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Welcome,
    OtherJob,
    RankTwice,
    /// The visitor must first prove that it knows the secret.
    Challenge,
    /// Rank 0 has a secret, and the visitor has none.
    SecretNeeded,
    /// The visitor has a secret, and rank 0 has none.
    NoSecret,
    /// The visitor has another secret.
    WrongSecret,
}

impl Verdict {
    const ALL: [Verdict; 7] = [
        Verdict::Welcome,
        Verdict::OtherJob,
        Verdict::RankTwice,
        Verdict::Challenge,
        Verdict::SecretNeeded,
        Verdict::NoSecret,
        Verdict::WrongSecret,
    ];

    /// Returns the start of an answer.
    pub(super) fn head(self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(&MAGIC);
        head[8] = self as u8;
        head
    }

    pub(super) fn from_head(head: &[u8; HEAD_BYTES]) -> Option<Self> {
        let verdict = Verdict::ALL.into_iter().find(|it| *it as u8 == head[8]);
        verdict.filter(|_| head[..8] == MAGIC)
    }
}

/// The introduction of a visitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) job: u64,
    pub(super) ranks: u32,
    pub(super) rank: u32,
    /// Equal for all visits of one process.
    pub(super) visit: u64,
    pub(super) has_secret: bool,
    pub(super) nonce: [u8; NONCE_BYTES],
}

impl Hello {
    pub(super) fn bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.job.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.ranks.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.rank.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.visit.to_le_bytes());
        bytes[32] = self.has_secret.into();
        bytes[33..].copy_from_slice(&self.nonce);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let hello = Hello {
            job: u64_at(8),
            ranks: u32_at(16),
            rank: u32_at(20),
            visit: u64_at(24),
            has_secret: bytes[32] == 1,
            nonce: std::array::from_fn(|index| bytes[33 + index]),
        };
        (bytes[..8] == MAGIC && bytes[32] <= 1).then_some(hello)
    }
}

/// The data of one exchange, identical on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    pub(super) hello: Hello,
    /// Nonce of rank 0.
    pub(super) nonce: [u8; NONCE_BYTES],
    pub(super) door: u32,
}

impl Exchange {
    /// Returns the proof of the visitor.
    pub(super) fn proof(&self, secret: &Secret) -> [u8; PROOF_BYTES] {
        secret.prove(Purpose::RankToRank0, &[&self.hello.bytes(), &self.nonce, &self.door.to_le_bytes()])
    }

    /// Returns `true` if the visitor knows the secret.
    pub(super) fn is_proof(&self, secret: &Secret, proof: &[u8]) -> bool {
        secret.is_proof(proof, Purpose::RankToRank0, &[&self.hello.bytes(), &self.nonce, &self.door.to_le_bytes()])
    }

    /// Returns the proof of rank 0 for its answer.
    pub(super) fn answer_proof(&self, secret: &Secret, verdict: Verdict, id: &UniqueId) -> [u8; PROOF_BYTES] {
        let (hello, door) = (self.hello.bytes(), self.door.to_le_bytes());
        secret.prove(Purpose::Rank0ToRank, &[&hello, &self.nonce, &door, &verdict.head(), id.as_bytes()])
    }

    /// Returns `true` if the answer comes from a rank 0 that knows the secret.
    pub(super) fn is_answer_proof(&self, secret: &Secret, proof: &[u8], verdict: Verdict, id: &UniqueId) -> bool {
        let (hello, door) = (self.hello.bytes(), self.door.to_le_bytes());
        let parts: [&[u8]; 5] = [&hello, &self.nonce, &door, &verdict.head(), id.as_bytes()];
        secret.is_proof(proof, Purpose::Rank0ToRank, &parts)
    }
}
