//! Results of a report about a job.

use super::failure::Failure;
use super::holders::Holder;
use super::pools::PrivatePools;
use super::recorded_reserved::RecordedReserved;
use super::settings::{ImpossibleTrial, Trial};
use crate::args::ReportArgs;
use crate::escape::quoted;
use crate::explorer::Layout;
use crate::job::Steady;
use crate::picture::memory::{BlockState, DrawnBlock, Memory};
use crate::picture::timeline::{JobCurves, LIVE};
use crate::planned::{NoPlan, PlannedJob};
use crate::quantity::{count, counted};
use crate::recorded::Recorded;
use serde::Serialize;
use std::sync::Arc;
use symmalloc_trace::plan::PlanFile;

/// States that no tested setting is a cure.
pub(super) const UNSERVED: &str = "no tested setting serves the request";

/// Results for a job.
pub(super) struct Findings<'a> {
    pub(super) recorded: &'a Recorded,
    /// The request that failed, if one did.
    pub(super) failure: Option<Failure>,
    /// Private pools that hold memory separately, if there are many.
    pub(super) pools: Option<PrivatePools>,
    pub(super) timeline: JobCurves,
    /// Memory after the requested op, or else after the op with the most allocated memory.
    pub(super) memory: Memory,
    pub(super) holders: Vec<Holder>,
    pub(super) trials: Vec<Trial>,
    /// Settings under which the job stops.
    pub(super) impossible: Vec<ImpossibleTrial>,
    /// Settings that are not tried because the job is long.
    pub(super) left_out: Vec<String>,
    pub(super) planned: PlanOutcome,
    /// Layouts of the job, for the explorer.
    pub(super) layouts: Vec<Layout>,
    /// Memory that the recorded allocator reserved.
    pub(super) recorded_reserved: Option<RecordedReserved>,
}

/// The outcome of planning the job.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PlanOutcome {
    Planned(PlanTrial),
    /// There is nothing to plan.
    Empty,
    /// There is no plan, for this reason.
    Failed(NoPlan),
}

/// The needs of a plan of the job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PlanTrial {
    /// The command that writes the plan.
    pub(super) command: String,
    pub(super) planned_bytes: u64,
    /// Peak live divided by `planned_bytes`.
    pub(super) efficiency: f64,
    /// Requests that are refused in all passes.
    pub(super) refused: u64,
}

/// Free memory and its fragmentation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fragmentation {
    pub(super) free_bytes: u64,
    pub(super) largest_free_bytes: u64,
    /// 1 - largest / free: 0 if all free memory is one block, close to 1 if it is in many pieces.
    pub(super) fragmentation: f64,
}

impl PlanOutcome {
    /// Plans the job, and returns the plan too. If planning fails, or the job is long, the page has no plan.
    pub(super) fn of(recorded: &Recorded, args: &ReportArgs, own_refused: u64) -> (Self, Option<Arc<PlanFile>>) {
        let path = quoted(&args.input.to_string_lossy());
        let command = format!("symmalloc plan {path}{}{} -o job.plan", args.reading.flags(), args.policy.flags());
        if recorded.job.is_long() {
            let reason = format!("a report does not plan a job as long as this one; use {command}");
            return (PlanOutcome::Failed(NoPlan { reason, exceeds_limit: false }), None);
        }
        match PlannedJob::of_use(recorded, &args.policy, own_refused) {
            Err(no_plan) => (PlanOutcome::Failed(no_plan), None),
            Ok(None) => (PlanOutcome::Empty, None),
            Ok(Some(planned)) => {
                let Steady { peaks, refused, .. } = planned.followed;
                let efficiency = (peaks.efficiency() * 1e6).round() / 1e6;
                let trial = PlanTrial { command, planned_bytes: peaks.reserved_bytes, efficiency, refused };
                (PlanOutcome::Planned(trial), Some(planned.file))
            }
        }
    }

    pub(super) fn trial(&self) -> Option<&PlanTrial> {
        if let PlanOutcome::Planned(trial) = self { Some(trial) } else { None }
    }

    /// Returns the reason why there is no plan.
    pub(super) fn failure(&self) -> Option<&str> {
        if let PlanOutcome::Failed(no_plan) = self { Some(&no_plan.reason) } else { None }
    }
}

impl Fragmentation {
    pub(super) fn of<'a>(blocks: impl Iterator<Item = &'a DrawnBlock>) -> Self {
        let free = blocks.filter(|block| matches!(block.state, BlockState::Free | BlockState::Fenced));
        let (free_bytes, largest_free_bytes) =
            free.fold((0, 0), |(sum, largest), block| (sum + block.size_bytes, block.size_bytes.max(largest)));
        let in_one = if free_bytes == 0 { 1.0 } else { largest_free_bytes as f64 / free_bytes as f64 };
        Fragmentation { free_bytes, largest_free_bytes, fragmentation: ((1.0 - in_one) * 1e6).round() / 1e6 }
    }
}

impl Findings<'_> {
    /// Returns peak reserved under the job's own settings, over all passes.
    pub(super) fn steady_bytes(&self) -> u64 {
        self.own().peak_reserved_bytes
    }

    /// Returns peak live divided by peak reserved.
    pub(super) fn efficiency(&self) -> f64 {
        self.timeline.total.peaks[LIVE].bytes as f64 / self.steady_bytes().max(1) as f64
    }

    /// Returns the trial with the job's own settings.
    pub(super) fn own(&self) -> &Trial {
        self.trials.iter().find(|trial| trial.is_own).expect("the job's own settings are tried first")
    }

    /// Returns the trials that are better than the job's own settings, the best first.
    pub(super) fn better(&self) -> impl Iterator<Item = &Trial> {
        self.trials.iter().filter(|trial| trial.is_better_than(self.own()))
    }

    /// Returns the setting to recommend. If a request failed, a setting that refuses as many requests as the job's own settings does not
    /// help.
    pub(super) fn best(&self) -> Option<&Trial> {
        let helps = |best: &&Trial| match &self.failure {
            None => true,
            Some(failure) => best.refused < self.own().refused || (self.own().refused == 0 && failure.is_served()),
        };
        self.better().next().filter(helps)
    }

    /// Returns `true` if a request failed that no tested setting serves.
    pub(super) fn is_unserved(&self) -> bool {
        self.best().is_none() && self.failure.as_ref().is_some_and(|failure| !failure.is_served())
    }

    /// Returns `true` if the report states why there is no plan. After a failed request, it matters only whether the plan's memory exceeds
    /// a limit.
    pub(super) fn tells(&self, no_plan: &NoPlan) -> bool {
        self.failure.is_none() || no_plan.exceeds_limit
    }

    /// Compares the refusals of a setting with those of the job's own, if they differ.
    pub(super) fn refusals(&self, trial: &Trial) -> Option<String> {
        let own = self.own();
        let refused = match trial.refused {
            0 => "nothing refused".to_owned(),
            _ => trial.refusals(" refused"),
        };
        (trial.refused != own.refused).then(|| format!("{refused} instead of {}", own.refusals("")))
    }

    /// Describes the additional cost of a setting, compared with the job's own: waits of streams for each other, and map calls. Returns
    /// `None` if there is no additional cost.
    pub(super) fn cost(&self, trial: &Trial) -> Option<String> {
        let own = self.own();
        let waits = (trial.waits > own.waits).then(|| {
            let (waits, own) = (counted(trial.waits, "wait"), count(own.waits));
            format!("{waits} of a stream for another per pass, each a fence on the device (now {own})")
        });
        let maps = (trial.maps > own.maps).then(|| {
            let (maps, own) = (counted(trial.maps, "call"), count(own.maps));
            format!("{maps} per pass that map or unmap memory, each taking microseconds on the host (now {own})")
        });
        let costs: Vec<String> = waits.into_iter().chain(maps).collect();
        (!costs.is_empty()).then(|| costs.join(", and "))
    }
}
