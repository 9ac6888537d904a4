//! Replay: ops carried out on an allocator.
//!
//! A [`Program`] is a list of ops whose allocations are renumbered 0, 1, 2, ... in the order in which they are made, so that
//! many ranks can share one and each keeps a dense table of handles. A [`Replay`] is one rank's run of it: a test, a fuzz
//! input, a benchmark and a recorded job all run through here.
//!
//! A run may follow [plans](crate::plan), in pools that are configured as the plans say. Each [pass](Replay::begin_pass) of the
//! program is then a step of every pool, unless the program says itself where its steps begin and end. A pool does not sleep in a step,
//! so a pass of a pool that sleeps is several steps, whose keys are 0, 1, 2, ...:
//!
//! ```text
//! pass   ├──── key 0 ────┤ sleep   wake ├──── key 1 ────┤
//! ```

mod error;

pub use error::{ReplayError, StepError};

use crate::plan::PlanFile;
use std::collections::BTreeMap;
use symmalloc_core::Allocator;
use symmalloc_core::backend::Backend;
use symmalloc_core::errors::{FreeError, UnknownError};
use symmalloc_core::ids::{AllocationId, ObserverId, PoolId, StreamId};
use symmalloc_core::lock::Lock;
use symmalloc_core::op::{Op, Pending, Record};
use symmalloc_core::plans::PlanError;
use symmalloc_core::restore::{RestoreError, RevivedPlace};
use symmalloc_core::sleep::{Phase, SleepCause, SleepError};
use symmalloc_core::{Allocation, Handle};

/// Ops with dense allocation ids.
#[derive(Clone, Debug, Default)]
pub struct Program {
    ops: Vec<Op>,
    allocation_count: usize,
    /// Of named allocations, ascending by id.
    names: Vec<(AllocationId, Box<str>)>,
    /// Of frees that completed later in the recording, ascending by the number of their op.
    pending: Vec<(usize, Pending)>,
    /// Where allocations were revived, ascending by id.
    revived: Vec<(AllocationId, RevivedPlace)>,
}

impl Program {
    /// Renumbers the allocations of recorded ops.
    ///
    /// # Errors
    /// When an op names an allocation that was not made before, or one is made twice.
    pub fn new<'a>(records: impl IntoIterator<Item = &'a Record>) -> Result<Self, ReplayError> {
        let mut program = Program::default();
        let mut dense = BTreeMap::new();
        for (index, record) in records.into_iter().enumerate() {
            let mut op = record.op.clone();
            match &mut op {
                Op::Allocate { id, .. } => {
                    let next = AllocationId(dense.len() as u64);
                    if dense.insert(*id, next).is_some() {
                        return Err(ReplayError { op: index, error: StepError::MadeTwice { id: *id } });
                    }
                    *id = next;
                    program.allocation_count += 1;
                    program.names.extend(record.name.clone().map(|name| (next, name)));
                    if let (Some(placement), Some(block_bytes)) = (record.placement, record.revived_bytes) {
                        program.revived.push((next, RevivedPlace { placement, block_bytes: block_bytes.get() }));
                    }
                }
                Op::Free { id } | Op::RecordUse { id, .. } => {
                    let known = dense.get(id).copied();
                    *id = known.ok_or(ReplayError { op: index, error: StepError::NotLive { id: *id } })?;
                }
                _ => {}
            }
            program.pending.extend(record.pending.map(|pending| (index, pending)));
            program.ops.push(op);
        }
        Ok(program)
    }

    /// The ops, their allocations numbered in the order in which they are made.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Number of allocations that the program makes.
    pub fn allocation_count(&self) -> usize {
        self.allocation_count
    }

    /// Number of streams that the program registers.
    pub fn stream_count(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::RegisterStream { .. })).count()
    }

    /// Whether the program says where its steps begin.
    pub fn has_steps(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::BeginStep { .. }))
    }

    /// What the program calls an allocation.
    #[inline]
    pub fn name(&self, id: AllocationId) -> Option<&str> {
        let at = self.names.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(&self.names[at].1)
    }

    /// Where the program revived an allocation, if it did.
    #[inline]
    pub fn revived(&self, id: AllocationId) -> Option<RevivedPlace> {
        let at = self.revived.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(self.revived[at].1)
    }

    /// The same program without what a recording says about pending frees.
    #[must_use]
    pub fn without_pending(mut self) -> Self {
        self.pending.clear();
        self
    }

    /// How long the recorded allocator went on counting what this op freed, where the recording says so. A replay frees
    /// at once, whatever it says.
    pub fn pending(&self, op: usize) -> Option<Pending> {
        let at = self.pending.binary_search_by_key(&op, |(op, _)| *op).ok()?;
        Some(self.pending[at].1)
    }
}

/// One rank's run of a [`Program`].
#[derive(Debug)]
pub struct Replay<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    program: &'a Program,
    /// Live allocations by dense id.
    live: Vec<Option<Handle>>,
    /// The allocator's pool for each pool of the program; `None` once it was destroyed.
    pools: Vec<Option<PoolId>>,
    /// The allocator's observer for each one of the program; `None` once it is gone.
    observers: Vec<Option<ObserverId>>,
    /// The allocator's pools with a step that has begun and not ended.
    open_steps: Vec<PoolId>,
    /// By the allocator's pool: how often it slept in this pass.
    sleeps: BTreeMap<PoolId, u64>,
    plans: Option<Following<'a>>,
    /// Allocations that went where a plan says, in steps that ended.
    planned: u64,
}

/// Plans that a run follows.
#[derive(Clone, Copy, Debug)]
struct Following<'a> {
    file: &'a PlanFile,
    /// Whether a pass is a step of every pool: the program has none of its own.
    passes_are_steps: bool,
}

impl<'a, B: Backend, L: Lock> Replay<'a, B, L> {
    /// A run on an allocator that no other run uses at the same time.
    pub fn new(allocator: &'a Allocator<B, L>, program: &'a Program) -> Self {
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
        }
    }

    /// A run that follows plans, on an allocator of their configuration. All streams of the program are registered, and the plans of
    /// the default pool adopted; those of other pools are when the program makes these.
    ///
    /// # Errors
    /// When a plan cannot be adopted, or there are too many streams.
    pub fn following(
        allocator: &'a Allocator<B, L>,
        program: &'a Program,
        file: &'a PlanFile,
    ) -> Result<Self, StepError> {
        let mut replay = Replay::new(allocator, program);
        replay.plans = Some(Following { file, passes_are_steps: !program.has_steps() });
        while (allocator.stream_count() as usize) < program.stream_count() {
            allocator.register_stream()?;
        }
        replay.adopt_plans(PoolId::DEFAULT, PoolId::DEFAULT)?;
        Ok(replay)
    }

    /// Begins the program once more. Call it before every pass. A pool that the pass before left asleep wakes; where a limit leaves no
    /// room for that, the free memory of all pools goes back first.
    ///
    /// # Errors
    /// When a step of the default pool is open, or a pool does not wake.
    pub fn begin_pass(&mut self) -> Result<(), StepError> {
        for pool in std::mem::take(&mut self.sleeps).into_keys() {
            // A pool that was destroyed does not sleep any more.
            if matches!(self.allocator.phase(pool), Ok(Phase::Asleep | Phase::Failed)) {
                self.wake_for_pass(pool)?;
            }
        }
        self.begin_step_of_pass(PoolId::DEFAULT)
    }

    /// Allocations that went where a plan says, in steps that ended.
    pub fn planned_allocations(&self) -> u64 {
        self.planned
    }

    /// The allocator's pool for one of the program; `None` while it is not there.
    pub fn pool_of(&self, pool: PoolId) -> Option<PoolId> {
        self.pools.get(pool.index()).copied().flatten()
    }

    /// Adopts what is planned for a pool of the program.
    fn adopt_plans(&self, planned: PoolId, pool: PoolId) -> Result<(), PlanError> {
        let Some(Following { file, .. }) = self.plans else { return Ok(()) };
        file.plans_of(planned).try_for_each(|plan| self.allocator.adopt_plan(pool, plan.clone()))
    }

    fn wake_for_pass(&self, pool: PoolId) -> Result<(), StepError> {
        match self.allocator.wake(pool) {
            Err(SleepError { cause: SleepCause::Memory { .. }, .. }) => {
                self.allocator.trim(None)?;
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

    /// Carries one op of the program out. Returns the allocation that it made.
    ///
    /// Streams, pools and observers that exist already, from an earlier run of the program, are used again.
    ///
    /// # Errors
    /// Whatever the allocator refuses, and ops on allocations that are not live. The run can go on.
    #[inline(always)]
    pub fn step(&mut self, op: &Op) -> Result<Option<Allocation>, StepError> {
        match *op {
            Op::Allocate { id, pool, stream, size_bytes } => {
                let pool = self.pool(pool)?;
                if let Some(place) = self.program.revived(id)
                    && let Some(allocation) = self.revive(op, pool, place)?
                {
                    return Ok(Some(allocation));
                }
                let allocation = match self.program.name(id) {
                    None => self.allocator.allocate(pool, stream, size_bytes)?,
                    Some(name) => self.allocator.allocate_named(pool, stream, size_bytes, name)?,
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

    /// Makes an allocation live where the program revived it. `None` where that place is not free on this allocator, which has another
    /// configuration than the recorded one, or follows a plan.
    #[cold]
    fn revive(&mut self, op: &Op, pool: PoolId, place: RevivedPlace) -> Result<Option<Allocation>, StepError> {
        let Op::Allocate { id, stream, size_bytes, .. } = *op else { return Ok(None) };
        match self.allocator.replay_revival(pool, stream, size_bytes, place, self.program.name(id)) {
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
            Op::RegisterStream { stream } => {
                if u32::from(stream.0) >= self.allocator.stream_count() {
                    self.allocator.register_stream()?;
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
                        let made = self.allocator.create_pool(planned.unwrap_or(config).clone())?;
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
            Op::Wait { stream, on } => self.wait(*stream, *on)?,
            Op::Synchronize { stream } => {
                self.known(*stream)?;
                self.allocator.backend().synchronize(*stream)?;
                self.allocator.stream_synchronized(*stream)?;
            }
            Op::Reserve { pool, stream, size_bytes } => {
                self.allocator.reserve(self.pool(*pool)?, *stream, *size_bytes)?;
            }
            Op::Trim { pool } => {
                let pool = pool.map(|pool| self.pool(pool)).transpose()?;
                self.allocator.trim(pool)?;
            }
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
                // Not by `sleep`, which refuses a pool that is observed.
                self.allocator.quiesce(pool, *contents)?.unmap()?;
            }
            Op::Wake { pool } => {
                let pool = self.pool(*pool)?;
                self.allocator.wake(pool)?;
                self.begin_step_of_pass(pool)?;
            }
            Op::Stay { pool, asked } => self.allocator.replay_stay(self.pool(*pool)?, *asked)?,
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
                self.allocator.replay_reclaim(self.pool(*pool)?, *stream, *size_bytes)?;
            }
            Op::Refuse { pool, stream, size_bytes, refusal } => {
                self.allocator.replay_refusal(self.pool(*pool)?, *stream, *size_bytes, *refusal)?;
            }
            Op::Allocate { .. } | Op::Free { .. } | Op::RecordUse { .. } | Op::Sync => {}
        }
        Ok(())
    }

    /// Does on the device what the program did, and tells the allocator.
    fn wait(&self, stream: StreamId, on: StreamId) -> Result<(), StepError> {
        self.known(stream)?;
        self.known(on)?;
        let backend = self.allocator.backend();
        let event = backend.record(on)?;
        let waited = backend.wait(stream, event);
        backend.recycle(event);
        waited?;
        Ok(self.allocator.stream_waits(stream, on)?)
    }

    fn known(&self, stream: StreamId) -> Result<(), UnknownError> {
        let streams = self.allocator.stream_count();
        if u32::from(stream.0) < streams { Ok(()) } else { Err(UnknownError::Stream { stream, streams }) }
    }

    /// Carries the whole program out, up to the first error. Gives each allocation, by dense id, to `placed`.
    ///
    /// # Errors
    /// The first error with the number of its op.
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

    /// Takes an allocation over that the program made before this run, on a rank that was restored. Ops that made streams and
    /// pools before are to be carried out again; what they make is there to be restored into.
    ///
    /// # Panics
    /// When the program makes no such allocation.
    pub fn adopt(&mut self, id: AllocationId, handle: Handle) {
        self.live[id.0 as usize] = Some(handle);
    }

    /// The live allocation that the program calls by this id.
    pub fn handle(&self, id: AllocationId) -> Option<Handle> {
        self.live.get(id.0 as usize).copied().flatten()
    }

    /// Frees what the program left allocated, in the order in which it was made, and ends the steps that are open.
    ///
    /// # Errors
    /// When the driver cannot fence a use; what is left then can be freed by another call.
    pub fn free_all(&mut self) -> Result<(), FreeError> {
        for live in &mut self.live {
            if let Some(handle) = *live {
                self.allocator.free(handle)?;
                *live = None;
            }
        }
        for pool in self.open_steps.drain(..) {
            // A pool that was destroyed has no step any more.
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
