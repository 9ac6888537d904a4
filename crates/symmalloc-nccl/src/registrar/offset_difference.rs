//! One rank's call of a collective, its message to other ranks, and the differences between calls.

use crate::collectives::operation::Collective;
use crate::sync::actions::SegmentName;
use crate::windows::window::{Entry, RegisteredAs};
use std::fmt;
use symmalloc_agreement::RankSet;
use symmalloc_core::{SegmentId, StreamId};

/// The location of a collective's buffer, in names that all ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum BufferPlace {
    /// In a window.
    Window {
        /// The segment.
        segment: SegmentName,
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

/// The differences between the calls of the ranks. Every rank has the same report. The collective was not submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffsetDifference {
    /// Ranks grouped by their call.
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
        self.groups.iter().try_for_each(|(ranks, call)| write!(f, "; ranks {ranks}: {call}"))?;
        f.write_str(": pass the same allocation on every rank")
    }
}

impl BufferPlace {
    pub(super) fn of(entry: Option<&Entry>, address: u64) -> Self {
        match entry {
            Some(Entry { segment, name: Some(name), kind: RegisteredAs::Window(_) }) => {
                BufferPlace::Window { segment: *name, offset_bytes: address - segment.base }
            }
            _ => BufferPlace::NoWindow,
        }
    }

    fn words(self) -> [u64; 3] {
        match self {
            BufferPlace::Window { segment: SegmentName { pool, stream, segment }, offset_bytes } => {
                let stream = stream.map_or(u32::MAX, |stream| stream.0.into());
                [(u64::from(pool) << 32) | u64::from(stream), (u64::from(segment.0) << 1) | 1, offset_bytes]
            }
            BufferPlace::NoWindow => [0; 3],
        }
    }

    fn from_words([heap, segment, offset_bytes]: [u64; 3]) -> Self {
        if segment & 1 == 0 {
            return BufferPlace::NoWindow;
        }
        BufferPlace::Window {
            segment: SegmentName {
                pool: (heap >> 32) as u32,
                stream: u16::try_from(heap as u32).ok().map(StreamId),
                segment: SegmentId((segment >> 1) as u32),
            },
            offset_bytes,
        }
    }
}

const WORDS: usize = 9;

impl CollectiveCall {
    pub(super) fn to_message(self) -> Vec<u8> {
        let [send, receive] = [self.send.words(), self.receive.words()];
        let head = [self.collective as u64, self.send_bytes, self.receive_bytes];
        head.into_iter().chain(send).chain(receive).flat_map(u64::to_le_bytes).collect()
    }

    /// Decodes a message. Returns `None` if it does not contain a call because its rank is elsewhere in the program.
    pub(super) fn from_message(message: &[u8]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(message.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let [collective, send_bytes, receive_bytes, s0, s1, s2, r0, r1, r2] = words;
        Some(CollectiveCall {
            collective: Collective::ALL.into_iter().find(|one| *one as u64 == collective)?,
            send_bytes,
            receive_bytes,
            send: BufferPlace::from_words([s0, s1, s2]),
            receive: BufferPlace::from_words([r0, r1, r2]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::agreement::groups;

    fn call(offset_bytes: u64) -> CollectiveCall {
        let segment = SegmentName { pool: 1, stream: Some(StreamId(2)), segment: SegmentId(3) };
        let place = BufferPlace::Window { segment, offset_bytes };
        let collective = Collective::AllReduce;
        CollectiveCall { collective, send_bytes: 1024, receive_bytes: 1024, send: place, receive: place }
    }

    #[test]
    fn a_call_survives_its_message() {
        let elsewhere = CollectiveCall { receive: BufferPlace::NoWindow, ..call(512) };
        for call in [call(0), call(512), elsewhere] {
            assert_eq!(CollectiveCall::from_message(&call.to_message()), Some(call));
        }
        assert_eq!(CollectiveCall::from_message(&[0; 8 * WORDS]), None);
    }

    #[test]
    fn a_difference_names_ranks_and_offsets() {
        let groups = groups([call(0), call(512), call(0)].into_iter());
        let difference = OffsetDifference { groups };
        assert_eq!(
            difference.to_string(),
            "the ranks pass different buffers to one collective, which was not submitted; \
             ranks 0,2: all-reduce of 1024 bytes at segment 3 of symmetric pool 1, stream 2, offset 0; \
             ranks 1: all-reduce of 1024 bytes at segment 3 of symmetric pool 1, stream 2, offset 512: \
             pass the same allocation on every rank"
        );
    }
}
