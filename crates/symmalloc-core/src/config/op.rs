//! The vocabulary: one [`Op`] is one call that a program makes on the allocator.
//!
//! An op is at once the step of a test, the input of a fuzzer, a line of a trace, a unit of replay and of a benchmark,
//! and what a bug report consists of. So what fails anywhere can be saved and run everywhere.
//!
//! Ops name things by their logical ids only. No op carries an address, a raw handle or a time.

use std::num::NonZeroU64;

use crate::config::errors::OutOfMemoryCause;
use crate::config::policy::PoolConfig;
use crate::types::ids::{AllocationId, ObserverId, Placement, PoolId, StreamId};

/// The longest name of an allocation that a record holds, in bytes of UTF-8. Escaped in a text it takes at most six times as many.
pub const NAME_BYTES_MAX: usize = 4 << 10;

/// One call of the vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// The program registers its next stream. Ids are dense: the n-th registration names stream n.
    RegisterStream {
        /// The id the stream gets.
        stream: StreamId,
    },
    /// The program makes its next pool. Ids are dense; pool 0 is the default pool and may be stated only before
    /// anything was allocated, to say how it is configured.
    CreatePool {
        /// The id the pool gets.
        pool: PoolId,
        /// The pool's policy.
        config: Box<PoolConfig>,
    },
    /// The pool is given up: everything in it must be free, and its memory goes back to the device.
    DestroyPool {
        /// The pool.
        pool: PoolId,
    },
    /// Memory of `size_bytes` for work on `stream`.
    Allocate {
        /// What later ops call the allocation.
        id: AllocationId,
        /// The pool to take it from.
        pool: PoolId,
        /// The stream whose work uses it first.
        stream: StreamId,
        /// Requested bytes, not rounded. Zero is allowed and takes no memory.
        size_bytes: u64,
    },
    /// The program is done with the allocation (PyTorch's `free_requested`).
    Free {
        /// The allocation.
        id: AllocationId,
    },
    /// Work on another stream uses the allocation too (PyTorch's `record_stream`).
    RecordUse {
        /// The allocation.
        id: AllocationId,
        /// The stream that uses it.
        stream: StreamId,
    },
    /// The program made `stream` wait, on the device, for all work submitted to `on` so far.
    Wait {
        /// The stream that waits.
        stream: StreamId,
        /// The stream it waits for.
        on: StreamId,
    },
    /// The program waited, on the host, for all work submitted to `stream` so far.
    Synchronize {
        /// The stream.
        stream: StreamId,
    },
    /// The heap of (pool, stream) shall hold at least `size_bytes` of device memory.
    Reserve {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// Bytes of reserved memory to reach.
        size_bytes: u64,
    },
    /// Give free memory back to the device: of one pool, or of all.
    Trim {
        /// The pool, or all pools in order.
        pool: Option<PoolId>,
    },
    /// A point that every rank passes with the same history: where ranks agree and register (rule D6).
    Sync,
    /// A step begins in a pool: what the program repeats, for example a training step. Steps of one key are alike.
    BeginStep {
        /// The pool.
        pool: PoolId,
        /// Which step it is: the shape of a batch, say. 0 when all are alike.
        key: u64,
    },
    /// The pool's step ends.
    EndStep {
        /// The pool.
        pool: PoolId,
    },
    /// The pool gives its memory back, and keeps its addresses and blocks, until it wakes.
    Sleep {
        /// The pool.
        pool: PoolId,
        /// What becomes of the bytes in live blocks.
        contents: Contents,
    },
    /// The pool has memory again, at the addresses that it had.
    Wake {
        /// The pool.
        pool: PoolId,
    },
    /// A sleep or a wake of the pool was asked for, and did not come about. The pool is as it was, but the digest says that it was
    /// asked. Only recordings of running allocators have it.
    Stay {
        /// The pool.
        pool: PoolId,
        /// Of the sleep; `None` for a wake.
        asked: Option<Contents>,
    },
    /// An observer follows the pool's segments: removed ones keep their memory until it lets go, and none is shrunk.
    Observe {
        /// The id the observer gets. Ids are dense, over all pools.
        observer: ObserverId,
        /// The pool.
        pool: PoolId,
    },
    /// The observer has dealt with everything that happened so far.
    Acknowledge {
        /// The observer.
        observer: ObserverId,
    },
    /// The observer is gone.
    Forget {
        /// The observer.
        observer: ObserverId,
    },
    /// A request for (pool, stream) met a limit. `size_bytes` of free memory were given back as the pool's `reclaim`
    /// says, in vain: the request was not served by that. Only recordings of running allocators have it.
    Reclaim {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// Bytes of reserved memory that were missing.
        size_bytes: u64,
    },
    /// A request for (pool, stream) was refused. It took nothing, but the digest says so. Only recordings of running
    /// allocators have it.
    Refuse {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// Requested bytes.
        size_bytes: u64,
        /// What stood in the way.
        refusal: Refusal,
    },
}

/// What becomes of the bytes in live blocks of a pool that sleeps. Free memory is never kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// They are copied to where they outlive their memory, and back when the pool wakes.
    Keep,
    /// They are gone. What lies there after waking is undefined.
    Drop,
    /// They are zero after waking.
    Zero,
}

impl Contents {
    /// All of them.
    pub const ALL: [Contents; 3] = [Contents::Keep, Contents::Drop, Contents::Zero];

    /// Its word in a trace.
    pub fn word(self) -> &'static str {
        match self {
            Contents::Keep => "keep",
            Contents::Drop => "drop",
            Contents::Zero => "zero",
        }
    }
}

/// What stood in the way of a request that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// A configured limit.
    Limit,
    /// The heap's reserved segment or address range is full.
    Segment,
    /// The driver.
    Driver,
}

impl From<&OutOfMemoryCause> for Refusal {
    fn from(cause: &OutOfMemoryCause) -> Self {
        match cause {
            OutOfMemoryCause::Limit { .. } => Refusal::Limit,
            OutOfMemoryCause::SegmentFull { .. } => Refusal::Segment,
            OutOfMemoryCause::Driver(_) => Refusal::Driver,
        }
    }
}

/// An op with what a recording knows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The op.
    pub op: Op,
    /// What the program called the allocation (allocate only).
    pub name: Option<Box<str>>,
    /// Where the recorded allocator put it (allocate only).
    pub placement: Option<Placement>,
    /// How long the recorded allocator went on counting it after the free (free only).
    pub pending: Option<Pending>,
    /// Bytes of its block, where the allocation was not placed anew but revived at its placement (allocate only): a pool went back
    /// to a checkpoint. A replay makes it live there where that is free, and allocates it like any other where it is not.
    pub revived_bytes: Option<NonZeroU64>,
}

impl From<Op> for Record {
    fn from(op: Op) -> Self {
        Record { op, name: None, placement: None, pending: None, revived_bytes: None }
    }
}

impl Record {
    /// The same record with the allocation's name.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The same record with the recorded decision.
    #[must_use]
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// The same record of an allocation that was revived at its placement, in a block of so many bytes; of 0, one that was not.
    #[must_use]
    pub fn with_revival(mut self, placement: Placement, block_bytes: u64) -> Self {
        (self.placement, self.revived_bytes) = (Some(placement), NonZeroU64::new(block_bytes));
        self
    }

    /// The same record with the recorded time between the free and its completion.
    #[must_use]
    pub fn with_pending(mut self, pending: Pending) -> Self {
        self.pending = Some(pending);
        self
    }
}

/// How long memory stayed taken after its free in an allocator that waits until the device is done with it, as PyTorch's
/// does (`active_pending_free`).
///
/// Counted in what such a recording shows one after the other: the records of the trace, and completions.
///
/// ```text
/// f 0 pending 4     a 1 ...     f 2 pending 1     a 3 ...     (2 completes)     (0 completes)     f 1
///                   └────────────────────── four ─────────────────────────┘
/// ```
///
/// This allocator has no such time, since a freed block is free at once (rule D3), and no decision follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pending(NonZeroU64);

impl Pending {
    /// It was not completed when the recording ended.
    pub const TO_THE_END: Pending = Pending(NonZeroU64::MAX);

    /// This many records and completions came before it; `None` for none, which is a free that completes at once.
    pub fn new(entries: u64) -> Option<Self> {
        NonZeroU64::new(entries).map(Pending)
    }

    /// How many records and completions came before it; `u64::MAX` for [`TO_THE_END`](Self::TO_THE_END).
    pub fn entries(self) -> u64 {
        self.0.get()
    }
}

// Readers and recorders keep records by the million.
const _: () = assert!(size_of::<Record>() == 80);
