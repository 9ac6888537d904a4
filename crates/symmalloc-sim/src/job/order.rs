//! The partial order of a program that several threads run, which determines the ops that may be reordered.
//!
//! A program is a list of steps, each of which belongs to a thread. Threads run at their own pace, so a rank may run
//! the steps in any order that keeps *dependent* steps in list order. Rule D8 requires that every such order gives the
//! same placements and the same digests. A simulated rank picks one of these orders at random.
//!
//! Two steps are dependent if they touch a common resource:
//!
//! | resource | touched by | reason |
//! |---|---|---|
//! | a thread | each of its steps | a thread runs its steps in sequence |
//! | a heap: a pool, and the streams that share a heap there | allocate, reserve, free, record use; trim of its pool or of all; creation and destruction of its pool; beginning and end of a step of its pool | a decision depends on the ops of its heap (D1) |
//! | the limit of a pool, if it has one | allocate and reserve in the pool; trim and destruction; beginning and end of a step; free, if a threshold releases memory | the heaps of the pool share the bytes |
//! | the limit over all pools, if there is one | the same, in every pool | all heaps share the bytes |
//! | a pool that reclaims as a whole, if a limit can trigger it | every step in the pool | an allocation that reaches the limit takes free memory from any of its heaps |
//! | the list of pools | creation | ids are dense |
//! | the list of streams | registration; a step that refers to a stream follows its registration | ids are dense, and a group is named before streams join it |
//!
//! A trim also touches the heaps of streams and pools that do not exist yet. If they were created before the trim, the
//! trim would include them.
//!
//! **Stream clocks** are deliberately absent from the table. Waits, synchronizations and uses by other streams
//! determine what a stream waits for on the device, but never which memory an allocation gets. Steps of different
//! threads that share only a stream may therefore be reordered. This must affect neither placements nor digests nor the
//! race detector.

use crate::job::steps::{JobStep, PoolPolicies};
use std::collections::BTreeMap;
use symmalloc_core::{AllocationId, Op, PoolId, StreamId};

/// The heap of each allocation, which its frees and uses touch.
pub(crate) type HeapsByAllocation = BTreeMap<AllocationId, (PoolId, StreamId)>;

/// Something that steps touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Resource {
    Thread(u8),
    LimitOverAll,
    ListOfPools,
    ListOfStreams,
    /// The heap of a pool, identified by its first stream. `None` stands for what all heaps of the pool share: its limit, or all of its
    /// memory.
    Part(PoolId, Option<StreamId>),
    /// All parts of a pool, including those that do not exist yet.
    Pool(PoolId),
    /// All pools, including those that do not exist yet.
    AllPools,
}

impl Resource {
    /// Returns `true` if steps that touch these resources are dependent.
    #[cfg(test)]
    fn overlaps(self, other: Self) -> bool {
        use Resource::{AllPools, Part, Pool};
        match (self, other) {
            (Part(a, _), Pool(b)) | (Pool(a), Part(b, _)) => a == b,
            (AllPools, Part(..) | Pool(_)) | (Part(..) | Pool(_), AllPools) => true,
            _ => self == other,
        }
    }
}

/// The resources that the steps of a program touch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resources<'a>(pub(crate) &'a PoolPolicies);

impl Resources<'_> {
    /// Adds the resources, other than the heap, of a step that may obtain or release device memory.
    fn touch_memory(self, pool: PoolId, touched: &mut Vec<Resource>) {
        if self.0.of(pool).limit_bytes().is_some() {
            touched.push(Resource::Part(pool, None));
        }
        touched.extend(self.limit_over_all());
    }

    /// Returns the resource that all heaps share, if there is a limit over all pools.
    fn limit_over_all(self) -> Option<Resource> {
        self.0.limit_bytes().map(|_| Resource::LimitOverAll)
    }

    /// Adds the resources of a step in one heap.
    fn touch_heap(self, pool: PoolId, stream: StreamId, touched: &mut Vec<Resource>) {
        let first = self.0.heap(pool, stream).group.first().unwrap_or_default();
        touched.push(Resource::Part(pool, Some(first)));
        if self.0.reclaims_as_a_whole(pool) {
            touched.push(Resource::Part(pool, None));
        }
    }

    /// Replaces the contents of `touched` with all resources of a step.
    pub(crate) fn touched(self, step: &JobStep, homes: &HeapsByAllocation, touched: &mut Vec<Resource>) {
        touched.clear();
        touched.push(Resource::Thread(step.thread));
        match step.op {
            Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => {
                self.touch_heap(pool, stream, touched);
                self.touch_memory(pool, touched);
            }
            Op::Free { id } | Op::RecordUse { id, .. } => {
                let (pool, stream) = homes[&id];
                self.touch_heap(pool, stream, touched);
                let is_free = matches!(step.op, Op::Free { .. });
                if is_free && self.0.of(pool).release_threshold_bytes().is_some() {
                    self.touch_memory(pool, touched);
                }
            }
            Op::Trim { pool: Some(pool) }
            | Op::DestroyPool { pool }
            | Op::ResetPool { pool }
            | Op::BeginStep { pool, .. }
            | Op::EndStep { pool }
            | Op::Sleep { pool, .. }
            | Op::Wake { pool } => {
                touched.push(Resource::Pool(pool));
                touched.extend(self.limit_over_all());
            }
            Op::Trim { pool: None } => {
                touched.push(Resource::AllPools);
                touched.extend(self.limit_over_all());
            }
            Op::CreatePool { pool, .. } => touched.extend([Resource::ListOfPools, Resource::Pool(pool)]),
            Op::RegisterStream { .. } => touched.push(Resource::ListOfStreams),
            _ => {}
        }
        touched.sort_unstable();
        touched.dedup();
    }
}

/// The last steps that touched each resource. A step that touches a whole pool replaces the entries of the pool's parts, so that the cost
/// of a step does not depend on the number of pools and streams.
#[derive(Debug, Default)]
struct LastSteps {
    others: BTreeMap<Resource, u32>,
    /// The last step of each part, since the last step that touched its whole pool.
    parts: BTreeMap<(PoolId, Option<StreamId>), u32>,
    /// The last step of each whole pool, since the last step that touched all pools.
    pools: BTreeMap<PoolId, u32>,
    all: Option<u32>,
}

impl LastSteps {
    /// Records that `step` touches a resource. Adds the steps that it must directly follow to `earlier`.
    fn touch(&mut self, resource: Resource, step: u32, earlier: &mut Vec<u32>) {
        match resource {
            Resource::Part(pool, part) => {
                let before = self.parts.insert((pool, part), step);
                earlier.extend(before.or_else(|| self.pools.get(&pool).copied()).or(self.all));
            }
            Resource::Pool(pool) => {
                let before = self.pools.insert(pool, step).or(self.all);
                let known = earlier.len();
                let of_pool = (pool, None)..=(pool, Some(StreamId(u16::MAX)));
                let parts: Vec<_> = self.parts.range(of_pool).map(|(part, last)| (*part, *last)).collect();
                for (part, last) in parts {
                    self.parts.remove(&part);
                    earlier.push(last);
                }
                if earlier.len() == known {
                    earlier.extend(before);
                }
            }
            Resource::AllPools => {
                let before = self.all.replace(step);
                let known = earlier.len();
                earlier.extend(std::mem::take(&mut self.parts).into_values());
                earlier.extend(std::mem::take(&mut self.pools).into_values());
                if earlier.len() == known {
                    earlier.extend(before);
                }
            }
            other => earlier.extend(self.others.insert(other, step)),
        }
    }
}

/// Returns the streams that an op refers to.
fn streams_of(op: &Op) -> [Option<StreamId>; 2] {
    match *op {
        Op::Allocate { stream, .. }
        | Op::Reserve { stream, .. }
        | Op::RecordUse { stream, .. }
        | Op::Synchronize { stream } => [Some(stream), None],
        Op::Wait { stream, on } => [Some(stream), Some(on)],
        _ => [None, None],
    }
}

/// The order of the steps between two syncs: for each step, the number of its direct predecessors, and its successors.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobOrder {
    /// Number of direct predecessors, by step.
    pub(crate) waits_for: Vec<u32>,
    /// `next[first_next[i]..first_next[i + 1]]` are the successors of step i.
    first_next: Vec<u32>,
    next: Vec<u32>,
}

impl JobOrder {
    /// Computes the order of these steps.
    pub(crate) fn new(steps: &[JobStep], resources: Resources<'_>, homes: &HeapsByAllocation) -> Self {
        let mut last = LastSteps::default();
        let mut registered: BTreeMap<StreamId, u32> = BTreeMap::new();
        let mut edges: Vec<(u32, u32)> = Vec::new();
        let (mut touched, mut before) = (Vec::new(), Vec::new());
        for (index, step) in steps.iter().enumerate() {
            let index = index as u32;
            resources.touched(step, homes, &mut touched);
            touched.iter().for_each(|resource| last.touch(*resource, index, &mut before));
            edges.extend(before.drain(..).map(|earlier| (earlier, index)));
            let named = streams_of(&step.op).into_iter().flatten();
            edges.extend(named.filter_map(|stream| Some((*registered.get(&stream)?, index))));
            if let Op::RegisterStream { stream, .. } = step.op {
                registered.insert(stream, index);
            }
        }
        edges.sort_unstable();
        edges.dedup();
        let mut order = JobOrder { waits_for: vec![0; steps.len()], ..JobOrder::default() };
        order.first_next = vec![0; steps.len() + 1];
        for (earlier, later) in edges {
            order.waits_for[later as usize] += 1;
            order.first_next[earlier as usize + 1] += 1;
            order.next.push(later);
        }
        for index in 0..steps.len() {
            order.first_next[index + 1] += order.first_next[index];
        }
        order
    }

    /// Returns the number of steps.
    pub(crate) fn len(&self) -> usize {
        self.waits_for.len()
    }

    /// Returns the direct successors of a step.
    pub(crate) fn successors(&self, step: u32) -> &[u32] {
        let of = |index: u32| self.first_next[index as usize] as usize;
        &self.next[of(step)..of(step + 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::context::{Purpose, sequence};
    use crate::job::plan::{JobPlan, Size};
    use crate::job::schedule::{Schedule, Scheduler};
    use std::collections::BTreeSet;
    use std::num::NonZeroU32;
    use symmalloc_core::Config;

    fn plan(seed: u64) -> JobPlan {
        JobPlan::from_seed(seed, &Size { ranks: NonZeroU32::MIN, ops: 120 })
    }

    #[test]
    fn no_schedule_reorders_dependent_steps() {
        for seed in 0..60 {
            let program = plan(seed).program();
            let resources = Resources(&program.policies);
            for stretch in &program.stretches {
                let steps = &program.steps[stretch.steps.clone()];
                let touched: Vec<Vec<Resource>> = steps
                    .iter()
                    .map(|step| {
                        let mut touched = Vec::new();
                        resources.touched(step, &program.homes, &mut touched);
                        touched
                    })
                    .collect();
                for style in Schedule::ALL {
                    let mut scheduler = Scheduler::default();
                    let order = scheduler.schedule(&stretch.order, style, sequence(seed, Purpose::Schedule, 1));
                    let distinct: BTreeSet<&u32> = order.iter().collect();
                    assert_eq!(distinct.len(), steps.len());
                    for (at, &one) in order.iter().enumerate() {
                        for &other in &order[at + 1..] {
                            let (one, other) = (one as usize, other as usize);
                            let overlaps = |one: &Resource| touched[other].iter().any(|other| one.overlaps(*other));
                            let is_free = !touched[one].iter().any(overlaps);
                            assert!(one < other || is_free, "seed {seed}: {:?} {:?}", steps[one], steps[other]);
                        }
                    }
                }
            }
        }
    }

    /// Returns steps that register two streams, then a sync, then these ops, each in a separate thread.
    fn steps(ops: impl IntoIterator<Item = Op>) -> Vec<JobStep> {
        let streams = [A, B].map(Op::register);
        let ops = streams.into_iter().chain([Op::Sync]).chain(ops);
        ops.zip(0..).map(|(op, thread)| JobStep::new(op, thread)).collect()
    }

    /// Returns the number of direct predecessors of each step of the last stretch before the liveness phase.
    fn waits_for(config: &Config, steps: &[JobStep]) -> Vec<u32> {
        let program = crate::job::program::JobProgram::new(config, steps, 1000);
        program.stretches[program.liveness - 1].order.waits_for.clone()
    }

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);

    fn allocate(id: u64, stream: StreamId) -> Op {
        Op::Allocate { id: AllocationId(id), pool: PoolId::DEFAULT, stream, size_bytes: 512 }
    }

    fn two_heaps() -> [Op; 2] {
        [allocate(0, A), allocate(1, B)]
    }

    fn config(pool: &str) -> Config {
        pool.parse().expect("a configuration")
    }

    #[test]
    fn heaps_of_one_pool_are_independent() {
        let uses = [
            Op::RecordUse { id: AllocationId(0), stream: B },
            Op::Wait { stream: A, on: B },
            Op::Synchronize { stream: B },
            Op::Free { id: AllocationId(1) },
        ];
        let steps = steps(two_heaps().into_iter().chain(uses));
        assert_eq!(waits_for(&Config::default(), &steps), [0, 0, 1, 0, 0, 1]);
    }

    #[test]
    fn shared_resources_make_heaps_dependent() {
        for shared in ["streams:shared", "limit_mb:64", "total_limit_mb:64", "limit_mb:64,reclaim:pool"] {
            assert_eq!(waits_for(&config(shared), &steps(two_heaps())), [0, 1], "{shared}");
        }
        assert_eq!(waits_for(&config("reclaim:pool"), &steps(two_heaps())), [0, 0], "no limit triggers reclaiming");
    }

    #[test]
    fn streams_of_a_group_share_a_heap_only_in_pools_with_groups() {
        const C: StreamId = StreamId(2);
        let in_a_group = |pool| {
            let mut steps = steps([allocate(0, A), allocate(1, B), allocate(2, C)]);
            steps.insert(2, JobStep::new(Op::RegisterStream { stream: C, group: A }, 0));
            waits_for(&config(pool), &steps)
        };
        assert_eq!(in_a_group("streams:grouped"), [0, 0, 1]);
        assert_eq!(in_a_group("streams:separate"), [0, 0, 0]);
        assert_eq!(in_a_group("streams:shared"), [0, 1, 1]);
    }

    #[test]
    fn a_free_depends_on_other_heaps_only_if_memory_may_move_between_them() {
        let free = |config: &Config| {
            waits_for(config, &steps([allocate(0, A), Op::Sync, allocate(1, B), Op::Free { id: AllocationId(0) }]))
        };
        assert_eq!(free(&config("limit_mb:64")), [0, 0]);
        assert_eq!(free(&config("limit_mb:64,release_threshold_mb:8")), [0, 1]);
        assert_eq!(free(&config("limit_mb:64,reclaim:pool")), [0, 1]);
        assert_eq!(free(&config("total_limit_mb:64,reclaim:pool")), [0, 1]);
        assert_eq!(free(&config("total_limit_mb:64,reclaim:pool,symmetric:true")), [0, 0]);
    }

    #[test]
    fn a_trim_of_all_pools_is_ordered_with_every_step() {
        let steps = steps([allocate(0, A), allocate(1, B), Op::Trim { pool: None }, allocate(2, A), allocate(3, B)]);
        assert_eq!(waits_for(&Config::default(), &steps), [0, 0, 2, 1, 1]);
    }

    /// Regression test: a table had an entry for every pool and stream.
    #[test]
    fn the_order_of_many_pools_and_streams_takes_little_memory() {
        const MANY: u16 = 60_000;
        let streams = (0..MANY).map(|stream| Op::register(StreamId(stream)));
        let pool = |pool: u16| Op::CreatePool { pool: PoolId(pool.into()), config: Box::default() };
        let trims = vec![Op::Trim { pool: None }; 3];
        let steps: Vec<_> = streams.chain((1..MANY).map(pool)).chain(trims).map(|op| JobStep::new(op, 0)).collect();
        let waits = waits_for(&Config::default(), &steps);
        assert_eq!(waits[waits.len() - 1], 1, "the last trim follows the one before");
    }

    #[test]
    fn the_step_boundaries_of_a_pool_are_ordered_with_the_ops_of_its_heaps() {
        let [begin, end] = [Op::BeginStep { pool: PoolId::DEFAULT, key: 0 }, Op::EndStep { pool: PoolId::DEFAULT }];
        let steps = steps([allocate(0, A), begin, allocate(1, A), allocate(2, B), end]);
        assert_eq!(waits_for(&Config::default(), &steps), [0, 1, 1, 1, 2]);
    }
}
