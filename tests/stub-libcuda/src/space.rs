//! A first-fit allocator for a linear space: addresses, the memory file, and NCCL's symmetric address space.
//!
//! ```text
//!  0            hole            hole                limit
//!  ├─ taken ─┤         ├ taken ┤     ├── taken ──┤      │
//!              ▲ lowest first                   highest ▲ first
//! ```

use std::collections::BTreeMap;

/// A linear space of bytes; see the module documentation.
#[derive(Debug)]
pub struct Space {
    /// Holes: first byte to length. They are never adjacent.
    holes: BTreeMap<u64, u64>,
    limit: u64,
}

/// The end of the space from which parts are allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The lowest hole that is large enough, from its start.
    Lowest,
    /// The highest hole that is large enough, from its end.
    Highest,
}

impl Space {
    /// Creates a space in which all of `[0, limit)` is free.
    pub fn new(limit: u64) -> Self {
        Space { holes: BTreeMap::from([(0, limit)]), limit }
    }

    /// Allocates a part. Alignment follows from the sizes: a caller that uses multiples of one unit gets multiples of it.
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

    /// Returns a part to the space.
    pub fn give(&mut self, start: u64, size: u64) {
        assert!(start + size <= self.limit, "a part of this space");
        let (mut start, mut length) = (start, size);
        if let Some((at, before)) = self.holes.range(..start).next_back().map(|(at, length)| (*at, *length)) {
            assert!(at + before <= start, "a part is returned only once");
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
