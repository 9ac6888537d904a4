//! Backend calls, their counts, and the injection of faults.
//!
//! Faults are injected through the production trait: a call of the simulated driver fails and does nothing else. Every
//! fallible call has an ordinal, counted from 0, both over all calls and over the calls of its kind. To test a failure
//! at every call, run once without faults, read [`CallCounts::fallible`], and run again for each ordinal below it.

use super::random::SplitMix64;
use std::fmt;
use symmalloc_core::backend::{BackendError, Reason};

/// A kind of fallible backend call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Call {
    /// [`Backend::reserve`](symmalloc_core::backend::Backend::reserve)
    Reserve,
    /// [`Backend::map`](symmalloc_core::backend::Backend::map)
    Map,
    /// [`Backend::unmap`](symmalloc_core::backend::Backend::unmap)
    Unmap,
    /// [`Backend::release`](symmalloc_core::backend::Backend::release)
    Release,
    /// [`Backend::record`](symmalloc_core::backend::Backend::record)
    Record,
    /// [`Backend::wait`](symmalloc_core::backend::Backend::wait)
    Wait,
    /// [`Backend::query`](symmalloc_core::backend::Backend::query)
    Query,
    /// [`Backend::synchronize`](symmalloc_core::backend::Backend::synchronize)
    Synchronize,
    /// [`Backend::save`](symmalloc_core::backend::Backend::save)
    Save,
    /// [`Backend::load`](symmalloc_core::backend::Backend::load)
    Load,
    /// [`Backend::zero`](symmalloc_core::backend::Backend::zero)
    Zero,
    /// [`Backend::fill`](symmalloc_core::backend::Backend::fill)
    Fill,
    /// [`Backend::compare`](symmalloc_core::backend::Backend::compare)
    Compare,
}

impl Call {
    /// All kinds, in the order of the trait.
    pub const ALL: [Call; 13] = [
        Call::Reserve,
        Call::Map,
        Call::Unmap,
        Call::Release,
        Call::Record,
        Call::Wait,
        Call::Query,
        Call::Synchronize,
        Call::Save,
        Call::Load,
        Call::Zero,
        Call::Fill,
        Call::Compare,
    ];

    /// Returns the name of the trait method.
    pub fn name(self) -> &'static str {
        match self {
            Call::Reserve => "reserve",
            Call::Map => "map",
            Call::Unmap => "unmap",
            Call::Release => "release",
            Call::Record => "record",
            Call::Wait => "wait",
            Call::Query => "query",
            Call::Synchronize => "synchronize",
            Call::Save => "save",
            Call::Load => "load",
            Call::Zero => "zero",
            Call::Fill => "fill",
            Call::Compare => "compare",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The number of times each call was made, including failed calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    fallible: [u64; Call::ALL.len()],
    recycle: u64,
    failed: u64,
}

impl CallCounts {
    /// Returns the number of calls of one kind.
    pub fn of(&self, call: Call) -> u64 {
        self.fallible[call as usize]
    }

    /// Returns the number of all fallible calls. The ordinals of [`FaultRule::At`] are below this number.
    pub fn fallible(&self) -> u64 {
        self.fallible.iter().sum()
    }

    /// Returns the number of calls of [`Backend::recycle`](symmalloc_core::backend::Backend::recycle), which cannot
    /// fail.
    pub fn recycle(&self) -> u64 {
        self.recycle
    }

    /// Returns the number of calls that returned an error, whatever the cause.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    pub(crate) fn add_recycle(&mut self) {
        self.recycle += 1;
    }

    pub(crate) fn add_failed(&mut self) {
        self.failed += 1;
    }
}

/// The error that an injected fault returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// [`Reason::OutOfMemory`].
    OutOfMemory,
    /// [`Reason::Refused`].
    Refused,
    /// [`Reason::DeviceLost`]: this call and every later call fail.
    DeviceLost,
}

impl Fault {
    /// Returns the error for `call`. The codes are those of the corresponding CUDA errors.
    pub(crate) fn of(self, call: Call) -> BackendError {
        let (code, reason) = match self {
            Fault::OutOfMemory => (2, Reason::OutOfMemory),
            Fault::Refused => (1, Reason::Refused),
            Fault::DeviceLost => (719, Reason::DeviceLost),
        };
        BackendError::new(call.name(), code, reason)
    }
}

/// A rule that selects the calls that fail. Ordinals count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultRule {
    /// The call with this ordinal.
    At {
        /// Ordinal of the call among all fallible calls, or among those of its kind if the fault names a kind.
        ordinal: u64,
    },
    /// Every call whose ordinal plus 1 is a multiple of `calls`; no call if it is 0.
    Every {
        /// Interval between failures, in calls.
        calls: u64,
    },
    /// Each call with this probability, drawn from the seed.
    Chance {
        /// Failures per million calls.
        per_million: u32,
    },
}

/// The configured faults and the counts of calls made so far.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    /// Rules in the order in which they were added. The first one that matches applies.
    rules: Vec<(Option<Call>, FaultRule, Fault)>,
    random: SplitMix64,
    lost: bool,
    pub(crate) counts: CallCounts,
}

impl Faults {
    pub(crate) fn new(random: SplitMix64) -> Self {
        Faults { rules: Vec::new(), random, lost: false, counts: CallCounts::default() }
    }

    pub(crate) fn add(&mut self, call: Option<Call>, rule: FaultRule, fault: Fault) {
        self.rules.push((call, rule, fault));
    }

    /// Removes all fault rules. A lost device works again.
    pub(crate) fn clear(&mut self) {
        self.rules.clear();
        self.lost = false;
    }

    /// Returns `true` if the device is lost.
    pub(crate) fn lost(&self) -> bool {
        self.lost
    }

    /// Counts a call and returns the fault to inject, if any. Random numbers are drawn for every call, so that random
    /// failures do not depend on the other rules.
    pub(crate) fn enter(&mut self, call: Call) -> Option<Fault> {
        let (over_all, of_kind) = (self.counts.fallible(), self.counts.of(call));
        self.counts.fallible[call as usize] += 1;
        let mut found = None;
        for &(kind, rule, fault) in &self.rules {
            if kind.is_some_and(|kind| kind != call) {
                continue;
            }
            let ordinal = if kind.is_some() { of_kind } else { over_all };
            let applies = match rule {
                FaultRule::At { ordinal: at } => ordinal == at,
                FaultRule::Every { calls } => calls != 0 && (ordinal + 1).is_multiple_of(calls),
                FaultRule::Chance { per_million } => self.random.chance(per_million),
            };
            found = found.or(applies.then_some(fault));
        }
        if self.lost {
            found = Some(Fault::DeviceLost);
        }
        self.lost |= found == Some(Fault::DeviceLost);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults() -> Faults {
        Faults::new(SplitMix64::new(0))
    }

    #[test]
    fn a_rule_for_all_calls_counts_all_calls_and_a_rule_for_one_kind_counts_that_kind() {
        let mut faults = faults();
        faults.add(None, FaultRule::At { ordinal: 2 }, Fault::Refused);
        faults.add(Some(Call::Map), FaultRule::At { ordinal: 1 }, Fault::OutOfMemory);
        let calls = [Call::Map, Call::Record, Call::Record, Call::Map, Call::Map];
        assert_eq!(calls.map(|c| faults.enter(c)), [None, None, Some(Fault::Refused), Some(Fault::OutOfMemory), None]);
        assert_eq!((faults.counts.fallible(), faults.counts.of(Call::Map)), (5, 3));
    }

    #[test]
    fn every_third_call_fails() {
        let mut faults = faults();
        faults.add(None, FaultRule::Every { calls: 3 }, Fault::Refused);
        let failed: Vec<u64> = (0..9).filter(|_| faults.enter(Call::Wait).is_some()).collect();
        assert_eq!(failed, [2, 5, 8]);
    }

    #[test]
    fn a_lost_device_fails_every_later_call_until_healed() {
        let mut faults = faults();
        faults.add(Some(Call::Query), FaultRule::At { ordinal: 0 }, Fault::DeviceLost);
        assert_eq!(faults.enter(Call::Map), None);
        assert_eq!(faults.enter(Call::Query), Some(Fault::DeviceLost));
        assert_eq!(faults.enter(Call::Map), Some(Fault::DeviceLost));
        faults.clear();
        assert_eq!(faults.enter(Call::Map), None);
    }

    #[test]
    fn random_failures_depend_only_on_the_seed() {
        let run = |other_rule: bool| {
            let mut faults = faults();
            if other_rule {
                faults.add(None, FaultRule::At { ordinal: 0 }, Fault::Refused);
            }
            faults.add(None, FaultRule::Chance { per_million: 100_000 }, Fault::OutOfMemory);
            (0..1000).map(|_| faults.enter(Call::Map)).skip(1).collect::<Vec<_>>()
        };
        assert_eq!(run(false), run(true));
        let failed = run(false).iter().flatten().count();
        assert!((50..150).contains(&failed), "{failed}");
    }
}
