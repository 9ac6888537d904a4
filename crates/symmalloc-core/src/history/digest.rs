//! A digest is one number that is equal on two ranks exactly when their histories of (op, decision) are equal.
//!
//! Every heap folds each op that it executes, with its decision, into 64 bits. This takes one folded multiplication (64
//! x 64 -> 128 bits, halves xored) per op, about a nanosecond. No address, handle, time or name is included. A pool's
//! digest combines its heaps in stream order, so that the interleaving of threads has no effect (rule D8).
//!
//! "Exactly when" ignores collisions: two different histories have equal digests with a probability of about 2^-64. A
//! digest does not protect against a malicious rank.

use crate::config::op::Refusal;
use crate::types::ids::{Placement, SegmentId, StreamId};
use crate::types::units::UNIT_BYTES;
use std::fmt;

/// The digest of a heap's or a pool's history, with the number of ops in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    /// Number of folded ops, including refused ones.
    pub ops: u64,
    /// The folded value.
    pub value: u64,
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.value)
    }
}

macro_rules! marks {
    ($($(#[$doc:meta])* $mark:ident,)*) => {
        /// The kind of an op in a digest.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Mark { $($(#[$doc])* $mark,)* }

        /// Every mark, in the order of its number.
        const MARKS: &[Mark] = &[$(Mark::$mark,)*];
    };
}

marks! {
    /// An allocation.
    Allocate,
    /// An allocation of zero bytes.
    AllocateNothing,
    /// A free.
    Free,
    /// The free of an allocation of zero bytes.
    FreeNothing,
    /// A use by another stream.
    RecordUse,
    /// A reservation.
    Reserve,
    /// A trim, after everything that it released.
    Trim,
    /// Memory of a live segment that a trim released.
    Shrink,
    /// A segment that a trim released.
    Death,
    /// A limit refused memory.
    RefusedByLimit,
    /// The driver failed to give memory or to take it back.
    RefusedByDriver,
    /// The heap's only segment, or its range, was full.
    RefusedBySegment,
    /// The end of the pool.
    Destroy,
    /// Memory that was acquired for the preceding op.
    Obtain,
    /// Adopted or dropped plans.
    Adopt,
    /// The start of a step.
    BeginStep,
    /// The end of a step.
    EndStep,
    /// A step that deviated from its plan.
    Differ,
    /// A requested sleep.
    Sleep,
    /// A requested wake.
    Wake,
    /// A reset of the pool, after the frees of its live allocations.
    Reset,
    /// A range of a pool with a base, and its offset from the base.
    Carve,
}

impl From<Refusal> for Mark {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Limit => Mark::RefusedByLimit,
            Refusal::Segment => Mark::RefusedBySegment,
            Refusal::Driver => Mark::RefusedByDriver,
        }
    }
}

// Arbitrary constants with about half of their bits set: digits of pi, as in Blowfish.
const SEED: u64 = 0x243f_6a88_85a3_08d3;
const DECISION_KEY: u64 = 0xa409_3822_299f_31d1;

/// Multiplies 64 x 64 -> 128 bits and xors the halves.
#[inline]
pub fn folded_multiply(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Digest {
    /// Returns the digest of an empty history under a configuration.
    pub(crate) fn new(configuration: u64) -> Self {
        Digest { ops: 0, value: SEED ^ configuration }
    }

    /// Folds an op and its decision.
    #[inline]
    pub(crate) fn fold(&mut self, op: u64, decision: u64) {
        // One folded multiplication per op, as in wyhash. The added count makes the value change even in a run of equal
        // ops.
        self.value = folded_multiply(self.value ^ op, DECISION_KEY ^ decision).wrapping_add(self.ops);
        self.ops += 1;
    }

    /// Folds another digest in.
    pub(crate) fn fold_digest(&mut self, other: Digest) {
        self.fold(other.ops, other.value);
        self.ops = self.ops - 1 + other.ops;
    }
}

/// Encodes an op as one word: the mark's number from 1, a stream, and a number of bytes below 2^42.
#[inline]
pub fn op_word(mark: Mark, stream: StreamId, amount_bytes: u64) -> u64 {
    debug_assert!(amount_bytes < 1 << 42);
    ((mark as u64 + 1) << 58) | (u64::from(stream.0) << 42) | amount_bytes
}

/// Decodes a word of [`op_word`]; `None` for any other word.
pub fn unpack_op(word: u64) -> Option<(Mark, StreamId, u64)> {
    let mark = *MARKS.get(((word >> 58) as usize).checked_sub(1)?)?;
    Some((mark, StreamId((word >> 42) as u16), word & ((1 << 42) - 1)))
}

/// Decodes the placement in a decision's word: segment and offset in units, 32 bits each.
pub fn unpack_placement(word: u64) -> Placement {
    Placement { segment: SegmentId((word >> 32) as u32), offset_bytes: (word & u64::from(u32::MAX)) * UNIT_BYTES }
}

#[cfg(test)]
mod tests;
