//! Steps: serves requests at the offsets that a plan assigns to them. A part of [`Heap`].
//!
//! [`HeapPlans`] owns the plans and decides where a request goes; its module describes how a heap follows a plan. This
//! file adds the work that needs the driver or the ledger: it acquires the plan memory, orders streams after earlier
//! users, and records differences.

use super::trim::Released;
use super::{Context, DynContext, Heap, RequestMode, Shortage};
use crate::blocks::table::{Block, BlockState, Slot};
use crate::config::op::Refusal;
use crate::history::digest::{Mark, op_word};
use crate::plans::error::PlanError;
use crate::plans::heap_plans::{Answer, HeapPlans, Treatment};
use crate::plans::plan::{Plan, PlanInputs, PreparedPlans};
use crate::plans::report::{DifferenceCause, StepReport, StepStats};
use crate::plans::step::{Diverged, Step};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError};
use crate::types::handle::Handle;
use crate::types::ids::StreamId;
use crate::types::units::bytes;
use std::sync::Arc;

impl<L: Lock> Heap<L> {
    /// Turns a free place into an allocation for a stream that is ordered after the place's users.
    #[inline(always)]
    pub(super) fn allocate_planned(&mut self, slot: Slot, stream: StreamId, requested: u64) -> Handle {
        let serial = self.ledger.next_serial();
        let Block { location, size, .. } = *self.arena.take_place(slot, stream, requested, serial);
        self.note_allocation((slot, location), size, serial, stream, requested)
    }

    /// Serves a request, in a step that follows a plan, that cannot simply take the plan's next place: its stream must
    /// wait first, the plan has no place for it, or it differs from the plan.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_following_slow<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Handle, Box<Shortage>> {
        let (Some(plans), RequestMode::Serving(Step::Following(step))) = (self.plans.as_deref(), &self.mode) else {
            unreachable!("the step follows a plan");
        };
        match plans.answer(step, &self.arena, stream, requested) {
            Answer::Place { slot, waits } => {
                for slot in waits {
                    self.arena.wait_for_earlier_users(context, slot, stream).map_err(Shortage::Fence)?;
                }
                self.arena.drop_fences(context, slot);
                self.note_served();
                Ok(self.allocate_planned(slot, stream, requested))
            }
            Answer::Unplaced => {
                let handle = self.allocate_anywhere(context, stream, requested)?;
                self.note_served();
                Ok(handle)
            }
            Answer::Differs(cause) => {
                self.differ(cause);
                self.allocate_anywhere(context, stream, requested)
            }
        }
    }

    /// Serves a request of a step that is logged in order to learn a plan.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_logged<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Handle, Box<Shortage>> {
        let handle = self.allocate_anywhere(context, stream, requested)?;
        self.open_plans().note_logged((stream, requested), handle.slot());
        Ok(handle)
    }

    /// Returns the plans of a heap in a step.
    fn open_plans(&mut self) -> &mut HeapPlans {
        self.plans.as_deref_mut().expect("a heap in a step has plans")
    }

    /// Records that the plan's next allocation was made as expected.
    fn note_served(&mut self) {
        if let RequestMode::Serving(Step::Following(step)) = &mut self.mode {
            step.note_served();
        }
    }

    /// Stops following the plan of the step. The rest of the step is placed by best fit.
    #[cold]
    fn differ(&mut self, cause: DifferenceCause) {
        if let RequestMode::Serving(step) = &mut self.mode
            && let Step::Following(step) = std::mem::take(step)
        {
            let diverged = self.open_plans().diverge(*step, cause);
            self.note_diverged(diverged);
        }
    }

    /// Records the first difference of a step.
    fn note_diverged(&mut self, step: Box<Diverged>) {
        let difference = step.difference();
        self.mode = RequestMode::Serving(Step::Diverged(step));
        self.ledger.fold(op_word(Mark::Differ, StreamId(0), 0), difference.number.into());
        let (pool, stream) = (self.id.pool.0, self.id.group.first().map(|stream| stream.0));
        tracing::warn!(name: "plan.differs", target: "symmalloc", pool, stream, %difference);
    }

    /// Begins a step with this key. A heap whose pool another thread has destroyed stays closed. Returns what was released
    /// to make room for plans.
    pub(crate) fn begin_step<B: Backend>(&mut self, context: &Context<B, L>, key: u64) -> Released {
        let RequestMode::Serving(_) = self.mode else { return Released::default() };
        self.release_quarantine(context, 0);
        if self.ledger.has_history() {
            self.ledger.fold(op_word(Mark::BeginStep, StreamId(0), 0), key);
        }
        let allocations_before = self.ledger.usage().allocations_made();
        match self.plans.get_or_insert_default().begin(key, self.config.plan()) {
            Treatment::BestFit => self.begin_without_plan(context, Step::Unplanned { allocations_before }),
            Treatment::Learn => self.begin_without_plan(context, Step::Learning { allocations_before }),
            Treatment::Follow(plan) => self.begin_plan(context, plan, allocations_before),
        }
    }

    /// Begins a step that uses the memory of plans as ordinary memory.
    fn begin_without_plan(&mut self, context: &DynContext<'_, L>, step: Step) -> Released {
        self.mode = RequestMode::Serving(step);
        self.dissolve_plans(context);
        Released::default()
    }

    /// Begins a step that follows a plan.
    fn begin_plan<B: Backend>(&mut self, context: &Context<B, L>, plan: usize, allocations_before: u64) -> Released {
        let mut released = Released::default();
        if !self.acquire_plan_memory(context, &mut released) {
            let diverged = self.open_plans().give_up(allocations_before);
            self.note_diverged(diverged);
            return released;
        }
        let plans = self.plans.as_deref_mut().expect("the plans have memory");
        let (step, must_wait) = plans.follow(plan, allocations_before, &self.arena);
        self.mode = RequestMode::Serving(Step::Following(step));
        if must_wait && let Err(error) = self.wait_for_all_places(context) {
            // Other ranks may follow the plan, so the digest records that this one does not.
            self.ledger.fold(op_word(Mark::RefusedByDriver, StreamId(0), 0), 0);
            let (pool, stream) = (self.id.pool.0, self.id.group.first().map(|stream| stream.0));
            tracing::warn!(name: "plan.unordered", target: "symmalloc", pool, stream, %error);
            self.differ(DifferenceCause::Driver);
        }
        released
    }

    /// Acquires memory for the plans, unless they have it. Returns `false` if it cannot be acquired.
    fn acquire_plan_memory<B: Backend>(&mut self, context: &Context<B, L>, released: &mut Released) -> bool {
        let inputs = self.plan_inputs();
        let plans = self.plans.as_deref().expect("a plan should have been chosen when the step began");
        if plans.memory_block().is_some() {
            return true;
        }
        let prepared = plans.prepare(inputs).expect("plans are checked before they are adopted");
        let Err(shortage) = self.install(context, &prepared, released) else { return true };
        let refusal = match &*shortage {
            Shortage::Memory { cause, .. } => Refusal::from(cause),
            Shortage::Closed | Shortage::Asleep => Refusal::Segment,
            Shortage::Fence(_) => Refusal::Driver,
        };
        let size_bytes = prepared.memory_bytes();
        self.ledger.fold_refusal(refusal, prepared.streams()[0], size_bytes);
        let (pool, stream) = (self.id.pool.0, self.id.group.first().map(|stream| stream.0));
        tracing::warn!(name: "plan.refused", target: "symmalloc", pool, stream, size_bytes, cause = ?shortage);
        false
    }

    /// Orders each stream of the plans after all users of the plans' places.
    fn wait_for_all_places(&mut self, context: &DynContext<'_, L>) -> Result<(), BackendError> {
        let plans = self.plans.as_deref().expect("a heap with an open step should have plans");
        let free = plans.places().iter().filter(|slot| self.arena.block(**slot).is_free());
        for slot in free.copied().collect::<Vec<_>>() {
            for stream in plans.streams() {
                self.arena.wait_for_earlier_users(context, slot, *stream)?;
            }
        }
        Ok(())
    }

    /// Ends the step. A heap that learns may have a new plan afterward. After the first step that followed a new plan
    /// to its end, the heap releases the memory that it no longer needs (rule D5), unless an observer holds the memory
    /// or the pool has a quota. A heap whose pool another thread has destroyed stays closed.
    pub(crate) fn end_step(&mut self, context: &DynContext<'_, L>, key: u64) -> (StepReport, Released) {
        let RequestMode::Serving(step) = &mut self.mode else { return Default::default() };
        let step = std::mem::take(step);
        let allocations = self.ledger.usage().allocations_made();
        let inputs = PlanInputs { heap: self.id, config: &self.config, rules: self.arena.rules() };
        let Some(plans) = self.plans.as_deref_mut() else { return Default::default() };
        let report = plans.end(step, key, allocations, inputs);
        let is_proven = plans.take_proof();
        if self.ledger.has_history() {
            self.ledger.fold(op_word(Mark::EndStep, StreamId(0), 0), report.planned);
        }
        let releases = is_proven && !self.log.is_observed() && !self.config.has_quota();
        let released = if releases { self.trim(context, None) } else { Released::default() };
        (report, released)
    }

    fn plan_inputs(&self) -> PlanInputs<'_> {
        PlanInputs { heap: self.id, config: &self.config, rules: self.arena.rules() }
    }

    /// Prepares a plan for adoption, together with the existing plans of other keys. Changes nothing.
    pub(crate) fn prepare_plan(&self, plan: Plan) -> Result<PreparedPlans, PlanError> {
        let none = HeapPlans::default();
        self.plans.as_deref().unwrap_or(&none).prepare_with(plan, self.plan_inputs())
    }

    /// Replaces the plans with prepared ones and acquires their memory. After an error there are no plans.
    pub(crate) fn adopt<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        prepared: &PreparedPlans,
    ) -> Result<(), Box<Shortage>> {
        self.dissolve_plans(context);
        let plans = self.plans.get_or_insert_default();
        // A failure callback that made room may have begun a step.
        if let RequestMode::Serving(step) = &mut self.mode {
            plans.leave(step);
        }
        plans.set_plans(prepared.plans());
        // The released memory is not reported: only recordings need it, and an adoption ends a recording.
        let installed = self.install(context, prepared, &mut Released::default());
        if installed.is_err() {
            self.drop_plans(context);
        }
        installed
    }

    /// Drops the plans with their memory and everything that was learned.
    pub(crate) fn drop_plans(&mut self, context: &DynContext<'_, L>) {
        self.dissolve_plans(context);
        if let Some(plans) = &mut self.plans {
            plans.forget();
        }
    }

    /// Acquires memory for the known plans, which are `prepared`. If no free block is large enough, the free memory
    /// lies in pieces between live allocations. The heap then releases this memory first, stores the result in
    /// `released`, and acquires the plan memory instead.
    fn install<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        prepared: &PreparedPlans,
        released: &mut Released,
    ) -> Result<(), Box<Shortage>> {
        let (size, streams) = (prepared.size(), prepared.streams());
        let fit = self.arena.best_fit(size);
        if fit.is_none() {
            *released = self.trim(context, None);
        }
        let mapped_before = self.arena.mapped_bytes();
        let found = fit.map_or_else(|| self.acquire_memory(context, streams[0], size), Ok);
        let ready = found.and_then(|slot| {
            let waited =
                streams.iter().try_for_each(|stream| self.arena.wait_for_earlier_users(context, slot, *stream));
            waited.map(|()| slot).map_err(|error| Box::new(Shortage::Fence(error)))
        });
        if ready.is_ok() {
            self.ledger.fold(op_word(Mark::Adopt, StreamId(0), bytes(size)), prepared.digest());
        }
        if self.arena.mapped_bytes() > mapped_before {
            self.ledger.fold(op_word(Mark::Obtain, streams[0], self.arena.mapped_bytes() - mapped_before), 0);
        }
        self.fold_offsets();
        let (memory, _) = self.arena.take_front(ready?, size, BlockState::Planned);
        let plans = self.plans.as_deref_mut().expect("the heap has plans");
        plans.install(prepared, memory, &mut self.arena);
        self.arena.recycle_spent(context);
        Ok(())
    }

    /// Removes the memory of plans, if there is any. Live allocations in it become ordinary blocks, and the rest
    /// becomes free.
    pub(super) fn dissolve_plans(&mut self, context: &DynContext<'_, L>) {
        let Some(plans) = self.plans.as_deref_mut().filter(|plans| plans.memory_block().is_some()) else { return };
        self.ledger.fold(op_word(Mark::Adopt, StreamId(0), 0), 0);
        let clocks = context.clocks.lock();
        plans.dissolve(&mut self.arena, self.id.stream(), |stream| clocks.now(stream));
        drop(clocks);
        self.arena.recycle_spent(context);
    }

    /// Returns the plans in the order of their adoption.
    pub(crate) fn plans(&self) -> Vec<Arc<Plan>> {
        self.plans.as_deref().map_or_else(Vec::new, HeapPlans::plans)
    }

    /// Returns `true` if later steps depend on earlier ones, because the heap has or learns plans.
    pub(crate) fn remembers_steps(&self) -> bool {
        self.plans.as_deref().is_some_and(HeapPlans::remembers)
    }

    /// Returns the bytes of the plan memory.
    pub(super) fn plan_bytes(&self) -> u64 {
        self.plans.as_deref().map_or(0, HeapPlans::memory_bytes)
    }

    pub(super) fn step_stats(&self) -> StepStats {
        self.plans.as_deref().map_or_else(StepStats::default, HeapPlans::stats)
    }

    /// Returns the slots of all places of plans.
    pub(super) fn places(&self) -> &[Slot] {
        self.plans.as_deref().map_or(&[], HeapPlans::places)
    }

    /// Returns the block in which plans place allocations.
    pub(super) fn plan_memory(&self) -> Option<Slot> {
        self.plans.as_deref().and_then(HeapPlans::memory_block)
    }

    /// Returns the slots of places with live allocations, in offset order.
    pub(super) fn live_places(&self) -> Vec<Slot> {
        let is_live = |slot: &Slot| !self.arena.block(*slot).is_free();
        let mut live: Vec<Slot> = self.places().iter().copied().filter(is_live).collect();
        live.sort_unstable_by_key(|slot| self.arena.block(*slot).location);
        live
    }
}
