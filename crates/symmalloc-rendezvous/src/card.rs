//! The messages of a meeting: rank 0's card, the notes of ranks that cannot reach it, and the outcome. All integers are
//! little-endian.
//!
//! ```text
//!  card      8 bytes protocol, 32 bytes token, 2 bytes number of endpoints, endpoints, then an outcome if the meeting is over
//!  endpoint  1 byte kind: 0: 1 byte length, name of a socket; 4: IPv4 address, 2 bytes port; 6: IPv6 address, 2 bytes port
//!  note      32 bytes token of the card that the rank read (zeros: of none), 2 bytes answer
//!  outcome   1 byte: 1: all ranks have arrived; 2: 8 bytes waited ms, 4 bytes number of missing ranks, 4 bytes count of those listed,
//!            and 6 bytes for each: rank, answer or zeros
//! ```
//!
//! The token identifies one meeting of one process: that of a rank 0 that restarted, and what an earlier run left in a
//! store. Only those who can read the store know it. The layout of the card is the same in all versions, so that ranks of two versions reach
//! each other and learn why they cannot meet.

use crate::endpoint::{Endpoint, LocalName};
use crate::error::{EndpointAnswer, RendezvousError};
use crate::secret::TOKEN_BYTES;
use crate::version::VERSION;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

const MAGIC: [u8; 7] = *b"symmcrd";

/// Maximum number of endpoints on a card.
pub(crate) const ENDPOINTS_MAX: usize = 64;

/// Maximum number of missing ranks that an outcome lists. A card with an outcome then fits into a value of a store, and an outcome into the
/// buffer of a socket.
pub(crate) const MISSING_MAX: usize = 1024;

/// A random number that identifies one meeting of one rank 0.
pub(crate) type Token = [u8; TOKEN_BYTES];

/// The addresses and the token that rank 0 publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) token: Token,
    pub(crate) endpoints: Vec<Endpoint>,
    /// Set once the meeting has failed.
    pub(crate) outcome: Option<Outcome>,
}

/// The end of a meeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All ranks have arrived.
    Started,
    /// Ranks are missing; see [`RendezvousError::Missing`].
    Missing {
        /// Ascending, at most [`MISSING_MAX`].
        missing: Vec<u32>,
        /// Number of missing ranks that are not listed.
        more: u32,
        found: Vec<(u32, EndpointAnswer)>,
        waited: Duration,
    },
}

impl Outcome {
    /// Returns the error of a rank that learns this outcome.
    pub(crate) fn result(self) -> Result<(), RendezvousError> {
        match self {
            Outcome::Started => Ok(()),
            Outcome::Missing { missing, more, found, waited } => {
                Err(RendezvousError::Missing { missing, more, found, waited })
            }
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Outcome::Missing { missing, more, found, waited } = self else { return vec![1] };
        let mut bytes = vec![2];
        bytes.extend((waited.as_millis() as u64).to_le_bytes());
        bytes.extend((missing.len() as u32 + more).to_le_bytes());
        bytes.extend((missing.len() as u32).to_le_bytes());
        for rank in missing {
            let answer = found.iter().find(|(of, _)| of == rank).map(|(_, answer)| answer_bytes(*answer));
            bytes.extend(rank.to_le_bytes());
            bytes.extend(answer.unwrap_or_default());
        }
        bytes
    }

    /// Reads an outcome of a job of this many ranks. `read` fills its argument.
    pub(crate) fn read(ranks: u32, mut read: impl FnMut(&mut [u8]) -> io::Result<()>) -> io::Result<Self> {
        let mut kind = [0];
        read(&mut kind)?;
        match kind {
            [1] => Ok(Outcome::Started),
            [2] => {
                let (mut waited, mut all, mut count) = ([0; 8], [0; 4], [0; 4]);
                read(&mut waited)?;
                read(&mut all)?;
                read(&mut count)?;
                let [all, count] = [all, count].map(u32::from_le_bytes);
                let (mut missing, mut found, mut last) = (Vec::new(), Vec::new(), 0);
                if count > all || all >= ranks || count as usize > MISSING_MAX {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                for _ in 0..count {
                    let (mut rank, mut answer) = ([0; 4], [0; 2]);
                    read(&mut rank)?;
                    read(&mut answer)?;
                    let rank = u32::from_le_bytes(rank);
                    if rank <= last || rank >= ranks {
                        return Err(io::ErrorKind::InvalidData.into());
                    }
                    last = rank;
                    missing.push(rank);
                    found.extend(answer_of(answer).map(|answer| (rank, answer)));
                }
                let waited = Duration::from_millis(u64::from_le_bytes(waited));
                Ok(Outcome::Missing { missing, more: all - count, found, waited })
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Card {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = [&MAGIC[..], &[b'0' + VERSION], &self.token].concat();
        bytes.extend((self.endpoints.len() as u16).to_le_bytes());
        for endpoint in &self.endpoints {
            match endpoint {
                Endpoint::Local(name) => {
                    bytes.extend([0, name.as_str().len() as u8]);
                    bytes.extend(name.as_str().as_bytes());
                }
                Endpoint::Network(address) => {
                    match address.ip() {
                        IpAddr::V4(ip) => {
                            bytes.push(4);
                            bytes.extend(ip.octets());
                        }
                        IpAddr::V6(ip) => {
                            bytes.push(6);
                            bytes.extend(ip.octets());
                        }
                    }
                    bytes.extend(address.port().to_le_bytes());
                }
            }
        }
        bytes.extend(self.outcome.as_ref().map(Outcome::bytes).unwrap_or_default());
        bytes
    }

    /// Reads the card of a job of this many ranks. Fails if the bytes are not one.
    pub(crate) fn from_bytes(bytes: &[u8], ranks: u32) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let mut rest = bytes;
        let mut read = |into: &mut [u8]| rest.read_exact(into);
        let (mut protocol, mut token, mut count) = ([0; 8], [0; TOKEN_BYTES], [0; 2]);
        read(&mut protocol)?;
        read(&mut token)?;
        read(&mut count)?;
        let count = usize::from(u16::from_le_bytes(count));
        if protocol[..7] != MAGIC || count > ENDPOINTS_MAX {
            return Err(invalid());
        }
        let mut endpoints = Vec::new();
        for _ in 0..count {
            let mut kind = [0];
            read(&mut kind)?;
            endpoints.push(match kind {
                [0] => {
                    let mut length = [0];
                    read(&mut length)?;
                    let mut name = vec![0; length[0].into()];
                    read(&mut name)?;
                    Endpoint::Local(LocalName::from_text(std::str::from_utf8(&name).map_err(|_| invalid())?))
                }
                [4] => {
                    let (mut ip, mut port) = ([0; 4], [0; 2]);
                    read(&mut ip)?;
                    read(&mut port)?;
                    Endpoint::Network(SocketAddr::new(ip.into(), u16::from_le_bytes(port)))
                }
                [6] => {
                    let (mut ip, mut port) = ([0; 16], [0; 2]);
                    read(&mut ip)?;
                    read(&mut port)?;
                    Endpoint::Network(SocketAddr::new(ip.into(), u16::from_le_bytes(port)))
                }
                _ => return Err(invalid()),
            });
        }
        // Another version may have other outcomes. Its ranks answer at the endpoints, or nobody does.
        let has_outcome = !rest.is_empty() && protocol[7] == b'0' + VERSION;
        let outcome = has_outcome.then(|| Outcome::read(ranks, |into| rest.read_exact(into))).transpose()?;
        Ok(Card { token, endpoints, outcome })
    }
}

/// Returns the note of a rank that read a card with this token, or none.
pub(crate) fn note(token: Option<&Token>, answer: EndpointAnswer) -> Vec<u8> {
    [&token.copied().unwrap_or_default()[..], &answer_bytes(answer)].concat()
}

/// Returns the answer in a note, unless the rank read the card of another meeting.
pub(crate) fn answer_of_note(note: &[u8], token: &Token) -> Option<EndpointAnswer> {
    let (of, answer) = note.split_first_chunk::<TOKEN_BYTES>()?;
    let is_ours = of == token || *of == Token::default();
    answer_of(answer.try_into().ok().filter(|_| is_ours)?)
}

/// Errors of an unreachable address that a note distinguishes.
const KINDS: [io::ErrorKind; 5] = [
    io::ErrorKind::Other,
    io::ErrorKind::TimedOut,
    io::ErrorKind::HostUnreachable,
    io::ErrorKind::NetworkUnreachable,
    io::ErrorKind::ConnectionReset,
];

/// Returns an answer as its number, which is not 0, and a detail.
fn answer_bytes(answer: EndpointAnswer) -> [u8; 2] {
    match answer {
        EndpointAnswer::NotListening => [1, 0],
        EndpointAnswer::Unreachable { kind } => [2, KINDS.iter().position(|it| *it == kind).unwrap_or(0) as u8],
        EndpointAnswer::Silent => [3, 0],
        EndpointAnswer::Foreign => [4, 0],
        EndpointAnswer::Contradiction => [5, 0],
        EndpointAnswer::DifferentJob => [6, 0],
        EndpointAnswer::VersionMismatch { version } => [7, version],
        EndpointAnswer::NoSecret => [8, 0],
        EndpointAnswer::SecretNeeded => [9, 0],
        EndpointAnswer::SecretMismatch => [10, 0],
    }
}

/// Returns the answer with this number and detail, if there is one.
fn answer_of(bytes: [u8; 2]) -> Option<EndpointAnswer> {
    Some(match bytes {
        [1, _] => EndpointAnswer::NotListening,
        [2, kind] => EndpointAnswer::Unreachable { kind: *KINDS.get(usize::from(kind))? },
        [3, _] => EndpointAnswer::Silent,
        [4, _] => EndpointAnswer::Foreign,
        [5, _] => EndpointAnswer::Contradiction,
        [6, _] => EndpointAnswer::DifferentJob,
        [7, version] => EndpointAnswer::VersionMismatch { version },
        [8, _] => EndpointAnswer::NoSecret,
        [9, _] => EndpointAnswer::SecretNeeded,
        [10, _] => EndpointAnswer::SecretMismatch,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: Token = [7; TOKEN_BYTES];

    fn card(outcome: Option<Outcome>) -> Card {
        let network = |address: &str| Endpoint::Network(address.parse().expect("the value should be an address"));
        let local = Endpoint::Local(LocalName::from_text("symmalloc-0-7"));
        Card { token: TOKEN, endpoints: vec![local, network("192.0.2.1:4000"), network("[2001:db8::1]:5")], outcome }
    }

    fn missing() -> Outcome {
        let found = vec![(3, EndpointAnswer::VersionMismatch { version: 4 })];
        Outcome::Missing { missing: vec![2, 3], more: 0, found, waited: Duration::from_millis(1500) }
    }

    #[test]
    fn a_card_has_the_documented_layout() {
        let endpoints = vec![Endpoint::Network("192.0.2.1:258".parse().expect("the value should be an address"))];
        let bytes = Card { token: TOKEN, endpoints, outcome: Some(missing()) }.bytes();
        let expected = [
            &b"symmcrd6"[..],
            &TOKEN,
            b"\x01\0\x04\xc0\0\x02\x01\x02\x01",
            b"\x02\xdc\x05\0\0\0\0\0\0\x02\0\0\0\x02\0\0\0\x02\0\0\0\0\0\x03\0\0\0\x07\x04",
        ];
        assert_eq!(bytes, expected.concat());
    }

    #[test]
    fn decoding_inverts_encoding_and_rejects_every_prefix_of_a_card() {
        for card in [card(None), card(Some(Outcome::Started)), card(Some(missing()))] {
            let bytes = card.bytes();
            assert_eq!(Card::from_bytes(&bytes, 4).expect("a card"), card);
            let open = Card { outcome: None, ..card.clone() }.bytes().len();
            for length in (0..bytes.len()).filter(|length| *length != open) {
                assert!(Card::from_bytes(&bytes[..length], 4).is_err(), "{length} of {} bytes", bytes.len());
            }
        }
    }

    #[test]
    fn an_outcome_names_each_missing_rank_once_and_no_others() {
        for (missing, ranks) in
            [(vec![1, 2, 3], 3), (vec![2, 2], 4), (vec![2, 1], 4), (vec![0], 4), (vec![u32::MAX], 4)]
        {
            let outcome = Outcome::Missing { missing, more: 0, found: vec![], waited: Duration::ZERO };
            assert!(
                Card::from_bytes(&card(Some(outcome.clone())).bytes(), ranks).is_err(),
                "{outcome:?} of {ranks} ranks"
            );
        }
    }

    #[test]
    fn a_card_of_another_version_can_be_read() {
        let mut bytes = card(None).bytes();
        bytes[7] += 1;
        assert_eq!(Card::from_bytes(&bytes, 4).expect("a card"), card(None));
    }

    #[test]
    fn a_note_counts_for_the_card_that_its_rank_read() {
        let answers = [
            EndpointAnswer::NotListening,
            EndpointAnswer::Unreachable { kind: io::ErrorKind::HostUnreachable },
            EndpointAnswer::Silent,
            EndpointAnswer::Foreign,
            EndpointAnswer::Contradiction,
            EndpointAnswer::DifferentJob,
            EndpointAnswer::VersionMismatch { version: 3 },
            EndpointAnswer::NoSecret,
            EndpointAnswer::SecretNeeded,
            EndpointAnswer::SecretMismatch,
        ];
        for answer in answers {
            assert_eq!(answer_of_note(&note(Some(&TOKEN), answer), &TOKEN), Some(answer));
            assert_eq!(answer_of_note(&note(None, answer), &TOKEN), Some(answer));
            assert_eq!(answer_of_note(&note(Some(&[8; TOKEN_BYTES]), answer), &TOKEN), None);
        }
        assert_eq!(answer_of_note(b"short", &TOKEN), None);
    }
}
