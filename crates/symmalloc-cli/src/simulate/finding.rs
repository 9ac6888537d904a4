//! Simulated programs, and the results of their runs.

use crate::args::SimulateArgs;
use crate::job::SIMULATED_RANKS;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;
use symmalloc_import::Recording;
use symmalloc_sim::job::shrink::Shrunk;
use symmalloc_sim::job::{Failure, JobOutcome, JobPlan, Size};
/// Source of the programs.
pub(super) enum ProgramSource {
    /// Generated from seeds.
    Generated,
    /// Taken from a recording, to run on this number of ranks.
    Recorded { path: PathBuf, recording: Box<Recording>, ranks: u32 },
    /// Taken from a saved failure.
    Story { path: PathBuf, plan: Box<JobPlan> },
}

/// Result of the runs of one source.
pub(super) struct SimulationFinding<'a> {
    pub(super) source: &'a ProgramSource,
    pub(super) args: &'a SimulateArgs,
    pub(super) runs: u64,
    pub(super) outcome: JobOutcome,
    pub(super) elapsed: Duration,
    /// Host memory per rank on this machine, in bytes; `None` if it cannot be determined.
    pub(super) state_bytes_per_rank: Option<u64>,
    pub(super) failure: Option<SavedFailure>,
}

/// A failure and its saved file.
pub(super) struct SavedFailure {
    pub(super) shrunk: Shrunk,
    /// The failure before it was shrunk.
    pub(super) first: Failure,
    pub(super) story: PathBuf,
}

impl ProgramSource {
    /// Returns the plan of a run.
    pub(super) fn plan(&self, args: &SimulateArgs, seed: u64) -> JobPlan {
        match self {
            ProgramSource::Generated => {
                let ranks = at_least_one(args.ranks.unwrap_or(SIMULATED_RANKS));
                JobPlan::from_seed(seed, &Size { ranks, ops: args.ops as usize })
            }
            ProgramSource::Recorded { recording, ranks, .. } => {
                let config = recording.config.clone().unwrap_or_default();
                JobPlan::of_recorded(&config, &recording.records, seed, at_least_one(*ranks))
            }
            ProgramSource::Story { plan, .. } => (**plan).clone(),
        }
    }

    /// Returns the number of runs. A saved failure is always a single run.
    pub(super) fn runs(&self, args: &SimulateArgs) -> u64 {
        if matches!(self, ProgramSource::Story { .. }) { 1 } else { args.seeds.into() }
    }

    pub(super) fn path(&self) -> Option<&Path> {
        match self {
            ProgramSource::Generated => None,
            ProgramSource::Recorded { path, .. } | ProgramSource::Story { path, .. } => Some(path),
        }
    }

    pub(super) fn name(&self) -> String {
        let name = self.path().map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned());
        name.unwrap_or_else(|| "generated jobs".to_owned())
    }
}

/// Converts a number of ranks, which the argument parser has checked to be at least one.
fn at_least_one(ranks: u32) -> NonZeroU32 {
    NonZeroU32::new(ranks).unwrap_or(NonZeroU32::MIN)
}
