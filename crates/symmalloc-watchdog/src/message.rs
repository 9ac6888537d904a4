//! What processes tell each other: one line of JSON for each message.

use crate::ids::{CommunicatorId, ProcessId, Progress, RankId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest line that the hub takes in: a beat has about 120 bytes for each rank of its process.
pub(crate) const LINE_BYTES_TO_HUB_MAX: usize = 4 << 20;

/// Longest line that others take in. What the hub knows of a communicator has about 200 bytes for each rank, and a
/// [report](REPORT_BYTES_MAX) for each that failed.
pub(crate) const LINE_BYTES_FROM_HUB_MAX: usize = 64 << 20;

/// Longest report that is sent on; the end of a longer one is cut off. Reports of ranks that disagree name every rank.
pub(crate) const REPORT_BYTES_MAX: usize = 16 << 10;

/// How the connection to a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Departure {
    /// It was closed, which the system does for a process that ends, however it ends.
    Closed,
    /// It broke: the machine or the network failed.
    Broken {
        /// The system's error, or the rule that the process broke.
        error: String,
    },
    /// It took nothing in for so long that too much waited for it.
    Stalled {
        /// The bytes that waited.
        unsent_bytes: u64,
    },
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Departure::Closed => f.write_str("its process ended"),
            Departure::Broken { error } => write!(f, "the connection to it broke ({error})"),
            Departure::Stalled { unsent_bytes } => {
                write!(f, "it takes nothing in, and {unsent_bytes} bytes wait for it")
            }
        }
    }
}

/// Why a rank ended a communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    /// What it says.
    pub text: String,
    /// The rank that began it, as far as this one knows; `None` when that is not another one.
    pub first_rank: Option<u32>,
}

impl FailureReport {
    /// Returns the report with at most [`REPORT_BYTES_MAX`] bytes of text.
    pub(crate) fn bounded(mut self) -> Self {
        if self.text.len() > REPORT_BYTES_MAX {
            let end = (0..=REPORT_BYTES_MAX).rev().find(|end| self.text.is_char_boundary(*end));
            self.text.truncate(end.unwrap_or(0));
        }
        self
    }
}

/// What the hub knows of a rank of a communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The rank.
    pub rank: u32,
    /// Its process.
    pub process: ProcessId,
    /// How far it is, as it last said.
    pub progress: Progress,
    /// For how long that did not change, in milliseconds.
    pub still_ms: u64,
    /// How long nothing was heard of its process, in milliseconds. A process that is stopped is silent; one that computes is not.
    pub silent_ms: u64,
    /// Set when its process is gone.
    pub departure: Option<Departure>,
    /// It destroyed the communicator in order.
    pub has_left: bool,
    /// Why it ended the communicator, if it did.
    pub failure: Option<FailureReport>,
}

/// How far a rank is, as its process says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Standing {
    pub(crate) rank: RankId,
    pub(crate) progress: Progress,
    /// For how long that did not change: a beat comes later than what it tells.
    pub(crate) still_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    // From a process to the hub, which says the same to itself.
    /// It is alive, and its ranks are that far. The hub says it to all.
    Beat { standings: Vec<Standing> },
    /// It is a rank of a communicator from now on.
    Joined { rank: RankId },
    /// It destroyed the communicator in order, after it had come so far: what becomes of it is of no interest to the other ranks any
    /// more.
    Left { last: Standing },
    /// It is no rank of it after all, or under another number.
    Withdrawn { rank: RankId },
    /// It ended the communicator because of an error.
    Failed { rank: RankId, report: FailureReport },
    /// Who is in the communicator, and how far?
    Ask { communicator: CommunicatorId },

    // From the hub to all others.
    /// A process is gone, and with it these ranks of communicators that it had not left. `after` is what it had said last of others
    /// that it ended.
    Gone { departure: Departure, ranks: Vec<RankId>, after: Option<FailureReport> },
    /// A rank ended the communicator because of an error.
    RankFailed { rank: RankId, report: FailureReport },
    /// The answer to the question.
    Told { communicator: CommunicatorId, members: Vec<Member> },
}
