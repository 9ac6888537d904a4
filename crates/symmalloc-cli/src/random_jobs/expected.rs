//! The expected numbers of a job, from the oracle of the harness. It is written from the rules and shares no code with the allocator.

use std::collections::BTreeMap;
use symmalloc_core::config::Config;
use symmalloc_core::ids::{AllocationId, Placement, PoolId};
use symmalloc_core::op::Op;
use symmalloc_harness::oracle::{Oracle, Outcome};
use symmalloc_trace::replay::Program;

/// Bytes in which the simulated device gives memory.
const GRANULE_BYTES: u64 = 2 << 20;

/// The most of some passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) live_bytes: u64,
    pub(super) reserved_bytes: u64,
    /// Requests that are refused, in all of these passes.
    pub(super) refused: u64,
}

/// A job's numbers, worked out without the allocator.
#[derive(Debug, Default)]
pub(super) struct Expected {
    pub(super) first: Numbers,
    pub(super) all: Numbers,
    /// Requests refused in the pass that refuses most.
    pub(super) refused_most: u64,
    /// Placements in the first pass, by allocation; `None` for one that is refused or has no bytes.
    pub(super) placements: Vec<Option<Placement>>,
    /// Point at which the job stops because a limit leaves no room for a pool to wake.
    pub(super) stop: Option<Stop>,
}

/// The end of a job that cannot be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// At an op of a pass.
    Op { pass: u32, op: usize },
    /// Before a later pass.
    Pass,
}

impl Expected {
    /// Carries a program out so many times on one oracle.
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

/// A job on its oracle.
struct Run {
    oracle: Oracle,
    /// The order in which the live pools were created.
    pools: BTreeMap<PoolId, u32>,
    made: u32,
    /// Pools that a pass leaves asleep.
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

    /// Wakes the pools that the pass before left asleep, in the order in which they were created. Where a limit leaves no room, free
    /// memory goes back first. Returns `false` if there is none even so.
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
