//! Agreement: what the ranks find out about each other at a sync, held against what the simulator knows.

use crate::journal::{HeapDigest, HeapName};
use crate::rank::{Job, Rank};
use symmalloc_core::lock::Lock;

/// A heap of a rank that is not as it is on the others.
#[derive(Clone, Debug)]
pub(crate) struct Difference {
    /// The seat of the rank.
    pub(crate) seat: usize,
    /// The heap.
    pub(crate) heap: HeapName,
}

/// Lets the live ranks agree, by seat. Symmetric pools are compared, and no others.
pub(crate) fn agree<L: Lock>(job: &Job, ranks: &[(usize, &Rank<L>)], reference: usize) -> Vec<Difference> {
    let symmetric = |rank: &Rank<L>| -> Vec<HeapDigest> {
        let digests = rank.digests(job).into_iter();
        digests.filter(|(heap, _)| job.program.policies.of(heap.pool).symmetric()).collect()
    };
    let Some((_, expected)) = ranks.iter().find(|(seat, _)| *seat == reference) else { return Vec::new() };
    let expected = symmetric(expected);
    let mut differences = Vec::new();
    for (seat, rank) in ranks {
        let digests = symmetric(rank);
        let missing = expected.iter().filter(|entry| !digests.contains(entry));
        let mut heaps: Vec<HeapName> = missing.map(|(heap, _)| *heap).collect();
        heaps.extend(digests.iter().filter(|entry| !expected.contains(entry)).map(|(heap, _)| *heap));
        heaps.sort_unstable();
        heaps.dedup();
        differences.extend(heaps.into_iter().map(|heap| Difference { seat: *seat, heap }));
    }
    differences
}
