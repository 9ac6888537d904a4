//! One rank under PyTorch's rule: the model of [`crate::address_order`] on the rank's simulated device.
//!
//! Rank 0 stands for the recorded rank: it completes frees when the recording did. It runs all passes, so its peaks are steady-state
//! values. The other ranks run only the first pass, for comparison: the model takes about ten times as long as our allocator, and ranks
//! that differ do so in the first pass.

use super::ranks::{At, Report, Rule};
use super::{Decision, JobError, Peaks, Segments};
use crate::address_order::{AddressOrder, ModelSegments};
use symmalloc_core::backend::Reason;
use symmalloc_core::config::{PoolConfig, SegmentPolicy, StreamPolicy};
use symmalloc_core::ids::Placement;
use symmalloc_core::op::Op;
use symmalloc_core::work::Allowance;
use symmalloc_trace::replay::Program;

/// Runner of one program under the rule.
pub(super) struct Address<'a> {
    pub(super) program: &'a Program,
    /// Configuration of the default pool, applied to all pools.
    pub(super) rules: &'a PoolConfig,
    pub(super) seed: u64,
    pub(super) passes: u32,
}

impl Rule for Address<'_> {
    fn segments(&self) -> Option<Segments> {
        Some(match self.rules.segments() {
            SegmentPolicy::Fixed(_) => Segments::Fixed,
            _ => Segments::Expandable,
        })
    }

    fn streams(&self) -> StreamPolicy {
        StreamPolicy::Separate
    }

    fn run(&self, rank: u32, mut decided: impl FnMut(At, Decision)) -> Result<Report, JobError> {
        let mut model = AddressOrder::new(self.seed, ModelSegments::Expandable, rank).with_rules(self.rules);
        if rank == 0 {
            model = model.with_completions(self.program);
        }
        let mut report = Report::default();
        let ops = self.program.ops();
        let failed = |op| move |error| JobError::Model { rank, op, error };
        let passes = if rank == 0 { self.passes } else { 1 };
        let mut allowance = Allowance::default();
        for pass in 0..passes {
            let mut allocation = 0;
            for (op, call) in ops.iter().enumerate() {
                let stepped = allowance.charge(|| model.step_of(self.program, op));
                let stepped = stepped.map_err(|source| JobError::TooMuchWork { rank, op, source })?;
                let placement = match (stepped, call) {
                    (Ok(placement), _) => Some(placement.unwrap_or(Placement::NOWHERE)),
                    // The request exceeds the address space. The model's state is unchanged.
                    (Err(error), Op::Allocate { .. }) if error.reason == Reason::OutOfMemory => None,
                    (Err(error), _) => return Err(failed(op)(error)),
                };
                if matches!(call, Op::Allocate { .. }) {
                    decided(At { pass, op, allocation }, placement);
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
