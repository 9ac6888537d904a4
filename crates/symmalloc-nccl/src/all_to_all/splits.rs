//! Splits: the numbers of rows that ranks send to each other.
//!
//! ```text
//!              rank 0   rank 1   rank 2            the buffers of rank 1
//!   rank 0        2        1        0      input   │ 3 for rank 0 │ 4 for rank 1 │ 1 for rank 2 │
//!   rank 1        3        4        1              0              3              7              8
//!   rank 2        0        5        2      output  │ 1 │ 4 from rank 1 │ 5 from rank 2          │
//!     from         to ──►                          0   1               5                       10
//! ```
//! A row of the matrix holds the numbers that a rank sends (PyTorch's `input_split_sizes`), and a column holds the numbers that it receives
//! (`output_split_sizes`). The parts of a buffer are contiguous, so each part starts at the end of the previous part. This start is the
//! part's displacement. Totals and displacements are computed once for all calls that use the splits.
//!
//! Splits are consistent by construction: totals do not overflow, and both sides have the same number of ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// One of the two buffers of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The rows that this rank sends.
    Input,
    /// The rows that this rank receives.
    Output,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Input => "input",
            Side::Output => "output",
        })
    }
}

/// An error returned for numbers of rows that do not form splits. Nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SplitsError {
    /// The sides have different numbers of ranks.
    #[error(
        "the input is split for {input} ranks and the output for {output}: specify a part for every rank on both sides"
    )]
    Unequal {
        /// Number of parts of the input.
        input: usize,
        /// Number of parts of the output.
        output: usize,
    },
    /// The total number of rows overflows.
    #[error("the {side}'s rows of the ranks up to {rank} exceed 2^64: check the numbers of rows")]
    TooMany {
        /// The side.
        side: Side,
        /// The first rank whose part causes the overflow.
        rank: usize,
    },
}

/// The split of the rows of two buffers among ranks: one part per rank, in rank order, possibly empty. Totals and displacements are
/// computed once for all calls, and clones share them.
///
/// # Examples
/// ```
/// use symmalloc_nccl::Splits;
///
/// // Rank 1 of three.
/// let splits = Splits::sending(&[3, 4, 1]).receiving(&[1, 4, 5])?;
/// assert_eq!((splits.input().displacements(), splits.input().total()), (&[0, 3, 7][..], 8));
/// assert_eq!(splits.output().part(2), 5..10);
/// // The opposite direction.
/// assert_eq!(splits.reversed().input(), splits.output());
/// # Ok::<(), symmalloc_nccl::SplitsError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Splits {
    input: Arc<Split>,
    output: Arc<Split>,
    /// Numbers of rows between all pairs of ranks, if known.
    matrix: Option<Matrix>,
}

/// The split of the rows of one buffer among ranks.
#[derive(Clone, PartialEq, Eq)]
pub struct Split {
    /// Number of rows in each rank's part, indexed by rank.
    rows: Box<[u64]>,
    /// Displacement of each rank's part, indexed by rank: the sum of the preceding numbers of rows.
    displacements: Box<[u64]>,
    total: u64,
}

/// The input side of splits under construction.
#[derive(Clone, Copy, Debug)]
#[must_use = "specify the received rows"]
pub struct Sending<'a> {
    input: &'a [u64],
}

impl Splits {
    /// Specifies the rows that this rank sends to every rank; [`Sending::receiving`] adds the rows that this rank receives. A caller that
    /// knows both sides does not need to exchange splits.
    pub fn sending(rows: &[u64]) -> Sending<'_> {
        Sending { input: rows }
    }

    /// Creates the splits of rank `rank` from the numbers of rows that all ranks send: `ranks` lists of `ranks` numbers.
    pub(crate) fn of_matrix(counts: impl Into<Arc<[u64]>>, ranks: usize, rank: usize) -> Result<Self, SplitsError> {
        let matrix = Matrix::new(counts.into(), ranks)?;
        let input = Split::new(matrix.sent_by(rank), Side::Input)?;
        let output = Split::new(matrix.received_by(rank), Side::Output)?;
        Ok(Splits { input: Arc::new(input), output: Arc::new(output), matrix: Some(matrix) })
    }

    /// Returns the split of the input.
    pub fn input(&self) -> &Split {
        &self.input
    }

    /// Returns the split of the output.
    pub fn output(&self) -> &Split {
        &self.output
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.input.rows.len()
    }

    /// Returns the splits of the opposite direction, which sends received rows back to their senders.
    pub fn reversed(&self) -> Self {
        Splits {
            input: Arc::clone(&self.output),
            output: Arc::clone(&self.input),
            matrix: self.matrix.as_ref().map(Matrix::reversed),
        }
    }

    /// Returns the number of rows that rank `from` sends to rank `to`, or `None` if the splits were not exchanged or a rank does not exist.
    pub fn rows_between(&self, from: usize, to: usize) -> Option<u64> {
        self.matrix.as_ref()?.get(from, to)
    }

    /// Returns the maximum number of rows that any rank sends, or `None` if the splits were not exchanged. The maximum is equal on all
    /// ranks.
    pub fn input_rows_max(&self) -> Option<u64> {
        self.matrix.as_ref().map(Matrix::sent_max)
    }

    /// Returns the maximum number of rows that any rank receives, or `None` if the splits were not exchanged. The maximum is equal on all
    /// ranks.
    ///
    /// In a symmetric pool, all ranks must request the same sizes. If every rank allocates an output of this many rows, the buffers have
    /// the same offset on all ranks, even if the ranks receive different numbers of rows.
    pub fn output_rows_max(&self) -> Option<u64> {
        self.matrix.as_ref().map(Matrix::received_max)
    }
}

impl Sending<'_> {
    /// Adds the rows that this rank receives from every rank.
    ///
    /// # Errors
    /// Returns an error if the sides have different numbers of ranks, or a sum overflows.
    pub fn receiving(self, rows: &[u64]) -> Result<Splits, SplitsError> {
        if self.input.len() != rows.len() {
            return Err(SplitsError::Unequal { input: self.input.len(), output: rows.len() });
        }
        let input = Split::new(self.input.iter().copied(), Side::Input)?;
        let output = Split::new(rows.iter().copied(), Side::Output)?;
        Ok(Splits { input: Arc::new(input), output: Arc::new(output), matrix: None })
    }
}

impl Split {
    pub(crate) fn new(rows: impl Iterator<Item = u64>, side: Side) -> Result<Self, SplitsError> {
        let rows: Box<[u64]> = rows.collect();
        let mut displacements = Vec::with_capacity(rows.len());
        let mut total = 0_u64;
        for (rank, count) in rows.iter().enumerate() {
            displacements.push(total);
            total = total.checked_add(*count).ok_or(SplitsError::TooMany { side, rank })?;
        }
        Ok(Split { rows, displacements: displacements.into(), total })
    }

    /// Returns the number of rows in each rank's part, indexed by rank.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Returns the displacement of each rank's part: the index of the part's first row.
    pub fn displacements(&self) -> &[u64] {
        &self.displacements
    }

    /// Returns the total number of rows.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the range of a rank's rows.
    ///
    /// # Panics
    /// If the rank does not exist.
    pub fn part(&self, rank: usize) -> Range<u64> {
        let start = self.displacements[rank];
        start..start + self.rows[rank]
    }
}

impl fmt::Debug for Splits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Splits")
            .field("input", &self.input.rows)
            .field("output", &self.output.rows)
            .field("is_exchanged", &self.matrix.is_some())
            .finish()
    }
}

impl fmt::Debug for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.fmt(f)
    }
}

/// Numbers of rows from every rank (down) to every rank (across), whose sums do not overflow.
#[derive(Clone)]
struct Matrix {
    counts: Arc<[u64]>,
    ranks: usize,
    /// Set if senders are across and receivers down.
    is_reversed: bool,
    /// Maximum number of rows that any rank sends.
    sent_max: u64,
    /// Maximum number of rows that any rank receives.
    received_max: u64,
}

impl Matrix {
    fn new(counts: Arc<[u64]>, ranks: usize) -> Result<Self, SplitsError> {
        debug_assert_eq!(counts.len(), ranks * ranks);
        let mut matrix = Matrix { counts, ranks, is_reversed: false, sent_max: 0, received_max: 0 };
        for rank in 0..ranks {
            matrix.sent_max = matrix.sent_max.max(total(matrix.sent_by(rank), Side::Input)?);
            matrix.received_max = matrix.received_max.max(total(matrix.received_by(rank), Side::Output)?);
        }
        Ok(matrix)
    }

    fn reversed(&self) -> Self {
        Matrix {
            counts: Arc::clone(&self.counts),
            ranks: self.ranks,
            is_reversed: !self.is_reversed,
            sent_max: self.received_max,
            received_max: self.sent_max,
        }
    }

    fn get(&self, from: usize, to: usize) -> Option<u64> {
        let (row, column) = if self.is_reversed { (to, from) } else { (from, to) };
        if row >= self.ranks || column >= self.ranks {
            return None;
        }
        self.counts.get(row * self.ranks + column).copied()
    }

    fn sent_by(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        (0..self.ranks).filter_map(move |to| self.get(rank, to))
    }

    fn received_by(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        (0..self.ranks).filter_map(move |from| self.get(from, rank))
    }

    fn sent_max(&self) -> u64 {
        self.sent_max
    }

    fn received_max(&self) -> u64 {
        self.received_max
    }
}

impl PartialEq for Matrix {
    /// Compares the rows of every rank, independent of the orientation in which they are stored.
    fn eq(&self, other: &Self) -> bool {
        self.ranks == other.ranks && (0..self.ranks).all(|rank| self.sent_by(rank).eq(other.sent_by(rank)))
    }
}

impl Eq for Matrix {}

fn total(rows: impl Iterator<Item = u64>, side: Side) -> Result<u64, SplitsError> {
    rows.enumerate()
        .try_fold(0_u64, |total, (rank, count)| total.checked_add(count).ok_or(SplitsError::TooMany { side, rank }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOP: u64 = u64::MAX;

    #[test]
    fn sides_for_different_numbers_of_ranks_are_refused() {
        let refused = Splits::sending(&[1, 2]).receiving(&[3]);
        assert_eq!(refused, Err(SplitsError::Unequal { input: 2, output: 1 }));
    }

    #[test]
    fn sums_that_overflow_are_refused_with_the_side_and_the_rank() {
        let refused = Splits::sending(&[TOP, 0, 1]).receiving(&[0; 3]);
        assert_eq!(refused, Err(SplitsError::TooMany { side: Side::Input, rank: 2 }));
        let refused = Splits::sending(&[0; 2]).receiving(&[1, TOP]);
        assert_eq!(refused, Err(SplitsError::TooMany { side: Side::Output, rank: 1 }));
        let counts = [TOP, 0, 1, 0];
        assert_eq!(Splits::of_matrix(counts, 2, 1), Err(SplitsError::TooMany { side: Side::Output, rank: 1 }));
    }

    #[test]
    fn splits_between_other_ranks_are_unknown_without_an_exchange() {
        let splits = Splits::sending(&[1, 2]).receiving(&[1, 3]).expect("the splits are valid");
        assert_eq!((splits.rows_between(0, 1), splits.input_rows_max(), splits.output_rows_max()), (None, None, None));
    }

    proptest! {
        #[test]
        fn ranks_derive_consistent_splits_from_one_matrix(ranks in 1_usize..9, seed in proptest::collection::vec(0_u64..50, 64)) {
            let counts = &seed[..ranks * ranks];
            let all: Vec<Splits> =
                (0..ranks).map(|rank| Splits::of_matrix(counts, ranks, rank).expect("the matrix is valid")).collect();
            for (from, sender) in all.iter().enumerate() {
                for (to, receiver) in all.iter().enumerate() {
                    prop_assert_eq!(sender.input().rows()[to], receiver.output().rows()[from]);
                    prop_assert_eq!(sender.rows_between(from, to), Some(counts[from * ranks + to]));
                    prop_assert_eq!(sender.reversed().rows_between(to, from), Some(counts[from * ranks + to]));
                }
                let parts: Vec<_> = (0..ranks).map(|rank| sender.output().part(rank)).collect();
                prop_assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                prop_assert_eq!((parts[0].start, parts[ranks - 1].end), (0, sender.output().total()));
            }
            let most = |total: fn(&Splits) -> u64| all.iter().map(total).max();
            for splits in &all {
                prop_assert_eq!(splits.output_rows_max(), most(|it| it.output().total()));
                prop_assert_eq!(splits.reversed().output_rows_max(), most(|it| it.input().total()));
                prop_assert_eq!(&splits.reversed().reversed(), splits);
            }
        }
    }
}
