//! What a plan's file holds: how the allocator of a job is configured, and the plans of its heaps.

use super::error::PlanContradiction;
use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::plans::{Plan, PlanError};

/// The plans of a job, and the configuration that they are for. Pools have the numbers that the program gives them.
///
/// Whether allocations overlap depends on how a pool rounds sizes: that is checked when a plan is adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanFile {
    /// That of the default pool included.
    config: Config,
    /// The other pools.
    pools: BTreeMap<PoolId, PoolConfig>,
    /// By pool, heap and key. Every pool is configured, and its streams share exactly when its plans are for all streams.
    plans: BTreeMap<(PoolId, Option<StreamId>, u64), Plan>,
}

impl PlanFile {
    /// Without plans yet.
    pub fn new(config: Config) -> Self {
        PlanFile { config, pools: BTreeMap::new(), plans: BTreeMap::new() }
    }

    /// Says how a pool that the program makes is configured.
    ///
    /// # Errors
    /// When that is said already.
    pub fn add_pool(&mut self, pool: PoolId, config: PoolConfig) -> Result<(), PlanContradiction> {
        if self.pool_config(pool).is_some() {
            return Err(PlanContradiction::PoolTwice { pool });
        }
        self.pools.insert(pool, config);
        Ok(())
    }

    /// Adds a plan for a heap of a pool that is configured.
    ///
    /// # Errors
    /// When the pool is not configured, its streams share and the plan's do not or the other way round, or the heap has a plan for
    /// this key.
    pub fn add_plan(&mut self, pool: PoolId, plan: Plan) -> Result<(), PlanContradiction> {
        let config = self.pool_config(pool).ok_or(PlanContradiction::UnknownPool { pool })?;
        let (stream, key) = (plan.stream(), plan.key());
        if stream.is_none() != (config.streams() == StreamPolicy::Shared) {
            return Err(PlanError::Streams { pool, stream }.into());
        }
        if self.plans.contains_key(&(pool, stream, key)) {
            return Err(PlanContradiction::PlanTwice { pool, stream, key });
        }
        self.plans.insert((pool, stream, key), plan);
        Ok(())
    }

    /// The allocator's configuration, that of the default pool included.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How a pool is configured.
    pub fn pool_config(&self, pool: PoolId) -> Option<&PoolConfig> {
        if pool == PoolId::DEFAULT { Some(self.config.default_pool()) } else { self.pools.get(&pool) }
    }

    /// How the pools other than the default one are configured, by id.
    pub fn pools(&self) -> impl Iterator<Item = (PoolId, &PoolConfig)> {
        self.pools.iter().map(|(pool, config)| (*pool, config))
    }

    /// The plans, by pool, heap and key: the order in which they are adopted.
    pub fn plans(&self) -> impl Iterator<Item = (PoolId, &Plan)> {
        self.plans.iter().map(|((pool, ..), plan)| (*pool, plan))
    }

    /// The plans of one pool, in the same order.
    pub fn plans_of(&self, pool: PoolId) -> impl Iterator<Item = &Plan> {
        self.plans.range((pool, None, 0)..).take_while(move |((of, ..), _)| *of == pool).map(|(_, plan)| plan)
    }
}
