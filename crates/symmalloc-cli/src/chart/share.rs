//! `symmalloc chart --share`: one picture that compares a job under different allocators.

use super::file::file_name;
use crate::args::ChartArgs;
use crate::destination::{Destination, shown};
use crate::error::CliError;
use crate::job::{JobError, Options, Segments};
use crate::output;
use crate::picture::share::{Bar, Shared, draw};
use crate::planned::PlannedJob;
use crate::quantity::{counted, memory};
use crate::recorded::Recorded;
use crate::verdict::Verdict;
use serde_json::json;
use std::num::NonZeroU32;

/// Runs the job in four ways and draws the memory of each.
pub(super) fn share(args: &ChartArgs, recorded: &Recorded, out: &Destination) -> Result<Verdict, CliError> {
    let failed = |source: JobError| CliError::Job { path: recorded.path.clone(), source };
    let options = Options { ranks: NonZeroU32::MIN, ..Options::default() };
    let as_pytorch = |segments| recorded.job.replay_as_pytorch(segments, &options, &|| ()).map_err(failed);
    let pytorch_bytes = as_pytorch(Segments::Fixed)?.peaks.reserved_bytes;
    let expandable_bytes = as_pytorch(Segments::Expandable)?.peaks.reserved_bytes;
    let ours = recorded.job.steady(&recorded.config, None).map_err(failed)?;
    let (planned, no_plan) = match PlannedJob::of_use(recorded, &args.policy, ours.refused) {
        Ok(planned) => (planned, None),
        Err(no_plan) => (None, Some(no_plan.reason)),
    };
    let planned_bytes = planned.map(|planned| planned.followed.peaks.reserved_bytes);
    let symmalloc_bytes = ours.peaks.reserved_bytes;
    let mut bars = vec![
        Bar { label: "PyTorch, its default", bytes: pytorch_bytes },
        Bar { label: "PyTorch, expandable", bytes: expandable_bytes },
        Bar { label: "symmalloc", bytes: symmalloc_bytes },
    ];
    bars.extend(planned_bytes.map(|bytes| Bar { label: "symmalloc, planned", bytes }));
    let name = file_name(&recorded.path);
    let footer = format!(
        "{}, replayed {} by symmalloc {} and by its model of PyTorch",
        counted(recorded.op_count(), "recorded op"),
        counted(ours.passes, "time"),
        env!("CARGO_PKG_VERSION")
    );
    let shared = Shared { name: &name, bars: &bars, live_bytes: ours.peaks.live_bytes, footer: &footer };
    out.write(draw(&shared).as_bytes())?;
    if args.json {
        output::print_json(json!({
            "trace": args.input.display().to_string(),
            "picture": args.output.display().to_string(),
            "refused": ours.refused,
            "peak_live_bytes": ours.peaks.live_bytes,
            "pytorch_bytes": pytorch_bytes,
            "pytorch_expandable_bytes": expandable_bytes,
            "symmalloc_bytes": symmalloc_bytes,
            "planned_bytes": planned_bytes,
            "no_plan": no_plan,
        }))?;
    } else {
        let mut text = String::new();
        for bar in &bars {
            text += &format!("{:<21}{:>10}\n", bar.label, memory(bar.bytes));
        }
        if let Some(reason) = no_plan {
            text += &format!("no plan: {reason}\n");
        }
        output::print(&(text + &format!("written to {}\n", shown(&args.output))))?;
    }
    Ok(Verdict::Agree)
}
