//! A rank that makes room for its wakes alone, next to a rank that has enough memory.
//!
//! ```text
//!  rank 0   op ─ op ─ sleep ─ op ─ wake ─ op ...              symmetric pools: the same decisions and digests
//!  rank 1   op ─ op ─ sleep ─ recover ─ op ─ wake ─ op ...    the first mapping of a wake is refused; it makes room and retries
//! ```
//! A recovery releases memory of private pools, so decisions in these may differ between the ranks.

use crate::checker::{Decisions, DeviceWork, PrintOnPanic, outcome};
use crate::generate::Scenario;
use crate::run::Run;
use std::collections::BTreeMap;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_core::{Allocation, Op, PoolConfig, PoolId, SharedAllocator};
use symmalloc_sim::{Call, Delays, Fault, FaultRule, SimBackend};
use symmalloc_trace::replay::StepError;

/// The allocator of a rank.
pub type RankAllocator<'a> = SharedAllocator<&'a SimBackend>;

/// A recovery: releases memory on one rank alone.
pub type Recovery = fn(&RankAllocator<'_>);

/// Number of ops between two recoveries while a pool sleeps.
const RECOVER_EVERY: usize = 3;

/// Runs the scenario that these bytes encode, without limits, on two ranks. Returns the number of ops executed.
///
/// # Panics
/// Panics if the ranks decide differently in a symmetric pool, or a wake fails.
pub fn run(bytes: &[u8], recover: Recovery) -> u64 {
    let scenario = without_limit(Scenario::from_bytes(bytes));
    let _report = PrintOnPanic(&scenario);
    let one = scenario.device_builder(1).rank(0).delays(Delays::Immediate).build();
    let other = scenario.device_builder(2).rank(1).delays(Delays::UntilSynchronized).build();
    let one = symmetric_decisions(&scenario, &one, None);
    let other = symmetric_decisions(&scenario, &other, Some(recover));
    assert_eq!(one, other, "a local recovery changed a symmetric pool");
    2 * scenario.program.ops().len() as u64
}

/// Trims all private pools, and lets one of them sleep and wake.
pub fn trim_private(allocator: &RankAllocator<'_>) {
    let is_private = |pool: &PoolId| allocator.pool_config(*pool).is_ok_and(|config| !config.symmetric());
    let private: Vec<PoolId> = (0..allocator.pool_count()).map(PoolId).filter(is_private).collect();
    for pool in &private {
        allocator.trim_pool(*pool).expect("no fault was injected");
    }
    let is_awake = |pool: &&PoolId| allocator.phase(**pool) == Ok(Phase::Awake);
    if let Some(pool) = private.iter().find(is_awake) {
        allocator.sleep(*pool, Contents::Keep).expect("no step is open");
        allocator.wake(*pool).expect("there is room");
    }
}

/// Returns the same scenario without a limit of the allocator: a limit counts private memory, which differs between the ranks.
fn without_limit(scenario: Scenario) -> Scenario {
    let config =
        scenario.config.to_builder().total_limit_bytes(None).build().expect("the configuration should be valid");
    Scenario { config, ..scenario }
}

/// Runs a scenario and returns the decisions in symmetric pools. With a recovery, runs it every few ops while a pool sleeps, and in every
/// wake of a symmetric pool that maps memory.
fn symmetric_decisions(scenario: &Scenario, device: &SimBackend, recover: Option<Recovery>) -> Decisions {
    let mut decisions = Decisions::default();
    {
        let allocator =
            RankAllocator::with_lock(device, scenario.config.clone()).expect("the granularity should be valid");
        let mut run = Run::new(&allocator, scenario);
        let mut work = DeviceWork::new(device);
        let mut pools = BTreeMap::new();
        for (index, op) in scenario.program.ops().iter().enumerate() {
            let is_asleep = |pool: u32| allocator.phase(PoolId(pool)).is_ok_and(|phase| phase != Phase::Awake);
            if let Some(recover) = recover
                && index % RECOVER_EVERY == 0
                && (0..allocator.pool_count()).any(is_asleep)
            {
                recover(&allocator);
            }
            let is_symmetric = |pool: &PoolId| allocator.pool_config(*pool).is_ok_and(PoolConfig::symmetric);
            if let Op::Allocate { id, pool, .. } = op {
                pools.insert(*id, *pool);
            }
            let pool = match op {
                Op::Free { id } | Op::RecordUse { id, .. } => pools.get(id),
                Op::Allocate { pool, .. }
                | Op::Reserve { pool, .. }
                | Op::Trim { pool: Some(pool) }
                | Op::CreatePool { pool, .. }
                | Op::DestroyPool { pool }
                | Op::Sleep { pool, .. }
                | Op::Wake { pool } => Some(pool),
                _ => None,
            };
            let is_compared = pool.is_some_and(is_symmetric);
            let result = match (op, recover) {
                (Op::Wake { pool }, Some(recover)) if is_compared => wake_when_full(&allocator, device, *pool, recover),
                _ => run.step(index),
            };
            work.submit(op, &result);
            let outcome = outcome(result);
            if is_compared {
                decisions.outcomes.push(outcome);
            }
        }
        allocator.check().unwrap_or_else(|violation| panic!("at the end: {violation}"));
        let symmetric = (0..allocator.pool_count()).map(PoolId);
        let symmetric = symmetric.filter(|pool| allocator.pool_config(*pool).is_ok_and(PoolConfig::symmetric));
        decisions.digests = symmetric.filter_map(|pool| Some((pool, allocator.digest(pool).ok()?))).collect();
    }
    assert!(device.leaks().is_empty(), "the dropped allocator leaked: {}", device.leaks());
    decisions
}

/// Wakes a pool on a device that refuses the first mapping. The recovery makes room.
fn wake_when_full(
    allocator: &RankAllocator<'_>,
    device: &SimBackend,
    pool: PoolId,
    recover: Recovery,
) -> Result<Option<Allocation>, StepError> {
    let ordinal = device.calls().of(Call::Map);
    device.inject(Some(Call::Map), FaultRule::At { ordinal }, Fault::OutOfMemory);
    let woken = allocator.remap_with(pool, || {
        device.heal();
        recover(allocator);
        // Another process made room, too.
        1
    });
    device.heal();
    let _woken = woken.map_err(StepError::Sleep)?.resume();
    Ok(None)
}
