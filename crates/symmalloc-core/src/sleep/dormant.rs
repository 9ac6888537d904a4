//! What a heap knows while it sleeps: what is to be mapped, how much of that is, and what was saved.
//!
//! ```text
//!  mappings   memory, memory, ... in segment order, then what names it a second time
//!             ├── mapped ──┤
//! ```
//! Waking maps from the first to the last, sleeping unmaps from the last to the first. So what is mapped is a beginning of the list
//! at any time, however a driver fails, and memory is there whenever something names it a second time.

use crate::types::backend::{DeviceAddress, Part, Place};

/// Something that is mapped by one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    /// Slot of its segment in the table.
    pub(crate) segment: u32,
    pub(crate) at: Place,
    pub(crate) size_bytes: u64,
    /// Of a stitched range: which memory it names.
    pub(crate) source: Option<Place>,
}

impl Mapping {
    /// Device memory that it takes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        if self.source.is_none() { self.size_bytes } else { 0 }
    }
}

/// See the file's beginning.
#[derive(Debug, Default)]
pub(crate) struct Dormant {
    mappings: Vec<Mapping>,
    /// So many of them are mapped, from the first on.
    mapped: usize,
    /// What was saved, in segment order.
    saved: Vec<Part>,
}

impl Dormant {
    /// All of these are mapped, and nothing is saved.
    pub(crate) fn new(mappings: Vec<Mapping>) -> Self {
        Dormant { mapped: mappings.len(), mappings, saved: Vec::new() }
    }

    /// The mapping to make next.
    pub(crate) fn next_to_map(&self) -> Option<Mapping> {
        self.mappings.get(self.mapped).copied()
    }

    pub(crate) fn note_mapped(&mut self) {
        self.mapped += 1;
    }

    /// The mapping to give up next.
    pub(crate) fn next_to_unmap(&self) -> Option<Mapping> {
        self.mapped.checked_sub(1).map(|at| self.mappings[at])
    }

    pub(crate) fn note_unmapped(&mut self) {
        self.mapped -= 1;
    }

    /// Device memory that is mapped, and that is not.
    pub(crate) fn memory_bytes(&self) -> (u64, u64) {
        let sum = |mappings: &[Mapping]| mappings.iter().map(Mapping::memory_bytes).sum();
        let (mapped, missing) = self.mappings.split_at(self.mapped);
        (sum(mapped), sum(missing))
    }

    /// What is mapped of a segment, as offset and size in bytes.
    pub(crate) fn mapped_of(&self, segment: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mapped = self.mappings[..self.mapped].iter().filter(move |mapping| mapping.segment == segment);
        mapped.map(|mapping| (mapping.at.1, mapping.size_bytes))
    }

    /// These parts, in segment order, are being saved.
    pub(crate) fn save(&mut self, parts: Vec<Part>) {
        self.saved = parts;
    }

    /// Where in the image these runs of live blocks lie, which are given as those that were saved were. Each lies in one of those.
    pub(crate) fn find_saved(&self, live: &[(DeviceAddress, u64)]) -> Vec<Part> {
        let mut saved = self.saved.iter().peekable();
        let find = |&(address, size_bytes): &(DeviceAddress, u64)| {
            let holds = |part: &Part| part.address <= address && address.0 - part.address.0 < part.size_bytes;
            while saved.next_if(|part| !holds(part)).is_some() {}
            let part = saved.peek().expect("what is live was saved: nothing is allocated while a pool sleeps");
            Part { address, size_bytes, image_offset_bytes: part.image_offset_bytes + (address.0 - part.address.0) }
        };
        live.iter().map(find).collect()
    }
}
