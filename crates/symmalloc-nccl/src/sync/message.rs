//! The messages that ranks exchange in a sync, and the reports of differences between them. All integers are little-endian.
//!
//! ```text
//!   first round   agreement's answer, 64 bytes │ SyncMessage, 104 bytes
//!   page          ChangeMessage, 24 bytes, 40 times          only if the changes differ; repeated until the first difference
//! ```
//!
//! One collective thus compares the histories and the syncs. If the histories are equal, the syncs can differ only because the programs
//! differ: in configuration, in attached pools, or in the number of syncs.
//!
//! A message from another rank is untrusted, so every bit pattern is a valid [`SyncMessage`], and a [`ChangeMessage`] with an unknown kind
//! is decoded as no change.

use crate::sync::actions::{ChangeKind, SyncActions, WindowChange};
use crate::windows::segment::SymmetricSegment;
use std::fmt;
use symmalloc_agreement::{RankSet, Ranks};
use symmalloc_core::SegmentId;
use symmalloc_core::ids::StreamGroup;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the messages of a sync, of a sleep, and of offset checks. Increment it when one of them changes.
pub(crate) const VERSION: u32 = 2;

/// One rank's sync, without the individual changes. 104 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct SyncMessage {
    /// [`VERSION`]. A sleep sends a different number in this position, so that ranks detect that one of them sleeps while another syncs.
    version: U64,
    mode: U64,
    /// 1 if the rank compares histories in this sync.
    compared: U64,
    offset_checks: U64,
    library: U64,
    attached: U64,
    sync_number: U64,
    windows: U64,
    window_bytes: U64,
    registrations: U64,
    deregistrations: U64,
    /// Digest of the changes.
    changes: U64,
    /// Size of the symmetric space in bytes, as configured on this rank. May differ between ranks: the largest value applies to all.
    space_bytes: U64,
}

/// The fields of a [`SyncMessage`] that do not follow from the actions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyncContext {
    pub(crate) mode: u64,
    /// Set if this rank compares histories in this sync.
    pub(crate) compared: bool,
    pub(crate) offset_checks: bool,
    pub(crate) library: u64,
    pub(crate) sync_number: u64,
    pub(crate) attached: u64,
    pub(crate) windows: u64,
    pub(crate) window_bytes: u64,
    pub(crate) space_bytes: u64,
}

impl SyncMessage {
    pub(crate) const BYTES: usize = size_of::<SyncMessage>();

    pub(crate) fn new(actions: &SyncActions, context: &SyncContext) -> Self {
        let (registrations, deregistrations) = actions.counts();
        SyncMessage {
            version: u64::from(VERSION).into(),
            mode: context.mode.into(),
            compared: u64::from(context.compared).into(),
            offset_checks: u64::from(context.offset_checks).into(),
            library: context.library.into(),
            attached: context.attached.into(),
            sync_number: context.sync_number.into(),
            windows: context.windows.into(),
            window_bytes: context.window_bytes.into(),
            registrations: registrations.into(),
            deregistrations: deregistrations.into(),
            changes: actions.digest().into(),
            space_bytes: context.space_bytes.into(),
        }
    }

    pub(crate) fn space_bytes(&self) -> u64 {
        self.space_bytes.get()
    }

    pub(crate) fn field(&self, field: SyncField) -> u64 {
        let value = match field {
            SyncField::Protocol => self.version,
            SyncField::Mode => self.mode,
            SyncField::Compared => self.compared,
            SyncField::OffsetChecks => self.offset_checks,
            SyncField::Library => self.library,
            SyncField::Attached => self.attached,
            SyncField::SyncNumber => self.sync_number,
            SyncField::Windows => self.windows,
            SyncField::WindowBytes => self.window_bytes,
            SyncField::Registrations => self.registrations,
            SyncField::Deregistrations => self.deregistrations,
            SyncField::Changes => self.changes,
        };
        value.get()
    }
}

/// A segment's name. 12 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct SegmentMessage {
    /// [`StreamGroup::code`].
    streams: U32,
    pool: U32,
    segment: U32,
}

impl From<SymmetricSegment> for SegmentMessage {
    fn from(name: SymmetricSegment) -> Self {
        SegmentMessage { streams: name.group.code().into(), pool: name.pool.into(), segment: name.id.0.into() }
    }
}

impl From<SegmentMessage> for SymmetricSegment {
    fn from(name: SegmentMessage) -> Self {
        SymmetricSegment {
            pool: name.pool.get(),
            group: StreamGroup::from_code(name.streams.get()).unwrap_or(StreamGroup::All),
            id: SegmentId(name.segment.get()),
        }
    }
}

/// One change. 24 bytes; all zeros stand for the end of the changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct ChangeMessage {
    segment: SegmentMessage,
    /// 1: register, 2: grow, 3: deregister.
    kind: U32,
    size_bytes: U64,
}

impl From<WindowChange> for ChangeMessage {
    fn from(change: WindowChange) -> Self {
        let kind: u32 = match change.kind {
            ChangeKind::Register => 1,
            ChangeKind::Grow => 2,
            ChangeKind::Deregister => 3,
        };
        ChangeMessage { segment: change.segment.into(), kind: kind.into(), size_bytes: change.size_bytes.into() }
    }
}

impl ChangeMessage {
    /// Returns the change, or `None` for the end of the changes or an unknown kind.
    pub(crate) fn decode(&self) -> Option<WindowChange> {
        let kind = match self.kind.get() {
            1 => ChangeKind::Register,
            2 => ChangeKind::Grow,
            3 => ChangeKind::Deregister,
            _ => return None,
        };
        Some(WindowChange { kind, segment: self.segment.into(), size_bytes: self.size_bytes.get() })
    }
}

/// Number of changes per page.
pub(crate) const CHANGES_PER_PAGE: usize = 40;

/// A page of one rank's changes. 960 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct ChangePage([ChangeMessage; CHANGES_PER_PAGE]);

impl ChangePage {
    /// Returns the page with this number, from 0.
    pub(crate) fn new(actions: &SyncActions, page: usize) -> Self {
        let mut changes = actions.windows.iter().skip(page * CHANGES_PER_PAGE).map(|action| action.change);
        let none = ChangeMessage::new_zeroed();
        ChangePage(std::array::from_fn(|_| changes.next().map_or(none, ChangeMessage::from)))
    }

    pub(crate) fn change(&self, index: usize) -> Option<WindowChange> {
        self.0[index].decode()
    }
}

/// The properties of a sync that must be equal on all ranks, the most informative first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum SyncField {
    /// The version of the protocol. It differs if the ranks run different builds, or if a rank makes a different call on this communicator.
    Protocol,
    /// The configured agreement mode.
    Mode,
    /// Set if the rank compares histories in this sync. Ranks differ here if one attached a pool at a different sync, or called `agree`
    /// where the others called `sync`.
    Compared,
    /// The offset check setting.
    OffsetChecks,
    /// The version of libnccl.
    Library,
    /// The symmetric pools that are attached for windows, and the windows' flags.
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
    pub(super) const ALL: [SyncField; 12] = [
        SyncField::Protocol,
        SyncField::Mode,
        SyncField::Compared,
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
        matches!(self, SyncField::Protocol | SyncField::Mode | SyncField::Compared | SyncField::Attached)
    }

    fn is_digest(self) -> bool {
        matches!(self, SyncField::Attached | SyncField::Changes)
    }
}

impl fmt::Display for SyncField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SyncField::Protocol => "the protocol (another build, or another call)",
            SyncField::Mode => "the agreement mode",
            SyncField::Compared => "whether they compare histories in this sync (1: yes)",
            SyncField::OffsetChecks => "the offset checks",
            SyncField::Library => "the version of libnccl",
            SyncField::Attached => "the pools that are attached for windows, or the flags of their windows",
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
    /// The ranks, grouped by the value of the field, which is a number or a digest.
    pub groups: Vec<(RankSet, u64)>,
    /// The first change that differs, if the changes were compared.
    pub first_change: Option<ChangeDifference>,
}

impl SyncDifference {
    /// Returns the report of ranks that use different protocols.
    pub(crate) fn of_protocols(groups: Vec<(RankSet, u64)>) -> Self {
        SyncDifference { field: SyncField::Protocol, groups, first_change: None }
    }
}

/// The first change at which the ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangeDifference {
    /// Index of the change in its sync, from 0.
    pub index: usize,
    /// The ranks, grouped by the change at this index; `None` for ranks that have no more changes.
    pub groups: Vec<(RankSet, Option<WindowChange>)>,
}

impl fmt::Display for SyncDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the ranks differ in {}", self.field)?;
        for (ranks, value) in &self.groups {
            write!(f, "; {}: ", Ranks(ranks))?;
            if self.field.is_digest() { write!(f, "digest {value:016x}") } else { write!(f, "{value}") }?;
        }
        let Some(first) = &self.first_change else { return Ok(()) };
        write!(f, "; the first difference is change {}", first.index)?;
        for (ranks, change) in &first.groups {
            match change {
                Some(change) => write!(f, "; {}: {change}", Ranks(ranks))?,
                None => write!(f, "; {}: nothing", Ranks(ranks))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::StreamId;
    use zerocopy::transmute;

    #[test]
    fn messages_have_the_documented_layout() {
        assert_eq!((SyncMessage::BYTES, size_of::<ChangeMessage>(), size_of::<ChangePage>()), (104, 24, 960));
        let segment = SymmetricSegment { pool: 3, group: StreamGroup::One(StreamId(2)), id: SegmentId(7) };
        let change = WindowChange { kind: ChangeKind::Deregister, segment, size_bytes: 0x0102 };
        let bytes: [u8; 24] = transmute!(ChangeMessage::from(change));
        assert_eq!(bytes, [2, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        let actions = SyncActions::default();
        let context = SyncContext {
            mode: 2,
            compared: true,
            offset_checks: true,
            library: 22809,
            sync_number: 4,
            attached: 5,
            windows: 6,
            window_bytes: 7,
            space_bytes: 12,
        };
        let words: [[u8; 8]; 13] = transmute!(SyncMessage::new(&actions, &context));
        assert_eq!(
            words.map(u64::from_le_bytes),
            [VERSION.into(), 2, 1, 1, 22809, 5, 4, 6, 7, 0, 0, actions.digest(), 12]
        );
    }

    #[test]
    fn decoding_a_change_inverts_encoding_it() {
        for kind in [ChangeKind::Register, ChangeKind::Grow, ChangeKind::Deregister] {
            let of_stream =
                [StreamId(0), StreamId::MAX].map(|stream| [StreamGroup::One(stream), StreamGroup::Group(stream)]);
            for group in of_stream.into_iter().flatten().chain([StreamGroup::All]) {
                let segment = SymmetricSegment { pool: 3, group, id: SegmentId(7) };
                let change = WindowChange { kind, segment, size_bytes: 1 << 40 };
                assert_eq!(ChangeMessage::from(change).decode(), Some(change));
            }
        }
    }

    #[test]
    fn unknown_kinds_are_no_changes() {
        assert_eq!(ChangeMessage::new_zeroed().decode(), None);
        let garbled: ChangeMessage = transmute!([0xff_u8; 24]);
        assert_eq!(garbled.decode(), None);
    }
}
