//! Flight records by communicator and rank.

use std::collections::BTreeMap;
use std::path::Path;
use symmalloc_watchdog::{CommunicatorId, CommunicatorRecord, Finding, Findings, FlightRecord, Progress};

/// A communicator as its ranks saw it.
pub(super) struct CommunicatorFlights<'a> {
    pub(super) id: CommunicatorId,
    pub(super) name: &'a str,
    /// Number of ranks.
    pub(super) ranks: u32,
    /// Number of records.
    pub(super) records: usize,
    pub(super) findings: &'a [Finding],
    pub(super) rows: BTreeMap<u32, RankFlight<'a>>,
}

/// Everything known about a rank.
#[derive(Default)]
pub(super) struct RankFlight<'a> {
    pub(super) record: Option<RankRecord<'a>>,
    /// The furthest progress of this rank that another rank observed.
    pub(super) seen_progress: Progress,
    /// Observed conditions of this rank, each with the ranks that observed it.
    pub(super) seen: BTreeMap<&'a str, Vec<u32>>,
}

/// The flight record of a rank, and its file.
pub(super) struct RankRecord<'a> {
    pub(super) path: &'a Path,
    pub(super) process: &'a FlightRecord,
    pub(super) communicator: &'a CommunicatorRecord,
}

impl<'a> CommunicatorFlights<'a> {
    /// Collects the records of each communicator, in one pass over all files.
    pub(super) fn all(findings: &'a Findings, files: &[(&'a Path, &'a FlightRecord)]) -> Vec<Self> {
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
    /// Returns the progress that the rank recorded, or else the furthest progress that another rank observed.
    pub(super) fn progress(&self) -> Progress {
        self.record.as_ref().map_or(self.seen_progress, |record| record.communicator.progress)
    }
}
