//! Checks that the protocol satisfies its properties in every run of these jobs. The numbers of states are pinned,
//! because a fault or step that is missing from the model would reduce them and weaken every check. `--
//! --nocapture` prints the duration of each check; `docs/sleep-protocol.md` describes the protocol.

use Op::{Sleep, Suspend, Sync, Wake};
use sleep_protocol::properties::{FAILED, FEWER, IN_PLACE, KEPT, RETRIED, SPLIT, SUSPENDED};
use sleep_protocol::{Faults, Job, Op, story};
use stateright::{Checker, Model};
use std::time::Instant;

/// Each fault happens at most once.
const ONCE: Faults = Faults { deaths: 1, stops: 1, breaks: 1, refusals: 1, delays: 1, skips: 1 };
/// The faults that are detected without a deadline.
const NOTICED: Faults = Faults { stops: 0, skips: 0, ..ONCE };

const CYCLE: [Op; 2] = [Sleep(0), Wake(0)];
/// A cycle with a second wake, which has an effect only if the first one was refused.
const AGAIN: [Op; 4] = [Sync, Sleep(0), Wake(0), Wake(0)];
/// A cycle, followed by another over a communicator that is connected after the first wake.
const HEAL: [Op; 6] = [Sync, Sleep(0), Wake(0), Sleep(1), Wake(1), Sync];

/// Explores all states of a job. Checks the properties, the number of states, and that each of `seen` occurs in some
/// run.
fn check(job: Job, threads: usize, states: usize, seen: &[&str]) {
    let begun = Instant::now();
    let checker = job.checker().threads(threads).spawn_dfs().join();
    let found = checker.discoveries();
    for name in KEPT {
        let run = found.get(name).cloned().map(story);
        assert!(run.is_none(), "violated: {name}\n{}", run.unwrap_or_default());
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{} states, at most {} actions, {seconds:.1} s", checker.unique_state_count(), checker.max_depth() - 1);
    for name in seen {
        assert!(found.contains_key(name), "never occurs: {name}");
    }
    assert_eq!(
        checker.unique_state_count(),
        states,
        "the number of states of the model changed: update it here, and in docs/sleep-protocol.md if it is the largest"
    );
}

/// Returns `true` if the tests that take minutes should run.
fn is_night() -> bool {
    std::env::var_os("SYMMALLOC_NIGHT").is_some()
}

#[test]
fn two_ranks_with_two_communicators() {
    let job = Job::new(2, 2, &AGAIN).with_communicator(2, 0).with_faults(ONCE);
    check(job, 1, 142_111, &[IN_PLACE, RETRIED, FEWER, SPLIT]);
}

#[test]
fn two_ranks_and_communicators_that_are_lost() {
    let job = Job::new(2, 2, &CYCLE).with_communicator(2, 0).with_faults(ONCE).with_lost();
    check(job, 1, 186_059, &[IN_PLACE, FEWER, FAILED]);
}

#[test]
fn two_ranks_that_continue_over_a_new_communicator() {
    let job = Job::new(2, 2, &HEAL).with_communicator(2, 3).with_faults(ONCE);
    check(job, 1, 564_932, &[IN_PLACE, RETRIED, FEWER, SPLIT]);
}

#[test]
fn two_ranks_that_wake_on_a_communicator_connected_during_sleep() {
    let job = Job::new(2, 2, &[Sleep(0), Wake(1)]).with_communicator(2, 1).with_faults(ONCE).with_lost();
    check(job, 1, 110_446, &[IN_PLACE, FEWER]);
}

#[test]
fn three_ranks() {
    check(Job::new(3, 2, &AGAIN).with_faults(ONCE), 1, 878_787, &[IN_PLACE, RETRIED, SPLIT]);
}

#[test]
fn three_ranks_of_which_two_share_another_communicator() {
    let job = Job::new(3, 2, &CYCLE).with_communicator(2, 0).with_faults(ONCE);
    check(job, 1, 691_298, &[IN_PLACE, FEWER, SPLIT]);
}

#[test]
fn no_op_needs_a_deadline_where_no_process_stops() {
    let two = Job::new(2, 2, &AGAIN).with_communicator(2, 0).with_faults(Faults { breaks: 2, ..NOTICED }).with_lost();
    check(two.without_deadlines(), 1, 185_404, &[IN_PLACE, RETRIED, FEWER]);
    let three = Job::new(3, 2, &AGAIN).with_communicator(3, 0).with_faults(NOTICED);
    check(three.without_deadlines(), 1, 383_645, &[IN_PLACE, RETRIED, FEWER]);
}

#[test]
fn two_ranks_that_suspend() {
    let job = Job::new(2, 1, &[Suspend(0), Wake(0), Wake(0)]).with_communicator(2, 0).with_faults(ONCE);
    check(job, 1, 107_603, &[IN_PLACE, RETRIED, FEWER, SPLIT, SUSPENDED]);
}

#[test]
fn two_ranks_that_suspend_while_they_sleep() {
    let job = Job::new(2, 1, &[Sleep(0), Suspend(0), Suspend(0), Wake(0)]).with_communicator(2, 0);
    check(job.with_faults(ONCE), 1, 191_533, &[IN_PLACE, FEWER, SPLIT, SUSPENDED]);
}

#[test]
fn two_ranks_that_sync_while_suspended() {
    let job = Job::new(2, 1, &[Suspend(0), Sync, Wake(0), Sync]).with_faults(ONCE).with_lost();
    check(job, 1, 82_677, &[IN_PLACE, SUSPENDED]);
}

#[test]
fn two_ranks_that_suspend_and_continue_over_a_new_communicator() {
    let job = Job::new(2, 1, &[Suspend(0), Wake(0), Suspend(1), Wake(1)]).with_communicator(2, 2).with_faults(ONCE);
    check(job, 1, 378_045, &[IN_PLACE, FEWER, SPLIT]);
    let job = Job::new(2, 1, &[Suspend(0), Wake(1)]).with_communicator(2, 1).with_faults(ONCE).with_lost();
    check(job, 1, 91_224, &[IN_PLACE, FEWER]);
}

#[test]
fn three_ranks_that_suspend() {
    check(
        Job::new(3, 1, &[Suspend(0), Wake(0), Wake(0)]).with_faults(ONCE),
        1,
        834_171,
        &[IN_PLACE, RETRIED, SUSPENDED],
    );
    let job = Job::new(3, 1, &[Suspend(0), Wake(0)]).with_communicator(2, 0).with_faults(ONCE);
    check(job, 1, 970_919, &[IN_PLACE, FEWER, SPLIT, SUSPENDED]);
}

#[test]
fn no_suspension_needs_a_deadline_where_no_process_stops() {
    for (ranks, states) in [(2, 8_910), (3, 337_129)] {
        let job = Job::new(ranks, 1, &[Suspend(0), Wake(0), Wake(0)]).with_communicator(ranks, 0).with_faults(NOTICED);
        check(job.without_deadlines(), 1, states, &[IN_PLACE, RETRIED, FEWER, SUSPENDED]);
    }
}

#[test]
fn ranks_without_room_recover_alone() {
    let faults = Faults { refusals: 3, ..Faults::default() };
    for (ranks, states) in [(2, 1_563), (3, 9_349)] {
        let job = Job::new(ranks, 1, &[Suspend(0), Wake(0), Wake(0), Wake(0), Wake(0)]).with_communicator(ranks, 0);
        check(job.with_faults(faults).without_deadlines(), 1, states, &[IN_PLACE, RETRIED, SUSPENDED]);
    }
}

#[test]
fn by_night_two_ranks_with_faults_that_happen_twice() {
    if is_night() {
        let twice = Faults { deaths: 1, stops: 1, breaks: 2, refusals: 2, delays: 2, skips: 1 };
        let job = Job::new(2, 2, &HEAL).with_communicator(2, 3).with_faults(twice).with_lost();
        check(job, 2, 5_306_129, &[IN_PLACE, RETRIED, FEWER, SPLIT, FAILED]);
    }
}

#[test]
fn by_night_three_ranks_that_continue_over_a_new_communicator() {
    if is_night() {
        let job = Job::new(3, 1, &[Sleep(0), Wake(0), Sleep(1), Wake(1)]).with_communicator(3, 2).with_faults(ONCE);
        check(job, 2, 16_318_141, &[IN_PLACE, RETRIED, FEWER, SPLIT]);
    }
}

#[test]
fn by_night_three_ranks_with_two_communicators() {
    if is_night() {
        let job = Job::new(3, 2, &AGAIN).with_communicator(3, 0).with_faults(Faults { skips: 0, ..ONCE });
        check(job, 2, 5_357_856, &[IN_PLACE, RETRIED, FEWER, SPLIT]);
    }
}

#[test]
fn by_night_three_ranks_and_communicators_that_are_lost() {
    if is_night() {
        let job = Job::new(3, 2, &CYCLE).with_communicator(3, 0).with_faults(Faults { skips: 0, ..ONCE }).with_lost();
        check(job, 2, 20_694_638, &[IN_PLACE, FEWER, SPLIT, FAILED]);
    }
}
