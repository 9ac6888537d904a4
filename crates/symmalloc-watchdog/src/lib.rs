//! Who is alive among the processes of a job, how far each is, and what they last did together.
//!
//! Nothing here knows CUDA or NCCL, and nothing decides a placement: it is what a watchdog of communicators stands on.
//!
//! ```text
//!  process 1 ──┐  beats, joins, departures           Endpoint   what is said, without any input or output; its Roster is what is known
//!  process 2 ──┼─────────► process 0, the hub        Lifeline   the same over connections, within bounds
//!  process 3 ──┘
//!                                                    FlightRecord   what a process knew of its communicators, as a file
//!                                                    Findings       what the records of all ranks say together
//! ```
//!
//! # Examples
//! ```
//! use std::path::Path;
//! use symmalloc_watchdog::{Finding, Findings, FlightRecord};
//!
//! // What rank 0 of two left: it waits in its second collective.
//! let record = r#"{
//!     "symmalloc_flight_record": 1, "host": "node7", "process": 4711, "reason": "asked for",
//!     "communicators": [{
//!         "id": 5, "name": "world", "rank": 0, "ranks": 2, "state": "ready",
//!         "progress": { "submitted": 2, "finished": 1 }, "collectives": []
//!     }]
//! }"#;
//! let record = FlightRecord::from_reader(record.as_bytes(), Path::new("rank0.json"))?;
//! let findings = Findings::new(&[record]);
//! assert!(findings.is_trouble());
//! let (_id, name, said) = &findings.communicators[0];
//! assert_eq!((name.as_str(), &said[0]), ("world", &Finding::NoRecord { ranks: vec![1] }));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod connection;
mod endpoint;
mod findings;
mod flight_record;
mod ids;
mod lifeline;
mod message;
mod roster;

pub use connection::Connection;
pub use endpoint::{Endpoint, PeerEvent, SILENT_AFTER};
pub use findings::{Finding, Findings};
pub use flight_record::{
    CollectiveRecord, CollectiveState, CommunicatorRecord, FlightRecord, FlightRecordError, PeerRecord, Signature,
};
pub use ids::{CommunicatorId, ProcessId, Progress, RankId};
pub use lifeline::Lifeline;
pub use message::{Departure, FailureReport, Member};
