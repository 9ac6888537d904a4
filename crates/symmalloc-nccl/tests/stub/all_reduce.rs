//! The example `all_reduce` on the stubs. As NCCL does, the stub addresses a peer's buffer by this rank's own offset. Unlike NCCL, it
//! detects every difference between the ranks' offsets.

use stub_process::{nccl, nccl_test};

#[allow(dead_code, reason = "the example's main is not called")]
#[path = "../../examples/all_reduce.rs"]
mod example;

fn run(ranks: u32, rounds: u32) {
    let options = example::Options { ranks: Some(ranks), rounds, threads: true };
    let table = example::run(&options).expect("all ranks should finish").expect("rank 0 has a table");
    print!("{table}");
    assert!(table.is_as_claimed(), "{table}");
    let violations = nccl::violations();
    let is_mismatch = |violation: &&String| !violation.starts_with("AllReduce at different window offsets");
    assert_eq!(violations.iter().find(is_mismatch), None);
    assert_eq!(violations.len() as u64, table.old_wrong(), "only the old order causes violations");
    assert_eq!(nccl::live().windows, 0);
}

nccl_test!(only_address_order_computes_wrong_sums_on_two_ranks, {
    run(2, 21);
});

nccl_test!(only_address_order_computes_wrong_sums_on_four_ranks, {
    run(4, 3);
});
