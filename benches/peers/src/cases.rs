//! The cases that every peer runs. `cpp/cases.hpp` has the same for the others: change both.

use crate::job::{Job, Move, Script};
use crate::report::Report;
use crate::subject::Subject;
use clap::Args;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How much is measured.
#[derive(Clone, Debug, Args)]
pub(crate) struct Amounts {
    /// First passes of a job, each on a new allocator.
    #[arg(long, default_value_t = 3)]
    pub(crate) cold: usize,
    /// Later passes.
    #[arg(long, default_value_t = 9)]
    pub(crate) steady: usize,
    /// Repeats of the other cases.
    #[arg(long, default_value_t = 5)]
    pub(crate) repeats: usize,
    /// Pairs of a repeat.
    #[arg(long, default_value_t = 100_000)]
    pub(crate) pairs: usize,
    /// Milliseconds of a repeat with threads.
    #[arg(long, default_value_t = 100)]
    pub(crate) thread_ms: u64,
    /// Numbers of threads.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32")]
    pub(crate) threads: Vec<usize>,
}

/// Marsaglia's xorshift64, the same numbers in every program.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Self {
        Random(88_172_645_463_325_252)
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    #[inline]
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// 512 B to 4 MiB, every power of two equally often.
    #[inline]
    fn size_bytes(&mut self) -> u64 {
        512 << (self.next() % 14)
    }
}

pub(crate) fn nanoseconds_since(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

/// All cases.
pub(crate) fn measure<S: Subject>(amounts: &Amounts, jobs: &[Job], report: &Report, make: &dyn Fn() -> S) {
    for size_bytes in [4096, 4 << 20] {
        pair(amounts, size_bytes, report, make);
    }
    replacement(amounts, 1000, report, make);
    amounts.threads.iter().for_each(|count| threads(amounts, *count, report, make));
    jobs.iter().for_each(|job| replay(amounts, job, report, make));
}

/// One pass over a job; nanoseconds.
fn pass<S: Subject>(subject: &S, streams: &[S::Stream<'_>], moves: &[Move], blocks: &mut [Option<S::Block>]) -> f64 {
    let start = Instant::now();
    for step in moves {
        match *step {
            Move::Allocate { place, stream, size_bytes } => {
                blocks[place as usize] = Some(subject.allocate(&streams[usize::from(stream)], size_bytes));
            }
            Move::Free { place, stream } => {
                if let Some(block) = blocks[place as usize].take() {
                    subject.free(&streams[usize::from(stream)], block);
                }
            }
            Move::Use { place, stream } => {
                if let Some(block) = &blocks[place as usize] {
                    subject.record_use(block, &streams[usize::from(stream)]);
                }
            }
        }
    }
    nanoseconds_since(start)
}

/// Passes over memory that was just obtained, and over memory that is there.
fn replay<S: Subject>(amounts: &Amounts, job: &Job, report: &Report, make: &dyn Fn() -> S) {
    let Script { moves, places } = Script::new(job);
    let ops = moves.len() as f64;
    let mut blocks: Vec<Option<S::Block>> = (0..places).map(|_| None).collect();
    let (mut cold, mut steady) = (Vec::new(), Vec::new());
    for repeat in 0..amounts.cold {
        let subject = make();
        let streams: Vec<_> = (0..job.streams()).map(|number| subject.stream(number)).collect();
        cold.push(pass(&subject, &streams, &moves, &mut blocks) / ops);
        if repeat + 1 < amounts.cold {
            continue;
        }
        let calls = subject.driver_calls();
        steady.extend((0..amounts.steady).map(|_| pass(&subject, &streams, &moves, &mut blocks) / ops));
        if let Some((before, after)) = calls.zip(subject.driver_calls()) {
            report.figure("steady_driver_calls", &job.name, &[(after - before) as f64]);
        }
        if let Some(memory) = subject.memory() {
            report.figure("reserved_peak_bytes", &job.name, &[memory.reserved_peak_bytes as f64]);
            report.figure("segments", &job.name, &[memory.segments as f64]);
        }
    }
    report.figure("cold_ns_per_op", &job.name, &cold);
    report.figure("steady_ns_per_op", &job.name, &steady);
}

/// One block, again and again.
fn pair<S: Subject>(amounts: &Amounts, size_bytes: u64, report: &Report, make: &dyn Fn() -> S) {
    let subject = make();
    let stream = subject.stream(0);
    let repeat = || {
        let start = Instant::now();
        for _ in 0..amounts.pairs {
            let block = subject.allocate(&stream, size_bytes);
            subject.free(&stream, block);
        }
        nanoseconds_since(start) / amounts.pairs as f64
    };
    repeat();
    let values: Vec<f64> = (0..amounts.repeats).map(|_| repeat()).collect();
    report.figure("pair_ns", &size_bytes, &values);
}

/// Many live blocks, of which a random one at a time is replaced by one of another size.
fn replacement<S: Subject>(amounts: &Amounts, live: usize, report: &Report, make: &dyn Fn() -> S) {
    let mut random = Random::new();
    let subject = make();
    let values = replace_random(amounts, &subject, live, &mut || random.size_bytes());
    report.figure("replacement_ns", &live, &values);
}

/// One block that is replaced by another. Who and by what is drawn before the clock starts: what takes longest in drawing, a
/// division, would stand in front of all that an allocator does.
struct Replacement {
    place: u32,
    size_bytes: u64,
}

/// Nanoseconds per pair, with `live` blocks of sizes that `size` gives.
pub(crate) fn replace_random<S: Subject>(
    amounts: &Amounts,
    subject: &S,
    live: usize,
    size: &mut dyn FnMut() -> u64,
) -> Vec<f64> {
    let stream = subject.stream(0);
    let mut random = Random::new();
    let mut blocks: Vec<Option<S::Block>> = (0..live).map(|_| Some(subject.allocate(&stream, size()))).collect();
    let mut repeat = || {
        let draw = |_| Replacement { place: random.below(live) as u32, size_bytes: size() };
        let replacements: Vec<_> = (0..amounts.pairs).map(draw).collect();
        let start = Instant::now();
        for &Replacement { place, size_bytes } in &replacements {
            let slot = &mut blocks[place as usize];
            if let Some(block) = slot.take() {
                subject.free(&stream, block);
            }
            *slot = Some(subject.allocate(&stream, size_bytes));
        }
        nanoseconds_since(start) / amounts.pairs as f64
    };
    repeat();
    let values = (0..amounts.repeats).map(|_| repeat()).collect();
    blocks.into_iter().flatten().for_each(|block| subject.free(&stream, block));
    values
}

/// Threads with a stream each that allocate and free 4 KiB for as long as they are told to.
fn threads<S: Subject>(amounts: &Amounts, count: usize, report: &Report, make: &dyn Fn() -> S) {
    let subject = make();
    let repeat = || {
        let (start, stop) = (Barrier::new(count + 1), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..count)
                .map(|number| {
                    let (subject, start, stop) = (&subject, &start, &stop);
                    scope.spawn(move || pairs_until(subject, number, start, stop))
                })
                .collect();
            start.wait();
            let begin = Instant::now();
            std::thread::sleep(Duration::from_millis(amounts.thread_ms));
            stop.store(true, Ordering::Relaxed);
            let done = running.into_iter().map(|thread| thread.join().expect("the thread's own panic came first"));
            done.sum::<usize>() as f64 * 1e9 / nanoseconds_since(begin)
        })
    };
    let values: Vec<f64> = (0..amounts.repeats).map(|_| repeat()).collect();
    report.figure("pairs_per_second", &count, &values);
}

/// What one thread does; how many pairs it did.
fn pairs_until<S: Subject>(subject: &S, number: usize, start: &Barrier, stop: &AtomicBool) -> usize {
    const SIZE_BYTES: u64 = 4096;
    const BETWEEN_LOOKS: usize = 64;
    let stream = subject.stream(number);
    let pairs = |count: usize| {
        for _ in 0..count {
            let block = subject.allocate(&stream, SIZE_BYTES);
            subject.free(&stream, block);
        }
    };
    pairs(100);
    start.wait();
    let mut done = 0;
    loop {
        pairs(BETWEEN_LOOKS);
        done += BETWEEN_LOOKS;
        if stop.load(Ordering::Relaxed) {
            return done;
        }
    }
}
