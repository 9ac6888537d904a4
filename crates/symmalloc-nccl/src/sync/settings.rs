//! The configuration of a registrar and of an attachment, and the result of a sync.

use crate::ffi::window_flags::WindowFlags;
use symmalloc_agreement::Mode;
use symmalloc_core::errors::TrimError;

/// The kind of registration of a pool's memory on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Registration {
    /// A symmetric window over each segment, registered by all ranks together. NCCL's symmetric kernels access peers' memory at the offset
    /// of the local buffer. Only for symmetric pools.
    Windows,
    /// A registration of each piece of memory with `ncclCommRegister`, local to this rank. NCCL then does not copy through its own buffers.
    /// Works for any pool, including pools with expandable segments.
    Buffers,
}

/// The settings with which pools are attached to a communicator. All ranks must attach a symmetric pool with the same settings: a sync
/// compares them.
///
/// # Examples
/// ```
/// use symmalloc_agreement::Mode;
/// use symmalloc_nccl::{Attachment, Registration};
///
/// // Windows whose ranks compare histories only on request.
/// let attachment = Attachment { agreement: Mode::Off, ..Attachment::default() };
/// assert_eq!(attachment.registration, Registration::Windows);
/// // A kind of registration stands for an attachment with the defaults.
/// assert_eq!(Attachment::from(Registration::Windows), Attachment::default());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The kind of registration. The default is [`Registration::Windows`].
    pub registration: Registration,
    /// Flags of the windows, which have no effect with [`Registration::Buffers`]. The default is no flags.
    pub flags: WindowFlags,
    /// The mode that determines when ranks compare the histories of the pools. The default, [`Mode::AtSync`], compares them at every sync
    /// and costs one small collective. In a sync that does not compare histories, a rank that finds no change returns immediately. If
    /// another rank does find a change, only that rank's deadline detects the disagreement. In a sync, the modes that count ops behave like
    /// `AtSync`.
    ///
    /// Histories of pools that are attached for buffers are not compared. If no pool of the communicator is attached for windows, the mode
    /// of the pool that was attached first determines how often the ranks check that they sync at the same point. In this case, attach the
    /// same pool first on all ranks.
    pub agreement: Mode,
}

impl Default for Attachment {
    fn default() -> Self {
        Registration::Windows.into()
    }
}

impl From<Registration> for Attachment {
    fn from(registration: Registration) -> Self {
        Attachment { registration, flags: WindowFlags::NONE, agreement: Mode::default() }
    }
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
    /// The error that kept memory from being released, if any. The next trim tries again.
    pub not_released: Option<TrimError>,
}

/// Settings of a registrar that must be equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) check_offsets: bool,
    /// Size of the symmetric space in bytes, as configured on this rank.
    pub(crate) space_bytes: u64,
}

/// Returns an agreement mode as a word, for comparison across ranks.
pub(crate) fn mode_word(mode: Mode) -> u64 {
    match mode {
        Mode::Off => 0,
        Mode::AtSync => 1,
        Mode::EachOp => 2,
        Mode::EveryOps(ops) => ops.get().saturating_add(2),
        Mode::EverySyncs(syncs) => u64::MAX - u64::from(syncs.get()),
        _ => u64::MAX,
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
    use std::num::{NonZeroU32, NonZeroU64};

    #[test]
    fn every_mode_has_its_own_word() {
        let ops = |ops| Mode::EveryOps(NonZeroU64::new(ops).expect("the number should not be zero"));
        let syncs = |syncs| Mode::EverySyncs(NonZeroU32::new(syncs).expect("the number should not be zero"));
        let modes = [Mode::Off, Mode::AtSync, Mode::EachOp, ops(1), ops(2)];
        assert_eq!(modes.map(mode_word), [0, 1, 2, 3, 4]);
        assert_eq!([syncs(1), syncs(2)].map(mode_word), [u64::MAX - 1, u64::MAX - 2]);
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
