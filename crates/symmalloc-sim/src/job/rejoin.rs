//! Rejoining: a rank that starts again on a new device, from layouts that were saved at the last sync, and has the same
//! future as the others from there on.
//!
//! ```text
//!  a rank at the sync ──► the layout of each pool, as text ──┐
//!                         what the program holds, and where ─┴─► new device, new allocator ─► the rank, again
//! ```
//! A rank that restarts of its own accord has saved its own layouts. One that was lost, or came to differ, gets those of
//! the reference: what a layout says is the same on all ranks.

use crate::job::context::RankContext;
use crate::job::device_work::LiveBlock;
use crate::job::failure::FailureCause;
use crate::job::rank::{Rank, RankJob};
use std::collections::BTreeMap;
use symmalloc_core::lock::Lock;
use symmalloc_core::{Op, Placement, PoolId, StreamId};
use symmalloc_trace::layout;

/// What a rank writes down at a sync.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    /// Number of streams that the program had registered.
    streams: usize,
    /// By pool: the text of its layout; `None` if it was given up.
    layouts: Vec<Option<String>>,
    /// By slot, of live allocations.
    live: Vec<(usize, Kept)>,
}

/// A live allocation, by its home and its place.
#[derive(Clone, Copy, Debug)]
struct Kept {
    pool: PoolId,
    stream: StreamId,
    /// [`Placement::NOWHERE`] for one of zero bytes.
    placement: Placement,
}

impl Checkpoint {
    /// Writes down where a rank is after so many stretches. `None` when a layout cannot be saved: the driver still has
    /// memory of dead segments, or a pool has stitched ranges or plans.
    pub(crate) fn take<L: Lock>(job: &RankJob, rank: &Rank<L>, stretches: usize) -> Option<Self> {
        let layouts = (0..rank.pools.len()).map(|pool| {
            let pool = rank.pools[pool];
            // A pool that was given up has no statistics.
            let is_there = rank.allocator.pool_stats(pool).is_ok();
            is_there.then(|| rank.allocator.save_layout(pool).map(|layout| layout::to_text(&layout))).transpose()
        });
        let homes = homes_of_slots(job, stretches);
        let live = rank.live.iter().enumerate().filter_map(|(slot, live)| {
            let handle = live.as_ref()?.handle;
            let (pool, stream) = homes[&slot];
            let found = handle.and_then(|handle| rank.allocator.allocation(handle).ok());
            Some((slot, Kept { pool, stream, placement: found.map_or(Placement::NOWHERE, |found| found.placement) }))
        });
        Some(Checkpoint {
            streams: rank.streams,
            layouts: layouts.collect::<Result<_, _>>().ok()?,
            live: live.collect(),
        })
    }

    /// Starts a rank again. Nothing happens to the new one, but that it goes on working for itself.
    pub(crate) fn resume<L: Lock>(
        &self,
        job: &RankJob,
        context: &RankContext,
        incarnation: u32,
    ) -> Result<Rank<L>, FailureCause> {
        let restarted = RankContext { faults: Vec::new(), memory_bytes: None, restart_at: None, ..context.clone() };
        let mut rank = Rank::new(job, restarted, incarnation);
        (0..self.streams).for_each(|_| rank.register_stream());
        (1..self.layouts.len()).for_each(|pool| rank.create_pool(job.program.policies.of(PoolId(pool as u32))));
        for (pool, layout) in self.layouts.iter().enumerate() {
            let not_restored = |error: &dyn std::error::Error| FailureCause::NotRestored(error.to_string().into());
            let own = rank.pools[pool];
            let Some(text) = layout else {
                rank.allocator.destroy_pool(own).map_err(|error| not_restored(&error))?;
                continue;
            };
            let layout = layout::parse(text).map_err(|error| not_restored(&error))?;
            let restored = rank.allocator.restore_layout(own, &layout).map_err(|error| not_restored(&error))?;
            for (slot, kept) in self.live.iter().filter(|(_, kept)| kept.pool.index() == pool) {
                let live = if kept.placement == Placement::NOWHERE {
                    restored.nothing(kept.stream).map(LiveBlock::nothing)
                } else {
                    let found = restored.find(kept.stream, kept.placement);
                    let begin = |allocation| LiveBlock::begin(rank.allocator.backend(), kept.stream, allocation);
                    found.map(|found| begin(&found.allocation)).transpose()?
                };
                let lost = || FailureCause::NotRestored(format!("nothing was restored at {}", kept.placement).into());
                rank.live[*slot] = Some(live.ok_or_else(lost)?);
            }
        }
        // An allocation of zero bytes outlives its pool, but there is nothing of it to restore.
        for (slot, _) in self.live.iter().filter(|(_, kept)| self.layouts[kept.pool.index()].is_none()) {
            rank.live[*slot] = Some(LiveBlock::of_a_pool_that_is_gone());
        }
        Ok(rank)
    }
}

/// Which heap the allocation in each slot is of, after so many stretches.
fn homes_of_slots(job: &RankJob, stretches: usize) -> BTreeMap<usize, (PoolId, StreamId)> {
    let program = &job.program;
    let done = program.stretches[..stretches].last().map_or(0, |stretch| stretch.steps.end);
    let made = program.steps[..done].iter().zip(&program.slots).filter_map(|(step, slot)| match step.op {
        Op::Allocate { pool, stream, .. } => Some((*slot as usize, (pool, stream))),
        _ => None,
    });
    // The last one that was given the slot is in it.
    made.collect()
}
