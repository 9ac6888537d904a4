//! Export of a recording as a timeline. The file may be larger than memory, so it is written while the job runs. A first run checks
//! that the job can be replayed.

use crate::args::{AtMost, ExportArgs};
use crate::beginning::lived_before;
use crate::destination::{Destination, shown};
use crate::error::CliError;
use crate::output::{Channel, Palette};
use crate::quantity::{count, counted};
use crate::recorded::Recorded;
use crate::verdict::Verdict;
use serde_json::{Value, json};
use std::fmt::Write as _;
use symmalloc_import::export::ExportError;
use symmalloc_import::perfetto::{TimelineOptions, TimelineSummary, timeline};
use symmalloc_import::rerun::{Rerun, RerunError};

pub(super) fn export(args: &ExportArgs, recorded: &Recorded, out: &Destination) -> Result<Verdict, CliError> {
    let (program, config) = (recorded.program(), &recorded.config);
    let rehearsal = Rerun::new(program, config).and_then(|mut rerun| rerun.run(recorded.op_count(), |_| Ok(())));
    rehearsal.map_err(|error: RerunError| recorded.failed(error))?;

    let mut options = TimelineOptions::default();
    let AtMost(most) = args.detail;
    (options.slices_max, options.points_max) = (most, most);
    let unwritten = |source| out.failed(source);
    let mut file = out.create().map_err(unwritten)?;
    let summary = timeline(program, config, &options, &mut file).map_err(|error| match error {
        ExportError::Rerun(source) => recorded.failed(source),
        ExportError::Write(source) => unwritten(source),
        other => unwritten(std::io::Error::other(other)),
    })?;
    file.finish().map_err(unwritten)?;
    let channel = Channel::beside(out);
    if args.json {
        channel.print_json(object(args, recorded, &summary))?;
    } else {
        channel.print(&screen(args, recorded, &summary, channel.palette()))?;
    }
    Ok(Verdict::Agree)
}

/// Returns the output of `export --json` for a timeline. Its keys are an interface: `symmalloc export --help` lists them.
fn object(args: &ExportArgs, recorded: &Recorded, summary: &TimelineSummary) -> Value {
    json!({
        "trace": args.input.display().to_string(),
        "timeline": args.output.path().display().to_string(),
        "heaps": summary.heaps,
        "slices": summary.slices,
        "left_out": summary.left_out,
        "points": summary.points,
        "ops_per_point": summary.ops_per_point,
        "instants": summary.instants,
        "lived_before": recorded.recording.summary.lived_before,
        "lived_before_bytes": recorded.recording.summary.lived_before_bytes,
        "is_overwritten": recorded.recording.summary.is_overwritten,
    })
}

fn screen(args: &ExportArgs, recorded: &Recorded, summary: &TimelineSummary, palette: Palette) -> String {
    let mut out = format!(
        "{}\n{} of {} as slices, {} of counters, {}\n",
        palette.title(&args.input.display().to_string()),
        counted(summary.slices, "allocation"),
        counted(summary.heaps, "heap"),
        counted(summary.points, "point"),
        counted(summary.instants, "instant"),
    );
    if summary.left_out > 0 {
        let _ =
            writeln!(out, "  left out: {} smaller allocations (--detail all includes them)", count(summary.left_out));
    }
    if summary.ops_per_point > 1 {
        let _ = writeln!(
            out,
            "  each point is the maximum of {} ops (--detail all has a point per op)",
            summary.ops_per_point
        );
    }
    if let Some(before) = lived_before(&recorded.recording.summary) {
        let _ = writeln!(out, "  {before}");
    }
    let _ = writeln!(out, "written to {}: open it at https://ui.perfetto.dev", shown(args.output.path()));
    out
}
