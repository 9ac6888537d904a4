//! The ops of `symmalloc-core` as text, their replay, and layouts and plans as text.
//!
//! * A [`Trace`] is a list of ops, one record per line. It is at once the step list of a test, the input of a fuzzer, what
//!   a [`replay`] runs and what a bug report consists of. People and `diff` can read, cut and compare it, and it
//!   compresses well. Compression itself is left to others: reader and writer work on any
//!   [`BufRead`](std::io::BufRead) and [`Write`](std::io::Write).
//! * A [`Replay`](replay::Replay) carries recorded ops out on an allocator.
//! * A [`layout`] says what lies where in a pool, and is saved and restored as text.
//! * A [`plan`] says where the allocations of a job go, and is written and followed.
//!
//! ```
//! use symmalloc_trace::{RecordLine, Trace};
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
//! end 7                                         # how many records there are
//! "#)?;
//! assert_eq!(RecordLine(&trace.records()[3]).to_string(), "a 0 1048576 s0");
//! # Ok::<(), symmalloc_trace::TraceError>(())
//! ```
//!
//! The formats stand in `docs/trace-format.md`, `docs/layout-format.md` and `docs/plan-format.md`. A reader checks everything that a text can be
//! checked for by itself ([`LineError`], [`Inconsistency`], [`LayoutTextError`](layout::LayoutTextError),
//! [`PlanTextError`](plan::PlanTextError)); a writer refuses what a reader would refuse.
//!
//! # Implementation
//! `text/` reads lines and their fields, for all formats. `trace/`, `layout/` and `plan/` each have a file for one line, for what
//! the lines before it said, for the reader and for the writer. `replay.rs` stands beside them.
#![forbid(unsafe_code)]

pub mod layout;
pub mod plan;
pub mod replay;
mod text;
mod trace;

pub use symmalloc_core::op::NAME_BYTES_MAX;
pub use text::{LINE_BYTES_MAX, LineError};
pub use trace::{
    Inconsistency, MAGIC, RecordLine, Trace, TraceError, TraceReader, TraceWriteError, TraceWriter, VERSION,
};
