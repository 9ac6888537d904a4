//! Tests of `symmalloc export`.

use crate::{Folder, recorded, symmalloc};
use std::fs;

#[test]
fn an_export_reads_back_as_the_same_program() {
    let folder = Folder::new();
    let job = recorded("fsdp1_train_rank0.trace.zst");
    let snapshot = folder.path("ours.pickle.gz");
    let output = symmalloc("export {} {} --segments fixed --json", &[&job, &snapshot]).json(0);
    assert_eq!((output["allocations"].as_u64(), output["refused"].as_u64()), (Some(24_464), Some(0)), "{output}");
    assert_eq!(fs::read(&snapshot).unwrap()[..2], [0x1f, 0x8b]);
    let compared = symmalloc("diff {} {} --json", &[&job, &snapshot]).json(3);
    assert_eq!(compared["same_ops"], true, "{compared}");
}

#[test]
fn an_export_is_reproducible_and_has_the_placements_of_a_replay() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &["stream s0", "a 0 3000000 s0", "a 1 512 s0 \"weights\"", "f 0"]);
    let [a, b, replayed] = ["a.pickle", "b.pickle", "replayed.trace"].map(|name| folder.path(name));
    let words = symmalloc("export {} {}", &[&job, &a]).exited(0).stdout.clone();
    assert!(words.contains("2 allocations") && words.contains("memory_viz"), "{words}");
    symmalloc("export {} {}", &[&job, &b]).exited(0);
    assert!(fs::read(&a).unwrap() == fs::read(&b).unwrap());
    symmalloc("replay {} --json --record {}", &[&job, &replayed]).json(0);
    let compared = symmalloc("diff {} {} --json", &[&a, &replayed]).json(0);
    assert_eq!(compared["differing_placements"], 0, "{compared}");
}

#[test]
fn settings_replace_those_of_the_trace() {
    let folder = Folder::new();
    let lines = ["config limit_mb:2", "pool p0 segments:fixed,limit_mb:2", "stream s0", "a 0 9000000 s0"];
    let job = folder.trace("job.trace", &lines);
    let out = folder.path("out.pickle");
    let refused = |args: &str| symmalloc(args, &[&job, &out]).json(0)["refused"].clone();
    assert_eq!(refused("export {} {} --json"), 1);
    assert_eq!(refused("export {} {} --json --config segments:expandable"), 0);
    let reserved = |args: &str, code| symmalloc(args, &[&job]).json(code)[0]["peak_reserved_bytes"].clone();
    assert_eq!(reserved("replay {} --json", 3), 0);
    assert_eq!(reserved("replay {} --json --config segments:fixed", 0), 20 << 20);
}

#[test]
fn a_pytorch_job_keeps_pending_frees_without_free_at_once() {
    let folder = Folder::new();
    let lines = ["stream s0", "stream s1", "a 0 2097152 s0", "u 0 s1", "f 0 pending 1", "a 1 2097152 s0", "a 2 100 s0"];
    let job = folder.trace("job.trace", &lines);
    let [out, again] = ["out.pickle", "again.trace"].map(|name| folder.path(name));
    let words = symmalloc("export {} {}", &[&job, &out]).exited(0).stdout.clone();
    assert!(words.contains("complete later, as recorded (--free-at-once completes them at once): 1"), "{words}");
    symmalloc("import {} {}", &[&out, &again]).exited(0);
    assert!(fs::read_to_string(&again).unwrap().contains("f 0 pending 1\na 1 2097152 s0 -> 0@2097152\n"));
    let output = symmalloc("export {} {} --free-at-once --json", &[&job, &out]).json(0);
    assert_eq!(output["pending_frees"], 0);
    symmalloc("import {} {}", &[&out, &again]).exited(0);
    assert!(fs::read_to_string(&again).unwrap().contains("f 0\na 1 2097152 s0 -> 0@0\n"));
}

#[test]
fn decisions_of_symmalloc_have_no_pending_frees() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &["stream s0", "a 0 512 s0", "f 0 pending"]);
    let replayed = folder.path("replayed.trace");
    symmalloc("replay {} --json --record {}", &[&job, &replayed]).json(0);
    assert!(fs::read_to_string(&replayed).unwrap().ends_with("a 0 512 s0 -> 0@0\nf 0\nend 3\n"));
}

#[test]
fn a_timeline_shows_each_allocation_while_it_is_live() {
    let folder = Folder::new();
    let job = recorded("fsdp1_train_rank0.trace.zst");
    let [a, b] = ["a.json", "b.json"].map(|name| folder.path(name));
    let output = symmalloc("export {} {} --json", &[&job, &a]).json(0);
    assert_eq!((output["slices"].as_u64(), output["left_out"].as_u64()), (Some(24_464), Some(0)), "{output}");
    symmalloc("export {} {} --json", &[&job, &b]).json(0);
    let bytes = fs::read(&a).unwrap();
    assert!(bytes == fs::read(&b).unwrap(), "the same job gives different bytes");

    let trace: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count() as u64;
    assert_eq!((count("b"), count("e")), (24_464, 24_464));
    assert_eq!((count("C"), count("i")), (output["points"].as_u64().unwrap(), output["instants"].as_u64().unwrap()));
    // The chart of the same job has the same peaks.
    let chart = symmalloc("chart {} -o {} --json", &[&job, &folder.path("chart.svg")]).json(0);
    let heaps = chart["heaps"].as_array().unwrap();
    for (heap, process) in heaps.iter().zip(2..) {
        for counter in ["live", "allocated", "reserved"] {
            let points = events.iter().filter(|event| event["pid"] == process && event["name"] == counter);
            let peak = points.filter(|event| event["ph"] == "C").map(|event| event["args"]["bytes"].as_u64()).max();
            assert_eq!(peak.unwrap(), heap[counter]["peak_bytes"].as_u64(), "{counter} of {heap}");
        }
    }
}

#[test]
fn a_timeline_with_less_detail_is_smaller() {
    let folder = Folder::new();
    let job = recorded("fsdp1_train_rank0.trace.zst");
    let [all, few] = ["all.trace", "few.trace"].map(|name| folder.path(name));
    symmalloc("export {} {} --format perfetto --detail all", &[&job, &all]).exited(0);
    let words = symmalloc("export {} {} --format perfetto --detail 1000", &[&job, &few]).exited(0).stdout.clone();
    assert!(words.contains("1,000 allocations of") && words.contains("23,464 smaller allocations"), "{words}");
    assert!(fs::metadata(&few).unwrap().len() * 10 < fs::metadata(&all).unwrap().len());
}
