//! Tests of the snapshot reader.

mod stacks;

use symmalloc_core::op::{Op, Record};

use super::*;
use crate::held_memory::{HeldMemory, RecordedFailure};
use crate::pickle::PickleError;
use crate::pickle::writer::Pickle;

const APPENDS: u8 = b'e';
const SETITEMS: u8 = b'u';

/// A trace entry: action, address, size, stream.
type Row = (&'static str, i64, i64, i64);

/// Returns a snapshot with these traces, one per device.
fn snapshot(devices: &[&[Row]]) -> Vec<u8> {
    let mut pickle = Pickle::of_protocol(2).dict().mark().text("segments").list().text("device_traces").list().mark();
    for rows in devices {
        pickle = pickle.list().mark();
        for (action, address, size_bytes, stream) in *rows {
            let address_key = if *action == "oom" { "device_free" } else { "addr" };
            pickle = pickle.dict().mark().text("action").text(action).text(address_key).integer(*address);
            pickle = pickle.text("size").integer(*size_bytes).text("stream").integer(*stream).op(SETITEMS);
        }
        pickle = pickle.op(APPENDS);
    }
    pickle.op(APPENDS).op(SETITEMS).stop()
}

fn read_snapshot(devices: &[&[Row]]) -> Transcript {
    read(&snapshot(devices)[..], &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn error_of(pickle: Pickle) -> SnapshotError {
    read(&pickle.stop()[..], &ReadOptions::default()).err().expect("the snapshot is refused")
}

/// Returns the records as lines of a trace.
fn records_of(rows: &[Row]) -> Vec<String> {
    read_snapshot(&[rows]).finish().0.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect()
}

#[test]
fn allocations_have_the_placements_of_pytorch() {
    assert_eq!(
        records_of(&[
            ("segment_alloc", 0x10000, 2 << 20, 0),
            ("alloc", 0x10000, 1000, 0),
            ("segment_alloc", 0x90000000, 20 << 20, 7),
            ("alloc", 0x90000200, 3000, 7),
            ("free_requested", 0x10000, 1000, 0),
            ("free_completed", 0x10000, 1000, 0),
            ("alloc", 0x10000, 10, 0),
            ("alloc", 0x500, 10, 0),
        ]),
        [
            "stream s0",
            "a 0 1000 s0 -> 0@0",
            "stream s1",
            "a 1 3000 s1 -> 1@512",
            "f 0",
            "a 2 10 s0 -> 0@0",
            "a 3 10 s0"
        ]
    );
}

#[test]
fn a_free_that_completes_later_was_used_by_another_stream() {
    assert_eq!(
        records_of(&[
            ("alloc", 0x1000, 512, 5),
            ("alloc", 0x2000, 512, 5),
            ("free_requested", 0x1000, 512, 5),
            ("free_requested", 0x2000, 512, 5),
            ("free_completed", 0x2000, 512, 5),
            ("free_completed", 0x1000, 512, 5),
            ("alloc", 0x3000, 512, 6),
            ("free_requested", 0x3000, 512, 6),
        ]),
        [
            "stream s0",
            "a 0 512 s0",
            "a 1 512 s0",
            "stream s1",
            "u 0 s1",
            "f 0 pending 1",
            "f 1",
            "a 2 512 s1",
            "u 2 s0",
            "f 2 pending"
        ]
    );
}

#[test]
fn completions_keep_their_order_among_themselves_and_among_the_ops() {
    assert_eq!(
        records_of(&[
            ("alloc", 0x1000, 512, 5),
            ("alloc", 0x2000, 512, 6),
            ("alloc", 0x3000, 512, 6),
            ("free_requested", 0x1000, 512, 5),
            ("free_requested", 0x2000, 512, 6),
            ("free_requested", 0x3000, 512, 6),
            ("segment_alloc", 0x10000, 512, 5),
            ("free_completed", 0x3000, 512, 6),
            ("free_completed", 0x2000, 512, 6),
            ("free_completed", 0x1000, 512, 5),
            ("alloc", 0x1000, 512, 5),
        ])[5..],
        // Nothing indicates that the third free completed later, only that another stream used the block.
        ["u 0 s1", "f 0 pending 5", "u 1 s0", "f 1 pending 2", "u 2 s0", "f 2", "a 3 512 s0"]
    );
}

#[test]
fn a_recorded_use_is_not_added_twice() {
    assert_eq!(
        records_of(&[
            ("alloc", 0x1000, 512, 5),
            ("alloc", 0x2000, 512, 6),
            ("alloc", 0x3000, 512, 7),
            ("record_use", 0x1000, 512, 7),
            ("free_requested", 0x1000, 512, 5),
            ("alloc", 0x4000, 512, 5),
            ("free_completed", 0x1000, 512, 5),
        ])[6..],
        ["u 0 s2", "f 0 pending 1", "a 3 512 s0"]
    );
}

#[test]
fn reallocated_memory_was_completed_before() {
    assert_eq!(
        records_of(&[
            ("alloc", 0x1000, 512, 5),
            ("free_requested", 0x1000, 512, 5),
            ("alloc", 0x2000, 512, 5),
            ("alloc", 0x1000, 512, 5),
            ("free_completed", 0x1000, 512, 5),
        ])[2..],
        ["stream s1", "u 0 s1", "f 0 pending 1", "a 1 512 s0", "a 2 512 s0"]
    );
}

#[test]
fn allocations_from_before_the_recording_are_allocated_first() {
    let transcript = read_snapshot(&[&[
        ("free_completed", 0x900, 512, 0),
        ("free_requested", 0x800, 512, 0),
        ("free_completed", 0x800, 512, 0),
        ("free_requested", 0x700, 512, 0),
        ("segment_free", 0x10000, 2 << 20, 0),
        ("segment_unmap", 0x20000, 2 << 20, 0),
        ("alloc", 0x1000, 512, 0),
    ]]);
    let summary = transcript.summary.clone();
    let (records, _) = transcript.finish();
    let lines: Vec<String> = records.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect();
    assert_eq!(
        lines,
        ["stream s0", "a 0 512 s0", "a 1 512 s0", "f 0", "stream s1", "u 1 s1", "f 1 pending", "a 2 512 s0"]
    );
    assert_eq!((summary.lived_before, summary.lived_before_bytes, summary.frees_of_unknown), (2, 1024, 0));
    // Memory that the trace releases was reserved before; nothing states its final amount.
    assert_eq!(summary.recorded_reserved_bytes_peak, Some(4 << 20));
}

#[test]
fn entries_that_are_not_ops_are_counted() {
    let transcript = read_snapshot(&[&[
        ("oom", 0x1000, 512, 0),
        ("snapshot", 0, 0, 0),
        ("user_defined", 0, 0, 0),
        ("workspace_snapshot", -1, -1, -1),
    ]]);
    let (records, summary) = transcript.finish();
    let lines: Vec<String> = records.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect();
    assert_eq!(lines, ["stream s0", "refuse 512 s0 driver"]);
    assert_eq!((summary.failed_allocations, summary.snapshot_marks, summary.unknown_actions), (1, 1, 2));
    let kinds = [("user_defined", 1), ("workspace_snapshot", 1)].map(|(kind, number)| (kind.to_owned(), number));
    assert_eq!(summary.unknown_kinds, kinds.into());
}

#[test]
fn expandable_segments_place_by_their_range() {
    assert_eq!(
        records_of(&[
            ("segment_map", 0x100000, 0x200000, 0),
            ("alloc", 0x100000, 512, 0),
            ("segment_map", 0x300000, 0x200000, 0),
            ("alloc", 0x300200, 512, 0),
            ("segment_map", 0x80000000, 0x200000, 0),
            ("alloc", 0x80000000, 512, 0),
        ]),
        ["stream s0", "a 0 512 s0 -> 0@0", "a 1 512 s0 -> 0@2097664", "a 2 512 s0 -> 1@0"]
    );
}

#[test]
fn the_recorded_device_is_found_and_others_can_be_chosen() {
    let one: &[Row] = &[("alloc", 0x1000, 1, 0)];
    let two: &[Row] = &[("alloc", 0x1000, 2, 0), ("snapshot", 0, 0, 0)];
    let device = |devices: &[&[Row]], options: ReadOptions| {
        read(&snapshot(devices)[..], &options).map(|transcript| transcript.summary.device)
    };
    assert_eq!(device(&[&[], one], ReadOptions::default()).unwrap(), Some(1));
    assert_eq!(device(&[one, two], ReadOptions::default().device(1)).unwrap(), Some(1));
    // Unused devices only have the marks of snapshots.
    let mark: &[Row] = &[("snapshot", 0, 0, 0)];
    assert_eq!(device(&[mark, two, mark], ReadOptions::default()).unwrap(), Some(1));
    assert_eq!(device(&[mark, &[]], ReadOptions::default()).unwrap(), Some(0));
    let several = device(&[one, &[], two], ReadOptions::default()).unwrap_err();
    assert!(matches!(&several, SnapshotError::SeveralDevices { devices } if devices.len() == 3));
    let listed = "(device 0: 1 entry and 0 B live, device 2: 2 entries and 0 B live)";
    assert!(several.to_string().contains(listed), "{several}");
    // Only one device allocates. The others have segments that a library reserved, and entries of other kinds.
    let other: &[Row] = &[("segment_alloc", 0x9000, 512, 0), ("user_defined", 0, 0, 0)];
    assert_eq!(device(&[other, two, other], ReadOptions::default()).unwrap(), Some(1));
    for wanted in [1, 3, usize::MAX] {
        let missing = device(&[one, &[], two], ReadOptions::default().device(wanted)).unwrap_err();
        assert!(matches!(missing, SnapshotError::NoSuchTrace { device, .. } if device == wanted));
    }
    assert!(matches!(
        device(&[&[], &[]], ReadOptions::default()).unwrap_err(),
        SnapshotError::NothingRecorded { devices: 2 }
    ));
    assert!(matches!(device(&[], ReadOptions::default()).unwrap_err(), SnapshotError::NothingRecorded { devices: 0 }));
}

#[test]
fn pickles_of_other_things_are_refused() {
    let start = || Pickle::of_protocol(2).dict().text("device_traces");
    for other in [
        Pickle::of_protocol(2).list(),
        Pickle::of_protocol(2).dict(),
        start().integer(1).op(b's'),
        start().list().dict().op(b'a').op(b's'),
        start().list().integer(1).op(b'a').op(b's'),
        start().list().dict().text("action").text("alloc").op(b's').op(b'a').op(b's'),
    ] {
        assert!(matches!(error_of(other), SnapshotError::NotASnapshot));
    }
    for entry in [start().list().list().integer(5).op(b'a'), start().list().list().list().op(b'a')] {
        assert!(matches!(error_of(entry.op(b'a').op(b's')), SnapshotError::NotAnEntry { device: 0 }));
    }
    assert!(matches!(
        error_of(Pickle::of_protocol(2).op(b'R')),
        SnapshotError::Pickle(PickleError::Executes { opcode: "REDUCE", offset: 2 })
    ));
}

#[test]
fn an_entry_without_a_field_is_named() {
    let entry = |fields: &[(&str, Option<i64>)]| {
        let mut pickle = Pickle::of_protocol(2).dict().text("device_traces").list().list();
        pickle = pickle.dict().text("action").text("snapshot").op(b's').op(b'a').dict().mark();
        for (key, value) in fields {
            pickle = pickle.text(key);
            pickle = match value {
                Some(integer) => pickle.integer(*integer),
                None => pickle.text("alloc"),
            };
        }
        error_of(pickle.op(SETITEMS).op(b'a').op(b'a').op(b's'))
    };
    let (action, addr, size, stream) = (("action", None), ("addr", Some(1)), ("size", Some(1)), ("stream", Some(0)));
    for (fields, missing) in [
        (&[addr, size, stream][..], "action"),
        (&[action, size, stream], "addr"),
        (&[action, addr, stream], "size"),
        (&[action, addr, size], "stream"),
        (&[action, addr, ("size", Some(-1)), stream], "size"),
        (&[action, ("addr", None), size, stream], "addr"),
    ] {
        match entry(fields) {
            SnapshotError::Field { device: 0, entry: 1, field, .. } => assert_eq!(field, missing),
            other => panic!("{missing}: {other}"),
        }
    }
}

#[test]
fn more_streams_than_ids_are_refused() {
    let rows: Vec<Row> = (0..=65_535).map(|stream| ("alloc", 512 * (stream + 1), 512, stream)).collect();
    let error = read(&snapshot(&[&rows])[..], &ReadOptions::default()).err().unwrap();
    assert!(matches!(error, SnapshotError::TooManyStreams { device: 0, entry: 65_535 }), "{error}");
}

#[test]
fn ids_are_dense_and_every_stream_is_registered_before_use() {
    let rows: Vec<Row> = (1..100).map(|n| ("alloc", 512 * n, 512, n % 7)).collect();
    let (records, summary) = read_snapshot(&[&rows]).finish();
    let (mut registered, mut allocated) = (0, 0);
    for record in &records {
        match record.op {
            Op::RegisterStream { stream, .. } => {
                assert_eq!(stream.0, registered);
                registered += 1;
            }
            Op::Allocate { id, stream, .. } => {
                assert_eq!(id.0, allocated);
                assert!(stream.0 < registered);
                allocated += 1;
            }
            ref other => panic!("{other:?}"),
        }
    }
    assert_eq!((summary.streams, summary.allocations), (7, 99));
}

#[test]
fn user_metadata_names_an_allocation() {
    let mut pickle = Pickle::of_protocol(2).dict().text("device_traces").list().list().mark();
    for (address, name) in [(1, "embedding"), (2, ""), (3, "alloc")] {
        pickle = pickle.dict().mark().text("action").text("alloc").text("addr").integer(address);
        pickle = pickle.text("size").integer(512).text("stream").integer(0);
        pickle = pickle.text("compile_context").text("other").text("user_metadata").text(name).op(SETITEMS);
    }
    let bytes = pickle.op(APPENDS).op(b'a').op(b's').stop();
    let (records, _) = read(&bytes[..], &ReadOptions::default()).unwrap().finish();
    let names: Vec<Option<&str>> = records[1..].iter().map(|record| record.name.as_deref()).collect();
    assert_eq!(names, [Some("embedding"), None, Some("alloc")]);
}

#[test]
fn a_pool_that_is_not_a_number_is_refused() {
    let pickle = Pickle::of_protocol(2).dict().text("device_traces").list().list().dict().mark();
    let pickle = pickle.text("action").text("alloc").text("addr").integer(1).text("size").integer(1);
    let pickle = pickle.text("stream").integer(0).text("symmalloc_pool").integer(-1).op(SETITEMS);
    let error = error_of(pickle.op(b'a').op(b'a').op(b's'));
    assert!(matches!(error, SnapshotError::Field { field: "symmalloc_pool", .. }), "{error}");
}

/// A block of a final segment: address, size, state, frames as (file, line, function).
type Block<'a> = (i64, i64, &'static str, &'a [(&'static str, i64, &'static str)]);

fn frames(mut pickle: Pickle, stack: &[(&'static str, i64, &'static str)]) -> Pickle {
    pickle = pickle.text("frames").list().mark();
    for (file, line, function) in stack {
        pickle = pickle.dict().mark().text("name").text(function).text("filename").text(file);
        pickle = pickle.text("line").integer(*line).op(SETITEMS);
    }
    pickle.op(APPENDS)
}

/// Returns a snapshot of one device that frees unknown memory, with one final segment of 20 MiB that holds these blocks.
fn with_segment(blocks: &[Block<'_>], times: usize) -> Vec<u8> {
    let mut pickle = Pickle::of_protocol(4).dict().mark().text("segments").list().mark().dict().mark();
    pickle = pickle.text("device").integer(0).text("address").integer(0x1000).text("total_size").integer(20 << 20);
    pickle = pickle.text("stream").integer(0).text("blocks").list().mark();
    for (address, size_bytes, state, stack) in blocks {
        pickle = pickle.dict().mark().text("address").integer(*address).text("size").integer(512);
        pickle = pickle.text("requested_size").integer(*size_bytes).text("state").text(state);
        pickle = frames(pickle, stack).op(SETITEMS);
    }
    // The segment counts once, no matter how often it is referenced.
    pickle = pickle.op(APPENDS).op(SETITEMS).op(0x94).raw(&b"h\x00".repeat(times - 1));
    pickle = pickle.op(APPENDS).text("device_traces").list().mark().list().mark();
    for (action, address) in [("alloc", 0x1000), ("free_requested", 0x9000), ("free_completed", 0x9000)] {
        pickle = pickle.dict().mark().text("action").text(action).text("addr").integer(address);
        pickle = pickle.text("size").integer(100).text("stream").integer(7).op(SETITEMS);
    }
    pickle.op(APPENDS).op(APPENDS).op(SETITEMS).stop()
}

#[test]
fn memory_that_is_live_at_the_end_and_never_allocated_is_allocated_first() {
    let weights: &[_] = &[
        ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", 1, "malloc"),
        ("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 96, "__init__"),
        ("/home/me/job/model/block.py", 12, "make"),
        ("/home/me/job/train.py", 7, "main"),
    ];
    let native: &[_] = &[("??", 0, "unwind")];
    let torch: &[_] = &[("??", 0, "unwind"), ("/venv/site-packages/torch/optim/adam.py", 40, "step")];
    let blocks: &[Block<'_>] = &[
        (0x1000, 100, "active_allocated", &[]),
        (0x2000, 200, "active_allocated", weights),
        (0x3000, 300, "inactive", weights),
        (0x4000, 250, "active_allocated", native),
        (0x5000, 260, "active_pending_free", native),
        (0x6000, 150, "active_allocated", torch),
    ];
    let read_segment = |times| read(&with_segment(blocks, times)[..], &ReadOptions::default()).unwrap().finish();
    let (records, summary) = read_segment(1);
    assert_eq!((&records, &summary), (&read_segment(100_000).0, &read_segment(2).1));
    let lines: Vec<String> = records.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect();
    assert_eq!(
        lines,
        [
            "stream s0",
            "a 0 100 s0",
            "stream s1",
            "a 1 150 s1 \"optim/adam.py:40 step\"",
            "a 2 200 s1 \"model/block.py:12 make\"",
            "a 3 250 s1",
            "a 4 100 s0",
            "f 0",
        ]
    );
    assert_eq!((summary.lived_before, summary.lived_before_bytes), (4, 700));
    assert_eq!(summary.recorded_reserved_bytes_peak, Some(20 << 20));
}

#[test]
fn a_trace_that_lost_entries_is_marked() {
    let marked = |mark: Option<u8>| {
        let mut pickle = Pickle::of_protocol(2).dict().mark().text("allocator_settings").dict().mark();
        pickle = pickle.text("trace_alloc_max_entries").integer(2);
        if let Some(opcode) = mark {
            pickle = pickle.text("trace_alloc_overflowed").op(opcode);
        }
        pickle = pickle.op(SETITEMS).text("segments").list().text("device_traces").list().list().mark();
        for (action, address) in [("free_completed", 0x1000), ("free_requested", 0x2000), ("free_completed", 0x2000)] {
            pickle = pickle.dict().mark().text("action").text(action).text("addr").integer(address);
            pickle = pickle.text("size").integer(512).text("stream").integer(0).op(SETITEMS);
        }
        let (records, summary) = read(&pickle.op(APPENDS).op(b'a').op(SETITEMS).stop()[..], &ReadOptions::default())
            .unwrap_or_else(|error| panic!("{error}"))
            .finish();
        // The first allocation was freed before the oldest remaining entry.
        assert_eq!((records.len(), summary.lived_before), (3, 1));
        summary.is_overwritten
    };
    const TRUE: u8 = 0x88;
    const FALSE: u8 = 0x89;
    assert_eq!([Some(TRUE), Some(FALSE), None].map(marked), [true, false, false]);
}

#[test]
fn fields_of_the_wrong_type_are_named_with_their_types() {
    let start = || Pickle::of_protocol(2).dict().mark().text("device_traces").list().list().dict().mark();
    let alloc = |action: Pickle| {
        action.text("addr").integer(1).text("size").integer(1).text("stream").integer(0).op(SETITEMS).op(b'a').op(b'a')
    };
    let message = |pickle: Pickle| error_of(pickle.op(SETITEMS)).to_string();
    let number = message(alloc(start().text("action").integer(7)));
    assert!(
        number.starts_with("'action' of entry 0 of device 0 (counted from 0) is a number, but must be text"),
        "{number}"
    );
    let none = message(alloc(start().text("action").op(b'N')));
    assert!(none.contains("is missing, but must be text"), "{none}");
    let good = || alloc(start().text("action").text("alloc"));
    let segments = message(good().text("segments").integer(5));
    assert!(segments.starts_with("'segments' is a number, but must be a list of segments"), "{segments}");
    let items = message(good().text("segments").list().integer(5).op(b'a'));
    assert!(items.starts_with("'segments' is a list of other things"), "{items}");
    let segment = message(good().text("segments").list().dict().text("device").integer(0).op(b's').op(b'a'));
    assert!(
        segment.starts_with("'total_size' of segment 0 (counted from 0) or of one of its blocks is missing"),
        "{segment}"
    );
}

#[test]
fn an_allocation_beyond_any_device_is_damage() {
    let rows: &[Row] = &[("alloc", 0x1000, i64::MAX, 0)];
    let error = read(&snapshot(&[rows])[..], &ReadOptions::default()).err().unwrap();
    assert!(matches!(error, SnapshotError::Size { device: 0, entry: 0, size_bytes: 0x7fff_ffff_ffff_ffff }), "{error}");
}

/// Returns a snapshot of segments (address, size, state, pool) with one block each, and of entries (action, address, pool), all of 2 MiB. A
/// pool of `None` is omitted.
fn with_pools(segments: &[(i64, &str, Option<i64>)], entries: Option<&[(&str, i64, Option<i64>)]>) -> Vec<u8> {
    let pool = |pickle: Pickle, key: &'static str, pool: Option<i64>| match pool {
        Some(pool) => pickle.text(key).integer(0).integer(pool).op(0x86),
        None => pickle,
    };
    let mut pickle = Pickle::of_protocol(2).dict().mark().text("segments").list().mark();
    for (address, state, of) in segments {
        pickle = pickle.dict().mark().text("device").integer(0).text("address").integer(*address);
        pickle = pickle.text("total_size").integer(2 << 20).text("stream").integer(0);
        pickle = pool(pickle, "segment_pool_id", *of).text("blocks").list().mark();
        pickle = pickle.dict().mark().text("address").integer(*address).text("size").integer(2 << 20);
        pickle = pickle.text("state").text(state).op(SETITEMS).op(APPENDS).op(SETITEMS);
    }
    pickle = pickle.op(APPENDS);
    if let Some(entries) = entries {
        pickle = pickle.text("device_traces").list().mark().list().mark();
        for (action, address, of) in entries {
            pickle = pickle.dict().mark().text("action").text(action).text("addr").integer(*address);
            pickle = pool(pickle.text("size").integer(2 << 20).text("stream").integer(0), "pool_id", *of).op(SETITEMS);
        }
        pickle = pickle.op(APPENDS).op(APPENDS);
    }
    pickle.op(SETITEMS).stop()
}

fn lines_of(pickle: &[u8]) -> Vec<String> {
    let transcript = read(pickle, &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    let line = |record: &Record| symmalloc_trace::RecordLine(record).to_string();
    let short = |line: String| if line.starts_with("pool p") { line[..7].to_owned() } else { line };
    transcript.finish().0.iter().map(line).map(short).collect()
}

#[test]
fn an_entry_names_its_mempool() {
    let entries = [
        ("segment_alloc", 0x10_0000, Some(0)),
        ("alloc", 0x10_0000, Some(0)),
        ("segment_alloc", 0x90_0000, Some(1)),
        ("alloc", 0x90_0000, Some(1)),
        ("free_requested", 0x50_0000, Some(7)),
        ("free_completed", 0x50_0000, Some(7)),
    ];
    assert_eq!(
        lines_of(&with_pools(&[], Some(&entries))),
        [
            "stream s0",
            "pool p1",
            "a 0 2097152 s0 p1",
            "a 1 2097152 s0 -> 0@0",
            "pool p2",
            "a 2 2097152 s0 p2 -> 1@0",
            "f 0"
        ]
    );
}

#[test]
fn older_entries_have_the_pool_of_their_segment() {
    let segments = [
        (0x10_0000, "active_allocated", Some(3)),
        (0x90_0000, "active_allocated", Some(4)),
        (0xf0_0000, "inactive", None),
    ];
    let entries = [
        // In a segment that ended before the final one was created.
        ("alloc", 0x90_0000, None),
        ("free_requested", 0x90_0000, None),
        ("free_completed", 0x90_0000, None),
        ("segment_free", 0x90_0000, None),
        ("segment_alloc", 0x90_0000, None),
        ("alloc", 0x90_0000, None),
        ("alloc", 0xf0_0000, None),
    ];
    assert_eq!(
        lines_of(&with_pools(&segments, Some(&entries))),
        [
            "stream s0",
            "pool p1",
            "a 0 2097152 s0 p1",
            "a 1 2097152 s0",
            "f 1",
            "pool p2",
            "a 2 2097152 s0 p2 -> 0@0",
            "a 3 2097152 s0"
        ]
    );
}

#[test]
fn segments_alone_show_what_is_live() {
    let segments = [
        (0x10_0000, "active_allocated", Some(0)),
        (0x90_0000, "active_allocated", Some(4)),
        (0xf0_0000, "inactive", None),
    ];
    for entries in [None, Some(&[][..]), Some(&[("snapshot", 0, None)][..])] {
        let pickle = with_pools(&segments, entries);
        assert_eq!(lines_of(&pickle), ["stream s0", "a 0 2097152 s0", "pool p1", "a 1 2097152 s0 p1"]);
        let summary = read(&pickle[..], &ReadOptions::default()).unwrap().summary;
        assert_eq!((summary.lived_before, summary.recorded_reserved_bytes_peak), (2, Some(6 << 20)));
    }
    let nothing = with_pools(&[(0xf0_0000, "inactive", None)], None);
    assert!(matches!(read(&nothing[..], &ReadOptions::default()).err(), Some(SnapshotError::NothingRecorded { .. })));
}

#[test]
fn a_pool_that_is_not_a_pair_is_refused() {
    let pickle = Pickle::of_protocol(2).dict().mark().text("device_traces").list().mark().list().mark();
    let pickle = pickle.dict().mark().text("action").text("alloc").text("addr").integer(1).text("size").integer(1);
    let pickle = pickle.text("stream").integer(0).text("pool_id").text("x").op(SETITEMS);
    let error = error_of(pickle.op(APPENDS).op(APPENDS).op(SETITEMS)).to_string();
    assert!(error.contains("pool_id"), "{error}");
}

/// Returns the failure of a trace, and the memory that the allocator held then.
fn failure_of(rows: &[Row]) -> (RecordedFailure, HeldMemory) {
    let failure = read_snapshot(&[rows]).failure.expect("a request failed");
    (failure, failure.held.expect("a snapshot shows the memory"))
}

#[test]
fn the_last_failed_request_has_the_memory_that_was_held_then() {
    let mib = 1 << 20;
    let (failure, held) = failure_of(&[
        ("segment_alloc", 0x1000000, 20 * mib, 0),
        ("alloc", 0x1000000, 4 * mib - 100, 0),
        ("oom", 7, 1, 0),
        ("alloc", 0x1000000 + 8 * mib, 4 * mib, 0),
        // The device still uses this block.
        ("alloc", 0x1000000 + 16 * mib, 4 * mib, 0),
        ("free_requested", 0x1000000 + 16 * mib, 4 * mib, 0),
        ("segment_alloc", 0x9000000, 2 * mib, 0),
        ("segment_alloc", 0x9000000 + 2 * mib, 2 * mib, 0),
        ("oom", 512, 30 * mib, 0),
        ("free_completed", 0x1000000 + 16 * mib, 4 * mib, 0),
        ("segment_free", 0x9000000, 2 * mib, 0),
        ("alloc", 0x9000000 + 2 * mib, 512, 0),
    ]);
    assert_eq!((failure.record, failure.device_free_bytes), (8, Some(512)));
    let mib = mib as u64;
    let expected = HeldMemory {
        reserved_bytes: 24 * mib,
        allocated_bytes: 12 * mib,
        free_segments: 2,
        free_segment_bytes: 4 * mib,
        free_blocks: 2,
        free_block_bytes: 8 * mib,
        largest_free_bytes: 4 * mib,
    };
    assert_eq!(held, expected);
}

#[test]
fn memory_from_before_the_trace_and_expandable_ranges_count() {
    let mib = 1 << 20;
    let (_, held) = failure_of(&[
        // Obtained before the trace: released or freed by it later.
        ("oom", 0, 30 * mib, 0),
        ("segment_free", 0x1000000, 20 * mib, 0),
        ("free_requested", 0x9000000, 512, 0),
        ("segment_unmap", 0x9000000, 2 * mib, 0),
    ]);
    let mib = mib as u64;
    assert_eq!((held.reserved_bytes, held.allocated_bytes, held.largest_free_bytes), (22 * mib, 512, 20 * mib));
    let mib = 1 << 20;
    let (_, held) = failure_of(&[
        ("segment_map", 0x1000000, 2 * mib, 0),
        ("segment_map", 0x1000000 + 2 * mib, 2 * mib, 0),
        ("alloc", 0x1000000, mib, 0),
        ("segment_map", 0x1000000 + 6 * mib, 2 * mib, 0),
        ("oom", 0, 30 * mib, 0),
    ]);
    let mib = mib as u64;
    // The mapped pages touch, except for the last ones.
    assert_eq!((held.reserved_bytes, held.largest_free_bytes), (6 * mib, 3 * mib));
    assert_eq!((held.free_segments, held.free_segment_bytes), (1, 2 * mib));
}

#[test]
fn the_segments_alone_are_a_snapshot_of_the_live_allocations() {
    let block = |pickle: Pickle, state: &str| {
        let pickle = pickle.dict().mark().text("size").integer(512).text("requested_size").integer(500);
        pickle.text("state").text(state).op(SETITEMS)
    };
    let mut pickle = Pickle::of_protocol(2).list().mark().dict().mark().text("address").integer(0x1000);
    pickle = pickle.text("total_size").integer(2048).text("stream").integer(0).text("blocks").list().mark();
    for state in ["active_allocated", "inactive", "active_allocated", "inactive"] {
        pickle = block(pickle, state);
    }
    let transcript = read(&pickle.op(APPENDS).op(SETITEMS).op(APPENDS).stop()[..], &ReadOptions::default()).unwrap();
    let summary = transcript.summary;
    assert_eq!((summary.lived_before, summary.lived_before_bytes), (2, 1000));
    let held = summary.state_only.expect("there is no history");
    assert_eq!(
        (held.reserved_bytes, held.allocated_bytes, held.free_blocks, held.largest_free_bytes),
        (2048, 1024, 2, 512)
    );
}
