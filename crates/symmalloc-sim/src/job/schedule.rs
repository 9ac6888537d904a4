//! Schedules: the order in which one rank carries the steps between two syncs out.
//!
//! ```text
//! ready ──pick one──► carried out ──► those that waited for it alone become ready
//! ```
//! Every pick is drawn from (seed, rank, stretch): a rank's schedule is a random one of the orders that
//! [`JobOrder`](crate::job::order::JobOrder) allows, and the same one in every run.

use crate::device::SplitMix64;
use crate::job::order::JobOrder;

/// How a rank's threads are scheduled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Schedule {
    /// As the program lists the steps.
    #[default]
    JobProgram,
    /// Any ready step.
    Uniform,
    /// The ready step that the program lists last: as far from the program's order as it goes.
    Latest,
    /// The step that became ready last, mostly: long runs of one thread.
    Runs,
}

impl Schedule {
    pub(crate) const ALL: [Schedule; 4] = [Schedule::JobProgram, Schedule::Uniform, Schedule::Latest, Schedule::Runs];

    /// The name in a story.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Schedule::JobProgram => "program",
            Schedule::Uniform => "uniform",
            Schedule::Latest => "latest",
            Schedule::Runs => "runs",
        }
    }
}

/// What a schedule is worked out in; used again for the next one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scheduler {
    waits_for: Vec<u32>,
    ready: Vec<u32>,
    order: Vec<u32>,
}

impl Scheduler {
    /// The steps in the order of this rank.
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
            for later in order.let_go(step) {
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
