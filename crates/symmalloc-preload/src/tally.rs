//! Counters of the program's allocations and frees, enabled if `symmalloc run` requests them.
//!
//! Counters are spread over about as many cache lines as threads are likely to run at once, so that threads rarely share one. Only live
//! bytes and their peak are shared by all threads.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const SHARDS: usize = 16;

/// `true` if counting is enabled.
static IS_ON: AtomicBool = AtomicBool::new(false);

#[repr(align(128))]
struct Shard {
    allocations: AtomicU64,
    frees: AtomicU64,
    passed_on: AtomicU64,
    nanoseconds: AtomicU64,
}

static COUNTS: [Shard; SHARDS] = [const {
    Shard {
        allocations: AtomicU64::new(0),
        frees: AtomicU64::new(0),
        passed_on: AtomicU64::new(0),
        nanoseconds: AtomicU64::new(0),
    }
}; SHARDS];

/// A number of bytes and its peak.
struct Peak {
    current: AtomicU64,
    peak: AtomicU64,
}

impl Peak {
    fn add(&self, bytes: u64) {
        let current = self.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if current > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(current, Ordering::Relaxed);
        }
    }
}

static LIVE: Peak = Peak { current: AtomicU64::new(0), peak: AtomicU64::new(0) };
/// Live bytes, with the driver's rounding.
static DRIVERS: Peak = Peak { current: AtomicU64::new(0), peak: AtomicU64::new(0) };

/// The values of the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) allocations: u64,
    pub(crate) frees: u64,
    /// Allocations that the driver served.
    pub(crate) passed_on: u64,
    /// Time spent in served calls, in nanoseconds.
    pub(crate) nanoseconds: u64,
    pub(crate) peak_live_bytes: u64,
    /// Minimum number of bytes that the driver would have needed for the peak of live memory.
    pub(crate) peak_driver_bytes: u64,
}

/// Enables counting.
pub(crate) fn begin() {
    IS_ON.store(true, Ordering::Relaxed);
}

#[inline]
fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

fn shard() -> &'static Shard {
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if OWN.get() == usize::MAX {
        OWN.set(NEXT.fetch_add(1, Ordering::Relaxed) as usize % SHARDS);
    }
    &COUNTS[OWN.get()]
}

/// Applies the driver's rounding. Sizes below 1 MiB are rounded up to multiples of 512 bytes, because such allocations share 2 MiB pages.
/// Sizes of 1 MiB and more are rounded up to whole 2 MiB pages.
fn driver_bytes(size_bytes: u64) -> u64 {
    if size_bytes < 1 << 20 { size_bytes.next_multiple_of(512) } else { size_bytes.next_multiple_of(2 << 20) }
}

#[inline]
pub(crate) fn allocated(size_bytes: u64) {
    if is_on() {
        shard().allocations.fetch_add(1, Ordering::Relaxed);
        LIVE.add(size_bytes);
        DRIVERS.add(driver_bytes(size_bytes));
    }
}

#[inline]
pub(crate) fn freed(size_bytes: u64) {
    if is_on() {
        shard().frees.fetch_add(1, Ordering::Relaxed);
        LIVE.current.fetch_sub(size_bytes, Ordering::Relaxed);
        DRIVERS.current.fetch_sub(driver_bytes(size_bytes), Ordering::Relaxed);
    }
}

/// Counts an allocation that the driver serves.
#[inline]
pub(crate) fn passed_on() {
    if is_on() {
        shard().passed_on.fetch_add(1, Ordering::Relaxed);
    }
}

/// Times a served call.
#[inline]
pub(crate) fn timed<T>(act: impl FnOnce() -> T) -> T {
    if !is_on() {
        return act();
    }
    let begun = Instant::now();
    let outcome = act();
    shard().nanoseconds.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
    outcome
}

/// Returns the current values of the counters.
pub(crate) fn read() -> Tally {
    let sum = |of: fn(&Shard) -> &AtomicU64| COUNTS.iter().map(|shard| of(shard).load(Ordering::Relaxed)).sum();
    Tally {
        allocations: sum(|shard| &shard.allocations),
        frees: sum(|shard| &shard.frees),
        passed_on: sum(|shard| &shard.passed_on),
        nanoseconds: sum(|shard| &shard.nanoseconds),
        peak_live_bytes: LIVE.peak.load(Ordering::Relaxed),
        peak_driver_bytes: DRIVERS.peak.load(Ordering::Relaxed).next_multiple_of(2 << 20),
    }
}
