//! The steps of a program, and the pools that they create.

use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig, Reclaim};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::HeapId;
use symmalloc_core::{Op, PoolId, StreamId};

/// A step of a program: an op, and the host thread that runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobStep {
    /// The op.
    pub op: Op,
    /// The thread, from 0.
    pub thread: u8,
    /// The program's name for the allocation; set for allocate ops only.
    pub name: Option<Arc<str>>,
}

impl JobStep {
    /// Creates a step of a thread, without a name.
    pub fn new(op: Op, thread: u8) -> Self {
        JobStep { op, thread, name: None }
    }
}

/// The policies of all pools that the program creates, by pool id; the groups of its streams; and the limit over all
/// pools.
#[derive(Clone, Debug)]
pub(crate) struct PoolPolicies {
    pools: Vec<PoolConfig>,
    groups: Groups,
    limit_bytes: Option<u64>,
}

impl PoolPolicies {
    pub(crate) fn new(config: &Config, steps: &[JobStep]) -> Self {
        let created = steps.iter().filter_map(|step| match &step.op {
            Op::CreatePool { config, .. } => Some((**config).clone()),
            _ => None,
        });
        let pools = std::iter::once(config.default_pool().clone()).chain(created).collect();
        let mut groups = Groups::default();
        steps.iter().for_each(|step| step.op.note_group(&mut groups));
        PoolPolicies { pools, groups, limit_bytes: config.total_limit_bytes() }
    }

    /// Returns the heap that serves a stream in a pool.
    pub(crate) fn heap(&self, pool: PoolId, stream: StreamId) -> HeapId {
        HeapId { pool, group: self.of(pool).streams().group_of(stream, &self.groups) }
    }

    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    pub(crate) fn of(&self, pool: PoolId) -> &PoolConfig {
        &self.pools[pool.index()]
    }

    pub(crate) fn count(&self) -> usize {
        self.pools.len()
    }

    pub(crate) fn pools(&self) -> impl Iterator<Item = PoolId> + use<> {
        (0..self.pools.len() as u32).map(PoolId)
    }

    /// Returns the pool with this ordinal among the symmetric pools. The agreement identifies pools by this ordinal.
    pub(crate) fn symmetric(&self, ordinal: u32) -> PoolId {
        let mut symmetric = self.pools().filter(|pool| self.of(*pool).symmetric());
        symmetric.nth(ordinal as usize).expect("all symmetric pools of a rank belong to the program")
    }

    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    /// Returns `true` if an allocation that reaches a limit may take free memory from every heap of the pool.
    pub(crate) fn reclaims_as_a_whole(&self, pool: PoolId) -> bool {
        let config = self.of(pool);
        // A symmetric pool releases no memory for the limit over all pools.
        let can_meet_a_limit = config.limit_bytes().is_some() || self.limit_bytes().is_some() && !config.symmetric();
        config.reclaim() == Reclaim::Pool && can_meet_a_limit
    }
}
