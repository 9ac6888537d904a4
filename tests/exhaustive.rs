//! Exhaustive tests: all small programs. Random tests may miss a case; these tests cover every program up to a given length.
//!
//! The configuration is tiny so that every situation occurs within a few ops: granules of two units, two sizes of which one fits a granule
//! and the other spans two, and a limit of four granules.

use symmalloc_core::config::{
    Config, ExpandableSegments, FixedSegments, PointerLookup, PoolConfig, SegmentPolicy, StreamPolicy,
};
use symmalloc_core::units::MIB;
use symmalloc_core::{AllocationId, Op, PoolId, StreamId};
use symmalloc_harness::checker::compare_at;
use symmalloc_harness::generate::{Access, Scenario};

const GRANULE: u64 = 1024;

/// An op that is possible at any point of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Letter {
    Allocate(StreamId, u64),
    /// Frees the n-th live allocation, oldest first.
    Free(usize),
    /// Uses the oldest live allocation on the other stream.
    Use(StreamId),
    Trim,
}

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// Converts a word to a program, or returns `None` if a letter is meaningless at its position.
fn spell(word: &[Letter]) -> Option<Vec<Op>> {
    let mut ops = vec![Op::register(S0), Op::register(S1)];
    let (mut live, mut made) = (Vec::new(), 0);
    for letter in word {
        ops.push(match *letter {
            Letter::Allocate(stream, size_bytes) => {
                let id = AllocationId(made);
                made += 1;
                live.push(id);
                Op::Allocate { id, pool: PoolId::DEFAULT, stream, size_bytes }
            }
            Letter::Free(nth) if nth < live.len() => Op::Free { id: live.remove(nth) },
            Letter::Use(stream) if !live.is_empty() => Op::RecordUse { id: live[0], stream },
            Letter::Free(_) | Letter::Use(_) => return None,
            Letter::Trim => Op::Trim { pool: None },
        });
    }
    Some(ops)
}

/// Compares every word of `length` letters with the oracle. Each prefix is checked in detail only once.
fn all_words(letters: &[Letter], length: usize, config: &Config, granularity_bytes: u64) -> u64 {
    let mut word = vec![0; length];
    let (mut changed, mut programs) = (0, 0);
    loop {
        let spelt: Vec<Letter> = word.iter().map(|index| letters[*index]).collect();
        // A word that becomes meaningless at some letter is equivalent to its prefix: skip all words with that prefix.
        let valid = (1..=length).take_while(|end| spell(&spelt[..*end]).is_some()).count();
        if valid == length {
            let ops = spell(&spelt).expect("the input should be valid").into_iter().enumerate();
            // Ops identify their allocations by handle and by address in turn.
            let ops = ops.map(|(index, op)| (op, Access::from_byte((index as u64 + programs) as u8)));
            let scenario = Scenario::new(config.clone(), granularity_bytes, ops);
            compare_at(&scenario, &scenario.device(programs), |index| index >= changed + 2);
            programs += 1;
        }
        let last = valid.min(length - 1);
        word[last + 1..].fill(0);
        let Some(next) = (0..=last).rev().find(|index| word[*index] + 1 < letters.len()) else { return programs };
        word[next] += 1;
        word[next + 1..].fill(0);
        changed = next;
    }
}

fn letters(sizes: [u64; 2]) -> Vec<Letter> {
    let [small, large] = sizes;
    vec![
        Letter::Allocate(S0, small),
        Letter::Allocate(S0, large),
        Letter::Allocate(S1, small),
        Letter::Free(0),
        Letter::Free(1),
        Letter::Free(2),
        Letter::Use(S1),
        Letter::Trim,
    ]
}

fn config(segments: SegmentPolicy, streams: StreamPolicy, limit_bytes: u64) -> Config {
    let pool = PoolConfig::builder().segments(segments).streams(streams).limit_bytes(Some(limit_bytes));
    let config = Config::builder().default_pool(pool.build().expect("the configuration should be valid"));
    config.pointer_lookup(PointerLookup::Exact).build().expect("the configuration should be valid")
}

fn tiny_expandable() -> SegmentPolicy {
    let mut knobs = ExpandableSegments::default();
    (knobs.range_bytes, knobs.growth_bytes) = (2 * MIB, GRANULE);
    SegmentPolicy::Expandable(knobs)
}

#[test]
fn every_short_program_on_separate_expandable_heaps() {
    let config = config(tiny_expandable(), StreamPolicy::Separate, 4 * GRANULE);
    assert!(all_words(&letters([512, 1536]), 7, &config, GRANULE) > 100_000);
}

#[test]
fn every_short_program_on_a_shared_expandable_heap() {
    let config = config(tiny_expandable(), StreamPolicy::Shared, 4 * GRANULE);
    assert!(all_words(&letters([512, 1536]), 7, &config, GRANULE) > 100_000);
}

#[test]
fn every_short_program_on_fixed_segments() {
    let config = config(SegmentPolicy::Fixed(FixedSegments::default()), StreamPolicy::Shared, 44 * MIB);
    assert!(all_words(&letters([512, 11 * MIB]), 6, &config, 2 * MIB) > 10_000);
}

#[test]
fn every_short_program_on_a_reserved_segment() {
    let segments = SegmentPolicy::Reserved { segment_bytes: 3 * GRANULE };
    let config = config(segments, StreamPolicy::Shared, 4 * GRANULE);
    assert!(all_words(&letters([512, 1536]), 6, &config, GRANULE) > 10_000);
}
