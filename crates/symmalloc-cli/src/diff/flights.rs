//! Comparison of flight records: the combined findings about each communicator, and a row for each rank.
//!
//! ```text
//! files ──► records ─┬─► findings (symmalloc-watchdog)  ──┐
//!                    └─► a row per rank                 ──┴─► screen, or JSON
//! ```
//!
//! A rank without a record also has a row. It shows what other ranks observed.

mod json;
mod rows;
mod screen;

use crate::args::DiffArgs;
use crate::error::CliError;
use crate::input;
use crate::output::{self, Palette};
use crate::verdict::Verdict;
use rows::CommunicatorFlights;
use std::path::PathBuf;
use symmalloc_watchdog::{Findings, FlightRecord, FlightRecordError};

/// Compares flight records. The verdict is `Differ` if ranks are missing, behind, different or waiting.
pub(super) fn run(args: &DiffArgs) -> Result<Verdict, CliError> {
    let read = |path: &PathBuf| {
        let source = input::open(path).map_err(|source| FlightRecordError::Io { path: path.clone(), source })?;
        FlightRecord::from_reader(source, path)
    };
    let records = args.files.iter().map(read).collect::<Result<Vec<_>, _>>();
    let records = records.map_err(CliError::FlightRecord)?;
    let findings = Findings::new(&records);
    let files: Vec<_> = args.files.iter().map(|path| &**path).zip(&records).collect();
    let communicators = CommunicatorFlights::all(&findings, &files);
    if args.json {
        output::print_json(json::object(&communicators, findings.is_trouble()))?;
    } else {
        output::print(&screen::render(&communicators, Palette::of_stdout()))?;
    }
    Ok(if findings.is_trouble() { Verdict::Differ } else { Verdict::Agree })
}
