//! Every flaw is found, by the property that it is named with; and every property finds one.

use sleep_protocol::properties::{
    ALONE, ENDS, EQUAL, HEALS, KEPT, LOST, MAPPED, MET, ORDER, TOGETHER, USED, WHOLE,
};
use sleep_protocol::{Faults, Flaw, Job, Op};
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::BTreeSet;

const ONCE: Faults = Faults { deaths: 1, stops: 1, breaks: 1, refusals: 1, delays: 1, skips: 1 };

const CYCLE: [Op; 2] = [Op::Sleep(0), Op::Wake(0)];
const HEAL: [Op; 4] = [Op::Sleep(0), Op::Wake(0), Op::Sleep(1), Op::Wake(1)];

/// What is wrong, which property must notice, and in which job.
fn flaws() -> Vec<(Flaw, &'static str, Job)> {
    let two = |program: &[Op]| Job::new(2, 2, program).with_faults(ONCE);
    let two_communicators = || two(&CYCLE).with_communicator(2, 0);
    vec![
        (Flaw::UnmapFirst, MAPPED, two(&CYCLE)),
        (Flaw::KeepWindows, MAPPED, two(&CYCLE)),
        (Flaw::UnmapUnderLost, MAPPED, two(&CYCLE).with_lost()),
        (Flaw::SleepUnasked, USED, two(&CYCLE)),
        (Flaw::GoOn, USED, two_communicators()),
        (Flaw::KeepCommunicators, USED, two_communicators()),
        (Flaw::OtherOrder, ORDER, two(&CYCLE)),
        (Flaw::OpsUncompared, MET, two(&[Op::Sleep(0), Op::Wake(0), Op::Sync])),
        (Flaw::KeepCommunicators, TOGETHER, two_communicators()),
        (Flaw::WakeUnasked, MET, two(&[Op::Sleep(0), Op::Wake(0), Op::Sync])),
        (Flaw::WakeUntold, ALONE, two(&CYCLE)),
        (Flaw::WakeAlone, ALONE, two(&CYCLE)),
        (Flaw::KeepMemory, WHOLE, two(&CYCLE)),
        (Flaw::LoseUntold, LOST, two_communicators()),
        (Flaw::KeepCommunicators, EQUAL, two_communicators()),
        (Flaw::SleepOnce, HEALS, two(&HEAL).with_communicator(2, 2)),
        (Flaw::NoDeadline, ENDS, two(&CYCLE)),
        (Flaw::AgreedLast, ENDS, two_communicators().with_faults(Faults { stops: 0, skips: 0, ..ONCE }).without_deadlines()),
    ]
}

#[test]
fn every_flaw_is_found() {
    for (flaw, property, job) in flaws() {
        let finish = HasDiscoveries::AnyOf([property].into());
        let checker = job.clone().with_flaw(flaw).checker().finish_when(finish).spawn_bfs().join();
        let actions = checker.discovery(property).map(|path| path.into_actions());
        println!("{flaw:?} / {property}: {:?} of {} states", actions.as_ref().map(Vec::len), checker.unique_state_count());
        let others: Vec<_> = checker.discoveries().into_keys().filter(|name| KEPT.contains(name)).collect();
        if actions.is_none() { println!("   MISSED; found {others:?}"); }
    }
}

#[test]
fn every_property_finds_a_flaw() {
    let finding: BTreeSet<&str> = flaws().iter().map(|(_, property, _)| *property).collect();
    assert_eq!(finding, KEPT.into());
}
