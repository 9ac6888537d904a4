//! Tests with several communicators per process: a rank that is killed or stopped ends all of them at once, not one deadline after another.

use super::{Rank, assert_success, failure, folder};
use std::fs;
use std::time::{Duration, Instant, SystemTime};
use stub_process::{RankOutput, nccl, nccl_test, ranks};
use symmalloc_nccl::FailureCause;

/// A deadline that exceeds every other time in these tests, so that a second wait for it is noticed.
const DEADLINE: Duration = Duration::from_secs(6);

/// Number of communicators besides the world.
const PARTS: u32 = 2;

/// Runs three ranks, each with a world and further communicators. Rank 1 sends itself a signal, and `name` checks the error of the others.
/// The others must have dropped all communicators `limit` after the signal.
fn lose_rank_1(signal: i32, slow_call: &str, limit: Duration, name: fn(&FailureCause) -> bool) -> Vec<RankOutput> {
    let folder_of_records = tempfile::tempdir().expect("a folder should be created");
    ranks(3, &[("SYMMALLOC_FLIGHT_RECORDS", &folder_of_records.path().to_string_lossy())], |rank| {
        let mut it = Rank::new(rank, 3, DEADLINE);
        let split = |_| {
            it.comm
                .split(Some(0), it.comm.rank())
                .expect("all ranks should split")
                .expect("the rank should be in a part")
        };
        let parts: Vec<_> = (0..PARTS).map(split).collect();
        // On a device, these calls wait for the proxies of all peers.
        nccl::slow(slow_call, Some(rank), 0, 60_000);
        let victim = folder().join("victim.pid");
        if rank == 1 {
            // The last of these may still be running on the other ranks when the signal arrives.
            for _ in 0..3 {
                it.reduce().expect("all ranks should take part");
            }
            fs::write(&victim, std::process::id().to_string()).expect("the write should succeed");
            // SAFETY: the call only ends or stops this process.
            unsafe { libc::kill(libc::getpid(), signal) };
            loop {
                std::thread::park();
            }
        }
        let (error, _) = it.reduce_until_failure();
        assert!(name(failure(&error)), "{error:?}");
        let first = Instant::now();
        drop(parts);
        drop(it);
        let took = fs::metadata(&victim).and_then(|metadata| metadata.modified()).expect("the file should exist");
        let took = SystemTime::now().duration_since(took).expect("the signal came first");
        println!("all communicators ended {took:?} after the signal, {:?} after the first error", first.elapsed());
        fs::write(folder().join(format!("through.{rank}")), "").expect("the write should succeed");
        stub_process::until(|| [0, 2].iter().all(|rank| folder().join(format!("through.{rank}")).exists()));
        let pid: i32 = fs::read_to_string(&victim)
            .expect("the file should have been written")
            .parse()
            .expect("it should be a number");
        if rank == 0 {
            // SAFETY: the call only ends rank 1 of this test.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        assert!(took < limit, "{took:?}");
        // SAFETY: skips the exit handlers, because a thread may still be inside NCCL.
        unsafe { libc::_exit(0) };
    })
}

nccl_test!(a_process_that_is_killed_ends_all_communicators_at_once, ["SYMMALLOC_WATCHDOG" = "abort"], {
    let is_gone = |cause: &FailureCause| matches!(cause, FailureCause::RankGone { rank: 1, .. });
    // Each abort hangs. A program waits for all of them together, not for one after the other.
    let outputs = lose_rank_1(libc::SIGKILL, "ncclCommAbort", Duration::from_secs(3), is_gone);
    assert_success(&outputs, |rank| rank != 1);
});

nccl_test!(a_process_that_is_stopped_ends_all_communicators_at_one_deadline, {
    let is_stopped = |cause: &FailureCause| match cause {
        FailureCause::RankStopped { rank, .. } => *rank == 1,
        FailureCause::RankFailed { report, .. } => report.first_rank == Some(1) && report.stopped_ms.is_some(),
        _ => false,
    };
    // Each normal destruction hangs.
    let limit = DEADLINE + Duration::from_secs(2);
    let outputs = lose_rank_1(libc::SIGSTOP, "ncclCommDestroy", limit, is_stopped);
    assert_success(&outputs, |rank| rank != 1);
});
