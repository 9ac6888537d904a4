//! Resources that a program has not released.

use std::fmt;

/// Resources that a program has not released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaks {
    /// Device memory still mapped, in bytes.
    pub mapped_bytes: u64,
    /// Number of ranges that are not released.
    pub ranges: usize,
    /// Number of events that are not recycled.
    pub events: usize,
    /// Number of images that are not discarded.
    pub images: usize,
}

impl Leaks {
    /// Returns `true` if every resource is released.
    pub fn is_empty(&self) -> bool {
        *self == Leaks::default()
    }
}

impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Leaks { mapped_bytes, ranges, events, images } = self;
        write!(f, "{mapped_bytes} bytes mapped, {ranges} ranges reserved, {events} events live, {images} images kept")
    }
}
