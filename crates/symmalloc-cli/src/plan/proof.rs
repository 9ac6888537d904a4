//! The proof that reservations suffice: the job runs twice on a simulated device that counts its calls.
//!
//! Everything is freed between the passes, as at the end of a training step. The second pass is the steady state.

use crate::job::JobError;
use serde::Serialize;
use std::collections::BTreeSet;
use symmalloc_core::Allocator;
use symmalloc_core::config::Config;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::op::Op;
use symmalloc_core::work::{Allowance, TooMuchWork};
use symmalloc_sim::IdleBackend;
use symmalloc_trace::replay::{Program, Replay, StepError};

/// Number of calls to a device, and of changes that a registrar of windows would have to process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counts {
    /// Calls that reserve, map, unmap or release memory.
    pub(super) memory_calls: u64,
    /// Number of births, growths, shrinks and deaths of segments. Each one is work for every communicator that registers the pool.
    pub(super) registrations: u64,
}

/// Counts of a run, by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Proof {
    /// Calls in `reserve`.
    pub(super) reserving: Counts,
    /// Calls in all other ops of the first pass and of the second, except for ops that destroy a pool.
    pub(super) first_pass: Counts,
    pub(super) second_pass: Counts,
    /// Allocations refused by a limit or a full segment.
    pub(super) refused: u64,
    /// Peak of reserved memory.
    pub(super) peak_reserved_bytes: u64,
}

impl Proof {
    /// Returns `true` if the job obtains no memory after its reservations, and no request is refused.
    pub(super) fn holds(&self) -> bool {
        self.first_pass == Counts::default() && self.second_pass == Counts::default() && self.refused == 0
    }

    /// Returns the larger value of each number.
    pub(super) fn max(self, other: Proof) -> Proof {
        let max = |a: Counts, b: Counts| Counts {
            memory_calls: a.memory_calls.max(b.memory_calls),
            registrations: a.registrations.max(b.registrations),
        };
        Proof {
            reserving: max(self.reserving, other.reserving),
            first_pass: max(self.first_pass, other.first_pass),
            second_pass: max(self.second_pass, other.second_pass),
            refused: self.refused.max(other.refused),
            peak_reserved_bytes: self.peak_reserved_bytes.max(other.peak_reserved_bytes),
        }
    }
}

/// Runs the program of a rank. Limits refuse requests as in the job.
pub(super) fn prove(program: &Program, config: &Config, rank: u32) -> Result<Proof, JobError> {
    let allocator: Allocator<_> = Allocator::new(IdleBackend::default(), config.clone())?;
    let mut replay = Replay::new(&allocator, program);
    let mut proof = Proof::default();
    let mut before = Counts::default();
    // Bounds the work, because counting looks at every pool.
    let mut allowance = Allowance::default();
    let is_observed = program.ops().iter().any(|op| matches!(op, Op::Observe { .. }));
    for pass in 0..2 {
        replay.begin_pass().map_err(|error| JobError::Pass { rank, error })?;
        let mut refused = BTreeSet::new();
        for (number, op) in program.ops().iter().enumerate() {
            match (replay.step(op), op) {
                (Err(StepError::Allocate(error)), Op::Allocate { id, .. }) if is_refusal(&error) => {
                    refused.insert(*id);
                    proof.refused += 1;
                }
                (Err(StepError::Allocate(error)), Op::Reserve { .. }) if is_refusal(&error) => {}
                (Err(StepError::NotLive { id }), _) if refused.contains(&id) => {}
                (Err(error), _) => return Err(JobError::Step { rank, op: number, error }),
                (Ok(_), _) => {}
            }
            // Without observers, these ops change segments only by calls that are counted.
            let changes_segments =
                is_observed || !matches!(op, Op::Allocate { .. } | Op::Free { .. } | Op::RecordUse { .. });
            if !changes_segments && memory_calls(&allocator) == before.memory_calls {
                continue;
            }
            let failed = |source: TooMuchWork| JobError::Step { rank, op: number, error: source.into() };
            let now = allowance.charge(|| counts(&allocator)).map_err(failed)?;
            if now != before {
                let part = match (op, pass) {
                    (Op::Reserve { .. }, _) => Some(&mut proof.reserving),
                    (Op::DestroyPool { .. }, _) => None,
                    (_, 0) => Some(&mut proof.first_pass),
                    (_, _) => Some(&mut proof.second_pass),
                };
                if let Some(part) = part {
                    part.memory_calls += now.memory_calls - before.memory_calls;
                    // The sum no longer contains the entries of a destroyed pool, so it may have decreased.
                    part.registrations += now.registrations.saturating_sub(before.registrations);
                }
                before = now;
            }
        }
        replay.free_all().map_err(|error| JobError::Free { rank, error })?;
    }
    proof.peak_reserved_bytes = allocator.stats().reserved_bytes.peak;
    Ok(proof)
}

fn is_refusal(error: &AllocateError) -> bool {
    matches!(error, AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. })
}

/// Returns the number of calls that reserve, map, unmap or release memory so far.
fn memory_calls(allocator: &Allocator<IdleBackend>) -> u64 {
    allocator.backend().range_calls() + allocator.backend().map_calls()
}

fn counts(allocator: &Allocator<IdleBackend>) -> Counts {
    Counts {
        memory_calls: memory_calls(allocator),
        registrations: allocator.pools().into_iter().map(|pool| allocator.segment_log_entries(pool)).sum(),
    }
}
