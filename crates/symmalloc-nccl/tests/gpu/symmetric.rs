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
fn all_reduces_are_correct_if_segments_have_different_address_orders() {
    run(programs::address_order);
}

#[test]
fn all_reduces_are_correct_if_an_event_has_completed_on_one_rank_only() {
    run(programs::event_on_one_rank);
}

#[test]
fn all_reduces_are_correct_next_to_private_allocations_on_one_rank() {
    run(programs::private_allocations);
}

#[test]
fn growth_at_different_moments_is_an_error_on_every_rank() {
    run(programs::grows_at_different_moments);
}

#[test]
fn all_reduces_are_correct_while_the_pool_grows() {
    run(programs::grows_during_collective);
}

#[test]
fn all_reduces_in_a_graph_are_correct_after_frees() {
    run(programs::graph_memory);
}

#[test]
fn all_reduces_of_tensors_inside_a_segment_change_nothing_else() {
    run(programs::inside_segment);
}

#[test]
fn all_reduces_are_correct_with_a_window_over_a_part_of_a_segment() {
    run(programs::part_of_segment);
}

#[test]
fn all_reduces_are_correct_in_reused_segments() {
    run(programs::released_and_allocated_again);
}

#[test]
fn all_reduces_are_correct_after_sleep_and_wake() {
    run(programs::sleep_and_wake);
}

#[test]
fn out_of_memory_on_one_rank_is_an_error_on_every_rank() {
    if let Some(ranks) = devices() {
        on_ranks(ranks, Some(programs::RANK_0_BYTES), programs::out_of_memory_on_one_rank);
    }
}

#[test]
fn all_reduces_are_correct_on_a_recreated_communicator() {
    run(programs::aborted_and_recreated);
}

#[test]
fn syncs_of_communicators_in_different_orders_do_not_deadlock() {
    run(programs::several_communicators);
}

#[test]
fn all_reduces_are_correct_under_random_allocations_and_frees() {
    for seed in [1, 2] {
        run(|it| programs::churn(it, seed, 400));
    }
}
