//! The questions of an inquiry, one per round and the same for every rank, and the encoding of one rank's answers.
//!
//! | question | one rank's answer |
//! |---|---|
//! | compare | configuration, number of ops, one digest over all symmetric heaps |
//! | policies | one page of digests, one per symmetric pool's configuration |
//! | policy | the text of one configuration |
//! | heaps | one page of (pool, stream, ops, oldest op, digest), one entry per heap |
//! | digests | the digests after the given numbers of ops |
//! | checkpoints | the digests retained from before the journal |
//! | ops | the op with the given number, for each of several heaps |
//! | details | the name of an op, and the requests that follow it |

use super::message::{COMPARE_BYTES, MESSAGE_BYTES, Reader, Writer};
use super::protocol::{ProtocolError, VERSION};
use symmalloc_core::Digest;
use symmalloc_core::histories::{CHECKPOINTS_MAX, HeapHistory, Mark, NAME_BYTES_MAX, op_word, unpack_op};
use symmalloc_core::ids::StreamId;

/// The identity of a heap, equal on all ranks: the symmetric pool's ordinal among symmetric pools, and the stream.
/// Shared streams sort last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HeapKey {
    pub(crate) pool: u32,
    stream: u32,
}

impl HeapKey {
    pub(crate) fn new(pool: u32, stream: Option<StreamId>) -> Self {
        HeapKey { pool, stream: stream.map_or(u32::MAX, |stream| stream.0.into()) }
    }

    pub(crate) fn stream(self) -> Option<StreamId> {
        u16::try_from(self.stream).ok().map(StreamId)
    }

    fn write(self, writer: &mut Writer<'_>) {
        writer.u32(self.pool).u32(self.stream);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, ProtocolError> {
        let (pool, stream) = (reader.u32()?, reader.u32()?);
        if stream > StreamId::MAX.0.into() && stream != u32::MAX {
            return Err(reader.garbled());
        }
        Ok(HeapKey { pool, stream })
    }
}

/// The number of an op in a heap, or a number of ops. The digest after n ops precedes op n.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpNumber {
    pub(crate) heap: HeapKey,
    pub(crate) ops: u64,
}

pub(crate) const POLICIES_PER_PAGE: usize = 120;
pub(crate) const POLICY_BYTES_MAX: usize = 1000;
pub(crate) const HEAPS_PER_PAGE: usize = 31;
pub(crate) const PROBES_MAX: usize = 96;
/// Maximum number of heaps that are searched at once.
pub(crate) const SEARCHES_MAX: usize = 16;
/// Number of requests, from the first difference on, that are compared to determine the cause.
pub(crate) const WINDOW: usize = 8;

const _: () = assert!(4 + 8 * POLICIES_PER_PAGE <= MESSAGE_BYTES);
const _: () = assert!(4 + 32 * HEAPS_PER_PAGE <= MESSAGE_BYTES);
const _: () = assert!(4 + 9 * PROBES_MAX <= MESSAGE_BYTES);
const _: () = assert!(4 + 16 * (CHECKPOINTS_MAX + 3) <= MESSAGE_BYTES);
const _: () = assert!(25 * SEARCHES_MAX <= MESSAGE_BYTES);
const _: () = assert!(6 + 16 * WINDOW + NAME_BYTES_MAX <= MESSAGE_BYTES);

/// The question that all ranks answer in one round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question(pub(crate) Ask);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Compare,
    /// Digests of the policies from this number on. Number 0 belongs to the allocator, the others to symmetric pools.
    Policies {
        first: u32,
    },
    Policy {
        number: u32,
    },
    /// Summaries of the heaps that follow this one.
    Heaps {
        after: Option<HeapKey>,
    },
    Digests {
        at: Vec<OpNumber>,
    },
    Checkpoints {
        heap: HeapKey,
    },
    Ops {
        at: Vec<OpNumber>,
    },
    Details {
        at: OpNumber,
    },
}

impl Question {
    /// Returns the size in bytes of every rank's answer.
    pub fn message_bytes(&self) -> usize {
        if self.0 == Ask::Compare { COMPARE_BYTES } else { MESSAGE_BYTES }
    }
}

/// The answer to [`Ask::Compare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankSummary {
    /// The [`Point`](super::Point) that the rank has reached.
    pub(crate) point: u8,
    pub(crate) policies: u32,
    pub(crate) policy_digest: u64,
    pub(crate) heaps: u32,
    pub(crate) digest: Digest,
}

const MAGIC: u32 = u32::from_le_bytes(*b"symm");
impl RankSummary {
    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(MAGIC).u32(VERSION).u8(self.point).u32(self.policies).u64(self.policy_digest);
        writer.u32(self.heaps).u64(self.digest.ops).u64(self.digest.value);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, ProtocolError> {
        if reader.u32()? != MAGIC {
            return Err(reader.garbled());
        }
        let version = reader.u32()?;
        if version != VERSION {
            return Err(reader.other_version(version));
        }
        Ok(RankSummary {
            point: reader.u8()?,
            policies: reader.u32()?,
            policy_digest: reader.u64()?,
            heaps: reader.u32()?,
            digest: Digest { ops: reader.u64()?, value: reader.u64()? },
        })
    }
}

/// One heap in the answer to [`Ask::Heaps`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeapSummary {
    pub(crate) key: HeapKey,
    pub(crate) digest: Digest,
    /// The smallest number of ops whose digest the journal holds, checkpoints excluded.
    pub(crate) oldest: u64,
}

impl HeapSummary {
    pub(crate) fn of(heap: &HeapHistory) -> Self {
        HeapSummary { key: HeapKey::new(heap.pool, heap.stream), digest: heap.digest, oldest: heap.oldest }
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        self.key.write(writer);
        writer.u64(self.digest.ops).u64(self.oldest).u64(self.digest.value);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, ProtocolError> {
        let key = HeapKey::read(reader)?;
        let (ops, oldest, value) = (reader.u64()?, reader.u64()?, reader.u64()?);
        if oldest > ops || ops == u64::MAX {
            Err(reader.garbled())
        } else {
            Ok(HeapSummary { key, digest: Digest { ops, value }, oldest })
        }
    }
}

/// One op in the answer to [`Ask::Ops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Answer {
    /// The heap has fewer ops on this rank.
    Ended,
    /// The journal does not reach back this far. Its oldest entry has this number in program order.
    Forgotten {
        order: Option<u64>,
    },
    Op {
        op: u64,
        decision: u64,
        order: u64,
    },
}

impl Answer {
    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        match *self {
            Answer::Ended => writer.u8(0).u64(0).u64(0).u64(0),
            Answer::Op { op, decision, order } => writer.u8(1).u64(op).u64(decision).u64(order),
            Answer::Forgotten { order: Some(order) } => writer.u8(2).u64(0).u64(0).u64(order),
            Answer::Forgotten { order: None } => writer.u8(3).u64(0).u64(0).u64(0),
        };
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, ProtocolError> {
        let (kind, op, decision, order) = (reader.u8()?, reader.u64()?, reader.u64()?, reader.u64()?);
        match kind {
            0 => Ok(Answer::Ended),
            1 => Ok(Answer::Op { op, decision, order }),
            2 => Ok(Answer::Forgotten { order: Some(order) }),
            3 => Ok(Answer::Forgotten { order: None }),
            _ => Err(reader.garbled()),
        }
    }

    /// Returns the part of the answer that is equal on ranks that performed the same op.
    pub(crate) fn without_order(self) -> Self {
        match self {
            Answer::Ended => Answer::Ended,
            Answer::Forgotten { .. } => Answer::Forgotten { order: None },
            Answer::Op { op, decision, .. } => Answer::Op { op, decision, order: 0 },
        }
    }

    /// Returns the op's number in its rank's program order, or an upper bound if the op is forgotten.
    pub(crate) fn order(&self) -> Option<u64> {
        match *self {
            Answer::Ended => None,
            Answer::Forgotten { order } => order,
            Answer::Op { order, .. } => Some(order),
        }
    }
}

/// A request of the program: an op and the placement of the allocation that it refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) op: u64,
    place: u64,
}

impl Step {
    /// Returns the request, independent of its outcome. Returns `None` for acquired or released memory, which the
    /// program usually did not request explicitly.
    pub(crate) fn new(op: u64, decision: u64) -> Option<Self> {
        let (mark, stream, amount) = unpack_op(op)?;
        let names_allocation = matches!(mark, Mark::Free | Mark::RecordUse);
        let mark = match mark {
            Mark::RefusedByLimit | Mark::RefusedByDriver | Mark::RefusedBySegment => Mark::Allocate,
            Mark::Trim | Mark::Shrink | Mark::Death | Mark::Obtain | Mark::Adopt | Mark::Differ => return None,
            mark => mark,
        };
        Some(Step { op: op_word(mark, stream, amount), place: if names_allocation { decision } else { 0 } })
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        writer.u64(self.op).u64(self.place);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, ProtocolError> {
        Ok(Step { op: reader.u64()?, place: reader.u64()? })
    }
}
