//! Errors of an export.

use std::io;

use crate::rerun::RerunError;

/// Error exporting a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The program cannot be executed.
    #[error(transparent)]
    Rerun(#[from] RerunError),
    /// The file cannot be written.
    #[error("the file cannot be written")]
    Write(#[from] io::Error),
}
