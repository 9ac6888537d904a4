//! The peak of bytes in use over all heaps of a device, for PyTorch's statistics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of blocks in use and their peak. During concurrent frees, the peak may include blocks that are being freed.
#[derive(Debug, Default)]
pub(crate) struct BytesPeak {
    current_bytes: AtomicU64,
    peak_bytes: AtomicU64,
}

impl BytesPeak {
    #[inline]
    pub(crate) fn add(&self, bytes: u64) {
        let current_bytes = self.current_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if current_bytes > self.peak_bytes.load(Ordering::Relaxed) {
            self.peak_bytes.fetch_max(current_bytes, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn subtract(&self, bytes: u64) {
        self.current_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// Resets the peak to the current value.
    pub(crate) fn reset(&self) {
        self.peak_bytes.store(self.current_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}
