//! Ranks as processes.

use crate::alone;
use crate::child::{self, Running};
use crate::machines::{ADDRESSES, Machines};
use std::process::Command;
use std::time::{Duration, SystemTime};

const RANK: &str = "SYMMALLOC_STUB_RANK";

/// The outcome of a rank's process.
#[derive(Clone, Debug)]
pub struct RankOutput {
    /// Rank of the process.
    pub rank: usize,
    /// `true` if the body returned.
    pub is_success: bool,
    /// Exit code of the process; `None` if a signal killed it.
    pub code: Option<i32>,
    /// Standard output and standard error of the process.
    pub text: String,
    /// Time at which the process ended.
    pub ended: SystemTime,
}

/// Runs `body` in one process per rank, inside a test on the stubs. `options` are added to the environment of the test. Returns the outcome
/// of each process. A process that takes half of the test's time limit is killed. Each process executes
/// the test again, in which this function runs `body` and exits.
///
/// # Panics
/// Panics if a process cannot be started.
pub fn ranks(count: usize, options: &[(&str, &str)], body: impl FnOnce(usize)) -> Vec<RankOutput> {
    if let Ok(rank) = std::env::var(RANK) {
        body(rank.parse().expect("it should be a number"));
        std::process::exit(0);
    }
    await_all((0..count).map(|rank| start(rank, options, |_| ())).collect(), || ())
}

/// Like [`ranks`], on two [machines](Machines): the first half of the ranks runs on machine 0. The environment is that of torchrun's workers,
/// and NCCL uses the link. Meanwhile, calls `conduct`, which can change the link. Returns `None`, after the reason is printed, if there can be
/// no machines.
///
/// # Panics
/// Panics if a process cannot be started, or if `conduct` panics. The ranks should then end on their own.
pub fn ranks_of_machines(
    count: usize,
    options: &[(&str, &str)],
    body: impl FnOnce(usize),
    conduct: impl FnOnce(&Machines),
) -> Option<Vec<RankOutput>> {
    if let Ok(rank) = std::env::var(RANK) {
        body(rank.parse().expect("it should be a number"));
        std::process::exit(0);
    }
    let machines = Machines::new()?;
    let of_machine = count.div_ceil(2);
    let start_there = |rank: usize| {
        let (machine, local_rank) = (rank / of_machine, rank % of_machine);
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", count.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", if machine == 0 { of_machine } else { count - of_machine }.to_string()),
            ("TORCHELASTIC_RUN_ID", "none".to_owned()),
            ("MASTER_ADDR", ADDRESSES[0].to_owned()),
            ("MASTER_PORT", "29500".to_owned()),
            ("STUB_NCCL_SOCKET_IP", ADDRESSES[machine].to_owned()),
        ];
        start(rank, options, |command| machines.enter(machine, command.envs(variables)))
    };
    Some(await_all((0..count).map(start_there).collect(), || conduct(&machines)))
}

/// A rank's process that a test started, and may signal. Dropping it leaves the process running until the test ends.
pub struct RankProcess {
    rank: usize,
    running: Running,
}

impl RankProcess {
    /// Starts a process in which [`this_rank`] returns `rank`, inside a test on the stubs. `options` are added to the environment of the
    /// test.
    ///
    /// # Panics
    /// Panics if the process cannot be started.
    pub fn start(rank: usize, options: &[(&str, &str)]) -> Self {
        RankProcess { rank, running: start(rank, options, |_| ()) }
    }

    /// Returns the id of the process.
    pub fn id(&self) -> i32 {
        self.running.id()
    }

    /// Sends a signal to the process.
    ///
    /// # Panics
    /// Panics if the process has ended.
    pub fn signal(&self, signal: i32) {
        // SAFETY: the call only signals a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.id(), signal) }, 0, "rank {} has ended", self.rank);
    }

    /// Returns `true` if the process has not ended.
    ///
    /// # Panics
    /// Panics if the system does not know the process.
    pub fn is_running(&mut self) -> bool {
        self.running.is_running()
    }

    /// Waits until the process ends, and kills it after this time.
    pub fn wait(self, limit: Duration) -> RankOutput {
        let limit = self.running.age() + limit;
        output_of(self.rank, self.running, limit)
    }
}

/// Returns the rank of this process; `None` in the process of the test itself.
pub fn this_rank() -> Option<usize> {
    std::env::var(RANK).ok().map(|rank| rank.parse().expect("it should be a number"))
}

/// Starts the test again as a rank.
fn start(rank: usize, options: &[(&str, &str)], prepare: impl FnOnce(&mut Command)) -> Running {
    let mut command = alone(&std::env::var(crate::MARK).expect("in a test on the stubs"));
    prepare(command.env(RANK, rank.to_string()).envs(options.iter().copied()));
    Running::start(&mut command)
}

/// Waits for all ranks, and calls `conduct` meanwhile.
fn await_all(children: Vec<Running>, conduct: impl FnOnce()) -> Vec<RankOutput> {
    let limit = child::limit() / 2;
    let wait = |(rank, child): (usize, Running)| output_of(rank, child, limit);
    std::thread::scope(|scope| {
        let waits: Vec<_> = children.into_iter().enumerate().map(|child| scope.spawn(|| wait(child))).collect();
        conduct();
        waits.into_iter().map(|wait| wait.join().expect("the thread should not panic")).collect()
    })
}

/// Waits until a rank's process ends, and kills it at the limit.
fn output_of(rank: usize, child: Running, limit: Duration) -> RankOutput {
    let child::Ended { status, stdout, stderr, is_late } = child.wait(limit);
    let late = if is_late { format!("\nLATE killed after {limit:?}\n") } else { String::new() };
    RankOutput {
        rank,
        is_success: status.success(),
        code: status.code(),
        text: stdout + &stderr + &late,
        ended: SystemTime::now(),
    }
}
