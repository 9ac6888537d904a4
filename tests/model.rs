//! Random programs: the allocator's decisions match the oracle's, op by op and block by block.
//!
//! A failure prints its bytes and its trace. Save the bytes in `fuzz/seeds/ops_vs_oracle` to keep it as a test.

use proptest::prelude::*;
use std::collections::BTreeMap;
use symmalloc_harness::checker::compare_with_oracle;
use symmalloc_harness::generate::{Scenario, scenario_bytes};
use symmalloc_harness::oracle::Outcome;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_decision_equals_that_of_the_oracle(bytes in scenario_bytes(120), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        compare_with_oracle(&scenario, &scenario.device(seed));
    }
}

#[test]
fn decisions_of_long_programs_equal_those_of_the_oracle() {
    for seed in 0..60 {
        let scenario = Scenario::from_seed(seed, 400);
        compare_with_oracle(&scenario, &scenario.device(seed));
    }
}

/// The generator is useful only if its programs reach every outcome.
#[test]
fn generated_programs_cover_every_outcome() {
    let mut outcomes = Vec::new();
    for seed in 0..300 {
        let scenario = Scenario::from_seed(seed, 200);
        outcomes.extend(compare_with_oracle(&scenario, &scenario.device(seed)).outcomes);
    }
    let mut shares = BTreeMap::new();
    for outcome in &outcomes {
        let name = match outcome {
            Outcome::Placed { .. } => "placed".to_owned(),
            Outcome::Done => "done".to_owned(),
            Outcome::Refused(refusal) => format!("{refusal:?}"),
        };
        *shares.entry(name).or_insert(0.0) += 100.0 / outcomes.len() as f64;
    }
    let at_least = [
        ("placed", 20.0),
        ("done", 20.0),
        ("Limit(Pool)", 1.0),
        ("Limit(Allocator)", 1.0),
        ("SegmentFull", 0.5),
        ("NotLive", 1.0),
        ("TooLarge", 0.01),
        ("PoolInUse", 0.1),
    ];
    for (name, percent) in at_least {
        assert!(shares.get(name).is_some_and(|share| *share >= percent), "{name}: {shares:?}");
    }
    assert!(!shares.contains_key("Driver"), "{shares:?}");
}
