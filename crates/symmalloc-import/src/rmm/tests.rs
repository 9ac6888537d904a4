//! Tests of the RMM log reader.

use symmalloc_core::op::Op;

use super::*;

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn read_log(lines: &str) -> Result<Transcript, RmmError> {
    read(format!("{HEADER}{lines}").as_bytes(), &ReadOptions::default())
}

fn ops(lines: &str) -> Vec<Op> {
    read_log(lines).unwrap().finish().0.into_iter().map(|record| record.op).collect()
}

fn error(lines: &str) -> RmmError {
    read_log(lines).err().unwrap()
}

#[test]
fn allocations_and_frees_become_ops() {
    let log = "1,14:21:19.998533,allocate,0x30a000000,256,0x2\n\
               1,14:21:20.000001,allocate,0x30a000100,1000,0x7f00\n\
               1,14:21:20.000002,free,0x30a000000,256,0x2\n";
    let text: Vec<String> = ops(log).into_iter().map(|op| format!("{op:?}")).collect();
    assert_eq!(
        text,
        [
            "RegisterStream { stream: StreamId(0), group: StreamId(0) }",
            "Allocate { id: AllocationId(0), pool: PoolId(0), stream: StreamId(0), size_bytes: 256 }",
            "RegisterStream { stream: StreamId(1), group: StreamId(1) }",
            "Allocate { id: AllocationId(1), pool: PoolId(0), stream: StreamId(1), size_bytes: 1000 }",
            "Free { id: AllocationId(0) }"
        ]
    );
}

#[test]
fn a_free_on_another_stream_records_its_use_first() {
    let log = "1,0,allocate,0x100,256,0x2\n1,0,free,0x100,256,0x3\n";
    assert!(matches!(
        ops(log)[..],
        [
            Op::RegisterStream { .. },
            Op::Allocate { .. },
            Op::RegisterStream { .. },
            Op::RecordUse { stream: symmalloc_core::ids::StreamId(1), .. },
            Op::Free { .. }
        ]
    ));
}

#[test]
fn quotes_carriage_returns_blank_lines_and_column_order_do_not_matter() {
    let plain = ops("1,0,allocate,0x100,256,0x2\n1,0,free,0x100,256,0x2\n");
    let dressed =
        "\"1\",\"0:\"\"0\"\"\",\"allocate\",\"0x100\",\"256\",\"0x2\"\r\n\r\n\n 1 , 0 , free , 100 , 256 , 2 \r\n";
    assert_eq!(ops(dressed), plain);
    let turned = "Stream,Size,Action,Pointer\n0x2,256,allocate,0x100\n0x2,256,free,0x100\n";
    let turned = read(turned.as_bytes(), &ReadOptions::default()).unwrap().finish().0;
    assert_eq!(turned.into_iter().map(|record| record.op).collect::<Vec<_>>(), plain);
}

#[test]
fn failures_null_pointers_and_frees_of_unknown_addresses_are_counted() {
    let log = "1,0,allocate failure,(nil),99999999999,0x0\n\
               1,0,allocate,(nil),0,(nil)\n\
               1,0,free,0x0,0,0\n\
               1,0,free,0x500,0,0\n";
    let (records, summary) = read_log(log).unwrap().finish();
    let lines: Vec<String> = records.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect();
    assert_eq!(lines, ["stream s0", "refuse 99999999999 s0 driver"]);
    assert_eq!((summary.failed_allocations, summary.empty_allocations, summary.frees_of_unknown), (1, 2, 1));
}

#[test]
fn every_bad_line_is_named() {
    let good = "1,0,allocate,0x100,256,0x2\n";
    for (bad, expected) in [
        ("1,0,allocate,0x100,256\n", "line 3 has 5 fields"),
        ("1,0,allocate,0x100,256,0x2,\n", "line 3 has 7 fields"),
        ("1,0,reallocate,0x100,256,0x2\n", "line 3 has an unknown action"),
        ("1,0,allocate,0xg,256,0x2\n", "line 3 has no valid Pointer"),
        ("1,0,allocate,,256,0x2\n", "line 3 has no valid Pointer"),
        ("1,0,allocate,0x10000000000000000,256,0x2\n", "line 3 has no valid Pointer"),
        ("1,0,allocate,0x100,+256,0x2\n", "line 3 has no valid Size"),
        ("1,0,allocate,0x100,-1,0x2\n", "line 3 has no valid Size"),
        ("1,0,allocate,0x100,256,s2\n", "line 3 has no valid Stream"),
        ("1,0,\"allocate,0x100,256,0x2\n", "line 3 has 3 fields"),
        ("1,0,\"allocate\"x,0x100,256,0x2\n", "line 3 has an unknown action"),
        ("\r\n\n1,0,reallocate,0x100,256,0x2\r\n", "line 5 has an unknown action"),
        ("1,0,allocate,0x100,256,0x2", "line 3, the last, has no line break"),
        ("1,0,allo", "line 3, the last, has no line break"),
    ] {
        let message = error(&format!("{good}{bad}")).to_string();
        assert!(message.starts_with(expected), "{bad:?}: {message}");
    }
    let long = format!("{good}{}\n", "x".repeat(5000));
    assert!(matches!(error(&long), RmmError::LineTooLong { line: 3 }));
    let binary = [HEADER.as_bytes(), b"\xff\n"].concat();
    assert!(matches!(read(&binary[..], &ReadOptions::default()).err(), Some(RmmError::NotUtf8 { line: 2 })));
    let headless = "Thread,Time,Action,Pointer,Size\n";
    let missing = read(headless.as_bytes(), &ReadOptions::default()).err();
    assert!(matches!(missing, Some(RmmError::MissingColumn { column: "Stream" })));
}

#[test]
fn a_torn_last_line_can_be_omitted() {
    let log = format!("{HEADER}1,0,allocate,0x100,256,0x2\n1,0,free,0x100,25");
    let (records, summary) = read(log.as_bytes(), &ReadOptions::default().accept_torn()).unwrap().finish();
    assert_eq!(records.len(), 2);
    assert_eq!(summary.torn_at_line, Some(3));
}

/// A file that was compressed in two frames, of which the second is torn, still has all complete lines of the first.
#[test]
fn the_last_complete_line_of_a_torn_compressed_log_counts() {
    let log = format!("{HEADER}1,0,allocate,0x100,256,0x2\n1,0,allocate,0x900,512,0x2\n");
    let mut compressed = zstd::encode_all(log.as_bytes(), 0).unwrap();
    let next = zstd::encode_all("1,0,free,0x100,256,0x2\n".as_bytes(), 0).unwrap();
    compressed.extend(&next[..next.len() - 4]);
    let source = || io::BufReader::new(crate::compression::Decompressor::new(&compressed[..]).unwrap());
    assert!(read(source(), &ReadOptions::default()).is_err());
    let transcript = read(source(), &ReadOptions::default().accept_torn()).unwrap();
    assert!(transcript.summary.torn_at_line.is_some());
    let made = transcript.finish().0.into_iter().filter(|record| matches!(record.op, Op::Allocate { .. })).count();
    assert_eq!(made, 2);
}

/// Returns the records as lines of a trace.
fn lines(transcript: Transcript) -> Vec<String> {
    transcript.finish().0.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect()
}

#[test]
fn a_log_that_begins_late_allocates_first_what_it_frees() {
    let log = "1,0,allocate,0x100,256,0x7f00\n1,0,free,0x200,512,0x7f01\n1,0,free,0x100,256,0x7f00\n\
               1,0,free,0x300,1024,0x7f00\n1,0,free,0x200,512,0x7f01\n1,0,free,0x100,256,0x7f00\n";
    let transcript = read_log(log).unwrap();
    let summary = transcript.summary.clone();
    assert_eq!(
        lines(transcript),
        ["stream s0", "a 0 512 s0", "stream s1", "a 1 1024 s1", "a 2 256 s1", "f 0", "f 2", "f 1"]
    );
    assert_eq!((summary.lived_before, summary.lived_before_bytes), (2, 1536));
    // A second free of a known address does not imply another allocation.
    assert_eq!(summary.frees_of_unknown, 2);
}

#[test]
fn handles_are_hexadecimal_with_a_prefix_or_without() {
    let log = "1,0,allocate,7f30a0000000,1048576,55d0c3a1f2e0\n1,0,free,0x7F30A0000000,1048576,0X55D0C3A1F2E0\n";
    assert_eq!(lines(read_log(log).unwrap()), ["stream s0", "a 0 1048576 s0", "f 0"]);
}

#[test]
fn the_legacy_default_stream_has_two_handles() {
    for [first, second] in [["0x0", "0x1"], ["1", "0"], ["(nil)", "0x1"]] {
        let log = format!("1,0,allocate,0x100,256,{first}\n1,0,free,0x100,256,{second}\n");
        assert_eq!(lines(read_log(&log).unwrap()), ["stream s0", "a 0 256 s0", "f 0"]);
    }
}

#[test]
fn the_per_thread_default_stream_is_a_stream_of_each_thread() {
    let log = "100,0,allocate,0x100,256,0x2\n101,0,allocate,0x200,256,2\n100,0,free,0x100,256,0x2\n\
               100,0,free,0x200,256,0x2\n";
    let expected = ["stream s0", "a 0 256 s0", "stream s1", "a 1 256 s1", "f 0", "u 1 s0", "f 1"];
    assert_eq!(lines(read_log(log).unwrap()), expected);
    // Without a thread column it is one stream. A number of more than 64 bits is not a handle.
    let text = "Action,Pointer,Size,Stream\nallocate,0x100,256,0x2\nfree,0x100,256,0x2\n";
    let one = read(text.as_bytes(), &ReadOptions::default()).unwrap();
    assert_eq!(lines(one), ["stream s0", "a 0 256 s0", "f 0"]);
    assert!(read_log("1,0,allocate,0x100,256,0x10000000000000000\n").is_err());
}

#[test]
fn a_log_is_known_by_its_columns_in_any_order() {
    for header in ["Thread,Time,Action,Pointer,Size,Stream", "Stream,Size,Pointer,Action", "\"Size\", Action ,Pointer"]
    {
        assert!(is_log(format!("{header}\r\n1,2,3").as_bytes()), "{header}");
    }
    for other in ["", "Action", "symmalloc-trace 1", "Time,Action,Thread", "\n\nAction,Pointer,Size,Stream"] {
        assert!(!is_log(other.as_bytes()), "{other}");
    }
    let text = "Stream,Size,Action,Pointer\n0x5,256,allocate,0x100\n";
    let recording = crate::read_bytes(text.as_bytes(), &ReadOptions::default()).unwrap();
    assert_eq!((recording.format, recording.summary.allocations), (crate::Format::RmmLog, 1));
}

#[test]
fn events_stay_under_the_limit() {
    let log = format!("{HEADER}{}", "1,0,allocate failure,0x0,1,0x0\n".repeat(1000));
    let outcome = read(log.as_bytes(), &ReadOptions::default().memory_limit_bytes(2000));
    assert!(matches!(outcome.err(), Some(RmmError::TooLarge { limit_bytes: 2000, .. })));
}

#[test]
fn the_debug_log_is_not_taken_for_a_damaged_log() {
    let begin = "[6][11:33:41:863410][info  ] ----- RMM LOG BEGIN [PTDS DISABLED] -----\n";
    let allocation = "[6][11:33:41:863500][debug ] [A][Stream 0x1][Upstream 2139648B][Left 0x0]\n";
    for text in [begin.to_owned(), allocation.to_owned(), format!("\n{begin}"), format!("{begin}{allocation}")] {
        let error = crate::read_bytes(text.as_bytes(), &ReadOptions::default()).unwrap_err();
        assert!(matches!(error.kind(), crate::ImportErrorKind::RmmDebugLog), "{text}: {error}");
        assert!(error.to_string().contains("give its event log"), "{error}");
    }
    for text in ["[1, 2, 3]\n", "hello [A] world\n"] {
        let error = crate::read_bytes(text.as_bytes(), &ReadOptions::default()).unwrap_err();
        assert!(matches!(error.kind(), crate::ImportErrorKind::UnknownFormat), "{text}: {error}");
    }
}
