//! A line of bytes that parts are taken from, first fit: addresses, the memory file, and NCCL's symmetric address space.
//!
//! ```text
//!  0            hole            hole                limit
//!  ├─ taken ─┤         ├ taken ┤     ├── taken ──┤      │
//!              ▲ lowest first                   highest ▲ first
//! ```

use std::collections::BTreeMap;

/// See the file's comment.
#[derive(Debug)]
pub struct Space {
    /// Holes: first byte to length. They never touch each other.
    holes: BTreeMap<u64, u64>,
    limit: u64,
}

/// From which end parts are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The lowest hole that is large enough, from its start.
    Lowest,
    /// The highest hole that is large enough, from its end.
    Highest,
}

impl Space {
    /// All of `[0, limit)` is free.
    pub fn new(limit: u64) -> Self {
        Space { holes: BTreeMap::from([(0, limit)]), limit }
    }

    /// Takes a part. Holes are multiples of whatever was asked for, so the caller keeps to one alignment.
    pub fn take(&mut self, size: u64, end: End) -> Option<u64> {
        let fits = |(_, length): &(&u64, &u64)| **length >= size;
        let found = match end {
            End::Lowest => self.holes.iter().find(fits),
            End::Highest => self.holes.iter().rev().find(fits),
        };
        let (at, length) = found.map(|(at, length)| (*at, *length))?;
        self.holes.remove(&at);
        let (start, rest) = match end {
            End::Lowest => (at, at + size),
            End::Highest => (at + length - size, at),
        };
        if length > size {
            self.holes.insert(rest, length - size);
        }
        Some(start)
    }

    /// Gives a part back.
    pub fn give(&mut self, start: u64, size: u64) {
        assert!(start + size <= self.limit, "a part of this space");
        let (mut start, mut length) = (start, size);
        if let Some((at, before)) = self.holes.range(..start).next_back().map(|(at, length)| (*at, *length)) {
            assert!(at + before <= start, "given back once");
            if at + before == start {
                self.holes.remove(&at);
                (start, length) = (at, before + length);
            }
        }
        if let Some(after) = self.holes.remove(&(start + length)) {
            length += after;
        }
        self.holes.insert(start, length);
    }
}
