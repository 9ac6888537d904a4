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
            "RegisterStream { stream: StreamId(0) }",
            "Allocate { id: AllocationId(0), pool: PoolId(0), stream: StreamId(0), size_bytes: 256 }",
            "RegisterStream { stream: StreamId(1) }",
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
               1,0,free,0x500,256,0\n";
    let (records, summary) = read_log(log).unwrap().finish();
    assert!(records.is_empty());
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
fn a_torn_last_line_can_be_left_out() {
    let log = format!("{HEADER}1,0,allocate,0x100,256,0x2\n1,0,free,0x100,25");
    let (records, summary) = read(log.as_bytes(), &ReadOptions::default().accept_torn()).unwrap().finish();
    assert_eq!(records.len(), 2);
    assert_eq!(summary.torn_at_line, Some(3));
}
