//! Errors in a trace: invalid text, or a record that contradicts earlier records.
//!
//! Every read error names the line (from 1) and, where useful, the column (the byte within the line, from 1).

use std::io;

use super::line::{MAGIC, VERSION};
use crate::text::LineError;
use symmalloc_core::ids::{AllocationId, ObserverId, PoolId, StreamId};
use symmalloc_core::op::NAME_BYTES_MAX;

/// Error reading a trace or its next record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A line is invalid by itself, or could not be read.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line does not identify a trace.
    #[error(
        "not a trace: the first line must be `{MAGIC}` and a version from 1 to {VERSION}; \
         import recordings of other kinds, and decompress a compressed trace, first"
    )]
    NotATrace,
    /// The trace has a later version of the format.
    #[error("the trace has version {found}, but this library reads versions 1 to {VERSION}: use a newer one")]
    UnsupportedVersion {
        /// The version that the trace states.
        found: u64,
    },
    /// The allocator's configuration is stated twice, or after a record.
    #[error("line {line}: `config` is misplaced; write it once, before all records")]
    MisplacedConfig {
        /// The line.
        line: u64,
    },
    /// The record contradicts earlier ones.
    #[error("line {line}: {source}")]
    Inconsistent {
        /// The line.
        line: u64,
        /// The contradiction.
        source: Inconsistency,
    },
    /// The input ends without an `end` line, so its writer was interrupted. All whole records were read; they are a
    /// valid trace of the beginning.
    #[error(
        "line {line}: the trace is torn after {records} whole records; record it again, or keep these records \
         by putting `end {records}` in place of an unfinished last line"
    )]
    Torn {
        /// Number of whole records read.
        records: u64,
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states a number of records that the trace does not have: lines were lost, or the trace was
    /// edited.
    #[error(
        "line {line}: the trace states {stated} records, but has {records}; if it was edited on purpose, write `end {records}`"
    )]
    WrongCount {
        /// The number of the `end` line.
        line: u64,
        /// The stated number.
        stated: u64,
        /// Number of records read.
        records: u64,
    },
    /// Text follows the `end` line.
    #[error("line {line}: the trace ended before this line; a file holds one trace")]
    AfterEnd {
        /// The line.
        line: u64,
    },
}

/// A record that contradicts earlier records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Inconsistency {
    /// A step begins while another step of its pool is open.
    #[error("a step of {pool} begins before the previous one ended: `end_step` is missing")]
    StepOpen {
        /// The pool.
        pool: PoolId,
    },
    /// A step ends without having begun.
    #[error("a step of {pool} ends without having begun: `begin_step` is missing")]
    StepNotOpen {
        /// The pool.
        pool: PoolId,
    },
    /// A stream joins a group that no earlier stream belongs to.
    #[error("stream {stream} joins the group of {group}, which names no group: give the first stream of a group")]
    UnknownGroup {
        /// The stream.
        stream: StreamId,
        /// The name of the group: its first stream.
        group: StreamId,
    },
    /// A stream joins a group in a trace of version 1, which has no groups.
    #[error("stream {stream} joins a group, but the trace states version 1, without groups: state version {VERSION}")]
    GroupInVersion1 {
        /// The stream.
        stream: StreamId,
    },
    /// A stream has an id other than the next one. Streams are registered in ascending order of their ids, without
    /// gaps.
    #[error("stream {stream} is registered, but the next one must be s{next}")]
    StreamOutOfOrder {
        /// The stream of the record.
        stream: StreamId,
        /// The id of the next stream.
        next: u32,
    },
    /// More streams are registered than an allocator can have.
    #[error("more than 65,535 streams are registered; the last id is {}", StreamId::MAX)]
    TooManyStreams,
    /// A pool is created with an id that was used before, or that is neither a key nor the next id. The default pool p0
    /// always exists and is never created.
    #[error("pool {pool} cannot be created: use p{next}, or an unused key up to {}", PoolId::KEY_MAX)]
    PoolOutOfOrder {
        /// The pool of the record.
        pool: PoolId,
        /// The id of the next pool.
        next: u32,
    },
    /// The default pool is configured twice, or after its first use.
    #[error("pool p0 can be configured once only, before the first `a`, `reserve` and `trim`")]
    DefaultPoolInUse,
    /// The default pool cannot be destroyed.
    #[error("pool p0 cannot be destroyed; `trim p0` releases its free memory")]
    DefaultPoolDestroyed,
    /// The stream is not registered.
    #[error("stream {stream} is not registered; put `stream {stream}` before this record")]
    UnknownStream {
        /// The stream of the record.
        stream: StreamId,
    },
    /// The pool does not exist.
    #[error("pool {pool} does not exist; put `pool {pool}` before this record")]
    UnknownPool {
        /// The pool of the record.
        pool: PoolId,
    },
    /// The pool was destroyed.
    #[error("pool {pool} was destroyed; create another one, ids are not reused")]
    DestroyedPool {
        /// The pool of the record.
        pool: PoolId,
    },
    /// An observer has an id other than the next one. Observers are registered in ascending order of their ids, without
    /// gaps.
    #[error("unexpected observer {observer}; the next one must be o{next}")]
    ObserverOutOfOrder {
        /// The observer of the record.
        observer: ObserverId,
        /// The id of the next observer.
        next: u32,
    },
    /// No observer has this id, or it was forgotten.
    #[error("observer {observer} is not registered; put this record between its `observe` and its `forget`")]
    UnknownObserver {
        /// The observer of the record.
        observer: ObserverId,
    },
    /// An earlier allocation, live or freed, has the same id.
    #[error("allocation {} already exists; ids are not reused, choose a new one", id.0)]
    DuplicateAllocation {
        /// The allocation of the record.
        id: AllocationId,
    },
    /// No allocation has this id.
    #[error("allocation {} was never made; put its `a` before this record", id.0)]
    UnknownAllocation {
        /// The allocation of the record.
        id: AllocationId,
    },
    /// The allocation was freed.
    #[error("allocation {} is already freed; remove this record, or move it before the `f`", id.0)]
    FreedAllocation {
        /// The allocation of the record.
        id: AllocationId,
    },
    /// The name exceeds the maximum length.
    #[error("the allocation's name has {bytes} bytes, but at most {NAME_BYTES_MAX} are allowed; shorten it")]
    NameTooLong {
        /// Length of the name in bytes.
        bytes: usize,
    },
    /// A revived allocation has no placement, or its size does not fit its block.
    #[error(
        "a revived allocation needs a placement and 1 to {block_bytes} bytes (the size of its block), not {size_bytes}"
    )]
    RevivedNowhere {
        /// Requested bytes.
        size_bytes: u64,
        /// Size of the block in bytes.
        block_bytes: u64,
    },
    /// A record that may not have these fields has a placement, is marked as revived, or has a name. Only allocations have placements and
    /// are revived. Only allocations, refused requests and streams have names.
    #[error(
        "only an allocation has a placement or is revived, and only it, a refused request or a stream has a name; remove them"
    )]
    NotAnAllocation,
    /// A record other than a free is marked as pending.
    #[error("only a free can be pending; remove `pending`")]
    NotAFree,
}

/// Error writing a record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceWriteError {
    /// The underlying writer failed; the trace is truncated.
    #[error("the trace could not be written")]
    Io(#[from] io::Error),
    /// The record contradicts earlier ones. Nothing was written, and the trace can continue.
    #[error("record {record}: {source}")]
    Inconsistent {
        /// Index of the record, from 0.
        record: u64,
        /// The contradiction.
        source: Inconsistency,
    },
}
