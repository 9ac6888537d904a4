//! Ranks as processes.

use crate::alone;
use crate::child::{self, Running};
use std::time::SystemTime;

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
        body(rank.parse().expect("a number"));
        std::process::exit(0);
    }
    let test = std::env::var(crate::MARK).expect("in a test on the stubs");
    let start = |rank: usize| {
        let mut command = alone(&test);
        Running::start(command.env(RANK, rank.to_string()).envs(options.iter().copied()))
    };
    let children: Vec<Running> = (0..count).map(start).collect();
    let limit = child::limit() / 2;
    let wait = |(rank, child): (usize, Running)| {
        let child::Ended { status, stdout, stderr, is_late } = child.wait(limit);
        let late = if is_late { format!("\nLATE killed after {limit:?}\n") } else { String::new() };
        RankOutput {
            rank,
            is_success: status.success(),
            code: status.code(),
            text: stdout + &stderr + &late,
            ended: SystemTime::now(),
        }
    };
    std::thread::scope(|scope| {
        let waits: Vec<_> = children.into_iter().enumerate().map(|child| scope.spawn(|| wait(child))).collect();
        waits.into_iter().map(|wait| wait.join().expect("no panic")).collect()
    })
}
