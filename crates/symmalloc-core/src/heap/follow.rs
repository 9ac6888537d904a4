//! Follows plans: in a step whose allocations are known in advance, each request gets its planned place. A part of
//! [`Heap`].
//!
//! While a step is open, each request is compared with the plan's next one. If they are equal, and the earlier blocks
//! that overlap its place are free, the allocation takes the place, without a search, a split or a later merge. The
//! first request that differs ends this mode for the step: the rest of the step is placed the ordinary way, next to the
//! plan memory.
//!
//! ```text
//!  segment   ┌───────────┬──────────────────────────────────┬──────┐
//!            │ allocated │            plan memory           │ free │       one block of the ring, neither free nor allocated
//!            └───────────┼───────┬────────┬─────────────────┼──────┘
//!                        │ place │ place  │
//!                        ├───────┴─┬──────┴───┐                             places overlap; those that are live do not
//!                        │  place  │  place   │
//!                        └─────────┴──────────┘
//! ```
//!
//! Frees are not compared. A place that is freed too early does no harm, and a place that is not freed in time counts
//! as a difference. During a step without a plan, the plan memory is an ordinary free block, until a step follows a
//! plan again.
//!
//! A stream that takes a place waits for the users of every overlapping place, once per stream. As long as steps of the
//! plan follow each other, the plan knows the last user of each offset and the streams that have waited for it
//! ([`Schedule`]). After any other step, each stream of the plan waits for all places before the first request, and
//! each request checks the allocations that are still live from before.

use super::acquire::fresh;
use super::{Context, DynContext, Heap, RequestMode, Shortage};
use crate::blocks::table::{Block, BlockState, Slot};
use crate::config::{PlanPolicy, StreamPolicy, op::Refusal};
use crate::history::digest::{Mark, op_word};
use crate::plans::error::PlanError;
use crate::plans::heap_plans::{HeapPlans, PlanMemory, StepMode};
use crate::plans::plan::{Plan, StepAllocation};
use crate::plans::report::{DifferenceCause, StepReport, StepStats};
use crate::streams::fences::{Fence, FenceSetId, Fences};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError};
use crate::types::handle::Allocation;
use crate::types::ids::StreamId;
use crate::types::units::{Units, bytes};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use symmalloc_plan::{Place, Schedule, Steps};

/// Returns the budget of the search for a learned plan. It is proportional to the number of planned allocations: a few
/// seconds for 50,000 of them.
fn learning_budget(allocations: usize) -> Steps {
    Steps(2_000 * allocations as u64)
}

/// Plans that a heap can adopt.
#[derive(Debug)]
pub(crate) struct PreparedPlans {
    /// The plans; at least one.
    plans: Vec<Arc<Plan>>,
    /// The schedule of each plan.
    schedules: Vec<Schedule>,
    /// The memory that all of them need.
    size: Units,
    /// The streams for which they allocate, ascending.
    streams: SmallVec<[StreamId; 2]>,
}

impl PreparedPlans {
    pub(crate) fn memory_bytes(&self) -> u64 {
        bytes(self.size)
    }
}

impl<L: Lock> Heap<L> {
    /// Allocates while the requests of a step are compared with a plan, or logged.
    #[inline(always)]
    pub(super) fn allocate_in_step<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Allocation, Box<Shortage>> {
        let blocks = self.table.blocks();
        let is_ready = |slot: &Slot| blocks[*slot as usize].is_ready_for(stream);
        if let Some([others @ .., own]) = self.cursor.next_if::<false>(op_word(Mark::Allocate, stream, requested))
            && others.iter().all(is_ready)
            && is_ready(own)
        {
            let (own, checks) = (*own, others.len() + 1);
            self.cursor.advance(checks);
            return Ok(self.allocate_planned(own, stream, requested));
        }
        self.allocate_in_step_slow(context, stream, requested)
    }

    /// Turns a free place, whose users the stream waits for, into an allocation.
    #[inline(always)]
    fn allocate_planned(&mut self, slot: Slot, stream: StreamId, requested: u64) -> Allocation {
        let serial = self.serials.next();
        let block = self.table.block_mut(slot);
        block.state = BlockState::Allocated { stream, requested, serial };
        let Block { location, size, .. } = *block;
        let address = |heap: &Self| heap.cursor.base().plus(bytes(location.offset()));
        self.announce((slot, location, size), serial, stream, requested, address)
    }

    /// Serves requests inside a step on the slow path: a wait, an ordinary placement, a log entry, or a request that
    /// differs from the plan.
    #[cold]
    #[inline(never)]
    fn allocate_in_step_slow<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Allocation, Box<Shortage>> {
        if self.heap_plans.as_deref().is_some_and(HeapPlans::is_learning) {
            let allocation = self.allocate_anywhere(context, stream, requested)?;
            let heap_plans = self.heap_plans.as_deref_mut().expect("it learns");
            heap_plans.note_allocation((stream, requested), allocation.handle.slot());
            return Ok(allocation);
        }
        let Some(checks) = self.cursor.next_if::<true>(op_word(Mark::Allocate, stream, requested)) else {
            let heap_plans = self.heap_plans.as_deref().expect("a plan is followed");
            let cause = heap_plans.other_request(self.cursor.number(), (stream, requested));
            self.differ(cause);
            return self.allocate_anywhere(context, stream, requested);
        };
        let count = checks.len();
        let allocation = if let Some(own) = checks.last().copied() {
            // Also checks overlapping blocks that were unexpectedly live when the step began.
            let (offset, end) = (self.table.block(own).offset(), self.table.block(own).end());
            let overlaps = |block: &Block| block.offset() < end && offset < block.end();
            let unexpected_live = self.heap_plans.as_deref().map_or(&[][..], HeapPlans::unexpected_live).iter();
            let mut waits: SmallVec<[Slot; 4]> = SmallVec::new();
            for slot in checks.iter().chain(unexpected_live.filter(|slot| overlaps(self.table.block(**slot)))) {
                if !self.table.block(*slot).is_ready_for(stream) {
                    waits.push(*slot);
                }
            }
            if let Some(taken) = waits.iter().find(|slot| !self.table.block(**slot).is_free()) {
                let memory = self.plan_memory().map_or(0, |memory| self.table.block(memory).offset());
                let offset_bytes = bytes(self.table.block(*taken).offset() - memory);
                self.differ(DifferenceCause::Occupied { offset_bytes });
                return self.allocate_anywhere(context, stream, requested);
            }
            for slot in waits {
                self.wait_for_earlier_users(context, slot, stream).map_err(Shortage::Fence)?;
            }
            let fences = std::mem::replace(&mut self.table.block_mut(own).fences, FenceSetId::EMPTY);
            if !fences.is_empty() {
                self.fences.clear(fences);
                self.recycle_spent(context);
            }
            self.allocate_planned(own, stream, requested)
        } else {
            self.allocate_anywhere(context, stream, requested)?
        };
        self.cursor.advance(count);
        Ok(allocation)
    }

    /// Records the first difference. The rest of the step is placed the ordinary way.
    #[cold]
    fn differ(&mut self, cause: DifferenceCause) {
        self.mode = RequestMode::Ordinary;
        let Some(heap_plans) = self.heap_plans.as_deref_mut() else { return };
        let difference = heap_plans.differ(self.cursor.number(), cause);
        self.fold(op_word(Mark::Differ, StreamId(0), 0), difference.number.into());
        let (pool, stream) = (self.identity.pool.0, self.identity.stream.map(|stream| stream.0));
        tracing::warn!(name: "plan.differs", target: "symmalloc", pool, stream, %difference);
    }

    /// Begins a step with this key.
    pub(crate) fn begin_step<B: Backend>(&mut self, context: &Context<B, L>, key: u64) {
        if self.has_history() {
            self.fold(op_word(Mark::BeginStep, StreamId(0), 0), key);
        }
        let allocations = self.usage.allocations_made();
        let learns = self.config.plan() == PlanPolicy::Learn;
        let step = self.heap_plans.get_or_insert_default().begin(key, learns, allocations);
        self.mode = if step == StepMode::Ordinary { RequestMode::Ordinary } else { RequestMode::Step };
        if step != StepMode::Follow {
            // The step uses the memory of plans as ordinary memory.
            return self.dissolve_plans(context);
        }
        if let Err(cause) = self.place_plans(context) {
            return self.differ(cause);
        }
        let heap_plans = self.heap_plans.as_deref_mut().expect("there is a plan");
        let live = |slot: &Slot| !self.table.block(*slot).is_free();
        self.cursor = heap_plans.take_cursor();
        self.cursor.set_unexpected(heap_plans.note_live(live));
        if !heap_plans.is_continued()
            && let Err(error) = self.wait_for_all_places(context)
        {
            // Other ranks may follow the plan, so the digest records that this one does not.
            self.fold(op_word(Mark::RefusedByDriver, StreamId(0), 0), 0);
            let (pool, stream) = (self.identity.pool.0, self.identity.stream.map(|stream| stream.0));
            tracing::warn!(name: "plan.unordered", target: "symmalloc", pool, stream, %error);
            self.differ(DifferenceCause::Driver);
        }
    }

    /// Acquires memory for the plans, unless they have it. Without memory, no plan is followed any more.
    fn place_plans<B: Backend>(&mut self, context: &Context<B, L>) -> Result<(), DifferenceCause> {
        if self.plan_memory().is_some() {
            return Ok(());
        }
        let plans = self.prepare(self.plans()).expect("plans are checked before they are adopted");
        self.install(context, &plans).map_err(|shortage| {
            let refusal = match &*shortage {
                Shortage::Memory { cause, .. } => Refusal::from(cause),
                Shortage::Closed | Shortage::Asleep => Refusal::Segment,
                Shortage::Fence(_) => Refusal::Driver,
            };
            self.fold_refusal(refusal, plans.streams[0], plans.memory_bytes());
            let (pool, stream) = (self.identity.pool.0, self.identity.stream.map(|stream| stream.0));
            let size_bytes = plans.memory_bytes();
            tracing::warn!(name: "plan.refused", target: "symmalloc", pool, stream, size_bytes, cause = ?shortage);
            self.heap_plans.as_deref_mut().expect("there is a plan").give_up();
            DifferenceCause::Memory
        })
    }

    /// Orders each stream of the plans behind all users of their places.
    fn wait_for_all_places<B: Backend>(&mut self, context: &Context<B, L>) -> Result<(), BackendError> {
        let memory = self.heap_plans.as_deref().and_then(HeapPlans::memory).expect("there is a plan");
        let (places, streams) = (memory.places.clone(), memory.streams.clone());
        for slot in places.into_iter().filter(|slot| self.table.block(*slot).is_free()).collect::<Vec<_>>() {
            for stream in &streams {
                self.wait_for_earlier_users(context, slot, *stream)?;
            }
        }
        Ok(())
    }

    /// Ends the step. A heap that learns may have a new plan afterwards.
    pub(crate) fn end_step(&mut self, key: u64) -> StepReport {
        let allocations = self.usage.allocations_made();
        let Some(heap_plans) = self.heap_plans.as_deref_mut() else { return StepReport::default() };
        let (report, learned) = heap_plans.end(std::mem::take(&mut self.cursor), allocations);
        self.mode = RequestMode::Ordinary;
        if self.has_history() {
            self.fold(op_word(Mark::EndStep, StreamId(0), 0), report.planned);
        }
        if let Some(learned) = learned.filter(|learned| !learned.is_empty()) {
            let allocation = |((stream, requested_bytes), until)| StepAllocation { stream, requested_bytes, until };
            self.plan_step(key, learned.into_iter().map(allocation).collect());
        }
        report
    }

    /// Plans a step that has occurred twice. The next such step follows the plan.
    fn plan_step(&mut self, key: u64, wanted: Vec<StepAllocation>) {
        let wanted_of = |plan: &Plan| plan.allocations().iter().map(|planned| planned.wanted).collect::<Vec<_>>();
        let known = self.plans();
        let others = known.iter().filter(|plan| plan.key() != key);
        let mut steps: Vec<(u64, Vec<StepAllocation>)> = others.map(|plan| (plan.key(), wanted_of(plan))).collect();
        steps.push((key, wanted));
        if steps.len() > 1 {
            // Allocations that live into the next step would block the places of a step with another key.
            for (_, wanted) in &mut steps {
                let count = wanted.len() as u32;
                wanted.iter_mut().for_each(|it| it.until = it.until.filter(|until| *until <= count));
            }
        }
        let granularity_bytes = bytes(self.rules.granule);
        let solve = |(key, wanted): (u64, Vec<StepAllocation>)| {
            let same = known.iter().find(|plan| plan.key() == key && wanted_of(plan) == wanted);
            let budget = learning_budget(wanted.len());
            let solve = || {
                Plan::solve(&self.config, granularity_bytes, self.identity.stream, key, &wanted, budget).map(Arc::new)
            };
            same.map_or_else(solve, |same| Ok(Arc::clone(same)))
        };
        let plans = steps.into_iter().map(solve).collect::<Result<_, _>>().and_then(|plans| self.prepare(plans));
        let (pool, stream) = (self.identity.pool.0, self.identity.stream.map(|stream| stream.0));
        let heap_plans = self.heap_plans.as_deref_mut().expect("it has learned");
        match plans {
            Ok(plans) => {
                let plan_bytes = plans.memory_bytes();
                tracing::info!(name: "plan.learned", target: "symmalloc", pool, stream, key, plan_bytes);
                heap_plans.set_plans(plans.plans.into_iter());
            }
            Err(error) => {
                tracing::warn!(name: "plan.failed", target: "symmalloc", pool, stream, key, %error);
                heap_plans.give_up();
            }
        }
    }

    /// Prepares a plan for adoption, together with the existing plans of other keys. Changes nothing.
    pub(crate) fn prepare_plan(&self, plan: Plan) -> Result<PreparedPlans, PlanError> {
        let mut plans = self.plans();
        plans.retain(|other| other.key() != plan.key());
        plans.push(Arc::new(plan));
        self.prepare(plans)
    }

    fn prepare(&self, plans: Vec<Arc<Plan>>) -> Result<PreparedPlans, PlanError> {
        let is_shared = self.config.streams() == StreamPolicy::Shared;
        let (mut schedules, mut size, mut streams) = (Vec::new(), 1, SmallVec::new());
        for plan in &plans {
            if plan.stream().is_none() != is_shared || !is_shared && plan.stream() != self.identity.stream {
                return Err(PlanError::Streams { pool: self.identity.pool, stream: plan.stream() });
            }
            streams.extend(plan.allocations().iter().map(|planned| planned.wanted.stream));
            let schedule = plan.schedule(&self.rules)?;
            size = schedule.places().iter().map(|place| place.offset + place.size).fold(size, Units::max);
            schedules.push(schedule);
        }
        streams.sort_unstable();
        streams.dedup();
        Ok(PreparedPlans { plans, schedules, size, streams })
    }

    /// Replaces the plans with prepared ones and acquires their memory. After an error there are no plans.
    pub(crate) fn adopt<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        prepared: &PreparedPlans,
    ) -> Result<(), Box<Shortage>> {
        self.dissolve_plans(context);
        let plans = prepared.plans.iter().cloned();
        self.heap_plans.get_or_insert_default().set_plans(plans);
        let installed = self.install(context, prepared);
        if installed.is_err() {
            self.drop_plans(context);
        }
        installed
    }

    /// Drops the plans with their memory and everything that was learned.
    pub(crate) fn drop_plans<B: Backend>(&mut self, context: &Context<B, L>) {
        self.dissolve_plans(context);
        if let Some(heap_plans) = &mut self.heap_plans {
            heap_plans.forget();
        }
    }

    /// Acquires memory for the known plans, which are `prepared`. If no free block is large enough, free memory lies in
    /// pieces between live allocations. It is then released first, and the memory of the plans replaces it.
    fn install<B: Backend>(&mut self, context: &Context<B, L>, prepared: &PreparedPlans) -> Result<(), Box<Shortage>> {
        let PreparedPlans { plans, schedules, size, streams } = prepared;
        let (size, class) = (*size, self.rules.class_of(*size));
        let fit = self.free.best_fit(self.table.blocks(), class, size);
        let fit = fit.filter(|slot| self.rules.accepts(size, self.table.block(*slot).size));
        if fit.is_none() {
            let _kept_by_the_driver = self.trim(context, None);
        }
        let mapped_before = self.mapped_bytes;
        let found = fit.map_or_else(|| self.acquire_memory(context, streams[0], size), Ok);
        let ready = found.and_then(|slot| {
            let waited = streams.iter().try_for_each(|stream| self.wait_for_earlier_users(context, slot, *stream));
            waited.map(|()| slot).map_err(|error| Box::new(Shortage::Fence(error)))
        });
        if ready.is_ok() {
            let digest = plans.iter().fold(0, |all: u64, plan| all.rotate_left(7) ^ plan.digest());
            self.fold(op_word(Mark::Adopt, StreamId(0), bytes(size)), digest);
        }
        if self.mapped_bytes > mapped_before {
            self.fold(op_word(Mark::Obtain, streams[0], self.mapped_bytes - mapped_before), 0);
        }
        let slot = ready?;
        self.unlink(slot);
        let memory = if self.rules.splits(class, size, self.table.block(slot).size) {
            let front = self.table.tiling().cut_front(slot, size, BlockState::Planned);
            self.link(slot);
            front
        } else {
            let block = self.table.block_mut(slot);
            block.state = BlockState::Planned;
            let fences = std::mem::replace(&mut block.fences, FenceSetId::EMPTY);
            self.fences.clear(fences);
            slot
        };
        let mut slots = BTreeMap::new();
        for Place { offset, size } in schedules.iter().flat_map(Schedule::places).copied() {
            let add = || self.table.add_place(memory, offset, size, fresh(streams[0]));
            slots.entry(Place { offset, size }).or_insert_with(add);
        }
        let places = slots.values().copied().collect();
        let base = self.table.segment(self.table.block(memory).segment).range.base;
        let memory = PlanMemory { block: memory, base, size_bytes: bytes(size), places, streams: streams.clone() };
        self.heap_plans.as_deref_mut().expect("the heap has plans").install(schedules, &slots, memory);
        self.recycle_spent(context);
        Ok(())
    }

    /// Removes the memory of plans, if there is any. Live allocations in it become ordinary blocks, and the rest
    /// becomes free.
    pub(crate) fn dissolve_plans(&mut self, context: &DynContext<'_, L>) {
        let Some(PlanMemory { block: memory, places, streams, .. }) =
            self.heap_plans.as_deref_mut().and_then(HeapPlans::take_memory)
        else {
            return;
        };
        self.fold(op_word(Mark::Adopt, StreamId(0), 0), 0);
        let (idle, mut live): (Vec<Slot>, Vec<Slot>) =
            places.into_iter().partition(|slot| self.table.block(*slot).is_free());
        live.sort_unstable_by_key(|slot| self.table.block(*slot).location);
        let (state, fences) = self.free_after(context, &idle, streams[0]);
        for slot in idle {
            let fences = self.table.block(slot).fences;
            self.fences.clear(fences);
            self.table.tiling().vacate(slot);
        }
        let mut pieces = Vec::new();
        self.table.block_mut(memory).state = state;
        for slot in live {
            let gap = self.table.block(slot).offset() - self.table.block(memory).offset();
            if gap > 0 {
                pieces.push(self.table.tiling().cut_front(memory, gap, state));
            }
            self.table.tiling().put_front(memory, slot);
        }
        if self.table.block(memory).size > 0 {
            pieces.push(memory);
        } else {
            self.table.tiling().take_out(memory);
        }
        for piece in pieces {
            self.table.block_mut(piece).fences = self.fences.insert(fences.clone());
            self.coalesce(piece);
        }
        self.recycle_spent(context);
    }

    /// Returns the state and fences of the memory of these free places. Its next user waits for all their users so far.
    /// It need not wait for users from before the plans: each stream of the plans has waited for them, so a wait for
    /// any of these streams covers them.
    fn free_after(&self, context: &DynContext<'_, L>, places: &[Slot], of_plans: StreamId) -> (BlockState, Fences) {
        let mut users: SmallVec<[StreamId; 4]> = SmallVec::new();
        for slot in places {
            let block = self.table.block(*slot);
            users.extend(self.fences.fences(block.fences).iter().map(|fence| fence.stream));
            users.extend(match block.state {
                BlockState::Free { stream, since } if since > 0 => Some(stream),
                _ => None,
            });
        }
        users.sort_unstable();
        users.dedup();
        let clocks = context.clocks.lock();
        let state = match self.identity.stream {
            Some(own) => fresh(own),
            None => {
                let stream = users.pop().unwrap_or(of_plans);
                BlockState::Free { stream, since: clocks.now(stream) }
            }
        };
        let fence = |stream| Fence { stream, tick: clocks.now(stream), event: None };
        (state, users.into_iter().map(fence).collect())
    }

    /// Returns the plans in the order of their adoption.
    pub(crate) fn plans(&self) -> Vec<Arc<Plan>> {
        self.heap_plans.as_deref().map_or_else(Vec::new, HeapPlans::plans)
    }

    /// Returns `true` if later steps depend on earlier ones: the heap has plans or learns some.
    pub(crate) fn remembers_steps(&self) -> bool {
        self.heap_plans.as_deref().is_some_and(HeapPlans::remembers)
    }

    /// Returns the bytes of the plan memory.
    pub(crate) fn plan_bytes(&self) -> u64 {
        self.heap_plans.as_deref().map_or(0, HeapPlans::memory_bytes)
    }

    pub(crate) fn step_stats(&self) -> StepStats {
        self.heap_plans.as_deref().map_or_else(StepStats::default, HeapPlans::stats)
    }

    /// Returns the slots of all places of plans.
    pub(super) fn places(&self) -> &[Slot] {
        self.heap_plans.as_deref().and_then(HeapPlans::memory).map_or(&[], |memory| &memory.places)
    }

    /// Returns the block in which plans place allocations.
    pub(super) fn plan_memory(&self) -> Option<Slot> {
        self.heap_plans.as_deref().and_then(HeapPlans::memory).map(|memory| memory.block)
    }

    /// Returns the slots of places with live allocations, in offset order.
    pub(super) fn live_places(&self) -> Vec<Slot> {
        let mut live: Vec<Slot> =
            self.places().iter().copied().filter(|slot| !self.table.block(*slot).is_free()).collect();
        live.sort_unstable_by_key(|slot| self.table.block(*slot).location);
        live
    }
}
