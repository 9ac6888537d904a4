//! Schedules: the orders in which ranks run the steps between two syncs.
//!
//! ```text
//! ready ──pick one──► run ──► steps that waited for this one only become ready
//! ```
//! Every pick is drawn from (seed, rank, stretch). A rank's schedule is therefore one of the orders that
//! [`JobOrder`](crate::job::order::JobOrder) allows, chosen at random, and is the same in every run.

use crate::device::SplitMix64;
use crate::job::order::JobOrder;

/// The order in which a rank runs ready steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Schedule {
    /// The order of the program.
    #[default]
    JobProgram,
    /// Any ready step.
    Uniform,
    /// The ready step that is last in the program. This deviates most from program order.
    Latest,
    /// Usually the step that became ready last. This gives long runs of steps of one thread.
    Runs,
}

impl Schedule {
    pub(crate) const ALL: [Schedule; 4] = [Schedule::JobProgram, Schedule::Uniform, Schedule::Latest, Schedule::Runs];

    /// Returns the name that stories use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Schedule::JobProgram => "program",
            Schedule::Uniform => "uniform",
            Schedule::Latest => "latest",
            Schedule::Runs => "runs",
        }
    }
}

/// Buffers for computing schedules, reused for each schedule.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scheduler {
    waits_for: Vec<u32>,
    ready: Vec<u32>,
    order: Vec<u32>,
}

impl Scheduler {
    /// Returns the steps in the order in which this rank runs them.
    pub(crate) fn schedule(&mut self, order: &JobOrder, style: Schedule, mut random: SplitMix64) -> &[u32] {
        self.order.clear();
        if style == Schedule::JobProgram {
            self.order.extend(0..order.len() as u32);
            return &self.order;
        }
        self.waits_for.clone_from(&order.waits_for);
        self.ready.clear();
        self.ready.extend((0..order.len() as u32).filter(|step| order.waits_for[*step as usize] == 0));
        while !self.ready.is_empty() {
            let pick = self.pick(style, &mut random);
            let step = self.ready.swap_remove(pick);
            self.order.push(step);
            for later in order.successors(step) {
                let waits_for = &mut self.waits_for[*later as usize];
                *waits_for -= 1;
                if *waits_for == 0 {
                    self.ready.push(*later);
                }
            }
        }
        assert_eq!(self.order.len(), order.len(), "the order has a cycle");
        &self.order
    }

    fn pick(&self, style: Schedule, random: &mut SplitMix64) -> usize {
        let last = self.ready.len() - 1;
        match style {
            Schedule::Latest => (0..self.ready.len()).max_by_key(|index| self.ready[*index]).unwrap_or(last),
            Schedule::Runs if random.below(8) > 0 => last,
            _ => random.below(self.ready.len() as u64) as usize,
        }
    }
}
