//! The most bytes that all heaps together ever held, counted without a counter in common.
//!
//! The peak is shared out. A heap that stays within its share cannot make the sum exceed the peak, so it asks nobody:
//!
//! ```text
//!  heap 0   ████████████──────        █ allocated    ─ the rest of its share
//!  heap 1   ███─────                  Σ shares + spare = peak
//!  heap 2   ██████                    a heap that exceeds its share takes from what is spare, then from what the
//!  spare    ────                      others have left, and only then is there a new peak
//! ```
//!
//! One thread that drives all heaps sees the exact peak. Threads that ask at the same time do not wait for each other: such a
//! heap may exceed its share by [`TOLERANCE_BYTES`] from then on, until the peaks are reset. The peak may be too low by as much
//! for each of them, and by what other threads free while one asks.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::heap::Heap;
use crate::held::HeapCell;
use crate::lock::Lock;
use std::sync::{PoisonError, TryLockError};

/// What a heap may exceed its share by when threads meet.
pub(crate) const TOLERANCE_BYTES: u64 = 1 << 20;

/// A heap's part in the peak.
#[derive(Debug, Default)]
pub(crate) struct Share {
    share_bytes: u64,
    tolerance_bytes: u64,
}

impl Share {
    /// Whether a heap that holds so much has to ask.
    #[inline(always)]
    fn is_exceeded(&self, allocated_bytes: u64) -> bool {
        allocated_bytes > self.share_bytes + self.tolerance_bytes
    }
}

/// The peak over all heaps.
#[derive(Debug, Default)]
pub(crate) struct SharedPeak {
    peak_bytes: u64,
    /// The part of the peak that is no heap's.
    spare_bytes: u64,
}

impl Heap {
    #[inline(always)]
    pub(crate) fn is_share_exceeded(&self) -> bool {
        self.share.is_exceeded(self.usage.allocated_bytes())
    }

    /// Gives up what it does not need of its share.
    fn return_share(&mut self) -> u64 {
        let needed = self.usage.allocated_bytes().min(self.share.share_bytes);
        std::mem::replace(&mut self.share.share_bytes, needed) - needed
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// The most bytes of blocks that all heaps together held since [`reset_peak_stats`](Self::reset_peak_stats). It counts
    /// what was allocated [by pointer](crate::BoundHeap::allocate_pointer). Exact where one thread drives the allocator; with
    /// several it may be too low by 1 MiB for each heap.
    pub fn allocated_bytes_peak(&self) -> u64 {
        self.shared_peak.lock().unwrap_or_else(PoisonError::into_inner).peak_bytes
    }

    /// A heap has exceeded its share.
    #[cold]
    #[inline(never)]
    pub(crate) fn share_peak(&self, heap: &HeapCell<L>) {
        let mut shared = match self.shared_peak.try_lock() {
            Ok(shared) => shared,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let mut heap = heap.lock();
                heap.share.tolerance_bytes = TOLERANCE_BYTES;
                if !heap.is_share_exceeded() {
                    return;
                }
                drop(heap);
                self.shared_peak.lock().unwrap_or_else(PoisonError::into_inner)
            }
        };
        let missing_bytes = |heap: &Heap| heap.usage.allocated_bytes().saturating_sub(heap.share.share_bytes);
        if shared.spare_bytes < missing_bytes(&heap.lock()) {
            shared.spare_bytes += self.heaps.iter().map(|(_, heap)| heap.lock().return_share()).sum::<u64>();
        }
        let mut heap = heap.lock();
        let missing_bytes = missing_bytes(&heap);
        let taken_bytes = missing_bytes.min(shared.spare_bytes);
        shared.peak_bytes += missing_bytes - taken_bytes;
        shared.spare_bytes -= taken_bytes;
        // Half of what is left: the next step up need not ask, nor one of another heap.
        let ahead_bytes = shared.spare_bytes / 2;
        shared.spare_bytes -= ahead_bytes;
        heap.share.share_bytes += missing_bytes + ahead_bytes;
    }

    /// Starts the peak anew at the current value.
    pub(crate) fn reset_shared_peak(&self) {
        let mut shared = self.shared_peak.lock().unwrap_or_else(PoisonError::into_inner);
        *shared = SharedPeak::default();
        for (_, heap) in self.heaps.iter() {
            let mut heap = heap.lock();
            heap.share = Share { share_bytes: heap.usage.allocated_bytes(), tolerance_bytes: 0 };
            shared.peak_bytes += heap.share.share_bytes;
        }
    }
}
