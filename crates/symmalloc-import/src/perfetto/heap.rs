//! The counters of a heap. They are thinned: each point is the highest value of several consecutive ops.
//!
//! ```text
//!  present      ▁▂▇▂▁▁ | ▁▁▁▁▁▁ |          written after every N ops,
//!  highest           ▇ |      ▁ |          if it differs from the last value written
//! ```

use symmalloc_core::ids::{HeapId, StreamGroup};

/// A quantity in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Quantity {
    /// Bytes requested by live allocations.
    Live,
    /// Bytes in blocks of live allocations.
    Allocated,
    /// Bytes reserved from the device.
    Reserved,
}

/// Names of the counters, in the order of [`Quantity`].
const NAMES: [&str; 3] = ["live", "allocated", "reserved"];

#[derive(Clone, Copy, Debug, Default)]
struct Level {
    present: u64,
    /// Highest value at the end of any op since the last point.
    highest: u64,
    written: Option<u64>,
}

/// One heap on the timeline.
#[derive(Debug)]
pub(super) struct HeapTrack {
    pub(super) owner: HeapId,
    /// `true` if a counter has changed, or if its value differs from the last one written.
    pub(super) has_changed: bool,
    levels: [Level; 3],
}

/// Returns the description of a heap for reports and pictures.
pub(crate) fn heap_words(heap: HeapId) -> String {
    match heap.group {
        StreamGroup::One(stream) => format!("pool {}, stream {}", heap.pool.0, stream.0),
        StreamGroup::Group(first) => format!("pool {}, group of stream {}", heap.pool.0, first.0),
        _ => format!("pool {}, all streams", heap.pool.0),
    }
}

impl HeapTrack {
    pub(super) fn new(owner: HeapId) -> Self {
        HeapTrack { owner, has_changed: false, levels: [Level::default(); 3] }
    }

    pub(super) fn name(&self) -> String {
        heap_words(self.owner)
    }

    /// Adds bytes to a counter, or subtracts them.
    pub(super) fn add(&mut self, counter: Quantity, is_more: bool, bytes: u64) {
        let level = &mut self.levels[counter as usize];
        level.present = if is_more { level.present + bytes } else { level.present - bytes };
    }

    /// Updates the highest values at the end of an op.
    pub(super) fn settle(&mut self) {
        self.levels.iter_mut().for_each(|level| level.highest = level.highest.max(level.present));
    }

    /// Returns the counters that must be written now, with their values.
    pub(super) fn take_points(&mut self) -> impl Iterator<Item = (&'static str, u64)> {
        let levels = &mut self.levels;
        let points = std::array::from_fn::<_, 3, _>(|counter| {
            let level = &mut levels[counter];
            let highest = std::mem::take(&mut level.highest);
            let is_new = level.written.replace(highest) != Some(highest);
            is_new.then_some((NAMES[counter], highest))
        });
        self.has_changed = self.levels.iter().any(|level| level.written != Some(level.present));
        points.into_iter().flatten()
    }
}
