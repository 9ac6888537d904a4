//! `symmalloc export`: a recording with our allocator's placements, as a snapshot for PyTorch's viewer or, in `timeline.rs`, as a
//! timeline for Perfetto.

mod timeline;

use crate::args::{ExportArgs, ExportFormat};
use crate::beginning::lived_before;
use crate::content::Content;
use crate::destination::{Destination, shown};
use crate::error::CliError;
use crate::output::{Channel, Palette};
use crate::quantity::{count, counted};
use crate::recorded::Recorded;
use crate::verdict::Verdict;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::fmt::Write as _;
use symmalloc_import::export::{ExportError, ExportSummary, export_with};

/// Reads a recording, replays it, and writes the result.
pub(crate) fn export(args: &ExportArgs) -> Result<Verdict, CliError> {
    let format = format(args);
    // With an explicit format, the output may have any extension.
    let content = args.format.is_none().then(|| content(format));
    let out = Destination::file_or_stream(args.output.path(), content, [&args.input])?;
    let recorded = Recorded::read(&args.input, &args.reading, &args.policy)?;
    if format == ExportFormat::Perfetto {
        return timeline::export(args, &recorded, &out);
    }
    let program = match args.free_at_once {
        true => Cow::Owned(recorded.program().clone().without_pending()),
        false => Cow::Borrowed(recorded.program()),
    };
    let device_free_bytes = &recorded.recording.device_free_bytes;
    let unwritten = |source| out.failed(source);
    // The file is written while the job runs, because a snapshot has an entry for each memory change, and a sleep makes many changes. A job
    // that fails leaves no file.
    let mut file = out.create().map_err(unwritten)?;
    let exported = export_with(&program, &recorded.config, device_free_bytes, &mut file);
    let summary = exported.map_err(|error| match error {
        ExportError::Rerun(source) => recorded.failed(source),
        ExportError::Write(source) => unwritten(source),
        other => unwritten(std::io::Error::other(other)),
    })?;
    file.finish().map_err(unwritten)?;
    let channel = Channel::beside(&out);
    if args.json {
        channel.print_json(object(args, &recorded, &summary))?;
    } else {
        channel.print(&screen(args, &recorded, &summary, channel.palette()))?;
    }
    Ok(Verdict::Agree)
}

/// Returns the requested format, or else the format that the extension selects: `job.json` and `job.json.gz` are timelines.
fn format(args: &ExportArgs) -> ExportFormat {
    args.format.unwrap_or(match Content::of_name(args.output.path()) {
        Some(Content::Timeline) => ExportFormat::Perfetto,
        _ => ExportFormat::Snapshot,
    })
}

fn content(format: ExportFormat) -> Content {
    match format {
        ExportFormat::Perfetto => Content::Timeline,
        ExportFormat::Snapshot => Content::Snapshot,
    }
}

/// Returns the output of `export --json`. Its keys are an interface: `symmalloc export --help` lists them.
fn object(args: &ExportArgs, recorded: &Recorded, summary: &ExportSummary) -> Value {
    json!({
        "trace": args.input.display().to_string(),
        "snapshot": args.output.path().display().to_string(),
        "entries": summary.entries,
        "allocations": summary.allocations,
        "refused": summary.refused,
        "pending_frees": summary.pending_frees,
        "segments": summary.segments,
        "blocks": summary.blocks,
        "ops_without_entry": summary.ops_without_entry,
        "lived_before": recorded.recording.summary.lived_before,
        "lived_before_bytes": recorded.recording.summary.lived_before_bytes,
        "is_overwritten": recorded.recording.summary.is_overwritten,
    })
}

fn screen(args: &ExportArgs, recorded: &Recorded, summary: &ExportSummary, palette: Palette) -> String {
    let mut out = format!(
        "{}\n{} trace entries of {}; at the end {} of {}\n",
        palette.title(&args.input.display().to_string()),
        count(summary.entries),
        counted(summary.allocations, "allocation"),
        counted(summary.segments, "segment"),
        counted(summary.blocks, "block"),
    );
    for (number, what) in [
        (summary.refused, "failed requests, shown as out of memory"),
        (summary.pending_frees, "frees that complete later, as recorded (--free-at-once completes them at once)"),
        (summary.ops_without_entry, "left out: ops that PyTorch's allocator lacks"),
    ] {
        if number > 0 {
            let _ = writeln!(out, "  {what}: {}", count(number));
        }
    }
    if let Some(before) = lived_before(&recorded.recording.summary) {
        let _ = writeln!(out, "  {before}");
    }
    let _ = writeln!(out, "written to {}: open it at https://pytorch.org/memory_viz", shown(args.output.path()));
    out
}
