//! The contents of a plan file: a job's allocator configuration, and the plans of its heaps.

use super::contradiction::PlanContradiction;
use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::{HeapId, PoolId, StreamGroup};
use symmalloc_core::plans::{Plan, PlanError};

/// The plans of a job, and the configuration that they apply to. Pools are identified by the ids that the program gives
/// them.
///
/// Overlapping allocations are detected only when a plan is adopted, because they depend on how the pool rounds sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanFile {
    /// The allocator's configuration, including that of the default pool.
    config: Config,
    /// Configurations of all pools except the default pool.
    pools: BTreeMap<PoolId, PoolConfig>,
    /// Plans by heap and key. Every pool with a plan is configured, and its stream policy fits the group of each plan.
    plans: BTreeMap<(HeapId, u64), Plan>,
}

impl PlanFile {
    /// Creates a file without plans.
    pub fn new(config: Config) -> Self {
        PlanFile { config, pools: BTreeMap::new(), plans: BTreeMap::new() }
    }

    /// Adds the configuration of a pool that the program creates.
    ///
    /// # Errors
    /// Returns an error if the pool is already configured.
    pub fn add_pool(&mut self, pool: PoolId, config: PoolConfig) -> Result<(), PlanContradiction> {
        if self.pool_config(pool).is_some() {
            return Err(PlanContradiction::PoolTwice { pool });
        }
        self.pools.insert(pool, config);
        Ok(())
    }

    /// Adds a plan for a heap of a configured pool.
    ///
    /// # Errors
    /// Returns an error if the pool is not configured, if the plan's streams contradict the pool's stream policy, or if
    /// the heap already has a plan for this key.
    pub fn add_plan(&mut self, pool: PoolId, plan: Plan) -> Result<(), PlanContradiction> {
        let config = self.pool_config(pool).ok_or(PlanContradiction::UnknownPool { pool })?;
        let (heap, key) = (HeapId { pool, group: plan.group() }, plan.key());
        let streams = config.streams();
        if !streams.makes(heap.group) {
            return Err(PlanError::Streams { pool, group: heap.group, streams }.into());
        }
        if self.plans.contains_key(&(heap, key)) {
            return Err(PlanContradiction::PlanTwice { heap, key });
        }
        self.plans.insert((heap, key), plan);
        Ok(())
    }

    /// Returns the allocator's configuration, including that of the default pool.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the configuration of a pool, if the file contains one.
    pub fn pool_config(&self, pool: PoolId) -> Option<&PoolConfig> {
        if pool == PoolId::DEFAULT { Some(self.config.default_pool()) } else { self.pools.get(&pool) }
    }

    /// Returns the configurations of all pools except the default one, by id.
    pub fn pools(&self) -> impl Iterator<Item = (PoolId, &PoolConfig)> {
        self.pools.iter().map(|(pool, config)| (*pool, config))
    }

    /// Returns the plans, sorted by heap and key. They are adopted in this order.
    pub fn plans(&self) -> impl Iterator<Item = (HeapId, &Plan)> {
        self.plans.iter().map(|((heap, _), plan)| (*heap, plan))
    }

    /// Returns the plans of one pool, sorted by heap and key.
    pub fn plans_of(&self, pool: PoolId) -> impl Iterator<Item = &Plan> {
        let first = HeapId { pool, group: StreamGroup::All };
        self.plans.range((first, 0)..).take_while(move |((heap, _), _)| heap.pool == pool).map(|(_, plan)| plan)
    }
}
