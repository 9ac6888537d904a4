//! `examples/all_reduce.rs` as a test: NCCL reduces wrong data if ranks place tensors differently, and correct data otherwise. It runs with
//! threads, with processes, and with NCCL's own check.

use crate::job::{again, devices, processes};
use symmalloc_nccl::{Nccl, NcclVersion};

#[allow(dead_code, reason = "the example's main is not called")]
#[path = "../../examples/all_reduce.rs"]
mod all_reduce;

const CHILD: &str = "SYMMALLOC_TABLE_CHILD";

/// Returns `SYMMALLOC_ROUNDS`, by default 1,000.
fn rounds() -> u32 {
    std::env::var("SYMMALLOC_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1000)
}

fn run(options: &all_reduce::Options) {
    if let Some(table) = all_reduce::run(options).expect("all ranks should finish") {
        print!("{table}");
        assert!(table.is_as_claimed());
    }
}

#[test]
fn only_the_old_order_computes_wrong_sums_with_a_thread_for_each_device() {
    let Some(ranks) = devices() else { return };
    run(&all_reduce::Options { ranks: Some(ranks), rounds: rounds(), threads: true });
}

#[test]
fn only_the_old_order_computes_wrong_sums_with_a_process_for_each_device() {
    const NAME: &str = "table::only_the_old_order_computes_wrong_sums_with_a_process_for_each_device";
    if std::env::var_os(CHILD).is_some() {
        return run(&all_reduce::Options { ranks: None, rounds: rounds() / 10, threads: false });
    }
    let Some(ranks) = devices() else { return };
    let children = processes(NAME, ranks, (CHILD, "1"));
    for mut child in children {
        assert!(child.wait().expect("the child ends").success());
    }
}

#[test]
fn nccls_own_check_finds_no_mismatch_with_symmalloc() {
    let Some(_) = devices() else { return };
    // NCCL 2.29.7 introduced `NCCL_CHECK_MODE`.
    let (version, since) = (Nccl::load().expect("libnccl should be available").version(), NcclVersion::new(2, 29, 7));
    if version < since {
        println!("skipped: NCCL {version} has no NCCL_CHECK_MODE, which {since} introduced");
        return;
    }
    let name = "collectives::reductions_are_correct_across_frees_and_new_segments";
    let status = again(name).env("NCCL_CHECK_MODE", "DEBUG_GLOBAL").status().expect("the process should start again");
    assert!(status.success());
}
