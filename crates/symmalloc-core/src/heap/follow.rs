//! Steps: serves requests where plans place them. A part of [`Heap`].
//!
//! [`HeapPlans`] owns the plans and decides where a request goes; its module describes how a plan is followed. The heap
//! adds what needs the driver or the ledger: it acquires the plan memory, orders streams after earlier users, and
//! records differences.

use super::trim::Released;
use super::{Context, DynContext, Heap, RequestMode, Shortage};
use crate::blocks::table::{BlockState, Slot};
use crate::config::op::Refusal;
use crate::history::digest::{Mark, op_word};
use crate::plans::error::PlanError;
use crate::plans::heap_plans::{Answer, HeapPlans, StepMode};
use crate::plans::plan::Plan;
use crate::plans::prepared::{PlanInputs, PreparedPlans};
use crate::plans::report::{DifferenceCause, StepReport, StepStats};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError};
use crate::types::handle::Handle;
use crate::types::ids::StreamId;
use crate::types::units::bytes;
use std::sync::Arc;

impl<L: Lock> Heap<L> {
    /// Allocates while the requests of a step are compared with a plan, or logged.
    #[inline(always)]
    pub(super) fn allocate_in_step<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Handle, Box<Shortage>> {
        let plans = self.plans.as_deref_mut().expect("a step is open");
        match plans.next_place(self.arena.table(), stream, requested) {
            Some(slot) => Ok(self.allocate_planned(slot, stream, requested)),
            None => self.allocate_in_step_slow(context, stream, requested),
        }
    }

    /// Turns a free place, whose users the stream waits for, into an allocation.
    #[inline(always)]
    fn allocate_planned(&mut self, slot: Slot, stream: StreamId, requested: u64) -> Handle {
        let serial = self.ledger.next_serial();
        self.arena.take_place(slot, stream, requested, serial);
        self.note_allocation(slot, serial, stream, requested)
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
    ) -> Result<Handle, Box<Shortage>> {
        let plans = self.plans.as_deref_mut().expect("a step is open");
        match plans.answer(self.arena.table(), stream, requested) {
            Answer::Place { slot, waits } => {
                for slot in waits {
                    self.arena.wait_for_earlier_users(context, slot, stream).map_err(Shortage::Fence)?;
                }
                self.arena.drop_fences(context, slot);
                self.open_plans().note_served();
                Ok(self.allocate_planned(slot, stream, requested))
            }
            Answer::Unplaced => {
                let handle = self.allocate_anywhere(context, stream, requested)?;
                self.open_plans().note_served();
                Ok(handle)
            }
            Answer::Log => {
                let handle = self.allocate_anywhere(context, stream, requested)?;
                self.open_plans().note_logged((stream, requested), handle.slot());
                Ok(handle)
            }
            Answer::Differs(cause) => {
                self.differ(cause);
                self.allocate_anywhere(context, stream, requested)
            }
        }
    }

    /// Returns the plans of a heap in a step.
    #[inline(always)]
    fn open_plans(&mut self) -> &mut HeapPlans {
        self.plans.as_deref_mut().expect("a step is open")
    }

    /// Records the first difference. The rest of the step is placed the ordinary way.
    #[cold]
    fn differ(&mut self, cause: DifferenceCause) {
        self.mode = RequestMode::Ordinary;
        let difference = self.open_plans().differ(cause);
        self.ledger.fold(op_word(Mark::Differ, StreamId(0), 0), difference.number.into());
        let (pool, stream) = (self.identity.pool.0, self.identity.stream.map(|stream| stream.0));
        tracing::warn!(name: "plan.differs", target: "symmalloc", pool, stream, %difference);
    }

    /// Begins a step with this key. A heap whose pool another thread has destroyed stays closed.
    pub(crate) fn begin_step<B: Backend>(&mut self, context: &Context<B, L>, key: u64) {
        if matches!(self.mode, RequestMode::Closed) {
            return;
        }
        if self.ledger.has_history() {
            self.ledger.fold(op_word(Mark::BeginStep, StreamId(0), 0), key);
        }
        let allocations = self.ledger.usage().allocations_made();
        let step = self.plans.get_or_insert_default().begin(key, self.config.plan(), allocations);
        self.mode = if step == StepMode::Ordinary { RequestMode::Ordinary } else { RequestMode::Step };
        if step != StepMode::Follow {
            // The step uses the memory of plans as ordinary memory.
            return self.dissolve_plans(context);
        }
        if let Err(cause) = self.place_plans(context) {
            return self.differ(cause);
        }
        let plans = self.plans.as_deref_mut().expect("a step is open");
        if plans.follow(self.arena.table())
            && let Err(error) = self.wait_for_all_places(context)
        {
            // Other ranks may follow the plan, so the digest records that this one does not.
            self.ledger.fold(op_word(Mark::RefusedByDriver, StreamId(0), 0), 0);
            let (pool, stream) = (self.identity.pool.0, self.identity.stream.map(|stream| stream.0));
            tracing::warn!(name: "plan.unordered", target: "symmalloc", pool, stream, %error);
            self.differ(DifferenceCause::Driver);
        }
    }

    /// Acquires memory for the plans, unless they have it. Without memory, no plan is followed any more.
    fn place_plans<B: Backend>(&mut self, context: &Context<B, L>) -> Result<(), DifferenceCause> {
        let inputs = self.plan_inputs();
        let plans = self.plans.as_deref().expect("a step is open");
        if plans.memory_block().is_some() {
            return Ok(());
        }
        let prepared = plans.prepare(inputs).expect("plans are checked before they are adopted");
        self.install(context, &prepared).map_err(|shortage| {
            let refusal = match &*shortage {
                Shortage::Memory { cause, .. } => Refusal::from(cause),
                Shortage::Closed | Shortage::Asleep => Refusal::Segment,
                Shortage::Fence(_) => Refusal::Driver,
            };
            let size_bytes = prepared.memory_bytes();
            self.ledger.fold_refusal(refusal, prepared.streams()[0], size_bytes);
            let (pool, stream) = (self.identity.pool.0, self.identity.stream.map(|stream| stream.0));
            tracing::warn!(name: "plan.refused", target: "symmalloc", pool, stream, size_bytes, cause = ?shortage);
            self.open_plans().give_up();
            DifferenceCause::Memory
        })
    }

    /// Orders each stream of the plans after all users of their places.
    fn wait_for_all_places(&mut self, context: &DynContext<'_, L>) -> Result<(), BackendError> {
        let plans = self.plans.as_deref().expect("a step is open");
        let free = plans.places().iter().filter(|slot| self.arena.block(**slot).is_free());
        for slot in free.copied().collect::<Vec<_>>() {
            for stream in plans.streams() {
                self.arena.wait_for_earlier_users(context, slot, *stream)?;
            }
        }
        Ok(())
    }

    /// Ends the step. A heap that learns may have a new plan afterwards. At the first step that followed new plans to its
    /// end, the heap releases the memory that it no longer needs (rule D5), unless an observer holds the memory or the
    /// pool has a quota. A heap whose pool another thread has destroyed stays closed.
    pub(crate) fn end_step(&mut self, context: &DynContext<'_, L>, key: u64) -> (StepReport, Released) {
        if matches!(self.mode, RequestMode::Closed) {
            return Default::default();
        }
        let allocations = self.ledger.usage().allocations_made();
        let (pool, stream) = (self.identity.pool, self.identity.stream);
        let inputs = PlanInputs { pool, stream, config: &self.config, rules: self.arena.rules() };
        let Some(plans) = self.plans.as_deref_mut() else { return Default::default() };
        let report = plans.end(key, allocations, inputs);
        let is_proven = plans.take_proof();
        self.mode = RequestMode::Ordinary;
        if self.ledger.has_history() {
            self.ledger.fold(op_word(Mark::EndStep, StreamId(0), 0), report.planned);
        }
        let releases = is_proven && !self.log.is_observed() && !self.config.has_quota();
        let released = if releases { self.trim(context, None) } else { Released::default() };
        (report, released)
    }

    fn plan_inputs(&self) -> PlanInputs<'_> {
        let (pool, stream) = (self.identity.pool, self.identity.stream);
        PlanInputs { pool, stream, config: &self.config, rules: self.arena.rules() }
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
        self.plans.get_or_insert_default().set_plans(prepared.plans());
        let installed = self.install(context, prepared);
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

    /// Acquires memory for the known plans, which are `prepared`. If no free block is large enough, free memory lies in
    /// pieces between live allocations. It is then released first, and the memory of the plans replaces it.
    fn install<B: Backend>(&mut self, context: &Context<B, L>, prepared: &PreparedPlans) -> Result<(), Box<Shortage>> {
        let (size, streams) = (prepared.size(), prepared.streams());
        let fit = self.arena.best_fit(size);
        if fit.is_none() {
            let _kept_by_the_driver = self.trim(context, None);
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
        let memory = self.arena.take_front(ready?, size, BlockState::Planned);
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
        plans.dissolve(&mut self.arena, self.identity.stream, |stream| clocks.now(stream));
        drop(clocks);
        self.arena.recycle_spent(context);
    }

    /// Returns the plans in the order of their adoption.
    pub(crate) fn plans(&self) -> Vec<Arc<Plan>> {
        self.plans.as_deref().map_or_else(Vec::new, HeapPlans::plans)
    }

    /// Returns `true` if later steps depend on earlier ones: the heap has plans or learns some.
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
