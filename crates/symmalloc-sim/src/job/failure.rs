//! The failures that a simulated run reports.

use crate::device::{Leaks, Race};
use crate::job::decision::Decision;
use std::fmt;
use symmalloc_core::ids::HeapId;

/// A failed run: either a defect in the allocator, or a deviation that a test injected.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The seed of the failing plan.
    pub seed: u64,
    /// The rank that failed; `None` if the failure is not specific to one rank.
    pub rank: Option<u32>,
    /// The first step that differs, or the step at which the failure appeared. Steps are counted from 0, in the plan's
    /// order.
    pub step: Option<usize>,
    /// The op of this step as a line of a trace.
    pub op: Option<Box<str>>,
    /// The cause of the failure.
    pub cause: FailureCause,
    /// The report of the ranks' agreement, as text.
    pub report: Option<Box<str>>,
}

/// The cause of a failure.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FailureCause {
    /// A rank without faults made a different decision than the reference.
    #[error("the rank decided differently: {decision}; expected {expected}")]
    DifferentDecision {
        /// The rank's decision.
        decision: Decision,
        /// The reference's decision.
        expected: Decision,
    },
    /// A rank without faults has a different digest than the reference.
    #[error("the digest of the heap of {heap} differs")]
    DifferentDigest {
        /// The first heap that differs.
        heap: HeapId,
    },
    /// A use of memory is not ordered after an earlier use.
    #[error(transparent)]
    Race(#[from] Race),
    /// A violated invariant.
    #[error("{0}")]
    Violation(Box<str>),
    /// A panic, such as a failed assertion.
    #[error("panic: {0}")]
    Panic(Box<str>),
    /// Allocations, memory or other resources remain at the end of the run.
    #[error(
        "at the end {allocations} allocations are live and {reserved_bytes} bytes are reserved; on the device: {leaks}"
    )]
    LeftBehind {
        /// Live allocations.
        allocations: u64,
        /// Reserved device memory in bytes.
        reserved_bytes: u64,
        /// Resources that the device still holds.
        leaks: Leaks,
    },
    /// A restarted rank differs from the reference.
    #[error("the rank differs from the others after its restart: the heap of {heap} differs")]
    Rejoined {
        /// The first heap that differs.
        heap: HeapId,
    },
    /// A rank could not be restarted.
    #[error("the rank cannot be restarted: {0}")]
    NotRestored(Box<str>),
    /// Ranks differ, but the agreement reported no difference or did not report this rank.
    #[error("the rank differs from this step on, and the agreement did not report it")]
    Missed,
    /// The agreement reported a rank that does not differ.
    #[error("the agreement reported the rank, but it does not differ")]
    FalseAlarm,
    /// The agreement named a different op than the op at which the ranks diverged.
    #[error("the agreement named {named}, but the ranks diverged at {expected}")]
    WrongOpNamed {
        /// Ops that the agreement named.
        named: Box<str>,
        /// Ops that the agreement should have named.
        expected: Box<str>,
    },
    /// The plan has no rank without faults that could serve as the reference.
    #[error("every rank has faults: leave one rank without faults, as a reference")]
    NoReference,
}

impl FailureCause {
    /// Returns `true` if a rank without faults differs from the reference.
    pub(crate) fn is_difference(&self) -> bool {
        matches!(self, FailureCause::DifferentDecision { .. } | FailureCause::DifferentDigest { .. })
    }

    /// Returns `true` if two failures are of the same kind, so that a plan with one can replace a plan with the other.
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
