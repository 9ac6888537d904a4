//! Verification of the agreement at each sync against what the simulator knows about the ranks.
//!
//! Ranks know only what they exchange: digests and, on demand, ops of their histories. The simulator knows more,
//! because it follows the digests of every rank that had a fault. At each sync it checks that
//!
//! - every reported rank really differs (no false alarm, whatever the rank's context),
//! - every rank that differs is reported, with the op at which it diverged,
//! - and the remaining ranks agree.

use crate::job::failure::FailureCause;
use crate::job::rank::{Rank, RankJob};
use std::collections::BTreeSet;
use symmalloc_agreement::{
    Action, AgreementError, Difference, Disagreement, Group, HeapDifference, Point, RankHistory, agree_in_lockstep,
};
use symmalloc_core::ids::HeapId;
use symmalloc_core::lock::Lock;

/// A rank and its seat.
pub(crate) type Seated<'a, L> = (usize, &'a Rank<L>);

/// An agreement with a wrong result.
#[derive(Clone, Debug)]
pub(crate) struct Disputed {
    /// The seat of the rank.
    pub(crate) seat: usize,
    /// First step at which the rank differs; `None` if it does not differ.
    pub(crate) step: Option<usize>,
    pub(crate) cause: FailureCause,
    /// The report of the agreement.
    pub(crate) report: Box<str>,
}

/// Repeats the agreement among the live ranks, each time without the ranks that were reported, until the remaining ranks
/// agree. Returns the seats of the reported ranks.
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
    match left.iter().find_map(|(seat, rank)| Some((*seat, first_differing_step(job, rank)?))) {
        None => Ok(reported),
        Some((seat, step)) => {
            let report = "the ranks agreed".into();
            Err(Disputed { seat, step: Some(step), cause: FailureCause::Missed, report })
        }
    }
}

/// Compares the histories of these ranks.
pub(crate) fn compare<L: Lock>(ranks: &[Seated<'_, L>]) -> Result<(), Box<Disagreement>> {
    let histories: Vec<RankHistory<'_>> =
        ranks.iter().map(|(_, rank)| RankHistory::new(&rank.allocator, Point::Sync)).collect();
    match agree_in_lockstep(&histories) {
        Ok(_) => Ok(()),
        Err(AgreementError::Disagreed(disagreement)) => Err(disagreement),
        Err(error) => panic!("an agreement in lockstep loses no messages: {error}"),
    }
}

/// Returns the first step at which a symmetric heap of the rank differs, or `None` if none does.
fn first_differing_step<L: Lock>(job: &RankJob, rank: &Rank<L>) -> Option<usize> {
    let symmetric = rank.standing.departed().filter(|(heap, _)| job.program.policies.of(heap.pool).symmetric());
    symmetric.map(|(_, departure)| departure.step).min()
}

/// Returns the seats of the ranks that differ from the reference, after checking the report about each against what the
/// simulator knows.
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
        let heap = HeapId { pool: job.program.policies.symmetric(difference.pool), group: difference.streams };
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

/// Checks the report about a heap and a group of ranks against what the simulator knows about one rank of the group.
fn check<L: Lock>(
    job: &RankJob,
    (heap, difference, group): (HeapId, &HeapDifference, &Group),
    rank: &Rank<L>,
) -> Result<(), (Option<usize>, FailureCause)> {
    let departure = rank.standing.departure(heap).ok_or((None, FailureCause::FalseAlarm))?;
    let named = difference.first_op..difference.last_op + 1;
    // In a pool that reclaims as a whole, a rank can take the same memory at a different step than the reference does.
    // The digests then differ after a step, although the histories diverge only at a later op.
    let named_may_be_later = job.program.policies.reclaims_as_a_whole(heap.pool);
    // If the histories do not reach back far enough, the report names the first divergence of any rank, together with
    // all ranks that differ now.
    let parted_may_be_later = group.action == Action::Forgotten;
    if (named_may_be_later || named.start < departure.ops.end)
        && (parted_may_be_later || departure.ops.start < named.end)
    {
        return Ok(());
    }
    let describe =
        |ops: &std::ops::Range<u64>| format!("ops {} to {} of the heap of {heap}", ops.start, ops.end - 1).into();
    let cause = FailureCause::WrongOpNamed { named: describe(&named), expected: describe(&departure.ops) };
    Err((Some(departure.step), cause))
}
