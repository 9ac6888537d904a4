//! Random programs on two ranks, one of which makes room for its wakes alone: its recoveries are no ops of a symmetric pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use symmalloc_core::op::Op;

use symmalloc_harness::generate::{Scenario, bytes_of_seed};
use symmalloc_harness::recovery;
use symmalloc_harness::targets::local_recovery;

#[test]
fn a_local_recovery_is_no_op_of_a_symmetric_pool() {
    let mut wakes = 0;
    for seed in 0..300 {
        let bytes = bytes_of_seed(seed, 200);
        wakes += Scenario::from_bytes(&bytes).program.ops().iter().filter(|op| matches!(op, Op::Wake { .. })).count();
        local_recovery(&bytes);
    }
    assert!(wakes > 300, "{wakes} wakes");
}

/// Trims all pools, as `CudaAllocator::trim` does: an op of the symmetric pools that are awake.
fn trim_all(allocator: &recovery::RankAllocator<'_>) {
    allocator.trim_all().expect("no fault was injected");
}

#[test]
fn a_recovery_that_trims_symmetric_pools_is_found() {
    let is_found =
        |seed| catch_unwind(AssertUnwindSafe(|| recovery::run(&bytes_of_seed(seed, 200), trim_all))).is_err();
    assert!((0..20).any(is_found), "every run had equal ranks");
}
