//! Tests of configuration texts: round trips, PyTorch's semantics, and the offsets of errors.

use proptest::prelude::*;
use symmalloc_core::config::*;
use symmalloc_core::config_text::*;
use symmalloc_core::units::MIB;

/// FNV-1a hash of the canonical text of [`Config::default`].
const DEFAULT_DIGEST: u64 = 0xd282_16fe_c351_a7c6;

fn pool(text: &str) -> PoolConfig {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn pool_error(text: &str) -> ConfigTextError {
    text.parse::<PoolConfig>().expect_err(text)
}

fn pytorch(text: &str) -> PyTorchConfig {
    Config::from_pytorch_text(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn fixed(config: &PoolConfig) -> &FixedSegments {
    match config.segments() {
        SegmentPolicy::Fixed(fixed) => fixed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_empty_text_is_the_default() {
    assert_eq!(pool(""), PoolConfig::default());
    assert_eq!(pool("  "), PoolConfig::default());
    assert_eq!("".parse(), Ok(Config::default()));
}

#[test]
fn the_canonical_text_states_every_value() {
    assert_eq!(
        Config::default().to_string(),
        "segments:expandable,range_mb:524288,growth_mb:2,streams:separate,symmetric:false,reclaim:heap,\
         retries_max:3,pointer_lookup:off,history_ops:4096"
    );
    assert_eq!(
        pool("segments:reserved, segment_bytes:67109376, symmetric:True, release_threshold_mb:0, limit_mb:8")
            .to_string(),
        "segments:reserved,segment_bytes:67109376,streams:separate,symmetric:true,limit_mb:8,release_threshold_mb:0,\
         reclaim:heap"
    );
    assert_eq!(
        pool("max_split_size_mb:128,segments:fixed,streams:shared,reclaim:pool,").to_string(),
        "segments:fixed,large_segment_size_mb:20,max_split_size_mb:128,max_non_split_rounding_mb:20,streams:shared,\
         symmetric:false,reclaim:pool"
    );
}

#[test]
fn the_allocators_keys_and_the_default_pools_keys_are_separate() {
    let config: Config = "total_limit_mb:4096,limit_mb:1024,retries_max:0,pointer_lookup:exact"
        .parse()
        .expect("the text should be valid");
    assert_eq!(config.total_limit_bytes(), Some(4096 * MIB));
    assert_eq!(config.default_pool().limit_bytes(), Some(1024 * MIB));
    assert_eq!(config.retries_max(), 0);
    assert_eq!(config.pointer_lookup(), PointerLookup::Exact);
    for text in ["total_limit_mb:4096", "retries_max:1", "pointer_lookup:off", "history_ops:0"] {
        assert!(
            matches!(pool_error(text), ConfigTextError::Refused { offset: 0, reason: KeyRefusal::WholeAllocator, .. }),
            "{text}"
        );
    }
}

#[test]
fn a_text_for_pytorch_has_pytorchs_defaults() {
    let empty = pytorch("");
    assert_eq!(fixed(empty.config.default_pool()), &FixedSegments::default());
    let expandable = pytorch("expandable_segments:True");
    assert_eq!(expandable.config.default_pool(), &PoolConfig::default());
    let typical =
        pytorch("backend:native, max_split_size_mb:512 ,max_non_split_rounding_mb:64,expandable_segments:False");
    assert_eq!(fixed(typical.config.default_pool()).max_split_size_bytes, Some(512 * MIB));
    assert_eq!(fixed(typical.config.default_pool()).max_non_split_rounding_bytes, 64 * MIB);
    assert_eq!(typical.ignored, []);
}

#[test]
fn unsplit_rounding_follows_the_large_segment_as_in_pytorch() {
    let config = pytorch("large_segment_size_mb:32").config;
    assert_eq!(fixed(config.default_pool()).large_segment_bytes, 32 * MIB);
    assert_eq!(fixed(config.default_pool()).max_non_split_rounding_bytes, 32 * MIB);
}

#[test]
fn a_text_for_pytorch_may_repeat_keys_and_the_last_counts() {
    let config = pytorch("max_split_size_mb:32,max_split_size_mb:64").config;
    assert_eq!(fixed(config.default_pool()).max_split_size_bytes, Some(64 * MIB));
    match pool_error("segments:fixed,max_split_size_mb:32,max_split_size_bytes:67108864") {
        ConfigTextError::Duplicate { offset: 36, key: "max_split_size_bytes", first: 15 } => {}
        other => panic!("{other}"),
    }
}

#[test]
fn settings_without_effect_are_listed_for_pytorch_and_refused_otherwise() {
    let text = "expandable_segments:True,large_segment_size_mb:12,graph_capture_record_stream_reuse:True,\
                expandable_segments_reserve_by_class:[a:0.25,b:40G],per_process_memory_fraction:0.8,throw_on_cudamalloc_oom:True";
    let listed = pytorch(text);
    assert_eq!(listed.config.default_pool(), &PoolConfig::default());
    let ignored: Vec<_> = listed.ignored.iter().map(|ignored| (ignored.key, ignored.reason)).collect();
    assert_eq!(
        ignored,
        [
            ("large_segment_size_mb", IgnoredReason::WrongSegments),
            ("graph_capture_record_stream_reuse", IgnoredReason::NotPlacement),
            ("expandable_segments_reserve_by_class", IgnoredReason::DeviceFraction),
            ("per_process_memory_fraction", IgnoredReason::DeviceFraction),
            ("throw_on_cudamalloc_oom", IgnoredReason::DeviceTotal),
        ]
    );
    for ignored in &listed.ignored {
        assert!(text[ignored.offset..].starts_with(ignored.key));
    }
    assert!(matches!(
        pool_error("pinned_use_background_threads:True"),
        ConfigTextError::Refused { offset: 0, reason: KeyRefusal::NoEffect(IgnoredReason::NotPlacement), .. }
    ));
    assert!(matches!(
        pool_error("segments:expandable,max_split_size_mb:64"),
        ConfigTextError::WrongSegments { offset: 20, key: "max_split_size_mb", segments: "fixed" }
    ));
}

#[test]
fn settings_that_would_make_ranks_differ_are_refused() {
    for text in ["garbage_collection_threshold:0.8", "backend:cudaMallocAsync"] {
        let strict = pool_error(text);
        assert!(matches!(strict, ConfigTextError::Refused { offset: 0, .. }), "{strict}");
        assert_eq!(Config::from_pytorch_text(text), Err(strict));
    }
}

#[test]
fn rounding_has_pytorchs_index_rule() {
    let divisions =
        |text: &str| pool(&format!("roundup_power2_divisions:{text}")).roundup_power2_divisions().divisions();
    assert_eq!(divisions("4"), [4; 16]);
    assert_eq!(divisions("0"), [0; 16]);
    assert_eq!(divisions("[>:2]"), [2; 16]);
    // The first entry also covers smaller sizes, `>` covers all sizes after the last one, and an entry beyond the table
    // applies to its end.
    assert_eq!(divisions("[256:1,512:2,1024:4,>:8]"), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]);
    assert_eq!(divisions("[ 64:8, 256:4 ]"), [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(divisions("[131072:2]"), [2; 16]);
    assert_eq!(divisions("[1:2,32768:4,>:8]"), [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4]);
    assert_eq!(divisions("[]"), [0; 16]);
    let text = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
    assert!(pool(text).to_string().ends_with(text), "the canonical list is the shortest");
}

#[test]
fn wrong_rounding_is_located() {
    let cases = [
        ("3", 25),
        ("[256:3]", 30),
        ("[100:2]", 26),
        ("[0:2]", 26),
        ("[256]", 26),
        ("[256:]", 30),
        ("[a:1]", 26),
        ("[256:1,,512:2]", 32),
        ("x", 25),
    ];
    for (value, expected) in cases {
        match pool_error(&format!("roundup_power2_divisions:{value}")) {
            ConfigTextError::Value { offset, key: "roundup_power2_divisions", .. } => {
                assert_eq!(offset, expected, "{value}");
            }
            other => panic!("{value}: {other}"),
        }
    }
}

#[test]
fn a_misspelt_key_names_the_nearest() {
    match pool_error("symmetric:true, max_split_sise_mb:64") {
        ConfigTextError::UnknownKey { offset: 16, bytes: 17, nearest: Some("max_split_size_mb") } => {}
        other => panic!("{other}"),
    }
    let message = pool_error("segmnt:fixed").to_string();
    assert!(message.contains("did you mean `segment") && message.contains("pointer_lookup"), "{message}");
}

#[test]
fn wrong_punctuation_is_located() {
    let cases = [
        ("segments", 8),
        ("segments fixed", 14),
        ("segments,symmetric:true", 8),
        ("segments:", 9),
        ("segments:,symmetric:true", 9),
        ("segments:fixed:fixed", 14),
        (",segments:fixed", 0),
        ("symmetric:true,,segments:fixed", 15),
        (":fixed", 0),
        ("roundup_power2_divisions:[1:2", 29),
        ("roundup_power2_divisions:[1:2]symmetric:true", 30),
        ("segments[fixed]", 8),
    ];
    for (text, expected) in cases {
        match pool_error(text) {
            ConfigTextError::Expected { offset, .. } => assert_eq!(offset, expected, "{text}"),
            other => panic!("{text}: {other}"),
        }
    }
}

#[test]
fn wrong_values_are_located() {
    let cases = [
        ("segments:growing", 9),
        ("symmetric:1", 10),
        ("symmetric:TRUE", 10),
        ("streams:[shared]", 8),
        ("limit_mb:-1", 9),
        ("limit_mb:4 GiB", 9),
        ("limit_mb:1.5", 9),
        ("backend:other", 8),
    ];
    for (text, expected) in cases {
        match pool_error(text) {
            ConfigTextError::Value { offset, .. } => assert_eq!(offset, expected, "{text}"),
            other => panic!("{text}: {other}"),
        }
    }
    assert!(matches!(
        pool_error("limit_mb:17592186044416"),
        ConfigTextError::NumberTooLarge { offset: 9, key: "limit_mb", max: 17_592_186_044_415 }
    ));
    assert!(matches!(
        pool_error("limit_bytes:99999999999999999999"),
        ConfigTextError::NumberTooLarge { max: u64::MAX, .. }
    ));
}

#[test]
fn values_out_of_range_name_the_key_and_the_range() {
    let cases = [
        ("segments:fixed,max_split_size_mb:19", 15, "max_split_size"),
        ("segments:fixed,large_segment_size_mb:10", 15, "large_segment_size"),
        ("symmetric:true,growth_bytes:100", 15, "growth"),
        ("range_mb:1", 0, "range"),
        ("segments:reserved,segment_bytes:0", 18, "segment"),
    ];
    for (text, expected_offset, expected_key) in cases {
        match pool_error(text) {
            ConfigTextError::OutOfRange { offset, source: ConfigError::OutOfRange { key, .. } } => {
                assert_eq!((offset, key), (expected_offset, expected_key), "{text}");
            }
            other => panic!("{text}: {other}"),
        }
    }
    assert!(matches!(
        "retries_max:1001".parse::<Config>(),
        Err(ConfigTextError::OutOfRange { offset: 0, source: ConfigError::OutOfRange { max: 1000, .. } })
    ));
    assert!(matches!(
        pool_error("segments:fixed,large_segment_size_mb:21"),
        ConfigTextError::OutOfRange { offset: 15, source: ConfigError::NotAMultiple { .. } }
    ));
}

#[test]
fn contradictions_about_segments_are_refused() {
    assert!(matches!(
        pool_error("segments:fixed,expandable_segments:True"),
        ConfigTextError::Contradiction { offset: 15 }
    ));
    assert!(matches!(
        pool_error("segments:expandable,expandable_segments:False"),
        ConfigTextError::Contradiction { offset: 20 }
    ));
    assert_eq!(pool("segments:expandable,expandable_segments:True"), PoolConfig::default());
    assert!(matches!(
        pool_error("symmetric:true,segments:reserved"),
        ConfigTextError::MissingSegmentSize { offset: 15 }
    ));
    assert!(matches!(pool_error("segment_mb:64"), ConfigTextError::WrongSegments { segments: "reserved", .. }));
}

#[test]
fn the_digest_is_fnv_1a_of_the_canonical_text() {
    // Computed independently. A change makes ranks of different versions reject each other.
    assert_eq!(Config::default().digest(), DEFAULT_DIGEST);
    let other: Config = "symmetric:true".parse().expect("the text should be valid");
    assert_ne!(other.digest(), DEFAULT_DIGEST);
}

fn any_segments() -> impl Strategy<Value = SegmentPolicy> {
    let fixed = (6..40_u64, prop::option::of(0..1_u64 << 34), 0..1_u64 << 30).prop_map(|(large, split, rounding)| {
        let large_segment_bytes = large * 2 * MIB;
        let mut fixed = FixedSegments::default();
        fixed.max_split_size_bytes = split.map(|split| large_segment_bytes + split);
        fixed.max_non_split_rounding_bytes = rounding;
        fixed.large_segment_bytes = large_segment_bytes;
        SegmentPolicy::Fixed(fixed)
    });
    let expandable = (1..8192_u64, 4096..65536_u64).prop_map(|(growth, steps)| {
        let growth_bytes = growth * 512;
        let mut expandable = ExpandableSegments::default();
        (expandable.range_bytes, expandable.growth_bytes) = (growth_bytes * steps, growth_bytes);
        SegmentPolicy::Expandable(expandable)
    });
    let reserved = (1..1_u64 << 31).prop_map(|units| SegmentPolicy::Reserved { segment_bytes: units * 512 });
    prop_oneof![fixed, expandable, reserved]
}

fn any_config() -> impl Strategy<Value = Config> {
    let divisions = prop_oneof![
        (0..5_u32).prop_map(|power| [(1 << power) & !1; 16]),
        prop::array::uniform16((0..5_u32).prop_map(|power| (1 << power) & !1)),
        (0..16_usize, 0..16_usize).prop_map(|(from, to)| {
            let mut divisions = [2; 16];
            divisions[from.min(to)..from.max(to)].fill(0);
            divisions
        }),
    ];
    let choices = (any::<bool>(), any::<bool>(), 0..3_usize, 0..3_usize, 0..1001_u32, 0..(1_u32 << 24) + 1);
    let limits =
        prop::array::uniform3(prop::option::of(prop_oneof![any::<u64>(), (0..1_u64 << 20).prop_map(|mb| mb * MIB)]));
    (any_segments(), divisions, choices, limits).prop_map(
        |(segments, divisions, (shared, symmetric, reclaim, lookup, retries, history), [limit, threshold, total])| {
            let pool = PoolConfig::builder()
                .segments(segments)
                .streams(if shared { StreamPolicy::Shared } else { StreamPolicy::Separate })
                .symmetric(symmetric)
                .limit_bytes(limit)
                .release_threshold_bytes(threshold)
                .reclaim([Reclaim::Never, Reclaim::Heap, Reclaim::Pool][reclaim])
                .roundup_power2_divisions(RoundupPower2Divisions::per_size(divisions).expect("powers of two"))
                .build()
                .expect("every value should be in its range");
            Config::builder()
                .default_pool(pool)
                .total_limit_bytes(total)
                .retries_max(retries)
                .history_ops(history)
                .pointer_lookup([PointerLookup::Off, PointerLookup::Exact][lookup % 2])
                .build()
                .expect("every value should be in its range")
        },
    )
}

proptest! {
    #[test]
    fn every_configuration_survives_a_round_trip_through_its_text(config in any_config()) {
        let text = config.to_string();
        let back: Config = text.parse().expect("the canonical text is valid");
        prop_assert_eq!(&back, &config);
        prop_assert_eq!(back.to_string(), text.clone());
        prop_assert_eq!(back.digest(), config.digest());
        let pool_text = config.default_pool().to_string();
        prop_assert_eq!(&pool_text.parse::<PoolConfig>().expect("the text should be valid"), config.default_pool());
        let env = Config::from_pytorch_text(&text).expect("the PyTorch dialect accepts the canonical text");
        prop_assert_eq!(&env.config, &config);
        prop_assert!(env.ignored.is_empty());
    }

    #[test]
    fn configurations_with_equal_digests_are_equal(a in any_config(), b in any_config()) {
        prop_assert_eq!(a.digest() == b.digest(), a == b);
    }

    /// Neither parser panics, accepted texts survive a round trip, and errors are located inside the text.
    #[test]
    fn arbitrary_text_is_parsed_or_the_error_is_located(text in "([a-z_]{0,6}|segments|fixed|limit_mb|roundup_power2_divisions|[0-9]{1,21}|[:,>]|\\[|\\]| |é){0,12}") {
        match text.parse::<Config>() {
            Ok(config) => prop_assert_eq!(config.to_string().parse(), Ok(config)),
            Err(error) => prop_assert!(offset(&error) <= text.len(), "{}", error),
        }
        if let Err(error) = Config::from_pytorch_text(&text) {
            prop_assert!(offset(&error) <= text.len(), "{}", error);
        }
    }
}

fn offset(error: &ConfigTextError) -> usize {
    match *error {
        ConfigTextError::UnknownKey { offset, .. }
        | ConfigTextError::Refused { offset, .. }
        | ConfigTextError::Duplicate { offset, .. }
        | ConfigTextError::Expected { offset, .. }
        | ConfigTextError::Value { offset, .. }
        | ConfigTextError::NumberTooLarge { offset, .. }
        | ConfigTextError::WrongSegments { offset, .. }
        | ConfigTextError::Contradiction { offset }
        | ConfigTextError::MissingSegmentSize { offset }
        | ConfigTextError::OutOfRange { offset, .. } => offset,
        _ => panic!("{error}"),
    }
}

const KNOWN: [&str; 3] = ["max_split_size_mb", "segments", "a"];

#[test]
fn a_typo_finds_the_nearest_word() {
    assert_eq!(nearest("max_split_size", KNOWN), Some("max_split_size_mb"));
    assert_eq!(nearest("segmets", KNOWN), Some("segments"));
    assert_eq!(nearest("segment", KNOWN), Some("segments"));
}

#[test]
fn an_unrelated_word_finds_nothing() {
    assert_eq!(nearest("garbage", KNOWN), None);
    assert_eq!(nearest("b", KNOWN), None);
    assert_eq!(nearest("", KNOWN), None);
    assert_eq!(nearest(&"segments".repeat(1000), KNOWN), None);
}

#[test]
fn a_base_is_the_only_value_with_a_colon() {
    let pool = |text: &str| text.parse::<PoolConfig>().expect(text);
    let base = pool("base:slot:3 , streams:shared").base().expect("a base");
    assert_eq!(base.address(), 0x1300_0000_0000);
    assert_eq!(pool("streams:shared,base:0x130000000000").base(), Some(base), "the same base has one value");
    for text in ["base:slot:3", "base:0x200040000000,segments:fixed", "base:slot:63,range_mb:524288"] {
        let read = pool(text);
        assert_eq!(pool(&read.to_string()), read, "{text}");
    }
    // A slot holds sixteen default ranges, and the program may choose another size.
    let range_mb = |text: &str| match pool(text).segments() {
        SegmentPolicy::Expandable(expandable) => expandable.range_bytes >> 20,
        other => panic!("{other:?}"),
    };
    assert_eq!(["base:slot:0", "base:slot:0,range_mb:524288", ""].map(range_mb), [65_536, 524_288, 524_288]);
    let built = PoolConfig::builder().base(base).build().expect("valid");
    assert_eq!(built, pool("base:slot:3"));
    assert_ne!(built.digest(), pool("base:slot:4").digest());
    for (text, error) in [
        ("base:slot", "byte 5: a base must be slot:N, or a hexadecimal address such as 0x200000000000"),
        ("base:slot:1:2", "byte 5: a base must be slot:N, or a hexadecimal address such as 0x200000000000"),
        ("base:", "byte 5: expected a value"),
        ("base:[slot:1]", "byte 5: a base must be slot:N, or a hexadecimal address such as 0x200000000000"),
        ("streams:shared:1", "byte 14: expected a comma"),
        ("base:slot:1,base:slot:2", "byte 12: base is already set at byte 0; keep one of the two"),
    ] {
        assert_eq!(text.parse::<PoolConfig>().expect_err(text).to_string(), error, "{text}");
    }
}
