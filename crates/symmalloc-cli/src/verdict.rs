//! The verdict of a command, which its exit code reports.

use std::process::ExitCode;

/// Meaning of the exit code of a command that had valid input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Ranks agree, and no allocation is refused.
    Agree,
    /// Ranks differ.
    Differ,
    /// Allocations were refused.
    Refused,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Agree => ExitCode::SUCCESS,
            Verdict::Differ | Verdict::Refused => ExitCode::from(3),
        }
    }
}
