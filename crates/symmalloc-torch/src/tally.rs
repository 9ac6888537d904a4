//! The bytes in use over all heaps, and the most there ever were: `max_memory_allocated`.
//!
//! The core's heaps count for themselves, and what they add up to is the truth but for peaks, which heaps have at different
//! times. People compare this one between programs, so it is counted here, at the price of an atomic addition per op. PyTorch's
//! class takes a lock of its own around every call anyway.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Tally {
    current_bytes: AtomicU64,
    peak_bytes: AtomicU64,
}

impl Tally {
    /// After an allocation was made.
    #[inline]
    pub(crate) fn add(&self, size_bytes: u64) {
        let current = self.current_bytes.fetch_add(size_bytes, Ordering::Relaxed) + size_bytes;
        if current > self.peak_bytes.load(Ordering::Relaxed) {
            self.peak_bytes.fetch_max(current, Ordering::Relaxed);
        }
    }

    /// Before an allocation is freed: another thread that gets its memory at once does not raise the peak.
    #[inline]
    pub(crate) fn take(&self, size_bytes: u64) {
        self.current_bytes.fetch_sub(size_bytes, Ordering::Relaxed);
    }

    /// The most bytes in use since the last [`reset_peak`](Self::reset_peak). With several threads at least what one of them saw.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// Starts the peak anew at the current value.
    pub(crate) fn reset_peak(&self) {
        self.peak_bytes.store(self.current_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}
