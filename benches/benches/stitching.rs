//! The savings and the cost of stitching, on jobs whose steps never repeat (`varying`) and on the recorded jobs.
//!
//! Prints counts on a simulated device, which are the same on every machine and in every run. A job runs six times on
//! one allocator. The generated jobs run with different steps in each pass, and again with the same steps. Peaks are
//! relative to the peak of live requested bytes. Times are computed: mapping a granule a second time takes 45 us,
//! regardless of its size (`docs/measured/memory.md`).
//!
//! `cargo bench -p symmalloc-benches --bench stitching`; an argument selects the jobs whose name contains it, and `--with=`
//! replaces the configurations. `--test` runs short jobs, and fails if stitching increases the reserved memory.

use std::env;
use symmalloc_benches::metered::Metered;
use symmalloc_benches::varying;
use symmalloc_benches::workload::{Step, Workload};
use symmalloc_core::{Allocator, Config, PoolId};
use symmalloc_harness::jobs;

const MIB: u64 = 1 << 20;
const PASSES: usize = 6;
const MAP_US: f64 = 45.0;

const CONFIGS: [&str; 7] = [
    "streams:separate",
    "streams:separate,stitching:true",
    "streams:shared",
    "streams:shared,stitching_granule_mb:2",
    "streams:shared,stitching_granule_mb:4",
    "streams:shared,stitching_granule_mb:8",
    "streams:shared,stitching:true",
];

fn main() {
    let is_test = env::args().any(|arg| arg == "--test");
    let filter = env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let with: Vec<String> = env::args().filter_map(|arg| Some(arg.strip_prefix("--with=")?.to_owned())).collect();
    let configs = if with.is_empty() { CONFIGS.map(str::to_owned).to_vec() } else { with };
    for name in varying::JOBS.into_iter().filter(|name| name.contains(&filter)) {
        let steps = if is_test { 4 } else { 50 };
        let fresh: Vec<Workload> = (0..PASSES as u64).map(|pass| varying::job(name, pass, steps)).collect();
        let same = vec![fresh[0].clone(); PASSES];
        let ratios = table(&format!("{name}, different steps in every pass"), &fresh, &configs);
        table(&format!("{name}, the same steps in every pass"), &same, &configs);
        assert!(!is_test || ratios[3] >= ratios[2], "{name}: stitching increases the reserved memory");
    }
    for name in jobs::JOBS.into_iter().chain(["gnn_sampled"]).filter(|name| !is_test && name.contains(&filter)) {
        table(name, &vec![Workload::from(&jobs::program(name)); PASSES], &configs);
    }
}

/// Prints a row for each configuration. Returns live relative to reserved memory after all passes.
fn table(name: &str, passes: &[Workload], configs: &[String]) -> Vec<f64> {
    let live_bytes = passes.iter().map(Workload::live_bytes_peak).max().unwrap_or(0);
    println!("\n## {name}\n\n{} MiB live at most, {} ops in the first pass\n", live_bytes / MIB, passes[0].len());
    println!(
        "| configuration | live / reserved, first pass | all | granules mapped again, by pass | us per op, first | last |"
    );
    println!("|---|---|---|---|---|---|");
    let mut ratios = Vec::new();
    for text in configs {
        let run = carry_out(text, passes);
        let first = passes[0].live_bytes_peak() as f64 / run.peaks[0] as f64;
        let all = live_bytes as f64 / run.peaks[PASSES - 1] as f64;
        let us_per_op = |pass: usize| run.aliases[pass] as f64 * MAP_US / passes[pass].len() as f64;
        let (begin, end) = (us_per_op(0), us_per_op(PASSES - 1));
        println!("| {text} | {first:.3} | {all:.3} | {:?} | {begin:.1} | {end:.1} |", run.aliases);
        ratios.push(all);
    }
    ratios
}

/// For each pass, the peak of reserved bytes so far and the number of granules that were mapped a second time.
struct Run {
    peaks: Vec<u64>,
    aliases: Vec<u64>,
}

fn carry_out(text: &str, passes: &[Workload]) -> Run {
    let config: Config = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
    let allocator: Allocator<Metered> =
        Allocator::new(Metered::new(20 * MIB), config).expect("the granularity should be valid");
    let streams = passes.iter().map(Workload::streams).max().unwrap_or(0);
    for _ in 0..streams {
        allocator.register_stream().expect("a stream id is available");
    }
    let mut run = Run { peaks: Vec::new(), aliases: Vec::new() };
    for pass in passes {
        let before = allocator.backend().asked();
        let mut handles = vec![None; pass.allocations()];
        for step in pass.steps() {
            match *step {
                Step::Allocate { number, stream, size_bytes } => {
                    let made = allocator
                        .allocate(PoolId::DEFAULT, stream, size_bytes)
                        .expect("the simulated device has unlimited memory");
                    handles[number as usize] = Some(made.handle);
                }
                Step::Free { number, .. } => {
                    allocator
                        .free(handles[number as usize].expect("the allocation should succeed"))
                        .expect("the allocation should be live");
                }
                Step::RecordUse { number, stream } => {
                    allocator
                        .record_use(handles[number as usize].expect("the allocation should succeed"), stream)
                        .expect("the allocation should be live");
                }
            }
        }
        allocator.check().expect("the invariants should hold");
        run.peaks.push(allocator.stats().reserved_bytes.peak);
        run.aliases.push(allocator.backend().asked().since(before).aliases);
    }
    run
}
