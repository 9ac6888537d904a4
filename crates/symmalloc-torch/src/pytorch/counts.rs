//! Statistics as a struct, for PyTorch's `DeviceStats`. `statistics.rs` describes their meaning.

use crate::c_interface::arguments::write;
use crate::guard::report;
use crate::process;
use crate::status::symmalloc_status;
use symmalloc_core::report::MemoryStats;
use symmalloc_core::stats::{Stat, UsageStats};

/// A statistic over time.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct symmalloc_stat {
    /// The current value.
    pub current: u64,
    /// The maximum since peaks were reset.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

/// The counters of a device's allocators, including those over the program's memory. In arrays of three, the entries are the total,
/// small blocks and large blocks.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct symmalloc_counts {
    /// Number of allocations.
    pub allocations: [symmalloc_stat; 3],
    /// Bytes of the allocated blocks.
    pub allocated_bytes: [symmalloc_stat; 3],
    /// Requested bytes.
    pub requested_bytes: [symmalloc_stat; 3],
    /// Bytes of reserved device memory.
    pub reserved_bytes: symmalloc_stat,
    /// Live segments.
    pub segments: u64,
    /// Segments created so far.
    pub segments_born: u64,
    /// Free blocks.
    pub free_blocks: u64,
    /// Allocations that were retried.
    pub retries: u64,
    /// Allocations that failed.
    pub failures: u64,
    /// The limit over all pools in bytes; 0 if there is none.
    pub limit_bytes: u64,
    /// Bytes of memory on the device.
    pub total_bytes: u64,
}

/// Writes the counters of a device. Creates no allocator: the counters of an unused device are 0.
///
/// # Safety
/// `out` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_counts(device: i32, out: *mut symmalloc_counts) -> symmalloc_status {
    report(|| {
        let mut counts = symmalloc_counts::default();
        if let Some(allocator) = process::existing(device) {
            let core = allocator.core();
            let mut stats = core.stats();
            stats.usage.all.allocated_bytes.peak = allocator.peak_bytes();
            counts.add(&stats);
            for (_, other) in allocator.mempools().foreign() {
                counts.add(&other.core().stats());
            }
            counts.retries = allocator.refusals().retries();
            counts.failures = allocator.refusals().failures();
            counts.limit_bytes = core.total_limit_bytes().unwrap_or(0);
            counts.total_bytes = allocator.allocator().device().memory_info().map_or(0, |info| info.total_bytes);
        }
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", counts) }
    })
}

/// Resets all peaks of a device to the current values.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_reset_peaks(device: i32) -> symmalloc_status {
    report(|| {
        if let Some(allocator) = process::existing(device) {
            allocator.reset_peaks();
            allocator.mempools().foreign().iter().for_each(|(_, other)| other.reset_peaks());
        }
        Ok(())
    })
}

impl symmalloc_counts {
    fn add(&mut self, stats: &MemoryStats) {
        let classes = [&stats.usage.all, &stats.usage.small, &stats.usage.large];
        for (at, usage) in classes.into_iter().enumerate() {
            let UsageStats { allocations, allocated_bytes, requested_bytes, .. } = usage;
            self.allocations[at].add(allocations);
            self.allocated_bytes[at].add(allocated_bytes);
            self.requested_bytes[at].add(requested_bytes);
        }
        self.reserved_bytes.add(&stats.reserved_bytes);
        self.segments += stats.segment_count;
        self.segments_born += stats.segments_born;
        self.free_blocks += stats.free_block_count;
    }
}

impl symmalloc_stat {
    fn add(&mut self, stat: &Stat) {
        self.current += stat.current;
        self.peak += stat.peak;
        self.allocated += stat.allocated;
        self.freed += stat.freed;
    }
}
