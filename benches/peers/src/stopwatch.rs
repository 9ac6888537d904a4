//! A stopwatch for machines that other users share.
//!
//! A processor of a virtual machine can be half of a core whose other half belongs to another guest. Work that keeps a
//! core's units busy takes up to twice as long while the neighbor is busy, and no counter reports this to the guest. A
//! [`Stopwatch`] therefore measures the speed of the processor with its own arithmetic, before and after the timed
//! work.
//!
//! `cpp/stopwatch.hpp` implements the same for the other programs: change both together.

use crate::processor::{Processors, independent};
use std::hint::black_box;
use std::time::Instant;

/// Rounds of arithmetic that measure the speed of a processor, in about 25 us.
const ROUNDS: u64 = 20_000;
/// A processor is slowed if its arithmetic takes more than this many times the best time.
const SLOWED: f64 = 1.1;
/// Maximum number of disturbed readings that are set aside, per requested reading.
const PATIENCE: usize = 3;

/// Times work on a processor that is not slowed, if there is one and the program can choose its processor.
pub(crate) struct Stopwatch {
    processors: Processors,
    /// Best time of the arithmetic, in nanoseconds.
    best: f64,
    /// Index of the processor on which work is timed.
    at: usize,
    /// Number of all readings, and number of disturbed readings.
    readings: [usize; 2],
}

/// One reading of a stopwatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    nanoseconds: f64,
    /// Set if the processor was slowed before or after the work.
    is_disturbed: bool,
}

impl Stopwatch {
    /// Creates a stopwatch and measures all processors that the program may run on.
    pub(crate) fn new() -> Self {
        let mut stopwatch = Stopwatch { processors: Processors::allowed(), best: f64::MAX, at: 0, readings: [0; 2] };
        for at in 0..stopwatch.processors.count() {
            stopwatch.processors.stay_on(at);
            (0..3).for_each(|_| _ = stopwatch.is_slowed());
        }
        stopwatch.processors.go_anywhere();
        stopwatch
    }

    /// Times the work and divides the time by `things`. The thread is pinned to one processor during the work only;
    /// other threads are not affected.
    pub(crate) fn time(&mut self, things: usize, work: impl FnOnce()) -> Reading {
        let was_slowed = !self.settle();
        let start = Instant::now();
        work();
        let elapsed = start.elapsed();
        let is_disturbed = self.is_slowed() || was_slowed;
        self.processors.go_anywhere();
        Reading { nanoseconds: elapsed.as_nanos() as f64 / things as f64, is_disturbed }
    }

    /// Returns `count` readings in nanoseconds. Disturbed readings are repeated up to a limit, after which they are
    /// used.
    pub(crate) fn read(&mut self, count: usize, mut reading: impl FnMut(&mut Self) -> Reading) -> Vec<f64> {
        let (mut clean, mut disturbed) = (Vec::new(), Vec::new());
        while clean.len() < count && disturbed.len() < PATIENCE * count {
            let Reading { nanoseconds, is_disturbed } = reading(self);
            let kept = if is_disturbed { &mut disturbed } else { &mut clean };
            kept.push(nanoseconds);
        }
        self.readings[0] += clean.len() + disturbed.len();
        self.readings[1] += disturbed.len();
        clean.extend(disturbed.into_iter().take(count - clean.len()));
        clean
    }

    /// Returns the number of all readings so far, and of disturbed ones.
    pub(crate) fn readings(&self) -> [usize; 2] {
        self.readings
    }

    /// Moves to a processor that is not slowed. Returns `false` and uses the last processor if there is none.
    fn settle(&mut self) -> bool {
        let count = self.processors.count();
        (0..2 * count).any(|step| {
            if step > 0 {
                self.at = (self.at + 1) % count;
            }
            self.processors.stay_on(self.at);
            !self.is_slowed()
        })
    }

    /// Returns `true` if the current processor is slowed.
    fn is_slowed(&mut self) -> bool {
        let start = Instant::now();
        black_box(independent(ROUNDS));
        let elapsed = start.elapsed().as_nanos() as f64;
        self.best = self.best.min(elapsed);
        elapsed > SLOWED * self.best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disturbed_readings_are_repeated_up_to_a_limit() {
        let mut stopwatch = Stopwatch::new();
        let mut made = 0;
        let mut every_other = |_: &mut Stopwatch| {
            made += 1;
            Reading { nanoseconds: f64::from(made), is_disturbed: made % 2 == 1 }
        };
        assert_eq!(stopwatch.read(3, &mut every_other), [2.0, 4.0, 6.0]);
        assert_eq!(stopwatch.readings(), [6, 3]);
        let always = |_: &mut Stopwatch| Reading { nanoseconds: 7.0, is_disturbed: true };
        assert_eq!(stopwatch.read(2, always), [7.0, 7.0]);
        assert_eq!(stopwatch.readings(), [12, 9], "repeats are limited");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn work_is_timed_on_one_processor_and_the_thread_is_unpinned_afterward() {
        let allowed = || Processors::allowed().count();
        let (before, mut stopwatch) = (allowed(), Stopwatch::new());
        let mut during = 0;
        let reading = stopwatch.time(2, || {
            during = allowed();
            black_box(independent(1000));
        });
        assert_eq!((during, allowed()), (1, before));
        assert!(reading.nanoseconds > 0.0);
    }
}
