//! Reports of syncs that differ between ranks.

use crate::sync::actions::WindowChange;
use std::fmt;
use symmalloc_agreement::RankSet;

/// The properties of a sync that must be equal on all ranks, the most informative first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum SyncField {
    /// The version of this protocol.
    Protocol,
    /// The configured agreement mode.
    Mode,
    /// The offset check setting.
    OffsetChecks,
    /// The version of libnccl.
    Library,
    /// The symmetric pools that are attached for windows.
    Attached,
    /// The number of earlier syncs of this communicator.
    SyncNumber,
    /// The number of live windows before this sync.
    Windows,
    /// The size of all live windows before this sync, in bytes.
    WindowBytes,
    /// The number of windows to register.
    Registrations,
    /// The number of windows to deregister.
    Deregistrations,
    /// The changes themselves.
    Changes,
}

impl SyncField {
    pub(super) const ALL: [SyncField; 11] = [
        SyncField::Protocol,
        SyncField::Mode,
        SyncField::OffsetChecks,
        SyncField::Library,
        SyncField::Attached,
        SyncField::SyncNumber,
        SyncField::Windows,
        SyncField::WindowBytes,
        SyncField::Registrations,
        SyncField::Deregistrations,
        SyncField::Changes,
    ];

    /// Returns `true` if comparing the individual changes would give more detail.
    pub(super) fn is_about_changes(self) -> bool {
        matches!(self, SyncField::Registrations | SyncField::Deregistrations | SyncField::Changes)
    }

    /// Returns `true` if ranks that differ in this field cannot take part in the same agreement.
    pub(super) fn precludes_agreement(self) -> bool {
        matches!(self, SyncField::Protocol | SyncField::Mode | SyncField::Attached)
    }

    fn is_digest(self) -> bool {
        matches!(self, SyncField::Attached | SyncField::Changes)
    }
}

impl fmt::Display for SyncField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SyncField::Protocol => "the version of symmalloc",
            SyncField::Mode => "the agreement mode",
            SyncField::OffsetChecks => "the offset checks",
            SyncField::Library => "the version of libnccl",
            SyncField::Attached => "the pools that are attached for windows",
            SyncField::SyncNumber => "the number of syncs of this communicator so far",
            SyncField::Windows => "the number of live windows",
            SyncField::WindowBytes => "the bytes of live windows",
            SyncField::Registrations => "the number of windows to register",
            SyncField::Deregistrations => "the number of windows to deregister",
            SyncField::Changes => "the segments to register and deregister",
        })
    }
}

/// The difference between the syncs of the ranks: the same report on every rank. Nothing was registered or deregistered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SyncDifference {
    /// The first field that differs.
    pub field: SyncField,
    /// Ranks grouped by their value of the field: a number, or a digest.
    pub groups: Vec<(RankSet, u64)>,
    /// The first change that differs, if the changes were compared.
    pub first_change: Option<ChangeDifference>,
}

/// The first change at which the ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangeDifference {
    /// Index of the change in its sync, from 0.
    pub index: usize,
    /// Ranks grouped by their change at this index; `None` if a rank has no more changes.
    pub groups: Vec<(RankSet, Option<WindowChange>)>,
}

impl fmt::Display for SyncDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the ranks differ in {}", self.field)?;
        for (ranks, value) in &self.groups {
            write!(f, "; ranks {ranks}: ")?;
            if self.field.is_digest() { write!(f, "digest {value:016x}") } else { write!(f, "{value}") }?;
        }
        let Some(first) = &self.first_change else { return Ok(()) };
        write!(f, "; the first difference is change {}", first.index)?;
        for (ranks, change) in &first.groups {
            match change {
                Some(change) => write!(f, "; ranks {ranks}: {change}")?,
                None => write!(f, "; ranks {ranks}: nothing")?,
            }
        }
        Ok(())
    }
}
