//! Instructions and nanoseconds per op of each recorded job, compared with a reference allocator and checked against limits.
//!
//! Times are medians over repeats that alternate between the allocators, so that noise affects both. Callgrind counts
//! instructions between entry and exit of `measured_part`, in a copy of this program that runs under valgrind. The
//! counts contain the driver that iterates over the job's steps. The driver is also counted alone, on a subject that
//! allocates nothing, and the limit applies to the difference. Without valgrind these columns stay empty.
//!
//! A second table shows the instructions on other kinds of heap: with fixed segments, with shared streams, in a
//! symmetric pool, recorded into a trace file (without the thread that writes it), and with every pass as a step that
//! follows a plan, with separate and with shared streams.
//!
//! Exits with 1 if a limit is exceeded. With `--test`, for busy machines, only the limits on instructions are checked,
//! and only on [`TEST_JOBS`], because each count takes seconds under valgrind. A build with debug assertions, such as
//! that of tests, counts no instructions, because the limits do not apply to it. `cargo bench -p symmalloc-benches
//! --bench ratios`

use std::process::{Command, ExitCode};
use std::time::Instant;
use std::{env, fs};
use symmalloc_benches::micro::{ManyFree, PAIRS, Sizes};
use symmalloc_benches::workload::{Bench, Nothing, Workload};
use symmalloc_benches::{Ours, Segments, ours, ours_learning, ours_recorded, ours_symmetric, reference};
use symmalloc_core::PoolId;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::plans::StepReport;
use symmalloc_harness::jobs;

/// Minimum speedup over the reference.
const RATIO_MIN: f64 = 4.0;
/// Maximum instructions per op of any job, without the driver. In the bench profile.
const INSTRUCTIONS_MAX: f64 = 340.0;
/// Maximum ratio of the cost per op with 100,000 free blocks to that with 100.
const GROWTH_MAX: f64 = 2.0;

const REPEATS: usize = 15;
const FREE_BLOCKS: [usize; 3] = [100, 10_000, 100_000];

/// The jobs that `--test` runs: one with a single stream, and one with several.
const TEST_JOBS: [&str; 2] = ["resnet50_multiscale", "fsdp1_train_rank0"];

/// Prefix of a job's name that selects the driver alone.
const DRIVER: &str = "driver of ";

/// Environment variable that is set under callgrind and names the case.
const CASE: &str = "SYMMALLOC_RATIOS_CASE";

/// Environment variable that selects one of the [`SORTS`] of heap; plain heaps if it is not set.
const HEAPS: &str = "SYMMALLOC_RATIOS_HEAPS";

/// The name of a kind of heap, and a function that creates an allocator with such heaps.
type Sort = (&'static str, fn() -> Ours);

const PLAIN: &str = "plain";
/// Plain heaps have the shortest path. Each of the others has a property that lengthens it.
const SORTS: [Sort; 7] = [
    (PLAIN, || ours(Segments::Expandable, StreamPolicy::Separate)),
    ("fixed", || ours(Segments::Fixed, StreamPolicy::Separate)),
    ("shared", || ours(Segments::Expandable, StreamPolicy::Shared)),
    ("symmetric", ours_symmetric),
    ("recorded", ours_recorded),
    (PLANNED, || ours_learning(StreamPolicy::Separate)),
    (PLANNED_SHARED, || ours_learning(StreamPolicy::Shared)),
];
const PLANNED: &str = "planned";
const PLANNED_SHARED: &str = "planned shared";

fn main() -> ExitCode {
    if let Ok(case) = env::var(CASE) {
        count_this(&case);
        return ExitCode::SUCCESS;
    }
    // `cargo bench -- gpt2` keeps the jobs that contain the word. Flags are cargo's own.
    let filter = env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let is_test = env::args().any(|arg| arg == "--test");
    let is_wanted = |job: &&str| job.contains(&filter) && (!is_test || TEST_JOBS.contains(job));
    let jobs: Vec<&str> = jobs::JOBS.into_iter().filter(is_wanted).collect();
    let mut misses = Vec::new();
    jobs_table(&jobs, !is_test, &mut misses);
    heaps_table(if is_test { &jobs[..jobs.len().min(1)] } else { &jobs });
    if filter.is_empty() {
        free_blocks_table(if is_test { &[100, 100_000] } else { &FREE_BLOCKS }, !is_test, &mut misses);
    }
    misses.iter().for_each(|miss| println!("missed: {miss}"));
    if misses.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn jobs_table(jobs: &[&str], judges_time: bool, misses: &mut Vec<String>) {
    println!(
        "{:<22}{:>10}{:>14}{:>10}{:>10}{:>12}{:>14}{:>8}",
        "recorded job", "ops", "instructions", "driver", "ours", "ours ns", "reference ns", "ratio"
    );
    for &job in jobs {
        let workload = Workload::from(&jobs::program(job));
        let ops = workload.len() as f64;
        let mut ours = Bench::warm(ours(Segments::Expandable, StreamPolicy::Separate), workload.clone());
        let mut reference = Bench::warm(reference(Segments::Expandable), workload);
        let (mut our_times, mut reference_times) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            our_times.push(nanoseconds(|| ours.repeat()) / ops);
            reference_times.push(nanoseconds(|| reference.repeat()) / ops);
        }
        let (our_time, reference_time) = (median(our_times), median(reference_times));
        let per_op = |case: &str| count_under_callgrind(case, PLAIN).map(|count| count / ops);
        let (in_all, driver) = (per_op(job), per_op(&format!("{DRIVER}{job}")));
        let instructions = in_all.zip(driver).map(|(in_all, driver)| in_all - driver);
        let ratio = reference_time / our_time;
        let [in_all, driver, shown] =
            [in_all, driver, instructions].map(|count| count.map_or("-".into(), |count| format!("{count:.1}")));
        println!(
            "{job:<22}{ops:>10}{in_all:>14}{driver:>10}{shown:>10}{our_time:>12.1}{reference_time:>14.1}{ratio:>8.2}"
        );
        if judges_time && ratio < RATIO_MIN {
            misses.push(format!("{job} is {ratio:.2} times as fast as the reference, below {RATIO_MIN}"));
        }
        if let Some(count) = instructions.filter(|count| *count > INSTRUCTIONS_MAX) {
            misses.push(format!("{job} takes {count:.1} instructions per op, more than {INSTRUCTIONS_MAX}"));
        }
    }
    if cfg!(debug_assertions) {
        println!("no instructions: the limit applies to builds without debug assertions");
    } else {
        println!("at most {INSTRUCTIONS_MAX} instructions per op in the column \"ours\"");
    }
}

/// Prints the allocator's instructions per op on other kinds of heap. There is no limit; the table is for observation.
fn heaps_table(jobs: &[&str]) {
    let sorts = || SORTS.into_iter().map(|(name, _)| name).filter(|name| *name != PLAIN);
    let columns = |cells: Vec<String>| cells.iter().map(|cell| format!("{cell:>14}")).collect::<String>();
    println!("\n{:<22}{}", "instructions on heaps", columns(sorts().map(String::from).collect()));
    for &job in jobs {
        let ops = Workload::from(&jobs::program(job)).len() as f64;
        let driver = count_under_callgrind(&format!("{DRIVER}{job}"), PLAIN);
        let per_op = |heaps| Some((count_under_callgrind(job, heaps)? - driver?) / ops);
        let cells = sorts().map(|heaps| per_op(heaps).map_or("-".into(), |count| format!("{count:.1}")));
        println!("{job:<22}{}", columns(cells.collect()));
    }
}

fn free_blocks_table(free_blocks: &[usize], judges_time: bool, misses: &mut Vec<String>) {
    println!("\n{:<22}{:>10}{:>14}{:>12}", "free blocks", "count", "instructions", "ours ns");
    let ops = f64::from(2 * PAIRS);
    for (name, sizes) in [("of one size", Sizes::One), ("sizes spread", Sizes::Spread)] {
        let (mut counts, mut is_counted) = (Vec::new(), true);
        for &count in free_blocks {
            let once = || {
                let mut case = ManyFree::new(ours(Segments::Expandable, StreamPolicy::Separate), count, sizes);
                nanoseconds(|| case.replace()) / ops
            };
            let time = median((0..5).map(|_| once()).collect());
            let instructions = count_under_callgrind(&format!("{name}/{count}"), PLAIN).map(|count| count / ops);
            let shown = instructions.map_or("-".into(), |count| format!("{count:.1}"));
            println!("{name:<22}{count:>10}{shown:>14}{time:>12.1}");
            // Time also grows with cache misses, but the limit applies to instructions.
            is_counted &= instructions.is_some();
            counts.push(instructions.unwrap_or(time));
        }
        let growth = counts[counts.len() - 1] / counts[0];
        if growth > GROWTH_MAX && (is_counted || judges_time) {
            misses.push(format!(
                "{name}: 100,000 free blocks cost {growth:.2} times as much as 100, more than {GROWTH_MAX}"
            ));
        }
    }
}

fn nanoseconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs the measured work. Callgrind counts the instructions between entry and exit of this function.
#[inline(never)]
fn measured_part(work: &mut dyn FnMut()) {
    work();
}

/// Runs the measured part of a case once, in steady state.
fn count_this(case: &str) {
    let heaps = env::var(HEAPS).unwrap_or_else(|_| PLAIN.into());
    let (_, ours) = SORTS.into_iter().find(|(name, _)| *name == heaps).expect("a kind of heap");
    let ours = ours();
    if let Some(job) = case.strip_prefix(DRIVER) {
        let mut bench = Bench::warm(Nothing::default(), Workload::from(&jobs::program(job)));
        measured_part(&mut || bench.repeat());
    } else if let Some((name, count)) = case.split_once('/') {
        let sizes = if name == "of one size" { Sizes::One } else { Sizes::Spread };
        let mut case = ManyFree::new(ours, count.parse().expect("it should be a number"), sizes);
        measured_part(&mut || case.replace());
    } else {
        let mut bench = Bench::warm(ours, Workload::from(&jobs::program(case)));
        if [PLANNED, PLANNED_SHARED].contains(&heaps.as_str()) {
            for _ in 0..3 {
                step(&mut bench);
            }
            measured_part(&mut || assert_eq!(step(&mut bench).difference, None, "the plan is followed"));
        } else {
            measured_part(&mut || bench.repeat());
        }
    }
}

/// Runs one repeat as a step of the pool.
fn step(bench: &mut Bench<Ours>) -> StepReport {
    bench.subject().begin_step(PoolId::DEFAULT, 0).expect("no step is open");
    bench.repeat();
    bench.subject().end_step(PoolId::DEFAULT).expect("a heap with an open step should have plans")
}

/// Returns the instructions of the measured part of a case on a kind of heap, or `None` without valgrind or with debug
/// assertions.
fn count_under_callgrind(case: &str, heaps: &str) -> Option<f64> {
    if cfg!(debug_assertions) {
        return None;
    }
    let name = case.replace([' ', '/'], "_");
    let out = env::temp_dir().join(format!("symmalloc-ratios-{}-{name}-{heaps}", std::process::id()));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*measured_part*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(env::current_exe().ok()?)
        .env(CASE, case)
        .env(HEAPS, heaps)
        .output()
        .ok()?;
    let profile = fs::read_to_string(&out).ok()?;
    if env::var_os("SYMMALLOC_KEEP_PROFILE").is_none() {
        fs::remove_file(&out).ok()?;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    profile.lines().find_map(|line| line.strip_prefix("summary: ")?.trim().parse().ok())
}
