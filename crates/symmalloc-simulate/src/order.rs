//! Which ops may change places: the partial order of a program that several threads carry out.
//!
//! A program is a list of steps, each of one thread. Threads run at their own pace, so a rank may carry steps out in any
//! order in which *dependent* steps stay as they are in the list. Rule D8 says that every such order gives the same
//! placements and the same digests; a simulated rank takes one at random.
//!
//! Two steps are dependent when they touch a common one of these:
//!
//! | what | touched by | because |
//! |---|---|---|
//! | a thread | each of its steps | a thread does one thing after the other |
//! | a heap: (pool, stream), or the pool where streams share | allocate, reserve, free, record use; trim of its pool or of all; creation and destruction of its pool | a decision depends on the ops of its heap (D1) |
//! | the limit of a pool, if it has one | allocate and reserve in the pool; trim and destruction; free, where a threshold gives memory back | the heaps of the pool share the bytes |
//! | the limit over all pools, if there is one | the same, in every pool | all heaps share the bytes |
//! | a pool that reclaims as a whole, if a limit can make it | every step in the pool | an allocation that meets the limit takes free memory from any of its heaps |
//! | the list of pools | creation | ids are dense |
//! | the list of streams | registration; a step that names a stream comes after its registration | ids are dense |
//!
//! A trim touches the heaps of streams and pools that do not exist yet, too: if they came before it, it would trim them.
//!
//! Not in the table, on purpose: **stream clocks**. Waits, synchronises and uses by other streams decide what a stream
//! waits for on the device and never who gets which block, so steps of different threads that share nothing but a
//! stream change places freely, and neither a placement nor a digest may notice. Nor may the race detector.

use crate::program::{PoolPolicies, Step};
use std::collections::BTreeMap;
use symmalloc_core::config::{PoolConfig, Reclaim, StreamPolicy};
use symmalloc_core::{AllocationId, Op, PoolId, StreamId};

/// Where each allocation lies: which heap its frees and uses touch.
pub(crate) type Homes = BTreeMap<AllocationId, (PoolId, StreamId)>;

/// Names of what steps touch, as indices into one table.
#[derive(Clone, Debug)]
pub(crate) struct Resources<'a> {
    policies: &'a PoolPolicies,
    streams: usize,
    threads: usize,
}

impl<'a> Resources<'a> {
    pub(crate) fn new(policies: &'a PoolPolicies, streams: usize, threads: usize) -> Self {
        Resources { policies, streams: streams.max(1), threads }
    }

    fn count(&self) -> usize {
        self.limit_over_all() + 3
    }

    /// The heap that serves a stream in a pool.
    fn heap(&self, pool: PoolId, stream: StreamId) -> usize {
        let stream = match self.policies.of(pool).streams() {
            StreamPolicy::Shared => 0,
            _ => stream.index(),
        };
        self.threads + pool.index() * self.streams + stream
    }

    fn heaps(&self, pool: PoolId) -> impl Iterator<Item = usize> {
        let first = self.threads + pool.index() * self.streams;
        first..first + self.streams
    }

    /// The bytes, or all of the memory, that the heaps of a pool share.
    fn shared_by_heaps(&self, pool: PoolId) -> usize {
        self.threads + self.policies.count() * self.streams + pool.index()
    }

    fn limit_over_all(&self) -> usize {
        self.shared_by_heaps(PoolId(self.policies.count() as u32))
    }

    fn list_of_pools(&self) -> usize {
        self.limit_over_all() + 1
    }

    fn list_of_streams(&self) -> usize {
        self.limit_over_all() + 2
    }

    /// Adds what a step that may take or give back device memory touches besides its heap.
    fn touch_memory(&self, pool: PoolId, touched: &mut Vec<usize>) {
        if self.policies.of(pool).limit_bytes().is_some() {
            touched.push(self.shared_by_heaps(pool));
        }
        if self.policies.limit_bytes().is_some() {
            touched.push(self.limit_over_all());
        }
    }

    /// Adds what a step in one heap touches.
    fn touch_heap(&self, pool: PoolId, stream: StreamId, touched: &mut Vec<usize>) {
        touched.push(self.heap(pool, stream));
        if self.policies.reclaims_as_a_whole(pool) {
            touched.push(self.shared_by_heaps(pool));
        }
    }

    fn touch_pool(&self, pool: PoolId, touched: &mut Vec<usize>) {
        touched.extend(self.heaps(pool));
        if self.policies.reclaims_as_a_whole(pool) {
            touched.push(self.shared_by_heaps(pool));
        }
        self.touch_memory(pool, touched);
    }

    /// Everything that a step touches, in `touched`, which is emptied first.
    pub(crate) fn touched(&self, step: &Step, homes: &Homes, touched: &mut Vec<usize>) {
        touched.clear();
        touched.push(usize::from(step.thread));
        match step.op {
            Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => {
                self.touch_heap(pool, stream, touched);
                self.touch_memory(pool, touched);
            }
            Op::Free { id } | Op::RecordUse { id, .. } => {
                let (pool, stream) = homes[&id];
                self.touch_heap(pool, stream, touched);
                let is_free = matches!(step.op, Op::Free { .. });
                if is_free && self.policies.of(pool).release_threshold_bytes().is_some() {
                    self.touch_memory(pool, touched);
                }
            }
            Op::Trim { pool: Some(pool) } | Op::DestroyPool { pool } => self.touch_pool(pool, touched),
            Op::Trim { pool: None } => self.policies.pools().for_each(|pool| self.touch_pool(pool, touched)),
            Op::CreatePool { pool, .. } => {
                touched.push(self.list_of_pools());
                touched.extend(self.heaps(pool));
            }
            Op::RegisterStream { .. } => touched.push(self.list_of_streams()),
            _ => {}
        }
        touched.sort_unstable();
        touched.dedup();
    }
}

/// The policies that decide what is shared.
impl PoolPolicies {
    /// Whether an allocation that meets a limit may take free memory from every heap of the pool.
    pub(crate) fn reclaims_as_a_whole(&self, pool: PoolId) -> bool {
        let config: &PoolConfig = self.of(pool);
        // A symmetric pool gives nothing back for the limit over all pools.
        let can_meet_a_limit = config.limit_bytes().is_some() || self.limit_bytes().is_some() && !config.symmetric();
        config.reclaim() == Reclaim::Pool && can_meet_a_limit
    }
}

/// The streams that a step names.
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

/// The order of the steps between two syncs: for each, how many must come before it, and which ones it lets go.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    /// By step: the number of steps that must come first, transitive ones not counted.
    pub(crate) waits_for: Vec<u32>,
    /// `next[first_next[i]..first_next[i + 1]]` are the steps that step i lets go.
    first_next: Vec<u32>,
    next: Vec<u32>,
}

impl Order {
    /// The order of these steps.
    pub(crate) fn new(steps: &[Step], resources: &Resources<'_>, homes: &Homes) -> Self {
        let mut last: Vec<Option<u32>> = vec![None; resources.count()];
        let mut registered: BTreeMap<StreamId, u32> = BTreeMap::new();
        let mut edges: Vec<(u32, u32)> = Vec::new();
        let mut touched = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            let index = index as u32;
            resources.touched(step, homes, &mut touched);
            let from_resources = touched.iter().filter_map(|resource| last[*resource].replace(index));
            edges.extend(from_resources.map(|earlier| (earlier, index)));
            let named = streams_of(&step.op).into_iter().flatten();
            edges.extend(named.filter_map(|stream| Some((*registered.get(&stream)?, index))));
            if let Op::RegisterStream { stream } = step.op {
                registered.insert(stream, index);
            }
        }
        edges.sort_unstable();
        edges.dedup();
        let mut order = Order { waits_for: vec![0; steps.len()], ..Order::default() };
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

    /// Number of steps.
    pub(crate) fn len(&self) -> usize {
        self.waits_for.len()
    }

    /// The steps that a step lets go.
    pub(crate) fn let_go(&self, step: u32) -> &[u32] {
        let of = |index: u32| self.first_next[index as usize] as usize;
        &self.next[of(step)..of(step + 1)]
    }
}
