//! The values that a program wrote to memory, and the images saved from it.
//!
//! Each run of bytes holds one value, which is enough to detect moved data. Memory that was never written has no
//! readable value, like fresh memory of a device.

use super::interval::IntervalMap;
use std::collections::BTreeMap;
use symmalloc_core::backend::Part;

/// Pieces of memory that belong to an image: (start, end, offset in the image).
pub(super) type Pieces = Vec<(u64, u64, u64)>;

#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Values by the address at which the memory was mapped first.
    bytes: IntervalMap<u64>,
    /// Saved images by number: (values by offset, size in bytes).
    images: BTreeMap<u64, (IntervalMap<u64>, u64)>,
    /// Number of the image saved last; 0 before the first.
    next_image: u64,
}

impl Contents {
    pub(super) fn write(&mut self, start: u64, end: u64, value: u64) {
        self.bytes.insert(start, end, value);
    }

    /// Returns the value that all of these bytes hold, or `None` if there is no single value.
    pub(super) fn read(&self, start: u64, end: u64) -> Option<u64> {
        let mut values = self.bytes.overlapping(start, end).map(|part| part.value);
        let value = values.next().filter(|_| self.bytes.covers(start, end))?;
        values.all(|other| other == value).then_some(value)
    }

    /// Returns the offset of the first byte that does not hold the value.
    pub(super) fn first_other(&self, start: u64, end: u64, value: u64) -> Option<u64> {
        let mut at = start;
        for part in self.bytes.overlapping(start, end) {
            if part.start > at || part.value != value {
                break;
            }
            at = part.end;
        }
        (at < end).then_some(at - start)
    }

    /// Discards the values of memory that is unmapped.
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

    /// Restores pieces from an image. They must lie within it.
    pub(super) fn load(&mut self, image: u64, pieces: &Pieces) {
        let Some((image, _)) = self.images.get(&image) else { return };
        for &(start, end, offset) in pieces {
            self.bytes.remove(start, end);
            for part in image.overlapping(offset, offset + (end - start)) {
                self.bytes.insert(part.start - offset + start, part.end - offset + start, part.value);
            }
        }
    }

    /// Returns `true` if the image exists and contains these parts.
    pub(super) fn has(&self, image: u64, parts: &[Part]) -> bool {
        let is_in = |size: u64, part: &Part| part.image_offset_bytes.saturating_add(part.size_bytes) <= size;
        self.images.get(&image).is_some_and(|(_, size)| parts.iter().all(|part| is_in(*size, part)))
    }

    /// Removes an image. Returns `true` if it existed.
    pub(super) fn discard(&mut self, image: u64) -> bool {
        self.images.remove(&image).is_some()
    }

    pub(super) fn images(&self) -> usize {
        self.images.len()
    }
}
