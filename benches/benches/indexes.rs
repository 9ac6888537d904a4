//! Timing of free index designs on the queries of each recorded job in steady state, with expandable segments.
//!
//! Reports nanoseconds of processor time per query (insert, remove, or best fit), as medians over repeats that
//! alternate between the designs. An allocation and its free issue about four queries. All results include the loop
//! over the queries. `cargo bench -p symmalloc-benches --bench indexes`

use std::env;
use std::hint::black_box;
use symmalloc_benches::clock::{median, nanoseconds};
use symmalloc_benches::free_sets::{BinLists, BinVectors, FreeSet, Fronts, Question, Tree, Vector};
use symmalloc_benches::workload::{Bench, Workload};
use symmalloc_benches::{Segments, reference};
use symmalloc_harness::jobs;

const REPEATS: usize = 9;

/// The name of a design, with a function that runs all queries and returns the digest of the answers and the
/// nanoseconds.
type Design = (&'static str, fn(&[Vec<Question>]) -> (u64, f64));
const DESIGNS: [Design; 5] = [
    ("tree", ask::<Tree>),
    ("vector", ask::<Vector>),
    ("fronts", ask::<Fronts>),
    ("bin vectors", ask::<BinVectors>),
    ("bin lists", ask::<BinLists>),
];

fn main() {
    let filter = env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let names: String = DESIGNS.iter().map(|(name, _)| format!("{name:>13}")).collect();
    println!("{:<22}{:>10}{:>10}{names}", "recorded job", "ops", "questions");
    for job in jobs::JOBS.into_iter().filter(|job| job.contains(&filter)) {
        let mut bench = Bench::warm(reference(Segments::Expandable), Workload::from(&jobs::program(job)));
        bench.subject_mut().listen();
        bench.repeat();
        let asked = bench.subject().asked();
        let questions: usize = asked.iter().map(Vec::len).sum();
        let mut times = vec![Vec::new(); DESIGNS.len()];
        for _ in 0..REPEATS {
            let outcomes: Vec<_> = DESIGNS.iter().map(|(_, ask)| ask(asked)).collect();
            assert!(outcomes.iter().all(|(answers, _)| *answers == outcomes[0].0), "all designs give the same answers");
            outcomes.iter().zip(&mut times).for_each(|((_, time), times)| times.push(time / questions as f64));
        }
        let cells: String = times.into_iter().map(|times| format!("{:>13.1}", median(times))).collect();
        println!("{job:<22}{:>10}{questions:>10}{cells}", bench.ops());
    }
}

/// Runs the queries of each heap on a set that is initially empty.
fn ask<F: FreeSet>(asked: &[Vec<Question>]) -> (u64, f64) {
    let mut sets: Vec<F> = asked.iter().map(|_| F::default()).collect();
    let (mut answers, mut time) = (0, 0.0);
    for (set, questions) in sets.iter_mut().zip(asked) {
        time += nanoseconds(|| answers ^= black_box(set.answer(black_box(questions))));
    }
    (answers, time)
}
