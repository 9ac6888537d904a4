//! Many live blocks, many free blocks, and what the host pays for one: figures that only ours has.
//!
//! The free blocks of [`free_blocks`] stay as many as they are called: live separators of one unit stand between all
//! others, so nothing can merge.
//!
//! ```text
//!  a│s│ f │s│ a  │s│ f │s│ f│s│ a ...     a allocated, f free, s separator, in random order; as many a as f
//! ```

use crate::cases::{Amounts, Random, nanoseconds_since, replace_random};
use crate::report::Report;
use crate::subject::Subject;
use std::time::Instant;

const UNIT_BYTES: u64 = 512;

/// Grows to `count` live blocks, and replaces random ones.
pub(crate) fn live_blocks<S: Subject>(amounts: &Amounts, count: usize, report: &Report, make: &dyn Fn() -> S) {
    let mut random = Random::new();
    let mut size = move || UNIT_BYTES * (1 + random.next() % 8);
    let subject = make();
    {
        let stream = subject.stream(0);
        // Room for what the program holds, touched, so that it is not counted.
        let mut blocks: Vec<Option<S::Block>> = (0..count).map(|_| None).collect();
        let before = resident_bytes();
        let start = Instant::now();
        blocks.iter_mut().for_each(|slot| *slot = Some(subject.allocate(&stream, size())));
        report.figure("growth_ns", &count, &[nanoseconds_since(start) / count as f64]);
        if let Some((before, after)) = before.zip(resident_bytes()) {
            report.figure("host_bytes_per_block", &count, &[after.saturating_sub(before) as f64 / count as f64]);
        }
        blocks.into_iter().flatten().for_each(|block| subject.free(&stream, block));
    }
    let values = replace_random(amounts, &subject, count, &mut size);
    report.figure("live_blocks_ns", &count, &values);
}

/// Keeps `count` free blocks and replaces random live ones.
pub(crate) fn free_blocks<S: Subject>(amounts: &Amounts, count: usize, report: &Report, make: &dyn Fn() -> S) {
    let mut random = Random::new();
    let subject = make();
    let stream = subject.stream(0);
    let (mut live, mut separators) = (Vec::with_capacity(2 * count), Vec::with_capacity(2 * count));
    for _ in 0..2 * count {
        live.push(subject.allocate(&stream, spread(&mut random)));
        separators.push(subject.allocate(&stream, UNIT_BYTES));
    }
    for _ in 0..count {
        let victim = live.swap_remove(random.below(live.len()));
        subject.free(&stream, victim);
    }
    let mut live: Vec<Option<S::Block>> = live.into_iter().map(Some).collect();
    let mut repeat = || {
        let start = Instant::now();
        for _ in 0..amounts.pairs {
            let slot = &mut live[random.below(count)];
            if let Some(block) = slot.take() {
                subject.free(&stream, block);
            }
            *slot = Some(subject.allocate(&stream, spread(&mut random)));
        }
        nanoseconds_since(start) / amounts.pairs as f64
    };
    repeat();
    let values: Vec<f64> = (0..amounts.repeats).map(|_| repeat()).collect();
    report.figure("free_blocks_ns", &count, &values);
    live.into_iter().flatten().chain(separators).for_each(|block| subject.free(&stream, block));
}

/// 512 B to 64 KiB in units, every power of two equally often: two million of them fit a device.
fn spread(random: &mut Random) -> u64 {
    let units = 1 << (random.next() % 7);
    UNIT_BYTES * (units + random.next() % units)
}

/// Host memory of the process; `None` where the system does not say.
fn resident_bytes() -> Option<u64> {
    const PAGE_BYTES: u64 = 4096;
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split(' ').nth(1)?.parse::<u64>().ok()? * PAGE_BYTES)
}
