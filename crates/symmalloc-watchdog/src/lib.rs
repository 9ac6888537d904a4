//! A watchdog for communicators: it finds the rank that is gone, stopped or stuck, and ends the communicator that waits for it.
//!
//! This crate depends on neither CUDA nor NCCL and influences no placement. It watches any communicator that implements [`Watchable`].
//!
//! ```text
//!  process 1 ──┐  beats, joins, departures           Endpoint   the protocol without I/O; its Roster holds the state of each process
//!  process 2 ──┼─────────► process 0, the hub        Lifeline   the protocol over connections, within bounds
//!  process 3 ──┘
//!                                                    Watched        a communicator that this process's watchdog watches
//!                                                    FlightRecord   a process's view of its communicators, as a file
//!                                                    Findings       a comparison of the records of all ranks
//! ```
//!
//! # Watching a communicator
//! | type | purpose |
//! |---|---|
//! | [`Identity`] | the id and the name of the communicator, this rank's number, and the deadline |
//! | [`FlightRecorder`] | records the submitted work and the device's progress. The watchdog reads it through [`Flight`] |
//! | [`Watchable`] | ends the communicator |
//! | [`Process`] | ends the process if the communicator cannot be ended |
//! | [`Watched`] | combines these types: [`watch`](Watched::watch) begins, and [`leave`](Watched::leave) or [`fail`](Watched::fail) ends |
//! | [`MeetingId`] | identifies the connections to the processes of the other ranks, which the caller opened |
//! | [`Connecting`], [`Announced`] | a communicator that is being created, so that the death of a rank ends the creation |
//!
//! One thread watches all communicators of the process. The methods of [`Watchable`] run on separate threads, because they may block. This
//! crate polls no driver: the owner of the device tells the recorder which work has completed.
//!
//! # Examples
//! Compare flight records:
//! ```
//! use std::path::Path;
//! use symmalloc_watchdog::{Finding, Findings, FlightRecord};
//!
//! // The record of rank 0 of two: the rank waits in its second collective.
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
pub mod threads;
mod watching;

pub use connection::Connection;
pub use endpoint::{Endpoint, PeerEvent, SILENT_AFTER};
pub use findings::{Finding, Findings};
pub use flight_record::{
    CollectiveRecord, CollectiveState, CommunicatorRecord, FlightRecord, FlightRecordError, MemoryRecord, PeerRecord,
    Signature,
};
pub use ids::{CommunicatorId, ProcessId, Progress, RankId};
pub use lifeline::Lifeline;
pub use message::{Departure, FailureReport, Member};
pub use watching::{
    ATTRIBUTION_LIMIT, Announced, Call, Callback, Connecting, ERROR_LIMIT, EntryNumber, FAILURE_EXIT_CODE, Failure,
    FailureCause, Flight, FlightRecorder, Identity, LocalError, Marked, MeetingId, NamedRank, POLL_INTERVAL, Process,
    StreamRef, Tick, UnfinishedWork, Unmarked, WatchSettings, Watchable, WatchdogMode, Watched, Work, flight_record,
    is_running, start, write_flight_record,
};
