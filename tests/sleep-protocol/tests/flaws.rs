//! Checks that every flaw violates its property, and that every property detects a flaw. `-- --nocapture` prints the
//! violations.

use sleep_protocol::properties::{
    ALONE, BACK, ENDS, EQUAL, HEALS, KEPT, LOST, MAPPED, MET, ORDER, QUIET, RECOVERS, TOGETHER, USED, WHOLE,
};
use sleep_protocol::{Faults, Flaw, Job, Op, story};
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::BTreeSet;

const ONCE: Faults = Faults { deaths: 1, stops: 1, breaks: 1, refusals: 1, delays: 1, skips: 1 };

const CYCLE: [Op; 2] = [Op::Sleep(0), Op::Wake(0)];
const SUSPEND: [Op; 2] = [Op::Suspend(0), Op::Wake(0)];
/// The second sleep finds all ranks asleep.
const SUSPEND_TWICE: [Op; 3] = [Op::Sleep(0), Op::Suspend(0), Op::Wake(0)];
const HEAL: [Op; 4] = [Op::Sleep(0), Op::Wake(0), Op::Sleep(1), Op::Wake(1)];

/// Returns each flaw with the property that it must violate and the job in which it does.
fn flaws() -> Vec<(Flaw, &'static str, Job)> {
    let two = |program: &[Op]| Job::new(2, 2, program).with_faults(ONCE);
    let two_communicators = || two(&CYCLE).with_communicator(2, 0);
    // If no process stops and no program differs, no result may depend on a deadline.
    let undelayed = || two_communicators().with_faults(Faults { stops: 0, skips: 0, ..ONCE }).without_deadlines();
    let unsuspended = |program: &[Op]| {
        let job = Job::new(2, 1, program).with_communicator(2, 0);
        job.with_faults(Faults { stops: 0, skips: 0, ..ONCE }).without_deadlines()
    };
    let recovering = Job::new(2, 1, &[Op::Sleep(0), Op::Wake(0), Op::Wake(0)]);
    let recovering = recovering.with_faults(Faults { refusals: 1, ..Faults::default() }).without_deadlines();
    vec![
        (Flaw::UnmapFirst, MAPPED, two(&CYCLE)),
        (Flaw::KeepWindows, MAPPED, two(&CYCLE)),
        (Flaw::UnmapUnderLost, MAPPED, two(&CYCLE).with_lost()),
        (Flaw::SleepUnasked, USED, two(&CYCLE)),
        (Flaw::GoOn, USED, two_communicators()),
        (Flaw::KeepCommunicators, USED, two_communicators()),
        (Flaw::UnmapLate, USED, two_communicators()),
        (Flaw::DifferentOrder, ORDER, two(&CYCLE)),
        (Flaw::OpsUncompared, MET, two(&[Op::Sleep(0), Op::Wake(0), Op::Sync])),
        (Flaw::KeepCommunicators, TOGETHER, two_communicators()),
        (Flaw::WakeUnasked, MET, two(&[Op::Sleep(0), Op::Wake(0), Op::Sync])),
        (Flaw::SleepUnchecked, BACK, two(&CYCLE)),
        (Flaw::GoOn, ALONE, two(&CYCLE)),
        (Flaw::WakeUntold, ALONE, two(&CYCLE)),
        (Flaw::WakeAlone, ALONE, two(&CYCLE)),
        (Flaw::KeepMemory, WHOLE, two(&CYCLE)),
        (Flaw::LoseUntold, LOST, two_communicators()),
        (Flaw::KeepCommunicators, EQUAL, two_communicators()),
        (Flaw::SleepOnce, HEALS, two(&HEAL).with_communicator(2, 2)),
        (Flaw::NoDeadline, ENDS, two(&CYCLE)),
        (Flaw::AgreedLast, ENDS, undelayed()),
        (Flaw::LeaveUnregistered, ENDS, undelayed()),
        (Flaw::AgreeSuspended, QUIET, two(&SUSPEND)),
        (Flaw::RegisterSuspended, QUIET, two(&SUSPEND).with_communicator(2, 0)),
        (Flaw::KeepUnsuspended, ENDS, unsuspended(&SUSPEND)),
        (Flaw::KeepUnsuspended, ENDS, unsuspended(&SUSPEND_TWICE)),
        (Flaw::RecoverAsOp, RECOVERS, recovering),
    ]
}

#[test]
fn every_flaw_is_found() {
    for (flaw, property, job) in flaws() {
        let until = HasDiscoveries::AnyOf([property].into());
        let checker = job.with_flaw(flaw).checker().finish_when(until).spawn_bfs().join();
        let run = checker.discovery(property);
        let Some(run) = run else { panic!("{flaw:?} does not violate \"{property}\"") };
        println!("{flaw:?}: violates: {property}\n{}", story(run));
    }
}

/// The jobs satisfy all properties without the flaws.
#[test]
fn without_a_flaw_the_same_jobs_pass() {
    for (flaw, _, job) in flaws() {
        let found = job.checker().spawn_dfs().join().discoveries();
        let broken: Vec<&str> = KEPT.into_iter().filter(|name| found.contains_key(name)).collect();
        assert!(broken.is_empty(), "the job for {flaw:?} violates {broken:?} without the flaw");
    }
}

#[test]
fn every_property_finds_a_flaw() {
    let finding: BTreeSet<&str> = flaws().iter().map(|(_, property, _)| *property).collect();
    assert_eq!(finding, KEPT.into());
}
