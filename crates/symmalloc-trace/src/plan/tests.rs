//! Tests of each error and its line, of almost valid text, and of round trips.

use super::line::KEYWORDS;
use super::*;
use proptest::prelude::*;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{HeapId, PoolId, StreamGroup, StreamId};
use symmalloc_core::plans::{Plan, PlannedAllocation, StepAllocation};

const HEAD: &str = "symmalloc-plan 1\nconfig streams:shared\n";
const PLAN: &str = "plan p0 shared key 0 allocations 2\na 1000 s0 2 @0\na 512 s1 2 @1024\n";

/// Returns the error of a text whose last line is wrong.
fn error_of(parts: &[&str]) -> String {
    let text = parts.concat();
    let line = text.lines().count();
    let error = parse(&text).expect_err("the text is invalid").to_string();
    let error = error.strip_prefix(&format!("line {line}")).unwrap_or_else(|| panic!("not line {line}: {error}"));
    error.trim_start_matches([':', ' ', ',']).to_owned()
}

fn contradiction(parts: &[&str], wanted_line: u64) -> PlanContradiction {
    match parse(&parts.concat()) {
        Err(PlanTextError::Contradiction { line, source }) => {
            assert_eq!(line, wanted_line, "{source}");
            source
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_written_plan_reads_back() {
    let text =
        [HEAD, "pool p3 limit_mb:4 # separate\n\n", PLAN, "plan\tp3 s7 key 9 allocations 1\r\na 5 s7 never\nend 7"];
    let file = parse(&text.concat()).expect("the plan should be valid");
    let plans: Vec<(HeapId, &Plan)> = file.plans().collect();
    let [(HeapId { pool: PoolId(0), .. }, shared), (HeapId { pool: PoolId(3), .. }, own)] = plans[..] else {
        panic!("{plans:?}")
    };
    assert_eq!((shared.group().stream(), shared.key(), shared.allocations().len()), (None, 0, 2));
    assert_eq!((own.group().stream(), own.key(), own.allocations()[0].offset_bytes), (Some(StreamId(7)), 9, None));
    assert_eq!(file.plans_of(PoolId(3)).collect::<Vec<_>>(), [own]);
    assert_eq!(file.plans_of(PoolId(1)).count(), 0);
    let written = to_text(&file);
    assert!(written.ends_with("plan p3 s7 key 9 allocations 1\na 5 s7 never\nend 7\n"), "{written}");
    assert_eq!(parse(&written).expect("the plan should be valid"), file);
    assert_eq!(to_text(&parse(&written).expect("the plan should be valid")), written);
}

#[test]
fn other_files_are_not_plans() {
    assert!(matches!(parse(""), Err(PlanTextError::WrongFormat)));
    assert!(matches!(parse("symmalloc-trace 1\nend 0\n"), Err(PlanTextError::WrongFormat)));
    assert!(matches!(read(&[0x1f, 0x8b, 0x08, 0xff][..]), Err(PlanTextError::WrongFormat)));
    assert!(matches!(parse("symmalloc-plan 2\nend 0\n"), Err(PlanTextError::UnsupportedVersion { found: 2 })));
    assert!(matches!(parse("symmalloc-plan 1"), Err(PlanTextError::Torn { line: 1 })));
}

#[test]
fn an_invalid_line_is_reported_with_its_column() {
    for (line, wanted) in [
        ("plane p0 shared key 0 allocations 2", "column 1: unknown keyword, did you mean `plan`?"),
        ("plan s0 shared key 0 allocations 2", "column 6: expected a pool: p0, p1, ..."),
        (
            "plan p0 sh key 0 allocations 2",
            "column 9: expected a stream (s0, s1, ...), a group (s0+, s1+, ...), or `shared`",
        ),
        ("plan p0 shared 0 allocations 2", "column 16: expected `key` and the key of the steps"),
        ("plan p0 shared key 0 2", "column 22: expected `allocations` and their number"),
        ("plan p0 shared key 0 allocations", "column 33: expected the number of allocations"),
        ("a 1 s0", "column 7: expected the number of the allocation before which it is free, or `never`"),
        ("a 1 s0 1 0", "column 10: expected an offset in bytes: @OFFSET"),
        ("a 1 s0 4294967296", "column 8: the number is too large; the largest here is 4294967295"),
        ("a 1 s0 1 @0 0", "column 13: the line is complete before this"),
        ("config segments:no", "column 8: the configuration is not valid"),
    ] {
        let error = error_of(&[HEAD, line, "\n"]);
        assert!(error.starts_with(wanted), "{line}: {error}");
    }
}

#[test]
fn misplaced_lines_are_refused() {
    let settings = "misplaced; expected `config` and the allocator's settings";
    assert_eq!(error_of(&["symmalloc-plan 1\n", "pool p1\n"]), settings);
    assert_eq!(error_of(&["symmalloc-plan 1\n", "end 0\n"]), settings);
    assert_eq!(error_of(&[HEAD, "config\n"]), "misplaced; expected `pool`, `plan` or `end`");
    assert_eq!(error_of(&[HEAD, "a 1 s0 1 @0\n"]), "misplaced; expected `plan` and its heap");
    assert_eq!(error_of(&[HEAD, PLAN, "pool p1\na 1 s0 1 @0\n"]), "misplaced; expected `plan` and its heap");
}

#[test]
fn impossible_plans_are_refused() {
    let pool = PoolId(0);
    let twice = PlanContradiction::PoolTwice { pool };
    assert_eq!(contradiction(&[HEAD, "pool p0\n"], 3), twice);
    assert_eq!(contradiction(&[HEAD, "pool p1\npool p1\n"], 4), PlanContradiction::PoolTwice { pool: PoolId(1) });
    let unknown = PlanContradiction::UnknownPool { pool: PoolId(1) };
    assert_eq!(contradiction(&[HEAD, "plan p1 s0 key 0 allocations 1\na 1 s0 1 @0\nend 3\n"], 3), unknown);
    let twice = PlanContradiction::PlanTwice { heap: HeapId { pool, group: StreamGroup::All }, key: 0 };
    assert_eq!(contradiction(&[HEAD, PLAN, PLAN, "end 7\n"], 6), twice);
    let short = PlanContradiction::Allocations { stated: 2, found: 1 };
    assert_eq!(contradiction(&[HEAD, "plan p0 shared key 0 allocations 2\na 1 s0 1 @0\nend 3\n"], 3), short);
    let error = contradiction(&[HEAD, "plan p0 shared key 0 allocations 0\nend 2\n"], 3).to_string();
    assert!(error.contains("1 to 16777216 allocations, not 0"), "{error}");
    let grouped = "symmalloc-plan 1\nconfig streams:grouped\n";
    let error = contradiction(&[grouped, "plan p0 s1 key 0 allocations 1\na 1 s1 1 @0\nend 3\n"], 3).to_string();
    assert!(error.contains("for the heap of s1, but p0 has `streams:grouped`"), "{error}");
    let error = contradiction(&[HEAD, "plan p0 s1+ key 0 allocations 1\na 1 s1 1 @0\nend 3\n"], 3).to_string();
    assert!(error.contains("for the group of s1, but p0 has `streams:shared`"), "{error}");
    parse(&[grouped, "plan p0 s1+ key 0 allocations 1\na 1 s2 1 @0\nend 3\n"].concat())
        .expect("s2 may be in the group");
    let error = contradiction(&[grouped, "plan p0 s1+ key 0 allocations 1\na 1 s0 1 @0\nend 3\n"], 4).to_string();
    assert!(error.contains("the stream of its heap"), "{error}");
    let error = contradiction(&[HEAD, "plan p0 s1 key 0 allocations 1\na 1 s1 1 @0\nend 3\n"], 3).to_string();
    assert!(error.contains("for the heap of s1, but p0 has `streams:shared`"), "{error}");
    // Each of these lines is the second allocation; the error names its line.
    for line in [
        "a 1 s0 1 @512",
        "a 1 s0 4 @512",
        "a 1 s0 2 @511",
        "a 0 s0 2 @512",
        "a 1 s0 never @512",
        "a 9 s0 2 @1099511627776",
    ] {
        let text = [HEAD, "plan p0 shared key 0 allocations 2\na 1 s0 2 @0\n", line, "\nend 4\n"];
        let error = contradiction(&text, 5).to_string();
        assert!(error.starts_with("allocation 1 of the plan is not valid"), "{line}: {error}");
    }
}

#[test]
fn missing_lines_are_detected() {
    let text = [HEAD, PLAN, "end 4\n"].concat();
    for cut in 0..text.len() - 1 {
        let error = parse(&text[..cut]).expect_err("its end is missing");
        let is_torn =
            matches!(error, PlanTextError::Torn { .. }) || cut < 18 && matches!(error, PlanTextError::WrongFormat);
        assert!(is_torn, "cut at {cut}: {error}");
    }
    let lost = text.replace("a 512 s1 2 @1024\n", "");
    assert!(matches!(parse(&lost), Err(PlanTextError::WrongCount { line: 5, stated: 4, lines: 3 })));
    assert!(matches!(parse(&(text.clone() + "end 4\n")), Err(PlanTextError::AfterEnd { line: 7 })));
    assert!(parse(&(text + "# the rest is silence\n")).is_ok());
}

/// A plan for a stream without an id could be written, but not read back.
#[test]
fn a_stream_without_an_id_has_no_plan() {
    let plan = |stream, shared: bool| {
        let wanted = StepAllocation { stream, requested_bytes: 1, until: None };
        Plan::new(
            0,
            if shared { StreamGroup::All } else { StreamGroup::One(stream) },
            vec![PlannedAllocation { wanted, offset_bytes: None }],
        )
    };
    for shared in [false, true] {
        plan(StreamId::MAX, shared).expect("the last stream");
        let error = plan(StreamId(u16::MAX), shared).expect_err("no stream has this id").to_string();
        assert!(error.contains("the stream of its heap, at most s65534"), "{error}");
    }
}

/// Returns valid allocations for arbitrary numbers.
fn allocations(group: StreamGroup, raw: Vec<(u64, u16, u32, u64)>) -> Vec<PlannedAllocation> {
    let count = raw.len() as u32;
    let allocation = |(number, (size, of, until, offset)): (u32, (u64, u16, u32, u64))| {
        let until = (until % 4 != 0).then(|| number + 1 + until % count);
        let wanted = StepAllocation {
            stream: match group {
                StreamGroup::One(stream) => stream,
                _ => StreamId((of % u16::MAX).max(group.first().unwrap_or_default().0)),
            },
            requested_bytes: 1 + size % (1 << 38),
            until,
        };
        let offset_bytes = until.filter(|_| offset % 5 != 0).map(|_| offset % (1 << 30) * 512);
        PlannedAllocation { wanted, offset_bytes }
    };
    (0..).zip(raw).map(allocation).collect()
}

prop_compose! {
    fn arbitrary_file()(
        shares in any::<[u8; 3]>(),
        limit in prop::option::of(0..1_u64 << 40),
        plans in prop::collection::vec(
            (0..3_u32, any::<u16>(), 0..3_u64, prop::collection::vec(any::<(u64, u16, u32, u64)>(), 1..9)),
            0..6,
        ),
    ) -> PlanFile {
        let policies = [StreamPolicy::Separate, StreamPolicy::Grouped, StreamPolicy::Shared];
        let policy = |pool: usize| policies[usize::from(shares[pool]) % 3];
        let pool = |pool: usize| PoolConfig::builder().streams(policy(pool)).limit_bytes(limit).build().expect("the configuration should be valid");
        let config = Config::builder().default_pool(pool(0)).total_limit_bytes(limit).build().expect("the configuration should be valid");
        let mut file = PlanFile::new(config);
        (1..3).for_each(|id| file.add_pool(PoolId(id), pool(id as usize)).expect("new"));
        for (pool, stream, key, raw) in plans {
            let group = policy(pool as usize).group_of(StreamId(stream % u16::MAX), &Groups::default());
            // A second plan for the same steps is rejected without other effects.
            let _ = file.add_plan(PoolId(pool), Plan::new(key, group, allocations(group, raw)).expect("the plan should be valid"));
        }
        file
    }
}

proptest! {
    #[test]
    fn written_data_reads_back(file in arbitrary_file()) {
        let text = to_text(&file);
        let read = parse(&text).expect("a written plan can be read");
        prop_assert_eq!(to_text(&read), text);
        prop_assert_eq!(read, file);
    }

    /// Words in any order and truncated lines produce an error or a plan, never a panic.
    #[test]
    fn almost_valid_plans_never_panic(
        words in prop::collection::vec((0..9_usize, any::<u64>(), prop::option::of(Just("\n"))), 0..60),
        cut in any::<prop::sample::Index>(),
    ) {
        let word = |(what, number, end): (usize, u64, Option<&str>)| {
            let word = match what {
                0..=4 => KEYWORDS[what].to_owned(),
                5 => format!("s{} {} never", number % 3, number % 9),
                6 => format!("p{} shared key {} allocations 1\na 7 s0 1 @0", number % 3, number % 2),
                7 => format!("@{number}"),
                _ => (number % 4).to_string(),
            };
            word + end.unwrap_or(" ")
        };
        let text = [HEAD, PLAN, &words.into_iter().map(word).collect::<String>()].concat();
        for text in [&text[..], &text[..cut.index(text.len())]] {
            if let Ok(file) = parse(text) {
                prop_assert_eq!(parse(&to_text(&file)).expect("a written plan can be read"), file);
            }
        }
    }
}
