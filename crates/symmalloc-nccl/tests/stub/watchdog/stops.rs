//! Tests with a rank that is stopped at an arbitrary moment: all others name the stopped rank and end in time, mostly within a second of
//! the deadline.

use super::programs::{each_at_a_time, seeds};
use super::{DEADLINE, LATE, Rank, folder};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use stub_process::{ExitOnPanic, WAIT_MAX, nccl_test, ranks, until_some};
use symmalloc_core::PoolConfig;
use symmalloc_nccl::{ReduceOp, Registrar, Registration};
use symmalloc_sim::SplitMix64;

type Failure = Box<dyn std::error::Error>;

const STOPS: u64 = 12;
const SEED: &str = "SYMMALLOC_STOPPED_SEED";
/// Median of the time from the deadline to the end of a process, on an idle machine.
const LATE_MOSTLY: Duration = Duration::from_secs(1);
/// Number of threads and processes that act one after the other between the deadline and the end of a process. Each waits for a processor:
/// watchdog, hub, watchdog, end of the communicator, waiting thread, and this process.
const HANDOVERS: u32 = 6;

/// The scenario of a seed.
#[derive(Clone, Copy, Debug)]
struct Stop {
    seed: u64,
    ranks: usize,
    victim: usize,
    /// Time from the start of the work to the stop.
    moment: Duration,
}

impl Stop {
    fn new(seed: u64) -> Self {
        let mut draw = SplitMix64::new(!seed);
        let ranks = 2 + (draw.next_u64() % 3) as usize;
        let victim = (draw.next_u64() % ranks as u64) as usize;
        Stop { seed, ranks, victim, moment: Duration::from_micros(draw.next_u64() % 600_000) }
    }

    /// Runs the same work on all ranks until an error occurs.
    fn work(&self, it: &mut Rank) -> Result<(), Failure> {
        let registrar = Registrar::builder(&it.allocator).build()?;
        let pool = it.allocator.create_pool(PoolConfig::builder().fixed().symmetric(true).build()?)?;
        registrar.attach(&it.comm, &[pool.id()], Registration::Windows)?;
        let mut draw = SplitMix64::new(self.seed);
        let mut is_stopping = false;
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < WAIT_MAX, "the stopped rank is not noticed");
            for _ in 0..8 {
                it.comm.all_reduce_in_place(&mut it.buffer, ReduceOp::Sum, &it.stream)?;
            }
            it.comm.synchronize(&it.stream)?;
            match draw.next_u64() % 8 {
                0 => {
                    let kept = it.allocator.with_pool(&pool).alloc_zeroed::<u8>(&it.stream, 20 << 20)?;
                    registrar.sync(&[&it.comm])?;
                    drop(kept);
                    registrar.sync(&[&it.comm])?;
                }
                1 => {
                    let part = it.comm.split(Some(0), it.comm.rank())?.expect("the rank should be in a part");
                    part.all_reduce_in_place(&mut it.buffer, ReduceOp::Max, &it.stream)?;
                    part.synchronize(&it.stream)?;
                    part.destroy()?;
                }
                2 => std::thread::sleep(Duration::from_millis(draw.next_u64() % 10)),
                _ => {}
            }
            if it.comm.rank() as usize == self.victim && !std::mem::replace(&mut is_stopping, true) {
                self.stop_in_a_while();
            }
        }
    }

    /// Stops this process after `moment`.
    fn stop_in_a_while(self) {
        std::thread::spawn(move || {
            std::thread::sleep(self.moment);
            fs::write(folder().join("victim.pid"), std::process::id().to_string()).expect("the write should succeed");
            // SAFETY: the call only stops this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        });
    }

    /// Waits until the victim is stopped, and kills it once the others must have ended. Returns the time of the stop.
    fn follow(self, folder: &Path) -> SystemTime {
        let file = folder.join("victim.pid");
        let read = || fs::read_to_string(&file).ok().and_then(|text| text.parse::<i32>().ok());
        let pid = until_some(read);
        let stopped = fs::metadata(&file).and_then(|metadata| metadata.modified()).expect("the file should exist");
        std::thread::sleep(DEADLINE + 2 * LATE);
        // SAFETY: the call only ends a rank of this test, which is stopped.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        stopped
    }
}

/// A measurement of the time for which threads wait for a processor.
struct Busyness {
    is_over: AtomicBool,
    longest: Mutex<Duration>,
}

impl Busyness {
    const SLEEP: Duration = Duration::from_millis(10);

    fn measure(&self) {
        while !self.is_over.load(Ordering::Relaxed) {
            let begun = Instant::now();
            std::thread::sleep(Self::SLEEP);
            let late = begun.elapsed().saturating_sub(Self::SLEEP);
            let mut longest = self.longest.lock().expect("the lock is not poisoned");
            *longest = late.max(*longest);
        }
    }
}

nccl_test!(a_rank_that_is_stopped_at_any_moment_ends_the_others_in_time_after_the_deadline, {
    if let Ok(seed) = std::env::var(SEED) {
        let stop = Stop::new(seed.parse().expect("it should be a number"));
        ranks(stop.ranks, &[], |rank| {
            let mut it = Rank::new(rank, stop.ranks, DEADLINE);
            let error = stop.work(&mut it).expect_err("it ends with an error");
            println!("ERROR {error}");
            drop(it);
            std::process::exit(1);
        });
    }
    let times = Mutex::new(Vec::new());
    let busyness = Arc::new(Busyness { is_over: AtomicBool::new(false), longest: Mutex::default() });
    let meter = std::thread::spawn({
        let busyness = Arc::clone(&busyness);
        move || busyness.measure()
    });
    each_at_a_time(seeds(STOPS), |seed| {
        let (stop, folder) = (Stop::new(seed), tempfile::tempdir().expect("a folder should be created"));
        let options = [(SEED, &*seed.to_string()), ("SYMMALLOC_FLIGHT_RECORDS", &*folder.path().to_string_lossy())];
        let (stopped, outputs) = std::thread::scope(|scope| {
            let _exit = ExitOnPanic;
            let follower = scope.spawn(|| stop.follow(folder.path()));
            let outputs = ranks(stop.ranks, &options, |_| unreachable!("a rank has a seed"));
            (follower.join().expect("the thread does not panic"), outputs)
        });
        for output in outputs.into_iter().filter(|output| output.rank != stop.victim) {
            let took = output.ended.duration_since(stopped).unwrap_or_default();
            let (rank, text) = (output.rank, output.text);
            // In a sync, the first rank that gave up may have notified the others in the messages of the sync.
            let names =
                ["is stopped", "is lost: it died, is stopped"].map(|what| format!("rank {} {what}", stop.victim));
            assert!(names.iter().any(|name| text.contains(name)), "{stop:?}, rank {rank}:\n{text}");
            assert!(took + LATE_MOSTLY / 2 > DEADLINE, "{stop:?}, rank {rank} after {took:?}:\n{text}");
            times.lock().expect("the lock is not poisoned").push((took, stop, rank, text));
        }
    });
    let mut times = times.into_inner().expect("the lock is not poisoned");
    times.sort_by_key(|(took, ..)| *took);
    let (median, (most, stop, rank, text)) =
        (times[times.len() / 2].0, times.last().expect("there is at least one time"));
    busyness.is_over.store(true, Ordering::Relaxed);
    meter.join().expect("the thread does not panic");
    let wait = *busyness.longest.lock().expect("the lock is not poisoned");
    println!(
        "{} ranks ended {median:.2?} (median), {most:.2?} (most) after another one was stopped; a thread waited up to {wait:.2?} \
         for a processor",
        times.len()
    );
    assert!(median < DEADLINE + LATE_MOSTLY + HANDOVERS * wait, "{median:?}, {wait:?}");
    assert!(*most < DEADLINE + LATE + HANDOVERS * wait, "{stop:?}: rank {rank} took {most:?}, {wait:?}\n{text}");
});
