//! What a registrar is told, and what a sync tells.

use symmalloc_agreement::Mode;
use symmalloc_core::errors::TrimError;

/// How the memory of a pool is registered on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Registration {
    /// A symmetric window over each segment, made by all ranks together: kernels of NCCL's symmetric kind read and write
    /// peers' memory at their own offset. For symmetric pools.
    Windows,
    /// `ncclCommRegister` for each piece of memory: this rank's own matter, so that NCCL needs no copies through its own
    /// buffers. For any pool, and for ranges that grow.
    Buffers,
}

/// What a sync did, over all of its communicators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Synced {
    /// Windows and buffers that were registered.
    pub registrations: u64,
    /// Windows and buffers that were deregistered.
    pub deregistrations: u64,
    /// Bytes of dead segments that went back to the device.
    pub released_bytes: u64,
    /// Collectives that the ranks talked in.
    pub rounds: u64,
    /// Why memory did not go back, if it did not: the next trim tries again.
    pub not_released: Option<TrimError>,
}

/// What all ranks configure alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    pub(crate) check_offsets: bool,
    /// What this rank says about the symmetric space.
    pub(crate) space_bytes: u64,
}

impl Settings {
    /// The mode as ranks compare it.
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
    pub(super) fn add(&mut self, other: Synced) {
        self.registrations += other.registrations;
        self.deregistrations += other.deregistrations;
        self.released_bytes += other.released_bytes;
        self.rounds += other.rounds;
        self.not_released = self.not_released.take().or(other.not_released);
    }
}
