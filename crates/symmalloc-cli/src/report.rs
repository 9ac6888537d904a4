//! `symmalloc report`: one page about a job's memory and the effect of other settings.
//!
//! ```text
//!            ┌─► timeline ──► peaks, picture
//! Recorded ──┼─► memory at the peak ──► holders by name, fragmentation, map
//!            ├─► settings: the same ops under other settings, each with the command that reproduces it
//!            └─► planned: the memory needed with a plan
//! ```

mod holders;
mod page;
pub(crate) mod recorded_reserved;
pub(crate) mod settings;

use crate::Verdict;
use crate::args::{PolicyArgs, ReadingArgs, ReportArgs};
use crate::beginning::lived_before;
use crate::chart::{op_of, peak, timeline_of};
use crate::content::Content;
use crate::destination::{Destination, shown};
use crate::error::CliError;
use crate::escape::quoted;
use crate::job::Steady;
use crate::output::{self, Palette};
use crate::picture::Selection;
use crate::picture::memory::{BlockState, DrawnBlock, Memory};
use crate::picture::timeline::{ALLOCATED, JobCurves, LIVE, RESERVED};
use crate::planned::PlannedJob;
use crate::quantity::{count, counted, memory};
use crate::recorded::Recorded;
use holders::Holder;
use recorded_reserved::RecordedReserved;
use serde::Serialize;
use serde_json::{Value, json};
use settings::{ImpossibleTrial, Trial};
use std::path::Path;

/// Results for a job.
struct Findings<'a> {
    recorded: &'a Recorded,
    timeline: JobCurves,
    /// Memory after the requested op, or else after the op with the most allocated memory.
    memory: Memory,
    holders: Vec<Holder>,
    trials: Vec<Trial>,
    /// Settings under which the job stops.
    impossible: Vec<ImpossibleTrial>,
    planned: PlanOutcome,
    /// Memory that the recorded allocator reserved.
    recorded_reserved: Option<RecordedReserved>,
}

/// The outcome of planning the job.
#[derive(Clone, Debug, PartialEq)]
enum PlanOutcome {
    Planned(PlanTrial),
    /// There is nothing to plan.
    Empty,
    /// There is no plan, for this reason.
    Failed(String),
}

/// The needs of a plan of the job.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PlanTrial {
    /// The command that writes the plan.
    command: String,
    planned_bytes: u64,
    /// Peak live divided by `planned_bytes`.
    efficiency: f64,
    /// Requests that are refused in all passes.
    refused: u64,
}

/// Free memory and its fragmentation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Fragmentation {
    free_bytes: u64,
    largest_free_bytes: u64,
    /// 1 - largest / free: 0 if all free memory is one block, close to 1 if it is in many pieces.
    fragmentation: f64,
}

/// Writes the report of a recording that this process has just written.
pub(crate) fn write(input: &Path, output: &Path, reading: &ReadingArgs) -> Result<(), CliError> {
    let args = ReportArgs {
        input: input.to_path_buf(),
        output: output.to_path_buf(),
        op: None,
        policy: PolicyArgs::default(),
        reading: reading.clone(),
        json: false,
    };
    make(&args, |_| Ok(()))
}

/// Evaluates the job, writes the page, and prints its main results.
pub(crate) fn report(args: &ReportArgs) -> Result<Verdict, CliError> {
    make(args, |findings| {
        if args.json {
            output::print_json(findings.object(args))
        } else {
            output::print(&findings.screen(args, Palette::of_stdout()))
        }
    })?;
    Ok(Verdict::Agree)
}

/// Evaluates the job and writes the page.
fn make(args: &ReportArgs, tell: impl FnOnce(&Findings<'_>) -> Result<(), CliError>) -> Result<(), CliError> {
    check_name(&args.output)?;
    let out = Destination::file(&args.output, Content::Page, [&args.input])?;
    let recorded = Recorded::read(&args.input, &args.reading, &args.policy)?;
    let timeline = timeline_of(&recorded, Selection::default())?;
    let op = op_of(args.op, &recorded, &timeline)?;
    let memory = Memory::replayed(&recorded, op, Selection::default())?;
    let holders = holders::of(&memory);
    let (trials, impossible) = settings::trials(&recorded, &args.reading)?;
    let own_refused = trials.iter().find(|trial| trial.is_own).map_or(0, |own| own.refused);
    let planned = PlanOutcome::of(&recorded, args, own_refused);
    let recorded_reserved = RecordedReserved::of(&recorded);
    let findings =
        Findings { recorded: &recorded, timeline, memory, holders, trials, impossible, planned, recorded_reserved };
    let page = page::html(&findings);
    out.write(page.as_bytes())?;
    tell(&findings)
}

/// Checks that the file name of a report is that of a page.
pub(crate) fn check_name(output: &Path) -> Result<(), CliError> {
    if output.extension().is_some_and(|extension| extension == "html" || extension == "htm") {
        return Ok(());
    }
    Err(CliError::UnknownPage { path: output.to_path_buf() })
}

impl PlanOutcome {
    /// Plans the job. If planning fails, the page has no plan.
    fn of(recorded: &Recorded, args: &ReportArgs, own_refused: u64) -> Self {
        match PlannedJob::of_use(recorded, &args.policy, own_refused) {
            Err(reason) => PlanOutcome::Failed(reason),
            Ok(None) => PlanOutcome::Empty,
            Ok(Some(planned)) => {
                let path = quoted(&args.input.to_string_lossy());
                let command =
                    format!("symmalloc plan {path}{}{} -o job.plan", args.reading.flags(), args.policy.flags());
                let Steady { peaks, refused, .. } = planned.followed;
                let efficiency = (peaks.efficiency() * 1e6).round() / 1e6;
                PlanOutcome::Planned(PlanTrial { command, planned_bytes: peaks.reserved_bytes, efficiency, refused })
            }
        }
    }

    fn trial(&self) -> Option<&PlanTrial> {
        if let PlanOutcome::Planned(trial) = self { Some(trial) } else { None }
    }

    /// Returns the reason why there is no plan.
    fn failure(&self) -> Option<&str> {
        if let PlanOutcome::Failed(reason) = self { Some(reason) } else { None }
    }
}

impl Fragmentation {
    fn of<'a>(blocks: impl Iterator<Item = &'a DrawnBlock>) -> Self {
        let free = blocks.filter(|block| matches!(block.state, BlockState::Free | BlockState::Fenced));
        let (free_bytes, largest_free_bytes) =
            free.fold((0, 0), |(sum, largest), block| (sum + block.size_bytes, block.size_bytes.max(largest)));
        let in_one = if free_bytes == 0 { 1.0 } else { largest_free_bytes as f64 / free_bytes as f64 };
        Fragmentation { free_bytes, largest_free_bytes, fragmentation: ((1.0 - in_one) * 1e6).round() / 1e6 }
    }
}

impl Findings<'_> {
    /// Returns peak reserved under the job's own settings, over all passes.
    fn steady_bytes(&self) -> u64 {
        self.own().peak_reserved_bytes
    }

    /// Returns peak live divided by peak reserved.
    fn efficiency(&self) -> f64 {
        self.timeline.total.peaks[LIVE].bytes as f64 / self.steady_bytes().max(1) as f64
    }

    /// Returns the trial with the job's own settings.
    fn own(&self) -> &Trial {
        self.trials.iter().find(|trial| trial.is_own).expect("the job's own settings are tried first")
    }

    /// Returns the trials that are better than the job's own settings, in ascending order of memory.
    fn better(&self) -> impl Iterator<Item = &Trial> {
        self.trials.iter().filter(|trial| trial.is_better_than(self.own()))
    }

    /// Describes the cost of a setting compared with the job's own: waits of streams for each other, and map calls. Returns `None` if it
    /// needs no more of them.
    fn cost(&self, trial: &Trial) -> Option<String> {
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

    /// Returns the output of `report --json`. Its keys are an interface: `symmalloc report --help` lists them.
    fn object(&self, args: &ReportArgs) -> Value {
        let peaks = self.timeline.total.peaks;
        let Fragmentation { free_bytes, largest_free_bytes, fragmentation } = Fragmentation::of(self.memory.blocks());
        json!({
            "trace": args.input.display().to_string(),
            "report": args.output.display().to_string(),
            "ops": self.timeline.op_count,
            "op": self.memory.op,
            "refused": self.timeline.refused,
            "lived_before": self.recorded.recording.summary.lived_before,
            "lived_before_bytes": self.recorded.recording.summary.lived_before_bytes,
            "is_overwritten": self.recorded.recording.summary.is_overwritten,
            "recorded_reserved": self.recorded_reserved.map(RecordedReserved::object),
            "live": peak(peaks[LIVE]),
            "allocated": peak(peaks[ALLOCATED]),
            "reserved": peak(peaks[RESERVED]),
            "steady_reserved_bytes": self.steady_bytes(),
            "efficiency": (self.efficiency() * 1e6).round() / 1e6,
            "holders": self.holders,
            "free_bytes": free_bytes,
            "largest_free_bytes": largest_free_bytes,
            "fragmentation": fragmentation,
            "settings": self.trials.iter().map(|trial| self.setting(trial)).collect::<Vec<_>>(),
            "settings_impossible": self.impossible,
            "plan": self.planned.trial(),
            "no_plan": self.planned.failure(),
        })
    }

    fn setting(&self, trial: &Trial) -> Value {
        let mut object = serde_json::to_value(trial).expect("plain numbers and strings have a JSON form");
        object["is_better"] = trial.is_better_than(self.own()).into();
        object
    }

    fn screen(&self, args: &ReportArgs, palette: Palette) -> String {
        let peaks = &self.timeline.total.peaks;
        let mut out = format!(
            "{}\npeak reserved {}, live {}\n",
            palette.title(&args.input.display().to_string()),
            memory(self.steady_bytes()),
            memory(peaks[LIVE].bytes)
        );
        if let Some(recorded) = self.recorded_reserved {
            let least = if recorded.is_exact { "" } else { "at least " };
            out += &format!("in the recording: {least}{} reserved\n", memory(recorded.peak_bytes));
        }
        if let Some(before) = lived_before(&self.recorded.recording.summary) {
            out += &format!("{before}\n");
        }
        if let Some(best) = self.better().next() {
            let cost = self.cost(best).map_or_else(String::new, |cost| format!(", at the cost of {cost}"));
            out += &format!("best settings: {} ({} reserved{cost})\n", best.settings, memory(best.peak_reserved_bytes));
        }
        match &self.planned {
            PlanOutcome::Planned(PlanTrial { planned_bytes, command, .. }) => {
                out += &format!("with a plan: {} reserved ({command})\n", memory(*planned_bytes));
            }
            PlanOutcome::Failed(reason) => out += &format!("no plan: {reason}\n"),
            PlanOutcome::Empty => {}
        }
        let trials = count(self.trials.len());
        out + &format!("{trials} settings tried; written to {}\n", shown(&args.output))
    }
}
