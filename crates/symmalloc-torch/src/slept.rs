//! The results of sleeps and wakes, for one pool or summed over several.

use std::ops::AddAssign;
use symmalloc_core::sleep;

/// The result of a sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slept {
    pub(crate) released_bytes: u64,
    pub(crate) kept_bytes: u64,
    pub(crate) deregistered: u64,
    pub(crate) suspended_bytes: u64,
}

impl AddAssign for Slept {
    fn add_assign(&mut self, other: Self) {
        self.released_bytes += other.released_bytes;
        self.kept_bytes += other.kept_bytes;
        self.deregistered += other.deregistered;
        self.suspended_bytes += other.suspended_bytes;
    }
}

impl From<sleep::Slept> for Slept {
    fn from(slept: sleep::Slept) -> Self {
        Slept { released_bytes: slept.released_bytes, kept_bytes: slept.kept_bytes, ..Slept::default() }
    }
}

impl From<symmalloc_nccl::Slept> for Slept {
    fn from(slept: symmalloc_nccl::Slept) -> Self {
        let symmalloc_nccl::Slept { released_bytes, kept_bytes, deregistrations, suspended_bytes, .. } = slept;
        Slept { released_bytes, kept_bytes, deregistered: deregistrations, suspended_bytes }
    }
}

/// The result of a wake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Woken {
    pub(crate) remapped_bytes: u64,
    pub(crate) registered: u64,
    pub(crate) changed: u64,
    pub(crate) lost: u64,
    pub(crate) resumed: u64,
}

impl AddAssign for Woken {
    fn add_assign(&mut self, other: Self) {
        self.remapped_bytes += other.remapped_bytes;
        self.registered += other.registered;
        self.changed += other.changed;
        self.lost += other.lost;
        self.resumed += other.resumed;
    }
}

impl From<sleep::Woken> for Woken {
    fn from(woken: sleep::Woken) -> Self {
        Woken { remapped_bytes: woken.remapped_bytes, ..Woken::default() }
    }
}

impl From<symmalloc_nccl::Woken> for Woken {
    fn from(woken: symmalloc_nccl::Woken) -> Self {
        Woken {
            remapped_bytes: woken.remapped_bytes,
            registered: woken.registrations,
            changed: woken.changed.len() as u64,
            lost: woken.lost.len() as u64,
            resumed: woken.resumed.len() as u64,
        }
    }
}
