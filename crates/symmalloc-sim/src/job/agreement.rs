//! Agreement: what the ranks find out about each other at a sync, held against what the simulator knows.
//!
//! Ranks know of each other only what they tell each other: digests, and on demand ops of their histories. The simulator
//! knows better, since it follows every rank to which something happened, digest by digest. At each sync
//!
//! - whoever is reported must differ (no false alarm, whatever the context of a rank is),
//! - whoever differs must be reported, with the op at which it began to,
//! - and the ranks that are left must agree.

use crate::job::failure::FailureCause;
use crate::job::journal::HeapName;
use crate::job::rank::{Rank, RankJob};
use std::collections::BTreeSet;
use symmalloc_agreement::{
    Action, AgreementError, Difference, Disagreement, Group, HeapDifference, Point, RankHistory, agree_in_lockstep,
};
use symmalloc_core::lock::Lock;

/// A rank at its seat.
pub(crate) type Seated<'a, L> = (usize, &'a Rank<L>);

/// An agreement that is not as it should be.
#[derive(Clone, Debug)]
pub(crate) struct Disputed {
    /// The seat of the rank.
    pub(crate) seat: usize,
    /// The step at which it began to differ, if it does.
    pub(crate) step: Option<usize>,
    pub(crate) cause: FailureCause,
    pub(crate) report: Box<str>,
}

/// Lets the live ranks agree, as often as it takes until those that are left do. Returns the seats of those that were
/// reported.
pub(crate) fn agree<L: Lock>(
    job: &RankJob,
    ranks: &[Seated<'_, L>],
    reference: usize,
) -> Result<BTreeSet<usize>, Disputed> {
    let mut left = ranks.to_vec();
    let mut reported = BTreeSet::new();
    while let Err(disagreement) = compare(&left) {
        let found = differing(job, &left, reference, &disagreement)?;
        if found.is_empty() {
            let report = disagreement.to_string().into();
            return Err(Disputed { seat: reference, step: None, cause: FailureCause::FalseAlarm, report });
        }
        left.retain(|(seat, _)| !found.contains(seat));
        reported.extend(found);
    }
    match left.iter().find_map(|(seat, rank)| Some((*seat, began_to_differ(job, rank)?))) {
        None => Ok(reported),
        Some((seat, step)) => {
            let report = "the ranks agreed".into();
            Err(Disputed { seat, step: Some(step), cause: FailureCause::Missed, report })
        }
    }
}

/// Lets these ranks compare what they did.
pub(crate) fn compare<L: Lock>(ranks: &[Seated<'_, L>]) -> Result<(), Box<Disagreement>> {
    let histories: Vec<RankHistory<'_>> =
        ranks.iter().map(|(_, rank)| RankHistory::new(&rank.allocator, Point::Sync)).collect();
    match agree_in_lockstep(&histories) {
        Ok(_) => Ok(()),
        Err(AgreementError::Disagreed(disagreement)) => Err(disagreement),
        Err(error) => panic!("in lockstep nothing is lost: {error}"),
    }
}

/// The step at which a symmetric heap of the rank began to differ; `None` if none does.
fn began_to_differ<L: Lock>(job: &RankJob, rank: &Rank<L>) -> Option<usize> {
    let symmetric = rank.standing.departed().filter(|(heap, _)| job.program.policies.of(heap.pool).symmetric());
    symmetric.map(|(_, departure)| departure.step).min()
}

/// The seats of the ranks that did something else than the reference, each held against what is known.
fn differing<L: Lock>(
    job: &RankJob,
    ranks: &[Seated<'_, L>],
    reference: usize,
    disagreement: &Disagreement,
) -> Result<BTreeSet<usize>, Disputed> {
    let report = || disagreement.to_string().into();
    let Difference::History { first, others } = &disagreement.difference else {
        return Err(Disputed { seat: reference, step: None, cause: FailureCause::FalseAlarm, report: report() });
    };
    let mut found = BTreeSet::new();
    for difference in std::iter::once(first).chain(others) {
        let heap = HeapName { pool: job.program.policies.symmetric(difference.pool), stream: difference.stream };
        let is_of_reference = |at: u32| ranks.get(at as usize).is_some_and(|(seat, _)| *seat == reference);
        for group in difference.groups.iter().filter(|group| !group.ranks.iter().any(is_of_reference)) {
            for at in group.ranks.iter() {
                let (seat, rank) = ranks[at as usize];
                found.insert(seat);
                check(job, (heap, difference, group), rank).map_err(|(step, cause)| Disputed {
                    seat,
                    step,
                    cause,
                    report: report(),
                })?;
            }
        }
    }
    Ok(found)
}

/// Holds what is reported of a heap of a group of ranks against what is known of one of them.
fn check<L: Lock>(
    job: &RankJob,
    (heap, difference, group): (HeapName, &HeapDifference, &Group),
    rank: &Rank<L>,
) -> Result<(), (Option<usize>, FailureCause)> {
    let departure = rank.standing.departure(heap).ok_or((None, FailureCause::FalseAlarm))?;
    let named = difference.first_op..difference.last_op + 1;
    // Where heaps take memory from each other, a rank may make up, at another step, for what the reference did: then the
    // histories part later than the steps did.
    let named_may_be_later = job.program.policies.reclaims_as_a_whole(heap.pool);
    // Histories that do not go back so far tell when the first of all ranks parted, and who differs by now.
    let parted_may_be_later = group.action == Action::Forgotten;
    if (named_may_be_later || named.start < departure.ops.end)
        && (parted_may_be_later || departure.ops.start < named.end)
    {
        return Ok(());
    }
    let tell =
        |ops: &std::ops::Range<u64>| format!("ops {} to {} of the heap of {heap}", ops.start, ops.end - 1).into();
    let cause = FailureCause::OtherOpNamed { named: tell(&named), expected: tell(&departure.ops) };
    Err((Some(departure.step), cause))
}
