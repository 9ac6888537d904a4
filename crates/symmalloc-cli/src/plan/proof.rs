//! The proof: a job carried out twice on a simulated device that counts what it is asked for.
//!
//! Between the passes everything is freed, as at the end of a training step: the second pass is the steady state.

use crate::job::JobError;
use serde::Serialize;
use std::collections::BTreeSet;
use symmalloc_core::config::Config;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::lock::Exclusive;
use symmalloc_core::op::Op;
use symmalloc_core::{Allocator, PoolId};
use symmalloc_sim::{Call, SimBackend};
use symmalloc_trace::replay::{Program, Replay, StepError};

/// What a device was asked for, and what a registrar of windows would have to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counts {
    /// Calls that reserve, map, unmap or release memory.
    pub(super) memory_calls: u64,
    /// Births, growths, shrinks and deaths of segments: work for every communicator on which the pool is registered.
    pub(super) registrations: u64,
}

/// What happened in a run, by what the program did at that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Proof {
    /// In `reserve`.
    pub(super) reserving: Counts,
    /// In all else, but pools that the program destroys: in the first pass, and in the second.
    pub(super) first_pass: Counts,
    pub(super) second_pass: Counts,
    /// Allocations that a limit or a full segment refused.
    pub(super) refused: u64,
    /// The most memory that was held at any time.
    pub(super) peak_reserved_bytes: u64,
}

impl Proof {
    /// Whether nothing was asked for after what was reserved, and that was enough.
    pub(super) fn holds(&self) -> bool {
        self.first_pass == Counts::default() && self.second_pass == Counts::default() && self.refused == 0
    }

    /// The larger number of each.
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

/// Carries a program out on a rank's device. What a limit refuses is refused, as in the job.
pub(super) fn prove(program: &Program, config: &Config, rank: u32) -> Result<Proof, JobError> {
    let device = SimBackend::builder().rank(rank).memory_bytes(u64::MAX).build();
    let allocator = Allocator::<_, Exclusive>::new(device, config.clone())?;
    let mut replay = Replay::new(&allocator, program);
    let mut proof = Proof::default();
    let mut before = Counts::default();
    for pass in 0..2 {
        replay.begin_pass().map_err(|error| JobError::Pass { rank, error })?;
        let mut refused = BTreeSet::new();
        for (number, op) in program.ops().iter().enumerate() {
            match (replay.step(op), op) {
                (Err(StepError::Allocate(error)), Op::Allocate { id, .. }) if is_refusal(&error) => {
                    refused.insert(*id);
                    proof.refused += 1;
                }
                (Err(StepError::NotLive { id }), _) if refused.contains(&id) => {}
                (Err(error), _) => return Err(JobError::Step { rank, op: number, error }),
                (Ok(_), _) => {}
            }
            let now = counts(&allocator);
            if now != before {
                let part = match (op, pass) {
                    (Op::Reserve { .. }, _) => Some(&mut proof.reserving),
                    (Op::DestroyPool { .. }, _) => None,
                    (_, 0) => Some(&mut proof.first_pass),
                    (_, _) => Some(&mut proof.second_pass),
                };
                if let Some(part) = part {
                    part.memory_calls += now.memory_calls - before.memory_calls;
                    // A pool that takes a destroyed one's place takes its entries along.
                    part.registrations += now.registrations.saturating_sub(before.registrations);
                }
                before = now;
            }
        }
        replay.free_all().map_err(|error| JobError::Free { rank, error })?;
    }
    proof.peak_reserved_bytes = allocator.backend().mapped_bytes_peak();
    Ok(proof)
}

fn is_refusal(error: &AllocateError) -> bool {
    matches!(error, AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. })
}

fn counts(allocator: &Allocator<SimBackend, Exclusive>) -> Counts {
    let calls = allocator.backend().calls();
    let memory = [Call::Reserve, Call::Map, Call::Unmap, Call::Release];
    Counts {
        memory_calls: memory.into_iter().map(|call| calls.of(call)).sum(),
        registrations: (0..allocator.pool_count()).map(|pool| allocator.segment_log_entries(PoolId(pool))).sum(),
    }
}
