//! Measurements with many live and many free blocks, and the host memory per block, for symmalloc only.
//!
//! The number of free blocks stays constant: live separators of one unit between all other blocks prevent free blocks
//! from merging.
//!
//! ```text
//!  a│s│ f │s│ a  │s│ f │s│ f│s│ a ...     a allocated, f free, s separator, in random order
//! ```
//!
//! Free blocks are measured twice. A program that always works on 1,000 blocks shows the cost of the free blocks alone. A
//! program with as many live blocks as free ones, all replaced at random, shows the cost without locality: its own table,
//! the blocks and their neighbors all exceed the caches.

use crate::cases::{Amounts, Random, replace_random};
use crate::report::Report;
use crate::stopwatch::Stopwatch;
use crate::subject::Subject;
use std::time::Instant;

const UNIT_BYTES: u64 = 512;

/// Grows to `count` live blocks, and then replaces random ones.
pub(crate) fn live_blocks<S: Subject>(
    amounts: &Amounts,
    count: usize,
    stopwatch: &mut Stopwatch,
    report: &Report,
    make: &dyn Fn() -> S,
) {
    let mut random = Random::new();
    let size = |random: &mut Random| UNIT_BYTES * (1 + random.next() % 8);
    let subject = make();
    {
        let stream = subject.stream(0);
        // Space for the program's own data, initialized so that it does not count as new resident memory.
        let mut blocks: Vec<Option<S::Block<'_>>> = (0..count).map(|_| None).collect();
        let before = resident_bytes();
        let start = Instant::now();
        blocks.iter_mut().for_each(|slot| *slot = Some(subject.allocate(&stream, size(&mut random))));
        report.figure("growth_ns", &count, &[start.elapsed().as_nanos() as f64 / count as f64]);
        if let Some((before, after)) = before.zip(resident_bytes()) {
            report.figure("host_bytes_per_block", &count, &[after.saturating_sub(before) as f64 / count as f64]);
        }
        blocks.into_iter().flatten().for_each(|block| subject.free(&stream, block));
    }
    let values = replace_random(amounts, &subject, count, stopwatch, |random| random.below(count), size);
    report.figure("live_blocks_ns", &count, &values);
}

/// Number of live blocks of a program with locality.
const WORKING_SET: usize = 1000;

/// Keeps `count` free blocks and replaces random blocks, first of a small working set and then of `count` live blocks.
pub(crate) fn free_blocks<S: Subject>(
    amounts: &Amounts,
    count: usize,
    stopwatch: &mut Stopwatch,
    report: &Report,
    make: &dyn Fn() -> S,
) {
    for (case, live) in [("free_blocks_ns", WORKING_SET), ("free_and_live_blocks_ns", count)] {
        report.figure(case, &count, &replace_between(amounts, live, count, stopwatch, &make()));
    }
}

/// Returns nanoseconds per pair with `live` and `free` blocks that are never adjacent.
fn replace_between<S: Subject>(
    amounts: &Amounts,
    live: usize,
    free: usize,
    stopwatch: &mut Stopwatch,
    subject: &S,
) -> Vec<f64> {
    let mut random = Random::new();
    let stream = subject.stream(0);
    let (mut blocks, mut separators) = (Vec::with_capacity(live + free), Vec::with_capacity(live + free));
    for _ in 0..live + free {
        blocks.push(subject.allocate(&stream, spread(&mut random)));
        separators.push(subject.allocate(&stream, UNIT_BYTES));
    }
    for _ in 0..free {
        let victim = blocks.swap_remove(random.below(blocks.len()));
        subject.free(&stream, victim);
    }
    let mut blocks: Vec<Option<S::Block<'_>>> = blocks.into_iter().map(Some).collect();
    let mut repeat = |stopwatch: &mut Stopwatch| {
        stopwatch.time(amounts.pairs, || {
            for _ in 0..amounts.pairs {
                let slot = &mut blocks[random.below(live)];
                subject.free_at(&stream, slot);
                let size_bytes = spread(&mut random);
                slot.get_or_insert_with(|| subject.allocate(&stream, size_bytes));
            }
        })
    };
    repeat(stopwatch);
    let values = stopwatch.read(amounts.repeats, repeat);
    blocks.into_iter().flatten().chain(separators).for_each(|block| subject.free(&stream, block));
    values
}

/// Draws a size from 512 B to 64 KiB in units, with every power of two equally likely. Two million blocks fit on a
/// device.
fn spread(random: &mut Random) -> u64 {
    let units = 1 << (random.next() % 7);
    UNIT_BYTES * (units + random.next() % units)
}

/// Returns the resident memory of the process in bytes, or `None` if the system does not report it.
fn resident_bytes() -> Option<u64> {
    const PAGE_BYTES: u64 = 4096;
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split(' ').nth(1)?.parse::<u64>().ok()? * PAGE_BYTES)
}
