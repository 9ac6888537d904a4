//! Readers for PyTorch memory snapshots, RMM logs and symmalloc traces, each of which may be plain or compressed with
//! gzip or zstd. All readers produce [`Record`](symmalloc_core::op::Record)s.
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
//! [`read_path`] detects the format from the content rather than from the name. It never executes the contents of a file, never trusts a
//! length in it, and never recurses. If the data is damaged, truncated or unsupported, it returns an [`ImportError`] that names the
//! position and a remedy. The [`Summary`] counts the parts that were omitted.
//!
//! Each allocation has one name. With [`ReadOptions::stacks`], a recording from a PyTorch snapshot also has the Python [`Stacks`] of its
//! allocations.
//!
//! # Implementation
//!
//! `recording.rs` detects the format. A custom pickle reader, which keeps only the relevant keys, passes snapshots to `pytorch.rs`. The
//! documentation of `pytorch.rs` maps each trace entry to ops. `rmm.rs` reads logs. Both feed a transcript, which converts addresses and
//! raw handles to logical ids. `symmalloc-trace` reads text traces. [`compression`] is the layer below all readers. It is public for
//! programs that write traces.
//!
//! The reverse direction is [`export()`](export::export), which executes a program on the allocator and writes a PyTorch snapshot of this
//! execution. It observes a [`rerun`], as do charts and [`perfetto`], which draws a job on a timeline.
#![forbid(unsafe_code)]

pub mod compression;
mod error;
pub mod export;
mod held_memory;
mod held_records;
mod options;
mod out_of_memory;
pub mod perfetto;
mod pickle;
mod pytorch;
mod recording;
pub mod rerun;
mod rmm;
mod stacks;
mod summary;
pub mod trace_file;
mod trace_naming;
mod transcript;

pub use error::{ImportError, ImportErrorKind};
pub use held_memory::{HeldHeap, HeldMemory, RecordedFailure};
pub use options::{LIBRARIES, MEMORY_LIMIT_BYTES, ReadOptions};
pub use out_of_memory::{ON_OUT_OF_MEMORY_VARIABLE, OnOutOfMemory, OnOutOfMemoryError};
pub use pickle::PickleError;
pub use pytorch::{DeviceContents, Found, SnapshotError};
pub use recording::{DEFAULT_STREAM, Format, Recording, read_bytes, read_from, read_path};
pub use rmm::RmmError;
pub use stacks::{Stack, Stacks};
pub use summary::Summary;
pub use trace_file::{TraceFile, TraceFileError, TraceFileOptions};
pub use trace_naming::TraceNaming;
