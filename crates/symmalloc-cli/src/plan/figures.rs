//! The memory of a job with its plan, compared with the memory without a plan (online).

use crate::args::PolicyArgs;
use crate::error::CliError;
use crate::job::{PlannedOps, Steady};
use crate::planned::PlannedJob;
use crate::recorded::Recorded;
use std::sync::Arc;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::op::Op;
use symmalloc_core::plans::SearchBudget;
use symmalloc_trace::plan::PlanFile;

/// Numbers of a job over all passes. With several ranks, each number is the maximum over the ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    /// Peak of requested bytes over all pools.
    pub(super) peak_live_bytes: u64,
    /// Peak of reserved bytes with the plan.
    pub(super) planned_bytes: u64,
    /// Peak of reserved bytes without a plan.
    pub(super) online_bytes: u64,
    /// Memory that the plans place allocations in.
    pub(super) plan_bytes: u64,
    pub(super) plans: usize,
    /// Number of requests in all passes, and how many of them the plan placed. With several ranks, the numbers of the rank with the lowest
    /// share.
    ops: Option<PlannedOps>,
    /// Waits of streams for each other per pass, with the plan and without.
    pub(super) waits: u64,
    pub(super) online_waits: u64,
    /// Requests that a limit refuses in all passes, with the plan and without.
    pub(super) refused: u64,
    pub(super) online_refused: u64,
    pub(super) passes: u32,
    /// Time that planning took.
    pub(super) seconds: f64,
    /// Stream policy of the default pool, with the plan and without.
    streams: StreamPolicy,
    online_streams: StreamPolicy,
}

impl Figures {
    /// Plans a job, and runs it with its plan and without.
    pub(super) fn of(
        job: &Recorded,
        policy: &PolicyArgs,
        budget: SearchBudget,
    ) -> Result<(Arc<PlanFile>, Self), CliError> {
        // A job that fails even without a plan cannot be planned.
        let online = job.job.steady(&job.config, None);
        let online = online.map_err(|source| CliError::Job { path: job.path.clone(), source })?;
        let plan = PlannedJob::of(job, policy, budget)?;
        let Steady { peaks, passes, planned, waits, refused, .. } = plan.followed;
        let takes_memory = |op: &&Op| matches!(op, Op::Allocate { size_bytes: 1.., .. });
        let requests = job.program().ops().iter().filter(takes_memory).count() as u64;
        let figures = Figures {
            peak_live_bytes: peaks.live_bytes,
            planned_bytes: peaks.reserved_bytes,
            online_bytes: online.peaks.reserved_bytes,
            plan_bytes: plan.memory_bytes(),
            plans: plan.plan_count(),
            ops: Some(PlannedOps { planned, all: requests * u64::from(passes) }),
            waits,
            online_waits: online.waits,
            refused,
            online_refused: online.refused,
            passes,
            seconds: plan.seconds,
            streams: plan.streams(),
            online_streams: job.config.default_pool().streams(),
        };
        Ok((plan.file, figures))
    }

    /// Returns the larger value of each number.
    pub(super) fn max(self, other: Figures) -> Figures {
        let share = |figures: &Figures| figures.ops.map_or(1.0, PlannedOps::share);
        Figures {
            peak_live_bytes: self.peak_live_bytes.max(other.peak_live_bytes),
            planned_bytes: self.planned_bytes.max(other.planned_bytes),
            online_bytes: self.online_bytes.max(other.online_bytes),
            plan_bytes: self.plan_bytes.max(other.plan_bytes),
            plans: self.plans.max(other.plans),
            ops: if share(&self) < share(&other) { self.ops } else { other.ops },
            waits: self.waits.max(other.waits),
            online_waits: self.online_waits.max(other.online_waits),
            refused: self.refused.max(other.refused),
            online_refused: self.online_refused.max(other.online_refused),
            seconds: self.seconds + other.seconds,
            ..other
        }
    }

    /// Returns peak live divided by planned memory, or 1 if nothing is planned.
    pub(super) fn efficiency(&self) -> f64 {
        share(self.peak_live_bytes, self.planned_bytes)
    }

    /// Returns peak live divided by reserved memory without a plan.
    pub(super) fn online_efficiency(&self) -> f64 {
        share(self.peak_live_bytes, self.online_bytes)
    }

    pub(super) fn planned_ops_share(&self) -> f64 {
        self.ops.map_or(1.0, PlannedOps::share)
    }

    pub(super) fn streams(&self) -> &'static str {
        self.streams.word()
    }

    pub(super) fn online_streams(&self) -> &'static str {
        self.online_streams.word()
    }
}

fn share(live_bytes: u64, held_bytes: u64) -> f64 {
    if held_bytes == 0 { 1.0 } else { live_bytes as f64 / held_bytes as f64 }
}
