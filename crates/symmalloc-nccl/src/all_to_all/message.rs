//! The messages with which ranks exchange or compare splits. All ranks gather one message of equal length from every rank, so they reach
//! the same result.
//!
//! ```text
//!  kind │ row bytes │ rows sent to rank 0 ... n-1 │ rows expected from rank 0 ... n-1
//!  exchange: 0                                      only if calls are checked, so that lengths are equal: 0
//! ```
//! A rank that cannot take part sends a refusal, so that the others do not wait.

use crate::all_to_all::error::AllToAllError;
use crate::all_to_all::splits::{Side, Splits};
use crate::all_to_all::transfers::Transfers;
use symmalloc_agreement::Gathered;

/// The purpose of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageKind {
    /// The sender cannot take part.
    Refusal = 1,
    /// The rows that the sender will send.
    Exchange,
    /// The rows that the sender is about to send and to receive.
    Check,
}

const WORD_BYTES: usize = size_of::<u64>();

/// Encodes and decodes the messages of one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Messages {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// `true` if calls are checked, on all ranks.
    pub(super) is_checked: bool,
}

impl Messages {
    fn words(&self, kind: MessageKind, row_bytes: u64, rows: impl Iterator<Item = u64>) -> Vec<u8> {
        let sides = if self.is_checked { 2 } else { 1 };
        let mut message = Vec::with_capacity((2 + sides * self.ranks) * WORD_BYTES);
        let words = [kind as u64, row_bytes].into_iter().chain(rows).chain(std::iter::repeat(0));
        words.take(2 + sides * self.ranks).for_each(|word| message.extend(word.to_le_bytes()));
        message
    }

    /// Encodes the message of a rank that cannot take part.
    pub(super) fn refusal(&self) -> Vec<u8> {
        self.words(MessageKind::Refusal, 0, std::iter::empty())
    }

    /// Encodes the rows that this rank will send.
    pub(super) fn exchange(&self, rows: &[u64]) -> Vec<u8> {
        self.words(MessageKind::Exchange, 0, rows.iter().copied())
    }

    /// Encodes the call that this rank is about to make.
    pub(super) fn check(&self, transfers: &Transfers<'_>) -> Vec<u8> {
        let rows = |side| (0..self.ranks).map(move |peer| transfers.rows(side, peer));
        self.words(MessageKind::Check, transfers.row_bytes, rows(Side::Input).chain(rows(Side::Output)))
    }

    /// Decodes the messages of all ranks and returns the resulting splits.
    pub(super) fn read_exchange(&self, gathered: &Gathered) -> Result<Splits, AllToAllError> {
        let messages = self.read(gathered, MessageKind::Exchange)?;
        let counts: Vec<u64> = messages.iter().flat_map(|words| &words[2..2 + self.ranks]).copied().collect();
        Ok(Splits::of_matrix(counts, self.ranks, self.rank)?)
    }

    /// Checks that every rank sends what its receiver expects.
    pub(super) fn read_check(&self, gathered: &Gathered) -> Result<(), AllToAllError> {
        let messages = self.read(gathered, MessageKind::Check)?;
        for (from, sender) in messages.iter().enumerate() {
            for (to, receiver) in messages.iter().enumerate() {
                let (sent_rows, expected_rows) = (sender[2 + to], receiver[2 + self.ranks + from]);
                let (sent_row_bytes, expected_row_bytes) = (sender[1], receiver[1]);
                if sent_rows * sent_row_bytes != expected_rows * expected_row_bytes {
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

    /// Returns the messages as words, or an error if one is not of this kind.
    fn read(&self, gathered: &Gathered, kind: MessageKind) -> Result<Vec<Vec<u64>>, AllToAllError> {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("whole words"));
        let messages: Vec<Vec<u64>> =
            gathered.iter().map(|message| message.chunks_exact(WORD_BYTES).map(word).collect()).collect();
        let is = |kind: MessageKind| move |words: &Vec<u64>| words.first() == Some(&(kind as u64));
        if let Some(rank) = messages.iter().position(is(MessageKind::Refusal)) {
            return Err(AllToAllError::Refused { rank });
        }
        match messages.iter().position(|words| !is(kind)(words)) {
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
    fn what_is_exchanged_are_the_splits_of_every_rank() {
        let all = gathered(&[messages(0).exchange(&[5, 3]), messages(1).exchange(&[0, 7])]);
        let splits = messages(1).read_exchange(&all).expect("the splits are valid");
        assert_eq!((splits.input().rows(), splits.output().rows()), (&[0, 7][..], &[3, 7][..]));
        assert_eq!(splits.output_rows_max(), Some(10));
    }

    #[test]
    fn a_rank_that_cannot_take_part_is_named_to_all() {
        let all = gathered(&[messages(0).exchange(&[5, 3]), messages(1).refusal()]);
        for rank in 0..2 {
            assert!(matches!(messages(rank).read_exchange(&all), Err(AllToAllError::Refused { rank: 1 })));
        }
    }

    #[test]
    fn ranks_in_different_calls_are_told() {
        let splits = Splits::sending(&[1, 1]).receiving(&[1, 1]).expect("the splits are valid");
        let all = gathered(&[messages(0).exchange(&[5, 3]), check(1, &splits, 2)]);
        assert!(matches!(messages(0).read_exchange(&all), Err(AllToAllError::DifferentCalls { rank: 1 })));
        assert!(matches!(messages(1).read_check(&all), Err(AllToAllError::DifferentCalls { rank: 0 })));
    }

    #[test]
    fn ranks_that_disagree_are_told_who_sends_what() {
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
}
