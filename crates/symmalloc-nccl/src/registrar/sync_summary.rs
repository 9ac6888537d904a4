//! Plan summaries, and reports of plans that differ. Ranks exchange summaries in the first round of a sync, together with their messages of
//! the core's agreement.
//!
//! ```text
//!   message of one rank   ┌──────────────────────┬────────────────────────────────────────────┐
//!                         │ agreement, 64 bytes  │ summary: one word per field of `PlanField` │
//!                         └──────────────────────┴────────────────────────────────────────────┘
//! ```
//!
//! One collective therefore compares both histories and plans. If histories are equal, plans can differ only because the programs differ:
//! in configuration, in attached pools, or in the number of syncs.

use crate::registrar::sync_actions::{PlanStep, STEP_BYTES, SyncActions};
use std::collections::BTreeMap;
use std::fmt;
use symmalloc_agreement::{Gathered, RankSet};

macro_rules! fields {
    ($($(#[$doc:meta])* $field:ident = $name:literal,)*) => {
        /// The properties in which the plans of ranks can differ, the most informative first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum PlanField {
            $($(#[$doc])* $field,)*
        }

        impl PlanField {
            const ALL: [PlanField; [$($name),*].len()] = [$(PlanField::$field),*];
        }

        impl fmt::Display for PlanField {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(PlanField::$field => $name,)*
                })
            }
        }
    };
}

fields! {
    /// The version of this protocol.
    Protocol = "the version of symmalloc",
    /// The configured agreement mode.
    Mode = "the agreement mode",
    /// The offset check setting.
    OffsetChecks = "the offset checks",
    /// The version of libnccl.
    Library = "the version of libnccl",
    /// The symmetric pools that are attached for windows.
    Attached = "the pools that are attached for windows",
    /// The number of earlier syncs of this communicator.
    SyncNumber = "the number of syncs of this communicator so far",
    /// The number of live windows before this sync.
    Windows = "the number of live windows",
    /// The size of all live windows before this sync, in bytes.
    WindowBytes = "the bytes of live windows",
    /// The number of windows to register.
    Registrations = "the number of windows to register",
    /// The number of windows to deregister.
    Deregistrations = "the number of windows to deregister",
    /// The steps themselves.
    Steps = "the segments to register and deregister",
}

/// One word per field, and the size of the symmetric space. Ranks use the largest size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SyncSummary {
    /// Indexed by [`PlanField`].
    words: [u64; PlanField::ALL.len()],
    /// Size of the symmetric space in bytes, as configured on this rank.
    pub(crate) space_bytes: u64,
}

/// Inputs of a summary other than the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyncContext {
    pub(crate) mode: u64,
    pub(crate) offset_checks: bool,
    pub(crate) library: u64,
    pub(crate) sync_number: u64,
    pub(crate) attached: u64,
    pub(crate) windows: u64,
    pub(crate) window_bytes: u64,
    pub(crate) space_bytes: u64,
}

/// Protocol version. Incremented when the messages of a sync change.
const PROTOCOL: u64 = 1;

impl SyncSummary {
    pub(crate) const BYTES: usize = 8 * (PlanField::ALL.len() + 1);

    pub(crate) fn new(plan: &SyncActions, context: &SyncContext) -> Self {
        let (registrations, deregistrations) = plan.counts();
        let word = |field| match field {
            PlanField::Protocol => PROTOCOL,
            PlanField::Mode => context.mode,
            PlanField::OffsetChecks => context.offset_checks.into(),
            PlanField::Library => context.library,
            PlanField::SyncNumber => context.sync_number,
            PlanField::Attached => context.attached,
            PlanField::Windows => context.windows,
            PlanField::WindowBytes => context.window_bytes,
            PlanField::Registrations => registrations,
            PlanField::Deregistrations => deregistrations,
            PlanField::Steps => plan.digest(),
        };
        SyncSummary { words: PlanField::ALL.map(word), space_bytes: context.space_bytes }
    }

    pub(crate) fn write(&self, message: &mut Vec<u8>) {
        let words = self.words.into_iter().chain([self.space_bytes]);
        message.extend(words.flat_map(u64::to_le_bytes));
    }

    pub(crate) fn read(bytes: &[u8]) -> Self {
        let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        SyncSummary {
            words: std::array::from_fn(|_| words.next().unwrap_or(0)),
            space_bytes: words.next().unwrap_or(0),
        }
    }
}

/// Compares the plans of all ranks. Returns the first field that differs.
pub(crate) fn compare(summaries: &[SyncSummary]) -> Result<(), Box<PlanDifference>> {
    for (index, field) in PlanField::ALL.into_iter().enumerate() {
        let groups = groups(summaries.iter().map(|summary| summary.words[index]));
        if groups.len() > 1 {
            let groups = groups.into_iter().map(|(value, ranks)| PlanGroup { ranks, value }).collect();
            return Err(Box::new(PlanDifference { field, groups, first_step: None }));
        }
    }
    Ok(())
}

/// Groups ranks by their value, in ascending order of values.
pub(crate) fn groups<T: Ord>(said: impl Iterator<Item = T>) -> Vec<(T, RankSet)> {
    let mut groups: BTreeMap<T, Vec<u32>> = BTreeMap::new();
    for (value, rank) in said.zip(0..) {
        groups.entry(value).or_default().push(rank);
    }
    groups.into_iter().map(|(value, ranks)| (value, ranks.into_iter().collect())).collect()
}

/// The differences between the plans of the ranks. Every rank has the same report. Nothing was registered or deregistered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanDifference {
    /// The first field that differs.
    pub field: PlanField,
    /// Ranks grouped by their value.
    pub groups: Vec<PlanGroup>,
    /// The first step that differs, if the steps were compared.
    pub first_step: Option<StepDifference>,
}

/// Ranks with the same value of a [`PlanField`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanGroup {
    /// The ranks.
    pub ranks: RankSet,
    /// Their value: a number, or a digest.
    pub value: u64,
}

/// The first step at which plans differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepDifference {
    /// Index of the step, from 0.
    pub step: usize,
    /// Ranks grouped by their step at this index; `None` if the plan has ended.
    pub groups: Vec<(RankSet, Option<PlanStep>)>,
}

impl PlanDifference {
    /// Returns `true` if a comparison of the individual steps would give more detail.
    pub(crate) fn is_about_steps(&self) -> bool {
        matches!(self.field, PlanField::Registrations | PlanField::Deregistrations | PlanField::Steps)
    }

    /// Returns `true` if the ranks cannot take part in the same agreement.
    pub(crate) fn precludes_agreement(&self) -> bool {
        matches!(self.field, PlanField::Protocol | PlanField::Mode | PlanField::Attached)
    }

    fn is_digest(&self) -> bool {
        matches!(self.field, PlanField::Attached | PlanField::Steps)
    }
}

impl fmt::Display for PlanDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the ranks differ in {}", self.field)?;
        for PlanGroup { ranks, value } in &self.groups {
            write!(f, "; ranks {ranks}: ")?;
            if self.is_digest() { write!(f, "digest {value:016x}") } else { write!(f, "{value}") }?;
        }
        let Some(first) = &self.first_step else { return Ok(()) };
        write!(f, "; the first difference is step {}", first.step)?;
        for (ranks, step) in &first.groups {
            match step {
                Some(step) => write!(f, "; ranks {ranks}: {step}")?,
                None => write!(f, "; ranks {ranks}: nothing")?,
            }
        }
        Ok(())
    }
}

/// Number of steps per message.
const STEPS_PER_PAGE: usize = 40;

/// A search for the first step that differs, one page of every rank's steps at a time.
#[derive(Debug, Default)]
pub(crate) struct StepSearch {
    page: usize,
}

impl StepSearch {
    pub(crate) const MESSAGE_BYTES: usize = STEPS_PER_PAGE * STEP_BYTES;

    /// Writes this rank's page.
    pub(crate) fn write(&self, plan: &SyncActions, message: &mut Vec<u8>) {
        let end = message.len() + Self::MESSAGE_BYTES;
        let actions = plan.actions.iter().skip(self.page * STEPS_PER_PAGE).take(STEPS_PER_PAGE);
        actions.for_each(|action| action.step.write(message));
        message.resize(end, 0);
    }

    /// Compares the pages of all ranks. Returns the first difference once it is found, or `Err` if all plans have ended without one.
    pub(crate) fn advance(&mut self, gathered: &Gathered) -> Result<Option<StepDifference>, ()> {
        for place in 0..STEPS_PER_PAGE {
            let at = |message: &[u8]| PlanStep::read(&message[place * STEP_BYTES..(place + 1) * STEP_BYTES]);
            let groups = groups(gathered.iter().map(at));
            if groups.len() > 1 {
                let groups = groups.into_iter().map(|(step, ranks)| (ranks, step)).collect();
                return Ok(Some(StepDifference { step: self.page * STEPS_PER_PAGE + place, groups }));
            }
            if groups.iter().all(|(step, _)| step.is_none()) {
                return Err(());
            }
        }
        self.page += 1;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registrar::segment_key::Generation;
    use crate::registrar::sync_actions::{SegmentName, SegmentTable, StepKind};
    use symmalloc_core::backend::DeviceAddress;
    use symmalloc_core::{PoolId, SegmentId};

    const CONTEXT: SyncContext = SyncContext {
        mode: 1,
        offset_checks: false,
        library: 22809,
        sync_number: 3,
        attached: 7,
        windows: 2,
        window_bytes: 4 << 20,
        space_bytes: 144 << 30,
    };

    /// Returns a plan that registers this many segments, one of them with another size.
    fn plan(segments: u32, other: u32) -> SyncActions {
        let mut plan = SyncActions::new(&SegmentTable::new(), &[], &[], |_| 0);
        plan.actions = (0..segments)
            .map(|segment| crate::registrar::sync_actions::SyncAction {
                step: PlanStep {
                    kind: StepKind::Register,
                    segment: SegmentName { pool: 0, stream: None, segment: SegmentId(segment) },
                    size_bytes: if segment == other { 1 } else { 2 },
                },
                segment: Generation { pool: PoolId::DEFAULT, stream: None, segment: SegmentId(segment) },
                base: DeviceAddress(0).0,
            })
            .collect();
        plan
    }

    fn search(plans: &[SyncActions]) -> Option<StepDifference> {
        let mut search = StepSearch::default();
        loop {
            let mut messages = Vec::new();
            plans.iter().for_each(|plan| search.write(plan, &mut messages));
            match search.advance(&Gathered::new(messages, StepSearch::MESSAGE_BYTES)) {
                Ok(None) => {}
                Ok(found) => return found,
                Err(()) => return None,
            }
        }
    }

    #[test]
    fn a_summary_survives_its_message() {
        let summary = SyncSummary::new(&plan(3, 9), &CONTEXT);
        let mut message = Vec::new();
        summary.write(&mut message);
        assert_eq!(message.len(), SyncSummary::BYTES);
        assert_eq!(SyncSummary::read(&message), summary);
    }

    #[test]
    fn the_space_that_a_rank_wants_is_no_difference() {
        let one = SyncSummary::new(&plan(3, 9), &CONTEXT);
        let other = SyncSummary::new(&plan(3, 9), &SyncContext { space_bytes: 1, ..CONTEXT });
        assert_eq!(compare(&[one, other]), Ok(()));
    }

    #[test]
    fn the_most_telling_field_is_named_with_its_ranks() {
        let one = SyncSummary::new(&plan(3, 9), &CONTEXT);
        let other = SyncSummary::new(&plan(4, 9), &SyncContext { library: 23007, ..CONTEXT });
        let difference = compare(&[one, one, other]).expect_err("they differ");
        assert_eq!(
            difference.to_string(),
            "the ranks differ in the version of libnccl; ranks 0-1: 22809; ranks 2: 23007"
        );
    }

    #[test]
    fn the_first_step_that_differs_is_found_on_any_page() {
        let found = search(&[plan(100, 999), plan(100, 57), plan(100, 999)]).expect("they differ");
        assert_eq!(found.step, 57);
        assert_eq!(found.groups.len(), 2);
        let found = search(&[plan(80, 999), plan(81, 999)]).expect("one plan is longer");
        assert_eq!((found.step, found.groups[0].1), (80, None));
        assert_eq!(search(&[plan(80, 999), plan(80, 999)]), None);
    }

    #[test]
    fn a_difference_in_steps_reads_as_a_sentence() {
        let plans = [plan(1, 9), plan(2, 9)];
        let summaries = plans.each_ref().map(|plan| SyncSummary::new(plan, &CONTEXT));
        let mut difference = compare(&summaries).expect_err("they differ");
        assert!(difference.is_about_steps());
        difference.first_step = search(&plans);
        assert_eq!(
            difference.to_string(),
            "the ranks differ in the number of windows to register; ranks 0: 1; ranks 1: 2; the first difference is step 1; \
             ranks 0: nothing; ranks 1: register segment 1 of symmetric pool 0 (2 bytes)"
        );
    }
}
