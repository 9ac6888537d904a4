//! Tests of timelines: a JSON reader parses the output, which is checked against the rules of Chrome's format.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use symmalloc_trace::replay::Program;

use super::*;
use crate::{ReadOptions, read_bytes};

fn written(lines: &[&str], config: &str, options: &TimelineOptions) -> (Value, TimelineSummary) {
    let text = format!("symmalloc-trace 1\n{}\nend {}\n", lines.join("\n"), lines.len());
    let recording = read_bytes(text.as_bytes(), &ReadOptions::default()).unwrap();
    let program = Program::new(&recording.records).unwrap();
    let mut bytes = Vec::new();
    let summary = timeline(&program, &config.parse().unwrap(), options, &mut bytes).unwrap();
    let value: Value = serde_json::from_slice(&bytes).unwrap();
    check(&value);
    (value, summary)
}

/// Checks the rules of the format that viewers rely on.
fn check(trace: &Value) {
    let (mut newest, mut open, mut named) = (0, BTreeMap::new(), Vec::new());
    for event in trace["traceEvents"].as_array().unwrap() {
        let (phase, process) = (event["ph"].as_str().unwrap(), event["pid"].as_u64().unwrap());
        if phase == "M" {
            named.push(process);
            continue;
        }
        assert!(named.contains(&process), "a process has its name first: {event}");
        let at = event["ts"].as_u64().unwrap();
        assert!(at >= newest, "sorted by time: {event}");
        newest = at;
        let slice = (event["cat"].clone().to_string(), event["id2"]["local"].clone().to_string());
        match phase {
            "C" => assert!(event["args"]["bytes"].is_u64(), "{event}"),
            "i" => assert_eq!(event["s"], "p", "{event}"),
            "b" => assert!(open.insert(slice, (process, event["name"].clone())).is_none(), "twice begun: {event}"),
            "e" => assert_eq!(open.remove(&slice), Some((process, event["name"].clone())), "{event}"),
            other => panic!("unexpected phase: {other}"),
        }
    }
    assert!(open.is_empty(), "never ended: {open:?}");
}

/// Returns the events with this phase: (time, process, name, argument).
fn of_phase(trace: &Value, phase: &str, argument: &str) -> Vec<(u64, u64, String, Value)> {
    let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == phase);
    let printed = |event: &Value| {
        let name = event["name"].as_str().unwrap().to_owned();
        (event["ts"].as_u64().unwrap_or(0), event["pid"].as_u64().unwrap(), name, event["args"][argument].clone())
    };
    events.map(printed).collect()
}

const MIB: u64 = 1 << 20;

#[test]
fn a_heap_is_a_process_with_counters_and_slices() {
    let lines = [
        "stream s0",
        "stream s1",
        "pool p1 segments:expandable,streams:shared",
        "a 0 1048576 s0 \"weights\"",
        "a 1 3000000 s1 p1",
        "f 0",
        "trim p0",
    ];
    let (trace, summary) = written(&lines, "segments:expandable", &TimelineOptions::default());
    let names: Vec<Value> =
        of_phase(&trace, "M", "name").into_iter().map(|(.., name)| name).filter(|name| !name.is_null()).collect();
    assert_eq!(names, ["job", "pool 0, stream 0", "pool 1, all streams"]);
    let event = |name: &str, at, process, value: u64| (at, process, name.to_owned(), json!(value));
    assert_eq!(
        of_phase(&trace, "C", "bytes"),
        [
            event("live", 3, 2, MIB),
            event("allocated", 3, 2, MIB),
            event("reserved", 3, 2, 2 * MIB),
            event("live", 4, 3, 3_000_000),
            event("allocated", 4, 3, 3_000_320),
            event("reserved", 4, 3, 4 * MIB),
            event("live", 5, 2, 0),
            event("allocated", 5, 2, 0),
            event("reserved", 6, 2, 0),
        ]
    );
    let begun = of_phase(&trace, "b", "requested_bytes");
    assert_eq!(begun, [event("weights", 3, 2, MIB), event("unnamed", 4, 3, 3_000_000)]);
    let ended: Vec<_> = of_phase(&trace, "e", "").into_iter().map(|(at, process, ..)| (at, process)).collect();
    assert_eq!(ended, [(5, 2), (7, 3)], "live allocations end at the end of the job");
    let instants: Vec<_> = of_phase(&trace, "i", "bytes").into_iter().map(|(at, _, name, _)| (at, name)).collect();
    let expected = [(3, "map"), (4, "map"), (6, "unmap"), (6, "trim")].map(|(at, name)| (at, name.to_owned()));
    assert_eq!(instants, expected);
    assert_eq!((summary.heaps, summary.slices, summary.points, summary.instants), (2, 2, 9, 4));
}

#[test]
fn a_refused_request_is_an_instant() {
    let lines = ["stream s0", "a 0 3000000 s0", "a 1 9000000 s0", "f 1"];
    let (trace, summary) = written(&lines, "segments:expandable,limit_mb:8", &TimelineOptions::default());
    let refused = of_phase(&trace, "i", "requested_bytes");
    assert!(refused.contains(&(2, 1, "out of memory".to_owned(), json!(9_000_000))), "{refused:?}");
    assert_eq!(summary.slices, 1);
}

#[test]
fn only_the_largest_allocations_are_slices_beyond_the_maximum() {
    let lines = ["stream s0", "a 0 1000 s0", "a 1 5000 s0", "a 2 3000 s0", "f 1", "a 3 3000 s0", "a 4 0 s0"];
    let options = |slices_max| TimelineOptions { slices_max, ..TimelineOptions::default() };
    let drawn = |slices_max| {
        let (trace, summary) = written(&lines, "segments:expandable", &options(slices_max));
        let sizes = of_phase(&trace, "b", "requested_bytes").into_iter().map(|(.., bytes)| bytes.as_u64().unwrap());
        (sizes.collect::<Vec<_>>(), summary.left_out)
    };
    assert_eq!(drawn(None), (vec![1000, 5000, 3000, 3000], 0));
    assert_eq!(drawn(Some(4)), (vec![1000, 5000, 3000, 3000], 0));
    assert_eq!(drawn(Some(3)), (vec![5000, 3000, 3000], 1));
    assert_eq!(drawn(Some(2)), (vec![5000, 3000], 2), "the first of two equally large allocations is drawn");
    assert_eq!(drawn(Some(0)), (vec![], 4));
}

#[test]
fn thinned_counters_keep_their_peaks_and_end_where_they_are() {
    let mut lines = vec!["stream s0".to_owned()];
    for id in 0..20 {
        lines.extend([format!("a {id} {} s0", 512 * (1 + id % 7)), format!("f {id}")]);
    }
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let live = |points_max| {
        let options = TimelineOptions { points_max, ..TimelineOptions::default() };
        let (trace, summary) = written(&lines, "segments:expandable", &options);
        let points = of_phase(&trace, "C", "bytes").into_iter().filter(|(_, _, name, _)| name == "live");
        (points.map(|(.., bytes)| bytes.as_u64().unwrap()).collect::<Vec<_>>(), summary.ops_per_point)
    };
    let (all, each) = live(None);
    assert_eq!((all.len(), each), (40, 1));
    let (few, each) = live(Some(3));
    assert_eq!((few, each), (vec![3584, 3072, 0], 14));
}

#[test]
fn names_are_json_strings() {
    let lines = ["stream s0", r#"a 0 512 s0 "a \"b\" \\ ü""#];
    let (trace, _) = written(&lines, "segments:expandable", &TimelineOptions::default());
    assert_eq!(of_phase(&trace, "b", "")[0].2, r#"a "b" \ ü"#);
}
