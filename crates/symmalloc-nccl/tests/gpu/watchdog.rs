//! Tests with ranks that are killed, stopped or slow, each in a separate process. With several devices, each rank uses one. With one
//! device, two ranks share it, and `NCCL_HOSTID` makes NCCL treat them as two machines: it then communicates over sockets, with its
//! ordinary kernels and without windows.
//!
//! `SYMMALLOC_KILLS` and `SYMMALLOC_STOPS` set how often a rank is killed or stopped (12 and 4), `SYMMALLOC_SLOW_SECONDS` sets how long a
//! rank is slow (30), and `SYMMALLOC_PAIRS` sets the number of concurrent jobs (4). The number of a job determines which rank is killed or
//! stopped, and when, what the other ranks do with the error ([`Reaction`]), and whether anybody reads their standard error.

use crate::job::{MIB, RANKS, Rank, again, reserved};
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use symmalloc_core::PoolId;
use symmalloc_core::config::PoolConfig;
use symmalloc_cuda::{CudaDevice, GraphPool};
use symmalloc_nccl::{Communicator, FAILURE_EXIT_CODE, Launch, Nccl, ReduceOp, Registration};

/// Environment variable with the number of the job.
const CHILD: &str = "SYMMALLOC_WATCHED_CHILD";
const DEADLINE: Duration = Duration::from_secs(5);
/// Time for which a program continues after an error, if it keeps everything. Not a part of the measured times.
const KEPT: Duration = Duration::from_secs(1);
/// Maximum time from a signal to the end of all other ranks, before the test gives up.
const LIMIT: Duration = Duration::from_secs(30);

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Returns the number of devices. If there is none, prints the reason and returns `None`.
fn devices() -> Option<usize> {
    let count = CudaDevice::count().map_err(|error| error.to_string());
    let count = count.and_then(|count| Nccl::load().map(|_| count).map_err(|error| error.to_string()));
    match count {
        Ok(count) if count > 0 => Some(count),
        Ok(_) => {
            println!("skipped, no device");
            None
        }
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// The reaction of a program to an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    /// Returns the error and drops everything, first its memory.
    Returns,
    /// Drops the communicator, and then its memory, which waits for the stream.
    DropsCommunicator,
    /// Exits with everything alive.
    Exits,
    /// Keeps everything for a while.
    Keeps,
}

impl Reaction {
    fn of(job: u64) -> Self {
        [Reaction::Returns, Reaction::DropsCommunicator, Reaction::Exits, Reaction::Keeps][job as usize % 4]
    }
}

/// Returns `true` if nobody reads standard error in this job.
fn is_stderr_closed(job: u64) -> bool {
    job / 4 % 2 == 1
}

/// The processes of a job, which runs until a rank fails. Their output is read when they end.
struct Job {
    number: u64,
    children: Vec<Child>,
}

impl Job {
    /// Starts the job and returns once all ranks are working.
    fn start(test: &str, number: u64, slow: bool) -> Self {
        let free =
            TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port should be free");
        let devices = CudaDevice::count().expect("the driver counts the devices");
        let ranks = setting(RANKS, devices.max(2) as u64) as usize;
        let is_one_machine = ranks <= devices || std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some();
        let start = |rank: usize| {
            let mut command = again(test);
            command
                .envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())])
                .envs([("WORLD_SIZE", ranks.to_string()), ("LOCAL_WORLD_SIZE", ranks.to_string())])
                .envs([("SYMMALLOC_RENDEZVOUS", free.to_string()), (CHILD, number.to_string())])
                .env("NCCL_NVLS_ENABLE", "0")
                .env("SYMMALLOC_SLOW_RANK", if slow { "1" } else { "none" });
            if !is_one_machine {
                command.env("NCCL_HOSTID", format!("machine{rank}")).env("NCCL_SOCKET_IFNAME", "lo");
            }
            // The reader is dropped here.
            let closed = || Stdio::from(std::io::pipe().expect("the system should create a pipe").1);
            let stderr = if is_stderr_closed(number) { closed() } else { Stdio::piped() };
            command.stdout(Stdio::piped()).stderr(stderr).spawn().expect("the process should start again")
        };
        let mut children: Vec<Child> = (0..ranks).map(start).collect();
        for child in &mut children {
            let stdout = child.stdout.as_mut().expect("the stream should be piped");
            let is_ready = BufReader::new(stdout).lines().map_while(Result::ok).any(|line| line.contains("at work"));
            assert!(is_ready, "a rank did not start:\n{}", text_of(child));
        }
        Job { number, children }
    }

    fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: the process is a child of this one and has not been waited for.
        assert_eq!(unsafe { libc::kill(self.children[rank].id() as i32, signal) }, 0);
    }

    /// Sends a signal to a rank, and waits for all others to end. Returns how long each took, with its exit status and its stderr.
    fn ends_after(&mut self, rank: usize, signal: i32) -> Vec<Ended> {
        self.signal(rank, signal);
        let begun = Instant::now();
        let mut ended: Vec<Option<Ended>> = self.children.iter().map(|_| None).collect();
        let others = self.children.len() - 1;
        while ended.iter().flatten().count() < others {
            for (other, (child, ended)) in self.children.iter_mut().zip(&mut ended).enumerate() {
                if other == rank || ended.is_some() {
                    continue;
                }
                if let Some(status) = child.try_wait().expect("the child can be queried") {
                    let continues = Reaction::of(self.number) == Reaction::Keeps && status.code() == Some(1);
                    let kept = if continues { KEPT } else { Duration::ZERO };
                    let (job, took) = (self.number, begun.elapsed().saturating_sub(kept));
                    *ended = Some(Ended { job, rank: other, status, took, text: text_of(child) });
                } else if begun.elapsed() > LIMIT {
                    child.kill().expect("the process should be killed");
                    panic!("rank {other} has not ended {LIMIT:?} after rank {rank}:\n{}", text_of(child));
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        ended.into_iter().flatten().collect()
    }
}

/// The end of a rank's process.
#[derive(Clone)]
struct Ended {
    job: u64,
    rank: usize,
    status: ExitStatus,
    took: Duration,
    text: String,
}

impl Ended {
    /// Fails unless the process ended with an error about the rank that contains `cause`. Where nobody reads the watchdog's report, the
    /// program's own error names the rank, if the watchdog has not ended the process first. A sync reports the rank as lost.
    fn check(&self, lost: usize, cause: &str) {
        let Ended { job, rank, status, took, text } = self;
        let is_ended = status.code() == Some(FAILURE_EXIT_CODE);
        let is_error = status.code() == Some(1) || is_ended;
        let is_named = match is_stderr_closed(*job) {
            false => text.contains(cause),
            true => is_ended || text.contains(cause) || text.contains(&format!("rank {lost} is lost")),
        };
        let reaction = Reaction::of(*job);
        assert!(
            is_error && is_named,
            "{reaction:?}: rank {rank} ended with {status} after {took:?}, not with \"{cause}\":\n{text}"
        );
    }
}

/// Returns the output of a process that has ended or is about to.
fn text_of(child: &mut Child) -> String {
    let mut text = String::new();
    if let Some(stderr) = &mut child.stderr {
        stderr.read_to_string(&mut text).expect("stderr is valid UTF-8");
    }
    child
        .stdout
        .as_mut()
        .expect("the stream should be piped")
        .read_to_string(&mut text)
        .expect("stdout is valid UTF-8");
    text
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _gone_already = child.kill();
            let _reaped = child.wait();
        }
    }
}

/// Runs a rank's work until an error occurs, prints it and reacts to it: plain collectives and, if each rank has its own device, collectives on windows; syncs with and
/// without changes, splits, graphs, and work on the host.
fn work(reaction: Reaction) {
    let launch = Launch::from_env().expect("started as a rank");
    let is_slow = std::env::var("SYMMALLOC_SLOW_RANK").is_ok_and(|rank| rank == launch.rank.to_string());
    let device = CudaDevice::for_local_rank(launch.local_rank).expect("the device should be created");
    let stream = device.context().new_stream().expect("the driver should create a stream");
    let comm = Communicator::builder(&device).deadline(DEADLINE).connect_env().expect("the connection should succeed");
    let barrier = Barrier::new(1);
    let rank = Rank { rank: launch.rank, ranks: launch.ranks, device, stream, barrier: &barrier };
    let allocator = rank.allocator(reserved(64 * MIB));
    let registrar = rank.registrar(&allocator);
    registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
    let growing = PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid");
    let pool = allocator.create_pool(growing).expect("the pool is created");
    registrar.attach(&comm, &[pool.id()], Registration::Windows).expect("the pool should be attachable");
    let graphs = GraphPool::new(&allocator, PoolConfig::default()).expect("there should be a pool");
    let mut graph = None;
    let mut round = || -> Result<(), Box<dyn std::error::Error>> {
        let mut windowed = allocator.alloc_zeroed::<f32>(&rank.stream, 1 << 16)?;
        for step in 0_u64.. {
            registrar.sync(&[&comm])?;
            for _ in 0..8 {
                comm.all_reduce_in_place(&mut windowed, ReduceOp::Sum, &rank.stream)?;
            }
            comm.synchronize(&rank.stream)?;
            match step % 8 {
                1 => {
                    // A window is created and destroyed.
                    let fresh = allocator.with_pool(&pool).alloc_zeroed::<u8>(&rank.stream, 30 << 20)?;
                    registrar.sync(&[&comm])?;
                    drop(fresh);
                    comm.synchronize(&rank.stream)?;
                }
                3 => {
                    if let Some(part) = comm.split(Some(0), rank.rank)? {
                        part.all_reduce_in_place(&mut windowed, ReduceOp::Max, &rank.stream)?;
                        part.synchronize(&rank.stream)?;
                        part.destroy()?;
                    }
                }
                4 if graph.is_none() => {
                    let capture = graphs.begin(&rank.stream)?;
                    comm.all_reduce_in_place(&mut windowed, ReduceOp::Sum, &rank.stream)?;
                    graph = Some(capture.end()?);
                }
                5 | 6 => {
                    if let Some(graph) = &graph {
                        for _ in 0..4 {
                            comm.announce("graph", None, &rank.stream, || graph.launch(&rank.stream))??;
                        }
                        comm.synchronize(&rank.stream)?;
                    }
                }
                7 => std::thread::sleep(Duration::from_millis(3)),
                _ => {}
            }
            if is_slow {
                std::thread::sleep(Duration::from_millis(if step % 16 == 0 { 3_500 } else { 150 }));
            }
            if step == 8 {
                println!("at work");
            }
        }
        Ok(())
    };
    let error = round().expect_err("only an error ends it");
    println!("error: {error}");
    match reaction {
        Reaction::Returns => {}
        Reaction::DropsCommunicator => {
            drop((registrar, comm));
            drop((graph, graphs, pool, allocator));
        }
        Reaction::Exits => std::process::exit(1),
        Reaction::Keeps => std::thread::sleep(KEPT),
    }
}

/// Runs a rank if this is a rank's process: works until an error occurs, and exits with status 1. Returns `false` in any other process.
fn be_a_rank() -> bool {
    let Ok(number) = std::env::var(CHILD) else { return false };
    work(Reaction::of(number.parse().expect("the number of the job")));
    std::process::exit(1);
}

/// Runs `count` jobs, several concurrently, and returns their results.
fn jobs<T: Send>(count: u64, job: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let (next, outcomes) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..setting("SYMMALLOC_PAIRS", 4).min(count) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let outcome = job(number);
                    outcomes.lock().expect("the lock is not poisoned").push(outcome);
                }
            });
        }
    });
    outcomes.into_inner().expect("the lock is not poisoned")
}

fn free_bytes() -> u64 {
    let device = CudaDevice::new(0).expect("the device should be created");
    device.context().mem_get_info().expect("the driver reports free memory").0 as u64
}

/// Returns a pseudorandom number that is the same in every run.
fn drawn(number: u64) -> u64 {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32
}

/// Starts jobs and sends a signal to a random rank of each at a random moment. Every other rank must end with an error that contains
/// `cause`, within `limit`.
fn signal_ranks(test: &str, (signal, count): (i32, u64), limit: Duration, cause: impl Fn(usize) -> String + Sync) {
    let ended = jobs(count, |number| {
        let mut job = Job::start(test, number, false);
        let drawn = drawn(number);
        std::thread::sleep(Duration::from_micros(drawn % 400_000));
        let rank = (drawn >> 20) as usize % job.children.len();
        let ended = job.ends_after(rank, signal);
        ended.iter().for_each(|ended| ended.check(rank, &cause(rank)));
        ended
    });
    let mut ended = ended.concat();
    ended.sort_by_key(|ended| ended.took);
    let part = |percent: usize| ended[(ended.len() - 1) * percent / 100].took;
    println!(
        "signal {signal} in {count} jobs: {} other ranks ended after {:.2?} (median), {:.2?} (90 %), {:.2?} (most)",
        ended.len(),
        part(50),
        part(90),
        part(100)
    );
    let late: Vec<_> = ended.into_iter().filter(|ended| ended.took >= limit).collect();
    for Ended { job, rank, status, took, text } in &late {
        println!("late: {:?}, rank {rank} after {took:.2?} with {status}:\n{text}", Reaction::of(*job));
    }
    assert!(late.is_empty(), "{} ranks ended later than {limit:?}", late.len());
}

#[test]
fn a_rank_that_is_killed_ends_the_others_within_three_seconds() {
    const NAME: &str = "watchdog::a_rank_that_is_killed_ends_the_others_within_three_seconds";
    if be_a_rank() || devices().is_none() {
        return;
    }
    let before = free_bytes();
    let kills = (libc::SIGKILL, setting("SYMMALLOC_KILLS", 12));
    signal_ranks(NAME, kills, Duration::from_secs(3), |rank| format!("rank {rank} is gone: its process ended"));
    // Contexts of other processes may come and go. The memory of a leaked job would be at least 64 MiB.
    let after = free_bytes();
    assert!(after + (48 << 20) > before, "{before} and {after} bytes free");
}

#[test]
fn a_rank_that_is_stopped_ends_the_others_at_the_deadline() {
    const NAME: &str = "watchdog::a_rank_that_is_stopped_ends_the_others_at_the_deadline";
    if be_a_rank() || devices().is_none() {
        return;
    }
    let stops = (libc::SIGSTOP, setting("SYMMALLOC_STOPS", 4));
    // Ending the communicator takes at most two seconds. Over sockets, NCCL's own threads add one.
    let limit = DEADLINE + Duration::from_secs(if devices() == Some(1) { 3 } else { 2 });
    signal_ranks(NAME, stops, limit, |rank| format!("rank {rank} is stopped"));
}

#[test]
fn a_slow_rank_is_awaited() {
    const NAME: &str = "watchdog::a_slow_rank_is_awaited";
    if be_a_rank() || devices().is_none() {
        return;
    }
    let mut job = Job::start(NAME, 0, true);
    let time = Duration::from_secs(setting("SYMMALLOC_SLOW_SECONDS", 30));
    let begun = Instant::now();
    while begun.elapsed() < time {
        for child in &mut job.children {
            assert!(
                child.try_wait().expect("the child can be queried").is_none(),
                "a rank ended after {:?}",
                begun.elapsed()
            );
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    println!("no rank was considered gone in {time:?}");
}
