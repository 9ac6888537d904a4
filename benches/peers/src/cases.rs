//! The cases that every peer runs. `cpp/cases.hpp` implements the same cases for the other peers: change both together.

use crate::job::{Job, Move, Script};

use crate::report::Report;
use crate::stopwatch::{Reading, Stopwatch};
use crate::subject::Subject;
use clap::Args;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The amount of measurement.
#[derive(Clone, Debug, Args)]
pub(crate) struct Amounts {
    /// Number of first passes of a job, each on a new allocator.
    #[arg(long, default_value_t = 3)]
    pub(crate) cold: usize,
    /// Number of later passes.
    #[arg(long, default_value_t = 9)]
    pub(crate) steady: usize,
    /// Number of repeats of the other cases.
    #[arg(long, default_value_t = 5)]
    pub(crate) repeats: usize,
    /// Number of op pairs in a repeat.
    #[arg(long, default_value_t = 100_000)]
    pub(crate) pairs: usize,
    /// Duration of a repeat with threads, in milliseconds.
    #[arg(long, default_value_t = 100)]
    pub(crate) thread_ms: u64,
    /// Numbers of threads to measure.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32")]
    pub(crate) threads: Vec<usize>,
}

/// Marsaglia's xorshift64, which produces the same numbers in every program.
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

    #[inline(always)]
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Draws a size from 512 B to 4 MiB, with every power of two equally likely.
    #[inline(always)]
    fn size_bytes(&mut self) -> u64 {
        512 << (self.next() % 14)
    }
}

/// Runs all cases.
pub(crate) fn measure<S: Subject>(amounts: &Amounts, jobs: &[Job], report: &Report, make: &dyn Fn() -> S) {
    let stopwatch = &mut Stopwatch::new();
    for size_bytes in [4096, 4 << 20] {
        pair(amounts, size_bytes, stopwatch, report, make);
    }
    replacement(amounts, stopwatch, report, make);
    amounts.threads.iter().for_each(|count| threads(amounts, *count, report, make));
    jobs.iter().for_each(|job| replay(amounts, job, stopwatch, report, make));
    let [readings, disturbed] = stopwatch.readings().map(|count| count as f64);
    report.figure("readings", &"all", &[readings]);
    report.figure("readings", &"disturbed", &[disturbed]);
}

/// The replay of a job on a subject, with the blocks that are live.
struct Replay<'s, S: Subject> {
    subject: &'s S,
    streams: Vec<S::Stream<'s>>,
    moves: &'s [Move],
    blocks: Vec<Option<S::Block<'s>>>,
}

impl<'s, S: Subject> Replay<'s, S> {
    fn new(subject: &'s S, job: &Job, script: &'s Script) -> Self {
        Replay {
            subject,
            streams: (0..job.streams()).map(|number| subject.stream(number)).collect(),
            moves: &script.moves,
            blocks: (0..script.places).map(|_| None).collect(),
        }
    }

    /// Times one pass over the job.
    fn pass(&mut self, stopwatch: &mut Stopwatch) -> Reading {
        let Replay { subject, streams, moves, blocks } = self;
        let reading = stopwatch.time(moves.len(), || walk(*subject, streams, moves, blocks));
        subject.synchronize();
        reading
    }
}

fn walk<'s, S: Subject>(
    subject: &'s S,
    streams: &[S::Stream<'s>],
    moves: &[Move],
    blocks: &mut [Option<S::Block<'s>>],
) {
    for step in moves {
        match *step {
            Move::Allocate { place, stream, size_bytes } => {
                let allocate = || subject.allocate(&streams[usize::from(stream)], size_bytes);
                // Constructs the block in place. An assignment would construct it on the stack and copy it.
                blocks[place as usize].get_or_insert_with(allocate);
            }
            Move::Free { place, stream } => {
                subject.free_at(&streams[usize::from(stream)], &mut blocks[place as usize]);
            }
            Move::Use { place, stream } => {
                if let Some(block) = &blocks[place as usize] {
                    subject.record_use(block, &streams[usize::from(stream)]);
                }
            }
        }
    }
}

/// Measures passes over newly obtained memory, and passes over memory that is already there.
fn replay<S: Subject>(amounts: &Amounts, job: &Job, stopwatch: &mut Stopwatch, report: &Report, make: &dyn Fn() -> S) {
    let script = Script::new(job);
    let cold = stopwatch.read(amounts.cold, |stopwatch| Replay::new(&make(), job, &script).pass(stopwatch));
    report.figure("cold_ns_per_op", &job.name, &cold);

    let subject = make();
    let mut replay = Replay::new(&subject, job, &script);
    replay.pass(stopwatch);
    let (calls, mut passes) = (subject.driver_calls(), 0);
    let steady = stopwatch.read(amounts.steady, |stopwatch| {
        passes += 1;
        replay.pass(stopwatch)
    });
    report.figure("steady_ns_per_op", &job.name, &steady);
    if let Some((before, after)) = calls.zip(subject.driver_calls()) {
        report.figure("steady_driver_calls", &job.name, &[(after - before) as f64 / f64::from(passes)]);
    }
    if let Some(memory) = subject.memory() {
        report.figure("reserved_peak_bytes", &job.name, &[memory.reserved_peak_bytes as f64]);
        report.figure("segments", &job.name, &[memory.segments as f64]);
    }
}

/// Measures repeated allocation and free of one block.
fn pair<S: Subject>(
    amounts: &Amounts,
    size_bytes: u64,
    stopwatch: &mut Stopwatch,
    report: &Report,
    make: &dyn Fn() -> S,
) {
    let subject = make();
    let stream = subject.stream(0);
    let repeat = |stopwatch: &mut Stopwatch| {
        let reading = stopwatch.time(amounts.pairs, || {
            for _ in 0..amounts.pairs {
                let block = subject.allocate(&stream, size_bytes);
                subject.free(&stream, block);
            }
        });
        subject.synchronize();
        reading
    };
    repeat(stopwatch);
    report.figure("pair_ns", &size_bytes, &stopwatch.read(amounts.repeats, repeat));
}

/// Measures the replacement of random blocks among many live ones by blocks of different sizes.
fn replacement<S: Subject>(amounts: &Amounts, stopwatch: &mut Stopwatch, report: &Report, make: &dyn Fn() -> S) {
    // A compile-time constant, so that the division is not part of the measurement.
    const LIVE: usize = 1000;
    let values = replace_random(amounts, &make(), LIVE, stopwatch, |random| random.below(LIVE), Random::size_bytes);
    report.figure("replacement_ns", &LIVE, &values);
}

/// Returns nanoseconds per pair with `live` blocks. `which` selects the block to replace and `size` its new size.
pub(crate) fn replace_random<S: Subject>(
    amounts: &Amounts,
    subject: &S,
    live: usize,
    stopwatch: &mut Stopwatch,
    mut which: impl FnMut(&mut Random) -> usize,
    mut size: impl FnMut(&mut Random) -> u64,
) -> Vec<f64> {
    let stream = subject.stream(0);
    let mut random = Random::new();
    let mut blocks: Vec<Option<S::Block<'_>>> =
        (0..live).map(|_| Some(subject.allocate(&stream, size(&mut random)))).collect();
    let mut repeat = |stopwatch: &mut Stopwatch| {
        let reading = stopwatch.time(amounts.pairs, || {
            for _ in 0..amounts.pairs {
                let slot = &mut blocks[which(&mut random)];
                subject.free_at(&stream, slot);
                let size_bytes = size(&mut random);
                slot.get_or_insert_with(|| subject.allocate(&stream, size_bytes));
            }
        });
        subject.synchronize();
        reading
    };
    repeat(stopwatch);
    let values = stopwatch.read(amounts.repeats, repeat);
    blocks.into_iter().flatten().for_each(|block| subject.free(&stream, block));
    values
}

/// Measures threads with separate streams that allocate and free 4 KiB until they are stopped.
fn threads<S: Subject>(amounts: &Amounts, count: usize, report: &Report, make: &dyn Fn() -> S) {
    const SIZE_BYTES: u64 = 4096;
    let subject = &make();
    let values = rates(amounts, count, |number| {
        let stream = subject.stream(number);
        move || {
            let block = subject.allocate(&stream, SIZE_BYTES);
            subject.free(&stream, block);
        }
    });
    report.figure("pairs_per_second", &count, &values);
}

/// Returns how often per second all threads together run the work that `make` returns, on any processors.
pub(crate) fn rates<W: FnMut()>(amounts: &Amounts, count: usize, make: impl Fn(usize) -> W + Sync) -> Vec<f64> {
    let repeat = |_| {
        let (start, stop) = (&Barrier::new(count + 1), &AtomicBool::new(false));
        std::thread::scope(|scope| {
            let make = &make;
            let running: Vec<_> =
                (0..count).map(|number| scope.spawn(move || work_until(stop, start, make(number)))).collect();
            start.wait();
            std::thread::sleep(Duration::from_millis(amounts.thread_ms));
            stop.store(true, Ordering::Relaxed);
            running.into_iter().map(|thread| thread.join().expect("a measured thread does not panic")).sum()
        })
    };
    (0..amounts.repeats).map(repeat).collect()
}

/// Runs the work of one thread and returns its rate per second. Each thread uses its own clock, because they start at
/// different times.
fn work_until(stop: &AtomicBool, start: &Barrier, mut work: impl FnMut()) -> f64 {
    const BETWEEN_LOOKS: u32 = 64;
    (0..100).for_each(|_| work());
    start.wait();
    let (begin, mut done) = (Instant::now(), 0);
    // Runs the work at least once, so that a thread that gets no processor before the stop also has a rate.
    loop {
        (0..BETWEEN_LOOKS).for_each(|_| work());
        done += BETWEEN_LOOKS;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    f64::from(done) / begin.elapsed().as_secs_f64()
}
