//! Replay: executes recorded ops on an allocator.
//!
//! A [`Program`] is a list of ops whose allocations are renumbered 0, 1, 2, ... in order of creation, so that many ranks can share one
//! program, and each rank keeps a dense table of handles. A [`Replay`] is the run of a program on one rank. Tests, fuzz inputs, benchmarks
//! and recorded jobs all run through this module.
//!
//! A run may follow [plans](crate::plan), in pools that are configured as the plans require. If the program contains no `begin_step` and
//! `end_step` ops, each [pass](Replay::begin_pass) of the program is one step of every pool. A pool cannot sleep within a step, so in a
//! pool that sleeps, each pass is several steps, whose keys are 0, 1, 2, ...:
//!
//! ```text
//! pass   ├──── key 0 ────┤ sleep   wake ├──── key 1 ────┤
//! ```

mod error;

pub use error::{ReplayError, StepError};

use crate::plan::PlanFile;
use std::collections::BTreeMap;
use std::sync::Arc;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::errors::{FreeError, StreamError, UnknownError};
use symmalloc_core::generic;
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{AllocationId, ObserverId, PoolId, StreamId};
use symmalloc_core::lock::Lock;
use symmalloc_core::op::{Op, Pending, Record};
use symmalloc_core::plans::PlanError;
use symmalloc_core::restore::{RestoreError, RevivedPlace};
use symmalloc_core::sleep::{Phase, SleepCause, SleepError};
use symmalloc_core::work::Allowance;
use symmalloc_core::{Allocation, Handle};

/// The ops of a program, with dense allocation ids.
#[derive(Clone, Debug, Default)]
pub struct Program {
    ops: Vec<Op>,
    allocation_count: usize,
    /// Names of the allocations that have one, ascending by id.
    names: Vec<(AllocationId, Arc<str>)>,
    /// Names of the refused requests that have one, ascending by op index.
    refused_names: Vec<(usize, Arc<str>)>,
    /// Frees that the recorded allocator completed later, ascending by op index.
    pending: Vec<(usize, Pending)>,
    /// Placements of revived allocations, ascending by id.
    revived: Vec<(AllocationId, RevivedPlace)>,
}

impl Program {
    /// Creates a program from recorded ops, and renumbers their allocations.
    ///
    /// # Errors
    /// Returns an error if an op refers to an allocation that does not exist yet, or creates an allocation a second
    /// time.
    pub fn new<'a>(records: impl IntoIterator<Item = &'a Record>) -> Result<Self, ReplayError> {
        let mut program = Program::default();
        let mut dense = DenseIds::default();
        for (index, record) in records.into_iter().enumerate() {
            let mut op = record.op.clone();
            match &mut op {
                Op::Allocate { id, .. } => {
                    let next =
                        dense.add(*id).ok_or(ReplayError { op: index, error: StepError::MadeTwice { id: *id } })?;
                    *id = next;
                    program.allocation_count += 1;
                    program.names.extend(record.name.clone().map(|name| (next, name)));
                    if let (Some(placement), Some(block_bytes)) = (record.placement, record.revived_bytes) {
                        program.revived.push((next, RevivedPlace { placement, block_bytes: block_bytes.get() }));
                    }
                }
                Op::Free { id } | Op::RecordUse { id, .. } => {
                    let known = dense.of(*id);
                    *id = known.ok_or(ReplayError { op: index, error: StepError::NotLive { id: *id } })?;
                }
                Op::Refuse { .. } => program.refused_names.extend(record.name.clone().map(|name| (index, name))),
                _ => {}
            }
            program.pending.extend(record.pending.map(|pending| (index, pending)));
            program.ops.push(op);
        }
        Ok(program)
    }

    /// Returns the ops. Their allocations are numbered in order of creation.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Returns the program, with the settings of one of the pools that it creates replaced by `settings`.
    #[must_use]
    pub fn with_pool_config(mut self, pool: PoolId, settings: &PoolConfig) -> Self {
        for op in &mut self.ops {
            if let Op::CreatePool { pool: of, config } = op
                && *of == pool
            {
                **config = settings.clone();
            }
        }
        self
    }

    /// Returns the number of allocations that the program makes.
    pub fn allocation_count(&self) -> usize {
        self.allocation_count
    }

    /// Returns the number of streams that the program registers.
    pub fn stream_count(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::RegisterStream { .. })).count()
    }

    /// Returns the groups of the streams that the program registers.
    pub fn groups(&self) -> Groups {
        let mut groups = Groups::default();
        self.ops.iter().for_each(|op| op.note_group(&mut groups));
        groups
    }

    /// Returns `true` if the program marks where its steps begin.
    pub fn has_steps(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::BeginStep { .. }))
    }

    /// Returns the name that the program gave an allocation, if any.
    #[inline]
    pub fn name(&self, id: AllocationId) -> Option<&str> {
        self.shared_name(id).map(|name| &**name)
    }

    /// Returns the name of an allocation as a shared string: all allocations with the same name use one `Arc`.
    #[inline]
    pub fn shared_name(&self, id: AllocationId) -> Option<&Arc<str>> {
        // In most programs, either all allocations have names, or none.
        let at = match self.names.get(id.index()) {
            Some((of, _)) if *of == id => id.index(),
            _ => self.names.binary_search_by_key(&id, |(id, _)| *id).ok()?,
        };
        Some(&self.names[at].1)
    }

    /// Returns the name of the refused request, given the index of its [`Op::Refuse`].
    pub fn refused_name(&self, op: usize) -> Option<&str> {
        let at = self.refused_names.binary_search_by_key(&op, |(op, _)| *op).ok()?;
        Some(&self.refused_names[at].1)
    }

    /// Returns the placement and block size with which the program revived an allocation, if it did.
    #[inline]
    pub fn revived(&self, id: AllocationId) -> Option<RevivedPlace> {
        let at = self.revived.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(self.revived[at].1)
    }

    /// Returns `true` if the recording states when frees that waited for another stream were completed.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Returns the program without the recorded durations of pending frees.
    #[must_use]
    pub fn without_pending(mut self) -> Self {
        self.pending.clear();
        self
    }

    /// Returns the time between the free at this op index and its completion in the recorded allocator, if the
    /// recording states it. A replay always frees immediately.
    pub fn pending(&self, op: usize) -> Option<Pending> {
        let at = self.pending.binary_search_by_key(&op, |(op, _)| *op).ok()?;
        Some(self.pending[at].1)
    }
}

/// Maps recorded allocation ids to dense numbers. Most recordings count ids upward, so their ids need no tree.
#[derive(Debug, Default)]
struct DenseIds {
    /// Ids that were higher than all earlier ones, in ascending order, with their numbers.
    ascending: Vec<(AllocationId, AllocationId)>,
    /// All other ids.
    others: BTreeMap<AllocationId, AllocationId>,
}

impl DenseIds {
    /// Numbers the next allocation. Returns `None` if the id already has a number.
    fn add(&mut self, id: AllocationId) -> Option<AllocationId> {
        let next = AllocationId((self.ascending.len() + self.others.len()) as u64);
        if self.ascending.last().is_none_or(|(last, _)| *last < id) {
            // Such an id is new, because every id in `others` is lower than some id in `ascending`.
            self.ascending.push((id, next));
            return Some(next);
        }
        if self.of(id).is_some() {
            return None;
        }
        self.others.insert(id, next);
        Some(next)
    }

    /// Returns the number of an allocation.
    fn of(&self, id: AllocationId) -> Option<AllocationId> {
        // If the ids have no gaps, their positions follow from the first one.
        let (first, _) = self.ascending.first()?;
        let at = usize::try_from(id.0.wrapping_sub(first.0)).ok();
        if let Some((of, number)) = at.and_then(|at| self.ascending.get(at))
            && *of == id
        {
            return Some(*number);
        }
        match self.ascending.binary_search_by_key(&id, |(of, _)| *of) {
            Ok(at) => Some(self.ascending[at].1),
            Err(_) => self.others.get(&id).copied(),
        }
    }
}

/// The run of a [`Program`] on one rank.
#[derive(Debug)]
pub struct Replay<'a, B: Backend, L: Lock> {
    allocator: &'a generic::Allocator<B, L>,
    program: &'a Program,
    /// Handles of the live allocations, by dense allocation id.
    live: Vec<Option<Handle>>,
    /// The allocator's pool for each pool of the program; `None` once the pool is destroyed.
    pools: Vec<Option<PoolId>>,
    /// The allocator's observer for each observer of the program; `None` once the observer is forgotten.
    observers: Vec<Option<ObserverId>>,
    /// The allocator's pools that have an open step.
    open_steps: Vec<PoolId>,
    /// Number of sleeps in this pass, by the allocator's pool.
    sleeps: BTreeMap<PoolId, u64>,
    plans: Option<Following<'a>>,
    /// Number of allocations placed by a plan, in completed steps.
    planned: u64,
    allowance: Allowance,
}

/// The plans that a run follows.
#[derive(Clone, Copy, Debug)]
struct Following<'a> {
    file: &'a PlanFile,
    /// `true` if each pass is a step of every pool, because the program does not mark steps.
    passes_are_steps: bool,
}

impl<'a, B: Backend, L: Lock> Replay<'a, B, L> {
    /// Creates a run. No other run may use the allocator at the same time.
    pub fn new(allocator: &'a generic::Allocator<B, L>, program: &'a Program) -> Self {
        let live = vec![None; program.allocation_count()];
        Replay {
            allocator,
            program,
            live,
            pools: vec![Some(PoolId::DEFAULT)],
            observers: Vec::new(),
            open_steps: Vec::new(),
            sleeps: BTreeMap::new(),
            plans: None,
            planned: 0,
            allowance: Allowance::default(),
        }
    }

    /// Creates a run that follows plans. The allocator must have their configuration. Registers all streams of the program, and adopts the
    /// plans of the default pool. The plans of each further pool are adopted when the program creates the pool.
    ///
    /// # Errors
    /// Returns an error if a plan cannot be adopted, or there are too many streams.
    pub fn following(
        allocator: &'a generic::Allocator<B, L>,
        program: &'a Program,
        file: &'a PlanFile,
    ) -> Result<Self, StepError> {
        let mut replay = Replay::new(allocator, program);
        replay.plans = Some(Following { file, passes_are_steps: !program.has_steps() });
        let groups = program.groups();
        for stream in (0..program.stream_count()).skip(allocator.stream_count() as usize) {
            replay.register(StreamId(stream as u16), groups.first_of(StreamId(stream as u16)))?;
        }
        replay.adopt_plans(PoolId::DEFAULT, PoolId::DEFAULT)?;
        Ok(replay)
    }

    /// Replaces the limit on the work that the program may cause; see [`StepError::TooMuchWork`].
    #[must_use]
    pub fn with_allowance(mut self, allowance: Allowance) -> Self {
        self.allowance = allowance;
        self
    }

    /// Starts the next pass of the program. Call it before every pass, including the first. It wakes the pools that the
    /// previous pass left asleep. If a limit keeps a pool from waking, it first releases the free memory of all pools.
    ///
    /// # Errors
    /// Returns an error if a step of the default pool is open, or a pool cannot be woken.
    pub fn begin_pass(&mut self) -> Result<(), StepError> {
        for pool in std::mem::take(&mut self.sleeps).into_keys() {
            // A destroyed pool no longer sleeps.
            if matches!(self.allocator.phase(pool), Ok(Phase::Asleep | Phase::Held)) {
                self.wake_for_pass(pool)?;
            }
        }
        self.begin_step_of_pass(PoolId::DEFAULT)
    }

    /// Returns the number of allocations placed by a plan, in completed steps.
    pub fn planned_allocations(&self) -> u64 {
        self.planned
    }

    /// Returns the allocator's pool for a pool of the program; `None` while the pool does not exist.
    pub fn pool_of(&self, pool: PoolId) -> Option<PoolId> {
        self.pools.get(pool.index()).copied().flatten()
    }

    /// Adopts the plans of a pool of the program.
    fn adopt_plans(&self, planned: PoolId, pool: PoolId) -> Result<(), PlanError> {
        let Some(Following { file, .. }) = self.plans else { return Ok(()) };
        file.plans_of(planned).try_for_each(|plan| self.allocator.adopt_plan(pool, plan.clone()))
    }

    /// Registers the next stream in a group.
    fn register(&self, stream: StreamId, group: StreamId) -> Result<(), StreamError> {
        let is_new = stream == group;
        if is_new { self.allocator.register_stream() } else { self.allocator.register_stream_in(group) }.map(drop)
    }

    fn wake_for_pass(&self, pool: PoolId) -> Result<(), StepError> {
        match self.allocator.wake(pool) {
            Err(SleepError { cause: SleepCause::Memory { .. }, .. }) => {
                self.allocator.trim_all()?;
                self.allocator.wake(pool)?;
            }
            woken => drop(woken?),
        }
        Ok(())
    }

    fn begin_step_of_pass(&mut self, pool: PoolId) -> Result<(), StepError> {
        if self.plans.is_some_and(|plans| plans.passes_are_steps) && !self.open_steps.contains(&pool) {
            let key = self.sleeps.get(&pool).copied().unwrap_or(0);
            self.begin_step(pool, key)?;
        }
        Ok(())
    }

    fn end_step_of_pass(&mut self, pool: PoolId) -> Result<(), StepError> {
        if self.plans.is_some_and(|plans| plans.passes_are_steps) && self.open_steps.contains(&pool) {
            self.end_step(pool)?;
        }
        Ok(())
    }

    fn begin_step(&mut self, pool: PoolId, key: u64) -> Result<(), StepError> {
        self.allocator.begin_step(pool, key)?;
        self.open_steps.push(pool);
        Ok(())
    }

    fn end_step(&mut self, pool: PoolId) -> Result<(), StepError> {
        self.planned += self.allocator.end_step(pool)?.planned;
        self.open_steps.retain(|open| *open != pool);
        Ok(())
    }

    /// Executes one op of the program. Returns the allocation, if the op made one.
    ///
    /// Reuses streams, pools and observers that an earlier pass of the program created.
    ///
    /// # Errors
    /// Returns an error if the allocator rejects the op, or the op refers to an allocation that is not live. The run can then continue.
    /// Also returns an error if the program has caused too much work so far ([`StepError::TooMuchWork`]); in this case, the op was
    /// executed.
    #[inline(always)]
    pub fn step(&mut self, op: &Op) -> Result<Option<Allocation>, StepError> {
        let mut allowance = self.allowance;
        let done = allowance.charge(|| self.execute(op));
        self.allowance = allowance;
        done?
    }

    #[inline(always)]
    fn execute(&mut self, op: &Op) -> Result<Option<Allocation>, StepError> {
        match *op {
            Op::Allocate { id, pool, stream, size_bytes } => {
                let pool = self.pool(pool)?;
                if let Some(place) = self.program.revived(id)
                    && let Some(allocation) = self.revive(op, pool, place)?
                {
                    return Ok(Some(allocation));
                }
                let allocation = match self.program.shared_name(id) {
                    None => self.allocator.allocate(pool, stream, size_bytes)?,
                    Some(name) => self.allocator.allocate_sharing_name(pool, stream, size_bytes, name)?,
                };
                self.live[id.0 as usize] = Some(allocation.handle);
                return Ok(Some(allocation));
            }
            Op::Free { id } => {
                let handle = self.live(id)?;
                self.allocator.free(handle)?;
                self.live[id.0 as usize] = None;
            }
            Op::RecordUse { id, stream } => self.allocator.record_use(self.live(id)?, stream)?,
            _ => self.step_rarely(op)?,
        }
        Ok(None)
    }

    /// Revives an allocation at its recorded placement. Returns `None` if this placement is not free on this allocator, because its
    /// configuration differs from the recorded one or because it follows a plan.
    #[cold]
    fn revive(&mut self, op: &Op, pool: PoolId, place: RevivedPlace) -> Result<Option<Allocation>, StepError> {
        let Op::Allocate { id, stream, size_bytes, .. } = *op else { return Ok(None) };
        match self.allocator.replay().revive(pool, stream, size_bytes, place, self.program.name(id)) {
            Ok(allocation) => {
                self.live[id.0 as usize] = Some(allocation.handle);
                Ok(Some(allocation))
            }
            Err(RestoreError::Gone { .. } | RestoreError::UnknownLive { .. } | RestoreError::State(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    #[cold]
    fn step_rarely(&mut self, op: &Op) -> Result<(), StepError> {
        match op {
            Op::RegisterStream { stream, group } => {
                if u32::from(stream.0) >= self.allocator.stream_count() {
                    self.register(*stream, *group)?;
                }
            }
            Op::CreatePool { pool, config } => {
                if self.pools.len() <= pool.index() {
                    self.pools.resize(pool.index() + 1, None);
                }
                let made = match self.pools[pool.index()] {
                    Some(made) => made,
                    None => {
                        let planned = self.plans.and_then(|plans| plans.file.pool_config(*pool));
                        let made = self.create_pool(*pool, planned.unwrap_or(config))?;
                        self.pools[pool.index()] = Some(made);
                        self.adopt_plans(*pool, made)?;
                        made
                    }
                };
                if *pool != PoolId::DEFAULT {
                    self.begin_step_of_pass(made)?;
                }
            }
            Op::DestroyPool { pool } => {
                let made = self.pool(*pool)?;
                self.end_step_of_pass(made)?;
                self.allocator.destroy_pool(made)?;
                self.pools[pool.index()] = None;
            }
            Op::ResetPool { pool } => self.reset_pool(self.pool(*pool)?)?,
            Op::Wait { stream, on } => self.wait(*stream, *on)?,
            Op::Synchronize { stream } => {
                self.known(*stream)?;
                self.allocator.backend().synchronize(*stream)?;
                self.allocator.note_synchronized(*stream)?;
            }
            Op::Reserve { pool, stream, size_bytes } => {
                self.allocator.reserve(self.pool(*pool)?, *stream, *size_bytes)?;
            }
            Op::Trim { pool: Some(pool) } => drop(self.allocator.trim_pool(self.pool(*pool)?)?),
            Op::Trim { pool: None } => drop(self.allocator.trim_all()?),
            Op::BeginStep { pool, key } => {
                let pool = self.pool(*pool)?;
                self.begin_step(pool, *key)?;
            }
            Op::EndStep { pool } => {
                let pool = self.pool(*pool)?;
                self.end_step(pool)?;
            }
            Op::Sleep { pool, contents } => {
                let pool = self.pool(*pool)?;
                self.end_step_of_pass(pool)?;
                *self.sleeps.entry(pool).or_default() += 1;
                // `sleep` would reject a pool that has observers.
                self.allocator.quiesce(pool, *contents)?.unmap()?;
            }
            Op::Wake { pool } => {
                let pool = self.pool(*pool)?;
                self.allocator.wake(pool)?;
                self.begin_step_of_pass(pool)?;
            }
            Op::Stay { pool, asked } => self.allocator.replay().stay(self.pool(*pool)?, *asked)?,
            Op::Observe { observer, pool } => {
                if self.observers.len() <= observer.index() {
                    self.observers.resize(observer.index() + 1, None);
                }
                if self.observers[observer.index()].is_none() {
                    let (observing, _births) = self.allocator.observe(self.pool(*pool)?)?;
                    self.observers[observer.index()] = Some(observing);
                }
            }
            Op::Acknowledge { observer } => {
                let observer = self.observer(*observer)?;
                self.allocator.acknowledge(observer, &self.allocator.unread(observer))?;
            }
            Op::Forget { observer } => {
                self.allocator.forget(self.observer(*observer)?)?;
                self.observers[observer.index()] = None;
            }
            Op::Reclaim { pool, stream, size_bytes } => {
                self.allocator.replay().reclaim(self.pool(*pool)?, *stream, *size_bytes)?;
            }
            Op::Refuse { pool, stream, size_bytes, refusal } => {
                self.allocator.replay().refuse(self.pool(*pool)?, *stream, *size_bytes, *refusal)?;
            }
            Op::Allocate { .. } | Op::Free { .. } | Op::RecordUse { .. } | Op::Sync => {}
        }
        Ok(())
    }

    /// Creates a pool with the id that it has in the program, or with the next id if that one was used before.
    fn create_pool(&self, id: PoolId, config: &PoolConfig) -> Result<PoolId, StepError> {
        if id.0 != self.allocator.pool_count()
            && let Ok(made) = self.allocator.create_pool_with_key(id, config.clone())
        {
            return Ok(made);
        }
        Ok(self.allocator.create_pool(config.clone())?)
    }

    /// Resets a pool of the allocator. A recording frees all allocations of a pool before it resets the pool.
    fn reset_pool(&mut self, pool: PoolId) -> Result<(), StepError> {
        if self.allocator.reset_pool(pool)?.allocations > 0 {
            let allocator = self.allocator;
            self.live.iter_mut().for_each(|live| *live = live.filter(|live| allocator.is_live(*live)));
        }
        Ok(())
    }

    /// Makes a stream wait for another on the device, as the program did, and notifies the allocator.
    fn wait(&self, stream: StreamId, on: StreamId) -> Result<(), StepError> {
        self.known(stream)?;
        self.known(on)?;
        let backend = self.allocator.backend();
        let event = backend.record(on)?;
        let waited = backend.wait(stream, event);
        backend.recycle(event);
        waited?;
        Ok(self.allocator.note_stream_wait(stream, on)?)
    }

    fn known(&self, stream: StreamId) -> Result<(), UnknownError> {
        let streams = self.allocator.stream_count();
        if u32::from(stream.0) < streams { Ok(()) } else { Err(UnknownError::Stream { stream, streams }) }
    }

    /// Executes the whole program, and stops at the first error. Passes each allocation, with its dense id, to
    /// `placed`.
    ///
    /// # Errors
    /// Returns the first error, with the index of its op.
    pub fn run(&mut self, mut placed: impl FnMut(AllocationId, &Allocation)) -> Result<(), ReplayError> {
        let program = self.program;
        let mut next = 0;
        for (index, op) in program.ops.iter().enumerate() {
            match self.step(op) {
                Ok(None) => {}
                Ok(Some(allocation)) => placed(AllocationId(next), &allocation),
                Err(error) => return Err(ReplayError { op: index, error }),
            }
            next += u64::from(matches!(op, Op::Allocate { .. }));
        }
        Ok(())
    }

    /// Adopts an allocation that the program made before this run, on a restored rank. The caller must already have
    /// executed the ops that create the allocation's stream and pool.
    ///
    /// # Panics
    /// Panics if the program does not make an allocation with this id.
    pub fn adopt(&mut self, id: AllocationId, handle: Handle) {
        self.live[id.0 as usize] = Some(handle);
    }

    /// Returns the handle of the live allocation with this id in the program.
    pub fn handle(&self, id: AllocationId) -> Option<Handle> {
        self.live.get(id.0 as usize).copied().flatten()
    }

    /// Frees the allocations that the program left live, in order of creation, and ends all open steps.
    ///
    /// # Errors
    /// Returns an error if the driver cannot fence a use. A second call can free the remaining allocations.
    pub fn free_all(&mut self) -> Result<(), FreeError> {
        for live in &mut self.live {
            if let Some(handle) = *live {
                self.allocator.free(handle)?;
                *live = None;
            }
        }
        for pool in self.open_steps.drain(..) {
            // A destroyed pool no longer has a step.
            self.planned += self.allocator.end_step(pool).map_or(0, |report| report.planned);
        }
        Ok(())
    }

    #[inline]
    fn live(&self, id: AllocationId) -> Result<Handle, StepError> {
        self.handle(id).ok_or(StepError::NotLive { id })
    }

    fn observer(&self, observer: ObserverId) -> Result<ObserverId, StepError> {
        let known = self.observers.get(observer.index()).copied().flatten();
        known.ok_or(StepError::NotObserving { observer })
    }

    #[inline]
    fn pool(&self, pool: PoolId) -> Result<PoolId, UnknownError> {
        self.pool_of(pool).ok_or(UnknownError::Pool { pool, pools: self.pools.len() as u32 })
    }
}
