//! Unit tests of `config/size_rules.rs`.

use super::*;
use crate::config::Stitching;
use crate::config::policy::FixedSegments;

fn fixed(knobs: FixedSegments) -> SizeRules {
    let config =
        PoolConfig::builder().segments(SegmentPolicy::Fixed(knobs)).build().expect("the configuration should be valid");
    SizeRules::new(&config, 2 * MIB)
}

#[test]
fn segments_have_pytorchs_sizes() {
    let rules = fixed(FixedSegments::default());
    for (block, segment) in [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ] {
        assert_eq!(bytes(rules.segment_size(units(block))), segment, "for a block of {block} bytes");
    }
}

#[test]
fn a_large_block_is_split_only_when_more_than_a_mebibyte_remains() {
    let rules = fixed(FixedSegments::default());
    let request = units(5 * MIB);
    assert!(!rules.splits(SizeClass::Large, request, request + units(MIB)));
    assert!(rules.splits(SizeClass::Large, request, request + units(MIB) + 1));
    assert!(rules.splits(SizeClass::Small, 1, 2));
}

#[test]
fn oversize_blocks_are_neither_split_nor_given_to_small_requests() {
    let rules = fixed(FixedSegments {
        max_split_size_bytes: Some(64 * MIB),
        max_non_split_rounding_bytes: 20 * MIB,
        ..FixedSegments::default()
    });
    assert!(!rules.accepts(units(63 * MIB), units(64 * MIB)));
    assert!(rules.accepts(units(63 * MIB), units(64 * MIB) - 1));
    assert!(rules.accepts(units(64 * MIB), units(84 * MIB) - 1));
    assert!(!rules.accepts(units(64 * MIB), units(84 * MIB)));
    assert!(!rules.splits(SizeClass::Large, units(64 * MIB), units(80 * MIB)));
}

#[test]
fn an_unsplit_block_is_a_segment_of_whole_granules_and_serves_its_own_size_alone() {
    let rules = fixed(FixedSegments { unsplit: true, ..FixedSegments::default() });
    for (requested, mib) in [(1, 2), (2 * MIB, 2), (2 * MIB + 1, 4), (9 * MIB, 10), (33 * MIB, 34)] {
        let block = rules.block_size(requested);
        assert_eq!(bytes(block), mib * MIB, "for {requested} bytes");
        assert_eq!(rules.segment_size(block), block);
        assert_eq!(rules.class_of(block), SizeClass::Large, "there is one class");
        assert!(rules.accepts(block, block) && !rules.accepts(block, block + units(2 * MIB)));
        assert!(!rules.splits(SizeClass::Large, block, block + units(2 * MIB)));
    }
}

#[test]
fn power_of_two_divisions_round_as_in_pytorchs_documentation() {
    // "with divisions 4, a request of 1200 is rounded up to 1280": 1024 + 256.
    let four = RoundupPower2Divisions::uniform(4).expect("the input should be valid");
    assert_eq!(round_to_division(1200 * KIB, four), 1280 * KIB);
    assert_eq!(round_to_division(1024 * KIB, four), 1024 * KIB);
    assert_eq!(round_to_division(1, four), 512);
    assert_eq!(round_to_division(2048, four), 2048);
    assert_eq!(round_to_division(2049, four), 2560);
}

use crate::types::units::KIB;

#[test]
fn first_segments_double_a_heap_up_to_a_granule() {
    let config = PoolConfig::builder().stitching(Stitching::with_granule(16 * MIB)).build().expect("a valid pool");
    let rules = SizeRules::new(&config, 2 * MIB);
    let first = |block, mapped| rules.first_segment(units(block), mapped).map(bytes);
    for (mapped, segment) in [(0, 2), (2, 2), (4, 4), (8, 8)] {
        assert_eq!(first(512, mapped * MIB), Some(segment * MIB), "with {mapped} MiB mapped");
    }
    assert_eq!(first(3 * MIB, 0), Some(4 * MIB), "a larger block gets a segment that holds it");
    assert_eq!(first(8 * MIB, 2 * MIB), Some(8 * MIB));
    assert_eq!(first(8 * MIB + 512, 0), None, "more than half of a granule grows the heap");
    assert_eq!(first(512, 10 * MIB), None, "a tight segment is smaller than the rest of the granule");
    assert_eq!(first(512, 16 * MIB), None);
    assert_eq!(SizeRules::new(&config, 16 * MIB).first_segment(1, 0), None, "the granularity is the granule");
    assert_eq!(SizeRules::new(&PoolConfig::default(), 2 * MIB).first_segment(1, 0), None, "nothing is stitched");
}
