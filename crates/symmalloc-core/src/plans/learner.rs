//! Learning a plan: steps of one key that ask for the same twice are planned.
//!
//! ```text
//!  step k      a a f a f ...        logged: what is asked for, and before which allocation it is free
//!  step k+1    a a f a f ...        logged again, and with it when what step k left alive is freed
//!                     └──► alike: what was alive longer counts
//! ```
//!
//! What a step leaves alive, and a step of the same key that follows at once frees, is *carried*: it lives in the next step up to
//! there. What lives longer is no part of the step, and is placed the ordinary way. All of it follows from the ops.

use super::plan::{ALLOCATIONS_MAX, StepAllocation};
use crate::blocks::table::Slot;
use crate::history::names::{SlotMap, slot_map};
use crate::types::ids::StreamId;
use std::collections::BTreeMap;
use std::fmt;

/// Keys whose steps are remembered at a time.
const KEYS_MAX: usize = 64;

/// An allocation that was logged and is live.
#[derive(Clone, Copy)]
struct Logged {
    /// Of the present step, or the last one while none is open; else of the one before.
    is_newest: bool,
    number: u32,
}

/// The steps of one heap, as far as they are remembered.
pub(crate) struct Learner {
    /// The last step of each key, without the newest one.
    steps: BTreeMap<u64, Vec<StepAllocation>>,
    /// The step that is logged now, or was last.
    newest: Vec<StepAllocation>,
    newest_key: u64,
    /// The key of the step before the newest one, if that is remembered.
    before: Option<u64>,
    /// By slot: what was logged in these two steps and is live.
    live: SlotMap<Slot, Logged>,
    is_too_long: bool,
}

impl Default for Learner {
    fn default() -> Self {
        Learner {
            steps: BTreeMap::new(),
            newest: Vec::new(),
            newest_key: 0,
            before: None,
            live: slot_map(),
            is_too_long: false,
        }
    }
}

impl fmt::Debug for Learner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Learner({} steps, {} allocations)", self.steps.len(), self.newest.len())
    }
}

impl Learner {
    /// A step begins that is logged.
    pub(crate) fn begin(&mut self, key: u64) {
        self.file();
        (self.newest_key, self.is_too_long) = (key, false);
    }

    /// From now on nothing is logged, until the next step that is.
    pub(crate) fn pause(&mut self) {
        self.file();
        self.before = None;
        self.live.clear();
    }

    /// The newest step becomes the last one of its key.
    fn file(&mut self) {
        let step = std::mem::take(&mut self.newest);
        self.live.retain(|_, logged| std::mem::take(&mut logged.is_newest));
        self.before = None;
        if !step.is_empty() && (self.steps.len() < KEYS_MAX || self.steps.contains_key(&self.newest_key)) {
            self.before = Some(self.newest_key);
            self.steps.insert(self.newest_key, step);
        }
    }

    pub(crate) fn note_allocation(&mut self, stream: StreamId, requested_bytes: u64, slot: Slot) {
        self.is_too_long |= self.newest.len() == ALLOCATIONS_MAX;
        if !self.is_too_long {
            self.live.insert(slot, Logged { is_newest: true, number: self.newest.len() as u32 });
            self.newest.push(StepAllocation { stream, requested_bytes, until: None });
        }
    }

    pub(crate) fn note_free(&mut self, slot: Slot) {
        let Some(Logged { is_newest, number }) = self.live.remove(&slot) else { return };
        let now = self.newest.len() as u32;
        if is_newest {
            self.newest[number as usize].until = Some(now);
        } else if let Some(step) = self.before.and_then(|before| self.steps.get_mut(&before)) {
            step[number as usize].until = Some(step.len() as u32 + now);
        }
    }

    /// The step ends. Returns what a plan for this key has to place, when its last step asked for the same.
    pub(crate) fn end(&mut self) -> Option<Vec<StepAllocation>> {
        let asks = |it: &StepAllocation| (it.stream, it.requested_bytes);
        let before = self.steps.get(&self.newest_key)?;
        if self.is_too_long || !before.iter().map(asks).eq(self.newest.iter().map(asks)) {
            return None;
        }
        let follows_at_once = self.before == Some(self.newest_key);
        let count = before.len() as u32;
        let longer = |(before, newest): (&StepAllocation, &StepAllocation)| {
            let until = match (before.until, newest.until) {
                (Some(before), Some(newest)) => Some(before.max(newest)),
                // Alive at the end: it lives as long as it did last time.
                (Some(before), None) if before > count || before == count && follows_at_once => Some(before),
                _ => None,
            };
            StepAllocation { until, ..*before }
        };
        Some(before.iter().zip(&self.newest).map(longer).collect())
    }
}
