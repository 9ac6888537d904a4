//! The messages between processes: one line of JSON each.
//!
//! A message is untrusted. Its texts end up in the errors and logs of every rank, so each text is escaped and truncated when it is decoded
//! ([`received_text`]).

use crate::ids::{CommunicatorId, ProcessId, Progress, RankId};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use symmalloc_text::visible_start_of_line;

/// Length limit of a line that the hub receives. A heartbeat has about 120 bytes for each rank of its process.
pub(crate) const LINE_BYTES_TO_HUB_MAX: usize = 4 << 20;

/// Length limit of a line that other processes receive. The hub's answer about a communicator has about 200 bytes for each rank, and a
/// [report](TEXT_BYTES_MAX) for each rank that failed.
pub(crate) const LINE_BYTES_FROM_HUB_MAX: usize = 64 << 20;

/// Length limit of a text in a message, such as a report; a longer text is truncated. For example, a report about a disagreement between
/// ranks names every rank.
pub(crate) const TEXT_BYTES_MAX: usize = 16 << 10;

/// Decodes a text from another process as one line of visible characters, which can neither control a terminal nor forge a line.
fn received_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(visible_start_of_line(&text, TEXT_BYTES_MAX).into_owned())
}

/// The end of the connection to a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Departure {
    /// The connection was closed. The system closes it whenever a process ends, for any reason.
    Closed,
    /// The connection broke: the machine or the network failed, or the process violated the protocol.
    Broken {
        /// The system's error, or the rule that the process violated.
        #[serde(deserialize_with = "received_text")]
        error: String,
    },
    /// The process read nothing for so long that too many bytes were pending for it.
    Stalled {
        /// The pending bytes.
        unsent_bytes: u64,
    },
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Departure::Closed => f.write_str("its process ended"),
            Departure::Broken { error } => write!(f, "the connection to its process broke ({error})"),
            Departure::Stalled { unsent_bytes } => {
                write!(f, "its process does not read its connection, and {unsent_bytes} bytes are pending for it")
            }
        }
    }
}

/// A report of why a rank ended a communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    /// The reason as text. If another process sent it, it is one line without hidden characters.
    #[serde(deserialize_with = "received_text")]
    pub text: String,
    /// The rank that caused the failure, as far as this rank knows; `None` if the cause is not another rank.
    pub first_rank: Option<u32>,
    /// The time for which `first_rank` has been silent, in milliseconds, if that rank is stopped; otherwise `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_ms: Option<u64>,
}

impl FailureReport {
    /// Returns the report as other processes receive it, so that all ranks have the same text.
    pub(crate) fn as_received(&self) -> Self {
        let text = visible_start_of_line(&self.text, TEXT_BYTES_MAX).into_owned();
        FailureReport { text, ..*self }
    }
}

/// The hub's knowledge of one rank of a communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The rank's number in the communicator.
    pub rank: u32,
    /// The rank's process.
    pub process: ProcessId,
    /// The rank's progress, as last reported.
    pub progress: Progress,
    /// Milliseconds since the rank's progress last changed.
    pub still_ms: u64,
    /// Milliseconds since the last message of the rank's process. A stopped process is silent; a process that is computing is not.
    pub silent_ms: u64,
    /// The departure of the rank's process; `None` while the process is connected.
    pub departure: Option<Departure>,
    /// `true` if the rank destroyed the communicator normally.
    pub has_left: bool,
    /// The rank's report, if it ended the communicator because of an error.
    pub failure: Option<FailureReport>,
}

/// A rank's progress, as its process reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Standing {
    pub(crate) rank: RankId,
    pub(crate) progress: Progress,
    /// Milliseconds since the progress last changed. The sender states this time, because a heartbeat is later than the change that it
    /// reports.
    pub(crate) still_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    // From a process to the hub. The hub sends itself the same messages.
    /// The process is alive, and its ranks have made this progress. The hub sends its heartbeats to all other processes.
    Beat { standings: Vec<Standing> },
    /// The process now has this rank of a communicator.
    Joined { rank: RankId },
    /// The rank destroyed the communicator normally, having progressed this far. Its later state does not concern the other ranks.
    Left { last: Standing },
    /// The rank of an earlier [`Joined`](Message::Joined) was not created, or was created with a different number.
    Withdrawn { rank: RankId },
    /// The rank ended the communicator because of an error.
    Failed { rank: RankId, report: FailureReport },
    /// Asks for the ranks of the communicator and their progress.
    Ask { communicator: CommunicatorId },

    // From the hub to other processes.
    /// A process is gone, and with it these ranks of communicators that it had not left. `after` is the process's report about another
    /// communicator that it had ended before, if any.
    Gone { departure: Departure, ranks: Vec<RankId>, after: Option<FailureReport> },
    /// A process that never joined a communicator is gone.
    NeverJoined { process: ProcessId, departure: Departure },
    /// A rank ended the communicator because of an error.
    RankFailed { rank: RankId, report: FailureReport },
    /// The answer to [`Ask`](Message::Ask).
    Told { communicator: CommunicatorId, members: Vec<Member> },
}
