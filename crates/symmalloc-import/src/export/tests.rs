//! Tests of the export, read back by this crate's reader. `tests/files/export.rs` reads the export with Python.

use symmalloc_core::Allocator;
use symmalloc_core::op::Op;
use symmalloc_sim::SimBackend;

use super::*;
use crate::{ReadOptions, Recording, read_bytes};
use std::collections::BTreeMap;

fn read(bytes: &[u8]) -> Recording {
    read_bytes(bytes, &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// Exports a trace with these lines.
fn exported(lines: &[&str], config: &str) -> (Vec<u8>, ExportSummary) {
    let text = format!("symmalloc-trace 1\n{}\nend {}\n", lines.join("\n"), lines.len());
    let program = Program::new(&read(text.as_bytes()).records).unwrap();
    let mut bytes = Vec::new();
    let summary = export(&program, &config.parse().unwrap(), &mut bytes).unwrap();
    (bytes, summary)
}

#[test]
fn the_program_survives_a_round_trip_with_placements_of_symmalloc() {
    let lines = ["stream s0", "a 0 1000 s0", "stream s1", "a 1 512 s1", "u 0 s1", "f 0", "a 2 1024 s0"];
    let (bytes, summary) = exported(&lines, "segments:fixed");
    let lines: Vec<String> =
        read(&bytes).records.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect();
    assert_eq!(
        lines,
        ["stream s0", "a 0 1000 s0 -> 0@0", "stream s1", "a 1 512 s1 -> 1@0", "u 0 s1", "f 0", "a 2 1024 s0 -> 0@0"]
    );
    assert_eq!((summary.entries, summary.allocations, summary.segments, summary.blocks), (8, 3, 2, 4));
}

#[test]
fn ops_without_an_entry_are_counted() {
    let lines = ["stream s0", "pool p1", "a 0 0 s0", "a 1 512 s0 p1", "synchronize s0", "sync", "f 1", "trim p1"];
    let (bytes, summary) = exported(&lines, "segments:fixed");
    // Streams, pools, synchronize and sync leave no entry; trim releases the segment.
    assert_eq!((summary.ops_without_entry, summary.allocations, summary.segments), (4, 1, 0));
    assert_eq!(read(&bytes).summary.allocations, 1);
}

#[test]
fn a_refused_allocation_is_out_of_memory() {
    let (bytes, summary) = exported(&["stream s0", "a 0 5000000 s0", "f 0"], "limit_mb:2");
    assert_eq!((summary.refused, summary.entries), (1, 1));
    assert_eq!(read(&bytes).summary.failed_allocations, 1);
}

/// Requests that the recording shows as refused stay so: each with its bytes, its pool, its name, and what was free.
#[test]
fn recorded_failures_survive_a_round_trip() {
    let lines = [
        "stream s0",
        "pool p1",
        "a 0 4194304 s0 p1",
        "refuse 30000000 s0 p1 driver \"model.py:40 forward\"",
        "refuse 512 s0 driver",
    ];
    let recording = read(format!("symmalloc-trace 1\n{}\nend {}\n", lines.join("\n"), lines.len()).as_bytes());
    let program = Program::new(&recording.records).unwrap();
    let free = BTreeMap::from([(3, 1000), (4, 7)]);
    let mut bytes = Vec::new();
    let summary = export_with(&program, &Config::default(), &free, &mut bytes).unwrap();
    assert_eq!((summary.refused, summary.ops_without_entry), (2, 2));
    let again = read(&bytes);
    let refused: Vec<String> = again
        .records
        .iter()
        .filter(|record| matches!(record.op, Op::Refuse { .. }))
        .map(|record| symmalloc_trace::RecordLine(record).to_string())
        .collect();
    assert_eq!(refused, ["refuse 30000000 s0 p1 driver \"model.py:40 forward\"", "refuse 512 s0 driver"]);
    assert_eq!(again.device_free_bytes.into_values().collect::<Vec<_>>(), [1000, 7]);
    assert_eq!(again.failure.unwrap().device_free_bytes, Some(7));
}

#[test]
fn equal_jobs_are_exported_as_equal_bytes() {
    let lines = ["stream s0", "a 0 1000 s0 \"weights\"", "a 1 1000 s0 \"weights\"", "a 2 1 s0 \"a;b\\n\""];
    let (bytes, _) = exported(&lines, "segments:expandable");
    assert_eq!(exported(&lines, "segments:expandable").0, bytes);
    // A name is written once verbatim, and once without the characters that end a stack.
    let count = |text: &[u8]| bytes.windows(text.len()).filter(|window| *window == text).count();
    assert_eq!((count(b"weights"), count(b"a b "), count(b"a;b")), (1, 1, 1));
}

#[test]
fn python_frames_round_trip() {
    let count = |name: &str, text: &[u8]| {
        let (bytes, _) = exported(&["stream s0", &format!("a 0 1000 s0 \"{name}\"")], "segments:expandable");
        assert_eq!(read(&bytes).records[1].name.as_deref(), Some(name));
        bytes.windows(text.len()).filter(|window| *window == text).count()
    };
    // Once as the name, and once split into its parts.
    assert_eq!(count("model/block.py:12 make", b"model/block.py:12 make"), 1);
    assert_eq!(count("model/block.py:12 make", b"model/block.py"), 2);
    for name in ["block.py:12", "block.py:1x make", ".py:12 make", "block.py:99999999999999999999 make", "block.py:12 "]
    {
        // The same text twice; the second occurrence refers to the first.
        assert_eq!(count(name, b"block.py"), usize::from(name.contains("block.py")), "{name}");
    }
}

#[test]
fn names_and_pools_survive_a_round_trip() {
    let long = format!("a 5 512 s0 p2 \"{}\"", "\u{e9}".repeat(2048));
    let lines = [
        "stream s0",
        "pool p1 segments:fixed,symmetric:true",
        "pool p2",
        "a 0 1000 s0 p2 \"weights\"",
        // Words of the format, a text that occurs elsewhere in it, and characters that a stack cannot contain.
        "a 1 1000 s0 \"free_completed\"",
        "a 2 1000 s0 p1 \"N/A\"",
        "a 3 1000 s0 p2 \"weights\"",
        "a 4 512 s0 \"a;b\\n\"",
        &long,
        "f 1",
        "f 3",
    ];
    let (bytes, _) = exported(&lines, "segments:expandable");
    let again = read(&bytes).records;
    let names: Vec<Option<&str>> = again
        .iter()
        .filter(|record| matches!(record.op, Op::Allocate { .. }))
        .map(|record| record.name.as_deref())
        .collect();
    assert_eq!(names[..5], [Some("weights"), Some("free_completed"), Some("N/A"), Some("weights"), Some("a;b\n")]);
    assert_eq!(names[5].map(str::len), Some(4096));
    let pools: Vec<u32> = again
        .iter()
        .filter_map(|record| match record.op {
            Op::Allocate { pool, .. } => Some(pool.0),
            _ => None,
        })
        .collect();
    // p2 appears first.
    assert_eq!(pools, [1, 0, 2, 1, 0, 1]);
    assert_eq!(again.iter().filter(|record| matches!(record.op, Op::Free { .. })).count(), 2);
}

#[test]
fn a_pool_that_sleeps_has_no_segments() {
    let lines = ["stream s0", "pool p1", "a 0 4194304 s0", "a 1 8388608 s0 p1", "sleep drop p1"];
    let (bytes, summary) = exported(&lines, "segments:expandable");
    assert_eq!((summary.segments, summary.blocks), (1, 1));
    assert_eq!(read(&bytes).summary.recorded_reserved_bytes_peak, Some(12 << 20));
}

#[test]
fn a_running_allocator_can_be_exported() {
    let allocator = Allocator::<_>::new(SimBackend::builder().build(), Config::default()).unwrap();
    let stream = allocator.register_stream().unwrap();
    let kept = allocator.allocate_named(PoolId::DEFAULT, stream, 1000, "kept").unwrap();
    let mut bytes = Vec::new();
    let summary = export_allocator(&allocator, &mut bytes).unwrap();
    assert_eq!((summary.segments, summary.blocks, summary.entries), (1, 2, 0));
    assert!(bytes.windows(4).any(|window| window == b"kept"));
    let address = kept.address.0.to_le_bytes();
    assert!(bytes.windows(6).any(|window| window == &address[..6]), "the device's own address");
}

#[test]
fn pending_frees_round_trip_and_keep_their_block() {
    let lines = [
        "stream s0",
        "a 0 1000 s0",
        "stream s1",
        "a 1 1000 s1",
        "u 0 s1",
        "f 0 pending 3",
        "u 1 s0",
        "f 1 pending",
        "a 2 1000 s0",
        "a 3 1000 s0",
    ];
    let (bytes, summary) = exported(&lines, "segments:expandable");
    let again: Vec<String> =
        read(&bytes).records.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect();
    assert_eq!(
        again,
        [
            "stream s0",
            "a 0 1000 s0 -> 0@0",
            "stream s1",
            "a 1 1000 s1 -> 1@0",
            "u 0 s1",
            "f 0 pending 3",
            "u 1 s0",
            "f 1 pending",
            "a 2 1000 s0 -> 0@1024",
            "a 3 1000 s0 -> 0@0",
        ]
    );
    assert_eq!((summary.pending_frees, summary.entries), (2, 11));
    assert!(bytes.windows(19).any(|window| window == b"active_pending_free"));
}
