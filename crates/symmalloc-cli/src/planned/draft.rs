//! Plan files without plans: the configuration, and the pools that the program creates.

use crate::error::CliError;
use crate::recorded::Recorded;
use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig, SegmentPolicy};
use symmalloc_core::op::Op;
use symmalloc_core::units::MIB;
use symmalloc_core::{PoolId, StreamId};
use symmalloc_trace::plan::{PlanContradiction, PlanFile};

/// Mapping granularity of CUDA, in bytes.
pub(super) const GRANULE_BYTES: u64 = 2 * MIB;

/// Returns a file with this configuration and the program's pools, but without plans.
pub(super) fn empty(recorded: &Recorded, config: Config) -> Result<PlanFile, CliError> {
    let mut file = PlanFile::new(config);
    for op in recorded.program().ops() {
        if let Op::CreatePool { pool, config } = op
            && *pool != PoolId::DEFAULT
        {
            file.add_pool(*pool, (**config).clone()).map_err(|source| contradicts(recorded, source))?;
        }
    }
    Ok(file)
}

/// Returns a file with the same plans. Each reserved pool whose memory is fully planned gets segments of the size that its largest
/// heap needs.
pub(super) fn with_exact_segments(recorded: &Recorded, file: &PlanFile) -> Result<PlanFile, CliError> {
    let heaps = heaps(file);
    let sleeps = |pool: PoolId| {
        recorded.program().ops().iter().any(|op| matches!(op, Op::Sleep { pool: of, .. } if *of == pool))
    };
    let exact = |pool: PoolId, config: &PoolConfig| {
        let of_pool = heaps.iter().filter(|((of, _), _)| *of == pool && !sleeps(pool));
        let needed_bytes = of_pool.map(|(_, bytes)| *bytes).max();
        match (config.segments(), needed_bytes) {
            (SegmentPolicy::Reserved { .. }, Some(bytes)) => {
                config.to_builder().reserved(bytes.next_multiple_of(GRANULE_BYTES)).build()
            }
            _ => Ok(config.clone()),
        }
    };
    let invalid = |error| recorded.invalid(error);
    let default_pool = exact(PoolId::DEFAULT, file.config().default_pool()).map_err(invalid)?;
    let config = file.config().to_builder().default_pool(default_pool).build().map_err(invalid)?;
    let mut exact_file = PlanFile::new(config);
    for (pool, config) in file.pools() {
        let config = exact(pool, config).map_err(invalid)?;
        exact_file.add_pool(pool, config).map_err(|source| contradicts(recorded, source))?;
    }
    for (pool, plan) in file.plans() {
        exact_file.add_plan(pool, plan.clone()).map_err(|source| contradicts(recorded, source))?;
    }
    Ok(exact_file)
}

/// Returns the bytes of memory that the plans of each heap place allocations in. Plans of the same heap share memory.
pub(super) fn heaps(file: &PlanFile) -> BTreeMap<(PoolId, Option<StreamId>), u64> {
    let mut heaps = BTreeMap::new();
    for (pool, plan) in file.plans() {
        let bytes = plan.memory_bytes(file.pool_config(pool).expect("it has plans"), GRANULE_BYTES);
        let most: &mut u64 = heaps.entry((pool, plan.stream())).or_default();
        *most = bytes.max(*most);
    }
    heaps
}

/// Returns the error for plans that contradict each other.
pub(super) fn contradicts(recorded: &Recorded, source: PlanContradiction) -> CliError {
    CliError::Contradictory { path: recorded.path.clone(), source }
}
