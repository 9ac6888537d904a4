//! What the processes of a run told: a file for each that ended, and a mark for each that began.

use crate::error::CliError;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A process that ended by itself.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Summary {
    pub(super) process: u32,
    pub(super) program: String,
    pub(super) rank: Option<u64>,
    /// Whether it kept its own allocator.
    pub(super) watched: bool,
    pub(super) allocations: u64,
    pub(super) frees: u64,
    /// Allocations that the driver served.
    pub(super) passed_on: u64,
    /// Time in calls that were served.
    pub(super) nanoseconds: u64,
    pub(super) peak_live_bytes: u64,
    /// What the driver would have needed at least.
    pub(super) peak_driver_bytes: u64,
    pub(super) devices: Vec<DeviceSummary>,
}

/// A device of a process.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct DeviceSummary {
    pub(super) device: u32,
    pub(super) trace: Option<PathBuf>,
    pub(super) peak_reserved_bytes: Option<u64>,
    /// How often memory was obtained from the device.
    pub(super) growths: Option<u64>,
    #[serde(default)]
    pub(super) refused: u64,
    #[serde(default)]
    pub(super) digests: Vec<PoolDigest>,
    pub(super) leaks: Vec<Leak>,
}

/// The history of a pool as a number.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(super) struct PoolDigest {
    pub(super) pool: u32,
    pub(super) ops: u64,
    pub(super) digest: String,
}

/// Allocations of one size that were still live.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Leak {
    pub(super) size_bytes: u64,
    pub(super) count: u64,
}

/// A process that allocated. What it told when it began.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Begun {
    pub(super) process: u32,
    pub(super) program: String,
    pub(super) rank: Option<u64>,
}

/// All processes of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Summaries {
    /// By rank, then by process.
    pub(super) ended: Vec<Summary>,
    /// Those that told no more than that they began.
    pub(super) killed: Vec<Begun>,
}

impl Summaries {
    pub(super) fn read(folder: &Path) -> Result<Self, CliError> {
        let error = |source| CliError::RunFolder { path: folder.to_path_buf(), source };
        let mut files: BTreeMap<PathBuf, String> = BTreeMap::new();
        for entry in fs::read_dir(folder).map_err(error)? {
            let path = entry.map_err(error)?.path();
            if path.extension().is_some_and(|kind| kind == "json" || kind == "begun") {
                let text = fs::read_to_string(&path).map_err(error)?;
                files.insert(path, text);
            }
        }
        let of_kind = |kind: &'static str| {
            files.iter().filter(move |(path, _)| path.extension().is_some_and(|suffix| suffix == kind))
        };
        let bad = |path: &Path, source| CliError::RunSummary { path: path.to_path_buf(), source };
        let mut summaries = Summaries::default();
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

    /// The traces that are whole.
    pub(super) fn traces(&self) -> impl Iterator<Item = &Path> {
        self.ended.iter().flat_map(|summary| &summary.devices).filter_map(|device| device.trace.as_deref())
    }

    /// Of each rank the process that allocated most: a rank may have helpers.
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
