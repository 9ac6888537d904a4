//! Text formats for the ops, layouts and plans of `symmalloc-core`, and the replay of recorded ops.
//!
//! * A [`Trace`] is a list of ops, one record per line. The same format serves as test steps, fuzzer input, [`replay`]
//!   input and bug report. People can read and shorten a trace, `diff` can compare two traces, and traces compress
//!   well. This crate does not compress: its readers and writers work on any [`BufRead`](std::io::BufRead) and
//!   [`Write`](std::io::Write).
//! * A [`Replay`](replay::Replay) executes recorded ops on an allocator.
//! * A [`layout`] is a snapshot of a pool's segments and blocks, saved and restored as text.
//! * A [`plan`] assigns offsets to the allocations of a job.
//!
//! ```
//! use symmalloc::trace::{RecordLine, Trace};
//!
//! let trace = Trace::parse(r#"symmalloc-trace 1
//! config segments:expandable,limit_mb:4096      # optional: the allocator's configuration
//! stream s0                                     # streams and pools are declared, in order
//! stream s1
//! pool p1 segments:reserved,segment_mb:64
//! a 0 1048576 s0                                # allocate id 0: 1048576 bytes, on s0, in p0
//! a 1 512 s0 p1 "kv cache" -> 0@1048576         # in p1, named, recorded in segment 0 at that offset
//! u 0 s1                                        # s1 uses it too
//! f 0                                           # free
//! end 7                                         # number of records
//! "#)?;
//! assert_eq!(RecordLine(&trace.records()[3]).to_string(), "a 0 1048576 s0");
//! # Ok::<(), symmalloc::trace::TraceError>(())
//! ```
//!
//! `docs/trace-format.md`, `docs/layout.md` and `docs/plan-format.md` specify the formats. Readers validate everything
//! that can be checked from the text alone ([`LineError`], [`Inconsistency`],
//! [`LayoutTextError`](layout::LayoutTextError), [`PlanTextError`](plan::PlanTextError)). Writers reject whatever a
//! reader would reject.
//!
//! # Implementation
//! `text/` splits lines into fields, for all formats. `trace/`, `layout/` and `plan/` each have one file for a single
//! line, one for the state that earlier lines determine, one for the reader and one for the writer. `replay.rs` builds
//! on `trace/` and `plan/`.
#![forbid(unsafe_code)]

pub mod layout;
pub mod plan;
pub mod replay;
mod text;
mod trace;

pub use symmalloc_core::op::NAME_BYTES_MAX;
pub use text::{Document, DocumentError, Format, LINE_BYTES_MAX, LineError};
pub use trace::{
    Inconsistency, MAGIC, RecordLine, Trace, TraceError, TraceReader, TraceWriteError, TraceWriter, VERSION,
};
