//! Seed corpus of the fuzz targets, run as plain tests: `fuzz/seeds/<target>/*`.

use std::fs;
use std::path::{Path, PathBuf};
use symmalloc_core::op::Op;
use symmalloc_harness::generate::{OPS_MAX, Scenario, bytes_of_job};
use symmalloc_harness::jobs;
use symmalloc_harness::targets::TARGETS;

/// Configurations with four streams and no limit over all pools. The pool's five bytes select its segments and whether its streams share a
/// heap.
const CONFIGS: [[u8; 8]; 3] = [[0, 3, 0, 0, 0, 0, 0, 0], [0, 3, 0, 0, 2, 0, 1, 0], [2, 3, 0, 1, 0, 0, 0, 1]];

/// Returns a part of a recorded job as a seed: it starts at the first, second or third quarter, each with a different configuration.
fn part_of_job(job: &str, part: usize) -> Vec<u8> {
    let records = jobs::records(job);
    // Frees of earlier allocations are omitted, so more ops are read than fit.
    let ops = records.iter().map(|record| record.op.clone()).skip(records.len() * (part + 1) / 4).take(2 * OPS_MAX);
    let mut bytes = bytes_of_job(CONFIGS[part], &ops.collect::<Vec<Op>>());
    bytes.truncate(4 * OPS_MAX);
    bytes
}

/// Writes the seeds that are parts of recorded jobs: `cargo test -p symmalloc-harness --test seeds -- --ignored`.
#[test]
#[ignore = "writes into fuzz/seeds"]
fn seeds_of_recorded_jobs_are_written() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for (index, job) in jobs::JOBS.into_iter().enumerate() {
        for target in ["ops_vs_oracle", "two_ranks"] {
            let bytes = part_of_job(job, index % CONFIGS.len());
            fs::write(seeds.join(target).join(format!("job-{job}")), bytes).expect("writable");
        }
    }
}

/// The parts are programs of the intended length, with most ops of the jobs.
#[test]
fn a_part_of_a_recorded_job_is_a_program() {
    for job in jobs::JOBS {
        for part in 0..CONFIGS.len() {
            let scenario = Scenario::from_bytes(&part_of_job(job, part));
            let ops = scenario.program.ops();
            assert!(ops.len() > OPS_MAX / 2, "{job}: {} ops", ops.len());
            assert!(ops.iter().any(|op| matches!(op, Op::Free { .. })), "{job}: nothing is freed");
        }
    }
}

/// Runs the seeds, and with `SYMMALLOC_CORPUS=1` also the contents of `fuzz/corpus`.
#[test]
fn every_seed_passes_its_target() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    for (name, target) in TARGETS {
        let mut paths = files_in(&fuzz.join("seeds").join(name));
        assert!(!paths.is_empty(), "no seeds for {name}");
        if std::env::var_os("SYMMALLOC_CORPUS").is_some() {
            paths.extend(files_in(&fuzz.join("corpus").join(name)));
        }
        for path in paths {
            println!("{}", path.display());
            target(&fs::read(&path).expect("it should be readable"));
        }
    }
}

/// Returns the files in a folder, by name; none if the folder does not exist.
fn files_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("it should be readable").path()).collect();
    paths.sort();
    paths
}

/// A seed folder without a target would never run.
#[test]
fn every_seed_folder_has_its_target() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for entry in fs::read_dir(seeds).expect("the folder of seeds") {
        let name = entry.expect("it should be readable").file_name();
        assert!(TARGETS.iter().any(|(target, _)| name == *target), "{name:?} has no target");
    }
}
