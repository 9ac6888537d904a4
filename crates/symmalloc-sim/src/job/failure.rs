//! What a run must never come to.

use crate::device::{Leaks, Race};
use crate::job::decision::Decision;
use crate::job::journal::HeapName;
use std::fmt;

/// A run that failed: a defect in the allocator, or a rank that was made to differ by a test.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The seed of the plan.
    pub seed: u64,
    /// The rank on which it showed; `None` if on no single one.
    pub rank: Option<u32>,
    /// The step: the first one that differs, or the one at which it showed. Counted from 0, in the plan's order.
    pub step: Option<usize>,
    /// The op of that step as a line of a trace.
    pub op: Option<Box<str>>,
    /// What went wrong.
    pub cause: FailureCause,
    /// What the ranks' agreement says about it, for people.
    pub report: Option<Box<str>>,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FailureCause {
    /// A rank to which nothing happened decided otherwise.
    #[error("the rank decided otherwise: {decision}, not {expected}")]
    OtherDecision {
        /// The rank's.
        decision: Decision,
        /// The reference's.
        expected: Decision,
    },
    /// A rank to which nothing happened has another digest.
    #[error("the digest of the heap of {heap} is another one")]
    OtherDigest {
        /// The first heap that differs.
        heap: HeapName,
    },
    /// A use of memory that nothing orders behind the one before.
    #[error(transparent)]
    Race(#[from] Race),
    /// An invariant does not hold.
    #[error("{0}")]
    Violation(Box<str>),
    /// An assertion.
    #[error("panic: {0}")]
    Panic(Box<str>),
    /// Something is left at the end.
    #[error(
        "at the end {allocations} allocations are live and {reserved_bytes} bytes reserved; on the device: {leaks}"
    )]
    LeftBehind {
        /// Live allocations.
        allocations: u64,
        /// Device memory held, in bytes.
        reserved_bytes: u64,
        /// What the device still has.
        leaks: Leaks,
    },
    /// A rank that started again is not like the others.
    #[error("after its restart the rank is not like the others: the heap of {heap} differs")]
    Rejoined {
        /// The first heap that differs.
        heap: HeapName,
    },
    /// A rank could not start again.
    #[error("the rank cannot start again: {0}")]
    NotRestored(Box<str>),
    /// Ranks differ, and the agreement did not notice, or did not name the rank.
    #[error("the rank differs from this step on, and the agreement did not report it")]
    Missed,
    /// The agreement reported a rank that does not differ.
    #[error("the agreement reported the rank, but it does not differ")]
    FalseAlarm,
    /// The agreement named another op than the one at which ranks parted.
    #[error("the agreement named {named}, but ranks parted at {expected}")]
    OtherOpNamed {
        /// What it named.
        named: Box<str>,
        /// What it should have named.
        expected: Box<str>,
    },
    /// The plan has no rank to which nothing happens: there is nothing to compare with.
    #[error("something happens to every rank: leave one of them alone, to compare with")]
    NoReference,
}

impl FailureCause {
    /// Whether a rank differs from the others for no reason.
    pub(crate) fn is_difference(&self) -> bool {
        matches!(self, FailureCause::OtherDecision { .. } | FailureCause::OtherDigest { .. })
    }

    /// Whether two failures are of one kind, so that one may stand for the other.
    pub(crate) fn is_like(&self, other: &FailureCause) -> bool {
        self.is_difference() && other.is_difference() || std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}", self.seed)?;
        if let Some(rank) = self.rank {
            write!(f, ", rank {rank}")?;
        }
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        if let Some(op) = &self.op {
            write!(f, " (`{op}`)")?;
        }
        write!(f, ": {}", self.cause)?;
        match &self.report {
            Some(report) => write!(f, "\n{report}"),
            None => Ok(()),
        }
    }
}
