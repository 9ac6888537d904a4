//! Reads what users have: PyTorch memory snapshots, RMM logs and symmalloc traces, each plain, gzip or zstd, into the
//! [`Record`](symmalloc_core::op::Record)s of one vocabulary.
//!
//! ```
//! use symmalloc_import::{Format, ReadOptions, read_bytes};
//!
//! let log = b"Thread,Time,Action,Pointer,Size,Stream\n\
//!             7,12:00:00.000000,allocate,0x30a000000,1048576,0x2\n\
//!             7,12:00:00.000001,free,0x30a000000,1048576,0x2\n";
//! let recording = read_bytes(log, &ReadOptions::default())?;
//! assert_eq!(recording.format, Format::RmmLog);
//! assert_eq!(recording.records.len(), 3); // register the stream, allocate, free
//! # Ok::<(), symmalloc_import::ImportError>(())
//! ```
//!
//! [`read_path`] goes by content, never by name. Nothing in a file is executed, no length in it is believed, and
//! nothing recurses; what is damaged, cut off or not understood is an [`ImportError`] that says where and what to do,
//! and what was left out is counted in the [`Summary`].
//!
//! # Implementation
//!
//! `recording.rs` tells the formats apart. Snapshots go through a pickle reader of our own, which keeps only the five
//! keys that matter, to `pytorch.rs`, whose doc says what each trace entry becomes; logs go through `rmm.rs`. Both
//! retell what they read to a transcript, which turns addresses and raw handles into logical ids. Text traces are the
//! core's business. [`compression`] stands below all of them and is public for those who write traces.
//!
//! The way back is [`export()`](export::export): what our allocator makes of a program, as a PyTorch snapshot. It watches a
//! [`rerun`], as charts do, and as [`perfetto`] does, which puts a job on a time line.
#![forbid(unsafe_code)]

pub mod compression;
mod error;
pub mod export;
mod options;
pub mod perfetto;
mod pickle;
mod pytorch;
mod recording;
pub mod rerun;
mod rmm;
mod summary;
pub mod trace_file;
mod trace_naming;
mod transcript;

pub use error::{ImportError, ImportErrorKind};
pub use options::{MEMORY_LIMIT_BYTES, ReadOptions};
pub use pickle::PickleError;
pub use pytorch::{Found, SnapshotError};
pub use recording::{Format, Recording, read_bytes, read_from, read_path};
pub use rmm::RmmError;
pub use summary::Summary;
pub use trace_file::{TraceFile, TraceFileError, TraceFileOptions};
pub use trace_naming::TraceNaming;
