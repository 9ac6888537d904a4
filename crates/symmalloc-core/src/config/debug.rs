//! The options of a pool that find memory errors of the program. See `docs/memory-errors.md`.

use crate::types::units::UNIT_BYTES;
use std::fmt;

/// The number of bytes by which `canary` enlarges a request.
pub(crate) const GUARD_BYTES: u64 = UNIT_BYTES;

/// The options that find memory errors of the program. The default is none of them. Each works without the others.
///
/// All of them are part of the configuration, so ranks that place alike have the same options (rule D1). What the device
/// finds in memory never decides a placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DebugOptions {
    /// New and freed memory is filled with two patterns. Both are NaN as floats of 8, 16, 32 and 64 bits. Freed memory is
    /// filled when its stream next allocates from the pool, unless another stream has reused it by then. Placements are
    /// the same as without.
    pub poison: bool,
    /// Every request grows by 512 bytes, which follow the block's last byte and hold a pattern. The pattern is compared
    /// when the block is freed, in a check, and when the allocator is dropped.
    pub canary: bool,
    /// Each heap keeps freed blocks of up to this many bytes in total before it reuses them, oldest first. 0 turns this
    /// off.
    pub quarantine_bytes: u64,
    /// A free releases the free granules of its heap, so that an access to them faults. The host waits for the streams
    /// that used them.
    pub unmap: bool,
}

impl DebugOptions {
    /// Returns `true` if no option is on.
    pub fn is_off(&self) -> bool {
        *self == DebugOptions::default()
    }

    /// Returns the bytes that a request of `size_bytes` takes from its heap, and that a [`Layout`](crate::Layout) contains. A request of zero bytes has no memory.
    pub fn grown_bytes(&self, size_bytes: u64) -> u64 {
        if self.canary && size_bytes > 0 { size_bytes.saturating_add(GUARD_BYTES) } else { size_bytes }
    }

    /// Returns the program's bytes of a request that took `grown_bytes` from its heap.
    pub(crate) fn program_bytes(&self, grown_bytes: u64) -> u64 {
        if self.canary { grown_bytes.saturating_sub(GUARD_BYTES) } else { grown_bytes }
    }
}

impl fmt::Display for DebugOptions {
    /// Writes the list of options as in a configuration: `[poison,canary,quarantine_bytes:65536,unmap]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quarantine = (self.quarantine_bytes > 0).then(|| match self.quarantine_bytes {
            bytes if bytes.is_multiple_of(1 << 20) => format!("quarantine_mb:{}", bytes >> 20),
            bytes => format!("quarantine_bytes:{bytes}"),
        });
        let word = |is_on: bool, word: &str| is_on.then(|| word.to_owned());
        let words = [word(self.poison, "poison"), word(self.canary, "canary"), quarantine, word(self.unmap, "unmap")];
        write!(f, "[{}]", words.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}
