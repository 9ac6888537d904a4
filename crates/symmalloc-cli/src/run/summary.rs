//! The summaries of a run's processes: one file per process that ended normally, and one marker per process that began.

use crate::error::CliError;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Summary of a process that ended normally.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Summary {
    pub(super) process: u32,
    pub(super) program: String,
    pub(super) rank: Option<u64>,
    /// `true` if the process kept its own allocator.
    pub(super) watched: bool,
    pub(super) allocations: u64,
    pub(super) frees: u64,
    /// Allocations served by the driver.
    pub(super) passed_on: u64,
    /// Time spent in calls that symmalloc served.
    pub(super) nanoseconds: u64,
    pub(super) peak_live_bytes: u64,
    /// Lower bound of the memory that the driver's allocator would have needed.
    pub(super) peak_driver_bytes: u64,
    pub(super) devices: Vec<DeviceSummary>,
    /// Recordings that lack records.
    #[serde(default)]
    pub(super) incomplete: Vec<Incomplete>,
}

/// A recording that lacks records.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Incomplete {
    pub(super) trace: PathBuf,
    pub(super) cause: String,
}

/// Results of one device of a process.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct DeviceSummary {
    pub(super) device: u32,
    pub(super) trace: Option<PathBuf>,
    pub(super) peak_reserved_bytes: Option<u64>,
    /// Number of times that memory was obtained from the device.
    pub(super) growths: Option<u64>,
    #[serde(default)]
    pub(super) refused: u64,
    #[serde(default)]
    pub(super) digests: Vec<PoolDigest>,
    pub(super) leaks: Vec<Leak>,
}

/// Digest of a pool's history.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(super) struct PoolDigest {
    pub(super) pool: u32,
    pub(super) ops: u64,
    pub(super) digest: String,
}

/// Allocations of one size that were never freed.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Leak {
    pub(super) size_bytes: u64,
    pub(super) count: u64,
}

/// Marker of a process that made an allocation.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Begun {
    pub(super) process: u32,
    pub(super) program: String,
    pub(super) rank: Option<u64>,
}

/// Summaries of all processes of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Summaries {
    /// Processes that ended normally, by rank and then by process id.
    pub(super) ended: Vec<Summary>,
    /// Processes that left only a marker.
    pub(super) killed: Vec<Begun>,
    /// Process ids of processes that could not write their summary.
    pub(super) unwritten: Vec<String>,
}

impl Summaries {
    pub(super) fn read(folder: &Path) -> Result<Self, CliError> {
        let error = |source| CliError::RunFolder { path: folder.to_path_buf(), source };
        let mut files: BTreeMap<PathBuf, String> = BTreeMap::new();
        let mut unwritten = Vec::new();
        for entry in fs::read_dir(folder).map_err(error)? {
            let path = entry.map_err(error)?.path();
            if path.extension().is_some_and(|kind| kind == "unwritten") {
                unwritten.extend(path.file_stem().map(|process| process.to_string_lossy().into_owned()));
            }
            if path.extension().is_some_and(|kind| kind == "json" || kind == "begun") {
                let text = fs::read_to_string(&path).map_err(error)?;
                files.insert(path, text);
            }
        }
        let of_kind = |kind: &'static str| {
            files.iter().filter(move |(path, _)| path.extension().is_some_and(|suffix| suffix == kind))
        };
        let bad = |path: &Path, source| CliError::RunSummary { path: path.to_path_buf(), source };
        unwritten.sort_unstable();
        let mut summaries = Summaries { unwritten, ..Summaries::default() };
        for (path, text) in of_kind("json") {
            summaries.ended.push(serde_json::from_str(text).map_err(|source| bad(path, source))?);
        }
        for (path, text) in of_kind("begun") {
            let begun: Begun = serde_json::from_str(text).map_err(|source| bad(path, source))?;
            if !summaries.ended.iter().any(|summary| summary.process == begun.process) {
                summaries.killed.push(begun);
            }
        }
        summaries.ended.sort_by_key(|summary| (summary.rank, summary.process));
        summaries.killed.sort_by_key(|begun| (begun.rank, begun.process));
        Ok(summaries)
    }

    /// Returns the recordings that lack records.
    pub(super) fn incomplete(&self) -> impl Iterator<Item = &Incomplete> {
        self.ended.iter().flat_map(|summary| &summary.incomplete)
    }

    /// Returns `true` if a process could not write its recording or its summary.
    pub(super) fn has_failed(&self) -> bool {
        self.incomplete().next().is_some() || !self.unwritten.is_empty()
    }

    /// Returns the traces.
    pub(super) fn traces(&self) -> impl Iterator<Item = &Path> {
        self.ended.iter().flat_map(|summary| &summary.devices).filter_map(|device| device.trace.as_deref())
    }

    /// Returns, for each rank, its process with the most allocations. A rank may also have helper processes.
    pub(super) fn by_rank(&self) -> BTreeMap<u64, &Summary> {
        let mut ranks: BTreeMap<u64, &Summary> = BTreeMap::new();
        for summary in &self.ended {
            let Some(rank) = summary.rank else { continue };
            let known = ranks.entry(rank).or_insert(summary);
            if summary.allocations > known.allocations {
                *known = summary;
            }
        }
        ranks
    }
}
