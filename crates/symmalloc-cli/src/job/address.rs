//! One rank under the old rule: the model of [`crate::address_order`] on its simulated device.
//!
//! Rank 0 does all passes, so its peaks are steady figures. The other ranks are only compared with it, over the first pass: the
//! model takes some ten times as long as our allocator, and ranks that differ do so by then.

use super::ranks::{At, Report, Rule};
use super::{Decision, JobError, Peaks, Segments};
use crate::address_order::{self, AddressOrder};
use std::ops::ControlFlow;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::ids::Placement;
use symmalloc_core::op::Op;
use symmalloc_trace::replay::Program;

/// The rule, for one program.
pub(super) struct Address<'a> {
    pub(super) program: &'a Program,
    pub(super) segments: address_order::ModelSegments,
    pub(super) seed: u64,
    pub(super) passes: u32,
}

impl Rule for Address<'_> {
    fn segments(&self) -> Option<Segments> {
        Some(match self.segments {
            address_order::ModelSegments::Fixed => Segments::Fixed,
            address_order::ModelSegments::Expandable => Segments::Expandable,
        })
    }

    fn streams(&self) -> StreamPolicy {
        StreamPolicy::Separate
    }

    fn run(&self, rank: u32, mut decided: impl FnMut(At, Decision) -> ControlFlow<()>) -> Result<Report, JobError> {
        let mut model = AddressOrder::new(self.seed, self.segments, rank);
        let mut report = Report::default();
        let ops = self.program.ops();
        let failed = |op| move |error| JobError::Model { rank, op, error };
        let passes = if rank == 0 { self.passes } else { 1 };
        for pass in 0..passes {
            let mut allocation = 0;
            for (op, call) in ops.iter().enumerate() {
                let placement = model.step(call).map_err(failed(op))?;
                if matches!(call, Op::Allocate { .. }) {
                    let placement = placement.unwrap_or(Placement::NOWHERE);
                    if decided(At { pass, op, allocation }, Some(placement)).is_break() {
                        return Ok(report);
                    }
                    allocation += 1;
                }
            }
            report.peaks =
                Peaks { live_bytes: model.requested_bytes_peak(), reserved_bytes: model.reserved_bytes_peak() };
            report.segment_count = model.segment_count() as u64;
            if pass == 0 {
                report.first_pass = report.peaks;
            }
            model.free_all().map_err(failed(ops.len()))?;
        }
        Ok(report)
    }
}
