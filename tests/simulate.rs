//! The job simulator: ranks under adverse conditions make the same placements, ranks that cannot are detected, and a
//! failure produces a story that can be replayed.

use std::fs;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicU64, Ordering};
use symmalloc_core::{Op, PoolId};
use symmalloc_harness::{is_night, jobs, targets};
use symmalloc_import::{ReadOptions, read_path};
use symmalloc_sim::SplitMix64;
use symmalloc_sim::job::shrink::shrink;
use symmalloc_sim::job::{Deviation, Failure, FailureCause, JobFaults, JobOutcome, JobPlan, Size, simulate, story};

fn size(ranks: u32, ops: usize) -> Size {
    Size { ranks: NonZeroU32::new(ranks).expect("the number should not be zero"), ops }
}

fn run(plan: &JobPlan) -> Result<JobOutcome, Failure> {
    simulate(plan, NonZeroUsize::MIN, &mut |_| ())
}

/// Simulates the jobs of these seeds on all cores.
fn seeds(count: u64, size: Size) -> JobOutcome {
    let next = AtomicU64::new(0);
    let work = || {
        let mut sum = JobOutcome::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= count {
                return sum;
            }
            sum += run(&JobPlan::from_seed(seed, &size)).unwrap_or_else(|failure| {
                panic!(
                    "{failure}\nTo shrink it: symmalloc simulate --seed {seed} --ranks {} --ops {}",
                    size.ranks, size.ops
                )
            });
        }
    };
    let mut sum = JobOutcome::default();
    std::thread::scope(|scope| {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            sum += worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    sum
}

/// Runs a thousand jobs with `SYMMALLOC_NIGHT=1`, and a hundred otherwise.
#[test]
fn jobs_of_64_ranks_place_alike_under_faults() {
    let hundreds = if is_night() { 10 } else { 1 };
    let outcome = seeds(100 * hundreds, size(64, 300));
    println!("{outcome:?}");
    assert_eq!(outcome.ranks, 6400 * hundreds);
    assert!(outcome.ops > 2_000_000 * hundreds, "{outcome:?}");
    // The simulated conditions do occur.
    assert!(outcome.private_ops > 10_000 * hundreds, "{outcome:?}");
    assert!(outcome.planned > 15_000 * hundreds && outcome.differing > 2_000 * hundreds, "{outcome:?}");
    let JobFaults { failed_calls, out_of_memory, refused, losses, small_devices, .. } = outcome.faults;
    assert!(
        failed_calls > 1000 * hundreds
            && [out_of_memory, refused, losses, small_devices].iter().all(|n| *n > 40 * hundreds),
        "{outcome:?}"
    );
    assert!(
        outcome.caught > 150 * hundreds && outcome.restarts > 250 * hundreds && outcome.left > 5 * hundreds,
        "{outcome:?}"
    );
}

/// Runs 64 ranks with `SYMMALLOC_NIGHT=1`, and 12 otherwise.
#[test]
fn recorded_jobs_place_alike_on_many_ranks() {
    let ranks = if is_night() { 64 } else { 12 };
    for (job, seed) in [("fsdp1_train_rank0", 7), ("fsdp_train_rank1", 1)] {
        let recording = read_path(&jobs::path(job), &ReadOptions::default()).expect("part of the project");
        let plan = JobPlan::of_recorded(
            &recording.config.clone().unwrap_or_default(),
            &recording.records,
            seed,
            NonZeroU32::new(ranks).expect("the number should not be zero"),
        );
        let outcome = run(&plan).unwrap_or_else(|failure| panic!("{job}: {failure}"));
        assert!(outcome.ops > u64::from(ranks) * recording.records.len() as u64 / 2, "{outcome:?}");
        assert!(outcome.syncs > 10, "{outcome:?}");
    }
}

/// Stories of defects that only several ranks reveal; `stories.rs` covers the others.
#[test]
fn every_story_of_several_ranks_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/stories");
    let mut count = 0;
    for entry in fs::read_dir(folder).expect("the stories are part of the project") {
        let path = entry.expect("a readable folder").path();
        let text = fs::read_to_string(&path).expect("a readable story");
        let plan = story::read(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        if let Some(plan) = plan {
            run(&plan).unwrap_or_else(|failure| panic!("{}: {failure}", path.display()));
            count += 1;
        }
    }
    assert!(count > 0, "no story was found");
}

/// Runs the fuzz target on random bytes.
#[test]
fn any_bytes_are_a_job_that_passes() {
    for seed in 0..if is_night() { 1000 } else { 300 } {
        let mut random = SplitMix64::new(seed);
        let bytes: Vec<u8> = (0..8 + 4 * random.below(150)).map(|_| random.next_u64() as u8).collect();
        targets::job(&bytes);
    }
}

#[test]
fn the_outcome_does_not_depend_on_the_number_of_threads() {
    for seed in 0..30 {
        let plan = JobPlan::from_seed(seed, &size(9, 150));
        let alone = run(&plan).expect("a good run");
        for workers in [2, 5] {
            let workers = NonZeroUsize::new(workers).expect("the number should not be zero");
            assert_eq!(simulate(&plan, workers, &mut |_| ()).expect("a good run"), alone, "seed {seed}");
        }
        assert_eq!(JobPlan::from_seed(seed, &size(9, 150)), plan);
    }
}

/// Returns a plan in which one rank deviates, using an op on an allocation in a symmetric pool that the program frees.
fn deviation(plan: &JobPlan, deviate: impl Fn(&Op) -> Option<Deviation>) -> Option<JobPlan> {
    let symmetric = |pool: PoolId| {
        let created = plan.steps().iter().find_map(|step| match &step.op {
            Op::CreatePool { pool: id, config } if *id == pool => Some(config.symmetric()),
            _ => None,
        });
        created == Some(true)
    };
    let in_symmetric = |op: &Op| match *op {
        Op::Allocate { pool, size_bytes, .. } => symmetric(pool) && (1..=1 << 20).contains(&size_bytes),
        _ => false,
    };
    let allocate = plan.steps().iter().map(|step| &step.op).filter(|op| in_symmetric(op));
    let deviation = allocate.filter_map(deviate).next()?;
    let quiet = plan.ranks().iter().rev().find(|rank| !rank.is_faulty() && rank.restart_at.is_none())?;
    Some(plan.clone().with_deviation(quiet.rank, deviation))
}

/// Returns the first failure that a deviation of some seed causes.
fn failing(deviate: impl Fn(&JobPlan, &Op) -> Option<Deviation>) -> (JobPlan, Failure) {
    let plans = (0..100).map(|seed| JobPlan::from_seed(seed, &size(16, 200)));
    let mut deviating = plans.filter_map(|plan| deviation(&plan, |op| deviate(&plan, op)));
    deviating.find_map(|plan| run(&plan).err().map(|failure| (plan, failure))).expect("a deviation is detected")
}

fn check_deviation(plan: &JobPlan, failure: &Failure) {
    let deviating = plan.ranks().iter().find(|rank| rank.deviation.is_some()).expect("one rank deviates").rank;
    assert_eq!(failure.rank, Some(deviating));
    let report = failure.report.as_ref().expect("the ranks report the deviation");
    assert!(report.contains("likely cause"), "{report}");
    let shrunk = shrink(plan.clone(), failure.clone(), 2000);
    assert!(shrunk.plan.steps().len() <= 6, "{}", shrunk.failure);
    assert_eq!(shrunk.plan.ranks().len(), 2);
    assert_eq!(shrunk.failure.rank, Some(deviating));
    let text = story::write(&shrunk.plan, &shrunk.failure, "A test.").expect("a valid plan is a valid trace");
    let again = story::read(&text).expect("what was written").expect("it is a story");
    assert_eq!(again, shrunk.plan);
    let failure = run(&again).expect_err("it fails again");
    assert_eq!((failure.step, failure.to_string()), (shrunk.failure.step, shrunk.failure.to_string()));
    assert!(text.contains(&format!("# {}", failure.to_string().lines().next().unwrap_or_default())), "{text}");
}

#[test]
fn a_rank_that_forgets_a_free_is_named_with_that_free() {
    let freed = |plan: &JobPlan, op: &Op| match *op {
        Op::Allocate { id, .. } => {
            plan.steps().iter().any(|step| step.op == Op::Free { id }).then_some(Deviation::KeepAllocation { id })
        }
        _ => None,
    };
    let (plan, failure) = failing(freed);
    assert!(failure.op.as_ref().is_some_and(|op| op.starts_with("f ")), "{failure}");
    assert!(matches!(failure.cause, FailureCause::DifferentDigest { .. }), "{failure}");
    check_deviation(&plan, &failure);
}

#[test]
fn a_rank_that_requests_one_byte_more_is_named_with_that_request() {
    let (plan, failure) = failing(|_, op| match *op {
        Op::Allocate { id, size_bytes, .. } => Some(Deviation::DifferentSize { id, size_bytes: size_bytes + 1 }),
        _ => None,
    });
    assert!(failure.op.as_ref().is_some_and(|op| op.starts_with("a ")), "{failure}");
    check_deviation(&plan, &failure);
}
