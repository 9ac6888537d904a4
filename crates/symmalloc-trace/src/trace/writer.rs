//! Writer for traces. It writes one record at a time.
//!
//! The output is canonical: one space between fields, the default pool omitted, no comments. Equal records and equal configurations produce
//! equal bytes.

use std::fmt;
use std::io::{self, Write};

use super::error::TraceWriteError;
use super::ledger::Ledger;
use super::line::{MAGIC, REFUSALS, VERSION};
use crate::text::write_name;
use symmalloc_core::config::Config;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::{Contents, Op, Pending, Record};

/// A trace writer. It checks each record as a reader would.
///
/// The trace is complete only after [`finish`](TraceWriter::finish); without it, a reader reports the trace as truncated. Each record is
/// written to `writer` immediately, so `writer` should be buffered.
#[derive(Debug)]
#[must_use = "a trace without its end is torn: call finish"]
pub struct TraceWriter<W: Write> {
    writer: W,
    ledger: Ledger,
    records: u64,
    line: String,
}

impl<W: Write> TraceWriter<W> {
    /// Creates a trace: writes the first line and the allocator's configuration.
    ///
    /// # Errors
    /// Returns an error if the underlying writer fails.
    pub fn new(writer: W, config: Option<&Config>) -> io::Result<Self> {
        let mut trace = TraceWriter { writer, ledger: Ledger::default(), records: 0, line: String::new() };
        writeln!(trace.writer, "{MAGIC} {VERSION}")?;
        if let Some(config) = config {
            writeln!(trace.writer, "config {config}")?;
        }
        Ok(trace)
    }

    /// Writes a record.
    ///
    /// # Errors
    /// Returns an error if the record contradicts earlier ones. Nothing is written then, and the trace can continue. Also returns an error
    /// if the underlying writer fails. The trace is truncated then.
    pub fn write(&mut self, record: &Record) -> Result<(), TraceWriteError> {
        self.ledger.admit(record).map_err(|source| TraceWriteError::Inconsistent { record: self.records, source })?;
        self.line.clear();
        write_record(&mut self.line, record).map_err(io::Error::other)?;
        self.line.push('\n');
        self.writer.write_all(self.line.as_bytes())?;
        self.records += 1;
        Ok(())
    }

    /// Flushes the underlying writer, so that the written records survive a later failure of the program.
    ///
    /// # Errors
    /// Returns an error if the underlying writer fails. The trace is truncated then.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Returns the number of records written so far.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Writes the `end` line, flushes, and returns the underlying writer.
    ///
    /// # Errors
    /// Returns an error if the underlying writer fails. The trace is truncated then.
    pub fn finish(mut self) -> io::Result<W> {
        writeln!(self.writer, "end {}", self.records)?;
        self.writer.flush()?;
        Ok(self.writer)
    }
}

/// A record formatted as its line in a trace, without the line break.
#[derive(Clone, Copy, Debug)]
pub struct RecordLine<'a>(pub &'a Record);

impl fmt::Display for RecordLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_record(f, self.0)
    }
}

fn write_record(line: &mut impl fmt::Write, record: &Record) -> fmt::Result {
    match &record.op {
        Op::RegisterStream { stream, group } => {
            write!(line, "stream {stream}")?;
            if group != stream {
                write!(line, " in {group}")?;
            }
            record.name.as_ref().map_or(Ok(()), |name| write_name(line, name))
        }
        Op::CreatePool { pool, config } => write!(line, "pool {pool} {config}"),
        Op::DestroyPool { pool } => write!(line, "destroy {pool}"),
        Op::ResetPool { pool } => write!(line, "reset {pool}"),
        Op::Allocate { id, pool, stream, size_bytes } => {
            line.write_str("a ")?;
            write_number(line, id.0)?;
            line.write_str(" ")?;
            write_number(line, *size_bytes)?;
            write_stream(line, *stream)?;
            write_pool(line, *pool)?;
            if let Some(name) = &record.name {
                write_name(line, name)?;
            }
            if let Some(placement) = record.placement {
                line.write_str(" -> ")?;
                write_number(line, placement.segment.0.into())?;
                line.write_str("@")?;
                write_number(line, placement.offset_bytes)?;
            }
            match record.revived_bytes {
                Some(block_bytes) => write!(line, " revived {block_bytes}"),
                None => Ok(()),
            }
        }
        Op::Free { id } => {
            line.write_str("f ")?;
            write_number(line, id.0)?;
            match record.pending {
                None => Ok(()),
                Some(Pending::TO_THE_END) => line.write_str(" pending"),
                Some(pending) => write!(line, " pending {}", pending.entries()),
            }
        }
        Op::RecordUse { id, stream } => {
            line.write_str("u ")?;
            write_number(line, id.0)?;
            write_stream(line, *stream)
        }
        Op::Wait { stream, on } => write!(line, "wait {stream} {on}"),
        Op::Synchronize { stream } => write!(line, "synchronize {stream}"),
        Op::Reserve { pool, stream, size_bytes } => {
            write!(line, "reserve {size_bytes} {stream}")?;
            write_pool(line, *pool)
        }
        Op::Trim { pool: Some(pool) } => write!(line, "trim {pool}"),
        Op::Trim { pool: None } => line.write_str("trim"),
        Op::Sync => line.write_str("sync"),
        Op::BeginStep { pool, key } => {
            write!(line, "begin_step {key}")?;
            write_pool(line, *pool)
        }
        Op::EndStep { pool } => {
            line.write_str("end_step")?;
            write_pool(line, *pool)
        }
        Op::Sleep { pool, contents } => {
            write!(line, "sleep {}", contents.word())?;
            write_pool(line, *pool)
        }
        Op::Wake { pool } => {
            line.write_str("wake")?;
            write_pool(line, *pool)
        }
        Op::Stay { pool, asked } => {
            write!(line, "stay {}", asked.map_or("wake", Contents::word))?;
            write_pool(line, *pool)
        }
        Op::Observe { observer, pool } => write!(line, "observe {observer} {pool}"),
        Op::Acknowledge { observer } => write!(line, "acknowledge {observer}"),
        Op::Forget { observer } => write!(line, "forget {observer}"),
        Op::Reclaim { pool, stream, size_bytes } => {
            write!(line, "reclaim {size_bytes} {stream}")?;
            write_pool(line, *pool)
        }
        Op::Refuse { pool, stream, size_bytes, refusal } => {
            write!(line, "refuse {size_bytes} {stream}")?;
            write_pool(line, *pool)?;
            let word = REFUSALS.iter().find(|(known, _)| known == refusal).map_or("", |(_, word)| word);
            write!(line, " {word}")?;
            record.name.as_ref().map_or(Ok(()), |name| write_name(line, name))
        }
    }
}

/// Writes a number. Faster than `write!`, which would double the cost of recording a line.
fn write_number(line: &mut impl fmt::Write, number: u64) -> fmt::Result {
    line.write_str(itoa::Buffer::new().format(number))
}

fn write_stream(line: &mut impl fmt::Write, stream: StreamId) -> fmt::Result {
    line.write_str(" s")?;
    write_number(line, stream.0.into())
}

/// Writes the pool, unless it is the default pool, which is implied.
fn write_pool(line: &mut impl fmt::Write, pool: PoolId) -> fmt::Result {
    if pool == PoolId::DEFAULT { Ok(()) } else { write!(line, " {pool}") }
}
