//! Tests of all-to-all-v over NVLink, with the same programs that run on the stubs. `collectives.rs` measures the resource use and the
//! duration of many calls.

use crate::job::devices;

#[path = "../programs/all_to_all.rs"]
mod programs;

use programs::{captured, disagreements, equal_parts, on_ranks, on_ranks_with, one_way, uneven_rows};
use symmalloc_nccl::CommunicatorBuilder;

#[test]
fn rows_of_every_type_arrive() {
    let Some(ranks) = devices() else { return };
    on_ranks(ranks, |it| {
        uneven_rows(it);
        equal_parts(it);
        one_way(it);
    });
}

#[test]
fn rows_arrive_over_communicators_that_do_not_block() {
    let Some(ranks) = devices() else { return };
    on_ranks_with(ranks, CommunicatorBuilder::nonblocking, uneven_rows);
}

#[test]
fn ranks_that_disagree_about_splits_get_the_same_error() {
    let Some(ranks) = devices() else { return };
    on_ranks(ranks, disagreements);
}

#[test]
fn a_captured_call_sends_the_data_of_each_launch() {
    let Some(ranks) = devices() else { return };
    on_ranks(ranks, captured);
}
