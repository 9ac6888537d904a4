//! Random programs on 2 to 4 ranks, with a victim that suffers a fault at some call: it dies, is stopped, is slow, fails, leaves early,
//! panics or gets stuck. Every other rank ends in time, and its report is true.

use super::{DEADLINE, LATE, Rank};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stub_process::{ExitOnPanic, RankOutput, nccl, nccl_test, ranks};
use symmalloc_core::PoolConfig;
use symmalloc_nccl::{AllToAll, CommState, ReduceOp, Registrar, Registration, UniqueId};
use symmalloc_sim::SplitMix64;

type Failure = Box<dyn std::error::Error>;

/// Number of programs per test; `SYMMALLOC_SEEDS` overrides it. Threads share the stub, so their programs run sequentially.
const SEEDS_OF_PROCESSES: u64 = 24;
const SEEDS_OF_THREADS: u64 = 10;
/// Number of programs with processes that run concurrently.
const AT_A_TIME: u64 = 6;
const STEPS: u64 = 14;
/// Deadline of programs in which nothing fails. All of their ranks may be slower than the other deadline on a busy machine.
const DEADLINE_OF_NONE: Duration = Duration::from_secs(60);

/// Limit on threads at the end. At most sixteen threads are kept for the next call, and the stubs and the watchdog have some.
const THREADS_MAX: usize = 40;

const SEED: &str = "SYMMALLOC_WATCHED_SEED";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    None,
    /// The victim is killed in an NCCL call.
    Dies,
    /// The victim is stopped in an NCCL call.
    Stops,
    /// Every NCCL call of the victim is delayed by a fraction of the deadline.
    Slow,
    /// One NCCL call of the victim fails.
    Fails,
    /// The victim hangs in one NCCL call, which never reaches the other ranks.
    Hangs,
    /// The victim returns from its program early.
    Leaves,
    /// The victim panics in its program.
    Panics,
    /// The victim gets stuck in its program.
    Sticks,
}

/// The scenario of a seed.
#[derive(Clone, Copy, Debug)]
struct Plan {
    seed: u64,
    ranks: usize,
    fate: Fate,
    victim: usize,
    /// Number of the NCCL call after the first step, or of the step, at which the fate strikes.
    at: u64,
}

impl Plan {
    fn new(seed: u64, fates: &[Fate]) -> Self {
        let mut draw = SplitMix64::new(seed);
        let mut below = |limit: usize| (draw.next_u64() % limit as u64) as usize;
        let ranks = 2 + below(3);
        let fate = fates[below(fates.len())];
        let at = match fate {
            Fate::Leaves | Fate::Panics | Fate::Sticks => 1 + below(STEPS as usize - 1),
            _ => 1 + below(60),
        };
        Plan { seed, ranks, fate, victim: below(ranks), at: at as u64 }
    }

    fn deadline(&self) -> Duration {
        if self.fate == Fate::None { DEADLINE_OF_NONE } else { DEADLINE }
    }

    fn meet_it(&self, rank: usize) {
        let victim = Some(self.victim);
        if rank != self.victim {
            return;
        }
        match self.fate {
            Fate::Dies => nccl::die("*", victim, self.at),
            Fate::Stops => nccl::stop("*", victim, self.at),
            Fate::Slow => nccl::slow("*", victim, 0, DEADLINE.as_millis() as u64 / 50),
            Fate::Fails => nccl::fail("*", victim, self.at, 3),
            Fate::Hangs => nccl::hang("ncclAllReduce", victim, 1 + self.at % 12),
            _ => {}
        }
    }

    /// Runs the program, with the same steps on all ranks.
    fn run(&self, it: &mut Rank) -> Result<(), Failure> {
        let mut draw = SplitMix64::new(!self.seed);
        let rank = it.comm.rank() as usize;
        let registrar = Registrar::builder(&it.allocator).build()?;
        let pool = it.allocator.create_pool(PoolConfig::builder().fixed().symmetric(true).build()?)?;
        registrar.attach(&it.comm, &[pool.id()], Registration::Windows)?;
        let all_to_all = AllToAll::new(&it.comm)?;
        let mut kept = Vec::new();
        for step in 0..STEPS {
            match draw.next_u64() % 8 {
                0 | 1 => {
                    for _ in 0..draw.next_u64() % 40 {
                        it.comm.all_reduce_in_place(&mut it.buffer, ReduceOp::Sum, &it.stream)?;
                    }
                }
                2 => {
                    kept.push(it.allocator.with_pool(&pool).alloc_zeroed::<u8>(&it.stream, 20 << 20)?);
                    registrar.sync(&[&it.comm])?;
                }
                3 => {
                    kept.clear();
                    registrar.sync(&[&it.comm])?;
                }
                4 => {
                    let part = it.comm.split(Some(0), rank as u32)?.expect("the rank should be in a part");
                    part.all_reduce_in_place(&mut it.buffer, ReduceOp::Max, &it.stream)?;
                    part.synchronize(&it.stream)?;
                    part.destroy()?;
                }
                5 => {
                    let splits = all_to_all.exchange_splits(&vec![1; self.ranks])?;
                    let input = it.allocator.alloc_zeroed::<u32>(&it.stream, 2 * self.ranks)?;
                    let mut output = it.allocator.alloc_zeroed::<u32>(&it.stream, 2 * self.ranks)?;
                    all_to_all.run(&it.stream, &input, &mut output, 2, &splits)?;
                }
                6 => std::thread::sleep(Duration::from_millis(draw.next_u64() % 20)),
                _ => it.comm.announce("nothing", None, &it.stream, || ())?,
            }
            if step == 0 || draw.next_u64().is_multiple_of(2) {
                it.comm.synchronize(&it.stream)?;
            }
            if step == 0 {
                self.meet_it(rank);
            }
            if step == self.at && rank == self.victim {
                match self.fate {
                    Fate::Leaves => return Err("it leaves".into()),
                    Fate::Panics => panic!("it panics"),
                    Fate::Sticks => std::thread::sleep(DEADLINE * 2),
                    _ => {}
                }
            }
        }
        it.comm.synchronize(&it.stream)?;
        drop(kept);
        registrar.detach(&it.comm, &[pool.id()])?;
        registrar.sync(&[&it.comm])?;
        Ok(())
    }

    /// Asserts that a report of a rank other than the victim is true. A failure prints the output of all ranks, `whole`.
    fn assert_true(&self, text: &str, whole: &str) {
        let is_blamed = |what: &str| (0..self.ranks).find(|rank| text.contains(&format!("rank {rank} {what}")));
        if let Some(gone) = is_blamed("is gone") {
            let dies = matches!(self.fate, Fate::Dies | Fate::Leaves | Fate::Panics);
            // Agreement reports the rank that caused the failure as gone, regardless of its state.
            let had_said = text.contains("after it had given up");
            let began_it = gone == self.victim && had_said;
            // A rank that gave up because of the victim is gone as well, and its report names the victim.
            let names_victim = text.contains(&format!("rank {}", self.victim));
            let is_true = dies && gone == self.victim || began_it || gone != self.victim && names_victim;
            // No rank can know whose call hangs inside NCCL, so reports name the first rank that gave up.
            assert!(is_true || self.fate == Fate::Hangs, "{self:?}: {text}\n{whole}");
        }
        if let Some(stopped) = is_blamed("is stopped") {
            // On a busy machine, a killed process may be silent for the whole deadline before the system has ended it.
            assert!(
                matches!(self.fate, Fate::Stops | Fate::Dies) && stopped == self.victim,
                "{self:?}: {text}\n{whole}"
            );
        }
        if text.contains("ranks are alive but missed the collective") {
            assert!(matches!(self.fate, Fate::Sticks | Fate::Hangs | Fate::Fails), "{self:?}: {text}\n{whole}");
        }
        if matches!(self.fate, Fate::None | Fate::Slow) {
            panic!("{self:?}, and a report: {text}\n{whole}");
        }
    }
}

/// Returns `by_day` seeds starting at `SYMMALLOC_FIRST_SEED`, which splits a long run into parts.
pub(super) fn seeds(by_day: u64) -> Range<u64> {
    let number =
        |name, default| std::env::var(name).map_or(default, |text| text.parse().expect("it should be a number"));
    let first = number("SYMMALLOC_FIRST_SEED", 0);
    first..first + number("SYMMALLOC_SEEDS", by_day)
}

/// Runs these seeds, several concurrently because they mostly wait.
pub(super) fn each_at_a_time(seeds: Range<u64>, run: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(seeds.start);
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                let _exit = ExitOnPanic;
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    run(seed);
                }
            });
        }
    });
}

/// Runs a rank in a separate process. Prints its outcome and any leak.
fn process(plan: &Plan, rank: usize) {
    let (_, files_before) = held();
    let mut it = Rank::new(rank, plan.ranks, plan.deadline());
    let pid = it.folder.join("victim.pid");
    if rank == plan.victim {
        std::fs::write(&pid, std::process::id().to_string()).expect("the write should succeed");
    }
    let outcome = plan.run(&mut it).and_then(|()| Ok(it.comm.destroy()?));
    // A fault that has not struck by now no longer strikes.
    nccl::heal();
    let mut is_stopped = plan.fate == Fate::Stops && rank != plan.victim;
    match &outcome {
        Ok(()) => {
            println!("OUTCOME fine");
            // NCCL needs all ranks until all of them have destroyed the communicator.
            std::fs::write(it.folder.join(format!("through.{rank}")), "").expect("the write should succeed");
            let are_through = || (0..plan.ranks).all(|rank| it.folder.join(format!("through.{rank}")).exists());
            let begun = Instant::now();
            while !are_through() && begun.elapsed() < 2 * plan.deadline() {
                std::thread::sleep(Duration::from_millis(5));
            }
            is_stopped &= !are_through();
        }
        Err(error) => println!("OUTCOME {error}"),
    }
    // A call that hangs inside NCCL keeps its resources.
    let is_lost = it.comm.state() == CommState::Lost;
    let kept = is_lost.then_some(it);
    if is_stopped {
        let stopped: i32 = std::fs::read_to_string(&pid)
            .expect("the file should have been written")
            .parse()
            .expect("it should be a number");
        // By then, no rank has a communicator that would notice the death.
        std::thread::sleep(Duration::from_secs(1));
        // SAFETY: the call only ends another rank of this test, which is stopped.
        unsafe { libc::kill(stopped, libc::SIGKILL) };
    }
    if kept.is_none() {
        // The watchdog's bell keeps two descriptors, and the stubs' memory keeps one.
        await_nothing_held(files_before + 3);
    }
    std::process::exit(i32::from(outcome.is_err()));
}

/// Waits until threads and connections are closed. Rank 0 closes its connections once all others have finished.
fn await_nothing_held(files_kept: usize) {
    let begun = Instant::now();
    loop {
        let (threads, files) = held();
        if threads < THREADS_MAX && files <= files_kept {
            return;
        }
        if begun.elapsed() > 3 * DEADLINE {
            let open = std::fs::read_dir("/proc/self/fd")
                .expect("/proc should be available")
                .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok().map(|path| path.display().to_string()));
            let open = open.collect::<Vec<_>>().join(" ");
            println!("LEAK {threads} threads, {files} files, {files_kept} may stay: {open}");
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn judge(plan: &Plan, outputs: &[RankOutput], took: Duration) {
    let whole =
        || outputs.iter().map(|output| format!("--- rank {}\n{}", output.rank, output.text)).collect::<String>();
    let slow = if plan.fate == Fate::Slow { Duration::from_secs(60) } else { Duration::ZERO };
    assert!(took < 7 * plan.deadline() + LATE + slow, "{plan:?} took {took:?}\n{}", whole());
    assert!(outputs.iter().all(|output| !output.text.contains("LEAK")), "{plan:?}\n{}", whole());
    for output in outputs.iter().filter(|output| output.rank != plan.victim) {
        let printed = output.text.lines().find_map(|line| line.split_once("OUTCOME ")).map(|(_, printed)| printed);
        // The watchdog may have ended the process before its program could report anything.
        match printed {
            Some("fine") => {}
            Some(printed) => plan.assert_true(printed, &whole()),
            None if output.text.contains("symmalloc: communicator") => {}
            None => panic!("{plan:?}: rank {} reported nothing\n{}", output.rank, whole()),
        }
        for line in output.text.lines().filter(|line| line.starts_with("symmalloc: communicator")) {
            plan.assert_true(line, &whole());
        }
    }
    if matches!(plan.fate, Fate::None | Fate::Slow) {
        assert!(outputs.iter().all(|output| output.is_success), "{plan:?}\n{}", whole());
    }
}

nccl_test!(processes_end_within_the_deadline_with_correct_reports, {
    const FATES: [Fate; 8] =
        [Fate::None, Fate::Dies, Fate::Dies, Fate::Stops, Fate::Slow, Fate::Fails, Fate::Hangs, Fate::Leaves];
    if let Ok(seed) = std::env::var(SEED) {
        let plan = Plan::new(seed.parse().expect("it should be a number"), &FATES);
        ranks(plan.ranks, &[], |rank| process(&plan, rank));
    }
    let worst = Mutex::new(Duration::ZERO);
    each_at_a_time(seeds(SEEDS_OF_PROCESSES), |seed| {
        let plan = Plan::new(seed, &FATES);
        let folder = tempfile::tempdir().expect("a folder should be created");
        let options = [(SEED, &*seed.to_string()), ("SYMMALLOC_FLIGHT_RECORDS", &*folder.path().to_string_lossy())];
        let begun = Instant::now();
        let outputs = ranks(plan.ranks, &options, |_| unreachable!("a rank has a seed"));
        judge(&plan, &outputs, begun.elapsed());
        let mut worst = worst.lock().expect("the lock is not poisoned");
        *worst = (*worst).max(begun.elapsed());
    });
    println!("the longest took {:?}", worst.lock().expect("the lock is not poisoned"));
});

/// Returns the number of threads and descriptors of this process, without the stub's sockets, which last as long as the process.
fn held() -> (usize, usize) {
    let entries = |folder| {
        std::fs::read_dir(folder).expect("/proc").map(|entry| entry.expect("it should be readable").file_name())
    };
    let number = |name: std::ffi::OsString| {
        name.to_str().expect("it should be a number").parse::<i32>().expect("it should be a number")
    };
    let files = entries("/proc/self/fd").filter(|name| !is_socket_of_the_stub(number(name.clone())));
    (entries("/proc/self/task").count(), files.count())
}

/// A function that returns the address of a Unix socket, or of the socket that it is connected to.
type NameOf = unsafe extern "C" fn(i32, *mut libc::sockaddr, *mut libc::socklen_t) -> i32;

/// Returns `true` for a Unix socket of the stub; the crate's own sockets have names.
fn is_socket_of_the_stub(file: i32) -> bool {
    let name = |of: NameOf| {
        let (mut name, mut length) = ([0_u8; 128], 128);
        // SAFETY: the descriptor may be closed, which is an error, and the pointers are valid for the address and its length.
        let code = unsafe { of(file, name.as_mut_ptr().cast(), &raw mut length) };
        (code == 0).then_some(name)
    };
    let names = [name(libc::getsockname), name(libc::getpeername)];
    let is_unix = |name: &[u8; 128]| i32::from(u16::from_ne_bytes([name[0], name[1]])) == libc::AF_UNIX;
    let is_ours = |name: &[u8; 128]| name[2..].starts_with(b"\0symmalloc-");
    names.iter().flatten().any(is_unix) && !names.iter().flatten().any(is_ours)
}

nccl_test!(threads_end_within_the_deadline_and_leak_nothing, {
    const FATES: [Fate; 7] =
        [Fate::None, Fate::Slow, Fate::Fails, Fate::Hangs, Fate::Leaves, Fate::Panics, Fate::Sticks];

    let (mut before, seeds) = (None, seeds(SEEDS_OF_THREADS));
    for seed in seeds.clone() {
        let plan = Plan::new(seed, &FATES);
        let id = UniqueId::new().expect("NCCL should create an id");
        let outcomes = std::thread::scope(|scope| {
            let rank = |rank: usize| {
                scope.spawn(move || {
                    let mut it = Rank::of_thread(rank, plan.ranks, id, plan.deadline());
                    let begun = Instant::now();
                    let outcome = plan.run(&mut it).map_err(|error| error.to_string());
                    let _ended = it.comm.destroy();
                    (outcome, begun.elapsed())
                })
            };
            let threads: Vec<_> = (0..plan.ranks).map(rank).collect();
            threads.into_iter().map(|thread| thread.join().ok()).collect::<Vec<_>>()
        });
        nccl::heal();
        for (rank, outcome) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != plan.victim) {
            let (outcome, took) = outcome.unwrap_or_else(|| panic!("{plan:?}: rank {rank} panicked"));
            let slow = if plan.fate == Fate::Slow { Duration::from_secs(60) } else { Duration::ZERO };
            assert!(took < 3 * plan.deadline() + LATE + slow, "{plan:?} took {took:?}: {outcome:?}");
            if let Err(error) = outcome {
                plan.assert_true(&error, "");
            }
        }
        if seed == seeds.start + 8 {
            before = Some(held());
        }
    }
    let (threads, files) = held();
    // With few seeds, there is no earlier state to compare with.
    let files_before = before.map_or(files, |(_, files)| files);
    assert!(
        threads < THREADS_MAX && files <= files_before + 2,
        "{threads} threads, {files} files, {files_before} before"
    );
});
