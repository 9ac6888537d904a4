//! Restarts: the state that a rank saves so that another process can continue in its place.

use symmalloc_core::backend::Backend;
use symmalloc_core::layout::Layout;
use symmalloc_core::lock::Lock;
use symmalloc_core::{Allocation, AllocationId, Handle, Op, Placement, PoolId, StreamId, generic};
use symmalloc_trace::layout;
use symmalloc_trace::replay::{Program, Replay};

/// The state of a rank between two ops of its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Number of ops executed.
    pub op: usize,
    /// Layout of every live pool as text, by pool.
    pub layouts: Vec<(PoolId, String)>,
    /// Live allocations by the program's id: stream, pool and placement.
    pub live: Vec<(AllocationId, StreamId, PoolId, Placement)>,
}

impl Checkpoint {
    /// Saves the state of a run after `op` ops.
    ///
    /// # Panics
    /// Panics if a pool holds memory of dead segments: its layout cannot be saved.
    pub fn take<B: Backend, L: Lock>(
        op: usize,
        allocator: &generic::Allocator<B, L>,
        program: &Program,
        replay: &Replay<'_, B, L>,
    ) -> Self {
        let pools = (0..allocator.pool_count()).map(PoolId).filter(|pool| allocator.pool_stats(*pool).is_ok());
        let save = |pool| (pool, layout::to_text(&allocator.save_layout(pool).expect("no segment should be retired")));
        let live = program.ops()[..op].iter().filter_map(|op| {
            let Op::Allocate { id, pool, stream, .. } = *op else { return None };
            // An allocation of zero bytes has no placement.
            let found = allocator.allocation(replay.handle(id)?);
            Some((id, stream, pool, found.map_or(Placement::NOWHERE, |found| found.placement)))
        });
        Checkpoint { op, live: live.collect(), layouts: pools.map(save).collect() }
    }

    /// Returns `true` if the allocation is live.
    pub fn is_live(&self, id: AllocationId) -> bool {
        self.live.binary_search_by_key(&id, |(id, ..)| *id).is_ok()
    }

    /// Returns the layout of a pool.
    ///
    /// # Panics
    /// Panics if the pool was not live.
    pub fn layout(&self, pool: PoolId) -> Layout {
        let (_, text) = self.layouts.iter().find(|(saved, _)| *saved == pool).expect("the pool was live");
        layout::parse(text).expect("written layouts can be read")
    }

    /// Continues in a new process: creates the program's streams and pools, restores the saved state, and returns a run whose next op is
    /// `op`. Passes every restored allocation to `look`.
    ///
    /// # Panics
    /// Panics if something cannot be restored.
    pub fn resume<'a, B: Backend, L: Lock>(
        &self,
        allocator: &'a generic::Allocator<B, L>,
        program: &'a Program,
        mut look: impl FnMut(AllocationId, StreamId, Allocation),
    ) -> Replay<'a, B, L> {
        let mut replay = Replay::new(allocator, program);
        for op in &program.ops()[..self.op] {
            let is_gone = |pool: &PoolId| self.layouts.iter().all(|(saved, _)| saved != pool);
            let is_wanted = match op {
                // A pool that was in use was not destroyed.
                Op::DestroyPool { pool } => is_gone(pool),
                // An allocation of zero bytes outlives its pool.
                Op::Allocate { id, pool, .. } => is_gone(pool) && self.is_live(*id),
                op => matches!(op, Op::RegisterStream { .. } | Op::CreatePool { .. }),
            };
            if is_wanted {
                // Ops that fail now, because they repeat or name a pool that is gone, also failed before.
                let _refused_or_not = replay.step(op);
            }
        }
        for (pool, _) in &self.layouts {
            self.restore_pool(*pool, allocator, &mut replay, &mut look);
        }
        replay
    }

    /// Restores one pool, and passes the handles of its live allocations to the run.
    ///
    /// # Panics
    /// Panics if the pool cannot be restored.
    pub fn restore_pool<B: Backend, L: Lock>(
        &self,
        pool: PoolId,
        allocator: &generic::Allocator<B, L>,
        replay: &mut Replay<'_, B, L>,
        mut look: impl FnMut(AllocationId, StreamId, Allocation),
    ) {
        let restored = allocator.restore_layout(pool, &self.layout(pool)).expect("it can be restored");
        let mut count = 0;
        for (id, stream, _, placement) in self.live.iter().filter(|(_, _, of, _)| *of == pool) {
            if *placement == Placement::NOWHERE {
                let nothing: Handle = restored.nothing(*stream).expect("the heap has a history");
                replay.adopt(*id, nothing);
                continue;
            }
            let found = restored.find(*stream, *placement).expect("the allocation should have been live");
            assert_eq!((found.allocation.placement, found.stream), (*placement, *stream));
            replay.adopt(*id, found.allocation.handle);
            look(*id, *stream, found.allocation);
            count += 1;
        }
        assert_eq!(restored.allocations().count(), count, "the program knows every live allocation");
    }
}
