//! Why an export failed.

use std::io;

use crate::rerun::RerunError;

/// Why a job could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The program cannot be carried out.
    #[error(transparent)]
    Rerun(#[from] RerunError),
    /// The file cannot be written.
    #[error("the file cannot be written")]
    Write(#[from] io::Error),
}
