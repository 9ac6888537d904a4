//! What can be wrong with a trace: its text, or a record that contradicts the records before it.
//!
//! Every error of reading names the line (from 1) and, where it helps, the column (the byte in the line, from 1).

use std::io;

use super::line::{MAGIC, VERSION};
use crate::text::LineError;
use symmalloc_core::ids::{AllocationId, ObserverId, PoolId, StreamId};
use symmalloc_core::op::NAME_BYTES_MAX;

/// Why a trace, or its next record, could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A line by itself is wrong, or could not be read.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line is not a trace's.
    #[error(
        "not a trace: the first line must be `{MAGIC} {VERSION}`; \
         import recordings of other kinds, and decompress a compressed trace, first"
    )]
    NotATrace,
    /// The trace was written by a later version of the format.
    #[error("the trace has version {found}, but this library reads version {VERSION}: use a newer one")]
    UnsupportedVersion {
        /// The version the trace states.
        found: u64,
    },
    /// The allocator's configuration stands after a record, or twice.
    #[error("line {line}: `config` may stand once, before every record")]
    MisplacedConfig {
        /// The line.
        line: u64,
    },
    /// The record contradicts those before it.
    #[error("line {line}: {source}")]
    Inconsistent {
        /// The line.
        line: u64,
        /// The contradiction.
        source: Inconsistency,
    },
    /// The input ends without an `end` line: whoever wrote it was stopped. All whole records before were read, and may
    /// be used as a trace of the beginning.
    #[error(
        "line {line}: the trace is torn after {records} whole records; record it again, or use what there is \
         by adding `end {records}` in place of a last unfinished line"
    )]
    Torn {
        /// How many whole records were read.
        records: u64,
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states another number of records than there are: lines were lost, or edited.
    #[error(
        "line {line}: the trace states {stated} records, but has {records}; if it was edited on purpose, write `end {records}`"
    )]
    WrongCount {
        /// The line of the `end`.
        line: u64,
        /// The number stated.
        stated: u64,
        /// How many records were read.
        records: u64,
    },
    /// Something follows the `end` line.
    #[error("line {line}: the trace ended before this line; a file holds one trace")]
    AfterEnd {
        /// The line.
        line: u64,
    },
}

/// A record that contradicts the records before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Inconsistency {
    /// A step begins while one of its pool is open.
    #[error("a step of {pool} begins before the one before it has ended: `end_step` is missing")]
    StepOpen {
        /// The pool.
        pool: PoolId,
    },
    /// A step ends that did not begin.
    #[error("a step of {pool} ends and none has begun: `begin_step` is missing")]
    StepNotOpen {
        /// The pool.
        pool: PoolId,
    },
    /// Streams must be registered in the order of their ids, without a gap.
    #[error("stream {stream} is registered, but the next one must be s{next}")]
    StreamOutOfOrder {
        /// The stream of the record.
        stream: StreamId,
        /// The id that the next stream has.
        next: u32,
    },
    /// Pools must be made in the order of their ids, without a gap. The default pool p0 exists from the start.
    #[error("pool {pool} is made, but the next one must be p{next}")]
    PoolOutOfOrder {
        /// The pool of the record.
        pool: PoolId,
        /// The id that the next pool has.
        next: u32,
    },
    /// The default pool is configured twice, or after memory was taken.
    #[error("pool p0 can be configured once only, before the first `a`, `reserve` and `trim`")]
    DefaultPoolInUse,
    /// The default pool cannot be destroyed.
    #[error("pool p0 cannot be destroyed; `trim p0` gives its free memory back")]
    DefaultPoolDestroyed,
    /// The stream was not registered.
    #[error("stream {stream} is not registered; put `stream {stream}` before this record")]
    UnknownStream {
        /// The stream of the record.
        stream: StreamId,
    },
    /// The pool was not made.
    #[error("pool {pool} was not made; put `pool {pool}` before this record")]
    UnknownPool {
        /// The pool of the record.
        pool: PoolId,
    },
    /// The pool was destroyed.
    #[error("pool {pool} was destroyed; make another one, ids are not reused")]
    DestroyedPool {
        /// The pool of the record.
        pool: PoolId,
    },
    /// Observers must come in the order of their ids, without a gap.
    #[error("observer {observer} comes, but the next one must be o{next}")]
    ObserverOutOfOrder {
        /// The observer of the record.
        observer: ObserverId,
        /// The id that the next observer has.
        next: u32,
    },
    /// No observer has this id, or it is gone.
    #[error("observer {observer} is not there; put its `observe` before this record, and `forget` behind it")]
    UnknownObserver {
        /// The observer of the record.
        observer: ObserverId,
    },
    /// The id was given to an allocation before, which may be freed already.
    #[error("allocation {} exists already; ids are not reused, give a new one", id.0)]
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
    #[error("allocation {} is freed already; remove this record, or move it before the `f`", id.0)]
    FreedAllocation {
        /// The allocation of the record.
        id: AllocationId,
    },
    /// The name is longer than a trace can hold.
    #[error("the allocation's name has {bytes} bytes, but at most {NAME_BYTES_MAX} are allowed; shorten it")]
    NameTooLong {
        /// Length of the name in bytes.
        bytes: usize,
    },
    /// An allocation was revived, and the record does not say where, or its block does not hold it.
    #[error(
        "a revived allocation has a placement, and {size_bytes} bytes, at least 1, in a block of at least as many: not {block_bytes}"
    )]
    RevivedNowhere {
        /// Bytes that were asked for.
        size_bytes: u64,
        /// Bytes of the block.
        block_bytes: u64,
    },
    /// A record of another op than an allocation has a name or a placement, or says that it was revived.
    #[error("only an allocation has a name and a placement, or is revived; take them off")]
    NotAnAllocation,
    /// A record of another op than a free says that memory stayed taken.
    #[error("only a free can be pending; take that off")]
    NotAFree,
}

/// Why a record could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceWriteError {
    /// The writer below failed; the trace is torn.
    #[error("the trace could not be written")]
    Io(#[from] io::Error),
    /// The record contradicts those before it. Nothing was written, and the trace can go on.
    #[error("record {record}: {source}")]
    Inconsistent {
        /// The record, counted from 0.
        record: u64,
        /// The contradiction.
        source: Inconsistency,
    },
}
