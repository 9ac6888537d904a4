//! Tests of each error and its line, and of almost valid text.

use super::line::KEYWORDS;
use super::*;
use proptest::prelude::*;
use symmalloc_core::ids::{SegmentId, StreamId};
use symmalloc_core::op::NAME_BYTES_MAX;
use symmalloc_core::units::SEGMENT_BYTES_MAX;

const HEAD: &str = "symmalloc-layout 1\npool segments:expandable,range_mb:8\ngranularity 2097152\n";
const FIXED: &str = "symmalloc-layout 1\npool segments:fixed\ngranularity 2097152\n";
const RESERVED: &str = "symmalloc-layout 1\npool segments:reserved,segment_mb:4\ngranularity 2097152\n";
const GROUPED: &str = "symmalloc-layout 1\npool streams:grouped\ngranularity 2097152\n";
const SHARED: &str = "symmalloc-layout 1\npool streams:shared\ngranularity 2097152\n";
const HEAP: &str = "heap s1 7 00000000000000aF 3\n";
const BLOCK: &str = "segment 0 large\nmemory 0 2097152\na 512 1024 1000 s1\n";

/// Returns the error of a text whose last line is wrong.
fn error_of(parts: &[&str]) -> String {
    let text = parts.concat();
    let line = text.lines().count();
    let error = parse(&text).expect_err("the text is invalid").to_string();
    let error = error.strip_prefix(&format!("line {line}")).unwrap_or_else(|| panic!("not line {line}: {error}"));
    error.trim_start_matches([':', ' ', ',']).to_owned()
}

fn contradiction(parts: &[&str]) -> Contradiction {
    let text = parts.concat();
    match parse(&text) {
        Err(LayoutTextError::Contradiction { line, source }) => {
            assert_eq!(line, text.lines().count() as u64, "{source}");
            source
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_written_layout_reads_back() {
    let text = [HEAD, HEAP, BLOCK, "u s0\nu s3 # used by both\n\na 2096640 512 1 s1 \"last\"\r\nend 9\n"].concat();
    let layout = parse(&text).expect("the layout should be valid");
    let heap = &layout.heaps()[0];
    assert_eq!((heap.group.stream(), heap.digest.ops, heap.digest.value), (Some(StreamId(1)), 7, 0xaf));
    let [first, last] = &heap.segments[0].allocations[..] else { panic!("{layout:?}") };
    assert_eq!(first.used_by[..], [StreamId(0), StreamId(3)]);
    assert_eq!((last.name.as_deref(), last.offset_bytes + last.size_bytes), (Some("last"), 2 << 20));
    assert_eq!((layout.reserved_bytes(), layout.allocation_count()), (2 << 20, 2));
    let canonical = to_text(&layout);
    assert_eq!(parse(&canonical).expect("a written layout can be read"), layout);
    assert_eq!(parse(canonical.trim_end()).expect("the last line break is optional"), layout);
}

#[test]
fn other_files_are_not_layouts() {
    for text in ["", "\n", "symmalloc-trace 1\n", "symmalloc-layout\n", "symmalloc-layout x\n", "\x1f\u{8b}\n"] {
        assert!(matches!(parse(text), Err(LayoutTextError::WrongFormat)), "{text:?}");
    }
    let newer = parse("symmalloc-layout 2\n");
    assert!(matches!(newer, Err(LayoutTextError::UnsupportedVersion { found: 2 })));
    let longer = read(&vec![b'x'; 1 << 20][..]);
    assert!(matches!(longer, Err(LayoutTextError::WrongFormat)));
}

#[test]
fn a_text_that_ends_early_is_torn() {
    let text = [HEAD, HEAP, BLOCK, "end 6\n"].concat();
    parse(&text).expect("the recording should be complete");
    for end in "symmalloc-layout 1".len()..text.len() - 1 {
        let torn = parse(&text[..end]);
        assert!(matches!(torn, Err(LayoutTextError::Torn { .. })), "{end} bytes: {torn:?}");
    }
    let lost = parse(&text.replace("segment 0 large\nmemory 0 2097152\na 512 1024 1000 s1\n", ""));
    assert!(matches!(lost, Err(LayoutTextError::WrongCount { line: 5, stated: 6, lines: 3 })), "{lost:?}");
    let after = parse(&(text + "\n# a comment\nend 6\n"));
    assert!(matches!(after, Err(LayoutTextError::AfterEnd { line: 11 })), "{after:?}");
}

#[test]
fn an_invalid_line_is_reported_with_the_expected_syntax() {
    assert_eq!(
        error_of(&[HEAD, "heaps s0\n"]),
        format!("column 1: unknown keyword, did you mean `heap`?; the keywords are {}", KEYWORDS.join(", "))
    );
    assert_eq!(
        error_of(&[HEAD, "heap q\n"]),
        "column 6: expected a stream (s0, s1, ...), a group (s0+, s1+, ...), or `shared`"
    );
    assert_eq!(error_of(&[HEAD, "heap s0 1 af 0\n"]), "column 11: expected a digest: 16 hexadecimal digits");
    assert_eq!(error_of(&[HEAD, HEAP, "segment 0 big\n"]), "column 11: expected a class of segments: small or large");
    assert_eq!(
        error_of(&[HEAD, HEAP, "segment 0 large 0 1\n"]),
        "column 19: the line is complete before this; remove the rest or comment it out with #"
    );
    assert_eq!(
        error_of(&[HEAD, HEAP, "segment 4294967296 large\n"]),
        "column 9: the number is too large; the largest here is 4294967295"
    );
    for (parts, expected) in [
        (&["symmalloc-layout 1\ngranularity 512\n"][..], "`pool`"),
        (&["symmalloc-layout 1\npool\nheap s0 1 00000000000000af 0\n"], "`granularity`"),
        (&[HEAD, "segment 0 large\n"], "`heap`"),
        (&[HEAD, HEAP, "memory 0 2097152\n"], "`segment`"),
        (&[HEAD, HEAP, "segment 0 large\n", "a 0 512 1 s1\n"], "`memory`"),
        (&[HEAD, HEAP, "segment 0 large\nmemory 0 2097152\n", "u s1\n"], "`a`"),
        (&[HEAD, HEAP, BLOCK, "memory 4194304 2097152\n"], "`a`, `u`, `segment`, `heap` or `end`"),
        (&[HEAD, "total_limit 1\n", "total_limit 1\n"], "`heap`, or a part of one"),
        (&[HEAD, "pool\n"], "`heap`, or a part of one"),
    ] {
        assert_eq!(error_of(parts), format!("misplaced; expected {expected}"));
    }
}

#[test]
fn impossible_layouts_are_refused() {
    use Contradiction::*;
    assert_eq!(contradiction(&["symmalloc-layout 1\npool\n", "granularity 513\n"]), Granularity);
    assert_eq!(contradiction(&[HEAD, "heap shared 1 00000000000000af 0\n"]), HeapPolicy);
    assert_eq!(contradiction(&[SHARED, HEAP]), HeapPolicy);
    assert_eq!(contradiction(&[SHARED, &HEAP.replace("s1", "shared"), &HEAP.replace("s1", "shared")]), HeapPolicy);
    assert_eq!(contradiction(&[HEAD, HEAP, HEAP]), HeapOutOfOrder { stream: StreamId(1) });
    let group = HEAP.replace("s1", "s1+");
    assert_eq!(contradiction(&[GROUPED, HEAP]), HeapPolicy);
    assert_eq!(contradiction(&[HEAD, &group]), HeapPolicy);
    assert_eq!(contradiction(&[SHARED, &group]), HeapPolicy);
    assert_eq!(contradiction(&[GROUPED, &group, &group]), HeapOutOfOrder { stream: StreamId(1) });
    assert_eq!(contradiction(&[HEAD, "heap s1 0 00000000000000af 0\n"]), FreshHeap);
    assert!(matches!(contradiction(&[HEAD, &format!("heap s1 {} 00000000000000af 0\n", u64::MAX)]), TooManyOps { .. }));
    assert!(matches!(contradiction(&[HEAD, &HEAP.replace(" 3", " 4294967295")]), TooManySegments { .. }));

    let id = SegmentId;
    assert_eq!(contradiction(&[HEAD, HEAP, BLOCK, "segment 0 large\n"]), SegmentOutOfOrder { segment: id(0) });
    assert_eq!(contradiction(&[HEAD, HEAP, "segment 3 large\n"]), SegmentNotBorn { segment: id(3), next: id(3) });
    assert_eq!(contradiction(&[HEAD, HEAP, "segment 0 small\n"]), SegmentClass { segment: id(0) });
    let whole = "segment 0 large\nmemory 0 4194304\n";
    assert_eq!(contradiction(&[RESERVED, HEAP, whole, "segment 1 large\n"]), SecondSegment);
    let empty = ["segment 1 large\n", "segment 2 large\n"];
    assert_eq!(contradiction(&[HEAD, HEAP, empty[0], empty[1]]), NoMemory { segment: id(1) });
    assert_eq!(contradiction(&[HEAD, HEAP, empty[0], "end 4\n"]), NoMemory { segment: id(1) });

    let segment = [HEAD, HEAP, "segment 0 large\n"].concat();
    for memory in ["memory 0 0\n", "memory 512 2097152\n", "memory 0 2097153\n"] {
        assert_eq!(contradiction(&[&segment, memory]), MemoryGranule);
    }
    for memory in ["memory 2097152 2097152\n", "memory 0 2097152\n"] {
        assert_eq!(contradiction(&[&segment, "memory 0 2097152\n", memory]), MemoryOutOfOrder);
    }
    let range = MemoryOutOfRange { expected_bytes: 8 << 20 };
    for memory in ["memory 0 10485760\n", "memory 8388608 2097152\n", "memory 18446744073707454464 2097152\n"] {
        assert_eq!(contradiction(&[&segment, memory]), range);
    }
    let fixed = MemoryOutOfRange { expected_bytes: SEGMENT_BYTES_MAX };
    assert_eq!(contradiction(&[FIXED, HEAP, "segment 0 small\n", "memory 2097152 2097152\n"]), fixed);
    let reserved = MemoryOutOfRange { expected_bytes: 4 << 20 };
    assert_eq!(contradiction(&[RESERVED, HEAP, "segment 0 large\n", "memory 0 2097152\n"]), reserved);

    let memory = [&segment, "memory 0 2097152\nmemory 4194304 2097152\n"].concat();
    for unaligned in ["a 1 512 1 s1\n", "a 0 100 1 s1\n", "a 0 0 1 s1\n"] {
        assert_eq!(contradiction(&[&memory, unaligned]), Unaligned);
    }
    assert_eq!(contradiction(&[&memory, "a 0 1024 1 s1\n", "a 512 512 1 s1\n"]), AllocationOutOfOrder);
    for outside in
        ["a 2097152 512 1 s1\n", "a 2096640 1024 1 s1\n", "a 6291456 512 1 s1\n", "a 0 18446744073709551104 1 s1\n"]
    {
        assert_eq!(contradiction(&[&memory, outside]), AllocationOutside, "{outside}");
    }
    for request in ["a 0 512 0 s1\n", "a 0 512 513 s1\n"] {
        assert_eq!(contradiction(&[&memory, request]), Request { size_bytes: 512 });
    }
    assert_eq!(contradiction(&[&memory, "a 0 512 1 s0\n"]), DifferentStream { stream: StreamId(0) });
    for user in [1, 2] {
        let users = format!("a 0 512 1 s1\n{}", ["u s2\n", ""][usize::from(user == 1)]);
        let stream = StreamId(user);
        assert_eq!(contradiction(&[&memory, &users, &format!("u {stream}\n")]), UserOutOfOrder { stream });
    }
    let name = "x".repeat(NAME_BYTES_MAX + 1);
    let long = format!("a 0 512 1 s1 \"{name}\"\n");
    assert_eq!(contradiction(&[&memory, &long]), NameTooLong { bytes: NAME_BYTES_MAX + 1 });
}

/// Generates almost valid lines, which reach deeper code than random characters.
fn nearly_a_layout() -> impl Strategy<Value = String> {
    let field = prop_oneof![
        "[a-z]{1,11}",
        "s[0-3]",
        "[0-9]{1,22}",
        Just("shared".to_owned()),
        Just("s1+".to_owned()),
        Just("large".to_owned()),
        Just("small".to_owned()),
        (0..4_u64).prop_map(|granules| (granules << 21).to_string()),
        (0..9_u64).prop_map(|units| (units << 9).to_string()),
        Just("00000000000000ff".to_owned()),
        "\"[^\n]{0,6}\"?",
    ];
    let keyword = prop::sample::select(KEYWORDS);
    let line = (keyword, prop::collection::vec(field, 0..6))
        .prop_map(|(word, fields)| format!("{word} {}\n", fields.join(" ")));
    let right = prop::sample::select(vec![HEAP, BLOCK, "u s2\n", "memory 4194304 2097152\n", "segment 1 large\n"]);
    let lines = prop::collection::vec(prop_oneof![2 => right.prop_map(str::to_owned), 1 => line], 0..9);
    (prop::sample::select(vec![HEAD, FIXED, RESERVED, GROUPED, SHARED]), lines).prop_map(|(head, lines)| {
        let count = 2 + lines.iter().map(|line| line.lines().count()).sum::<usize>();
        format!("{head}{}end {count}\n", lines.concat())
    })
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&bytes[..]).is_err(), "no random bytes are a layout");
    }

    /// Any accepted text has one canonical form, which reads back as the same layout.
    #[test]
    fn almost_valid_text_never_panics(text in nearly_a_layout()) {
        if let Ok(layout) = parse(&text) {
            let text = to_text(&layout);
            let again = parse(&text).expect("a written layout can be read");
            prop_assert_eq!(to_text(&again), text);
            prop_assert_eq!(again, layout);
        }
    }
}
