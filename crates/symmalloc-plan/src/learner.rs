//! Step learning: computes the lifetimes to plan after a step has made the same requests twice.
//!
//! ```text
//!  step k      a a f a f ...        logged: each request, and the allocation before which it is freed
//!  step k+1    a a f a f ...        logged again, along with the frees of allocations that step k left live
//!                     └──► equal requests: the longer lifetime counts
//! ```
//!
//! An allocation that one step leaves live and the next step frees is *carried*, if both steps have the same key and no
//! other step comes between them. Its lifetime extends into the next step. An allocation that lives longer than that is
//! not part of the plan and is placed by best fit. Learning depends only on the ops, so ranks that run the same ops
//! learn the same plans.

use std::collections::BTreeMap;

/// Maximum number of keys whose steps are remembered.
const KEYS_MAX: usize = 64;

/// Maximum number of allocations of a step; a longer step is not learned.
const ALLOCATIONS_MAX: usize = 1 << 24;

/// An allocation of a step: its request, and the number of the allocation before which it is freed, at most one step
/// later. The number is `None` if the allocation lives longer.
pub type Lived<R> = (R, Option<u32>);

/// A logged, live allocation.
#[derive(Clone, Copy, Debug)]
struct Logged {
    /// `true` if the allocation belongs to the open step, or to the last step if none is open; `false` if it belongs to
    /// the step before.
    is_newest: bool,
    number: u32,
}

/// The remembered steps of one heap. `R` is the type of a request. Each live allocation is identified by a number that
/// no other live allocation has.
#[derive(Debug)]
pub struct StepLearner<R> {
    /// The last step of each key, excluding the newest one.
    steps: BTreeMap<u64, Vec<Lived<R>>>,
    /// The step that is being logged, or that was logged last.
    newest: Vec<Lived<R>>,
    newest_key: u64,
    /// The key of the step before the newest one, if that step is remembered and both steps have the same key.
    before: Option<u64>,
    /// Live allocations logged in the newest step and the step before.
    live: BTreeMap<u32, Logged>,
    is_too_long: bool,
}

impl<R> Default for StepLearner<R> {
    fn default() -> Self {
        StepLearner {
            steps: BTreeMap::new(),
            newest: Vec::new(),
            newest_key: 0,
            before: None,
            live: BTreeMap::new(),
            is_too_long: false,
        }
    }
}

impl<R: Copy + Eq> StepLearner<R> {
    /// Returns `true` if no step is remembered.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.newest.is_empty()
    }

    /// Begins to log a step. `key` identifies the kind of step: only steps with the same key are compared.
    pub fn begin(&mut self, key: u64) {
        self.file();
        // If a step with a different key frees an allocation, the allocation lives too long to be planned.
        self.before = self.before.filter(|before| *before == key);
        (self.newest_key, self.is_too_long) = (key, false);
    }

    /// Stops logging until the next `begin`.
    pub fn pause(&mut self) {
        self.file();
        self.before = None;
        self.live.clear();
    }

    /// Stores the newest step as the last one of its key.
    fn file(&mut self) {
        let step = std::mem::take(&mut self.newest);
        self.live.retain(|_, logged| std::mem::take(&mut logged.is_newest));
        self.before = None;
        if !step.is_empty() && (self.steps.len() < KEYS_MAX || self.steps.contains_key(&self.newest_key)) {
            self.before = Some(self.newest_key);
            self.steps.insert(self.newest_key, step);
        }
    }

    /// Logs an allocation of the step.
    pub fn note_allocation(&mut self, request: R, allocation: u32) {
        self.is_too_long |= self.newest.len() == ALLOCATIONS_MAX;
        if !self.is_too_long {
            self.live.insert(allocation, Logged { is_newest: true, number: self.newest.len() as u32 });
            self.newest.push((request, None));
        }
    }

    /// Logs a free, in a step or between two steps. Frees of allocations that were not logged are ignored.
    pub fn note_free(&mut self, allocation: u32) {
        let Some(Logged { is_newest, number }) = self.live.remove(&allocation) else { return };
        let now = self.newest.len() as u32;
        if is_newest {
            self.newest[number as usize].1 = Some(now);
        } else if let Some(step) = self.before.and_then(|before| self.steps.get_mut(&before)) {
            // An allocation that lives for more than one step is not part of the plan.
            step[number as usize].1 = (now <= number).then_some(step.len() as u32 + now);
        }
    }

    /// Ends the step. If the last step with its key made the same requests, returns the step with the lifetimes to
    /// plan.
    pub fn end(&mut self) -> Option<Vec<Lived<R>>> {
        let before = self.steps.get(&self.newest_key)?;
        let asks = |lived: &Lived<R>| lived.0;
        if self.is_too_long || !before.iter().map(asks).eq(self.newest.iter().map(asks)) {
            return None;
        }
        let follows_at_once = self.before == Some(self.newest_key);
        let count = before.len() as u32;
        let longer = |(before, newest): (&Lived<R>, &Lived<R>)| {
            let until = match (before.1, newest.1) {
                (Some(before), Some(newest)) => Some(before.max(newest)),
                // An allocation that is still live is assumed to have the lifetime that it had in the last step.
                (Some(before), None) if before > count || before == count && follows_at_once => Some(before),
                _ => None,
            };
            (before.0, until)
        };
        Some(before.iter().zip(&self.newest).map(longer).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a step that requests 1, 2 and 3, frees 1 after 2, and frees the previous step's 3 after its first request.
    fn step(learner: &mut StepLearner<u8>, key: u64, number: u32) -> Option<Vec<Lived<u8>>> {
        learner.begin(key);
        learner.note_allocation(1, 10 * number);
        learner.note_free(10 * (number.wrapping_sub(1)) + 2);
        learner.note_allocation(2, 10 * number + 1);
        learner.note_free(10 * number);
        learner.note_allocation(3, 10 * number + 2);
        learner.end()
    }

    #[test]
    fn a_step_that_occurs_twice_is_learned_with_its_carried_over_allocations() {
        let mut learner = StepLearner::default();
        assert_eq!(step(&mut learner, 0, 1), None);
        // The second request is never freed.
        assert_eq!(step(&mut learner, 0, 2), Some(vec![(1, Some(2)), (2, None), (3, Some(4))]));
    }

    #[test]
    fn an_allocation_freed_by_a_step_of_another_key_has_no_learned_end() {
        let mut learner = StepLearner::default();
        step(&mut learner, 0, 1);
        assert_eq!(step(&mut learner, 1, 2), None);
        assert_eq!(step(&mut learner, 0, 3), Some(vec![(1, Some(2)), (2, None), (3, None)]));
    }

    #[test]
    fn a_step_with_different_requests_is_not_learned() {
        let mut learner = StepLearner::default();
        step(&mut learner, 0, 1);
        learner.begin(0);
        learner.note_allocation(9, 20);
        assert_eq!(learner.end(), None);
        assert_eq!(step(&mut learner, 0, 3), None);
        assert!(step(&mut learner, 0, 4).is_some());
    }

    #[test]
    fn the_longer_of_two_lifetimes_counts() {
        let mut learner = StepLearner::default();
        for frees_early in [true, false] {
            learner.begin(0);
            learner.note_allocation(1, 1);
            if frees_early {
                learner.note_free(1);
            }
            learner.note_allocation(2, 2);
            learner.note_free(1);
            learner.note_free(2);
            let learned = learner.end();
            assert!(frees_early || learned == Some(vec![(1, Some(2)), (2, Some(2))]));
        }
    }

    #[test]
    fn frees_during_a_pause_of_the_log_are_not_learned() {
        let mut learner = StepLearner::default();
        step(&mut learner, 0, 1);
        learner.pause();
        learner.note_free(12);
        assert_eq!(step(&mut learner, 0, 3), Some(vec![(1, Some(2)), (2, None), (3, None)]));
    }
}
