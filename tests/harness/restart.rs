//! Restarts: what a rank writes down so that another process can go on in its place.

use symmalloc_core::backend::Backend;
use symmalloc_core::layout::Layout;
use symmalloc_core::lock::Lock;
use symmalloc_core::{Allocation, AllocationId, Allocator, Handle, Op, Placement, PoolId, StreamId};
use symmalloc_trace::layout;
use symmalloc_trace::replay::{Program, Replay};

/// A rank between two ops of its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Number of ops that are done.
    pub op: usize,
    /// The text of every live pool's layout, by pool.
    pub layouts: Vec<(PoolId, String)>,
    /// What the program holds, by its name for the allocation: the stream it was allocated for, and where it lies.
    pub live: Vec<(AllocationId, StreamId, PoolId, Placement)>,
}

impl Checkpoint {
    /// Writes down where a run is after `op` ops.
    ///
    /// # Panics
    /// When a pool holds memory of dead segments: its layout cannot be saved.
    pub fn take<B: Backend, L: Lock>(
        op: usize,
        allocator: &Allocator<B, L>,
        program: &Program,
        replay: &Replay<'_, B, L>,
    ) -> Self {
        let pools = (0..allocator.pool_count()).map(PoolId).filter(|pool| allocator.pool_stats(*pool).is_ok());
        let save = |pool| (pool, layout::to_text(&allocator.save_layout(pool).expect("nothing is retired")));
        let live = program.ops()[..op].iter().filter_map(|op| {
            let Op::Allocate { id, pool, stream, .. } = *op else { return None };
            // An allocation of zero bytes lies nowhere.
            let found = allocator.allocation(replay.handle(id)?);
            Some((id, stream, pool, found.map_or(Placement::NOWHERE, |found| found.placement)))
        });
        Checkpoint { op, live: live.collect(), layouts: pools.map(save).collect() }
    }

    /// Whether the program holds the allocation.
    pub fn is_live(&self, id: AllocationId) -> bool {
        self.live.binary_search_by_key(&id, |(id, ..)| *id).is_ok()
    }

    /// The layout of a pool.
    ///
    /// # Panics
    /// When the pool was not live.
    pub fn layout(&self, pool: PoolId) -> Layout {
        let (_, text) = self.layouts.iter().find(|(saved, _)| *saved == pool).expect("the pool was live");
        layout::parse(text).expect("a layout reads what it wrote")
    }

    /// Goes on in a new process: makes the streams and pools of the program, restores what was written down, and returns a run
    /// that can carry out the op with number `op`. Shows every allocation that is live again to `look`.
    ///
    /// # Panics
    /// When something cannot be restored.
    pub fn resume<'a, B: Backend, L: Lock>(
        &self,
        allocator: &'a Allocator<B, L>,
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
                // What a program does in vain, twice or with a pool that is gone, it did in vain before.
                let _refused_or_not = replay.step(op);
            }
        }
        for (pool, _) in &self.layouts {
            self.restore_pool(*pool, allocator, &mut replay, &mut look);
        }
        replay
    }

    /// Restores one pool, and gives the run the handles of what is live in it.
    ///
    /// # Panics
    /// When it cannot be restored.
    pub fn restore_pool<B: Backend, L: Lock>(
        &self,
        pool: PoolId,
        allocator: &Allocator<B, L>,
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
            let found = restored.find(*stream, *placement).expect("it was live");
            assert_eq!((found.allocation.placement, found.stream), (*placement, *stream));
            replay.adopt(*id, found.allocation.handle);
            look(*id, *stream, found.allocation);
            count += 1;
        }
        assert_eq!(restored.allocations().count(), count, "the program knows all that is live");
    }
}
