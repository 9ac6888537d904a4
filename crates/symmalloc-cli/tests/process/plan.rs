//! `symmalloc plan`.

use crate::{Folder, recorded, symmalloc};
use serde_json::{Value, json};
use std::fs;

/// Two pools and two streams; one pool is symmetric, and the program trims.
const LINES: [&str; 15] = [
    "config segments:fixed,total_limit_mb:64",
    "stream s0",
    "pool p1 segments:expandable,symmetric:true,limit_mb:12",
    "stream s1",
    "reserve 4194304 s0",
    "a 0 3000000 s0",
    "a 1 3000000 s0 p1",
    "a 2 5000000 s1 p1",
    "f 1",
    "trim",
    "a 3 100 s1",
    "f 0",
    "f 3",
    "f 2",
    "destroy p1",
];

fn sizes(plan: &Value) -> Vec<u64> {
    plan["heaps"].as_array().unwrap().iter().map(|heap| heap["reserve_bytes"].as_u64().unwrap()).collect()
}

const NOTHING: fn() -> Value = || json!({ "memory_calls": 0, "registrations": 0 });

#[test]
fn a_recorded_job_of_two_ranks_obtains_nothing_after_what_is_reserved() {
    let ranks = ["fsdp1_train_rank0.trace.zst", "fsdp1_train_rank1.trace.zst"].map(recorded);
    let plan = symmalloc("plan {} {} --json", &[&ranks[0], &ranks[1]]).json(0);
    assert_eq!(sizes(&plan), [5_125_439_488, 67_108_864, 264_241_152, 492_830_720]);
    assert_eq!((&plan["with"]["first_pass"], &plan["with"]["second_pass"]), (&NOTHING(), &NOTHING()), "{plan}");
    assert_eq!(plan["without"]["first_pass"]["memory_calls"], 243);
    // Known beforehand, the job needs what is live at its peak, and no more than the rounding of that.
    assert_eq!(plan["offline"]["efficiency"].as_f64().map(|it| (it * 1e3).round()), Some(1000.0), "{plan}");
    assert!(plan["offline"]["planned_bytes"].as_u64() < plan["reserve_bytes"].as_u64());
    // A reservation and a mapping for each heap, and a window for each segment.
    assert_eq!(plan["with"]["reserving"], json!({ "memory_calls": 8, "registrations": 4 }));
}

#[test]
fn a_job_whose_first_pass_is_not_its_steady_state_gets_one() {
    let job = recorded("resnet50_multiscale.trace.zst");
    let plan = symmalloc("plan {} --json", &[&job]).json(0);
    assert!(plan["without"]["second_pass"]["memory_calls"].as_u64().unwrap() > 0, "{plan}");
    assert_eq!((&plan["holds"], &plan["with"]["second_pass"]), (&json!(true), &NOTHING()));
}

#[test]
fn symmetric_pools_get_one_segment_per_heap_and_all_of_a_pool_are_equal() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &LINES);
    let plan = symmalloc("plan {} --json", &[&job]).json(0);
    assert_eq!(plan["settings"], "segments:expandable,total_limit_mb:64");
    assert_eq!(sizes(&plan), [4 << 20, 2 << 20, 6 << 20, 6 << 20], "{plan}");
    let segments: Vec<&str> =
        plan["heaps"].as_array().unwrap().iter().map(|heap| heap["segments"].as_str().unwrap()).collect();
    assert_eq!(segments, ["expandable", "expandable", "reserved", "reserved"]);
    let pool = plan["lines"][1].as_str().unwrap();
    assert!(pool.starts_with("pool p1 segments:reserved,segment_mb:6,") && pool.contains("symmetric:true"), "{pool}");
    assert_eq!((&plan["with"]["first_pass"], &plan["with"]["second_pass"]), (&NOTHING(), &NOTHING()));
}

#[test]
fn a_margin_is_reserved_too_and_ranks_that_need_less_reserve_as_much() {
    let folder = Folder::new();
    let small = folder.trace("small.trace", &["stream s0", "a 0 9000000 s0"]);
    let large = folder.trace("large.trace", &["stream s0", "stream s1", "a 0 90000000 s0", "a 1 100 s1"]);
    let plan = symmalloc("plan {} {} --margin 10 --json", &[&small, &large]).json(0);
    assert_eq!(sizes(&plan), [96 << 20, 4 << 20]);
    assert_eq!((&plan["holds"], &plan["reserve_bytes"]), (&json!(true), &json!(100 << 20)));
}

#[test]
fn a_written_plan_replays_and_its_lines_are_those_that_are_printed() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &LINES);
    let planned = folder.path("planned.trace");
    let words = symmalloc("plan {} -o {}", &[&job, &planned]).exited(0).stdout.clone();
    let trace = fs::read_to_string(&planned).unwrap();
    for line in ["reserve 4194304 s0", "reserve 2097152 s1", "reserve 6291456 s0 p1", "reserve 6291456 s1 p1"] {
        assert!(words.contains(&format!("{line}\n")) && trace.contains(&format!("{line}\n")), "{line} in:\n{trace}");
    }
    assert!(words.contains("allocator.reserve(p1, s1, 6_291_456)?;"), "{words}");
    assert!(!trace.contains("trim") && trace.contains("destroy p1"), "{trace}");
    symmalloc("replay {} --json", &[&planned]).json(0);
    // What was planned before is not planned upon.
    let again = symmalloc("plan {} --json", &[&planned]).json(0);
    assert_eq!(sizes(&again), [4 << 20, 2 << 20, 6 << 20, 6 << 20]);
}

#[test]
fn one_segment_and_one_window_for_the_whole_job() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &["stream s0", "stream s1", "a 0 3000000 s0", "a 1 3000000 s1", "f 0", "f 1"]);
    let words = symmalloc("plan {} --reserved --streams shared", &[&job]).exited(0).stdout.clone();
    assert!(words.contains("SYMMALLOC_CONF=segments:reserved,segment_mb:6,streams:shared\n"), "{words}");
}

#[test]
fn a_limit_below_what_the_job_needs_is_refused() {
    let folder = Folder::new();
    let refused = |name: &str, from: &str, to: &str| {
        let lines = LINES.map(|line| line.replace(from, to));
        let job = folder.trace(name, &lines.each_ref().map(String::as_str));
        let said = symmalloc("plan {}", &[&job]);
        assert_eq!((said.code, said.stdout.as_str()), (Some(2), ""), "{}", said.stderr);
        said.stderr
    };
    let pool = refused("pool.trace", ",limit_mb:12", ",limit_mb:8");
    assert!(pool.contains("pool p1 needs 12582912 bytes, but the limit is 8388608 bytes"), "{pool}");
    let total = refused("total.trace", "total_limit_mb:64", "total_limit_mb:16");
    assert!(total.contains("all pools together need 18874368 bytes, but the limit is 16777216 bytes"), "{total}");
    let range = refused("range.trace", "segments:expandable", "segments:expandable,range_mb:4");
    assert!(range.contains("pool p1 needs") && range.contains("raise range_mb"), "{range}");
}

#[test]
fn recordings_of_different_jobs_and_two_outputs_are_refused() {
    let folder = Folder::new();
    let a = folder.trace("a.trace", &LINES);
    let b = folder.trace("b.trace", &LINES.map(|line| if line.starts_with("pool") { "pool p1" } else { line }));
    let said = symmalloc("plan {} {}", &[&a, &b]);
    assert_eq!(said.code, Some(2));
    assert!(said.stderr.contains("configure pool p1 differently"), "{}", said.stderr);
    let said = symmalloc("plan {} {} -o {}", &[&a, &a, &folder.path("out.trace")]);
    assert!(said.code == Some(2) && said.stderr.contains("2 are given"), "{}", said.stderr);
}
