//! Comparison of flight records: the combined findings about each communicator, and a row for each rank.
//!
//! ```text
//! files ──► records ─┬─► findings (symmalloc-watchdog)  ──┐
//!                    └─► a row per rank                 ──┴─► screen, or JSON
//! ```
//!
//! A rank without a record has a row as well, with the observations of other ranks.

mod json;
mod screen;

use crate::Verdict;
use crate::args::DiffArgs;
use crate::error::CliError;
use crate::input;
use crate::output::{self, Palette};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use symmalloc_watchdog::{
    CommunicatorId, CommunicatorRecord, Finding, Findings, FlightRecord, FlightRecordError, Progress,
};

/// A communicator as its ranks saw it.
struct CommunicatorFlights<'a> {
    id: CommunicatorId,
    name: &'a str,
    /// Number of ranks.
    ranks: u32,
    /// Number of records.
    records: usize,
    findings: &'a [Finding],
    rows: BTreeMap<u32, RankFlight<'a>>,
}

/// Everything known about a rank.
#[derive(Default)]
struct RankFlight<'a> {
    record: Option<RankRecord<'a>>,
    /// The furthest progress that another rank observed.
    seen_progress: Progress,
    /// Observed conditions of this rank, each with the ranks that observed it.
    seen: BTreeMap<&'a str, Vec<u32>>,
}

/// The record that a rank left.
struct RankRecord<'a> {
    path: &'a Path,
    process: &'a FlightRecord,
    communicator: &'a CommunicatorRecord,
}

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

impl<'a> CommunicatorFlights<'a> {
    /// Collects the records of each communicator, in one pass over all files.
    fn all(findings: &'a Findings, files: &[(&'a Path, &'a FlightRecord)]) -> Vec<Self> {
        let mut all: BTreeMap<CommunicatorId, Self> = BTreeMap::new();
        for (id, name, findings) in &findings.communicators {
            let rows = BTreeMap::new();
            all.insert(*id, CommunicatorFlights { id: *id, name, ranks: 0, records: 0, findings, rows });
        }
        for (path, process) in files {
            for communicator in &process.communicators {
                let flights = all.get_mut(&communicator.id).expect("each communicator has findings");
                flights.add(RankRecord { path, process, communicator });
            }
        }
        all.into_values().collect()
    }

    fn add(&mut self, record: RankRecord<'a>) {
        let communicator = record.communicator;
        self.ranks = self.ranks.max(communicator.ranks);
        self.records += 1;
        self.rows.entry(communicator.rank).or_default().record = Some(record);
        for peer in &communicator.peers {
            let row = self.rows.entry(peer.rank).or_default();
            let seen = &mut row.seen_progress;
            seen.submitted = seen.submitted.max(peer.progress.submitted);
            seen.finished = seen.finished.max(peer.progress.finished);
            row.seen.entry(&peer.condition).or_default().push(communicator.rank);
        }
    }
}

impl RankFlight<'_> {
    fn progress(&self) -> Progress {
        self.record.as_ref().map_or(self.seen_progress, |record| record.communicator.progress)
    }
}
