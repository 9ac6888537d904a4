//! Timing of all cases with criterion. `cargo bench -p symmalloc-benches --bench time -- <filter>`
//!
//! Elements are ops, so criterion's throughput is the reciprocal of the time per op: 25 Melem/s are 40 ns per op.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use symmalloc_benches::micro::{self, ManyFree, PAIRS, Sizes};
use symmalloc_benches::workload::{Bench, Subject, Workload};
use symmalloc_benches::{Segments, ours, reference};
use symmalloc_core::config::StreamPolicy::{Separate, Shared};
use symmalloc_harness::jobs;

fn repeat<S: Subject>(criterion: &mut Criterion, group: &str, name: &str, subject: S, workload: &Workload) {
    let mut bench = Bench::warm(subject, workload.clone());
    let mut group = criterion.benchmark_group(group);
    group.sample_size(10).throughput(Throughput::Elements(bench.ops() as u64));
    group.bench_function(name, |bencher| bencher.iter(|| bench.repeat()));
}

fn recorded_jobs(criterion: &mut Criterion) {
    for job in jobs::JOBS {
        let workload = Workload::from(&jobs::program(job));
        repeat(criterion, job, "expandable, separate", ours(Segments::Expandable, Separate), &workload);
        repeat(criterion, job, "fixed, separate", ours(Segments::Fixed, Separate), &workload);
        repeat(criterion, job, "reference, expandable", reference(Segments::Expandable), &workload);
        repeat(criterion, job, "reference, fixed", reference(Segments::Fixed), &workload);
        if workload.streams() > 1 {
            repeat(criterion, job, "expandable, shared", ours(Segments::Expandable, Shared), &workload);
            repeat(criterion, job, "fixed, shared", ours(Segments::Fixed, Shared), &workload);
        }
    }
}

fn micro_cases(criterion: &mut Criterion) {
    let cases = [
        ("pair of 512 B", micro::pair(512)),
        ("pair of 4 KiB", micro::pair(4 << 10)),
        ("pair of 1 MiB", micro::pair(1 << 20)),
        ("pair of 64 MiB", micro::pair(64 << 20)),
        ("replacement among 1,000", micro::replacement()),
        ("cross-stream 1 MiB", micro::cross_stream(1 << 20)),
    ];
    for (name, workload) in cases {
        repeat(criterion, name, "ours", ours(Segments::Expandable, Separate), &workload);
        repeat(criterion, name, "reference", reference(Segments::Expandable), &workload);
    }
}

fn many_free_blocks(criterion: &mut Criterion) {
    for (name, sizes) in [("free blocks of one size", Sizes::One), ("free blocks of spread sizes", Sizes::Spread)] {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10).throughput(Throughput::Elements((2 * PAIRS).into()));
        for count in [100, 10_000, 100_000] {
            // Each run uses a new allocator, because replacements move the live blocks to the front of the index.
            let setup = || ManyFree::new(ours(Segments::Expandable, Separate), count, sizes);
            let run = |mut case: ManyFree<_>| {
                case.replace();
                case
            };
            group
                .bench_function(count.to_string(), |bencher| bencher.iter_batched(setup, run, BatchSize::PerIteration));
        }
    }
}

criterion_group!(benches, recorded_jobs, micro_cases, many_free_blocks);
criterion_main!(benches);
