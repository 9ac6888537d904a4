//! The cases of `docs/check-symmetric.md` on GPUs, with the same programs that run on the stubs.

use crate::job::devices;

#[path = "../programs/symmetric.rs"]
mod programs;

use programs::{Rank, on_ranks};

fn run(program: impl Fn(&Rank<'_>) + Sync) {
    if let Some(ranks) = devices() {
        on_ranks(ranks, None, program);
    }
}

#[test]
fn segments_in_another_order_of_addresses() {
    run(programs::address_order);
}

#[test]
fn a_block_whose_event_has_completed_on_one_rank_only() {
    run(programs::event_on_one_rank);
}

#[test]
fn private_allocations_on_one_rank() {
    run(programs::private_allocations);
}

#[test]
fn a_pool_that_grows_at_different_moments() {
    run(programs::grows_at_different_moments);
}

#[test]
fn a_pool_that_grows_during_a_collective() {
    run(programs::grows_during_collective);
}

#[test]
fn memory_of_a_graph() {
    run(programs::graph_memory);
}

#[test]
fn tensors_inside_a_segment() {
    run(programs::inside_segment);
}

#[test]
fn a_window_over_a_part_of_a_segment() {
    run(programs::part_of_segment);
}

#[test]
fn segments_that_are_released_and_allocated_again() {
    run(programs::released_and_allocated_again);
}

#[test]
fn memory_that_is_mapped_again_under_windows() {
    run(programs::sleep_and_wake);
}

#[test]
fn one_rank_that_is_out_of_memory() {
    if let Some(ranks) = devices() {
        on_ranks(ranks, Some(programs::RANK_0_BYTES), programs::out_of_memory_on_one_rank);
    }
}

#[test]
fn a_communicator_that_is_aborted_and_recreated() {
    run(programs::aborted_and_recreated);
}

#[test]
fn several_communicators_in_different_orders() {
    run(programs::several_communicators);
}

#[test]
fn random_allocations_and_frees() {
    for seed in [1, 2] {
        run(|it| programs::churn(it, seed, 400));
    }
}
