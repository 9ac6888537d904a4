//! Tests of the program on the simulated device and on a stub of libcuda: all interfaces report all figures and equal
//! memory.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A job with three allocations on two streams, 3 MiB at the peak.
const JOB: &str = "a 1048576 0\na 1048576 1\nf 0\na 2097152 0\nf 1\nf 2\n";
const JOB_WITH_USES: &str = "a 1048576 0\nu 0 1\nf 0\n";
const QUICK: [&str; 12] =
    ["--cold", "2", "--steady", "2", "--repeats", "2", "--pairs", "100", "--thread-ms", "1", "--threads", "1,2"];

/// Returns the program with the stub as libcuda. Cargo puts the stub next to the test's executable.
fn program(folder: &TempDir) -> Command {
    let stub =
        std::env::current_exe().expect("the test's executable should be known").with_file_name("libstub_libcuda.so");
    std::fs::copy(stub, folder.path().join("libcuda.so")).expect("the stub");
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmalloc-peers"));
    command.env("LD_LIBRARY_PATH", folder.path());
    command
}

fn folder_with_jobs() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder should be created");
    for (name, text) in [("small", JOB), ("small_uses", JOB_WITH_USES)] {
        std::fs::write(folder.path().join(name).with_extension("job"), text).expect("the file should be accessible");
    }
    folder
}

#[track_caller]
fn figures(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn values(figures: &[Value], case: &str, at: &str) -> Vec<f64> {
    let of = figures.iter().filter(|figure| figure["case"] == case && figure["at"] == at);
    of.flat_map(|figure| figure["values"].as_array().expect("values"))
        .map(|value| value.as_f64().expect("it should be a number"))
        .collect()
}

fn measure(folder: &TempDir, interface: &str, options: &[&str]) -> Vec<Value> {
    let mut command = program(folder);
    command.args(["measure", "--interface", interface, "--jobs"]).arg(folder.path()).args(options).args(QUICK);
    figures(&command.output().expect("the program should run"))
}

#[test]
fn every_interface_reports_every_figure_and_the_same_memory() {
    let folder = folder_with_jobs();
    let simulated = measure(&folder, "simulated", &[]);
    for interface in ["simulated", "buffer", "counted", "handle"] {
        let found = measure(&folder, interface, &[]);
        for (case, at, count) in [
            ("pair_ns", "4096", 2),
            ("pair_ns", "4194304", 2),
            ("replacement_ns", "1000", 2),
            ("cold_ns_per_op", "small", 2),
            ("steady_ns_per_op", "small", 2),
            ("cold_ns_per_op", "small_uses", 2),
            ("steady_ns_per_op", "small_uses", 2),
            ("pairs_per_second", "1", 2),
            ("pairs_per_second", "2", 2),
            ("readings", "all", 1),
        ] {
            let values = values(&found, case, at);
            assert_eq!(values.len(), count, "{interface}: {case} at {at}");
            assert!(values.iter().all(|value| *value > 0.0), "{interface}: {case} at {at}: {values:?}");
        }
        for case in ["reserved_peak_bytes", "segments"] {
            assert_eq!(values(&found, case, "small"), values(&simulated, case, "small"), "{interface}: {case}");
        }
        assert_eq!(values(&found, "segments", "small"), [2.0], "{interface}: a heap for each stream");
        let [readings, disturbed] = ["all", "disturbed"].map(|at| values(&found, "readings", at)[0]);
        assert!(readings >= 14.0 && readings - disturbed <= 14.0, "{interface}: {readings}, {disturbed}");
        if interface != "simulated" {
            assert_eq!(values(&found, "steady_driver_calls", "small"), [0.0], "{interface}: all from the cache");
            assert!(values(&found, "steady_driver_calls", "small_uses")[0] > 0.0, "{interface}: a use is fenced");
        }
    }
    let ahead = measure(&folder, "buffer", &["--prefetch-mib", "64"]);
    for case in ["reserved_peak_bytes", "segments"] {
        assert_eq!(values(&ahead, case, "small"), values(&simulated, case, "small"), "prefetched: {case}");
    }
    assert_eq!(values(&ahead, "cold_ns_per_op", "small").len(), 2);
    let shared = measure(&folder, "buffer", &["--conf", "streams:shared"]);
    assert_eq!(values(&shared, "segments", "small"), [1.0], "one heap for both streams");
}

#[test]
fn the_scale_cases_report_the_cost_of_live_and_free_blocks() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let mut command = program(&folder);
    command.args(["scale", "--interface", "simulated", "--live", "20000", "--free", "1000"]).args(QUICK);
    let found = figures(&command.output().expect("the program should run"));
    for (case, at) in [
        ("growth_ns", "20000"),
        ("live_blocks_ns", "20000"),
        ("free_blocks_ns", "1000"),
        ("free_and_live_blocks_ns", "1000"),
    ] {
        assert!(values(&found, case, at)[0] > 0.0, "{case}");
    }
    let host_bytes = values(&found, "host_bytes_per_block", "20000")[0];
    assert!((8.0..1000.0).contains(&host_bytes), "{host_bytes} host bytes for a block");
}

#[test]
fn threads_that_share_nothing_report_the_scaling_of_the_machine() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let found = figures(&program(&folder).arg("processors").args(QUICK).output().expect("the program should run"));
    for arithmetic in ["independent arithmetic", "chained arithmetic"] {
        for count in ["1", "2"] {
            let of = |figure: &&Value| figure["peer"] == arithmetic && figure["at"] == count;
            let figure = found.iter().find(of).expect("a figure");
            let rates = figure["values"]
                .as_array()
                .expect("values")
                .iter()
                .map(|rate| rate.as_f64().expect("it should be a number"));
            assert!(rates.clone().count() == 2 && rates.clone().all(|rate| rate > 0.0), "{figure}");
        }
    }
}

#[test]
fn recorded_jobs_are_written_with_and_without_uses() {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let mut command = program(&folder);
    command.arg("jobs").arg(folder.path()).args(["--filter", "fsdp1_"]);
    let found = figures(&command.output().expect("the program should run"));
    let names: BTreeSet<_> = found.iter().map(|figure| figure["at"].as_str().expect("a job").to_owned()).collect();
    assert_eq!(Vec::from_iter(names), ["fsdp1_train_rank0", "fsdp1_train_rank0_uses"]);
    let ops = |name| values(&found, "ops", name)[0];
    assert_eq!(
        ops("fsdp1_train_rank0_uses") - ops("fsdp1_train_rank0"),
        2542.0,
        "tests/traces/README.md counts the uses"
    );
    // The same value as in `tests/golden/jobs.txt`.
    assert_eq!(values(&found, "live_peak_bytes", "fsdp1_train_rank0"), [5_001_746_136.0]);
    assert_eq!(values(&found, "streams", "fsdp1_train_rank0"), [4.0]);
}

#[test]
fn invalid_options_and_files_are_reported() {
    let folder = folder_with_jobs();
    let fails = |arguments: &[&str], words: &str| {
        let output = program(&folder).arg("measure").args(arguments).output().expect("the program should run");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(words), "{arguments:?}: {errors}");
    };
    fails(&["--interface", "simulated", "--jobs", "/nowhere"], "/nowhere");
    let jobs = folder.path().to_str().expect("utf-8");
    fails(&["--interface", "library", "--library", "/nowhere.so", "--jobs", jobs], "/nowhere.so");
    fails(&["--interface", "buffer", "--conf", "segments:round", "--jobs", jobs], "segments");
    fails(&["--interface", "simulated", "--prefetch-mib", "64", "--jobs", jobs], "--prefetch-mib is for");
    std::fs::write(Path::new(jobs).join("bad.job"), "a 1 0\nf 7\n").expect("the file should be accessible");
    fails(&["--interface", "simulated", "--jobs", jobs], "bad, line 2");
}
