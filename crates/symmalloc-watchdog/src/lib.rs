//! Who is alive among the processes of a job, how far each is, and what they last did together.
//!
//! Nothing here knows CUDA or NCCL, and nothing decides a placement: it is what a watchdog of communicators stands on.
//!
//! ```text
//!  process 1 ──┐  beats, joins, departures           Endpoint   what is said, without any input or output; its Roster is what is known
//!  process 2 ──┼── TCP ──► process 0, the hub        Lifeline   the same over connections
//!  process 3 ──┘
//!                                                    FlightRecord   what a process knew of its communicators, as a file
//!                                                    Findings       what the records of all ranks say together
//! ```

#![forbid(unsafe_code)]

mod endpoint;
mod findings;
mod flight_record;
mod ids;
mod lifeline;
mod message;
mod roster;

pub use endpoint::{Endpoint, PeerEvent, SILENT_AFTER};
pub use findings::{Finding, Findings};
pub use flight_record::{
    CollectiveRecord, CollectiveState, CommunicatorRecord, FlightRecord, FlightRecordError, PeerRecord, Signature,
};
pub use ids::{CommunicatorId, ProcessId, Progress, RankId};
pub use lifeline::Lifeline;
pub use message::{Departure, FailureReport, Member};
