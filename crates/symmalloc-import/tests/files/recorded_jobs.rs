//! The recorded jobs in the project's `tests/traces`: the number of allocations in each, and the number that PyTorch placed differently on
//! the two ranks of a job.

use std::path::{Path, PathBuf};

use symmalloc_core::ids::Placement;
use symmalloc_core::op::{Op, Record};
use symmalloc_import::{Format, ReadOptions, Recording, read_path};

fn job(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces").join(name)
}

fn recorded(name: &str) -> Recording {
    read_path(&job(name), &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns allocations and frees, without the additions of a recording.
fn program(recording: &Recording) -> Vec<&Op> {
    let ops = recording.records.iter().map(|record| &record.op);
    ops.filter(|op| matches!(op, Op::Allocate { .. } | Op::Free { .. })).collect()
}

fn placements(recording: &Recording) -> Vec<Placement> {
    let allocation = |record: &&Record| matches!(record.op, Op::Allocate { .. });
    recording.records.iter().filter(allocation).map(|record| record.placement.unwrap()).collect()
}

/// Returns the indices of the allocations that two recordings place differently.
fn differing(a: &Recording, b: &Recording) -> Vec<usize> {
    assert_eq!(program(a), program(b));
    let (a, b) = (placements(a), placements(b));
    (0..a.len()).filter(|n| a[*n] != b[*n]).collect()
}

#[test]
fn every_job_has_the_allocations_and_streams_that_were_counted_when_it_was_recorded() {
    for (name, allocations, streams) in [
        ("gpt2_train_varlen", 63_689, 1),
        ("moe_train", 44_926, 1),
        ("resnet50_multiscale", 34_193, 1),
        ("llama_generate", 218_357, 1),
        ("fsdp_train_rank0", 30_386, 3),
        ("fsdp_train_rank1", 30_386, 3),
        ("fsdp1_train_rank0", 24_464, 4),
        ("fsdp1_train_rank1", 24_464, 4),
    ] {
        let recording = recorded(&format!("{name}.trace.zst"));
        let summary = &recording.summary;
        assert_eq!(recording.format, Format::Trace);
        assert_eq!((summary.allocations, summary.streams), (allocations, streams), "{name}");
        assert_eq!(summary.placements, allocations, "{name}");
    }
}

#[test]
fn pytorch_placed_15265_of_24464_allocations_differently_on_the_ranks_of_fsdp1() {
    let (a, b) = (recorded("fsdp1_train_rank0.pickle.gz"), recorded("fsdp1_train_rank1.pickle.gz"));
    let differing = differing(&a, &b);
    assert_eq!((differing.len(), differing[0], placements(&a).len()), (15_265, 143, 24_464));
    assert_eq!((a.summary.device, b.summary.device), (Some(0), Some(1)));
}

#[test]
fn pytorch_placed_446_of_30386_allocations_differently_on_the_ranks_of_fsdp() {
    let (a, b) = (recorded("fsdp_train_rank0.trace.zst"), recorded("fsdp_train_rank1.trace.zst"));
    assert_eq!((differing(&a, &b).len(), placements(&a).len()), (446, 30_386));
}

#[test]
fn the_stored_traces_equal_imports_of_the_stored_snapshots() {
    for name in ["fsdp1_train_rank0", "fsdp1_train_rank1"] {
        let (snapshot, trace) = (recorded(&format!("{name}.pickle.gz")), recorded(&format!("{name}.trace.zst")));
        assert!(snapshot.records == trace.records, "{name}");
    }
}
