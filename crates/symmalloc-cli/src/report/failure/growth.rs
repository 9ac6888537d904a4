//! Holders that grow throughout the job, such as a list that keeps a tensor of every step.
//!
//! ```text
//! bytes ▲                    ┌─ at the request
//!       │            ┌───────┘
//!       │    ┌───────┘            grows: each quarter of the job adds a good part of it
//!       └────┴───────┴───────┴──► ops
//! ```

use super::super::holders::Holder;
use crate::quantity::memory;
use std::collections::BTreeMap;
use std::sync::Arc;
use symmalloc_core::ids::PoolId;
use symmalloc_core::op::{Op, Record};
use symmalloc_text::visible_line;

/// A holder that grows has at least one tenth of all live memory.
const LIVE_SHARE: u64 = 10;

/// In each quarter of the job, a holder that grows gains at least one eighth of its final size.
const QUARTER_SHARE: u64 = 8;

/// Minimum number of live allocations of a holder that grows.
const ALLOCATIONS_MIN: usize = 16;

/// A holder that grows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    label: String,
    /// Live bytes after each quarter of the ops, the last of which ends at the request.
    pub(super) quarters: [u64; 4],
}

/// Allocations with one name, or without a name and with one size.
type Kind = (Option<Arc<str>>, Option<u64>);

impl Growth {
    /// Returns the holder that grows most before the request of an op, in one pool or in all pools. Returns `None` if
    /// no holder grows.
    pub(super) fn of(records: &[Record], op: usize, of_pool: Option<PoolId>) -> Option<Self> {
        let mut by_id = BTreeMap::new();
        let mut live: BTreeMap<Kind, (usize, u64)> = BTreeMap::new();
        let mut after: Vec<BTreeMap<Kind, (usize, u64)>> = Vec::new();
        for (number, record) in records[..op].iter().enumerate() {
            match record.op {
                Op::Allocate { id, size_bytes, pool, .. } if of_pool.is_none_or(|meant| meant == pool) => {
                    let kind = (record.name.clone(), record.name.is_none().then_some(size_bytes));
                    let (count, bytes) = live.entry(kind.clone()).or_default();
                    (*count, *bytes) = (*count + 1, bytes.saturating_add(size_bytes));
                    by_id.insert(id, (kind, size_bytes));
                }
                Op::Free { id } => {
                    if let Some((kind, size_bytes)) = by_id.remove(&id)
                        && let Some((count, bytes)) = live.get_mut(&kind)
                    {
                        (*count, *bytes) = (*count - 1, bytes.saturating_sub(size_bytes));
                    }
                }
                _ => {}
            }
            if (number + 1) * 4 / op > after.len() && after.len() < 3 {
                after.push(live.clone());
            }
        }
        let all_bytes: u64 = live.values().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let grows = |(kind, (count, bytes)): (&Kind, &(usize, u64))| {
            let mut quarters = [0, 0, 0, *bytes];
            for (quarter, live) in quarters.iter_mut().zip(&after) {
                *quarter = live.get(kind).map_or(0, |(_, bytes)| *bytes);
            }
            let adds = quarters.windows(2).all(|pair| pair[1] >= pair[0].saturating_add(bytes / QUARTER_SHARE));
            let is_large = *count >= ALLOCATIONS_MIN && *bytes >= all_bytes / LIVE_SHARE && *bytes > 0;
            (adds && is_large && after.len() == 3).then(|| {
                let holder = Holder {
                    name: kind.0.as_deref().map(Into::into),
                    each_bytes: kind.1,
                    allocations: *count,
                    requested_bytes: *bytes,
                };
                Growth { label: visible_line(&holder.label()).to_string(), quarters }
            })
        };
        live.iter().filter_map(grows).max_by_key(|growth| growth.quarters[3])
    }

    /// Describes the growth.
    pub(super) fn text(&self) -> String {
        let [first, second, third, last] = self.quarters.map(memory);
        let label = &self.label;
        format!(
            "{label}: {first} live after a quarter of these ops, {second} after half, {third} after three quarters, {last} now"
        )
    }

    /// Describes the remedy, and what only postpones the failure.
    pub(super) fn remedy(&self, postponing: &str) -> String {
        format!(
            "{} grows through the whole job: free what is no longer needed. If all of it is needed, {postponing}; otherwise, that \
             only postpones the failure",
            self.label
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::{AllocationId, StreamId};

    /// Returns a job of steps, in each of which `live` states how many of the named allocations are live.
    fn job(live: impl Fn(u64) -> u64) -> Vec<Record> {
        let mut records = Vec::new();
        let mut kept = Vec::new();
        let mut next = 0;
        for step in 0..100 {
            let allocate = |id: u64, size_bytes: u64| {
                Record::from(Op::Allocate {
                    id: AllocationId(id),
                    pool: PoolId::DEFAULT,
                    stream: StreamId(0),
                    size_bytes,
                })
            };
            records
                .extend([allocate(1_000_000 + step, 1 << 20), Op::Free { id: AllocationId(1_000_000 + step) }.into()]);
            while (kept.len() as u64) < live(step) {
                records.push(allocate(next, 1000).with_name("kept"));
                kept.push(next);
                next += 1;
            }
            while (kept.len() as u64) > live(step) {
                records.push(Op::Free { id: AllocationId(kept.remove(0)) }.into());
            }
        }
        records
    }

    #[test]
    fn what_grows_through_the_whole_job_is_found_and_nothing_else() {
        let quarters = |live: &dyn Fn(u64) -> u64| {
            let records = job(live);
            Growth::of(&records, records.len(), None).map(|growth| (growth.label.clone(), growth.quarters[3]))
        };
        let found = |bytes| Some(("kept".to_owned(), bytes));
        assert_eq!(quarters(&|step| step + 1), found(100_000));
        assert_eq!(quarters(&|step| 30 + step * 2), found(228_000));
        // Constant, filled at the beginning or at the end, up and down, or few.
        for live in [
            &|_| 50,
            &|step| step.min(20) * 5,
            &|step| step.saturating_sub(70),
            &|step| if step < 50 { step } else { 100 - step },
            &|step| step / 10,
            &|_| 0,
        ] as [&dyn Fn(u64) -> u64; 6]
        {
            assert_eq!(quarters(live), None);
        }
        assert_eq!(Growth::of(&[], 0, None), None);
        let records = job(|step| step);
        assert_eq!(Growth::of(&records, records.len(), Some(PoolId(1))), None);
    }
}
