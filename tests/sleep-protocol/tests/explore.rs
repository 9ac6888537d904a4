use sleep_protocol::*;
use stateright::{Checker, Model};
use std::time::Instant;
fn run(name: &str, job: Job) {
    let t = Instant::now();
    let c = job.checker().threads(2).spawn_dfs().join();
    let mut d: Vec<_> = c.discoveries().into_keys().collect();
    d.sort_unstable();
    println!("{name}: {} states, {} depth, {:.1} s, found {d:?}", c.unique_state_count(), c.max_depth(), t.elapsed().as_secs_f64());
    for (n, p) in c.discoveries() {
        if properties::KEPT.contains(&n) {
            println!("BROKEN {n}: \n{}", story(p));
        }
    }
}
#[test]
fn explore() {
    use Op::*;
    let all = Faults { deaths: 1, stops: 1, breaks: 1, refusals: 1, delays: 1, skips: 1 };
    let nodl = Faults { stops: 0, skips: 0, breaks: 2, ..all };
    let again = [Sync, Sleep(0), Wake(0), Wake(0)];
    let heal = [Sync, Sleep(0), Wake(0), Sleep(1), Wake(1), Sync];
    run("2r again", Job::new(2, 2, &again).with_communicator(2, 0).with_faults(all).with_lost());
    run("2r heal", Job::new(2, 2, &heal).with_communicator(2, 3).with_faults(all));
    run("2r new comm", Job::new(2, 2, &[Sleep(0), Wake(1)]).with_communicator(2, 1).with_faults(all).with_lost());
    run("2r again nodl", Job::new(2, 2, &again).with_communicator(2, 0).with_faults(nodl).without_deadlines().with_lost());
    run("3r nodl", Job::new(3, 2, &again).with_communicator(3, 0).with_faults(Faults { breaks: 1, ..nodl }).without_deadlines());
    run("3r 2s 1c again all", Job::new(3, 2, &again).with_faults(all));
    run("3r 2s 2c sub", Job::new(3, 2, &[Sleep(0), Wake(0)]).with_communicator(2, 0).with_faults(Faults { stops: 0, ..all }));
    run("3r 2s 2c sub all", Job::new(3, 2, &[Sleep(0), Wake(0)]).with_communicator(2, 0).with_faults(all));
    run("3r 1s heal all", Job::new(3, 1, &[Sleep(0), Wake(0), Sleep(1), Wake(1)]).with_communicator(3, 2).with_faults(all));
}
