//! The body of a step: ops that a generated program repeats, with occasional variations.

use crate::device::SplitMix64;
use symmalloc_core::StreamId;

/// An op of a body. Allocations are numbered from 0 within each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyOp {
    Allocate {
        stream: StreamId,
        size_bytes: u64,
    },
    Free {
        number: usize,
    },
    /// Frees an allocation that the previous step made and left live.
    FreeOfStepBefore {
        number: usize,
    },
    RecordUse {
        number: usize,
        stream: StreamId,
    },
}

/// A valid body: each op refers to an earlier allocation, and each allocation is freed at most once.
#[derive(Clone, Debug)]
pub(crate) struct Body(Vec<BodyOp>);

/// Maximum number of ops that are drawn for a body.
const OPS_MAX: u64 = 24;

impl Body {
    /// Draws a body that uses up to `streams` streams, with allocation sizes from `size`.
    pub(crate) fn draw(random: &mut SplitMix64, streams: u16, mut size: impl FnMut() -> u64) -> Self {
        let streams = 1 + random.below(streams.into()) as u16;
        let stream = |random: &mut SplitMix64| StreamId(random.below(streams.into()) as u16);
        let (mut ops, mut live, mut made) = (Vec::new(), Vec::new(), 0);
        for _ in 0..4 + random.below(OPS_MAX - 3) {
            match random.below(8) {
                0..3 if !live.is_empty() => {
                    let number = live.swap_remove(random.below(live.len() as u64) as usize);
                    ops.push(BodyOp::Free { number });
                }
                3 if !live.is_empty() => {
                    let number = live[random.below(live.len() as u64) as usize];
                    ops.push(BodyOp::RecordUse { number, stream: stream(random) });
                }
                _ => {
                    ops.push(BodyOp::Allocate { stream: stream(random), size_bytes: size() });
                    live.push(made);
                    made += 1;
                }
            }
        }
        for number in live {
            if random.below(3) == 0 {
                let at = random.below(ops.len() as u64 + 1) as usize;
                ops.insert(at, BodyOp::FreeOfStepBefore { number });
            } else {
                ops.push(BodyOp::Free { number });
            }
        }
        Body(ops)
    }

    /// Returns the number of allocations in the body.
    pub(crate) fn allocation_count(&self) -> usize {
        self.0.iter().filter(|op| matches!(op, BodyOp::Allocate { .. })).count()
    }

    /// Returns the ops for one step. One time in five they vary: the step ends early, a size changes, or a free or use
    /// is missing.
    pub(crate) fn ops(&self, random: &mut SplitMix64) -> Vec<BodyOp> {
        let mut ops = self.0.clone();
        if random.below(5) > 0 {
            return ops;
        }
        let at = random.below(ops.len() as u64) as usize;
        match &mut ops[at] {
            BodyOp::Allocate { size_bytes, .. } if random.below(3) > 0 => *size_bytes += 4096,
            BodyOp::Allocate { .. } => ops.truncate(at),
            _ => drop(ops.remove(at)),
        }
        ops
    }
}
