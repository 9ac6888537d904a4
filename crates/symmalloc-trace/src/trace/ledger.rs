//! The ledger: the ids that earlier records declared, against which each further record is checked.
//!
//! The reader and the writer check records against the same kind of ledger, so a writer never writes text that a reader rejects. The ledger
//! knows only ids: the existing streams and pools, the allocation ids in use, and the freed ones. The allocator checks sizes, limits, and
//! that a destroyed pool is empty.
//!
//! The ledger keeps two bits per allocation id, in pages of 64 ids. Recorders count ids upward, so the pages form an array as long as ids
//! stay within a small multiple of the number of allocations. Larger ids go into an ordered map. The memory is therefore bounded by the
//! number of allocations, even if a hostile trace uses huge ids:
//!
//! ```text
//! dense pages ≤ 1024 + 2 · allocations        sparse pages ≤ allocations
//! ```

use std::collections::{BTreeMap, BTreeSet};

use super::error::Inconsistency;
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{AllocationId, ObserverId, PoolId, StreamId};
use symmalloc_core::op::{NAME_BYTES_MAX, Op, Record};

/// The ids that earlier records declared.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// The registered streams and their groups.
    groups: Groups,
    /// `true` for each pool that still exists, `false` for each destroyed pool, and `None` for unused keys. The default
    /// pool is not included: element i is pool i + 1.
    pools_alive: Vec<Option<bool>>,
    /// `true` once the default pool can no longer be configured.
    default_pool_settled: bool,
    /// `true` for each observer that is still registered.
    observers_alive: Vec<bool>,
    /// Pools with an open step.
    open_steps: BTreeSet<PoolId>,
    allocations: Allocations,
}

impl Ledger {
    /// Checks the record against earlier ones and adds it. After an error, the ledger is unchanged.
    pub(super) fn admit(&mut self, record: &Record) -> Result<(), Inconsistency> {
        if let Op::Allocate { size_bytes, .. } = record.op {
            if let Some(block_bytes) = record.revived_bytes
                && (record.placement.is_none() || !(1..=block_bytes.get()).contains(&size_bytes))
            {
                return Err(Inconsistency::RevivedNowhere { size_bytes, block_bytes: block_bytes.get() });
            }
        } else if record.placement.is_some() || record.revived_bytes.is_some() {
            return Err(Inconsistency::NotAnAllocation);
        }
        if let Some(name) = &record.name {
            if !matches!(record.op, Op::Allocate { .. } | Op::Refuse { .. } | Op::RegisterStream { .. }) {
                return Err(Inconsistency::NotAnAllocation);
            }
            if name.len() > NAME_BYTES_MAX {
                return Err(Inconsistency::NameTooLong { bytes: name.len() });
            }
        }
        if record.pending.is_some() && !matches!(record.op, Op::Free { .. }) {
            return Err(Inconsistency::NotAFree);
        }
        self.admit_op(&record.op)
    }

    fn admit_op(&mut self, op: &Op) -> Result<(), Inconsistency> {
        match *op {
            Op::RegisterStream { stream, group } => {
                if stream.index() != self.groups.stream_count() {
                    return Err(Inconsistency::StreamOutOfOrder { stream, next: self.groups.stream_count() as u32 });
                }
                if stream > StreamId::MAX {
                    return Err(Inconsistency::TooManyStreams);
                }
                let registered = self.groups.register((group != stream).then_some(group));
                registered.ok_or(Inconsistency::UnknownGroup { stream, group })?;
            }
            Op::CreatePool { pool, .. } => self.create_pool(pool)?,
            Op::DestroyPool { pool } => {
                self.pool(pool)?;
                self.open_steps.remove(&pool);
                match pool.index().checked_sub(1) {
                    Some(index) => self.pools_alive[index] = Some(false),
                    None => return Err(Inconsistency::DefaultPoolDestroyed),
                }
            }
            Op::ResetPool { pool } => {
                self.pool(pool)?;
                self.default_pool_settled = true;
            }
            Op::Allocate { id, pool, stream, .. } => {
                self.pool(pool)?;
                self.stream(stream)?;
                self.allocations.allocate(id)?;
                self.default_pool_settled = true;
            }
            Op::Free { id } => self.allocations.free(id)?,
            Op::RecordUse { id, stream } => {
                self.stream(stream)?;
                self.allocations.live(id)?;
            }
            Op::Wait { stream, on } => {
                self.stream(stream)?;
                self.stream(on)?;
            }
            Op::Synchronize { stream } => self.stream(stream)?,
            Op::Reserve { pool, stream, .. } | Op::Reclaim { pool, stream, .. } | Op::Refuse { pool, stream, .. } => {
                self.pool(pool)?;
                self.stream(stream)?;
                self.default_pool_settled = true;
            }
            Op::Trim { pool } => {
                pool.map_or(Ok(()), |pool| self.pool(pool))?;
                self.default_pool_settled = true;
            }
            Op::Observe { observer, pool } => {
                self.pool(pool)?;
                self.observe(observer)?;
            }
            Op::Acknowledge { observer } => drop(self.observer(observer)?),
            Op::Forget { observer } => *self.observer(observer)? = false,
            Op::BeginStep { pool, .. } => {
                self.pool(pool)?;
                if !self.open_steps.insert(pool) {
                    return Err(Inconsistency::StepOpen { pool });
                }
                self.default_pool_settled = true;
            }
            Op::EndStep { pool } => {
                self.pool(pool)?;
                if !self.open_steps.remove(&pool) {
                    return Err(Inconsistency::StepNotOpen { pool });
                }
            }
            Op::Sleep { pool, .. } | Op::Wake { pool } | Op::Stay { pool, .. } => {
                self.pool(pool)?;
                if matches!(op, Op::Sleep { .. }) && self.open_steps.contains(&pool) {
                    return Err(Inconsistency::StepOpen { pool });
                }
                self.default_pool_settled = true;
            }
            Op::Sync => {}
        }
        Ok(())
    }

    fn create_pool(&mut self, pool: PoolId) -> Result<(), Inconsistency> {
        if pool == PoolId::DEFAULT {
            if self.default_pool_settled {
                return Err(Inconsistency::DefaultPoolInUse);
            }
            self.default_pool_settled = true;
            return Ok(());
        }
        let (index, count) = (pool.index() - 1, self.pools_alive.len());
        let is_used = self.pools_alive.get(index).is_some_and(Option::is_some);
        if is_used || index > count && pool > PoolId::KEY_MAX {
            let next = u32::try_from(count + 1).unwrap_or(u32::MAX);
            return Err(Inconsistency::PoolOutOfOrder { pool, next });
        }
        self.pools_alive.resize((index + 1).max(count), None);
        self.pools_alive[index] = Some(true);
        Ok(())
    }

    fn observe(&mut self, observer: ObserverId) -> Result<(), Inconsistency> {
        if observer.index() != self.observers_alive.len() {
            let next = u32::try_from(self.observers_alive.len()).unwrap_or(u32::MAX);
            return Err(Inconsistency::ObserverOutOfOrder { observer, next });
        }
        self.observers_alive.push(true);
        Ok(())
    }

    fn observer(&mut self, observer: ObserverId) -> Result<&mut bool, Inconsistency> {
        let alive = self.observers_alive.get_mut(observer.index()).filter(|is_alive| **is_alive);
        alive.ok_or(Inconsistency::UnknownObserver { observer })
    }

    #[inline]
    fn stream(&self, stream: StreamId) -> Result<(), Inconsistency> {
        if stream.index() < self.groups.stream_count() { Ok(()) } else { Err(Inconsistency::UnknownStream { stream }) }
    }

    #[inline]
    fn pool(&self, pool: PoolId) -> Result<(), Inconsistency> {
        match pool.index().checked_sub(1).map(|index| self.pools_alive.get(index).copied().flatten()) {
            None | Some(Some(true)) => Ok(()),
            Some(Some(false)) => Err(Inconsistency::DestroyedPool { pool }),
            Some(None) => Err(Inconsistency::UnknownPool { pool }),
        }
    }
}

/// The allocation ids in use and the freed ids.
#[derive(Debug, Default)]
struct Allocations {
    /// Pages 0, 1, 2, ...
    dense: Vec<Page>,
    /// Pages far beyond the number of allocations. If `dense` later grows over such a page, the page exists in both places, but each id is
    /// in only one of them.
    sparse: BTreeMap<u64, Page>,
    /// Number of ids ever allocated.
    count: u64,
}

/// Two bits for each of 64 ids: `given` is set for ids in use and for freed ids, `freed` only for freed ids.
#[derive(Clone, Copy, Debug, Default)]
struct Page {
    given: u64,
    freed: u64,
}

impl Allocations {
    /// Number of dense pages allowed beyond twice the number of allocations.
    const DENSE_SLACK: u64 = 1024;

    fn allocate(&mut self, id: AllocationId) -> Result<(), Inconsistency> {
        let (page, bit) = place(id);
        if self.page(page, bit).is_some() {
            return Err(Inconsistency::DuplicateAllocation { id });
        }
        if page < Self::DENSE_SLACK + 2 * self.count {
            let page = page as usize;
            if page >= self.dense.len() {
                self.dense.resize(page + 1, Page::default());
            }
            self.dense[page].given |= bit;
        } else {
            self.sparse.entry(page).or_default().given |= bit;
        }
        self.count += 1;
        Ok(())
    }

    fn free(&mut self, id: AllocationId) -> Result<(), Inconsistency> {
        let (page, bit) = place(id);
        match self.page(page, bit) {
            None => Err(Inconsistency::UnknownAllocation { id }),
            Some(page) if page.freed & bit != 0 => Err(Inconsistency::FreedAllocation { id }),
            Some(page) => {
                page.freed |= bit;
                Ok(())
            }
        }
    }

    fn live(&mut self, id: AllocationId) -> Result<(), Inconsistency> {
        let (page, bit) = place(id);
        match self.page(page, bit) {
            None => Err(Inconsistency::UnknownAllocation { id }),
            Some(page) if page.freed & bit != 0 => Err(Inconsistency::FreedAllocation { id }),
            Some(_) => Ok(()),
        }
    }

    /// Returns the page that contains the id with this bit, if the id is in use or freed.
    #[inline]
    fn page(&mut self, page: u64, bit: u64) -> Option<&mut Page> {
        let dense = usize::try_from(page).ok().and_then(|page| self.dense.get_mut(page));
        match dense {
            Some(found) if found.given & bit != 0 => Some(found),
            _ if self.sparse.is_empty() => None,
            _ => self.sparse.get_mut(&page).filter(|found| found.given & bit != 0),
        }
    }
}

/// Returns the page and the bit of an id.
#[inline]
fn place(id: AllocationId) -> (u64, u64) {
    (id.0 / 64, 1 << (id.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn allocation_ids_far_apart_take_no_memory() {
        let mut allocations = Allocations::default();
        for i in 0..1000_u64 {
            allocations.allocate(AllocationId(i << 50)).expect("the id should be new");
        }
        assert!(allocations.dense.len() as u64 <= Allocations::DENSE_SLACK);
        assert_eq!(allocations.sparse.len(), 999);
    }

    #[test]
    fn an_id_given_in_a_sparse_page_is_found_after_dense_pages_grew_over_it() {
        let mut allocations = Allocations::default();
        let early = AllocationId((Allocations::DENSE_SLACK + 10) * 64);
        allocations.allocate(early).expect("the id should be new");
        assert_eq!(allocations.sparse.len(), 1);
        for i in 0..100 {
            allocations.allocate(AllocationId(i)).expect("the id should be new");
        }
        allocations.allocate(AllocationId(early.0 + 1)).expect("a new id in a dense page");
        assert!(allocations.dense.len() as u64 > early.0 / 64);
        assert_eq!(allocations.allocate(early), Err(Inconsistency::DuplicateAllocation { id: early }));
        assert_eq!(allocations.free(early), Ok(()));
        assert_eq!(allocations.free(early), Err(Inconsistency::FreedAllocation { id: early }));
        assert_eq!(allocations.live(AllocationId(early.0 + 1)), Ok(()));
    }

    proptest! {
        /// Tests the allocations against a naive model: a map from each id to a flag that is `true` while the id is
        /// live.
        #[test]
        fn allocations_agree_with_a_map(steps in prop::collection::vec((0..3_u8, arbitrary_id()), 0..400)) {
            let mut allocations = Allocations::default();
            let mut model = BTreeMap::new();
            for (step, id) in steps {
                let known = model.get(&id).copied();
                let id = AllocationId(id);
                let (answer, expected) = match (step, known) {
                    (0, None) => (allocations.allocate(id), Ok(())),
                    (0, Some(_)) => (allocations.allocate(id), Err(Inconsistency::DuplicateAllocation { id })),
                    (1, Some(true)) => (allocations.free(id), Ok(())),
                    (2, Some(true)) => (allocations.live(id), Ok(())),
                    (1, Some(false)) => (allocations.free(id), Err(Inconsistency::FreedAllocation { id })),
                    (2, Some(false)) => (allocations.live(id), Err(Inconsistency::FreedAllocation { id })),
                    (1, None) => (allocations.free(id), Err(Inconsistency::UnknownAllocation { id })),
                    _ => (allocations.live(id), Err(Inconsistency::UnknownAllocation { id })),
                };
                prop_assert_eq!(answer, expected);
                if answer.is_ok() && step < 2 {
                    model.insert(id.0, step == 0);
                }
            }
        }
    }

    fn arbitrary_id() -> impl Strategy<Value = u64> {
        prop_oneof![4 => 0..40_u64, 2 => (1024 * 64 - 20)..(1024 * 64 + 64_000_u64), 1 => any::<u64>()]
    }
}
