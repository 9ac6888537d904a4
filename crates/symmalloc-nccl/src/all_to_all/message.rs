//! The messages with which ranks exchange or compare splits. All integers are little-endian. All ranks gather one message of equal length
//! from every rank, so they reach the same result.
//!
//! ```text
//!  head, 16 bytes │ rows sent to rank 0 ... n-1, 8 bytes each │ rows expected from rank 0 ... n-1, 8 bytes each
//!                                                               only if calls are checked; zeros in an exchange
//! ```
//! A rank that cannot take part sends a refusal, so that the others do not wait.
//!
//! A message from another rank is untrusted. Every bit pattern of the right length is a valid [`SplitsMessage`], and an unknown kind counts
//! as a different call.

use crate::all_to_all::error::AllToAllError;
use crate::all_to_all::splits::{Side, Splits};
use crate::all_to_all::transfers::Transfers;
use symmalloc_agreement::Gathered;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the messages. Increment it when they change.
const VERSION: u32 = 1;

/// The purpose of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageKind {
    /// The sender cannot take part.
    Refusal = 1,
    /// The numbers of rows that the sender will send.
    Exchange,
    /// The numbers of rows that the sender is about to send and to receive.
    Check,
}

/// The start of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    /// [`VERSION`].
    version: U32,
    /// [`MessageKind`] as a number.
    kind: U32,
    /// Size of a row in bytes; 0 unless the message is a check.
    row_bytes: U64,
}

/// A message.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SplitsMessage {
    head: Head,
    /// Number of rows for each rank: first the rows that are sent, and then, if calls are checked, the rows that are expected.
    rows: [U64],
}

/// A codec for the messages of one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Messages {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// `true` if calls are checked, on all ranks.
    pub(super) is_checked: bool,
}

impl Messages {
    /// Returns the number of entries in [`SplitsMessage::rows`].
    fn row_count(&self) -> usize {
        if self.is_checked { 2 * self.ranks } else { self.ranks }
    }

    fn encode(&self, kind: MessageKind, row_bytes: u64, rows: impl Iterator<Item = u64>) -> Vec<u8> {
        let head = Head { version: VERSION.into(), kind: (kind as u32).into(), row_bytes: row_bytes.into() };
        let mut message = head.as_bytes().to_vec();
        rows.take(self.row_count()).for_each(|rows| message.extend_from_slice(&rows.to_le_bytes()));
        message.resize(size_of::<Head>() + self.row_count() * size_of::<U64>(), 0);
        message
    }

    /// Encodes the message of a rank that cannot take part.
    pub(super) fn refusal(&self) -> Vec<u8> {
        self.encode(MessageKind::Refusal, 0, std::iter::empty())
    }

    /// Encodes the numbers of rows that this rank will send.
    pub(super) fn exchange(&self, rows: &[u64]) -> Vec<u8> {
        self.encode(MessageKind::Exchange, 0, rows.iter().copied())
    }

    /// Encodes the call that this rank is about to make.
    pub(super) fn check(&self, transfers: &Transfers<'_>) -> Vec<u8> {
        let rows = |side| (0..self.ranks).map(move |peer| transfers.rows(side, peer));
        self.encode(MessageKind::Check, transfers.row_bytes, rows(Side::Input).chain(rows(Side::Output)))
    }

    /// Decodes the messages of all ranks and returns the resulting splits.
    pub(super) fn read_exchange(&self, gathered: &Gathered) -> Result<Splits, AllToAllError> {
        let messages = self.read(gathered, MessageKind::Exchange)?;
        let counts: Vec<u64> =
            messages.iter().flat_map(|message| &message.rows[..self.ranks]).map(|rows| rows.get()).collect();
        Ok(Splits::of_matrix(counts, self.ranks, self.rank)?)
    }

    /// Checks that every rank sends what its receiver expects.
    pub(super) fn read_check(&self, gathered: &Gathered) -> Result<(), AllToAllError> {
        let messages = self.read(gathered, MessageKind::Check)?;
        for (from, sender) in messages.iter().enumerate() {
            for (to, receiver) in messages.iter().enumerate() {
                let (sent_rows, expected_rows) = (sender.rows[to].get(), receiver.rows[self.ranks + from].get());
                let (sent_row_bytes, expected_row_bytes) = (sender.head.row_bytes.get(), receiver.head.row_bytes.get());
                let bytes = |rows: u64, row_bytes: u64| u128::from(rows) * u128::from(row_bytes);
                if bytes(sent_rows, sent_row_bytes) != bytes(expected_rows, expected_row_bytes) {
                    return Err(AllToAllError::Disagreement {
                        from,
                        to,
                        sent_rows,
                        sent_row_bytes,
                        expected_rows,
                        expected_row_bytes,
                    });
                }
            }
        }
        Ok(())
    }

    /// Returns the messages of all ranks, or an error if one of them is not of this kind.
    fn read<'a>(&self, gathered: &'a Gathered, kind: MessageKind) -> Result<Vec<&'a SplitsMessage>, AllToAllError> {
        let decode = |(rank, bytes): (usize, &'a [u8])| {
            let message = SplitsMessage::ref_from_bytes_with_elems(bytes, self.row_count());
            let message = message.map_err(|_| AllToAllError::DifferentCalls { rank })?;
            let version = message.head.version.get();
            if version != VERSION {
                return Err(AllToAllError::VersionMismatch { rank, version, expected: VERSION });
            }
            Ok(message)
        };
        let messages: Vec<&SplitsMessage> =
            gathered.iter().enumerate().map(|(rank, bytes)| decode((rank, bytes))).collect::<Result<_, _>>()?;
        let is = |kind: MessageKind| move |message: &&SplitsMessage| message.head.kind == kind as u32;
        if let Some(rank) = messages.iter().position(is(MessageKind::Refusal)) {
            return Err(AllToAllError::Refused { rank });
        }
        match messages.iter().position(|message| !is(kind)(message)) {
            Some(rank) => Err(AllToAllError::DifferentCalls { rank }),
            None => Ok(messages),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all_to_all::transfers::CallShape;

    fn messages(rank: usize) -> Messages {
        Messages { rank, ranks: 2, is_checked: true }
    }

    fn gathered(all: &[Vec<u8>]) -> Gathered {
        Gathered::new(all.concat(), all[0].len())
    }

    fn check(rank: usize, splits: &Splits, row_elements: usize) -> Vec<u8> {
        let shape = CallShape { input_len: 100, output_len: 100, element_bytes: 4, row_elements };
        messages(rank).check(&Transfers::new(rank, 2, Some(splits), shape).expect("the transfers are valid"))
    }

    #[test]
    fn an_exchange_returns_the_splits_of_every_rank() {
        let all = gathered(&[messages(0).exchange(&[5, 3]), messages(1).exchange(&[0, 7])]);
        let splits = messages(1).read_exchange(&all).expect("the splits are valid");
        assert_eq!((splits.input().rows(), splits.output().rows()), (&[0, 7][..], &[3, 7][..]));
        assert_eq!(splits.output_rows_max(), Some(10));
    }

    #[test]
    fn a_refusal_is_reported_on_every_rank() {
        let all = gathered(&[messages(0).exchange(&[5, 3]), messages(1).refusal()]);
        for rank in 0..2 {
            assert!(matches!(messages(rank).read_exchange(&all), Err(AllToAllError::Refused { rank: 1 })));
        }
    }

    #[test]
    fn different_calls_are_reported() {
        let splits = Splits::sending(&[1, 1]).receiving(&[1, 1]).expect("the splits are valid");
        let all = gathered(&[messages(0).exchange(&[5, 3]), check(1, &splits, 2)]);
        assert!(matches!(messages(0).read_exchange(&all), Err(AllToAllError::DifferentCalls { rank: 1 })));
        assert!(matches!(messages(1).read_check(&all), Err(AllToAllError::DifferentCalls { rank: 0 })));
    }

    #[test]
    fn a_disagreement_names_sender_receiver_and_rows() {
        let one = Splits::sending(&[1, 4]).receiving(&[1, 2]).expect("the splits are valid");
        let other = Splits::sending(&[2, 1]).receiving(&[4, 1]).expect("the splits are valid");
        let all = gathered(&[check(0, &one, 2), check(1, &other, 2)]);
        assert!(messages(0).read_check(&all).is_ok());

        let wrong = Splits::sending(&[2, 1]).receiving(&[3, 1]).expect("the splits are valid");
        let all = gathered(&[check(0, &one, 2), check(1, &wrong, 2)]);
        for rank in 0..2 {
            let Err(AllToAllError::Disagreement { from, to, sent_rows, expected_rows, .. }) =
                messages(rank).read_check(&all)
            else {
                panic!("they disagree");
            };
            assert_eq!((from, to, sent_rows, expected_rows), (0, 1, 4, 3));
        }
        let all = gathered(&[check(0, &one, 2), check(1, &other, 3)]);
        assert!(matches!(
            messages(0).read_check(&all),
            Err(AllToAllError::Disagreement { from: 0, to: 1, sent_row_bytes: 8, expected_row_bytes: 12, .. })
        ));
    }

    #[test]
    fn messages_have_the_documented_layout() {
        let plain = Messages { rank: 0, ranks: 2, is_checked: false };
        let expected = b"\x01\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0";
        assert_eq!(plain.exchange(&[5, 3]), expected);
        assert_eq!(messages(0).exchange(&[5, 3]), [&expected[..], &[0; 16]].concat());
        let splits = Splits::sending(&[1, 4]).receiving(&[1, 2]).expect("the splits are valid");
        let words: Vec<u64> = check(0, &splits, 2).as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(words, [3 << 32 | 1, 8, 1, 4, 1, 2]);
    }

    #[test]
    fn another_version_is_an_error_that_states_it() {
        let mut other = messages(1).exchange(&[0, 7]);
        other[0] = 9;
        let all = gathered(&[messages(0).exchange(&[5, 3]), other]);
        assert_eq!(
            messages(0).read_exchange(&all),
            Err(AllToAllError::VersionMismatch { rank: 1, version: 9, expected: VERSION })
        );
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic() {
        let own = messages(0).exchange(&[5, 3]);
        let mut garbage = vec![0xff; own.len()];
        assert!(matches!(
            messages(0).read_exchange(&gathered(&[own.clone(), garbage.clone()])),
            Err(AllToAllError::VersionMismatch { rank: 1, .. })
        ));
        garbage[..8].copy_from_slice(&[1, 0, 0, 0, 3, 0, 0, 0]);
        let all = gathered(&[garbage.clone(), garbage.clone()]);
        assert_eq!(messages(0).read_check(&all), Ok(()), "equal numbers agree, however large");
        garbage[4] = 2;
        let all = gathered(&[garbage.clone(), garbage]);
        assert!(matches!(messages(0).read_exchange(&all), Err(AllToAllError::Splits(_))));
        let short = gathered(&[own[8..].to_vec(), own[8..].to_vec()]);
        assert_eq!(messages(0).read_exchange(&short), Err(AllToAllError::DifferentCalls { rank: 0 }));
    }
}
