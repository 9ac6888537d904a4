//! The peak of bytes in use over all heaps of a device, for PyTorch's statistics.
//!
//! The peak is exact, although threads rarely write to a shared cache line to count it. The distance from the bytes in
//! use to the peak is divided into credits:
//!
//! ```text
//!  peak = bytes in use + reserve + credit[0] + credit[1] + ...          a credit for each shard of threads
//!
//!  allocate   takes its bytes from the thread's credit                   free   returns them to the thread's credit
//!      │ the credit is used up
//!      └──► takes half of the reserve ──not enough──► collects all credits ──not enough──► the rest raises the peak
//! ```
//! While no credit is negative, the bytes in use are at most the peak, so an allocation with enough credit cannot raise
//! it. Each refill takes half of what is left, so a thread that approaches the peak needs a logarithmic number of refills.

use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of shards. If there are more threads, some of them share a shard.
const SHARDS: usize = 64;

/// Bytes of blocks in use and their peak. The peak may include blocks that other threads free while one thread raises it.
#[derive(Debug)]
pub(crate) struct BytesPeak {
    shards: Box<[Shard; SHARDS]>,
    books: Mutex<Books>,
}

/// The credit of the threads of one shard, in bytes. Negative only until the allocation that took too much refills it.
/// The alignment is two cache lines, because processors fetch cache lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(AtomicI64);

#[derive(Debug, Default)]
struct Books {
    peak_bytes: i64,
    /// The part of the distance to the peak that no shard holds. Not negative.
    reserve_bytes: i64,
}

impl Default for BytesPeak {
    fn default() -> Self {
        BytesPeak { shards: Box::new([const { Shard(AtomicI64::new(0)) }; SHARDS]), books: Mutex::default() }
    }
}

impl BytesPeak {
    #[inline]
    pub(crate) fn add(&self, bytes: u64) {
        self.add_in(own_shard(), bytes);
    }

    #[inline]
    pub(crate) fn subtract(&self, bytes: u64) {
        self.subtract_in(own_shard(), bytes);
    }

    #[inline]
    fn add_in(&self, shard: usize, bytes: u64) {
        let bytes = bytes.cast_signed();
        if self.shards[shard].0.fetch_sub(bytes, Ordering::Relaxed) < bytes {
            self.refill(shard);
        }
    }

    #[inline]
    fn subtract_in(&self, shard: usize, bytes: u64) {
        self.shards[shard].0.fetch_add(bytes.cast_signed(), Ordering::Relaxed);
    }

    /// Raises the credit of a shard to zero or more. Raises the peak if all credits together are negative.
    #[cold]
    #[inline(never)]
    fn refill(&self, shard: usize) {
        let mut books = self.books();
        let credit = &self.shards[shard].0;
        let missing = -credit.load(Ordering::Relaxed);
        // Another thread of the shard may have refilled the credit, or freed memory.
        if missing <= 0 {
            return;
        }
        if books.reserve_bytes < missing {
            self.collect(&mut books);
            books.raise_to_reserve();
        }
        // After a collection, the credit reflects only what the shard's threads have allocated and freed in the
        // meantime.
        let missing = (-credit.load(Ordering::Relaxed)).max(0).min(books.reserve_bytes);
        let granted = missing + (books.reserve_bytes - missing) / 2;
        books.reserve_bytes -= granted;
        credit.fetch_add(granted, Ordering::Relaxed);
    }

    /// Moves all credits to the reserve, which may become negative.
    fn collect(&self, books: &mut Books) {
        for Shard(credit) in self.shards.iter() {
            // Most shards have no thread. Unlike a swap, a load leaves their cache lines shared.
            if credit.load(Ordering::Relaxed) != 0 {
                books.reserve_bytes += credit.swap(0, Ordering::Relaxed);
            }
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.books().peak_bytes.cast_unsigned()
    }

    /// Resets the peak to the current value.
    pub(crate) fn reset(&self) {
        let mut books = self.books();
        self.collect(&mut books);
        books.peak_bytes -= books.reserve_bytes;
        books.reserve_bytes = 0;
    }
}

impl Books {
    /// Raises the peak by the bytes that the reserve lacks.
    fn raise_to_reserve(&mut self) {
        self.peak_bytes -= self.reserve_bytes.min(0);
        self.reserve_bytes = self.reserve_bytes.max(0);
    }
}

/// Returns the shard of this thread.
#[inline]
fn own_shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    const UNKNOWN: usize = usize::MAX;
    thread_local! {
        // Without a destructor, so that a thread can free while it exits.
        static SHARD: Cell<usize> = const { Cell::new(UNKNOWN) };
    }
    SHARD.with(|shard| match shard.get() {
        UNKNOWN => {
            shard.set(THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS);
            shard.get()
        }
        known => known,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::thread;

    /// A naive counter, which every op updates.
    #[derive(Default)]
    struct Naive {
        current: u64,
        peak: u64,
    }

    #[test]
    fn the_peak_is_that_of_one_counter_whichever_threads_allocate_and_free() {
        let mut seed = 88_172_645_463_325_252_u64;
        let mut draw = |end: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % end
        };
        for shards in [1, 2, SHARDS as u64] {
            let (peak, mut naive, mut live) = (BytesPeak::default(), Naive::default(), Vec::new());
            for _ in 0..20_000 {
                let shard = draw(shards) as usize;
                match draw(200) {
                    0 => {
                        peak.reset();
                        naive.peak = naive.current;
                    }
                    1..=100 if !live.is_empty() => {
                        let bytes = live.swap_remove(draw(live.len() as u64) as usize);
                        peak.subtract_in(shard, bytes);
                        naive.current -= bytes;
                    }
                    _ => {
                        let bytes = 512 << draw(14);
                        live.push(bytes);
                        peak.add_in(shard, bytes);
                        naive.current += bytes;
                        naive.peak = naive.peak.max(naive.current);
                    }
                }
                assert_eq!(peak.bytes(), naive.peak, "{shards} shards");
            }
        }
    }

    #[test]
    fn the_peak_contains_what_all_threads_hold_at_once() {
        const THREADS: usize = 8;
        const BYTES: u64 = 4096;
        let (peak, barrier) = (BytesPeak::default(), Barrier::new(THREADS));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..200 {
                        peak.add(BYTES);
                        barrier.wait();
                        peak.subtract(BYTES);
                    }
                });
            }
        });
        assert_eq!(peak.bytes(), THREADS as u64 * BYTES);
        peak.reset();
        assert_eq!(peak.bytes(), 0, "everything is freed");
    }

    #[test]
    fn a_thread_that_approaches_the_peak_refills_rarely() {
        let peak = BytesPeak::default();
        peak.add_in(0, 1 << 30);
        peak.subtract_in(1, 1 << 30);
        let mut refills = 0;
        for _ in 0..1 << 18 {
            refills += u32::from(peak.shards[0].0.load(Ordering::Relaxed) < 4096);
            peak.add_in(0, 4096);
        }
        assert_eq!(peak.bytes(), 1 << 30);
        assert!(refills <= 20, "{refills} refills for 2^18 allocations");
    }
}
