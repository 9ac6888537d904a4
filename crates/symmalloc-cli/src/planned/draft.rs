//! Plan files without plans: the configuration, and the pools that the program creates.

use crate::error::CliError;
use crate::recorded::Recorded;
use std::collections::BTreeMap;
use symmalloc_core::PoolId;
use symmalloc_core::config::Config;
use symmalloc_core::ids::HeapId;
use symmalloc_core::op::Op;
use symmalloc_core::units::MIB;
use symmalloc_trace::plan::{PlanContradiction, PlanFile};

/// Mapping granularity of CUDA, in bytes.
pub(crate) const GRANULE_BYTES: u64 = 2 * MIB;

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

/// Returns, for each heap, the size of the memory in which its plans place allocations, in bytes. Plans of the same
/// heap share memory.
pub(super) fn heaps(file: &PlanFile) -> BTreeMap<HeapId, u64> {
    let mut heaps = BTreeMap::new();
    for (heap, plan) in file.plans() {
        let bytes = plan.memory_bytes(
            file.pool_config(heap.pool).expect("a pool with plans should have a configuration"),
            GRANULE_BYTES,
        );
        let most: &mut u64 = heaps.entry(heap).or_default();
        *most = bytes.max(*most);
    }
    heaps
}

/// Returns the error for plans that contradict each other.
pub(super) fn contradicts(recorded: &Recorded, source: PlanContradiction) -> CliError {
    CliError::Contradictory { path: recorded.path.clone(), source }
}
