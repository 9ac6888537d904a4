//! Tests with ranks that are killed, stopped or slow, each in a separate process. With two devices, each rank uses one. With one device,
//! the ranks share it, and `NCCL_HOSTID` makes NCCL treat them as two machines: kernels are then plain and use sockets, and there are no
//! windows.
//!
//! `SYMMALLOC_KILLS` and `SYMMALLOC_STOPS` set how often a rank is killed or stopped (12 and 4), `SYMMALLOC_SLOW_SECONDS` sets how long a
//! rank is slow (30), and `SYMMALLOC_PAIRS` sets the number of concurrent jobs (4).

use crate::job::{MIB, Rank, again, reserved};
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use symmalloc_core::PoolId;
use symmalloc_core::config::PoolConfig;
use symmalloc_cuda::{CudaDevice, GraphPool};
use symmalloc_nccl::{Communicator, Launch, Nccl, ReduceOp, Registration};

const CHILD: &str = "SYMMALLOC_WATCHED_CHILD";
const DEADLINE: Duration = Duration::from_secs(5);

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

/// The processes of a job with two ranks, which runs until a rank fails. Their stderr is read when they end.
struct Job {
    children: Vec<Child>,
}

impl Job {
    /// Starts the job and returns once both ranks are working.
    fn start(test: &str, number: u64, slow: bool) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
        let own_device = CudaDevice::count().expect("the driver counts the devices") > 1;
        let start = |rank: usize| {
            let mut command = again(test);
            command
                .envs([("RANK", rank.to_string()), ("LOCAL_RANK", if own_device { rank } else { 0 }.to_string())])
                .envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("NCCL_NVLS_ENABLE", "0")])
                .envs([("SYMMALLOC_RENDEZVOUS", free.to_string()), (CHILD, number.to_string())])
                .env("SYMMALLOC_SLOW_RANK", if slow { "1" } else { "none" });
            if !own_device {
                command.env("NCCL_HOSTID", format!("machine{rank}")).env("NCCL_SOCKET_IFNAME", "lo");
            }
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started again")
        };
        let mut children: Vec<Child> = (0..2).map(start).collect();
        for child in &mut children {
            let stdout = child.stdout.as_mut().expect("piped");
            let is_ready = BufReader::new(stdout).lines().map_while(Result::ok).any(|line| line.contains("at work"));
            if !is_ready {
                let mut text = String::new();
                child.stderr.as_mut().expect("piped").read_to_string(&mut text).expect("stderr is valid UTF-8");
                panic!("a rank did not start:\n{text}");
            }
        }
        Job { children }
    }

    fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: the process is a child of this one and has not been waited for.
        assert_eq!(unsafe { libc::kill(self.children[rank].id() as i32, signal) }, 0);
    }

    /// Waits for a rank to end. Returns its exit code, its stderr and the elapsed time.
    fn end_of(&mut self, rank: usize, limit: Duration) -> (Option<i32>, String, Duration) {
        let begun = Instant::now();
        let child = &mut self.children[rank];
        let status = loop {
            if let Some(status) = child.try_wait().expect("the child can be queried") {
                break status;
            }
            if begun.elapsed() > limit {
                child.kill().expect("killed");
                let mut text = String::new();
                child.stderr.as_mut().expect("piped").read_to_string(&mut text).expect("stderr is valid UTF-8");
                panic!("rank {rank} has not ended after {limit:?}:\n{text}");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let took = begun.elapsed();
        let mut text = String::new();
        child.stderr.as_mut().expect("piped").read_to_string(&mut text).expect("stderr is valid UTF-8");
        (status.code(), text, took)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _gone_already = child.kill();
            let _reaped = child.wait();
        }
    }
}

/// Runs a rank's work until an error occurs: plain collectives and, if each rank has its own device, collectives on windows; syncs with and
/// without changes, splits, graphs, and work on the host.
fn work() -> Box<dyn std::error::Error> {
    let launch = Launch::from_env().expect("started as a rank");
    let is_slow = std::env::var("SYMMALLOC_SLOW_RANK").is_ok_and(|rank| rank == launch.rank.to_string());
    let device = CudaDevice::new(launch.local_rank as usize).expect("a device");
    let stream = device.context().new_stream().expect("a stream");
    let comm = Communicator::builder(&device).deadline(DEADLINE).connect_env().expect("connected");
    let barrier = Barrier::new(1);
    let rank = Rank { rank: launch.rank, ranks: launch.ranks, device, stream, barrier: &barrier };
    let allocator = rank.allocator(reserved(64 * MIB));
    let registrar = rank.registrar(&allocator);
    registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("attached");
    let growing = PoolConfig::builder().fixed().symmetric(true).build().expect("valid");
    let pool = allocator.create_pool(growing).expect("the pool is created");
    registrar.attach(&comm, &[pool.id()], Registration::Windows).expect("attached");
    let graphs = GraphPool::new(&allocator, PoolConfig::default()).expect("a pool");
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
    round().expect_err("only an error ends it")
}

/// Runs a rank if this is a rank's process: works until an error occurs, prints it, and exits with status 1. Returns `false` in any other
/// process.
fn be_a_rank() -> bool {
    if std::env::var_os(CHILD).is_none() {
        return false;
    }
    let error = work();
    eprintln!("error: {error}");
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
    let device = CudaDevice::new(0).expect("a device");
    device.context().mem_get_info().expect("the driver reports free memory").0 as u64
}

fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let (count, median, most) = (times.len(), times[times.len() / 2], times[times.len() - 1]);
    println!("{count} {what}: the other ended after {median:.2?} (median), {most:.2?} (most)");
}

#[test]
fn a_rank_that_is_killed_ends_the_other_within_three_seconds() {
    const NAME: &str = "watchdog::a_rank_that_is_killed_ends_the_other_within_three_seconds";
    if be_a_rank() || devices().is_none() {
        return;
    }
    let before = free_bytes();
    let times = jobs(setting("SYMMALLOC_KILLS", 12), |number| {
        let mut job = Job::start(NAME, number, false);
        // Multiples of the golden ratio spread the moments over the steps and are the same in each run.
        let moment = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        std::thread::sleep(Duration::from_micros(moment * 400));
        let killed = (number % 2) as usize;
        job.signal(killed, libc::SIGKILL);
        let (code, text, took) = job.end_of(1 - killed, Duration::from_secs(20));
        assert!(took < Duration::from_secs(3), "job {number}, after {took:?}, with {code:?}:\n{text}");
        assert!(code == Some(1) || code == Some(86), "job {number}, {code:?}:\n{text}");
        assert!(text.contains(&format!("rank {killed} is gone: its process ended")), "job {number}:\n{text}");
        took
    });
    print_times("kills", times);
    // Contexts of other processes may come and go. The memory of a leaked job would be at least 64 MiB.
    let after = free_bytes();
    assert!(after + (48 << 20) > before, "{before} and {after} bytes free");
}

#[test]
fn a_rank_that_is_stopped_ends_the_other_at_the_deadline() {
    const NAME: &str = "watchdog::a_rank_that_is_stopped_ends_the_other_at_the_deadline";
    if be_a_rank() || devices().is_none() {
        return;
    }
    let times = jobs(setting("SYMMALLOC_STOPS", 4), |number| {
        let mut job = Job::start(NAME, number, false);
        std::thread::sleep(Duration::from_millis(37 * number));
        let stopped = (number % 2) as usize;
        job.signal(stopped, libc::SIGSTOP);
        let (code, text, took) = job.end_of(1 - stopped, Duration::from_secs(30));
        // Ending the communicator takes at most two seconds.
        assert!(took < DEADLINE + Duration::from_secs(3), "job {number}, after {took:?}, with {code:?}:\n{text}");
        assert!(text.contains(&format!("rank {stopped} is stopped")), "job {number}:\n{text}");
        took
    });
    print_times("stops", times);
}

#[test]
fn a_rank_that_is_slow_is_waited_for() {
    const NAME: &str = "watchdog::a_rank_that_is_slow_is_waited_for";
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
