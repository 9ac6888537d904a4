//! `symmalloc import`: anything readable becomes our trace, and what could not be taken over is said.

use crate::Verdict;
use crate::args::ImportArgs;
use crate::error::CliError;
use crate::output::{self, Palette};
use crate::quantity::{count, counted};
use crate::replay::describe;
use std::fmt::Write;
use std::path::Path;
use symmalloc_import::compression::Compressor;
use symmalloc_import::{ReadOptions, Recording, Summary, read_path};
use symmalloc_trace::TraceWriter;

/// Reads a recording and writes it as a trace.
pub(crate) fn import(args: &ImportArgs) -> Result<Verdict, CliError> {
    let recording = read_path(&args.input, &ReadOptions::from(&args.reading))?;
    write(&recording, &args.output)?;
    output::print(&summary(args, &recording, Palette::of_stdout()))?;
    Ok(Verdict::Agree)
}

fn write(recording: &Recording, out: &Path) -> Result<(), CliError> {
    let created = |source| CliError::Create { path: out.to_path_buf(), source };
    let file = Compressor::create(out).map_err(created)?;
    let mut trace = TraceWriter::new(file, recording.config.as_ref()).map_err(created)?;
    for record in &recording.records {
        trace.write(record).map_err(|source| CliError::Write { path: out.to_path_buf(), source })?;
    }
    trace.finish().and_then(Compressor::finish).map(drop).map_err(created)
}

fn summary(args: &ImportArgs, recording: &Recording, palette: Palette) -> String {
    let found = &recording.summary;
    let mut out = format!(
        "{}  {}\n{}: {}, {}, {}, {}\nplacements recorded: {} of {}\n",
        palette.title(&args.input.display().to_string()),
        palette.aside(&describe(recording)),
        counted(recording.records.len(), "op"),
        counted(found.streams, "stream"),
        counted(found.allocations, "allocation"),
        counted(found.frees, "free"),
        counted(found.record_uses, "use") + " by other streams",
        count(found.placements),
        count(found.allocations),
    );
    for line in remarks(found) {
        let _ = writeln!(out, "  {line}");
    }
    let _ = writeln!(out, "written to {}", args.output.display());
    out
}

/// What is not in the trace as it was in the recording.
fn remarks(found: &Summary) -> Vec<String> {
    let counts = [
        (found.frees_supplied, "supplied: frees that the recording lacks"),
        (found.frees_of_unknown, "left out: frees of what was allocated before the recording began"),
        (found.uses_of_unknown, "left out: uses of what was allocated before the recording began"),
        (found.failed_allocations, "left out: allocations that the recorded allocator refused"),
        (found.empty_allocations, "left out: allocations and frees of no memory"),
        (found.snapshot_marks, "left out: marks of a snapshot being taken"),
        (found.unknown_actions, "left out: entries of a kind that this version does not know"),
    ];
    let counted = counts.into_iter().filter(|(number, _)| *number > 0);
    let mut lines: Vec<String> = counted.map(|(number, what)| format!("{what}: {}", count(number))).collect();
    if let Some(line) = found.torn_at_line {
        lines.push(format!("the recording ends in the middle, at line {}", count(line)));
    }
    lines
}
