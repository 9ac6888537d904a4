//! The mappings of a sleeping heap: what to release when it falls asleep, and what to map again when it wakes.
//!
//! ```text
//!  mappings   memory, memory, ... in segment order, then its aliases in stitched ranges
//!             ├── mapped ──┤
//! ```
//! Waking maps from first to last, and sleeping unmaps from last to first. Whichever driver call fails, the memory of
//! every mapped alias therefore exists.

use crate::history::segment_log::Extents;
use crate::types::backend::{Range, RangeOffset};

/// One mapping of a heap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    /// The mapped addresses.
    pub(crate) at: RangeOffset,
    /// Size in bytes.
    pub(crate) size_bytes: u64,
    /// The memory that an alias maps a second time; `None` for a mapping with its own memory.
    pub(crate) source: Option<RangeOffset>,
}

impl Mapping {
    /// Returns the bytes of device memory that the mapping takes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        if self.source.is_none() { self.size_bytes } else { 0 }
    }
}

/// The mappings of a sleeping heap. While the heap sleeps, its mapped addresses do not change, although a free may move
/// memory between them. The list is therefore complete until the heap wakes or is destroyed.
#[derive(Debug)]
pub(crate) struct Mappings {
    /// Memory in segment order, then aliases. No alias precedes the memory that it maps.
    all: Vec<Mapping>,
    /// Number of mappings that exist: the first ones of `all`.
    mapped: usize,
}

impl Mappings {
    /// Creates the list of mappings that all exist.
    pub(crate) fn new(all: Vec<Mapping>) -> Self {
        let mut after_memory = all.iter().skip_while(|mapping| mapping.source.is_none());
        debug_assert!(after_memory.all(|mapping| mapping.source.is_some()), "an alias precedes memory");
        Mappings { mapped: all.len(), all }
    }

    /// Returns the bytes of device memory that is mapped.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.all[..self.mapped].iter().map(Mapping::memory_bytes).sum()
    }

    /// Returns the bytes of device memory that is not mapped.
    pub(crate) fn unmapped_bytes(&self) -> u64 {
        self.all[self.mapped..].iter().map(Mapping::memory_bytes).sum()
    }

    /// Passes the mappings that exist to `unmap`, from last to first, until it fails.
    pub(crate) fn unmap_all<E>(&mut self, mut unmap: impl FnMut(&Mapping) -> Result<(), E>) -> Result<(), E> {
        while let Some(mapping) = self.all[..self.mapped].last() {
            unmap(mapping)?;
            self.mapped -= 1;
        }
        Ok(())
    }

    /// Passes the mappings that do not exist to `map`, from first to last, until it fails.
    pub(crate) fn map_all<E>(&mut self, mut map: impl FnMut(&Mapping) -> Result<(), E>) -> Result<(), E> {
        while let Some(mapping) = self.all.get(self.mapped) {
            map(mapping)?;
            self.mapped += 1;
        }
        Ok(())
    }

    /// Returns the mapped parts of a range.
    pub(crate) fn mapped_in(&self, range: Range) -> Extents {
        let in_range = self.all[..self.mapped].iter().filter(|mapping| mapping.at.0 == range);
        in_range.map(|mapping| (mapping.at.1, mapping.size_bytes)).collect()
    }
}

#[cfg(test)]
mod tests;
