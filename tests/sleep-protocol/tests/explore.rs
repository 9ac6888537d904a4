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
        if sleep_protocol::properties::KEPT.contains(&n) {
            println!("BROKEN {n}: {:#?}", p.into_actions());
        }
    }
}
#[test]
fn explore() {
    use Op::*;
    let all = Faults { deaths: 1, stops: 1, breaks: 1, refusals: 1, delays: 1 };
    run("2 ranks 1 seg sleep wake nofault", Job::new(2, 1, &[Sleep(0), Wake(0)]));
    run("2 ranks 1 seg sleep wake all", Job::new(2, 1, &[Sleep(0), Wake(0), Wake(0)]).with_faults(all));
    run("2 ranks 2 seg 2 comm all", Job::new(2, 2, &[Sleep(0), Wake(0)]).with_communicator(2, 0).with_faults(all));
    run("3 ranks 1 seg 1 comm one death", Job::new(3, 1, &[Sleep(0), Wake(0)]).with_faults(Faults { deaths: 1, ..Faults::default() }));
}
