//! A stopwatch for machines that others use as well.
//!
//! A processor of a guest can be half of a core, and the other half another guest's. Who keeps a core's units busy then takes longer
//! while the neighbour is busy too, up to twice as long, and no counter tells a guest. So a [`Stopwatch`] counts with
//! arithmetic of its own how fast a processor is, before and after what it times.
//!
//! `cpp/stopwatch.hpp` has the same for the other programs: change both.

use crate::processor::{Processors, independent};
use std::hint::black_box;
use std::time::Instant;

/// Rounds of arithmetic that say how fast a processor is: some 25 us.
const ROUNDS: u64 = 20_000;
/// A processor is slowed if its arithmetic takes so many times what it took at best.
const SLOWED: f64 = 1.1;
/// Disturbed readings that are put aside, for each one that is asked for.
const PATIENCE: usize = 3;

/// Times work on a processor that nobody slows, where a program can choose its processor and there is one.
pub(crate) struct Stopwatch {
    processors: Processors,
    /// What arithmetic took at best, in nanoseconds.
    best: f64,
    /// The one that work is timed on, among the processors.
    at: usize,
    /// Number of readings, and how many of them were disturbed.
    readings: [usize; 2],
}

/// What a stopwatch read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    nanoseconds: f64,
    /// Whether the processor was slowed, before or after.
    is_disturbed: bool,
}

impl Stopwatch {
    /// Looks at all processors that the program may run on.
    pub(crate) fn new() -> Self {
        let mut stopwatch = Stopwatch { processors: Processors::allowed(), best: f64::MAX, at: 0, readings: [0; 2] };
        for at in 0..stopwatch.processors.count() {
            stopwatch.processors.stay_on(at);
            (0..3).for_each(|_| _ = stopwatch.is_slowed());
        }
        stopwatch.processors.go_anywhere();
        stopwatch
    }

    /// Times the work, divided by a number of things that it does. Other threads go where they like, and so does this one
    /// before and after.
    pub(crate) fn time(&mut self, things: usize, work: impl FnOnce()) -> Reading {
        let was_slowed = !self.settle();
        let start = Instant::now();
        work();
        let elapsed = start.elapsed();
        let is_disturbed = self.is_slowed() || was_slowed;
        self.processors.go_anywhere();
        Reading { nanoseconds: elapsed.as_nanos() as f64 / things as f64, is_disturbed }
    }

    /// So many readings, in nanoseconds. Disturbed ones are put aside and taken again, up to a limit; then they count.
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

    /// Number of readings so far, and how many of them were disturbed.
    pub(crate) fn readings(&self) -> [usize; 2] {
        self.readings
    }

    /// Goes to a processor that nobody slows. Whether there is one; the work is timed on the last one else.
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

    /// Whether somebody slows the processor that this runs on.
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
    fn disturbed_readings_are_taken_again_up_to_a_limit() {
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
        assert_eq!(stopwatch.readings(), [12, 9], "it gives up");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn work_is_timed_on_one_processor_and_the_thread_goes_on_anywhere() {
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
