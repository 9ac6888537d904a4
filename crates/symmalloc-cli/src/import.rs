//! `symmalloc import`: conversion of any readable recording to a trace, with a report of everything that was added or left out.

use crate::args::ImportArgs;
use crate::beginning::lived_before;
use crate::content::Content;
use crate::destination::{Destination, shown};
use crate::error::CliError;
use crate::format;
use crate::input;
use crate::output::{Channel, Palette};
use crate::quantity::{count, counted};
use crate::streams;
use crate::verdict::Verdict;
use serde_json::{Value, json};
use std::fmt::Write;
use symmalloc_import::{Recording, Summary};
use symmalloc_text::visible_line;

/// Reads a recording and writes it as a trace.
pub(crate) fn import(args: &ImportArgs) -> Result<Verdict, CliError> {
    let out = Destination::file_or_stream(args.output.path(), Some(Content::Trace), [&args.input])?;
    let mut recording = input::records(&args.input, &args.reading)?;
    streams::name_records(&mut recording);
    out.write_trace(recording.config.as_ref(), &recording.records)?;
    let channel = Channel::beside(&out);
    if args.json {
        channel.print_json(object(args, &recording))?;
    } else {
        channel.print(&summary(args, &recording, channel.palette()))?;
    }
    Ok(Verdict::Agree)
}

/// Returns the output of `import --json`. Its keys are an interface: `symmalloc import --help` lists them.
fn object(args: &ImportArgs, recording: &Recording) -> Value {
    let found = &recording.summary;
    json!({
        "input": args.input.display().to_string(),
        "trace": args.output.path().display().to_string(),
        "format": format::name(recording),
        "device": found.device,
        "ops": recording.records.len(),
        "streams": found.streams,
        "allocs": found.allocations,
        "frees": found.frees,
        "uses": found.record_uses,
        "placements": found.placements,
        "lived_before": found.lived_before,
        "lived_before_bytes": found.lived_before_bytes,
        "is_overwritten": found.is_overwritten,
        "recorded_reserved_bytes_peak": found.recorded_reserved_bytes_peak,
        "frees_supplied": found.frees_supplied,
        "frees_of_unknown": found.frees_of_unknown,
        "uses_of_unknown": found.uses_of_unknown,
        "failed_allocations": found.failed_allocations,
        "empty_allocations": found.empty_allocations,
        "unknown_actions": found.unknown_actions,
        "unknown_kinds": found.unknown_kinds,
        "torn_at_line": found.torn_at_line,
    })
}

fn summary(args: &ImportArgs, recording: &Recording, palette: Palette) -> String {
    let found = &recording.summary;
    let mut out = format!(
        "{}  {}\n{}: {}, {}, {}, {}\nplacements recorded: {} of {}\n",
        palette.title(&args.input.display().to_string()),
        palette.aside(&format::describe(recording)),
        counted(recording.records.len(), "op"),
        counted(found.streams, "stream"),
        counted(found.allocations, "allocation"),
        counted(found.frees, "free"),
        counted(found.record_uses, "use") + " by other streams",
        count(found.placements),
        count(found.allocations),
    );
    for line in remarks(found).into_iter().chain(streams::legend(recording)) {
        let _ = writeln!(out, "  {line}");
    }
    let _ = writeln!(out, "written to {}", shown(args.output.path()));
    out
}

/// Describes the differences between the trace and the recording.
fn remarks(found: &Summary) -> Vec<String> {
    let counts = [
        (found.frees_supplied, "added: frees that the recording lacks"),
        (found.frees_of_unknown, "left out: frees of allocations made before the recording began"),
        (found.uses_of_unknown, "left out: uses of allocations made before the recording began"),
        (found.failed_allocations, "requests that the recorded allocator refused"),
        (found.empty_allocations, "left out: empty allocations and their frees"),
        (found.snapshot_marks, "left out: marks of snapshots"),
    ];
    let counted = counts.into_iter().filter(|(number, _)| *number > 0);
    let mut lines: Vec<String> = lived_before(found).into_iter().collect();
    lines.extend(counted.map(|(number, what)| format!("{what}: {}", count(number))));
    if found.unknown_actions > 0 {
        let mut kinds: Vec<String> = found
            .unknown_kinds
            .iter()
            .map(|(kind, number)| format!("{} of '{}'", count(*number), visible_line(kind)))
            .collect();
        let named: u64 = found.unknown_kinds.values().sum();
        if named < found.unknown_actions {
            kinds.push(format!("{} of others", count(found.unknown_actions - named)));
        }
        lines.push(format!("left out: entries that are not about memory: {}", kinds.join(", ")));
    }
    if let Some(line) = found.torn_at_line {
        lines.push(format!("the recording is truncated at line {}", count(line)));
    }
    lines
}
