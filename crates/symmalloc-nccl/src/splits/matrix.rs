//! What every rank sends to every other: the same numbers on all ranks.

use super::{Side, SplitsError};
use std::sync::Arc;

/// Rows from every rank (down) to every rank (across), with sums that fit.
#[derive(Clone)]
pub(super) struct Matrix {
    counts: Arc<[u64]>,
    ranks: usize,
    /// Whether senders are across and receivers down.
    is_reversed: bool,
    /// The most that any rank sends.
    sent_max: u64,
    /// The most that any rank receives.
    received_max: u64,
}

impl Matrix {
    pub(super) fn new(counts: Arc<[u64]>, ranks: usize) -> Result<Self, SplitsError> {
        debug_assert_eq!(counts.len(), ranks * ranks);
        let mut matrix = Matrix { counts, ranks, is_reversed: false, sent_max: 0, received_max: 0 };
        for rank in 0..ranks {
            matrix.sent_max = matrix.sent_max.max(total(matrix.sent_by(rank), Side::Input)?);
            matrix.received_max = matrix.received_max.max(total(matrix.received_by(rank), Side::Output)?);
        }
        Ok(matrix)
    }

    pub(super) fn reversed(&self) -> Self {
        Matrix {
            counts: Arc::clone(&self.counts),
            ranks: self.ranks,
            is_reversed: !self.is_reversed,
            sent_max: self.received_max,
            received_max: self.sent_max,
        }
    }

    pub(super) fn get(&self, from: usize, to: usize) -> Option<u64> {
        let (row, column) = if self.is_reversed { (to, from) } else { (from, to) };
        if row >= self.ranks || column >= self.ranks {
            return None;
        }
        self.counts.get(row * self.ranks + column).copied()
    }

    pub(super) fn sent_by(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        (0..self.ranks).filter_map(move |to| self.get(rank, to))
    }

    pub(super) fn received_by(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        (0..self.ranks).filter_map(move |from| self.get(from, rank))
    }

    pub(super) fn sent_max(&self) -> u64 {
        self.sent_max
    }

    pub(super) fn received_max(&self) -> u64 {
        self.received_max
    }
}

impl PartialEq for Matrix {
    /// Whether every rank sends the same, however the numbers are kept.
    fn eq(&self, other: &Self) -> bool {
        self.ranks == other.ranks && (0..self.ranks).all(|rank| self.sent_by(rank).eq(other.sent_by(rank)))
    }
}

impl Eq for Matrix {}

fn total(rows: impl Iterator<Item = u64>, side: Side) -> Result<u64, SplitsError> {
    rows.enumerate()
        .try_fold(0_u64, |total, (rank, count)| total.checked_add(count).ok_or(SplitsError::TooMany { side, rank }))
}
