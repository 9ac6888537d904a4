//! The transfers of one call in bytes, computed and checked before anything is submitted.

use crate::all_to_all::error::AllToAllError;
use crate::all_to_all::splits::{Side, Splits};

/// A buffer or a part of a buffer. An empty region can have the address 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) address: u64,
    pub(crate) size_bytes: u64,
}

/// The arguments of a call: the lengths of its buffers, and the sizes of elements and rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallShape {
    pub(super) input_len: usize,
    pub(super) output_len: usize,
    pub(super) element_bytes: usize,
    pub(super) row_elements: usize,
}

/// The transfers of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfers<'a> {
    rows: Rows<'a>,
    pub(super) row_bytes: u64,
    /// Number of bytes sent from the input.
    pub(super) input_bytes: u64,
    /// Number of bytes written to the output.
    pub(super) output_bytes: u64,
}

/// The rows for each rank.
#[derive(Clone, Copy, Debug)]
enum Rows<'a> {
    Split(&'a Splits),
    /// The same number of rows from and to every rank.
    Equal(u64),
}

impl<'a> Transfers<'a> {
    /// Computes the transfers of these splits. Without splits, the whole buffers are split into equal parts.
    pub(super) fn new(
        rank: usize,
        ranks: usize,
        splits: Option<&'a Splits>,
        shape: CallShape,
    ) -> Result<Self, AllToAllError> {
        let row_bytes = (shape.row_elements as u64).checked_mul(shape.element_bytes as u64);
        let row_bytes = row_bytes.ok_or(AllToAllError::RowTooLarge { row_elements: shape.row_elements })?;
        let rows = match splits {
            None => Rows::Equal(equal_rows(ranks, shape)?),
            Some(splits) => {
                if splits.ranks() != ranks {
                    return Err(AllToAllError::SplitCount { given: splits.ranks(), ranks });
                }
                let (sent, received) = (splits.input().rows()[rank], splits.output().rows()[rank]);
                if sent != received {
                    return Err(AllToAllError::OwnPart { rank, sent, received });
                }
                Rows::Split(splits)
            }
        };
        let mut transfers = Transfers { rows, row_bytes, input_bytes: 0, output_bytes: 0 };
        transfers.input_bytes = transfers.used_bytes(Side::Input, ranks, shape)?;
        transfers.output_bytes = transfers.used_bytes(Side::Output, ranks, shape)?;
        Ok(transfers)
    }

    /// Returns the number of rows that are sent to a rank or received from it.
    pub(super) fn rows(&self, side: Side, peer: usize) -> u64 {
        match (self.rows, side) {
            (Rows::Equal(rows), _) => rows,
            (Rows::Split(splits), Side::Input) => splits.input().rows()[peer],
            (Rows::Split(splits), Side::Output) => splits.output().rows()[peer],
        }
    }

    /// Returns the region of a rank's rows in a buffer at this address, or `None` if the rank has no rows.
    pub(super) fn part(&self, side: Side, address: u64, peer: usize) -> Option<Region> {
        let first = match (self.rows, side) {
            (Rows::Equal(rows), _) => rows * peer as u64,
            (Rows::Split(splits), Side::Input) => splits.input().displacements()[peer],
            (Rows::Split(splits), Side::Output) => splits.output().displacements()[peer],
        };
        // Neither product overflows, because the part lies within the buffer.
        let size_bytes = self.rows(side, peer) * self.row_bytes;
        (size_bytes > 0).then(|| Region { address: address + first * self.row_bytes, size_bytes })
    }

    /// Returns the number of bytes that the call uses, from the start of a buffer.
    fn used_bytes(&self, side: Side, ranks: usize, shape: CallShape) -> Result<u64, AllToAllError> {
        let rows = match (self.rows, side) {
            (Rows::Equal(rows), _) => rows * ranks as u64,
            (Rows::Split(splits), Side::Input) => splits.input().total(),
            (Rows::Split(splits), Side::Output) => splits.output().total(),
        };
        let len = if side == Side::Input { shape.input_len } else { shape.output_len };
        let there = len as u64 * shape.element_bytes as u64;
        let needed = rows.checked_mul(self.row_bytes).filter(|needed| *needed <= there);
        let row_elements = shape.row_elements;
        needed.ok_or(AllToAllError::BufferTooShort { side, rows, row_elements, len })
    }
}

/// Returns the number of rows per rank if whole buffers are split equally.
fn equal_rows(ranks: usize, shape: CallShape) -> Result<u64, AllToAllError> {
    let CallShape { input_len, output_len, row_elements, .. } = shape;
    let each = ranks.checked_mul(row_elements).filter(|each| *each > 0);
    let fits = match each {
        Some(each) => input_len == output_len && input_len % each == 0,
        None => input_len == 0 && output_len == 0,
    };
    if !fits {
        return Err(AllToAllError::Uneven { input_len, output_len, ranks, row_elements });
    }
    Ok(each.map_or(0, |each| (input_len / each) as u64))
}

impl Region {
    /// Returns `true` if the regions share a byte.
    pub(crate) fn overlaps(&self, other: &Region) -> bool {
        let is_empty = self.size_bytes == 0 || other.size_bytes == 0;
        !is_empty
            && self.address < other.address.saturating_add(other.size_bytes)
            && other.address < self.address.saturating_add(self.size_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(len: usize, element_bytes: usize, row_elements: usize) -> CallShape {
        CallShape { input_len: len, output_len: len, element_bytes, row_elements }
    }

    fn transfers(splits: &Splits, rank: usize, len: usize) -> Result<Transfers<'_>, AllToAllError> {
        Transfers::new(rank, splits.ranks(), Some(splits), shape(len, 4, 3))
    }

    #[test]
    fn rows_become_bytes_at_their_displacements() {
        let splits = Splits::sending(&[2, 0, 5]).receiving(&[2, 1, 0]).expect("the splits are valid");
        let transfers = transfers(&splits, 0, 21).expect("the transfers are valid");
        assert_eq!((transfers.row_bytes, transfers.input_bytes, transfers.output_bytes), (12, 84, 36));
        assert_eq!(transfers.part(Side::Input, 1000, 2), Some(Region { address: 1024, size_bytes: 60 }));
        assert_eq!(transfers.part(Side::Input, 1000, 1), None);
        assert_eq!(transfers.part(Side::Output, 1000, 1), Some(Region { address: 1024, size_bytes: 12 }));
    }

    #[test]
    fn buffers_that_are_too_short_are_errors() {
        let splits = Splits::sending(&[2, 0, 5]).receiving(&[2, 1, 0]).expect("the splits are valid");
        let refused = transfers(&splits, 0, 20).expect_err("too short");
        assert!(matches!(
            refused,
            AllToAllError::BufferTooShort { side: Side::Input, rows: 7, row_elements: 3, len: 20 }
        ));
        let refused = transfers(&splits, 1, 21).expect_err("the own part differs");
        assert!(matches!(refused, AllToAllError::OwnPart { rank: 1, sent: 0, received: 1 }));
        let refused = Transfers::new(0, 4, Some(&splits), shape(21, 4, 3)).expect_err("three are not four");
        assert!(matches!(refused, AllToAllError::SplitCount { given: 3, ranks: 4 }));
        let refused = Transfers::new(0, 3, Some(&splits), shape(0, 8, usize::MAX));
        assert!(matches!(refused, Err(AllToAllError::RowTooLarge { row_elements: usize::MAX })));
        let many = Splits::sending(&[1, u64::MAX / 2]).receiving(&[1, 0]).expect("the splits are valid");
        let refused = Transfers::new(0, 2, Some(&many), shape(8, 4, 3)).expect_err("bytes overflow");
        assert!(matches!(refused, AllToAllError::BufferTooShort { side: Side::Input, .. }));
    }

    #[test]
    fn without_splits_buffers_must_divide_equally() {
        let equal = |input_len, output_len, row_elements| {
            Transfers::new(1, 4, None, CallShape { input_len, output_len, element_bytes: 2, row_elements })
        };
        let transfers = equal(24, 24, 3).expect("two rows each");
        assert_eq!(transfers.part(Side::Output, 0, 3), Some(Region { address: 36, size_bytes: 12 }));
        for (input, output, row) in [(24, 12, 3), (18, 18, 3), (4, 4, 0)] {
            assert!(matches!(equal(input, output, row), Err(AllToAllError::Uneven { ranks: 4, .. })));
        }
        for row in [0, 1, 3] {
            assert_eq!(equal(0, 0, row).expect("empty buffers are valid").part(Side::Input, 0, 0), None);
        }
    }

    #[test]
    fn a_buffer_may_be_longer_than_its_rows() {
        let splits = Splits::sending(&[1, 1]).receiving(&[1, 0]).expect("the splits are valid");
        let transfers = Transfers::new(0, 2, Some(&splits), CallShape { input_len: 100, ..shape(3, 4, 3) })
            .expect("the transfers are valid");
        assert_eq!((transfers.input_bytes, transfers.output_bytes), (24, 12));
    }

    proptest! {
        #[test]
        fn regions_overlap_exactly_when_a_byte_is_in_both(a in 0_u64..12, b in 0_u64..12, m in 0_u64..6, n in 0_u64..6) {
            let (left, right) = (Region { address: a, size_bytes: m }, Region { address: b, size_bytes: n });
            prop_assert_eq!(left.overlaps(&right), (a..a + m).any(|byte| (b..b + n).contains(&byte)));
        }
    }
}
