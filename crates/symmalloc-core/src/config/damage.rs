//! Damage: bytes that the program overwrote outside of its live allocations.

use crate::config::debug::GUARD_BYTES;
use crate::types::backend::{BackendError, DeviceAddress};
use crate::types::ids::{PoolId, StreamId};
use crate::types::units::Amount;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// An allocation as the debug mode remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DebugRecord {
    /// The program's name for it.
    pub name: Option<Arc<str>>,
    /// Address of its first byte. Differs between ranks.
    pub address: DeviceAddress,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The pool.
    pub pool: PoolId,
    /// The stream for which it was allocated.
    pub stream: StreamId,
    /// The number of ops of its heap up to the allocation. Equal on all ranks, and in a recording.
    pub allocated_at_op: u64,
    /// The number of ops of its heap when the program freed it; `None` if it is live.
    pub freed_at_op: Option<u64>,
}

impl fmt::Display for DebugRecord {
    /// Writes `"weights" (4.0 KiB at 0x7f0000000000, p0, s1, op 17)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name:?}")?,
            None => f.write_str("an unnamed allocation")?,
        }
        let DebugRecord { address, requested_bytes, pool, stream, allocated_at_op, .. } = self;
        let address = address.0;
        write!(f, " ({} at {address:#x}, {pool}, {stream}, op {allocated_at_op}", Amount(*requested_bytes))?;
        if let Some(op) = self.freed_at_op {
            write!(f, ", freed at op {op}")?;
        }
        f.write_str(")")
    }
}

/// Bytes outside of live allocations that the program overwrote, found by `debug:canary` or by `debug:poison` with a
/// quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryDamage {
    /// The bytes after a block were overwritten.
    #[error(
        "{block} was overrun: the byte {} after its end, at {:#x}, was overwritten{}. A kernel or a copy wrote past the end \
         of this allocation{}: check the bounds of the work on {} that uses {} before op {checked_at_op}",
        *offset_bytes + 1,
        block.address.0 + block.requested_bytes + offset_bytes,
        if block.freed_at_op.is_some() { " after it was freed" } else { "" },
        Before(next.as_deref()),
        block.stream,
        if next.is_some() { "them" } else { "it" },
    )]
    Guard {
        /// The block before the damaged bytes.
        block: Arc<DebugRecord>,
        /// The block after them, if it was live when they were compared.
        next: Option<Arc<DebugRecord>>,
        /// The first overwritten byte, counted from the block's end.
        offset_bytes: u64,
        /// The number of ops of the heap when the bytes were compared.
        checked_at_op: u64,
    },
    /// A freed block was written before its memory was reused.
    #[error(
        "{block} was written after its free: byte {offset_bytes} of it was overwritten before op {checked_at_op}. Find the \
         work that still uses this allocation, and keep it alive until the work is done, or call record_use for its stream"
    )]
    WrittenAfterFree {
        /// The freed block.
        block: Arc<DebugRecord>,
        /// The first overwritten byte, counted from the block's start.
        offset_bytes: u64,
        /// The number of ops of the heap when the block left the quarantine.
        checked_at_op: u64,
    },
}

/// The other block that may have caused the damage.
struct Before<'a>(Option<&'a DebugRecord>);

impl fmt::Display for Before<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(next) => {
                write!(f, ", or up to {GUARD_BYTES} bytes before the start of {next}, which follows it")
            }
            None => Ok(()),
        }
    }
}

/// A lost device, with what its last work may have used by mistake.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{error}{}", Suspects { freed, asleep })]
#[non_exhaustive]
pub struct MemoryFault {
    /// The driver's error.
    #[source]
    pub error: BackendError,
    /// The allocations that were freed last in pools with debugging options, newest first.
    pub freed: Vec<Arc<DebugRecord>>,
    /// The pools that sleep, whose memory is unmapped.
    pub asleep: Vec<PoolId>,
}

impl MemoryFault {
    pub(crate) fn new(error: BackendError, freed: Vec<Arc<DebugRecord>>, asleep: Vec<PoolId>) -> Self {
        MemoryFault { error, freed, asleep }
    }
}

struct Suspects<'a> {
    freed: &'a [Arc<DebugRecord>],
    asleep: &'a [PoolId],
}

impl fmt::Display for Suspects<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.freed.is_empty() {
            let freed: Vec<_> = self.freed.iter().map(ToString::to_string).collect();
            write!(f, "; freed last, newest first: {}", freed.join(", "))?;
        }
        if !self.asleep.is_empty() {
            let asleep: Vec<_> = self.asleep.iter().map(PoolId::to_string).collect();
            write!(f, "; asleep, without memory: {}", asleep.join(", "))?;
        }
        f.write_str("; check the work on the device that may still use them")
    }
}
