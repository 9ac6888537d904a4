//! Generated endings: a rank dies, stops or fails at some step, NCCL calls of the others never return, and standard error cannot be
//! written, or the system creates no more threads. Whatever the program does with the error, every other rank ends in time and with a documented exit code.

use super::programs::each_at_a_time;
use super::{LATE, folder};
use std::collections::BTreeSet;
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::path::Path;
use std::process::exit;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};
use stub_process::{ExitOnPanic, RankOutput, nccl, nccl_test, ranks, refuse_threads, scaled_to_load, until_some};
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{Communicator, FAILURE_EXIT_CODE, Launch, ReduceOp, Registrar, Registration, UniqueId};
use symmalloc_sim::SplitMix64;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Number of sets of scenarios, each of which covers every pair of properties, at night.
const SETS_AT_NIGHT: u64 = 8;
const SCENARIO: &str = "SYMMALLOC_ENDING";
/// Deadline long enough that a death must be detected before it.
const LONG: Duration = Duration::from_secs(100);
/// Deadline where a rank is only stopped, or where a call of the normal path does not return.
const SHORT: Duration = Duration::from_secs(2);
/// Time that a call of NCCL takes that never returns.
const FOREVER_MS: u64 = 600_000;
/// Time for which a program that keeps everything continues after the error.
const KEPT: Duration = Duration::from_millis(2500);

/// The fate of the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Dies,
    Stops,
    /// Its call fails, and its program returns the error. At the meeting, its program returns without connecting.
    Fails,
    /// Its call fails, and its process stays alive for longer than any other may take. At the meeting as [`Fails`](Fate::Fails), because
    /// nobody can know what a program does before it connects.
    Lingers,
}

/// The reaction of a program to its first error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Shape {
    /// Keeps everything and continues for a while.
    Keeps,
    /// Drops the communicator, then its buffers and its allocator, waits for its stream, and continues for a while.
    Drops,
    /// Returns the error with `?`.
    Returns,
    /// Panics.
    Panics,
    /// Calls `exit` with everything alive.
    Exits,
}

/// The state of standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stderr {
    /// A reader reads it.
    Read,
    /// The reader is gone.
    Closed,
    /// The disk is full.
    Full,
    /// The reader does not read.
    Unread,
    /// The reader is gone, and the program's subscriber panics because of it.
    ClosedToSubscriber,
}

/// The threads that the system creates for the ranks other than the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Threads {
    Created,
    /// None once the communicator exists.
    RefusedLater,
}

/// A step of the program, as the NCCL call that belongs to it, or the time between the meeting and the first call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Met,
    Call(&'static str, u64),
}

/// A rank that is the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    /// Rank 0, through which all watchdogs communicate.
    First,
    Last,
}

const FATES: [Fate; 4] = [Fate::Dies, Fate::Stops, Fate::Fails, Fate::Lingers];
const SHAPES: [Shape; 5] = [Shape::Keeps, Shape::Drops, Shape::Returns, Shape::Panics, Shape::Exits];
const STDERRS: [Stderr; 5] = [Stderr::Read, Stderr::Closed, Stderr::Full, Stderr::Unread, Stderr::ClosedToSubscriber];
const MOMENTS: [Moment; 10] = [
    Moment::Met,
    Moment::Call("ncclCommInitRankConfig", 1),
    Moment::Call("ncclCommGetAsyncError", 1),
    Moment::Call("ncclCommWindowRegister", 1),
    Moment::Call("ncclAllReduce", 1),
    Moment::Call("ncclAllReduce", 5),
    Moment::Call("ncclCommSplit", 1),
    Moment::Call("ncclCommWindowDeregister", 1),
    Moment::Call("ncclCommFinalize", 1),
    Moment::Call("ncclCommDestroy", 1),
];
/// Calls of the other ranks that never return.
const STUCK: [&[&str]; 7] = [
    &[],
    &["ncclCommAbort"],
    &["ncclCommRevoke"],
    &["ncclCommAbort", "ncclCommRevoke"],
    &["ncclCommWindowDeregister"],
    &["ncclCommFinalize"],
    &["ncclCommDestroy"],
];
/// Calls of an abort. Only if one of them does not return, the process may be ended.
const ABORTING: [&str; 3] = ["ncclCommAbort", "ncclCommRevoke", "ncclCommWindowDeregister"];
/// Calls that a program makes even if no rank fails.
const NORMAL: [&str; 3] = ["ncclCommWindowDeregister", "ncclCommFinalize", "ncclCommDestroy"];
const RANKS: [usize; 2] = [2, 3];
const VICTIMS: [Victim; 2] = [Victim::First, Victim::Last];
const THREADS: [Threads; 2] = [Threads::Created, Threads::RefusedLater];

/// Number of values of each property, in the order of [`Ending::of`].
const SIZES: [usize; 8] =
    [FATES.len(), SHAPES.len(), STDERRS.len(), MOMENTS.len(), STUCK.len(), RANKS.len(), VICTIMS.len(), THREADS.len()];

/// One scenario, as the index of each property.
type Indices = [usize; SIZES.len()];

#[derive(Clone, Copy, Debug)]
struct Ending {
    fate: Fate,
    shape: Shape,
    stderr: Stderr,
    moment: Moment,
    stuck: &'static [&'static str],
    ranks: usize,
    victim: usize,
    threads: Threads,
}

/// Returns one scenario for every shape, with and without new threads, in which the abort never returns while a collective waits for the victim on the device.
fn kernels_without_end() -> impl Iterator<Item = Indices> {
    let index = |found: Option<usize>| found.expect("the value is in the list");
    let moment = index(MOMENTS.iter().position(|it| *it == Moment::Call("ncclAllReduce", 5)));
    let stuck = index(STUCK.iter().position(|it| *it == ["ncclCommAbort"]));
    let all = (0..SHAPES.len()).flat_map(|shape| (0..THREADS.len()).map(move |threads| (shape, threads)));
    all.map(move |(shape, threads)| [0, shape, shape % STDERRS.len(), moment, stuck, shape % 2, shape / 2 % 2, threads])
}

/// Returns scenarios that contain every pair of values of two properties at least once.
fn covering_pairs(seed: u64) -> Vec<Indices> {
    let mut draw = SplitMix64::new(seed);
    let pairs_of = |indices: &Indices| {
        let indices = *indices;
        (0..indices.len()).flat_map(move |a| (0..a).map(move |b| (a, indices[a], b, indices[b])))
    };
    let all_of = |a: usize, b: usize| (0..SIZES[a]).flat_map(move |x| (0..SIZES[b]).map(move |y| (a, x, b, y)));
    let mut missing: BTreeSet<_> = (0..SIZES.len()).flat_map(|a| (0..a).flat_map(move |b| all_of(a, b))).collect();
    let mut chosen: Vec<Indices> = kernels_without_end().collect();
    for pair in chosen.iter().flat_map(pairs_of) {
        missing.remove(&pair);
    }
    while let Some(&(a, x, b, y)) = missing.first() {
        // The best of random scenarios that contain the first missing pair.
        let mut random = || {
            let mut indices = SIZES.map(|size| (draw.next_u64() % size as u64) as usize);
            (indices[a], indices[b]) = (x, y);
            indices
        };
        let candidates: Vec<Indices> = (0..60).map(|_| random()).collect();
        let gain = |it: &Indices| pairs_of(it).filter(|pair| missing.contains(pair)).count();
        let best = *candidates.iter().max_by_key(|it| gain(it)).expect("there are candidates");
        for pair in pairs_of(&best) {
            missing.remove(&pair);
        }
        chosen.push(best);
    }
    chosen
}

impl Ending {
    fn of([fate, shape, stderr, moment, stuck, ranks, victim, threads]: Indices) -> Self {
        let (ranks, victim) = (RANKS[ranks], VICTIMS[victim]);
        Ending {
            fate: FATES[fate],
            shape: SHAPES[shape],
            stderr: STDERRS[stderr],
            moment: MOMENTS[moment],
            stuck: STUCK[stuck],
            ranks,
            victim: if victim == Victim::First { 0 } else { ranks - 1 },
            threads: THREADS[threads],
        }
    }

    fn deadline(&self) -> Duration {
        let ends_late = self.stuck.iter().any(|call| NORMAL.contains(call));
        if self.fate == Fate::Stops || ends_late { SHORT } else { LONG }
    }

    /// Returns the longest time from the fate to the end of the other ranks.
    fn limit(&self) -> Duration {
        let deadline = if self.deadline() == LONG { Duration::ZERO } else { 2 * SHORT };
        // A program may continue for `KEPT` after its error.
        scaled_to_load(deadline + LATE + KEPT)
    }

    /// Lets the fate strike, if it is the victim's at this moment.
    fn strike(&self, rank: usize, moment: Moment) {
        if rank != self.victim || moment != self.moment {
            return;
        }
        match (moment, self.fate) {
            (Moment::Met, Fate::Dies) => signal_self(libc::SIGKILL),
            (Moment::Met, Fate::Stops) => signal_self(libc::SIGSTOP),
            (Moment::Met, Fate::Fails | Fate::Lingers) => exit(1),
            (Moment::Call(call, nth), Fate::Dies) => nccl::die(call, Some(rank), nth),
            (Moment::Call(call, nth), Fate::Stops) => nccl::stop(call, Some(rank), nth),
            (Moment::Call(call, nth), Fate::Fails | Fate::Lingers) => nccl::fail(call, Some(rank), nth, 3),
        }
    }

    /// The program, which ends normally if the fate does not strike.
    fn program(&self, rank: usize) -> Result<(), Box<dyn Error>> {
        let launch = launch(rank, self.ranks);
        let id = UniqueId::for_job(&launch, Duration::from_secs(60))?;
        if rank == self.victim {
            let Moment::Call(..) = self.moment else {
                self.strike(rank, Moment::Met);
                unreachable!("every fate ends or stops the victim here");
            };
            self.strike(rank, self.moment);
        } else {
            for call in self.stuck {
                nccl::slow(call, Some(rank), 0, FOREVER_MS);
            }
        }
        let device = CudaDevice::new(rank)?;
        // An error drops the communicator first, and then the memory that its kernels may still use.
        let allocator = CudaAllocator::new(&device, Config::default())?;
        let stream = device.context().new_stream()?;
        let mut plain = allocator.alloc_zeroed::<f32>(&stream, 1024)?;
        let pool = allocator.create_pool(PoolConfig::builder().fixed().symmetric(true).build()?)?;
        let mut registered = allocator.with_pool(&pool).alloc_zeroed::<f32>(&stream, 1024)?;
        let registrar = Registrar::builder(&allocator).build()?;
        let comm = Communicator::builder(&device).deadline(self.deadline()).connect(id, rank as u32, launch.ranks)?;
        if rank != self.victim && self.threads == Threads::RefusedLater {
            refuse_threads();
        }
        let mut steps = || -> Result<(), Box<dyn Error>> {
            registrar.attach(&comm, &[pool.id()], Registration::Windows)?;
            registrar.sync(&[&comm])?;
            for _ in 0..4 {
                comm.all_reduce_in_place(&mut registered, ReduceOp::Sum, &stream)?;
                comm.all_reduce_in_place(&mut plain, ReduceOp::Sum, &stream)?;
            }
            comm.synchronize(&stream)?;
            let part = comm.split(Some(0), comm.rank())?.expect("every rank has a color");
            part.all_reduce_in_place(&mut plain, ReduceOp::Max, &stream)?;
            part.synchronize(&stream)?;
            part.destroy()?;
            comm.destroy()?;
            Ok(())
        };
        let outcome = steps();
        let Err(error) = outcome else {
            drop(comm);
            // NCCL needs all ranks until all of them have destroyed the communicator.
            self.await_others(rank);
            return Ok(());
        };
        self.note(rank, &error.to_string());
        match self.shape {
            _ if rank == self.victim => Err(error),
            Shape::Keeps => {
                std::thread::sleep(KEPT);
                Err(error)
            }
            Shape::Drops => {
                drop(comm);
                drop((registrar, registered, plain, pool, allocator));
                // Memory that a kernel may still use waits like this when it is released.
                stream.synchronize()?;
                std::thread::sleep(KEPT);
                Err(error)
            }
            Shape::Returns => Err(error),
            Shape::Panics => panic!("{error}"),
            Shape::Exits => exit(1),
        }
    }

    /// Waits for the other ranks after a normal end, for as long as they may take.
    fn await_others(&self, rank: usize) {
        self.note(rank, "fine");
        let has_outcome = |rank: usize| folder().join(format!("outcome.{rank}")).exists();
        let begun = SystemTime::now();
        while !(0..self.ranks).all(has_outcome) && begun.elapsed().unwrap_or_default() < SHORT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn note(&self, rank: usize, outcome: &str) {
        let (file, draft) = (format!("outcome.{rank}"), format!("draft.{rank}"));
        fs::write(folder().join(&draft), outcome).expect("the folder is writable");
        fs::rename(folder().join(draft), folder().join(file)).expect("the folder is writable");
    }

    /// Runs a rank's process.
    fn run(&self, rank: usize) -> ! {
        fs::write(folder().join(format!("pid.{rank}")), std::process::id().to_string())
            .expect("the folder is writable");
        self.stderr.apply();
        let outcome = self.program(rank);
        if let Err(error) = &outcome
            && !folder().join(format!("outcome.{rank}")).exists()
        {
            self.note(rank, &error.to_string());
        }
        if rank == self.victim && self.fate == Fate::Lingers {
            let pids: Vec<i32> =
                (0..self.ranks).filter(|other| *other != rank).map(|it| pid_of(&folder(), it)).collect();
            await_ends(&pids, self.limit());
        }
        exit(i32::from(outcome.is_err()))
    }

    /// Returns what is wrong with the outcome of a rank other than the victim.
    fn complaint(&self, output: &RankOutput, struck: SystemTime, folder: &Path) -> Option<String> {
        let outcome = fs::read_to_string(folder.join(format!("outcome.{}", output.rank))).ok();
        let outcome = outcome.as_deref();
        let took = output.ended.duration_since(struck).unwrap_or_default();
        let is_allowed = match output.code {
            Some(0) => outcome == Some("fine"),
            Some(1) => true,
            // The harness of Rust's tests catches the panic.
            Some(101) => self.shape == Shape::Panics || self.stderr == Stderr::ClosedToSubscriber,
            Some(FAILURE_EXIT_CODE) => {
                self.threads == Threads::RefusedLater || self.stuck.iter().any(|call| ABORTING.contains(call))
            }
            // A subscriber that panics while another panic unwinds aborts the process.
            None => self.stderr == Stderr::ClosedToSubscriber,
            _ => false,
        };
        let is_named = |outcome: &str| outcome == "fine" || outcome.contains(&format!("rank {}", self.victim));
        let wrong = if took >= self.limit() {
            format!("ended after {took:?} instead of {:?}", self.limit())
        } else if !is_allowed {
            "ended with an unexpected exit code".to_owned()
        } else if self.names_victim() && !outcome.is_none_or(is_named) {
            "does not name the victim".to_owned()
        } else {
            return None;
        };
        let (rank, code, text) = (output.rank, output.code, &output.text);
        Some(format!("{self:?}: rank {rank} {wrong}: {code:?} after {took:?}, {outcome:?}\n{text}"))
    }

    /// Returns `true` if the error of every other rank must name the victim. A rank without threads fails itself, and others name it. A rank
    /// that is stopped while it connects is not observed, a
    /// rank that fails to destroy its communicator has left it, and calls of other ranks that never return may end the wait.
    fn names_victim(&self) -> bool {
        let is_observed = match self.fate {
            Fate::Dies => true,
            Fate::Stops => false,
            Fate::Fails | Fate::Lingers => {
                !matches!(self.moment, Moment::Call("ncclCommFinalize" | "ncclCommDestroy", _))
            }
        };
        is_observed && self.deadline() == LONG && self.threads == Threads::Created
    }
}

impl Stderr {
    /// Replaces this process's standard error.
    fn apply(self) {
        let end: i32 = match self {
            Stderr::Read => return,
            Stderr::Full => File::options().write(true).open("/dev/full").expect("the device exists").into_raw_fd(),
            Stderr::Closed | Stderr::ClosedToSubscriber | Stderr::Unread => {
                let (reader, mut writer) = std::io::pipe().expect("the system should create a pipe");
                if self == Stderr::Unread {
                    // SAFETY: changes a flag of a descriptor that this function owns.
                    unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
                    while writer.write(&[b'\n'; 4096]).is_ok() {}
                    // SAFETY: as above.
                    unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, 0) };
                    std::mem::forget(reader);
                }
                writer.into_raw_fd()
            }
        };
        // SAFETY: replaces standard error, which stays open.
        assert_eq!(unsafe { libc::dup2(end, 2) }, 2);
        match self {
            // A panic's message would block like any other output of the program.
            Stderr::Unread => std::panic::set_hook(Box::new(|_| {})),
            Stderr::ClosedToSubscriber => {
                tracing::subscriber::set_global_default(Printer).expect("there is no other subscriber");
            }
            _ => {}
        }
    }
}

/// A subscriber that writes every warning and error to standard error and panics if it cannot.
struct Printer;

impl Subscriber for Printer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn event(&self, event: &Event<'_>) {
        eprintln!("{}", event.metadata().name());
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn signal_self(signal: i32) {
    // SAFETY: the call only ends or stops this process.
    unsafe { libc::kill(libc::getpid(), signal) };
    loop {
        std::thread::park();
    }
}

/// Returns the launch of a rank of this test.
fn launch(rank: usize, ranks: usize) -> Launch {
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", ranks.to_string()),
        ("TORCHELASTIC_RUN_ID", folder().display().to_string()),
    ];
    let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    Launch::from_variables(variable).expect("all variables are set")
}

/// Returns the state of a process, as the letter in `/proc`; `None` if it has ended.
fn state_of(pid: i32) -> Option<char> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ")?.1.chars().next()
}

/// Returns the process of a rank, which may not have started yet.
fn pid_of(folder: &Path, rank: usize) -> i32 {
    let read = || fs::read_to_string(folder.join(format!("pid.{rank}"))).ok()?.parse::<i32>().ok();
    until_some(read)
}

/// Waits until these processes have ended, for at most `limit`.
fn await_ends(pids: &[i32], limit: Duration) {
    let begun = Instant::now();
    while pids.iter().any(|pid| state_of(*pid).is_some()) && begun.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the victim is stopped or has ended. Kills it once the others have ended or are late. Returns the time of the stop.
fn follow_stopped(ending: &Ending, folder: &Path) -> Option<SystemTime> {
    let mut pids: Vec<i32> = (0..ending.ranks).map(|rank| pid_of(folder, rank)).collect();
    let victim = pids.remove(ending.victim);
    while state_of(victim)? != 'T' {
        std::thread::sleep(Duration::from_millis(5));
    }
    let stopped = SystemTime::now();
    await_ends(&pids, ending.limit());
    // SAFETY: the call only ends a rank of this test, which is stopped.
    unsafe { libc::kill(victim, libc::SIGKILL) };
    Some(stopped)
}

/// Runs the ranks of a scenario. Returns what is wrong with their ends, and the number of ranks that the watchdog ended.
fn run(indices: Indices) -> (Vec<String>, usize) {
    let (ending, folder) = (Ending::of(indices), tempfile::tempdir().expect("a folder should be created"));
    let text = indices.map(|index| index.to_string()).join(" ");
    let options = [(SCENARIO, &*text), ("SYMMALLOC_FLIGHT_RECORDS", &*folder.path().to_string_lossy())];
    let (outputs, stopped) = std::thread::scope(|scope| {
        let _exit = ExitOnPanic;
        let follower = (ending.fate == Fate::Stops).then(|| scope.spawn(|| follow_stopped(&ending, folder.path())));
        let outputs = ranks(ending.ranks, &options, |_| unreachable!("a rank has a scenario"));
        (outputs, follower.and_then(|it| it.join().expect("the thread does not panic")))
    });
    let noted = || fs::metadata(folder.path().join(format!("outcome.{}", ending.victim))).ok()?.modified().ok();
    let struck = stopped.or_else(noted).unwrap_or(outputs[ending.victim].ended);
    let others = outputs.iter().filter(|output| output.rank != ending.victim);
    let ended_by_watchdog = outputs.iter().filter(|output| output.code == Some(FAILURE_EXIT_CODE)).count();
    let mut wrong: Vec<String> = others.filter_map(|output| ending.complaint(output, struck, folder.path())).collect();
    let victim = &outputs[ending.victim];
    // Where no normal call gets stuck, the victim reaches every step, unless a step needs a thread that cannot be created.
    let reaches_all = ending.deadline() == LONG && ending.threads == Threads::Created;
    if ending.fate == Fate::Dies && reaches_all && victim.code.is_some() {
        wrong.push(format!("{ending:?}: the victim did not die: {:?}\n{}", victim.code, victim.text));
    }
    (wrong, ended_by_watchdog)
}

nccl_test!(every_survivor_ends_in_time_whatever_its_program_does, {
    if let Ok(text) = std::env::var(SCENARIO) {
        let numbers: Vec<usize> = text.split(' ').map(|word| word.parse().expect("an index")).collect();
        let ending = Ending::of(numbers.try_into().expect("one index per property"));
        ranks(ending.ranks, &[], |rank| ending.run(rank));
    }
    let seeds = if stub_process::is_night() { SETS_AT_NIGHT } else { 1 };
    let scenarios: Vec<Indices> = (0..seeds).flat_map(covering_pairs).collect();
    let found = Mutex::new((Vec::new(), 0));
    each_at_a_time(0..scenarios.len() as u64, |index| {
        let (wrong, ended) = run(scenarios[index as usize]);
        let mut found = found.lock().expect("the lock is not poisoned");
        found.0.extend(wrong);
        found.1 += ended;
    });
    let (complaints, ended) = found.into_inner().expect("the lock is not poisoned");
    assert!(complaints.is_empty(), "{} of {} scenarios:\n{}", complaints.len(), scenarios.len(), complaints.join("\n"));
    assert!(ended >= SHAPES.len() / 2, "the watchdog ended only {ended} processes, although aborts never returned");
    println!("{} scenarios, {ended} processes ended by the watchdog", scenarios.len());
});
