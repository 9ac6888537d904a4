//! The expected numbers of a job, computed by the oracle of the harness, which follows the rules and shares no code
//! with the allocator.

use std::collections::BTreeMap;
use symmalloc_core::config::Config;
use symmalloc_core::ids::{AllocationId, Placement, PoolId};
use symmalloc_core::op::Op;
use symmalloc_harness::oracle::{Oracle, Outcome};
use symmalloc_trace::replay::Program;

/// Mapping granularity of the simulated device, in bytes.
const GRANULE_BYTES: u64 = 2 << 20;

/// Maxima over some passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) live_bytes: u64,
    pub(super) reserved_bytes: u64,
    /// Number of refused requests, summed over these passes.
    pub(super) refused: u64,
}

/// The numbers of a job, computed without the allocator.
#[derive(Debug, Default)]
pub(super) struct Expected {
    pub(super) first: Numbers,
    pub(super) all: Numbers,
    /// Number of refused requests in the pass that refuses most.
    pub(super) refused_most: u64,
    /// Placements in the first pass, by allocation; `None` for a refused or zero-byte one.
    pub(super) placements: Vec<Option<Placement>>,
    /// The point at which the job stops because a limit leaves no room for a pool to wake.
    pub(super) stop: Option<Stop>,
}

/// The point at which a job stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// At an op of a pass.
    Op { pass: u32, op: usize },
    /// Before a later pass.
    Pass,
}

impl Expected {
    /// Runs a program for this number of passes on one oracle.
    pub(super) fn of(program: &Program, config: &Config, passes: u32) -> Self {
        let mut run =
            Run { oracle: Oracle::new(config, GRANULE_BYTES), pools: BTreeMap::new(), made: 1, asleep: Vec::new() };
        run.pools.insert(PoolId::DEFAULT, 0);
        let mut expected = Expected::default();
        for pass in 0..passes {
            let mut numbers = Numbers::default();
            if !run.wake_all(&mut numbers) {
                expected.stop = Some(Stop::Pass);
                return expected;
            }
            let mut placements = Vec::new();
            for (op, call) in program.ops().iter().enumerate() {
                let outcome = run.step(call);
                numbers.live_bytes = numbers.live_bytes.max(run.oracle.live().1);
                numbers.reserved_bytes = numbers.reserved_bytes.max(run.oracle.reserved_bytes());
                match (call, outcome) {
                    (Op::Allocate { size_bytes, .. }, Outcome::Placed { placement, .. }) => {
                        placements.push((*size_bytes > 0).then_some(placement));
                    }
                    (Op::Allocate { .. }, _) => {
                        numbers.refused += 1;
                        placements.push(None);
                    }
                    (Op::Wake { .. }, Outcome::Refused(_)) => {
                        expected.stop = Some(Stop::Op { pass, op });
                        return expected;
                    }
                    _ => {}
                }
            }
            if pass == 0 {
                (expected.first, expected.placements) = (numbers, placements);
            }
            let Numbers { live_bytes, reserved_bytes, refused } = numbers;
            expected.all.live_bytes = expected.all.live_bytes.max(live_bytes);
            expected.all.reserved_bytes = expected.all.reserved_bytes.max(reserved_bytes);
            expected.all.refused += refused;
            expected.refused_most = expected.refused_most.max(refused);
            for allocation in 0..program.allocation_count() as u64 {
                run.oracle.step(&Op::Free { id: AllocationId(allocation) });
            }
        }
        expected
    }
}

/// A program in progress on an oracle.
struct Run {
    oracle: Oracle,
    /// The live pools, numbered in the order of their creation.
    pools: BTreeMap<PoolId, u32>,
    made: u32,
    /// Pools that a pass left asleep.
    asleep: Vec<PoolId>,
}

impl Run {
    fn step(&mut self, op: &Op) -> Outcome {
        let outcome = self.oracle.step(op);
        match *op {
            Op::CreatePool { pool, .. } if !self.pools.contains_key(&pool) => {
                self.pools.insert(pool, self.made);
                self.made += 1;
            }
            Op::DestroyPool { pool } => {
                self.pools.remove(&pool);
                self.asleep.retain(|asleep| *asleep != pool);
            }
            Op::Sleep { pool, .. } => self.asleep.push(pool),
            Op::Wake { pool } if outcome == Outcome::Done => self.asleep.retain(|asleep| *asleep != pool),
            _ => {}
        }
        outcome
    }

    /// Wakes the pools that the previous pass left asleep, in the order of their creation. If a limit leaves no room,
    /// it trims first. Returns `false` if a pool still cannot wake.
    fn wake_all(&mut self, numbers: &mut Numbers) -> bool {
        let mut asleep = std::mem::take(&mut self.asleep);
        asleep.sort_by_key(|pool| self.pools[pool]);
        asleep.dedup();
        asleep.into_iter().all(|pool| {
            let wake = Op::Wake { pool };
            let mut is_awake = self.oracle.step(&wake) == Outcome::Done;
            if !is_awake {
                self.oracle.step(&Op::Trim { pool: None });
                is_awake = self.oracle.step(&wake) == Outcome::Done;
            }
            numbers.reserved_bytes = numbers.reserved_bytes.max(self.oracle.reserved_bytes());
            is_awake
        })
    }
}
