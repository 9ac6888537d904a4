//! The cases of `docs/check-symmetric.md` on the stubs, whose symmetric kernels find peers' buffers as NCCL's do.

#[path = "../programs/symmetric.rs"]
mod programs;

use programs::{Rank, on_ranks};
use stub_process::{nccl, nccl_test};

fn run(program: impl Fn(&Rank<'_>) + Sync) {
    on_ranks(2, None, program);
    nccl::assert_clean();
}

nccl_test!(segments_in_another_order_of_addresses, {
    run(programs::address_order);
});

nccl_test!(a_block_whose_event_has_completed_on_one_rank_only, {
    run(programs::event_on_one_rank);
});

nccl_test!(private_allocations_on_one_rank, {
    run(programs::private_allocations);
});

nccl_test!(a_pool_that_grows_at_different_moments, {
    run(programs::grows_at_different_moments);
});

nccl_test!(a_pool_that_grows_during_a_collective, {
    run(programs::grows_during_collective);
});

nccl_test!(memory_of_a_graph, {
    run(programs::graph_memory);
});

nccl_test!(tensors_inside_a_segment, {
    run(programs::inside_segment);
});

nccl_test!(a_window_over_a_part_of_a_segment, {
    on_ranks(2, None, programs::part_of_segment);
    // The stub reports windows that the registrar must not create. The results are right nevertheless.
    let violations = nccl::violations();
    assert!(violations.iter().all(|text| text.contains("does not cover whole mappings")), "{violations:?}");
    assert_eq!(violations.len(), 2);
});

nccl_test!(segments_that_are_released_and_allocated_again, {
    run(programs::released_and_allocated_again);
});

nccl_test!(memory_that_is_mapped_again_under_windows, {
    run(programs::sleep_and_wake);
});

nccl_test!(one_rank_that_is_out_of_memory, {
    on_ranks(2, Some(programs::RANK_0_BYTES), programs::out_of_memory_on_one_rank);
    nccl::assert_clean();
});

nccl_test!(a_communicator_that_is_aborted_and_recreated, {
    run(programs::aborted_and_recreated);
});

nccl_test!(several_communicators_in_different_orders, {
    run(programs::several_communicators);
});

nccl_test!(random_allocations_and_frees, {
    for seed in [1, 2] {
        run(|it| programs::churn(it, seed, 60));
    }
});
