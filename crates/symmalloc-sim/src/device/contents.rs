//! What the bytes hold, as far as a program wrote it, and the images that are kept of it.
//!
//! Bytes have one value a run: enough to see whether each is where it was. Memory that was never written holds nothing that can be
//! read, as fresh memory of a device does.

use super::interval::IntervalMap;
use std::collections::BTreeMap;
use symmalloc_core::backend::Part;

/// Where parts of an image lie in memory: (first, behind the last, offset in the image).
pub(super) type Pieces = Vec<(u64, u64, u64)>;

#[derive(Debug, Default)]
pub(super) struct Contents {
    /// By the address at which the memory was mapped first.
    bytes: IntervalMap<u64>,
    images: BTreeMap<u64, (IntervalMap<u64>, u64)>,
    next_image: u64,
}

impl Contents {
    pub(super) fn write(&mut self, start: u64, end: u64, value: u64) {
        self.bytes.insert(start, end, value);
    }

    /// What these bytes hold, if that is one value.
    pub(super) fn read(&self, start: u64, end: u64) -> Option<u64> {
        let mut values = self.bytes.overlapping(start, end).map(|part| part.value);
        let value = values.next().filter(|_| self.bytes.covers(start, end))?;
        values.all(|other| other == value).then_some(value)
    }

    /// The memory is gone.
    pub(super) fn forget(&mut self, start: u64, end: u64) {
        self.bytes.remove(start, end);
    }

    pub(super) fn save(&mut self, pieces: &Pieces) -> u64 {
        let mut image = IntervalMap::default();
        for &(start, end, offset) in pieces {
            for part in self.bytes.overlapping(start, end) {
                image.insert(part.start - start + offset, part.end - start + offset, part.value);
            }
        }
        let size_bytes = pieces.iter().map(|(start, end, _)| end - start).sum();
        self.next_image += 1;
        self.images.insert(self.next_image, (image, size_bytes));
        self.next_image
    }

    /// The pieces lie in an image that is kept.
    pub(super) fn load(&mut self, image: u64, pieces: &Pieces) {
        let Some((image, _)) = self.images.get(&image) else { return };
        for &(start, end, offset) in pieces {
            self.bytes.remove(start, end);
            for part in image.overlapping(offset, offset + (end - start)) {
                self.bytes.insert(part.start - offset + start, part.end - offset + start, part.value);
            }
        }
    }

    /// Whether an image is kept, and has these parts.
    pub(super) fn has(&self, image: u64, parts: &[Part]) -> bool {
        let is_in = |size: u64, part: &Part| part.image_offset_bytes.saturating_add(part.size_bytes) <= size;
        self.images.get(&image).is_some_and(|(_, size)| parts.iter().all(|part| is_in(*size, part)))
    }

    /// Whether it was kept.
    pub(super) fn discard(&mut self, image: u64) -> bool {
        self.images.remove(&image).is_some()
    }

    pub(super) fn images(&self) -> usize {
        self.images.len()
    }
}
