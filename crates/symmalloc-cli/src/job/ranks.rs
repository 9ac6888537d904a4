//! Running all ranks of a job on all cores, and comparing them with rank 0.
//!
//! ```text
//! rank 0                     ──► journal: its decisions by pass    (runs first: the others need it)
//! ranks 1 to N-1, any order  ──► allocations that differ from the journal, and the first of them with the rank's decision
//! ```
//!
//! A pass with the same decisions as the previous one shares its journal entry, so passes in a steady state need no memory, regardless of
//! their number.

use super::outcome::PlannedOps;
use super::{Decision, Divergence, JobError, Options, Outcome, Peaks, Segments};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::ids::AllocationId;
use symmalloc_core::op::Op;
use symmalloc_sim::job::on_threads;
use symmalloc_trace::replay::Program;

/// A placement rule.
pub(super) trait Rule: Sync {
    /// Returns the segments of the default pool, or `None` if it is reserved up front.
    fn segments(&self) -> Option<Segments>;

    /// Returns the stream policy of the default pool.
    fn streams(&self) -> StreamPolicy;

    /// Returns `true` if the rule follows a plan.
    fn is_planned(&self) -> bool {
        false
    }

    /// Runs the job on one rank. Passes each decision about an allocation to `decided`, in order. Rank 0 runs all passes. The other ranks
    /// run only the passes that are compared.
    fn run(&self, rank: u32, decided: impl FnMut(At, Decision)) -> Result<Report, JobError>;
}

/// Position of a decision in a rank's run, counted from 0. Ordered by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At {
    pub(super) pass: u32,
    pub(super) op: usize,
    pub(super) allocation: usize,
}

/// Result of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Report {
    /// Peaks over all passes.
    pub(super) peaks: Peaks,
    pub(super) first_pass: Peaks,
    /// Number of segments at the end of the last pass.
    pub(super) segment_count: u64,
    /// Digest after the first pass.
    pub(super) first_digest: Option<u64>,
    /// Digest after the last pass.
    pub(super) last_digest: Option<u64>,
    /// Allocations placed by a plan, in all passes.
    pub(super) planned: u64,
    /// Map and unmap calls in the last pass.
    pub(super) maps: u64,
    /// Number of waits of one stream for another that reusing memory required in the last pass.
    pub(super) waits: u64,
}

/// Runs all ranks of a job and compares them.
pub(super) fn replay(
    rule: &impl Rule,
    program: &Program,
    options: &Options,
    rank_done: &(dyn Fn() + Sync),
) -> Result<Outcome, JobError> {
    let mut journal = Journal::new(program.allocation_count());
    let report = rule.run(0, |at, decision| journal.push(at, decision))?;
    journal.end_pass();
    rank_done();
    let ranks = options.ranks.get();
    let differences = compare(rule, &journal, report.last_digest, ranks, rank_done)?;
    let first_divergence = differences.first.map(|First { at, others }| {
        let mut decisions = vec![journal.at(at); ranks as usize];
        others.into_iter().for_each(|(rank, decision)| decisions[rank as usize] = decision);
        Divergence {
            pass: at.pass,
            op: at.op,
            allocation: at.allocation,
            name: program.name(AllocationId(at.allocation as u64)).map(Into::into),
            decisions,
        }
    });
    let refused = journal.refused_most();
    let decisions = journal.first_pass();
    Ok(Outcome {
        order: options.order,
        ranks,
        segments: rule.segments(),
        streams: rule.streams(),
        differing_placements: differences.differs.iter().filter(|differs| **differs).count(),
        first_divergence,
        differing_digests: differences.digests,
        passes: options.passes.get(),
        peaks: report.peaks,
        first_pass: report.first_pass,
        segment_count: report.segment_count,
        refused,
        first_pass_refused: decisions.iter().filter(|decision| decision.is_none()).count(),
        digest: report.first_digest,
        decisions,
        planned: rule.is_planned().then(|| PlannedOps {
            planned: report.planned,
            all: u64::from(options.passes.get()) * program.ops().iter().filter(|op| takes_memory(op)).count() as u64,
        }),
    })
}

fn takes_memory(op: &Op) -> bool {
    matches!(op, Op::Allocate { size_bytes: 1.., .. })
}

/// Rank 0's decisions.
struct Journal {
    allocations: usize,
    /// Decisions of each pass. Consecutive passes with equal decisions share them.
    passes: Vec<Arc<[Decision]>>,
    /// Decisions of the current pass.
    current: Vec<Decision>,
}

impl Journal {
    fn new(allocations: usize) -> Self {
        Journal { allocations, passes: Vec::new(), current: Vec::with_capacity(allocations) }
    }

    fn push(&mut self, at: At, decision: Decision) {
        if self.passes.len() < at.pass as usize {
            self.end_pass();
        }
        self.current.push(decision);
    }

    fn end_pass(&mut self) {
        let pass = match self.passes.last() {
            Some(last) if **last == *self.current => Arc::clone(last),
            _ => Arc::from(self.current.as_slice()),
        };
        debug_assert_eq!(pass.len(), self.allocations);
        self.passes.push(pass);
        self.current.clear();
    }

    fn at(&self, at: At) -> Decision {
        self.passes[at.pass as usize][at.allocation]
    }

    /// Returns the number of refusals in the pass with the most.
    fn refused_most(&self) -> usize {
        let refused = |pass: &Arc<[Decision]>| pass.iter().filter(|decision| decision.is_none()).count();
        self.passes.iter().map(refused).max().unwrap_or(0)
    }

    fn first_pass(self) -> Vec<Decision> {
        self.passes.first().map_or_else(Vec::new, |first| first.to_vec())
    }
}

/// Differences of ranks from rank 0.
#[derive(Debug)]
struct Differences {
    /// By allocation, `true` if any rank differs.
    differs: Vec<bool>,
    first: Option<First>,
    /// Number of ranks with a different digest.
    digests: usize,
}

/// The first decision that differs.
#[derive(Clone, Debug)]
struct First {
    at: At,
    /// The ranks that differ from rank 0 at this decision, with their own decisions.
    others: Vec<(u32, Decision)>,
}

impl Differences {
    fn none(allocations: usize) -> Self {
        Differences { differs: vec![false; allocations], first: None, digests: 0 }
    }

    fn add(&mut self, at: At, rank: u32, decision: Decision) {
        self.differs[at.allocation] = true;
        if self.first.as_ref().is_none_or(|first| at <= first.at) {
            self.add_first(First { at, others: vec![(rank, decision)] });
        }
    }

    /// Adds the first difference that some ranks found. The earlier difference is kept; ranks that differ at the same decision are joined.
    fn add_first(&mut self, other: First) {
        match &mut self.first {
            Some(first) if first.at < other.at => {}
            Some(first) if first.at == other.at => first.others.extend(other.others),
            first => *first = Some(other),
        }
    }

    fn merge(&mut self, other: Differences) {
        for (differs, other) in self.differs.iter_mut().zip(other.differs) {
            *differs |= other;
        }
        other.first.into_iter().for_each(|first| self.add_first(first));
        self.digests += other.digests;
    }
}

fn compare(
    rule: &impl Rule,
    journal: &Journal,
    digest: Option<u64>,
    ranks: u32,
    rank_done: &(dyn Fn() + Sync),
) -> Result<Differences, JobError> {
    let next = AtomicU32::new(1);
    let compare_some = || {
        let mut differences = Differences::none(journal.allocations);
        while let Some(rank) = claim(&next, ranks) {
            let report = rule.run(rank, |at, decision| {
                if decision != journal.at(at) {
                    differences.add(at, rank, decision);
                }
            })?;
            differences.digests += usize::from(report.last_digest != digest);
            rank_done();
        }
        Ok(differences)
    };
    let mut all = Differences::none(journal.allocations);
    for some in workers(ranks - 1, compare_some)? {
        all.merge(some);
    }
    Ok(all)
}

/// Claims the next rank, or returns `None` if all are claimed.
fn claim(next: &AtomicU32, ranks: u32) -> Option<u32> {
    let rank = next.fetch_add(1, Ordering::Relaxed);
    (rank < ranks).then_some(rank)
}

/// Runs `work` on one thread per core, but on at most `at_most` threads, and returns the first error.
fn workers<T: Send>(at_most: u32, work: impl Fn() -> Result<T, JobError> + Sync) -> Result<Vec<T>, JobError> {
    let cores = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let at_most = NonZeroUsize::new(at_most as usize).unwrap_or(NonZeroUsize::MIN);
    on_threads(cores.min(at_most), work).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Job, Order};
    use symmalloc_core::ids::{Placement, SegmentId};
    use symmalloc_import::{ReadOptions, read_bytes};

    const ALLOCATIONS: usize = 4;
    const PASSES: u32 = 3;

    /// Rule that places allocation n in segment n on every rank, except for `exceptions`.
    struct Scripted {
        /// Allocations that get a different offset, as (rank, pass, allocation).
        exceptions: Vec<(u32, u32, usize)>,
        /// Ranks with a different digest.
        odd_digests: Vec<u32>,
    }

    impl Rule for Scripted {
        fn segments(&self) -> Option<Segments> {
            None
        }

        fn streams(&self) -> StreamPolicy {
            StreamPolicy::Separate
        }

        fn run(&self, rank: u32, mut decided: impl FnMut(At, Decision)) -> Result<Report, JobError> {
            for pass in 0..PASSES {
                for allocation in 0..ALLOCATIONS {
                    let offset_bytes = 512 * u64::from(self.exceptions.contains(&(rank, pass, allocation)));
                    let placement = Placement { segment: SegmentId(allocation as u32), offset_bytes };
                    decided(At { pass, op: allocation + 1, allocation }, Some(placement));
                }
            }
            Ok(Report { last_digest: Some(self.odd_digests.contains(&rank).into()), ..Report::default() })
        }
    }

    fn outcome(ranks: u32, exceptions: &[(u32, u32, usize)], odd_digests: &[u32]) -> Outcome {
        let allocations: String = (0..ALLOCATIONS).map(|id| format!("a {id} 512 s0 \"n{id}\"\n")).collect();
        let trace = format!("symmalloc-trace 1\nstream s0\n{allocations}end {}\n", ALLOCATIONS + 1);
        let job = Job::new(&read_bytes(trace.as_bytes(), &ReadOptions::default()).unwrap()).unwrap();
        let rule = Scripted { exceptions: exceptions.to_vec(), odd_digests: odd_digests.to_vec() };
        let options = Options { ranks: ranks.try_into().unwrap(), order: Order::Address, ..Options::default() };
        replay(&rule, job.program(), &options, &|| ()).unwrap()
    }

    #[test]
    fn ranks_that_place_alike_are_aligned() {
        for ranks in [1, 2, 9] {
            let outcome = outcome(ranks, &[], &[]);
            assert!(outcome.is_aligned() && outcome.first_divergence.is_none());
            assert_eq!(outcome.decisions.len(), ALLOCATIONS);
        }
    }

    #[test]
    fn an_allocation_counts_once_however_many_ranks_and_passes_differ() {
        let outcome = outcome(9, &[(3, 0, 2), (5, 0, 2), (5, 1, 2), (8, 2, 3)], &[]);
        assert!(!outcome.is_aligned());
        assert_eq!(outcome.differing_placements, 2);
    }

    #[test]
    fn the_first_divergence_is_first_in_time_and_shows_every_rank() {
        let first = outcome(9, &[(3, 1, 0), (8, 0, 2), (4, 0, 3)], &[]).first_divergence.unwrap();
        assert_eq!((first.pass, first.op, first.allocation, first.name.as_deref()), (0, 3, 2, Some("n2")));
        let offsets: Vec<u64> = first.decisions.iter().map(|decision| decision.unwrap().offset_bytes).collect();
        assert_eq!(offsets, [0, 0, 0, 0, 0, 0, 0, 0, 512]);
    }

    #[test]
    fn a_divergence_in_a_later_pass_is_found() {
        let first = outcome(2, &[(1, 2, 1)], &[]).first_divergence.unwrap();
        assert_eq!((first.pass, first.allocation), (2, 1));
        let rank_0_alone = outcome(2, &[(0, 1, 1)], &[]).first_divergence.unwrap();
        assert_eq!((rank_0_alone.pass, rank_0_alone.allocation), (1, 1));
    }

    #[test]
    fn equal_placements_with_another_digest_are_not_aligned() {
        let outcome = outcome(5, &[], &[2, 4]);
        assert_eq!((outcome.differing_placements, outcome.differing_digests), (0, 2));
        assert!(!outcome.is_aligned());
    }
}
