//! `symmalloc report`: one page about a job's memory and the effect of other settings.
//!
//! ```text
//!            ┌─► timeline ──► peaks, picture
//! Recorded ──┼─► memory at the peak ──► holders by name, fragmentation, map
//!            ├─► layouts: the interactive picture of the explorer
//!            ├─► settings: the same ops under other settings, each with the command that reproduces it
//!            └─► planned: the memory needed with a plan, and one more layout
//! ```

mod document;
mod failure;
mod findings;
mod holders;
mod page;
mod pools;
pub(crate) mod recorded_reserved;
mod settings;

use crate::args::{PolicyArgs, ReadingArgs, ReportArgs};
use crate::beginning::lived_before;
use crate::chart::{op_of, peak, timeline_of};
use crate::content::Content;
use crate::destination::{Destination, shown};
use crate::error::CliError;
use crate::explorer::layouts;
use crate::output::{self, Palette};
use crate::picture::Selection;
use crate::picture::memory::Memory;
use crate::picture::timeline::{ALLOCATED, LIVE, RESERVED};
use crate::quantity::{count, counted, memory};
use crate::recorded::Recorded;
use crate::streams;
use crate::verdict::Verdict;
use failure::{Failure, held_object};
use findings::{Findings, Fragmentation, PlanOutcome, PlanTrial, UNSERVED};
use pools::{Change, PrivatePools};
use recorded_reserved::RecordedReserved;
use serde_json::{Value, json};
use settings::{Trial, Trials};
use std::path::Path;

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
fn make(args: &ReportArgs, print: impl FnOnce(&Findings<'_>) -> Result<(), CliError>) -> Result<(), CliError> {
    check_name(&args.output)?;
    let out = Destination::file(&args.output, Content::Page, [&args.input])?;
    let recorded = Recorded::read_with_stacks(&args.input, &args.reading, &args.policy)?;
    let timeline = timeline_of(&recorded, Selection::default())?;
    let Trials { trials, impossible, mut left_out } = settings::trials(&recorded, &args.reading)?;
    let own_refused = trials.iter().find(|trial| trial.is_own).map_or(0, |own| own.refused);
    let mut failure = Failure::of(&recorded, &args.reading, own_refused)?;
    let op = args.op.or(failure.as_ref().map(Failure::op_shown));
    let op = op_of(op, &recorded, &timeline)?;
    let memory = Memory::replayed(&recorded, op, Selection::default())?;
    if let Some(failure) = &mut failure {
        failure.add_state(&memory);
    }
    let holders = holders::of(&memory);
    for settings in failure.iter().flat_map(|failure| &failure.left_out) {
        if !left_out.contains(settings) {
            left_out.push(settings.clone());
        }
    }
    let has_history = recorded.recording.summary.state_only.is_none();
    let (planned, plan) =
        if has_history { PlanOutcome::of(&recorded, args, own_refused) } else { (PlanOutcome::Empty, None) };
    let layouts = layouts(&recorded, plan.as_deref())?;
    let serves = |change: Change<'_>| failure.as_ref().and_then(|failure| failure.serves(&recorded, change));
    let pools = PrivatePools::of(&recorded, &memory, |change| serves(change).unwrap_or(false));
    let recorded_reserved = RecordedReserved::of(&recorded);
    let findings = Findings {
        recorded: &recorded,
        failure,
        pools,
        timeline,
        memory,
        holders,
        trials,
        impossible,
        left_out,
        planned,
        layouts,
        recorded_reserved,
    };
    let page = page::html(&findings);
    out.write(page.as_bytes())?;
    print(&findings)
}

/// Returns `true` if the numbers of the report leave out a request, because the recorded allocator refused it.
fn recorded_failure(recorded: &Recorded) -> bool {
    recorded.recording.failure.is_some()
}

/// Checks that the file name of a report is that of a page.
pub(crate) fn check_name(output: &Path) -> Result<(), CliError> {
    if output.extension().is_some_and(|extension| extension == "html" || extension == "htm") {
        return Ok(());
    }
    Err(CliError::UnknownPage { path: output.to_path_buf() })
}

impl Findings<'_> {
    /// Returns the output of `report --json`. Its keys are an interface: `symmalloc report --help` lists them.
    fn object(&self, args: &ReportArgs) -> Value {
        let peaks = self.timeline.total.peaks;
        let Fragmentation { free_bytes, largest_free_bytes, fragmentation } = Fragmentation::of(self.memory.blocks());
        json!({
            "trace": args.input.display().to_string(),
            "report": args.output.display().to_string(),
            "ops": self.timeline.op_count,
            "op": self.memory.op,
            "failure": self.failure.as_ref().map(Failure::object),
            "state": self.recorded.recording.summary.state_only.as_ref().map(held_object),
            "private_pools": self.pools.as_ref().map(PrivatePools::object),
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
            "settings_left_out": self.left_out,
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
        let mut out = format!("{}\n", palette.title(&args.input.display().to_string()));
        let summary = &self.recorded.recording.summary;
        if let Some(failure) = &self.failure {
            for (word, text) in failure.lines(&self.recorded.recording, &self.memory, self.pools.as_ref()) {
                let word = format!("{word}:");
                out += &format!("{word:<8}{text}\n");
            }
        }
        if let Some(before) = lived_before(summary) {
            out += &format!("{before}\n");
        }
        if summary.state_only.is_some() {
            return out + &format!("written to {}\n", shown(&args.output));
        }
        let passes = counted(self.recorded.job.steady_passes().get(), "pass");
        if recorded_failure(self.recorded) {
            out += "the job without that request:\n";
        }
        out += &format!(
            "peak reserved {} over {passes}, live {}\n",
            memory(self.steady_bytes()),
            memory(peaks[LIVE].bytes)
        );
        if let Some(recorded) = self.recorded_reserved {
            let least = if recorded.is_exact { "" } else { "at least " };
            out += &format!("in the recording: {least}{} reserved\n", memory(recorded.peak_bytes));
        }
        if let Some(legend) = streams::legend(&self.recorded.recording) {
            out += &format!("{legend}\n");
        }
        if self.is_unserved() {
            out += &format!("{UNSERVED}\n");
        } else if let Some(best) = self.best() {
            let cost = self.cost(best).map_or_else(String::new, |cost| format!(", at the cost of {cost}"));
            let refused = self.refusals(best).map_or_else(String::new, |refused| format!("{refused}, "));
            out += &format!(
                "best settings: {} ({refused}{} reserved{cost})\n",
                best.settings,
                memory(best.peak_reserved_bytes)
            );
        }
        if let Some(pools) = &self.pools {
            out += &format!("private pools: {}\n", pools.advice());
        }
        match &self.planned {
            PlanOutcome::Planned(PlanTrial { planned_bytes, command, .. }) => {
                out += &format!("with a plan: {} reserved ({command})\n", memory(*planned_bytes));
            }
            PlanOutcome::Failed(no_plan) if self.tells(no_plan) => out += &format!("no plan: {}\n", no_plan.reason),
            PlanOutcome::Failed(_) | PlanOutcome::Empty => {}
        }
        let trials = count(self.trials.len());
        let left_out = match self.left_out.len() {
            0 => String::new(),
            left_out => format!(", {} left out because the job is long", count(left_out)),
        };
        out + &format!("{trials} settings tried{left_out}; written to {}\n", shown(&args.output))
    }
}
