//! Tests of the format by example: valid records, damage, and contradictions.

use std::io::{self, BufReader};

use super::*;
use crate::{LINE_BYTES_MAX, LineError};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::config_text::ConfigTextError;
use symmalloc_core::ids::{AllocationId, Placement, PoolId, SegmentId, StreamId};
use symmalloc_core::op::{NAME_BYTES_MAX, Op, Pending, Record};

/// Beginning of a trace: two streams and a pool, in five records.
const BEGINNING: &str = "symmalloc-trace 2\nstream s0\nstream s1\npool p1 segments:reserved,segment_mb:64\n\
                         a 0 1048576 s0\na 1 512 s1 p1 \"kv cache\" -> 0@1048576\n";

/// Returns the error of a trace that consists of the beginning and these lines.
fn error_after_beginning(lines: &str) -> TraceError {
    Trace::parse(&format!("{BEGINNING}{lines}")).expect_err("the lines are invalid")
}

fn contradiction(line: &str) -> Inconsistency {
    match error_after_beginning(&format!("{line}\nend 6\n")) {
        TraceError::Inconsistent { line: 7, source } => source,
        other => panic!("not a contradiction in line 7: {other}"),
    }
}

fn allocate(id: u64) -> Op {
    Op::Allocate { id: AllocationId(id), pool: PoolId::DEFAULT, stream: StreamId(0), size_bytes: 512 }
}

#[test]
fn every_record_reads_as_documented() {
    let text = "\
symmalloc-trace 2
# a comment, then a blank line

config segments:fixed,total_limit_mb:4096
stream s0
stream s1 # the second
stream s2 in s0 \"copies\"
stream s3 in s1
pool p0 segments:expandable
pool p1
\ta  0\t1048576 s0
a 1 512 s0 p1 \"kv \\\"cache\\\"\\n\\u{7f}#\" -> 3@1048576 # with everything
u 0 s1
wait s1 s0
f 0
synchronize s0
reserve 1048576 s0
reserve 2097152 s0 p1
trim
trim p1
f 1 pending  12 # of them
a 2 1 s0 -> 0@512 revived 1024
f 2 pending
destroy p1
sync
end 21
# a comment
";
    let trace = Trace::parse(text).expect("the trace is valid");
    let (s0, s1, p1) = (StreamId(0), StreamId(1), PoolId(1));
    let placement = Placement { segment: SegmentId(3), offset_bytes: 1_048_576 };
    let default_pool = Box::new(PoolConfig::default());
    let expected = [
        Op::register(s0).into(),
        Op::register(s1).into(),
        Record::from(Op::RegisterStream { stream: StreamId(2), group: s0 }).with_name("copies"),
        Op::RegisterStream { stream: StreamId(3), group: s1 }.into(),
        Op::CreatePool { pool: PoolId::DEFAULT, config: default_pool.clone() }.into(),
        Op::CreatePool { pool: p1, config: default_pool }.into(),
        Op::Allocate { id: AllocationId(0), pool: PoolId::DEFAULT, stream: s0, size_bytes: 1_048_576 }.into(),
        Record::from(Op::Allocate { id: AllocationId(1), pool: p1, stream: s0, size_bytes: 512 })
            .with_name("kv \"cache\"\n\u{7f}#")
            .with_placement(placement),
        Op::RecordUse { id: AllocationId(0), stream: s1 }.into(),
        Op::Wait { stream: s1, on: s0 }.into(),
        Op::Free { id: AllocationId(0) }.into(),
        Op::Synchronize { stream: s0 }.into(),
        Op::Reserve { pool: PoolId::DEFAULT, stream: s0, size_bytes: 1_048_576 }.into(),
        Op::Reserve { pool: p1, stream: s0, size_bytes: 2_097_152 }.into(),
        Op::Trim { pool: None }.into(),
        Op::Trim { pool: Some(p1) }.into(),
        Record::from(Op::Free { id: AllocationId(1) })
            .with_pending(Pending::new(12).expect("the number should not be zero")),
        Record::from(Op::Allocate { id: AllocationId(2), pool: PoolId::DEFAULT, stream: s0, size_bytes: 1 })
            .with_revival(Placement { segment: SegmentId(0), offset_bytes: 512 }, 1024),
        Record::from(Op::Free { id: AllocationId(2) }).with_pending(Pending::TO_THE_END),
        Op::DestroyPool { pool: p1 }.into(),
        Op::Sync.into(),
    ];
    assert_eq!(trace.records(), expected);
    assert_eq!(trace.config().and_then(Config::total_limit_bytes), Some(4096 << 20));
    assert_eq!(Trace::parse(&trace.to_text()).expect("the canonical text is valid"), trace);
}

#[test]
fn windows_line_breaks_and_a_missing_last_one_are_fine() {
    let text = "symmalloc-trace 1\r\nstream s0\r\na 0 1 s0 \"n\"\r\nend 2";
    assert_eq!(Trace::parse(text).expect("the text should be valid").records().len(), 2);
}

#[test]
fn reader_and_writer_stream_with_a_buffer_of_one_byte() {
    let trace = Trace::parse(&format!("{BEGINNING}f 0\nend 6\n")).expect("the text should be valid");
    let mut writer = TraceWriter::new(Vec::new(), trace.config()).expect("writing to a vector cannot fail");
    for record in trace.records() {
        writer.write(record).expect("writing to a vector cannot fail");
    }
    assert_eq!(writer.records(), 6);
    let bytes = writer.finish().expect("writing to a vector cannot fail");
    assert_eq!(bytes, trace.to_text().as_bytes());
    assert_eq!(Trace::read(BufReader::with_capacity(1, &bytes[..])).expect("the text should be valid"), trace);
}

#[test]
fn other_files_are_not_traces() {
    for text in
        ["", "\n", "symmalloc", "symmalloc-trace", "symmalloc-trace1\n", "symmalloc-trace x\n", " symmalloc-trace 1\n"]
    {
        assert!(matches!(Trace::parse(text), Err(TraceError::NotATrace)), "{text:?}");
    }
    assert!(matches!(Trace::read(&b"\x1f\x8b\x08\0\xff\xff\n"[..]), Err(TraceError::NotATrace)));
    assert!(matches!(Trace::read(&vec![b'x'; 1 << 20][..]), Err(TraceError::NotATrace)));
}

#[test]
fn a_later_version_is_refused() {
    assert!(matches!(Trace::parse("symmalloc-trace 3\nend 0\n"), Err(TraceError::UnsupportedVersion { found: 3 })));
    assert!(matches!(Trace::parse("symmalloc-trace 0\nend 0\n"), Err(TraceError::UnsupportedVersion { found: 0 })));
    let huge = "symmalloc-trace 99999999999999999999\nend 0\n";
    assert!(matches!(Trace::parse(huge), Err(TraceError::UnsupportedVersion { found: u64::MAX })));
}

#[test]
fn version_1_is_read_without_groups() {
    let lines = "\nstream s0 \"main\"\nstream s1\na 0 512 s1\nend 3\n";
    let (old, new) = (format!("symmalloc-trace 1{lines}"), format!("symmalloc-trace 2{lines}"));
    let trace = Trace::parse(&old).expect("the text should be valid");
    assert_eq!((&trace, trace.to_text()), (&Trace::parse(&new).expect("the text should be valid"), new));
    let error = Trace::parse("symmalloc-trace 1\nstream s0\nstream s1 in s0\nend 2\n").expect_err("no groups");
    let source = Inconsistency::GroupInVersion1 { stream: StreamId(1) };
    assert!(matches!(error, TraceError::Inconsistent { line: 3, source: found } if found == source), "{error}");
}

#[test]
fn a_group_is_named_after_its_first_stream() {
    let unknown = |stream, group| Inconsistency::UnknownGroup { stream: StreamId(stream), group: StreamId(group) };
    assert_eq!(contradiction("stream s2 in s3"), unknown(2, 3));
    let text = format!("{BEGINNING}stream s2 in s0\nstream s3 in s2\nend 7\n");
    let error = Trace::parse(&text).expect_err("s2 is not the first of its group");
    assert!(matches!(error, TraceError::Inconsistent { line: 8, source } if source == unknown(3, 2)), "{error}");
    // A stream in its own group has one spelling.
    let trace = Trace::parse("symmalloc-trace 2\nstream s0 in s0\nend 1\n").expect("the text should be valid");
    assert_eq!(trace.to_text(), "symmalloc-trace 2\nstream s0\nend 1\n");
    for line in ["stream s2 in", "stream s2 on s0", "stream s2 in \"s0\"", "stream s2 in s0+"] {
        let error = error_after_beginning(&format!("{line}\nend 6\n"));
        assert!(matches!(error, TraceError::Line(_)), "{line}: {error}");
    }
}

#[test]
fn a_misspelt_keyword_names_the_nearest() {
    match error_after_beginning("  trimm p1\n") {
        TraceError::Line(LineError::UnknownKeyword { line: 7, column: 3, nearest: Some("trim"), .. }) => {}
        other => panic!("{other}"),
    }
    assert!(matches!(
        error_after_beginning("malloc 5\n"),
        TraceError::Line(LineError::UnknownKeyword { nearest: None, .. })
    ));
}

#[test]
fn malformed_fields_are_located() {
    let cases = [
        ("a", 2),
        ("a x 5 s0", 3),
        ("a 2 -5 s0", 5),
        ("a 2 0x10 s0", 5),
        ("a 2 +5 s0", 5),
        ("a 2 5", 6),
        ("a 2 5 # s0", 7),
        ("a 2 5 0", 7),
        ("a 2 5 s", 7),
        ("a 2 5 p0", 7),
        ("a 2 5 s0 \"open", 15),
        ("a 2 5 s0 \"open\\\"", 17),
        ("a 2 5 s0 \"bad \\x\"", 15),
        ("a 2 5 s0 \"bad \\u{d800}\"", 15),
        ("a 2 5 s0 \"bad \\u{}\"", 15),
        ("a 2 5 s0 \"glued\"-> 0@0", 17),
        ("a 2 5 s0 -> 0", 13),
        ("a 2 5 s0 -> @0", 13),
        ("a 2 5 s0 -> 0@", 15),
        ("a 2 5 s0 - 0@0", 10),
        ("f 0 p1", 5),
        ("a 0 1 s0 -> 0@0 revive 512", 17),
        ("a 0 1 s0 -> 0@0 revived", 24),
        ("a 0 1 s0 -> 0@0 revived 0", 25),
        ("f 0 pendings", 5),
        ("f 0 pending x", 13),
        ("f 0 pending 0", 13),
        ("wait s0", 8),
        ("end", 4),
    ];
    for (text, expected) in cases {
        match error_after_beginning(&format!("{text}\n")) {
            TraceError::Line(LineError::Expected { line: 7, column, .. }) => assert_eq!(column, expected, "{text}"),
            other => panic!("{text}: {other}"),
        }
    }
}

#[test]
fn numbers_that_are_too_large_are_reported_with_the_maximum() {
    let cases = [
        ("a 18446744073709551616 5 s0", u64::MAX),
        ("a 2 99999999999999999999999999 s0", u64::MAX),
        ("synchronize s65535", 65_534),
        ("trim p4294967296", u32::MAX.into()),
        ("a 2 5 s0 -> 4294967296@0", u32::MAX.into()),
    ];
    for (text, expected) in cases {
        match error_after_beginning(&format!("{text}\n")) {
            TraceError::Line(LineError::NumberTooLarge { line: 7, max, .. }) => assert_eq!(max, expected, "{text}"),
            other => panic!("{text}: {other}"),
        }
    }
}

#[test]
fn trailing_fields_are_refused() {
    for text in ["f 0 1", "f 0 pending 1 2", "sync s0", "a 2 5 s0 -> 0@0 p1", "a 2 5 s0 p1 p1", "trim p1 p1"] {
        assert!(
            matches!(
                error_after_beginning(&format!("{text}\n")),
                TraceError::Line(LineError::TrailingField { line: 7, .. })
            ),
            "{text}"
        );
    }
}

#[test]
fn inconsistent_records_are_refused() {
    let (id, unknown) = (AllocationId(0), AllocationId(7));
    assert_eq!(contradiction("a 0 5 s0"), Inconsistency::DuplicateAllocation { id });
    assert_eq!(contradiction("f 7"), Inconsistency::UnknownAllocation { id: unknown });
    assert_eq!(contradiction("u 7 s0"), Inconsistency::UnknownAllocation { id: unknown });
    assert_eq!(contradiction("a 2 5 s2"), Inconsistency::UnknownStream { stream: StreamId(2) });
    assert_eq!(contradiction("u 0 s2"), Inconsistency::UnknownStream { stream: StreamId(2) });
    assert_eq!(contradiction("wait s0 s2"), Inconsistency::UnknownStream { stream: StreamId(2) });
    assert_eq!(contradiction("reserve 5 s0 p2"), Inconsistency::UnknownPool { pool: PoolId(2) });
    assert_eq!(contradiction("trim p4294967295"), Inconsistency::UnknownPool { pool: PoolId(u32::MAX) });
    assert_eq!(contradiction("stream s1"), Inconsistency::StreamOutOfOrder { stream: StreamId(1), next: 2 });
    assert_eq!(contradiction("stream s3"), Inconsistency::StreamOutOfOrder { stream: StreamId(3), next: 2 });
    assert_eq!(contradiction("pool p1"), Inconsistency::PoolOutOfOrder { pool: PoolId(1), next: 2 });
    assert_eq!(contradiction("pool p65536"), Inconsistency::PoolOutOfOrder { pool: PoolId(65_536), next: 2 });
    assert_eq!(contradiction("pool p0"), Inconsistency::DefaultPoolInUse);
    assert_eq!(contradiction("destroy p0"), Inconsistency::DefaultPoolDestroyed);
    let long = format!("a 2 5 s0 \"{}\"", "n".repeat(NAME_BYTES_MAX + 1));
    assert_eq!(contradiction(&long), Inconsistency::NameTooLong { bytes: NAME_BYTES_MAX + 1 });
}

#[test]
fn freed_allocations_and_destroyed_pools_cannot_be_used() {
    let twice = error_after_beginning("f 0\nf 0\n");
    let freed = Inconsistency::FreedAllocation { id: AllocationId(0) };
    assert!(matches!(twice, TraceError::Inconsistent { line: 8, source } if source == freed));
    let reused = error_after_beginning("f 0\na 0 5 s0\n");
    assert!(matches!(reused, TraceError::Inconsistent { source: Inconsistency::DuplicateAllocation { .. }, .. }));
    let destroyed = error_after_beginning("f 1\ndestroy p1\na 2 5 s0 p1\n");
    let gone = Inconsistency::DestroyedPool { pool: PoolId(1) };
    assert!(matches!(destroyed, TraceError::Inconsistent { line: 9, source } if source == gone));
}

#[test]
fn a_trace_that_is_cut_anywhere_yields_its_beginning_and_is_torn() {
    let text = format!("{BEGINNING}f 0\nu 1 s0\nf 1\nsync\nend 9\n");
    let whole = Trace::parse(&text).expect("the text should be valid");
    let first_line = text.find('\n').expect("a line") + 1;
    // A text that is one byte shorter lacks only the last line break, which is optional.
    for cut in first_line..text.len() - 1 {
        let mut records = Vec::new();
        let mut reader = TraceReader::new(&text.as_bytes()[..cut]).expect("the first line is whole");
        let error = loop {
            match reader.next().expect("the end is missing") {
                Ok(record) => records.push(record),
                Err(error) => break error,
            }
        };
        assert_eq!(records, whole.records()[..records.len()]);
        let whole_lines = text[..cut].matches('\n').count();
        assert_eq!(records.len(), whole_lines - 1, "every whole record is yielded");
        match error {
            TraceError::Torn { records: counted, line } => {
                assert_eq!((counted, line), (records.len() as u64, whole_lines as u64 + 1));
            }
            other => panic!("cut at {cut}: {other}"),
        }
        assert!(reader.next().is_none());
    }
}

#[test]
fn a_first_line_without_line_break_is_torn() {
    assert!(matches!(Trace::parse("symmalloc-trace 1"), Err(TraceError::Torn { records: 0, line: 1 })));
    assert!(matches!(Trace::parse("symmalloc-trace 1\n"), Err(TraceError::Torn { records: 0, line: 2 })));
    assert!(matches!(Trace::parse("symmalloc-trace 1\nconfig seg"), Err(TraceError::Torn { records: 0, line: 2 })));
}

#[test]
fn a_lost_line_shows_in_the_count() {
    let error = error_after_beginning("end 6\n");
    assert!(matches!(error, TraceError::WrongCount { line: 7, stated: 6, records: 5 }));
}

#[test]
fn nothing_but_comments_follows_the_end() {
    assert!(Trace::parse(&format!("{BEGINNING}end 5\n\n# fine")).is_ok());
    assert!(matches!(error_after_beginning("end 5\nf 0\n"), TraceError::AfterEnd { line: 8 }));
    assert!(matches!(error_after_beginning("end 5\nend 5\n"), TraceError::AfterEnd { line: 8 }));
}

#[test]
fn the_configuration_occurs_once_and_first() {
    assert!(matches!(error_after_beginning("config segments:fixed\n"), TraceError::MisplacedConfig { line: 7 }));
    let twice = "symmalloc-trace 1\nconfig segments:fixed\nconfig segments:fixed\nend 0\n";
    assert!(matches!(Trace::parse(twice), Err(TraceError::MisplacedConfig { line: 3 })));
    match Trace::parse("symmalloc-trace 1\n\nconfig  segments:fixd\nend 0\n") {
        Err(TraceError::Line(LineError::Config {
            line: 3,
            column: 9,
            source: ConfigTextError::Value { offset: 9, .. },
        })) => {}
        other => panic!("{other:?}"),
    }
    match error_after_beginning("pool p2 symmetric:maybe\n") {
        TraceError::Line(LineError::Config {
            line: 7,
            column: 9,
            source: ConfigTextError::Value { offset: 10, .. },
        }) => {}
        other => panic!("{other}"),
    }
}

#[test]
fn damaged_bytes_and_endless_lines_are_refused() {
    let mut bytes = BEGINNING.as_bytes().to_vec();
    bytes.extend_from_slice(b"# \xff\xfe\n");
    assert!(matches!(Trace::read(&bytes[..]), Err(TraceError::Line(LineError::InvalidUtf8 { line: 7, column: 3 }))));
    let endless = error_after_beginning(&"#".repeat(LINE_BYTES_MAX + 1));
    assert!(matches!(endless, TraceError::Line(LineError::TooLong { line: 7 })));
    let longest = format!("{BEGINNING}{}\nend 5\n", "#".repeat(LINE_BYTES_MAX - 1));
    assert!(Trace::parse(&longest).is_ok());
}

#[test]
fn the_longest_name_fits_on_a_line_however_it_is_escaped() {
    let record = Record::from(allocate(0)).with_name(&"\u{1}".repeat(NAME_BYTES_MAX));
    let records = vec![Op::register(StreamId(0)).into(), record];
    let trace = Trace::new(None, records).expect("the records should be consistent");
    assert_eq!(Trace::parse(&trace.to_text()).expect("the text should be valid"), trace);
}

#[test]
fn a_failing_reader_is_distinguished_from_a_torn_trace() {
    struct Failing;
    impl io::Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::ConnectionReset.into())
        }
    }
    let input = BufReader::new(io::Read::chain(BEGINNING.as_bytes(), Failing));
    let error = Trace::read(input).expect_err("the input fails");
    assert!(
        matches!(error, TraceError::Line(LineError::Io { line: 7, source }) if source.kind() == io::ErrorKind::ConnectionReset)
    );
}

#[test]
fn a_writer_refuses_invalid_records_and_continues() {
    let mut writer = TraceWriter::new(Vec::new(), None).expect("writing to a vector cannot fail");
    writer.write(&Op::register(StreamId(0)).into()).expect("the records should be consistent");
    let refused = [
        (Op::Free { id: AllocationId(0) }.into(), Inconsistency::UnknownAllocation { id: AllocationId(0) }),
        (Record::from(Op::Sync).with_name("no"), Inconsistency::NotAnAllocation),
        (
            Record::from(Op::Sync).with_placement(Placement { segment: SegmentId(0), offset_bytes: 0 }),
            Inconsistency::NotAnAllocation,
        ),
        (Record::from(allocate(0)).with_pending(Pending::TO_THE_END), Inconsistency::NotAFree),
        (
            Record::from(allocate(0)).with_revival(Placement { segment: SegmentId(0), offset_bytes: 0 }, 511),
            Inconsistency::RevivedNowhere { size_bytes: 512, block_bytes: 511 },
        ),
    ];
    for (record, expected) in refused {
        match writer.write(&record) {
            Err(TraceWriteError::Inconsistent { record: 1, source }) => assert_eq!(source, expected),
            other => panic!("{other:?}"),
        }
    }
    writer.write(&allocate(0).into()).expect("the records should be consistent");
    let text =
        String::from_utf8(writer.finish().expect("writing to a vector cannot fail")).expect("the path should be UTF-8");
    assert_eq!(text, "symmalloc-trace 2\nstream s0\na 0 512 s0\nend 2\n");
}

/// Records that occur only in recordings of running allocators.
#[test]
fn observers_refusals_and_reclaims_survive_a_round_trip() {
    let lines = [
        "stream s0",
        "pool p1 segments:expandable",
        "observe o0 p0",
        "observe o1 p1",
        "acknowledge o1",
        "forget o0",
        "reclaim 1024 s0",
        "refuse 512 s0 limit",
        "refuse 512 s0 p1 segment",
        "reclaim 7 s0 p1",
        "refuse 0 s0 p1 driver",
        "refuse 512 s0 p1 driver \"kv \\\"cache\\\"\"",
    ];
    let text = format!("symmalloc-trace 1\n{}\nend 12\n", lines.join("\n"));
    let trace = Trace::parse(&text).expect("the text should be valid");
    assert_eq!(Trace::parse(&trace.to_text()).expect("the text should be valid"), trace);
    let written: Vec<String> = trace.records().iter().map(|record| RecordLine(record).to_string()).collect();
    assert_eq!((&written[2..], written.len()), (&lines.map(String::from)[2..], 12));
    let wrong = |line: &str| {
        let text = format!("symmalloc-trace 1\nstream s0\nobserve o0 p0\nforget o0\n{line}\nend 4\n");
        Trace::parse(&text).expect_err("wrong").to_string()
    };
    for (line, says) in [
        ("observe o2 p0", "the next one must be o1"),
        ("observe o1 p1", "p1 does not exist"),
        ("acknowledge o0", "o0 is not registered"),
        ("forget o7", "o7 is not registered"),
        ("forget p0", "an observer: o0, o1"),
        ("refuse 1 s0", "limit, segment or driver"),
        ("refuse 1 s0 disk", "limit, segment or driver"),
        ("reclaim 1 s1", "s1 is not registered"),
        ("reclaims 1 s0", "did you mean `reclaim`"),
    ] {
        assert!(wrong(line).contains(says), "{line}: {}", wrong(line));
    }
}

/// A trace with a stream beyond the last id could be written, but not read back.
#[test]
fn streams_without_an_id_are_not_written() {
    let register = |stream| Op::register(StreamId(stream)).into();
    let trace = Trace::new(None, (0..=StreamId::MAX.0).map(register).collect()).expect("every stream has an id");
    assert_eq!(Trace::parse(&trace.to_text()).expect("the write should succeed"), trace);
    let (_, mut records) = trace.into_parts();
    records.push(register(u16::MAX));
    let error = Trace::new(None, records).expect_err("there is no such id");
    assert!(matches!(error, TraceWriteError::Inconsistent { record: 65_535, source: Inconsistency::TooManyStreams }));
}

/// Compressed, a gigabyte of line breaks takes a megabyte, and reading it took 16 seconds.
#[test]
fn texts_of_blank_lines_and_comments_are_refused() {
    let blank = |lines: usize, line: &str| format!("{BEGINNING}{}end 5\n", line.repeat(lines));
    for line in ["\n", "#\n", " \r\n", "\t# a comment\n"] {
        assert!(Trace::parse(&blank(1 << 20, line)).is_ok(), "{line:?}");
        let refused = Trace::parse(&blank((1 << 20) + 1000, line));
        assert!(matches!(refused, Err(TraceError::Line(LineError::Empty { .. }))), "{line:?}");
    }
    let commented = format!("{BEGINNING}{}end 200005\n", "sync\n#\n#\n#\n#\n#\n#\n".repeat(200_000));
    assert!(Trace::parse(&commented).is_ok(), "a few comments for each record are fine");
}
