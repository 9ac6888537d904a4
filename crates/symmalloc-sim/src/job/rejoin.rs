//! Restarts of ranks: a rank starts on a new device from layouts that were saved at the last sync. From then on, it
//! must behave like the other ranks.
//!
//! ```text
//!  a rank at the sync ──► the layout of each pool, as text ─┐
//!                         live allocations and locations   ─┴─► new device, new allocator ─► restarted rank
//! ```
//! A rank with a scheduled restart uses its own layouts. A rank that was lost or that differs uses the reference's
//! layouts, because layouts are the same on all ranks.

use crate::job::context::RankContext;
use crate::job::device_work::LiveBlock;
use crate::job::failure::FailureCause;
use crate::job::rank::{Rank, RankJob};
use std::collections::BTreeMap;
use symmalloc_core::lock::Lock;
use symmalloc_core::{Op, Placement, PoolId, StreamId};
use symmalloc_trace::layout;

/// The state that a rank saves at a sync.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    /// Number of streams that the program had registered.
    streams: usize,
    /// Layouts as text, by pool; `None` for a destroyed pool.
    layouts: Vec<Option<String>>,
    /// Live allocations, by slot.
    live: Vec<(usize, Kept)>,
}

/// A live allocation: its heap and its location.
#[derive(Clone, Copy, Debug)]
struct Kept {
    pool: PoolId,
    stream: StreamId,
    /// [`Placement::NOWHERE`] for a zero-byte allocation.
    placement: Placement,
}

impl Checkpoint {
    /// Saves the state of a rank after `stretches` stretches. Returns `None` if a layout cannot be saved, either
    /// because the driver still holds memory of dead segments, or because a pool has stitched ranges or plans.
    pub(crate) fn take<L: Lock>(job: &RankJob, rank: &Rank<L>, stretches: usize) -> Option<Self> {
        let layouts = (0..rank.pools.len()).map(|pool| {
            let pool = rank.pools[pool];
            // A destroyed pool has no statistics.
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

    /// Restarts a rank. The new rank has no faults, but continues the private work.
    pub(crate) fn resume<L: Lock>(
        &self,
        job: &RankJob,
        context: &RankContext,
        incarnation: u32,
    ) -> Result<Rank<L>, FailureCause> {
        let restarted = RankContext { faults: Vec::new(), memory_bytes: None, restart_at: None, ..context.clone() };
        let mut rank = Rank::new(job, restarted, incarnation);
        for stream in (0..self.streams as u16).map(StreamId) {
            let group = job.program.policies.groups().first_of(stream);
            rank.register_stream((group != stream).then_some(group));
        }
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
                let lost =
                    || FailureCause::NotRestored(format!("no allocation was restored at {}", kept.placement).into());
                rank.live[*slot] = Some(live.ok_or_else(lost)?);
            }
        }
        // A zero-byte allocation outlives its pool, but there is no state to restore.
        for (slot, _) in self.live.iter().filter(|(_, kept)| self.layouts[kept.pool.index()].is_none()) {
            rank.live[*slot] = Some(LiveBlock::outliving_its_pool());
        }
        Ok(rank)
    }
}

/// Returns the heap of the allocation in each slot after `stretches` stretches.
fn homes_of_slots(job: &RankJob, stretches: usize) -> BTreeMap<usize, (PoolId, StreamId)> {
    let program = &job.program;
    let done = program.stretches[..stretches].last().map_or(0, |stretch| stretch.steps.end);
    let made = program.steps[..done].iter().zip(&program.slots).filter_map(|(step, slot)| match step.op {
        Op::Allocate { pool, stream, .. } => Some((*slot as usize, (pool, stream))),
        _ => None,
    });
    // If several allocations used a slot, the last one occupies it.
    made.collect()
}
