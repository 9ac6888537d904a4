//! One rank under the old rule: the model of [`crate::address_order`] on its simulated device.

use super::ranks::{At, Report, Rule};
use super::{Decision, JobError, Segments};
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
        let mut allocation = 0;
        for (op, call) in self.program.ops().iter().enumerate() {
            let placement = model.step(call).map_err(|error| JobError::Model { rank, op, error })?;
            if matches!(call, Op::Allocate { .. }) {
                let placement = placement.unwrap_or(Placement::NOWHERE);
                if decided(At { repeat: 0, op, allocation }, Some(placement)).is_break() {
                    break;
                }
                allocation += 1;
            }
        }
        Ok(Report {
            peak_live_bytes: model.requested_bytes_peak(),
            peak_reserved_bytes: model.reserved_bytes_peak(),
            segment_count: model.segment_count() as u64,
            first_digest: None,
            last_digest: None,
        })
    }
}
