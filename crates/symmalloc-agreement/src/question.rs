//! The questions of an inquiry, and one rank's answers. In each round, all ranks answer the same question. `message.rs` encodes the
//! answers.
//!
//! | question | one rank's answer |
//! |---|---|
//! | compare | configuration, number of ops, one digest over all symmetric heaps |
//! | policies | one page of digests, one per symmetric pool's configuration |
//! | policy | the text of one configuration |
//! | heaps | one page of (pool, streams, ops, oldest op, digest), one entry per heap |
//! | digests | the digests after the given numbers of ops |
//! | checkpoints | the digests retained from before the journal |
//! | ops | the op with the given number, for each of several heaps |
//! | details | the name of an op, and the requests that follow it |

use super::message::{COMPARE_BYTES, HeapMessage, MESSAGE_BYTES, OpMessage, StepMessage};
use super::protocol::ProtocolError;
use symmalloc_core::Digest;
use symmalloc_core::histories::{HeapHistory, Mark, op_word, unpack_op};
use symmalloc_core::ids::StreamGroup;

/// The identity of a heap, equal on all ranks: the symmetric pool's ordinal among symmetric pools, and the streams that
/// share the heap. In the order of keys, groups of streams follow single streams, and the heap that all streams share
/// is last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HeapKey {
    pub(crate) pool: u32,
    /// [`StreamGroup::code`], as in [`HeapMessage`]. Always valid.
    streams: u32,
}

impl HeapKey {
    pub(crate) fn new(pool: u32, group: StreamGroup) -> Self {
        HeapKey { pool, streams: group.code() }
    }

    pub(crate) fn group(self) -> StreamGroup {
        StreamGroup::from_code(self.streams).expect("checked by `decode`")
    }

    /// Returns the streams that share the heap, as a [`StreamGroup::code`].
    pub(crate) fn streams(self) -> u32 {
        self.streams
    }

    fn decode(rank: u32, pool: u32, streams: u32) -> Result<Self, ProtocolError> {
        let group = StreamGroup::from_code(streams).ok_or(ProtocolError::Garbled { rank })?;
        Ok(HeapKey::new(pool, group))
    }
}

/// A position in a heap's history: the number of preceding ops, which is also the number of the next op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpNumber {
    pub(crate) heap: HeapKey,
    pub(crate) ops: u64,
}

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
        HeapSummary { key: HeapKey::new(heap.pool, heap.group), digest: heap.digest, oldest: heap.oldest }
    }

    pub(crate) fn decode(rank: u32, message: &HeapMessage) -> Result<Self, ProtocolError> {
        let key = HeapKey::decode(rank, message.pool.get(), message.streams.get())?;
        let (ops, oldest, value) = (message.ops.get(), message.oldest.get(), message.digest.get());
        // A heap without ops counts as absent.
        if oldest > ops || ops == 0 || ops == u64::MAX {
            return Err(ProtocolError::Garbled { rank });
        }
        Ok(HeapSummary { key, digest: Digest { ops, value }, oldest })
    }
}

impl From<HeapSummary> for HeapMessage {
    fn from(HeapSummary { key, digest, oldest }: HeapSummary) -> Self {
        HeapMessage {
            pool: key.pool.into(),
            streams: key.streams.into(),
            ops: digest.ops.into(),
            oldest: oldest.into(),
            digest: digest.value.into(),
        }
    }
}

/// One op in the answer to [`Ask::Ops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Answer {
    /// The heap has fewer ops on this rank.
    Ended,
    /// The journal does not reach back this far. `order` is the position of its oldest entry in program order; `None`
    /// if it is empty.
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
    pub(crate) fn decode(rank: u32, message: &OpMessage) -> Result<Self, ProtocolError> {
        let (op, decision, order) = (message.op.get(), message.decision.get(), message.order.get());
        match message.kind {
            0 => Ok(Answer::Ended),
            1 => Ok(Answer::Op { op, decision, order }),
            2 => Ok(Answer::Forgotten { order: Some(order) }),
            3 => Ok(Answer::Forgotten { order: None }),
            _ => Err(ProtocolError::Garbled { rank }),
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

    /// Returns the op's position in its rank's program order, or an upper bound if the op is forgotten.
    pub(crate) fn order(&self) -> Option<u64> {
        match *self {
            Answer::Ended => None,
            Answer::Forgotten { order } => order,
            Answer::Op { order, .. } => Some(order),
        }
    }
}

impl From<Answer> for OpMessage {
    fn from(answer: Answer) -> Self {
        let message = |kind, op: u64, decision: u64, order: u64| OpMessage {
            kind,
            op: op.into(),
            decision: decision.into(),
            order: order.into(),
        };
        match answer {
            Answer::Ended => message(0, 0, 0, 0),
            Answer::Op { op, decision, order } => message(1, op, decision, order),
            Answer::Forgotten { order: Some(order) } => message(2, 0, 0, order),
            Answer::Forgotten { order: None } => message(3, 0, 0, 0),
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
            Mark::Trim | Mark::Shrink | Mark::Death | Mark::Obtain | Mark::Carve | Mark::Adopt | Mark::Differ => {
                return None;
            }
            mark => mark,
        };
        Some(Step { op: op_word(mark, stream, amount), place: if names_allocation { decision } else { 0 } })
    }
}

impl From<Step> for StepMessage {
    fn from(Step { op, place }: Step) -> Self {
        StepMessage { op: op.into(), place: place.into() }
    }
}

impl From<&StepMessage> for Step {
    fn from(message: &StepMessage) -> Self {
        Step { op: message.op.get(), place: message.place.get() }
    }
}
