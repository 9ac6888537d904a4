//! The failures for which the watchdog ends a communicator.

use crate::flight_record::CollectiveRecord;
use crate::message::{Departure, FailureReport};
use crate::watching::local_error::LocalError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Flag in the number of a rank whose communicator does not exist yet. With the flag, other ranks can be notified if the rank fails. In a
/// split, the number is the rank's number in the parent; while connecting, it is the rank's number in the new communicator.
pub(super) const PENDING_COMM: u32 = 1 << 31;

/// Maximum number of ranks that a message names. Peers report these ranks, so the length of the message must have a bound.
const RANKS_SHOWN: usize = 64;

/// A failure for which the watchdog ended a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The communicator's name.
    pub communicator: Arc<str>,
    /// This rank.
    pub rank: u32,
    /// The cause.
    pub cause: FailureCause,
    /// The first collective that the other rank missed or, if it missed none, the first unfinished collective of this rank.
    pub collective: Option<CollectiveRecord>,
    /// Time without progress.
    pub waited: Duration,
}

/// The cause of a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureCause {
    /// A rank's process is gone.
    RankGone {
        /// The rank.
        rank: u32,
        /// The end of its connection.
        departure: Departure,
        /// The process's report about another communicator that it had ended before, if any. That failure may be why the process exited.
        after: Option<FailureReport>,
    },
    /// Another rank ended the communicator.
    RankFailed {
        /// The rank.
        rank: u32,
        /// The rank's report.
        report: FailureReport,
    },
    /// A rank missed a collective and sends nothing: it is stopped, or its machine is unreachable.
    RankStopped {
        /// The rank.
        rank: u32,
        /// Time since the last message of the rank.
        silent: Duration,
        /// Number of the last collective that the rank submitted.
        submitted: u64,
    },
    /// Ranks are alive and missed a collective: they are stuck in host code or in another program.
    RanksBehind {
        /// The ranks, each with the number of the last collective that it submitted.
        ranks: Vec<(u32, u64)>,
    },
    /// A rank destroyed the communicator while this one still uses it.
    RankLeft {
        /// The rank.
        rank: u32,
    },
    /// The other rank of a send or receive is alive but has not made the matching call.
    PeerWaits {
        /// The other rank.
        rank: u32,
    },
    /// All ranks submitted the collective, but the device makes no progress.
    Hanging,
    /// There is no progress, and the cause is unknown because some ranks are not connected.
    Unknown,
    /// NCCL reported an error.
    Nccl(LocalError),
    /// The driver reported an error.
    Driver(LocalError),
}

impl Failure {
    /// Returns the report for other ranks.
    pub(super) fn report(&self) -> FailureReport {
        let stopped_ms = self.cause.stopped_ms();
        FailureReport { text: self.summary(), first_rank: self.cause.rank(), stopped_ms }
    }

    /// Returns the message without the advice, which applies only to this rank.
    fn summary(&self) -> String {
        let mut text = self.cause.to_string();
        if let Some(CollectiveRecord { number, signature, state, .. }) = &self.collective {
            text += &format!(". On rank {} collective {number} ({signature}) was {state}", self.rank);
            if !self.waited.is_zero() {
                text += &format!(", and there had been no progress for {:.1} s", self.waited.as_secs_f64());
            }
        }
        text
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "communicator \"{}\", rank {}: {}. {}",
            self.communicator,
            self.rank,
            self.summary(),
            self.cause.advice()
        )
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureCause::RankGone { rank, departure, after: None } => write!(f, "rank {rank} is gone: {departure}"),
            FailureCause::RankGone { rank, departure, after: Some(report) } => {
                write!(
                    f,
                    "rank {rank} is gone: {departure}, after it had given up another communicator: {}",
                    report.text
                )
            }
            FailureCause::RankFailed { rank, report } => write!(f, "rank {rank} gave up: {}", report.text),
            FailureCause::RankStopped { rank, silent, submitted } => write!(
                f,
                "rank {rank} is stopped, or its machine is unreachable: it has been silent for {:.1} s, and its last \
                 collective was {submitted}",
                silent.as_secs_f64()
            ),
            FailureCause::RanksBehind { ranks } => {
                f.write_str("ranks are alive but missed the collective:")?;
                let mut separator = "";
                ranks.iter().take(RANKS_SHOWN).try_for_each(|(rank, submitted)| {
                    write!(f, "{separator} rank {rank}, whose last collective was {submitted}")?;
                    separator = ",";
                    Ok(())
                })?;
                match ranks.len().checked_sub(RANKS_SHOWN) {
                    None | Some(0) => Ok(()),
                    Some(more) => write!(f, ", and {more} more"),
                }
            }
            FailureCause::RankLeft { rank } => write!(f, "rank {rank} destroyed the communicator"),
            FailureCause::PeerWaits { rank } => {
                write!(f, "rank {rank} is alive but has not made the matching send or receive")
            }
            FailureCause::Hanging => f.write_str("all ranks arrived, but the device makes no progress"),
            FailureCause::Unknown => {
                f.write_str("there is no progress, and the cause is unknown because some ranks are not connected")
            }
            FailureCause::Nccl(error) => error.fmt(f),
            FailureCause::Driver(error) => error.fmt(f),
        }
    }
}

impl FailureCause {
    fn advice(&self) -> &'static str {
        match self {
            FailureCause::RankGone { .. } => "Look at that rank's last output, and check the system log for kills",
            FailureCause::RankFailed { .. } => "Look at that rank's report",
            FailureCause::RankStopped { .. } => {
                "Check that the process is not stopped (state T) and that its machine is reachable"
            }
            FailureCause::RanksBehind { .. } | FailureCause::PeerWaits { .. } => {
                "Look at their stacks, and compare the flight records of all ranks with `symmalloc diff`"
            }
            FailureCause::RankLeft { .. } => "Destroy a communicator only when all its ranks are done with it",
            FailureCause::Hanging => {
                "Compare the flight records of all ranks with `symmalloc diff`: sizes or order may differ"
            }
            FailureCause::Unknown => {
                "Connect with connect_env, or set SYMMALLOC_RENDEZVOUS on all ranks, and compare the flight records of all ranks \
                 with `symmalloc diff`"
            }
            FailureCause::Nccl(_) | FailureCause::Driver(_) => "Look for the first error among the ranks",
        }
    }
}

impl FailureCause {
    /// Replaces the flagged number of a rank that is still in a split by its number in the parent.
    pub(super) fn with_parent_ranks(mut self) -> Self {
        match &mut self {
            FailureCause::RankGone { rank, .. }
            | FailureCause::RankFailed { rank, .. }
            | FailureCause::RankStopped { rank, .. }
            | FailureCause::RankLeft { rank }
            | FailureCause::PeerWaits { rank } => *rank &= !PENDING_COMM,
            FailureCause::RanksBehind { ranks } => ranks.iter_mut().for_each(|(rank, _)| *rank &= !PENDING_COMM),
            FailureCause::Hanging | FailureCause::Unknown | FailureCause::Nccl(_) | FailureCause::Driver(_) => {}
        }
        self
    }

    /// Returns the last submitted collective of the first rank that missed one.
    pub(super) fn last_submitted(&self) -> Option<u64> {
        match self {
            FailureCause::RankStopped { submitted, .. } => Some(*submitted),
            FailureCause::RanksBehind { ranks } => ranks.iter().map(|(_, submitted)| *submitted).min(),
            _ => None,
        }
    }

    /// Returns the time for which the rank to look at first has been silent, in milliseconds, if that rank is stopped.
    pub fn stopped_ms(&self) -> Option<u64> {
        match self {
            FailureCause::RankStopped { silent, .. } => Some(silent.as_millis() as u64),
            FailureCause::RankFailed { report, .. } => report.stopped_ms,
            _ => None,
        }
    }

    /// Returns the rank to look at first.
    pub fn rank(&self) -> Option<u32> {
        match self {
            FailureCause::RankFailed { rank, report } | FailureCause::RankGone { rank, after: Some(report), .. } => {
                report.first_rank.or(Some(*rank))
            }
            FailureCause::RankGone { rank, .. }
            | FailureCause::RankStopped { rank, .. }
            | FailureCause::RankLeft { rank }
            | FailureCause::PeerWaits { rank } => Some(*rank),
            FailureCause::RanksBehind { ranks } => ranks.first().map(|(rank, _)| *rank),
            FailureCause::Hanging | FailureCause::Unknown | FailureCause::Nccl(_) | FailureCause::Driver(_) => None,
        }
    }
}
