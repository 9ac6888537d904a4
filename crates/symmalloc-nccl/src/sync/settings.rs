//! The configuration of a registrar, and the result of a sync.

use symmalloc_agreement::Mode;
use symmalloc_core::errors::TrimError;

/// The kind of registration of a pool's memory on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Registration {
    /// A symmetric window over each segment, registered by all ranks together. NCCL's symmetric kernels access peers' memory at the offset
    /// of the local buffer. Only for symmetric pools.
    Windows,
    /// `ncclCommRegister` for each piece of memory, local to this rank. NCCL then does not copy through its own buffers. Works for any
    /// pool, including those with expandable segments.
    Buffers,
}

/// The result of a sync over all of its communicators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Synced {
    /// Windows and buffers that were registered.
    pub registrations: u64,
    /// Windows and buffers that were deregistered.
    pub deregistrations: u64,
    /// Bytes of dead segments that were released to the device.
    pub released_bytes: u64,
    /// Collectives in which the ranks exchanged messages.
    pub rounds: u64,
    /// The error that kept memory from being released, if any. The next trim retries.
    pub not_released: Option<TrimError>,
}

/// Settings that must be equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    pub(crate) check_offsets: bool,
    /// Size of the symmetric space in bytes, as configured on this rank.
    pub(crate) space_bytes: u64,
}

impl Settings {
    /// Returns the mode as a word, for comparison across ranks.
    pub(crate) fn mode_word(&self) -> u64 {
        match self.mode {
            Mode::Off => 0,
            Mode::AtSync => 1,
            Mode::EachOp => 2,
            Mode::EveryOps(ops) => ops.get().saturating_add(2),
            _ => u64::MAX,
        }
    }
}

impl Synced {
    pub(crate) fn add(&mut self, other: Synced) {
        self.registrations += other.registrations;
        self.deregistrations += other.deregistrations;
        self.released_bytes += other.released_bytes;
        self.rounds += other.rounds;
        self.not_released = self.not_released.take().or(other.not_released);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;

    fn settings(mode: Mode) -> Settings {
        Settings { mode, check_offsets: false, space_bytes: 1 }
    }

    #[test]
    fn every_mode_has_its_own_word() {
        let every = |ops| Mode::EveryOps(NonZeroU64::new(ops).expect("not zero"));
        let modes = [Mode::Off, Mode::AtSync, Mode::EachOp, every(1), every(2)];
        assert_eq!(modes.map(|mode| settings(mode).mode_word()), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn results_are_added_field_by_field() {
        let mut total = Synced { registrations: 1, released_bytes: 2, ..Synced::default() };
        total.add(Synced { registrations: 3, deregistrations: 4, released_bytes: 5, rounds: 6, not_released: None });
        let expected =
            Synced { registrations: 4, deregistrations: 4, released_bytes: 7, rounds: 6, not_released: None };
        assert_eq!(total, expected);
    }
}
