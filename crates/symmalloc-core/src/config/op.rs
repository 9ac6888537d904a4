//! The vocabulary of ops. An [`Op`] is one call of a program to the allocator.
//!
//! The same ops are the steps of a test, the input of a fuzzer, the lines of a trace, the units of replays and
//! benchmarks, and the content of a bug report. A failure in any of these can therefore be saved as a trace and
//! repeated in all others.
//!
//! Ops use logical ids only. No op carries an address, a raw handle or a time.

use std::num::NonZeroU64;
use std::sync::Arc;

use crate::config::errors::OutOfMemoryCause;
use crate::config::policy::PoolConfig;
use crate::types::groups::Groups;
use crate::types::ids::{AllocationId, ObserverId, Placement, PoolId, StreamId};

/// Maximum length of an allocation's name in a record, in bytes of UTF-8. The escaped text of a name is at most six
/// times as long.
pub const NAME_BYTES_MAX: usize = 4 << 10;

/// One recordable call to the allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// The program registers its next stream. Ids are dense: the n-th registration names stream n.
    RegisterStream {
        /// The id of the stream.
        stream: StreamId,
        /// The first stream of the stream's group: the stream itself if it begins a group.
        group: StreamId,
    },
    /// The program creates a pool with the next id, or with an id that the program chose, called its key. Pool 0 is the
    /// default pool, which always exists. Only a trace may name it here, to state its configuration before the first
    /// allocation.
    CreatePool {
        /// The id of the pool.
        pool: PoolId,
        /// The pool's policy.
        config: Box<PoolConfig>,
    },
    /// The program destroys a pool. All of its allocations must be freed first, and its memory is released to the
    /// device.
    DestroyPool {
        /// The pool.
        pool: PoolId,
    },
    /// The program frees all allocations of a pool at once. The pool's memory stays. In a recording, the frees precede
    /// this op.
    ResetPool {
        /// The pool.
        pool: PoolId,
    },
    /// The program allocates `size_bytes` for work on `stream`.
    Allocate {
        /// The name of the allocation in later ops.
        id: AllocationId,
        /// The pool that serves the request.
        pool: PoolId,
        /// The stream whose work uses the allocation first.
        stream: StreamId,
        /// Requested bytes, not rounded. Zero is allowed and takes no memory.
        size_bytes: u64,
    },
    /// The program frees the allocation (PyTorch's `free_requested`).
    Free {
        /// The allocation.
        id: AllocationId,
    },
    /// Work on another stream uses the allocation as well (PyTorch's `record_stream`).
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
    /// The program requires that the heap of (pool, stream) holds at least `size_bytes` of device memory.
    Reserve {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// Bytes of reserved memory to reach.
        size_bytes: u64,
    },
    /// The program releases the free memory of one pool, or of all.
    Trim {
        /// The pool; `None` for all pools in order.
        pool: Option<PoolId>,
    },
    /// A point that every rank reaches with the same history, at which ranks compare histories and register memory
    /// (rule D6).
    Sync,
    /// A step begins in a pool: a part of the program that repeats, for example a training step. Steps with the same
    /// key are alike.
    BeginStep {
        /// The pool.
        pool: PoolId,
        /// The key of the step, for example the shape of a batch. 0 if all steps are alike.
        key: u64,
    },
    /// The pool's step ends.
    EndStep {
        /// The pool.
        pool: PoolId,
    },
    /// The pool releases its memory but keeps its addresses and blocks until it wakes.
    Sleep {
        /// The pool.
        pool: PoolId,
        /// The treatment of the bytes in live blocks.
        contents: Contents,
    },
    /// The pool has memory again, at its previous addresses.
    Wake {
        /// The pool.
        pool: PoolId,
    },
    /// A sleep or a wake of the pool was requested and failed. The pool is unchanged, but the request is in the digest.
    /// Only recordings of running allocators contain this op.
    Stay {
        /// The pool.
        pool: PoolId,
        /// The contents requested by the sleep; `None` for a wake.
        asked: Option<Contents>,
    },
    /// An observer follows the pool's segments. Removed segments keep their memory until the observer acknowledges the
    /// removal, and no segment shrinks.
    Observe {
        /// The id of the observer. Ids are dense over all pools.
        observer: ObserverId,
        /// The pool.
        pool: PoolId,
    },
    /// The observer has processed all events so far.
    Acknowledge {
        /// The observer.
        observer: ObserverId,
    },
    /// The observer is deregistered.
    Forget {
        /// The observer.
        observer: ObserverId,
    },
    /// A request for (pool, stream) lacked `size_bytes` of memory under a limit. Free memory was released as the pool's
    /// `reclaim` setting specifies, and the request still failed. Only recordings of running allocators contain this
    /// op.
    Reclaim {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// Bytes of reserved memory that the request lacked.
        size_bytes: u64,
    },
    /// A request for (pool, stream) failed. Nothing was allocated, but the refusal is in the digest. Only recordings of
    /// running allocators contain this op: of this allocator, and of other allocators whose logs are imported.
    Refuse {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// Requested bytes.
        size_bytes: u64,
        /// The cause of the refusal.
        refusal: Refusal,
    },
}

impl Op {
    /// Creates the registration of a stream in a new group.
    pub const fn register(stream: StreamId) -> Self {
        Op::RegisterStream { stream, group: stream }
    }

    /// Registers the op's stream in `groups` if the op is a registration.
    pub fn note_group(&self, groups: &mut Groups) {
        if let Op::RegisterStream { stream, group } = *self {
            // A valid program names only groups that exist.
            let _registered = groups.register((group != stream).then_some(group));
        }
    }
}

/// The treatment of the bytes in live blocks of a sleeping pool. Free memory is never kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// The bytes are saved, and restored when the pool wakes.
    Keep,
    /// The bytes are lost. Their values after the wake are undefined.
    Drop,
    /// The bytes are zero after the wake.
    Zero,
}

impl Contents {
    /// All variants.
    pub const ALL: [Contents; 3] = [Contents::Keep, Contents::Drop, Contents::Zero];

    /// Returns the word for this treatment in a trace.
    pub fn word(self) -> &'static str {
        match self {
            Contents::Keep => "keep",
            Contents::Drop => "drop",
            Contents::Zero => "zero",
        }
    }
}

/// The cause of a refused request.
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
            OutOfMemoryCause::SegmentFull { .. } | OutOfMemoryCause::AddressesFull { .. } => Refusal::Segment,
            OutOfMemoryCause::Driver(_) => Refusal::Driver,
        }
    }
}

/// An op with the details that were recorded with it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The op.
    pub op: Op,
    /// The program's name of the allocation, or of the stream (allocate, refuse and register stream only). Records that
    /// a reader returns share one text if their names are equal.
    pub name: Option<Arc<str>>,
    /// The recorded placement (allocate only).
    pub placement: Option<Placement>,
    /// The time between the free and its completion in the recorded allocator (free only).
    pub pending: Option<Pending>,
    /// Size of the block in bytes, if the allocation was revived at its placement because a pool returned to a
    /// checkpoint (allocate only). A replay revives the allocation if its placement is free, and
    /// otherwise allocates it like any other.
    pub revived_bytes: Option<NonZeroU64>,
}

impl From<Op> for Record {
    fn from(op: Op) -> Self {
        Record { op, name: None, placement: None, pending: None, revived_bytes: None }
    }
}

impl Record {
    /// Returns the record with the allocation's name.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Returns the record with the recorded placement.
    #[must_use]
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// Returns the record of an allocation that was revived at its placement in a block of `block_bytes`; 0 if it was
    /// not revived.
    #[must_use]
    pub fn with_revival(mut self, placement: Placement, block_bytes: u64) -> Self {
        (self.placement, self.revived_bytes) = (Some(placement), NonZeroU64::new(block_bytes));
        self
    }

    /// Returns the record with the recorded time between the free and its completion.
    #[must_use]
    pub fn with_pending(mut self, pending: Pending) -> Self {
        self.pending = Some(pending);
        self
    }
}

/// The time for which memory stays allocated after it is freed, in an allocator that waits until the device has
/// completed all uses of the memory, as PyTorch's does (`active_pending_free`).
///
/// The unit is one entry of such a recording: a record of the trace, or a completion.
///
/// ```text
/// f 0 pending 4     a 1 ...     f 2 pending 1     a 3 ...     (2 completes)     (0 completes)     f 1
///                   └────────────────────── four ─────────────────────────┘
/// ```
///
/// In this allocator, a freed block is free at once (rule D3), so its own recordings contain no such time. No decision
/// depends on this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pending(NonZeroU64);

impl Pending {
    /// The free had not completed when the recording ended.
    pub const TO_THE_END: Pending = Pending(NonZeroU64::MAX);

    /// Creates the time from the number of records and completions before this completion. Returns `None` for 0: the
    /// free completed at once.
    pub fn new(entries: u64) -> Option<Self> {
        NonZeroU64::new(entries).map(Pending)
    }

    /// Returns the number of records and completions before this completion; `u64::MAX` for
    /// [`TO_THE_END`](Self::TO_THE_END).
    pub fn entries(self) -> u64 {
        self.0.get()
    }
}

// Readers and recorders hold millions of records.
const _: () = assert!(size_of::<Record>() == 80);
