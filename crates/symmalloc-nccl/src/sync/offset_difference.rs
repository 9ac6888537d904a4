//! One rank's call of a collective, its message to other ranks, and the differences between calls.
//!
//! A message from another rank is untrusted, so every bit pattern is a valid struct, and a call with an unknown collective is an error.

use crate::ffi::operation::Collective;
use crate::sync::groups;
use crate::sync::message::{SegmentMessage, SyncDifference, VERSION};
use crate::windows::registrations::Entry;
use crate::windows::segment::SymmetricSegment;
use std::fmt;
use symmalloc_agreement::{Gathered, ProtocolError, RankSet, Ranks};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The location of a collective's buffer, in names that all ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum BufferPlace {
    /// In a window.
    Window {
        /// The segment.
        segment: SymmetricSegment,
        /// Offset in bytes from the segment's start.
        offset_bytes: u64,
    },
    /// Outside all windows of the communicator.
    NoWindow,
}

/// One rank's call of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct CollectiveCall {
    /// The collective.
    pub collective: Collective,
    /// Size in bytes of the send buffer.
    pub send_bytes: u64,
    /// Size in bytes of the receive buffer.
    pub receive_bytes: u64,
    /// Location of the send buffer.
    pub send: BufferPlace,
    /// Location of the receive buffer.
    pub receive: BufferPlace,
}

/// The differences between the calls of the ranks. Every rank gets the same report. The collective was not submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffsetDifference {
    /// The ranks, in groups that made equal calls.
    pub groups: Vec<(RankSet, CollectiveCall)>,
}

impl fmt::Display for BufferPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BufferPlace::Window { segment, offset_bytes } => write!(f, "{segment}, offset {offset_bytes}"),
            BufferPlace::NoWindow => f.write_str("no window"),
        }
    }
}

impl fmt::Display for CollectiveCall {
    /// Writes `all-reduce of 1024 bytes at segment 0 of symmetric pool 0, offset 512`, followed by the destination if it differs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CollectiveCall { collective, send_bytes, receive_bytes, send, receive } = self;
        write!(f, "{collective} of {send_bytes} bytes at {send}")?;
        if (send, send_bytes) == (receive, receive_bytes) {
            return Ok(());
        }
        write!(f, " into {receive_bytes} bytes at {receive}")
    }
}

impl fmt::Display for OffsetDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ranks pass different buffers to one collective, which was not submitted")?;
        self.groups.iter().try_for_each(|(ranks, call)| write!(f, "; {}: {call}", Ranks(ranks)))?;
        f.write_str(": pass the same allocation on every rank")
    }
}

impl BufferPlace {
    pub(crate) fn of(entry: Option<&Entry>, address: u64) -> Self {
        match entry.and_then(|entry| Some((entry.key.base, entry.window()?))) {
            Some((base, window)) if window.handle().is_some() => {
                BufferPlace::Window { segment: window.name, offset_bytes: address - base }
            }
            _ => BufferPlace::NoWindow,
        }
    }
}

/// Version of a [`CallMessage`].
const PROTOCOL: u64 = 2 << 32 | VERSION as u64;

/// One rank's call. 80 bytes. All integers are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct CallMessage {
    /// [`PROTOCOL`].
    protocol: U64,
    /// [`Collective`] as a number.
    collective: U64,
    send_bytes: U64,
    receive_bytes: U64,
    send: PlaceMessage,
    receive: PlaceMessage,
}

/// The location of a buffer. 24 bytes; all zeros stand for a buffer outside all windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct PlaceMessage {
    segment: SegmentMessage,
    /// 1 if the buffer is in a window.
    kind: U32,
    offset_bytes: U64,
}

impl From<BufferPlace> for PlaceMessage {
    fn from(place: BufferPlace) -> Self {
        match place {
            BufferPlace::Window { segment, offset_bytes } => {
                PlaceMessage { segment: segment.into(), kind: 1.into(), offset_bytes: offset_bytes.into() }
            }
            BufferPlace::NoWindow => PlaceMessage::new_zeroed(),
        }
    }
}

impl PlaceMessage {
    /// Returns the location, or `None` for an unknown kind.
    fn decode(self) -> Option<BufferPlace> {
        match self.kind.get() {
            0 => Some(BufferPlace::NoWindow),
            1 => Some(BufferPlace::Window { segment: self.segment.into(), offset_bytes: self.offset_bytes.get() }),
            _ => None,
        }
    }
}

impl From<CollectiveCall> for CallMessage {
    fn from(call: CollectiveCall) -> Self {
        CallMessage {
            protocol: PROTOCOL.into(),
            collective: (call.collective as u64).into(),
            send_bytes: call.send_bytes.into(),
            receive_bytes: call.receive_bytes.into(),
            send: call.send.into(),
            receive: call.receive.into(),
        }
    }
}

impl CallMessage {
    /// Returns the call, or `None` for an unknown collective.
    fn decode(&self) -> Option<CollectiveCall> {
        Some(CollectiveCall {
            collective: Collective::ALL.into_iter().find(|one| *one as u64 == self.collective.get())?,
            send_bytes: self.send_bytes.get(),
            receive_bytes: self.receive_bytes.get(),
            send: self.send.decode()?,
            receive: self.receive.decode()?,
        })
    }
}

/// The result of comparing the calls of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    /// The calls differ.
    Calls(OffsetDifference),
    /// The ranks run different builds.
    Protocol(SyncDifference),
}

/// Compares the calls of all ranks.
///
/// # Errors
/// Returns an error if a message has the wrong length, or its collective is unknown.
pub(crate) fn compare(gathered: &Gathered) -> Result<Comparison, ProtocolError> {
    let decode = |(rank, message): (u32, &[u8])| {
        CallMessage::read_from_bytes(message).map_err(|_| ProtocolError::Garbled { rank })
    };
    let messages: Vec<CallMessage> = (0..).zip(gathered.iter()).map(decode).collect::<Result<_, _>>()?;
    let protocols = groups(messages.iter().map(|message| message.protocol.get()));
    if protocols.len() > 1 || protocols.iter().any(|(_, protocol)| *protocol != PROTOCOL) {
        return Ok(Comparison::Protocol(SyncDifference::of_protocols(protocols)));
    }
    let decode = |(rank, message): (u32, &CallMessage)| message.decode().ok_or(ProtocolError::Garbled { rank });
    let calls: Vec<CollectiveCall> = (0..).zip(&messages).map(decode).collect::<Result<_, _>>()?;
    let groups = groups(calls.into_iter());
    Ok(if groups.len() < 2 { Comparison::Equal } else { Comparison::Calls(OffsetDifference { groups }) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::message::SyncField;
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::{SegmentId, StreamId};
    use zerocopy::transmute;

    fn call(offset_bytes: u64) -> CollectiveCall {
        let segment = SymmetricSegment { pool: 1, group: StreamGroup::One(StreamId(2)), id: SegmentId(3) };
        let place = BufferPlace::Window { segment, offset_bytes };
        let collective = Collective::AllReduce;
        CollectiveCall { collective, send_bytes: 1024, receive_bytes: 1024, send: place, receive: place }
    }

    fn gathered(messages: &[CallMessage]) -> Gathered {
        Gathered::new(messages.as_bytes(), size_of::<CallMessage>())
    }

    #[test]
    fn messages_have_the_documented_layout() {
        assert_eq!(size_of::<CallMessage>(), 80);
        let message = CallMessage::from(CollectiveCall { receive: BufferPlace::NoWindow, ..call(512) });
        let words: [[u8; 8]; 10] = transmute!(message);
        let (segment, kind) = (1_u64 << 32 | 2, 1_u64 << 32 | 3);
        assert_eq!(
            words.map(u64::from_le_bytes),
            [2 << 32 | u64::from(VERSION), 1, 1024, 1024, segment, kind, 512, 0, 0, 0]
        );
    }

    #[test]
    fn decoding_a_call_inverts_encoding_it() {
        let elsewhere = CollectiveCall { receive: BufferPlace::NoWindow, ..call(512) };
        for call in [call(0), call(512), elsewhere] {
            assert_eq!(CallMessage::from(call).decode(), Some(call));
        }
    }

    #[test]
    fn invalid_messages_are_errors() {
        let mut message = CallMessage::from(call(0));
        message.collective = 99.into();
        assert_eq!(compare(&gathered(&[call(0).into(), message])), Err(ProtocolError::Garbled { rank: 1 }));
        assert_eq!(compare(&Gathered::new(vec![0; 64], 64)), Err(ProtocolError::Garbled { rank: 0 }));
        let mut message = CallMessage::from(call(0));
        message.send.kind = 7.into();
        assert_eq!(message.decode().map(|call| call.send), None);
    }

    #[test]
    fn another_version_is_a_difference_of_protocols() {
        let mut other = CallMessage::from(call(512));
        other.protocol += 1;
        let Ok(Comparison::Protocol(difference)) = compare(&gathered(&[call(0).into(), other])) else {
            panic!("the versions differ");
        };
        assert_eq!(difference.field, SyncField::Protocol);
        assert_eq!(
            difference.groups.iter().map(|(_, protocol)| *protocol).collect::<Vec<_>>(),
            [PROTOCOL, PROTOCOL + 1]
        );
    }

    #[test]
    fn calls_that_differ_are_grouped() {
        assert_eq!(compare(&gathered(&[call(0).into(), call(0).into()])), Ok(Comparison::Equal));
        let Ok(Comparison::Calls(difference)) = compare(&gathered(&[call(0).into(), call(8).into()])) else {
            panic!("the offsets differ");
        };
        assert_eq!(difference.groups.len(), 2);
    }

    #[test]
    fn a_difference_names_ranks_and_offsets() {
        let groups = groups([call(0), call(512), call(0)].into_iter());
        let difference = OffsetDifference { groups };
        assert_eq!(
            difference.to_string(),
            "the ranks pass different buffers to one collective, which was not submitted; \
             ranks 0,2: all-reduce of 1024 bytes at segment 3 of symmetric pool 1, stream 2, offset 0; \
             rank 1: all-reduce of 1024 bytes at segment 3 of symmetric pool 1, stream 2, offset 512: \
             pass the same allocation on every rank"
        );
    }
}
