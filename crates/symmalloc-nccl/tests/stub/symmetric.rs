//! The cases of `docs/check-symmetric.md` on the stubs, whose symmetric kernels find peers' buffers as NCCL's do.

#[path = "../programs/symmetric.rs"]
mod programs;

use programs::{Rank, on_ranks};
use stub_process::{nccl, nccl_test};

fn run(program: impl Fn(&Rank<'_>) + Sync) {
    on_ranks(2, None, program);
    nccl::assert_clean();
}

nccl_test!(all_reduces_are_correct_if_segments_have_different_address_orders, {
    run(programs::address_order);
});

nccl_test!(all_reduces_are_correct_if_an_event_has_completed_on_one_rank_only, {
    run(programs::event_on_one_rank);
});

nccl_test!(all_reduces_are_correct_next_to_private_allocations_on_one_rank, {
    run(programs::private_allocations);
});

nccl_test!(growth_at_different_moments_is_an_error_on_every_rank, {
    run(programs::grows_at_different_moments);
});

nccl_test!(all_reduces_are_correct_while_the_pool_grows, {
    run(programs::grows_during_collective);
});

nccl_test!(all_reduces_in_a_graph_are_correct_after_frees, {
    run(programs::graph_memory);
});

nccl_test!(all_reduces_of_tensors_inside_a_segment_change_nothing_else, {
    run(programs::inside_segment);
});

nccl_test!(all_reduces_are_correct_with_a_window_over_a_part_of_a_segment, {
    on_ranks(2, None, programs::part_of_segment);
    // The stub reports windows that the registrar must not create. The results are right nevertheless.
    let violations = nccl::violations();
    assert!(violations.iter().all(|text| text.contains("does not cover whole mappings")), "{violations:?}");
    assert_eq!(violations.len(), 2);
});

nccl_test!(all_reduces_are_correct_in_reused_segments, {
    run(programs::released_and_allocated_again);
});

nccl_test!(all_reduces_are_correct_after_sleep_and_wake, {
    run(programs::sleep_and_wake);
});

nccl_test!(out_of_memory_on_one_rank_is_an_error_on_every_rank, {
    on_ranks(2, Some(programs::RANK_0_BYTES), programs::out_of_memory_on_one_rank);
    nccl::assert_clean();
});

nccl_test!(all_reduces_are_correct_on_a_recreated_communicator, {
    run(programs::aborted_and_recreated);
});

nccl_test!(syncs_of_communicators_in_different_orders_do_not_deadlock, {
    run(programs::several_communicators);
});

nccl_test!(all_reduces_are_correct_under_random_allocations_and_frees, {
    for seed in [1, 2] {
        run(|it| programs::churn(it, seed, 60));
    }
});
