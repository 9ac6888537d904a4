//! Every case by instruction count, which is exact on a noisy machine. Needs valgrind and `gungraun-runner`.
//!
//! Counted is what the function bodies below do; making the case, its first repeat, and dropping it are not. Numbers are
//! per repeat: a recorded job's length, or [`PAIRS`](symmalloc_benches::micro::PAIRS) pairs.
//! `cargo bench -p symmalloc-benches --bench instructions`

#![allow(missing_docs, unused_qualifications, reason = "for what gungraun's macros make")]

use gungraun::{library_benchmark, library_benchmark_group, main};
use std::hint::black_box;
use symmalloc_benches::micro::{self, ManyFree, Sizes};
use symmalloc_benches::reference::Reference;
use symmalloc_benches::workload::{Bench, Workload};
use symmalloc_benches::{Ours, Segments, ours, reference};
use symmalloc_core::config::StreamPolicy::{self, Separate, Shared};
use symmalloc_harness::jobs;
use symmalloc_sim::IdleBackend;

fn job(name: &str, segments: Segments, streams: StreamPolicy) -> Bench<Ours> {
    Bench::warm(ours(segments, streams), Workload::from(&jobs::program(name)))
}

fn expandable(name: &str) -> Bench<Ours> {
    job(name, Segments::Expandable, Separate)
}

fn fixed(name: &str) -> Bench<Ours> {
    job(name, Segments::Fixed, Separate)
}

fn shared(name: &str) -> Bench<Ours> {
    job(name, Segments::Expandable, Shared)
}

fn obvious(name: &str) -> Bench<Reference<IdleBackend>> {
    Bench::warm(reference(Segments::Expandable), Workload::from(&jobs::program(name)))
}

fn small(workload: Workload) -> Bench<Ours> {
    Bench::warm(ours(Segments::Expandable, Separate), workload)
}

fn of_one_size(count: usize) -> ManyFree<Ours> {
    ManyFree::new(ours(Segments::Expandable, Separate), count, Sizes::One)
}

fn sizes_spread(count: usize) -> ManyFree<Ours> {
    ManyFree::new(ours(Segments::Expandable, Separate), count, Sizes::Spread)
}

#[library_benchmark]
#[benches::expandable(args = ["gpt2_train_varlen", "moe_train", "resnet50_multiscale", "llama_generate", "fsdp_train_rank0", "fsdp1_train_rank0"], setup = expandable)]
#[benches::fixed(args = ["gpt2_train_varlen", "moe_train", "resnet50_multiscale", "llama_generate", "fsdp_train_rank0", "fsdp1_train_rank0"], setup = fixed)]
#[benches::shared(args = ["fsdp_train_rank0", "fsdp1_train_rank0"], setup = shared)]
fn recorded_job(mut bench: Bench<Ours>) -> Bench<Ours> {
    black_box(&mut bench).repeat();
    bench
}

#[library_benchmark]
#[benches::expandable(args = ["gpt2_train_varlen", "moe_train", "resnet50_multiscale", "llama_generate", "fsdp_train_rank0", "fsdp1_train_rank0"], setup = obvious)]
fn reference_on_recorded_job(mut bench: Bench<Reference<IdleBackend>>) -> Bench<Reference<IdleBackend>> {
    black_box(&mut bench).repeat();
    bench
}

#[library_benchmark]
#[bench::pair_of_512_bytes(args = (micro::pair(512)), setup = small)]
#[bench::pair_of_4_kib(args = (micro::pair(4 << 10)), setup = small)]
#[bench::pair_of_1_mib(args = (micro::pair(1 << 20)), setup = small)]
#[bench::pair_of_64_mib(args = (micro::pair(64 << 20)), setup = small)]
#[bench::replacement_among_1000(args = (micro::replacement()), setup = small)]
#[bench::cross_stream(args = (micro::cross_stream(1 << 20)), setup = small)]
fn micro_case(mut bench: Bench<Ours>) -> Bench<Ours> {
    black_box(&mut bench).repeat();
    bench
}

#[library_benchmark]
#[benches::of_one_size(args = [100, 10_000, 100_000], setup = of_one_size)]
#[benches::sizes_spread(args = [100, 10_000, 100_000], setup = sizes_spread)]
fn many_free_blocks(mut case: ManyFree<Ours>) -> ManyFree<Ours> {
    black_box(&mut case).replace();
    case
}

library_benchmark_group!(name = recorded, benchmarks = [recorded_job, reference_on_recorded_job]);
library_benchmark_group!(name = micro_cases, benchmarks = [micro_case, many_free_blocks]);

main!(library_benchmark_groups = recorded, micro_cases);
