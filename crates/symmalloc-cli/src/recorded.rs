//! A recording as commands use it: read from its source, with the allocator configured by flags.

use crate::args::{PolicyArgs, ReadingArgs};
use crate::error::CliError;
use crate::input;
use crate::job::{Job, JobError, Options};
use std::path::{Path, PathBuf};
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, ConfigError};
use symmalloc_core::op::{Op, Record};
use symmalloc_import::Recording;
use symmalloc_import::rerun::RerunError;
use symmalloc_trace::replay::Program;

/// A recording and the configuration of its allocator.
pub(crate) struct Recorded {
    pub(crate) path: PathBuf,
    pub(crate) recording: Recording,
    pub(crate) job: Job,
    pub(crate) config: Config,
}

impl Recorded {
    pub(crate) fn read(path: &Path, reading: &ReadingArgs, policy: &PolicyArgs) -> Result<Self, CliError> {
        Self::of(path, input::recording(path, reading)?, policy)
    }

    /// Reads the recording with its Python stacks, if it has any.
    pub(crate) fn read_with_stacks(path: &Path, reading: &ReadingArgs, policy: &PolicyArgs) -> Result<Self, CliError> {
        Self::of(path, input::recording_with_stacks(path, reading)?, policy)
    }

    fn of(path: &Path, mut recording: Recording, policy: &PolicyArgs) -> Result<Self, CliError> {
        if let Some(config) = policy.config() {
            reconfigure(&mut recording, config);
        }
        let job = Job::new(&recording).map_err(|source| CliError::Program { path: path.to_path_buf(), source })?;
        let options =
            Options { segments: policy.segments, streams: policy.streams.map(Into::into), ..Options::default() };
        let config = job.config(&options);
        let config = config.map_err(|error| invalid(path, error))?;
        job.check_addresses(&config).map_err(|source| CliError::Job { path: path.to_path_buf(), source })?;
        Ok(Recorded { path: path.to_path_buf(), recording, job, config })
    }

    /// Returns the error for an invalid configuration of this recording.
    pub(crate) fn invalid(&self, error: ConfigError) -> CliError {
        invalid(&self.path, error)
    }

    pub(crate) fn program(&self) -> &Program {
        self.job.program()
    }

    pub(crate) fn op_count(&self) -> usize {
        self.program().ops().len()
    }

    /// Returns the error for a program that cannot be replayed.
    pub(crate) fn failed(&self, source: RerunError) -> CliError {
        CliError::Rerun { path: self.path.clone(), source }
    }
}

fn invalid(path: &Path, error: ConfigError) -> CliError {
    CliError::Job { path: path.to_path_buf(), source: JobError::Config(error) }
}

/// Replaces the recording's configuration, including all settings of its default pool and limits.
pub(crate) fn reconfigure(recording: &mut Recording, config: &Config) {
    recording.config = Some(config.clone());
    let is_replaced = |record: &Record| matches!(record.op, Op::CreatePool { pool: PoolId::DEFAULT, .. });
    // Removing records changes the indices of later records.
    let numbers: Vec<usize> = recording
        .records
        .iter()
        .scan(0, |kept, record| {
            let number = *kept;
            *kept += usize::from(!is_replaced(record));
            Some(number)
        })
        .collect();
    recording.records.retain(|record| !is_replaced(record));
    if let Some(failure) = &mut recording.failure {
        failure.record = numbers[failure.record];
    }
    let free = std::mem::take(&mut recording.device_free_bytes);
    recording.device_free_bytes = free.into_iter().map(|(record, bytes)| (numbers[record], bytes)).collect();
}
