//! The plans of a heap, the memory in which they place allocations, and the step that follows a plan.
//!
//! While a step follows a plan, each request is compared with the plan's next request. If the two are equal, and no
//! live allocation overlaps the planned place, the allocation takes this place, without a search, a split or a later
//! merge. At the first request that differs, the heap stops following the plan: the rest of the step is placed by best
//! fit, next to the plan memory.
//!
//! [`Step`] is the state of a step.
//!
//! All plans of a heap share the *plan memory*, which is one block of the [`Arena`]. It exists from the adoption of a
//! plan, or from the first step that follows a learned plan, until the next step that follows no plan. That step uses
//! it as ordinary memory. While the plan memory exists, each place has a slot in the block table. Unlike a block, a
//! place is in no segment's ring and has no neighbors.
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
//! Frees are not compared with the plan. A place that is freed too early does no harm, and a place that is not freed in
//! time counts as a difference.
//!
//! A stream that takes a place waits for the last users of all overlapping places. A stream that has waited for a user
//! once need not wait again. As long as each step follows the same plan as the step before it, the plan knows the last
//! user of each offset and the streams that have waited for this user ([`Schedule`]). After any other step, each stream
//! of the plan waits for the users of all places before the first request, and each request also checks the allocations
//! that are still live from before the step.
//!
//! The heap acquires the plan memory, waits for users, and records what happened. It asks this component where to place
//! a request, and reports steps and frees to it. Nothing here calls the driver.

use super::error::PlanError;
use super::plan::{Plan, PlanInputs, PreparedPlans, StepAllocation};
use super::report::{DifferenceCause, StepDifference, StepReport, StepStats};
use super::step::{Diverged, Following, PlanCursor, Step};
use crate::arena::{Arena, fresh};
use crate::blocks::table::{Block, BlockState, Slot};
use crate::config::PlanPolicy;
use crate::history::digest::{Mark, op_word};
use crate::streams::clocks::Tick;
use crate::streams::fences::{Fence, Fences};
use crate::types::ids::StreamId;
use crate::types::units::bytes;
use smallvec::SmallVec;
use std::sync::Arc;
use symmalloc_plan::{Lived, Place, Schedule, SearchBudget, StepLearner, first_uses};

/// A request: a stream and the requested bytes.
type Request = (StreamId, u64);

/// Number of consecutive steps with one key that must differ from their plan before a heap learns this step again.
const DIFFERENCES_MAX: u32 = 2;

/// Returns the budget of the search for a learned plan. It is proportional to the number of planned allocations: a few
/// seconds for 50,000 of them.
fn learning_budget(allocations: usize) -> SearchBudget {
    SearchBudget(2_000 * allocations as u64)
}

/// The treatment of a step, which is chosen when it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// Places requests by best fit.
    BestFit,
    /// Follows the plan with this index.
    Follow(usize),
    /// Logs requests, to learn a plan.
    Learn,
}

/// The placement of a request in a step that follows a plan.
#[derive(Debug)]
pub(crate) enum Answer {
    /// At this place. The stream must first wait for the earlier users of the places `waits`, which are free.
    Place { slot: Slot, waits: SmallVec<[Slot; 4]> },
    /// By best fit, as the plan expects. The step continues to follow the plan.
    Unplaced,
    /// By best fit, like the rest of the step: the request differs from the plan.
    Differs(DifferenceCause),
}

/// A known plan.
#[derive(Debug)]
struct Known {
    plan: Arc<Plan>,
    /// Number of consecutive steps with its key that differed from it.
    differences: u32,
}

/// A plan in the plan memory.
#[derive(Debug)]
struct Installed {
    /// The cursor; empty while a step follows the plan.
    cursor: PlanCursor,
    /// Slots of the places of allocations that live into the next step, ascending.
    carried_over: Vec<Slot>,
}

/// The memory in which plans place allocations.
#[derive(Debug)]
struct PlanMemory {
    /// Its block, which is in the segment's ring, in the state [`BlockState::Planned`].
    block: Slot,
    size_bytes: u64,
    /// The slots of all places.
    places: Vec<Slot>,
    /// The streams for which plans allocate, ascending.
    streams: SmallVec<[StreamId; 2]>,
}

/// The plans of one heap. Between two calls, these invariants hold:
///
/// - Places lie in the plan memory, and live ones do not overlap (I12).
/// - `installed` has one entry per plan while there is plan memory, and none otherwise.
/// - `last_whole` is `Some` only between a step that followed a plan to its end and the next step.
#[derive(Debug, Default)]
pub(crate) struct HeapPlans {
    plans: Vec<Known>,
    memory: Option<PlanMemory>,
    /// The plans in the plan memory, in the order of `plans`.
    installed: Vec<Installed>,
    /// The plan that the last step followed to its end. A plan knows the last user of each offset only after such a
    /// step.
    last_whole: Option<usize>,
    learner: StepLearner<Request>,
    /// `true` if there was no memory for the plans, or a learned step could not be planned: plans are no longer followed
    /// or learned.
    has_given_up: bool,
    /// `true` from a change of the plans until a step has followed one of them to its end.
    is_unproven: bool,
    stats: StepStats,
}

impl HeapPlans {
    /// Returns the placement of the next request of a step that follows a plan.
    #[inline]
    pub(crate) fn answer(&self, step: &Following, arena: &Arena, stream: StreamId, requested: u64) -> Answer {
        let Some(checks) = step.cursor.checks_of(op_word(Mark::Allocate, stream, requested)) else {
            return Answer::Differs(self.different_request(step, (stream, requested)));
        };
        let Some(own) = checks.last().copied() else { return Answer::Unplaced };
        // Also check overlapping blocks that were unexpectedly live when the step began.
        let (offset, end) = (arena.block(own).offset(), arena.block(own).end());
        let overlaps = |block: &Block| block.offset() < end && offset < block.end();
        let mut waits: SmallVec<[Slot; 4]> = SmallVec::new();
        for slot in checks.iter().chain(step.unexpected_live.iter().filter(|slot| overlaps(arena.block(**slot)))) {
            if !arena.block(*slot).is_ready_for(stream) {
                waits.push(*slot);
            }
        }
        match waits.iter().find(|slot| !arena.block(**slot).is_free()) {
            Some(taken) => {
                let memory = self.memory_block().map_or(0, |memory| arena.block(memory).offset());
                let offset_bytes = bytes(arena.block(*taken).offset() - memory);
                Answer::Differs(DifferenceCause::Occupied { offset_bytes })
            }
            None => Answer::Place { slot: own, waits },
        }
    }

    /// Logs an allocation of the step.
    pub(crate) fn note_logged(&mut self, request: Request, slot: Slot) {
        self.learner.note_allocation(request, slot);
    }

    /// Logs the free of an allocation outside of the plan memory.
    #[inline(never)]
    pub(crate) fn note_free(&mut self, slot: Slot) {
        self.learner.note_free(slot);
    }

    /// Returns the difference between a request and the plan's expectation for the next allocation.
    fn different_request(&self, step: &Following, requested: Request) -> DifferenceCause {
        let planned = self.plans[step.plan].plan.allocations().get(step.cursor.number() as usize);
        let planned = planned.map(|planned| (planned.wanted.stream, planned.wanted.requested_bytes));
        DifferenceCause::Request { planned, requested }
    }

    /// Begins a step, and chooses its treatment.
    pub(crate) fn begin(&mut self, key: u64, policy: PlanPolicy) -> Treatment {
        let plan = self.plans.iter().position(|known| known.plan.key() == key);
        let is_good = plan.is_some_and(|plan| self.plans[plan].differences < DIFFERENCES_MAX);
        if policy == PlanPolicy::Learn && !is_good && !self.has_given_up {
            self.learner.begin(key);
            return Treatment::Learn;
        }
        self.learner.pause();
        plan.filter(|_| !self.has_given_up).map_or(Treatment::BestFit, Treatment::Follow)
    }

    /// Begins to follow a plan in the plan memory, which exists. Returns the step, and `true` if each stream must first
    /// be ordered after the earlier users of all places, because the previous step did not follow the same plan.
    pub(crate) fn follow(&mut self, plan: usize, allocations_before: u64, arena: &Arena) -> (Box<Following>, bool) {
        let memory = self.memory.as_ref().expect("the plans should have memory");
        let installed = &mut self.installed[plan];
        let is_unexpected =
            |slot: &&Slot| !arena.block(**slot).is_free() && installed.carried_over.binary_search(slot).is_err();
        let unexpected_live = memory.places.iter().filter(is_unexpected).copied().collect();
        let cursor = std::mem::take(&mut installed.cursor);
        let must_wait = self.last_whole.take() != Some(plan);
        (Box::new(Following { plan, cursor, unexpected_live, allocations_before }), must_wait)
    }

    /// Stops following or learning a plan in an open step, because other plans replace the current ones.
    pub(crate) fn leave(&mut self, step: &mut Step) {
        match *step {
            Step::Following(ref following) => {
                *step = Step::Unplanned { allocations_before: following.allocations_before }
            }
            Step::Learning { allocations_before } => {
                self.learner.pause();
                *step = Step::Unplanned { allocations_before };
            }
            Step::None | Step::Unplanned { .. } | Step::Diverged(_) => {}
        }
    }

    /// Stops following the plan of a step, which differs at the next allocation.
    pub(crate) fn diverge(&mut self, step: Following, cause: DifferenceCause) -> Box<Diverged> {
        let difference = StepDifference { number: step.cursor.number(), cause };
        let known = &mut self.plans[step.plan];
        known.differences = known.differences.saturating_add(1);
        let planned = step.cursor.planned();
        self.installed[step.plan].cursor = step.cursor.rewound();
        Box::new(Diverged { difference, planned, allocations_before: step.allocations_before })
    }

    /// Stops following and learning plans, because there is no memory for them. Returns the state of the step.
    pub(crate) fn give_up(&mut self, allocations_before: u64) -> Box<Diverged> {
        self.has_given_up = true;
        let difference = StepDifference { number: 0, cause: DifferenceCause::Memory };
        Box::new(Diverged { difference, planned: 0, allocations_before })
    }

    /// Ends the step. A heap that learns may have new plans afterward. Returns the report.
    pub(crate) fn end(&mut self, step: Step, key: u64, allocations: u64, inputs: PlanInputs<'_>) -> StepReport {
        let is_learning = matches!(step, Step::Learning { .. });
        let mut is_whole = false;
        let (allocations_before, planned, difference) = match step {
            Step::None => return StepReport::default(),
            Step::Unplanned { allocations_before } | Step::Learning { allocations_before } => {
                (allocations_before, 0, None)
            }
            Step::Following(step) if step.cursor.is_at_end() => {
                is_whole = true;
                self.last_whole = Some(step.plan);
                self.plans[step.plan].differences = 0;
                let planned = step.cursor.planned();
                self.installed[step.plan].cursor = step.cursor.rewound();
                (step.allocations_before, planned, None)
            }
            Step::Following(step) => self.diverge(*step, DifferenceCause::Ended).into_report(),
            Step::Diverged(step) => step.into_report(),
        };
        let report = StepReport {
            allocations: allocations - allocations_before,
            planned,
            difference,
            plan_bytes: self.memory_bytes(),
        };
        self.stats.steps += 1;
        self.stats.followed += u64::from(is_whole);
        self.stats.allocations += report.allocations;
        self.stats.planned += report.planned;
        let learned = if is_learning { self.learner.end() } else { None };
        if let Some(learned) = learned.filter(|learned| !learned.is_empty()) {
            self.plan_step(key, learned, inputs);
        }
        report
    }

    /// Plans a step that has occurred twice. The next such step follows the plan.
    fn plan_step(&mut self, key: u64, learned: Vec<Lived<Request>>, inputs: PlanInputs<'_>) {
        let allocation = |((stream, requested_bytes), until)| StepAllocation { stream, requested_bytes, until };
        let wanted = learned.into_iter().map(allocation).collect();
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
        let granularity_bytes = bytes(inputs.rules.granule);
        let solve = |(key, wanted): (u64, Vec<StepAllocation>)| {
            let same = known.iter().find(|plan| plan.key() == key && wanted_of(plan) == wanted);
            let budget = learning_budget(wanted.len());
            let solve =
                || Plan::solve(inputs.config, granularity_bytes, inputs.heap.group, key, &wanted, budget).map(Arc::new);
            same.map_or_else(solve, |same| Ok(Arc::clone(same)))
        };
        let plans = steps.into_iter().map(solve).collect::<Result<_, _>>();
        let prepared = plans.and_then(|plans| PreparedPlans::new(plans, inputs));
        let (pool, stream) = (inputs.heap.pool.0, inputs.heap.group.first().map(|stream| stream.0));
        match prepared {
            Ok(prepared) => {
                let plan_bytes = prepared.memory_bytes();
                tracing::info!(name: "plan.learned", target: "symmalloc", pool, stream, key, plan_bytes);
                self.set_plans(prepared.plans());
            }
            Err(error) => {
                tracing::warn!(name: "plan.failed", target: "symmalloc", pool, stream, key, %error);
                self.has_given_up = true;
            }
        }
    }

    /// Prepares the known plans.
    pub(crate) fn prepare(&self, inputs: PlanInputs<'_>) -> Result<PreparedPlans, PlanError> {
        PreparedPlans::new(self.plans(), inputs)
    }

    /// Prepares a plan together with the known plans of other keys. Changes nothing.
    pub(crate) fn prepare_with(&self, plan: Plan, inputs: PlanInputs<'_>) -> Result<PreparedPlans, PlanError> {
        let mut plans = self.plans();
        plans.retain(|other| other.key() != plan.key());
        plans.push(Arc::new(plan));
        PreparedPlans::new(plans, inputs)
    }

    /// Returns `true` once after a change of the plans: at the end of the first step that followed a plan to its end.
    pub(crate) fn take_proof(&mut self) -> bool {
        let is_proven = self.is_unproven && self.last_whole.is_some();
        self.is_unproven &= !is_proven;
        is_proven
    }

    /// Returns `true` if later steps depend on known plans or on earlier, logged steps.
    pub(crate) fn remembers(&self) -> bool {
        self.has_given_up || !self.plans.is_empty() || !self.learner.is_empty()
    }

    /// Forgets all earlier steps. There must be no plan memory.
    pub(crate) fn forget(&mut self) {
        self.set_plans(&[]);
        self.learner = StepLearner::default();
    }

    /// Returns the plans in the order of their adoption.
    pub(crate) fn plans(&self) -> Vec<Arc<Plan>> {
        self.plans.iter().map(|known| Arc::clone(&known.plan)).collect()
    }

    /// Replaces the plans. There must be no plan memory.
    pub(crate) fn set_plans(&mut self, plans: &[Arc<Plan>]) {
        assert!(self.memory.is_none(), "plans must not change while the plan memory exists");
        self.plans = plans.iter().map(|plan| Known { plan: Arc::clone(plan), differences: 0 }).collect();
        self.stats.learned += u64::from(!self.plans.is_empty());
        (self.last_whole, self.has_given_up) = (None, false);
        self.is_unproven = !self.plans.is_empty();
    }

    /// Installs the known plans, which are `prepared`, in a block that all their streams have waited for.
    pub(crate) fn install(&mut self, prepared: &PreparedPlans, block: Slot, arena: &mut Arena) {
        let places: Vec<Place> = prepared.schedules().iter().flat_map(Schedule::places).copied().collect();
        // The slot of each place of each schedule. Schedules share the slots of equal places.
        let mut slots: Vec<Slot> = Vec::with_capacity(places.len());
        let mut distinct: Vec<(Place, Slot)> = Vec::with_capacity(places.len());
        for (place, first) in places.iter().zip(first_uses(&places)) {
            let known = slots.get(first).copied();
            slots.push(known.unwrap_or_else(|| {
                let slot = arena.add_place(block, place.offset, place.size, prepared.streams()[0]);
                distinct.push((*place, slot));
                slot
            }));
        }
        distinct.sort_unstable_by_key(|(place, _)| *place);
        let mut slots = &slots[..];
        for (known, schedule) in self.plans.iter().zip(prepared.schedules()) {
            let (own, others) = slots.split_at(schedule.places().len());
            slots = others;
            let slot_of = |place: &u32| own[*place as usize];
            let mut carried_over: Vec<Slot> = schedule.carried().iter().map(slot_of).collect();
            carried_over.sort_unstable();
            self.installed.push(Installed { cursor: PlanCursor::new(&known.plan, schedule, slot_of), carried_over });
        }
        self.memory = Some(PlanMemory {
            block,
            size_bytes: prepared.memory_bytes(),
            places: distinct.into_iter().map(|(_, slot)| slot).collect(),
            streams: prepared.streams().into(),
        });
        self.stats.placed += 1;
    }

    /// Removes the plan memory, which exists. Live allocations in it become ordinary blocks, and the rest becomes free.
    /// `now` returns the current tick of a stream, and `owner` is the stream of the heap.
    pub(crate) fn dissolve(&mut self, arena: &mut Arena, owner: Option<StreamId>, now: impl Fn(StreamId) -> Tick) {
        let memory = self.memory.take().expect("the plans should have memory");
        self.installed.clear();
        self.last_whole = None;
        let free = memory.free_state(arena, owner, now);
        arena.remove_places(memory.block, &memory.places, free);
    }

    /// Returns the slots of all places.
    pub(crate) fn places(&self) -> &[Slot] {
        self.memory.as_ref().map_or(&[], |memory| &memory.places)
    }

    /// Returns the streams for which the plans in the plan memory allocate, ascending.
    pub(crate) fn streams(&self) -> &[StreamId] {
        self.memory.as_ref().map_or(&[], |memory| &memory.streams)
    }

    /// Returns the block of the plan memory.
    pub(crate) fn memory_block(&self) -> Option<Slot> {
        self.memory.as_ref().map(|memory| memory.block)
    }

    /// Returns the bytes of the plan memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.size_bytes)
    }

    pub(crate) fn stats(&self) -> StepStats {
        StepStats { plans: self.plans.len() as u64, plan_bytes: self.memory_bytes(), ..self.stats }
    }
}

impl PlanMemory {
    /// Returns the state and fences of the memory of the free places. The next user of this memory waits for all users
    /// of the places so far. It need not wait for users from before the plans, because each stream of the plans has
    /// already waited for them. A wait for any of these streams therefore covers those users.
    fn free_state(
        &self,
        arena: &Arena,
        owner: Option<StreamId>,
        now: impl Fn(StreamId) -> Tick,
    ) -> (BlockState, Fences) {
        let mut users: SmallVec<[StreamId; 4]> = SmallVec::new();
        for slot in self.places.iter().filter(|slot| arena.block(**slot).is_free()) {
            users.extend(arena.fences_of(*slot).iter().map(|fence| fence.stream));
            users.extend(match arena.block(*slot).state {
                BlockState::Free { stream, since } if since > 0 => Some(stream),
                _ => None,
            });
        }
        users.sort_unstable();
        users.dedup();
        let state = match owner {
            Some(own) => fresh(own),
            None => {
                let stream = users.pop().unwrap_or(self.streams[0]);
                BlockState::Free { stream, since: now(stream) }
            }
        };
        let fence = |stream| Fence { stream, tick: now(stream), event: None };
        (state, users.into_iter().map(fence).collect())
    }
}

#[cfg(test)]
mod tests;
