//! One rank under our rule: the core's allocator on a simulated device.

use super::ranks::{At, Report, Rule};
use super::{Decision, JobError, Options, Peaks, Segments};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::{Config, StreamPolicy};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_core::op::Op;
use symmalloc_core::{Allocator, PoolId};
use symmalloc_sim::{Call, IdleBackend, SimBackend};
use symmalloc_trace::replay::{Program, Replay, StepError};

/// Runner of one program under the rule.
pub(super) struct Sequence<'a> {
    pub(super) program: &'a Program,
    pub(super) config: &'a Config,
    pub(super) options: &'a Options,
}

/// An op whose request was refused, and the cause, which is `None` for a request that is larger than any segment.
pub(crate) type Refused = (usize, Option<OutOfMemoryCause>);

/// Outcome of running a program once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attempt {
    pub(crate) refused: Vec<Refused>,
    /// Peak of reserved memory.
    pub(crate) reserved_bytes: u64,
}

impl Sequence<'_> {
    /// Runs the program once on rank 0, up to and including an op, or until `is_refused` ends it at a refusal.
    pub(super) fn attempt(
        &self,
        last_op: usize,
        is_refused: impl Fn(&Refused) -> ControlFlow<()>,
    ) -> Result<Attempt, JobError> {
        let allocator: Allocator<_> = Allocator::new(IdleBackend::default(), self.config.clone())?;
        let mut replay = Replay::new(&allocator, self.program);
        let (mut attempt, mut refused) = (Attempt::default(), BTreeSet::new());
        for (op, call) in self.program.ops().iter().enumerate().take(last_op.saturating_add(1)) {
            match (replay.step(call), call) {
                (Ok(_), _) => {}
                (Err(StepError::Allocate(error)), Op::Allocate { .. } | Op::Reserve { .. }) if is_refusal(&error) => {
                    if let Op::Allocate { id, .. } = call {
                        refused.insert(*id);
                    }
                    let cause = match error {
                        AllocateError::OutOfMemory(error) => Some(error.cause),
                        _ => None,
                    };
                    attempt.refused.push((op, cause));
                    if attempt.refused.last().is_some_and(|refused| is_refused(refused).is_break()) {
                        break;
                    }
                }
                (Err(StepError::NotLive { id }), _) if refused.contains(&id) => {}
                (Err(error), _) => return Err(JobError::Step { rank: 0, op, error }),
            }
        }
        attempt.reserved_bytes = allocator.stats().reserved_bytes.peak;
        Ok(attempt)
    }

    /// Runs the program on a device that checks nothing, which is faster. The report is that of every rank (rule D1).
    pub(super) fn run_idle(&self, decided: impl FnMut(At, Decision)) -> Result<Report, JobError> {
        let calls = |device: &IdleBackend| SlowCalls { maps: device.map_calls(), waits: device.wait_calls() };
        self.run_on(IdleBackend::default(), calls, 0, decided)
    }

    /// Runs the program on a device, whose calls so far `calls` returns.
    fn run_on<B: Backend>(
        &self,
        device: B,
        calls: impl Fn(&B) -> SlowCalls,
        rank: u32,
        mut decided: impl FnMut(At, Decision),
    ) -> Result<Report, JobError> {
        let allocator: Allocator<_> = Allocator::new(device, self.config.clone())?;
        let plan = self.options.plan.as_deref();
        let replay = plan.map_or_else(
            || Ok(Replay::new(&allocator, self.program)),
            |plan| Replay::following(&allocator, self.program, plan),
        );
        let mut replay = replay.map_err(|error| JobError::Plan { rank, error })?;
        let mut report = Report::default();
        // The digest includes the decisions of destroyed pools.
        let mut destroyed = 0;
        let own_waits = self.program.ops().iter().filter(|op| matches!(op, Op::Wait { .. })).count() as u64;
        for pass in 0..self.options.passes.get() {
            let before = calls(allocator.backend());
            replay.begin_pass().map_err(|error| JobError::Pass { rank, error })?;
            let mut refused = BTreeSet::new();
            let mut allocation = 0;
            for (op, call) in self.program.ops().iter().enumerate() {
                if let Op::DestroyPool { pool } = call
                    && let Some(digest) = replay.pool_of(*pool).and_then(|pool| allocator.digest(pool).ok())
                {
                    destroyed = fold(destroyed, digest.value);
                }
                let stepped = match (replay.step(call), call) {
                    (Ok(made), _) => Ok(made.map(|made| Some(made.placement))),
                    (Err(StepError::Allocate(error)), Op::Allocate { id, .. }) if is_refusal(&error) => {
                        refused.insert(*id);
                        Ok(Some(None))
                    }
                    (Err(StepError::Allocate(error)), Op::Reserve { .. }) if is_refusal(&error) => Ok(None),
                    (Err(StepError::NotLive { id }), _) if refused.contains(&id) => Ok(None),
                    (Err(error), _) => Err(JobError::Step { rank, op, error }),
                };
                if let Some(decision) = stepped? {
                    decided(At { pass, op, allocation }, decision);
                    allocation += 1;
                }
            }
            let stats = allocator.stats();
            report.peaks =
                Peaks { live_bytes: stats.usage.all.requested_bytes.peak, reserved_bytes: stats.reserved_bytes.peak };
            report.segment_count = stats.segment_count;
            if pass == 0 {
                report.first_pass = report.peaks;
                report.first_digest = Some(digest(&allocator, destroyed));
            }
            replay.free_all().map_err(|error| JobError::Free { rank, error })?;
            let after = calls(allocator.backend());
            report.maps = after.maps - before.maps;
            report.waits = (after.waits - before.waits).saturating_sub(own_waits);
        }
        report.planned = replay.planned_allocations();
        report.last_digest = Some(digest(&allocator, destroyed));
        Ok(report)
    }
}

/// Driver calls that a real device takes long for.
struct SlowCalls {
    /// Calls that mapped or unmapped memory.
    maps: u64,
    /// Calls that made a stream wait for an event.
    waits: u64,
}

impl Rule for Sequence<'_> {
    fn segments(&self) -> Option<Segments> {
        Segments::of(self.config.default_pool().segments())
    }

    fn streams(&self) -> StreamPolicy {
        self.config.default_pool().streams()
    }

    fn is_planned(&self) -> bool {
        self.options.plan.is_some()
    }

    fn run(&self, rank: u32, decided: impl FnMut(At, Decision)) -> Result<Report, JobError> {
        // The device has unlimited memory, because driver refusals are not part of this comparison.
        let device =
            SimBackend::builder().seed(self.options.seed).rank(rank).memory_bytes(u64::MAX).without_kernels().build();
        let calls = |device: &SimBackend| {
            let counts = device.calls();
            SlowCalls { maps: counts.of(Call::Map) + counts.of(Call::Unmap), waits: counts.of(Call::Wait) }
        };
        self.run_on(device, calls, rank, decided)
    }
}

/// Returns `true` if the error is the allocator's decision to refuse memory.
fn is_refusal(error: &AllocateError) -> bool {
    matches!(error, AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. })
}

/// Returns the digest of the default pool, combined with those of all other pools that were not destroyed, and with `destroyed`, the
/// combined digests of the destroyed pools.
fn digest(allocator: &Allocator<impl Backend>, destroyed: u64) -> u64 {
    let pools = (0..allocator.pool_count()).filter_map(|pool| allocator.digest(PoolId(pool)).ok());
    let existing = pools.map(|digest| digest.value).reduce(fold).unwrap_or(0);
    if destroyed == 0 { existing } else { fold(existing, destroyed) }
}

fn fold(all: u64, pool: u64) -> u64 {
    all.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ pool
}
