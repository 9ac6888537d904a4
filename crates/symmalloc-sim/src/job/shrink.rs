//! Shrinking: reduces a failing plan to a smaller one that still fails in the same way.
//!
//! Uses delta debugging (Zeller and Hildebrandt, 2002): it omits parts, large ones first, and keeps each change after
//! which the plan still fails. A plan has parts of five kinds: ranks, steps, the context of each rank, threads, and
//! configuration. Each kind is tried in turn, repeatedly, until no kind shrinks further. The plan remains valid after
//! every omission.

use crate::device::Delays;
use crate::job::context::{AfterLoss, RankContext};
use crate::job::failure::Failure;
use crate::job::plan::JobPlan;
use crate::job::run::simulate;
use crate::job::schedule::Schedule;
use crate::job::steps::JobStep;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use symmalloc_core::{Config, Op, PoolConfig, PoolId, StreamId};

/// A failing plan that was shrunk as far as possible.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shrunk {
    /// The plan.
    pub plan: JobPlan,
    /// The failure of the plan.
    pub failure: Failure,
    /// Number of runs that shrinking took.
    pub runs: usize,
}

/// Shrinks a failing plan with at most `runs_max` runs. The result is determined by the arguments.
pub fn shrink(plan: JobPlan, failure: Failure, runs_max: usize) -> Shrunk {
    let mut shrinker = Shrinker { best: Shrunk { plan, failure, runs: 0 }, runs_max };
    loop {
        let before = shrinker.best.plan.clone();
        shrinker.ranks();
        shrinker.steps();
        shrinker.context();
        shrinker.threads();
        shrinker.configuration();
        if shrinker.best.plan == before || shrinker.best.runs >= runs_max {
            return shrinker.best;
        }
    }
}

struct Shrinker {
    best: Shrunk,
    runs_max: usize,
}

impl Shrinker {
    /// Keeps a plan if it fails in the same way as the best plan so far.
    fn try_plan(&mut self, plan: JobPlan) -> bool {
        if self.best.runs >= self.runs_max || plan == self.best.plan || plan.reference().is_none() {
            return false;
        }
        self.best.runs += 1;
        match simulate(&plan, NonZeroUsize::MIN, &mut |_| ()) {
            Err(failure) if failure.cause.is_like(&self.best.failure.cause) => {
                self.best = Shrunk { plan, failure, runs: self.best.runs };
                true
            }
            _ => false,
        }
    }

    /// Applies a change to the best plan, and keeps the changed plan if it fails in the same way.
    fn try_change(&mut self, change: impl FnOnce(&mut JobPlan)) -> bool {
        let mut plan = self.best.plan.clone();
        change(&mut plan);
        self.try_plan(plan)
    }

    fn ranks(&mut self) {
        let failing = self.best.failure.rank;
        let reference = self.best.plan.reference();
        self.try_change(|plan| {
            let mut seat = 0;
            plan.ranks.retain(|rank| {
                seat += 1;
                Some(seat - 1) == reference || Some(rank.rank) == failing
            });
        });
        self.leave_out(|plan| plan.ranks.len(), |plan, from, to| drop(plan.ranks.drain(from..to)));
    }

    fn steps(&mut self) {
        if let Some(step) = self.best.failure.step {
            self.try_change(|plan| plan.steps.truncate(step + 1));
        }
        self.leave_out(
            |plan| plan.steps.len(),
            |plan, from, to| {
                let is_kept = |(index, step): (usize, &JobStep)| !(from..to).contains(&index) || declares(&step.op);
                let kept = plan.steps.iter().enumerate().filter(|entry| is_kept((entry.0, entry.1)));
                plan.steps = without_dangling_steps(kept.map(|(_, step)| step.clone()));
            },
        );
        self.try_change(|plan| plan.steps = renumbered(&plan.steps));
    }

    /// Omits parts of a list: first halves, and finally single items.
    fn leave_out(&mut self, count: impl Fn(&JobPlan) -> usize, leave_out: impl Fn(&mut JobPlan, usize, usize)) {
        let mut part = count(&self.best.plan).div_ceil(2);
        while part > 0 {
            let mut from = 0;
            while from < count(&self.best.plan) {
                let to = (from + part).min(count(&self.best.plan));
                if !self.try_change(|plan| leave_out(plan, from, to)) {
                    from = to;
                }
            }
            part /= 2;
        }
    }

    fn context(&mut self) {
        let changes: [fn(&mut RankContext); 9] = [
            |rank| rank.private_per_million = 0,
            |rank| rank.restart_at = None,
            |rank| rank.memory_bytes = None,
            |rank| rank.asks_per_million = 0,
            |rank| rank.pace_ticks = 0,
            |rank| rank.delays = Delays::Immediate,
            |rank| rank.after_loss = AfterLoss::Leave,
            |rank| rank.schedule = Schedule::JobProgram,
            |rank| {
                rank.faults.pop();
            },
        ];
        for change in changes {
            self.try_change(|plan| plan.ranks.iter_mut().for_each(change));
            for seat in 0..self.best.plan.ranks.len() {
                self.try_change(|plan| change(&mut plan.ranks[seat]));
            }
        }
    }

    fn threads(&mut self) {
        self.try_change(|plan| plan.steps.iter_mut().for_each(|step| step.thread = 0));
        self.try_change(|plan| plan.steps.iter_mut().for_each(|step| step.name = None));
        for index in 0..self.best.plan.steps.len() {
            if self.best.plan.steps[index].thread > 0 {
                self.try_change(|plan| plan.steps[index].thread = 0);
            }
        }
    }

    fn configuration(&mut self) {
        self.try_change(|plan| plan.config = Config::default());
        for index in 0..self.best.plan.steps.len() {
            if let Op::RegisterStream { stream, .. } = self.best.plan.steps[index].op {
                self.try_change(|plan| plan.steps[index].op = Op::register(stream));
            }
            if let Op::CreatePool { pool, .. } = self.best.plan.steps[index].op {
                let config = Box::new(PoolConfig::default());
                self.try_change(|plan| plan.steps[index].op = Op::CreatePool { pool, config });
            }
        }
    }
}

fn declares(op: &Op) -> bool {
    matches!(op, Op::RegisterStream { .. } | Op::CreatePool { .. })
}

/// Removes steps that refer to a missing allocation, and unpaired step boundaries of a pool.
fn without_dangling_steps(steps: impl Iterator<Item = JobStep>) -> Vec<JobStep> {
    let (mut made, mut open) = (BTreeSet::new(), BTreeSet::new());
    let makes_sense = |step: &JobStep| match step.op {
        Op::Allocate { id, .. } => made.insert(id),
        Op::Free { id } | Op::RecordUse { id, .. } => made.contains(&id),
        Op::BeginStep { pool, .. } => open.insert(pool),
        Op::EndStep { pool } => open.remove(&pool),
        Op::DestroyPool { pool } => {
            open.remove(&pool);
            true
        }
        _ => true,
    };
    steps.filter(makes_sense).collect()
}

/// Returns the steps without unused streams and pools, and with the remaining ones renumbered.
fn renumbered(steps: &[JobStep]) -> Vec<JobStep> {
    let (mut streams, mut pools) = (BTreeSet::new(), BTreeSet::new());
    for step in steps {
        match step.op {
            Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => {
                streams.insert(stream);
                pools.insert(pool);
            }
            Op::RecordUse { stream, .. } | Op::Synchronize { stream } => drop(streams.insert(stream)),
            Op::Wait { stream, on } => streams.extend([stream, on]),
            Op::Trim { pool: Some(pool) }
            | Op::DestroyPool { pool }
            | Op::ResetPool { pool }
            | Op::BeginStep { pool, .. }
            | Op::EndStep { pool }
            | Op::Sleep { pool, .. }
            | Op::Wake { pool } => drop(pools.insert(pool)),
            _ => {}
        }
    }
    pools.insert(PoolId::DEFAULT);
    let streams: BTreeMap<StreamId, StreamId> = streams.into_iter().zip((0..).map(StreamId)).collect();
    let mut groups: BTreeMap<StreamId, StreamId> = BTreeMap::new();
    let pools: BTreeMap<PoolId, PoolId> = pools.into_iter().zip((0..).map(PoolId)).collect();
    let renumber = |step: &JobStep| {
        let mut step = step.clone();
        match &mut step.op {
            Op::RegisterStream { stream, group } => {
                *stream = *streams.get(stream)?;
                // If the first stream of a group is omitted, the group is named after its next stream.
                *group = *groups.entry(*group).or_insert(*stream);
            }
            Op::CreatePool { pool, .. } => *pool = *pools.get(pool)?,
            Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => {
                (*pool, *stream) = (pools[pool], streams[stream]);
            }
            Op::RecordUse { stream, .. } | Op::Synchronize { stream } => *stream = streams[stream],
            Op::Wait { stream, on } => (*stream, *on) = (streams[stream], streams[on]),
            Op::Trim { pool: Some(pool) }
            | Op::DestroyPool { pool }
            | Op::ResetPool { pool }
            | Op::BeginStep { pool, .. }
            | Op::EndStep { pool }
            | Op::Sleep { pool, .. }
            | Op::Wake { pool } => *pool = pools[pool],
            _ => {}
        }
        Some(step)
    };
    steps.iter().filter_map(renumber).collect()
}
