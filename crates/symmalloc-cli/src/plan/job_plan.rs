//! The plan of a job with the figures about it.

use super::figures::Figures;
use super::reservations::ReservationPlan;
use crate::error::CliError;
use std::path::PathBuf;

/// Results for one job.
pub(super) struct JobPlan<'a> {
    /// The recordings of the job: one, or one for each rank.
    pub(super) traces: &'a [PathBuf],
    pub(super) figures: Figures,
    /// The reservations, or the error if a limit or an address range is too small for them.
    pub(super) reservations: Result<ReservationPlan, CliError>,
}
