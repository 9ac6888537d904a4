//! The messages between exporter and importer. All integers are little-endian.
//!
//! ```text
//!  importer                                exporter
//!  HelloMessage: version, access, device ► 36 bytes
//!                                 ◄─────── offer: HeaderMessage, 32 bytes; layout; descriptors of the page and of the lease
//!  StepMessage: next chunks ─────────────► 12 bytes
//!                                 ◄─────── batch: HeaderMessage; that many descriptors, or fabric handles
//!  ...
//!  StepMessage: attached ────────────────► counts the importer as a peer
//!
//!  instead of an offer or a batch:  refusal: HeaderMessage; RefusalMessage, 28 bytes
//!
//!  layout   LayoutHead, 32 bytes │ SegmentHead, 12 bytes, and ChunkMessage, 16 bytes, for each chunk      for each segment
//!           number of allocations, 4 bytes │ AllocationHead, 28 bytes, and its name                       for each allocation
//! ```
//! A reader does not trust its input. Every bit pattern is a valid struct. Sizes are limited before memory is allocated for them, and a
//! layout must be one that a pool can have. The first message of each side contains [`VERSION`].

use crate::memory::{Access, FABRIC_BYTES, HandleKind};
use std::ops::Range;
use symmalloc_core::{Digest, PoolId, StreamId};
use thiserror::Error;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

/// Incremented when older versions would misread a message.
pub(super) const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"symshare";
/// Maximum size of a layout in bytes: about 200,000 allocations with names.
pub(super) const BODY_BYTES_MAX: usize = 16 << 20;
/// Maximum number of handles in one batch, which limits the number of open descriptors.
pub(super) const BATCH: usize = 64;
const CHUNKS_MAX: usize = 1 << 20;
const NAME_BYTES_MAX: usize = 4096;
/// Size of a device's address space in bytes.
const ADDRESS_BYTES: u64 = 1 << 47;

/// The reason a message is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The message does not start with the expected magic number.
    #[error("it does not start with the magic number")]
    Foreign,
    /// The kind of the message is not expected at this point.
    #[error("a message of kind {kind} is not expected here")]
    Unexpected {
        /// The kind of the received message.
        kind: u32,
    },
    /// The message exceeds the maximum length.
    #[error("it has {bytes} bytes, more than the limit of {most}")]
    TooLong {
        /// The length in the header, in bytes.
        bytes: u64,
        /// Maximum length in bytes.
        most: usize,
    },
    /// The message is shorter or longer than its contents require.
    #[error("its length does not match its contents")]
    Length,
    /// The checksum does not match.
    #[error("its checksum does not match")]
    Checksum,
    /// The number of received descriptors does not match.
    #[error("it came with {got} descriptors, not {wanted}")]
    Descriptors {
        /// Number of descriptors that arrived.
        got: usize,
        /// Number of required descriptors.
        wanted: usize,
    },
    /// A descriptor has the wrong type.
    #[error("its descriptors have the wrong type")]
    Descriptor,
    /// The contents describe an impossible pool.
    #[error("invalid {0}")]
    Layout(&'static str),
}

/// The importer's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) access: Access,
    /// The importer's process id, as reported by the importer.
    pub(super) pid: u32,
    pub(super) uuid: [u8; 16],
}

/// The bytes of a [`Hello`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloMessage {
    magic: [u8; 8],
    version: U32,
    /// The requested access: 1 to read, 2 to read and write.
    access: U32,
    pid: U32,
    uuid: [u8; 16],
}

impl Hello {
    pub(super) const BYTES: usize = size_of::<HelloMessage>();

    pub(super) fn write(&self) -> [u8; Self::BYTES] {
        let Hello { version, access, pid, uuid } = *self;
        transmute!(HelloMessage {
            magic: MAGIC,
            version: version.into(),
            access: code_of(access).into(),
            pid: pid.into(),
            uuid,
        })
    }

    pub(super) fn read(bytes: [u8; Self::BYTES]) -> Result<Self, MessageError> {
        let HelloMessage { magic, version, access, pid, uuid } = transmute!(bytes);
        check_magic(magic)?;
        Ok(Hello { version: version.get(), access: access_of(access.get())?, pid: pid.get(), uuid })
    }
}

fn check_magic(magic: [u8; 8]) -> Result<(), MessageError> {
    if magic == MAGIC { Ok(()) } else { Err(MessageError::Foreign) }
}

fn code_of(access: Access) -> u32 {
    match access {
        Access::Read => 1,
        Access::ReadWrite => 2,
    }
}

fn access_of(code: u32) -> Result<Access, MessageError> {
    match code {
        1 => Ok(Access::Read),
        2 => Ok(Access::ReadWrite),
        _ => Err(MessageError::Layout("access")),
    }
}

/// The header of an exporter's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) kind: u32,
    /// Number of handles that come with the message.
    pub(super) handles: u32,
    /// Number of bytes that follow.
    pub(super) length: u32,
    pub(super) checksum: u64,
}

/// The bytes of a [`Header`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeaderMessage {
    magic: [u8; 8],
    version: U32,
    /// [`OFFER`], [`BATCH_OF_HANDLES`] or [`REFUSAL`].
    kind: U32,
    handles: U32,
    length: U32,
    checksum: U64,
}

pub(super) const OFFER: u32 = 1;
pub(super) const BATCH_OF_HANDLES: u32 = 2;
pub(super) const REFUSAL: u32 = 3;

impl Header {
    pub(super) const BYTES: usize = size_of::<HeaderMessage>();

    pub(super) fn new(kind: u32, handles: usize, body: &[u8]) -> Self {
        let (handles, length) = (handles as u32, body.len() as u32);
        Header { version: VERSION, kind, handles, length, checksum: checksum(body) }
    }

    pub(super) fn write(&self) -> [u8; Self::BYTES] {
        let Header { version, kind, handles, length, checksum } = *self;
        transmute!(HeaderMessage {
            magic: MAGIC,
            version: version.into(),
            kind: kind.into(),
            handles: handles.into(),
            length: length.into(),
            checksum: checksum.into(),
        })
    }

    pub(super) fn read(bytes: [u8; Self::BYTES]) -> Result<Self, MessageError> {
        let HeaderMessage { magic, version, kind, handles, length, checksum } = transmute!(bytes);
        check_magic(magic)?;
        let length = length.get();
        if length as usize > BODY_BYTES_MAX {
            return Err(MessageError::TooLong { bytes: u64::from(length), most: BODY_BYTES_MAX });
        }
        Ok(Header {
            version: version.get(),
            kind: kind.get(),
            handles: handles.get(),
            length,
            checksum: checksum.get(),
        })
    }

    pub(super) fn check(&self, body: &[u8]) -> Result<(), MessageError> {
        if checksum(body) == self.checksum { Ok(()) } else { Err(MessageError::Checksum) }
    }
}

/// Returns the FNV-1a hash of the bytes.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// An importer's message after its hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Requests the handles of `count` chunks, starting with chunk `first`.
    Next { first: u32, count: u32 },
    /// Reports that everything is mapped.
    Attached,
    /// Reports a failure, with the driver's code.
    GaveUp { code: i32 },
}

/// The bytes of a [`Step`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct StepMessage {
    /// The kind of step: 1 is next, 2 is attached, 3 is gave up.
    kind: U32,
    /// The first chunk, or the driver's code.
    first: U32,
    count: U32,
}

impl Step {
    pub(super) const BYTES: usize = size_of::<StepMessage>();

    pub(super) fn write(self) -> [u8; Self::BYTES] {
        let (kind, first, count): (u32, u32, u32) = match self {
            Step::Next { first, count } => (1, first, count),
            Step::Attached => (2, 0, 0),
            Step::GaveUp { code } => (3, code as u32, 0),
        };
        transmute!(StepMessage { kind: kind.into(), first: first.into(), count: count.into() })
    }

    pub(super) fn read(bytes: [u8; Self::BYTES]) -> Result<Self, MessageError> {
        let StepMessage { kind, first, count } = transmute!(bytes);
        match kind.get() {
            1 => Ok(Step::Next { first: first.get(), count: count.get() }),
            2 => Ok(Step::Attached),
            3 => Ok(Step::GaveUp { code: first.get() as i32 }),
            kind => Err(MessageError::Unexpected { kind }),
        }
    }
}

/// The reason an exporter rejects a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Version,
    Device { uuid: [u8; 16] },
    Access { given: Access },
    Stale { word: u64 },
    Failed { code: i32 },
}

/// The bytes of a [`Refusal`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RefusalMessage {
    kind: U32,
    number: U64,
    uuid: [u8; 16],
}

impl Refusal {
    pub(super) fn write(self) -> Vec<u8> {
        let (kind, number, uuid): (u32, u64, _) = match self {
            Refusal::Version => (1, 0, [0; 16]),
            Refusal::Device { uuid } => (2, 0, uuid),
            Refusal::Access { given } => (3, u64::from(code_of(given)), [0; 16]),
            Refusal::Stale { word } => (4, word, [0; 16]),
            Refusal::Failed { code } => (5, u64::from(code as u32), [0; 16]),
        };
        RefusalMessage { kind: kind.into(), number: number.into(), uuid }.as_bytes().to_vec()
    }

    pub(super) fn read(body: &[u8]) -> Result<Self, MessageError> {
        let message = RefusalMessage::read_from_bytes(body).map_err(|_| MessageError::Length)?;
        let RefusalMessage { kind, number, uuid } = message;
        let number = number.get();
        match kind.get() {
            1 => Ok(Refusal::Version),
            2 => Ok(Refusal::Device { uuid }),
            3 => Ok(Refusal::Access { given: access_of(number as u32)? }),
            4 => Ok(Refusal::Stale { word: number }),
            5 => Ok(Refusal::Failed { code: number as u32 as i32 }),
            kind => Err(MessageError::Unexpected { kind }),
        }
    }
}

/// A segment whose memory is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedSegment {
    /// Offset of the end of the last chunk, in bytes.
    pub(super) size_bytes: u64,
    /// The offsets of each chunk in the segment, in order.
    pub(super) chunks: Vec<Range<u64>>,
}

/// An allocation in shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedAllocation {
    /// Index of the segment in the layout.
    pub(super) segment: u32,
    pub(super) stream: StreamId,
    pub(super) offset_bytes: u64,
    /// Size in bytes that the program requested.
    pub(super) size_bytes: u64,
    pub(super) name: Option<Box<str>>,
}

/// The layout of the shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) pid: u32,
    pub(super) pool: PoolId,
    pub(super) digest: Digest,
    pub(super) kind: HandleKind,
    pub(super) segments: Vec<SharedSegment>,
    pub(super) allocations: Vec<SharedAllocation>,
}

/// The start of a layout's bytes. The segments follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct LayoutHead {
    pid: U32,
    pool: U32,
    ops: U64,
    digest: U64,
    /// The kind of the handles, as [`HandleKind::flag`].
    kind: U32,
    segments: U32,
}

/// The start of a segment's bytes. The chunks follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SegmentHead {
    size_bytes: U64,
    chunks: U32,
}

/// A part of a segment, as offsets in bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ChunkMessage {
    start: U64,
    end: U64,
}

/// The start of an allocation's bytes. The name follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct AllocationHead {
    segment: U32,
    stream: U32,
    offset_bytes: U64,
    size_bytes: U64,
    /// Length of the name in bytes plus 1; 0 if there is none.
    name: U32,
}

impl Layout {
    pub(super) fn write(&self) -> Vec<u8> {
        let Layout { pid, pool, digest, kind, segments, allocations } = self;
        let mut body = Vec::new();
        let head = LayoutHead {
            pid: (*pid).into(),
            pool: pool.0.into(),
            ops: digest.ops.into(),
            digest: digest.value.into(),
            kind: kind.flag().into(),
            segments: (segments.len() as u32).into(),
        };
        body.extend_from_slice(head.as_bytes());
        for SharedSegment { size_bytes, chunks } in segments {
            let head = SegmentHead { size_bytes: (*size_bytes).into(), chunks: (chunks.len() as u32).into() };
            body.extend_from_slice(head.as_bytes());
            for Range { start, end } in chunks.iter().cloned() {
                body.extend_from_slice(ChunkMessage { start: start.into(), end: end.into() }.as_bytes());
            }
        }
        body.extend_from_slice(&(allocations.len() as u32).to_le_bytes());
        for SharedAllocation { segment, stream, offset_bytes, size_bytes, name } in allocations {
            let head = AllocationHead {
                segment: (*segment).into(),
                stream: u32::from(stream.0).into(),
                offset_bytes: (*offset_bytes).into(),
                size_bytes: (*size_bytes).into(),
                name: name.as_ref().map_or(0, |name| name.len() as u32 + 1).into(),
            };
            body.extend_from_slice(head.as_bytes());
            body.extend(name.iter().flat_map(|name| name.bytes()));
        }
        body
    }

    /// Parses and validates a layout.
    ///
    /// # Errors
    /// Returns an error if the bytes are not a layout, or memory with this granularity cannot have such a layout.
    pub(super) fn read(body: &[u8], granularity_bytes: u64) -> Result<Self, MessageError> {
        let mut reader = Reader(body);
        let head: LayoutHead = reader.next()?;
        let kind = match head.kind.get() {
            1 => HandleKind::FileDescriptor,
            8 => HandleKind::Fabric,
            _ => return Err(MessageError::Layout("kind of handles")),
        };
        let segments =
            reader.list(head.segments.get(), size_of::<SegmentHead>(), |reader| reader.segment(granularity_bytes))?;
        let chunks: usize = segments.iter().map(|segment| segment.chunks.len()).sum();
        let size_bytes = segments.iter().try_fold(0_u64, |sum, segment| sum.checked_add(segment.size_bytes));
        if chunks > CHUNKS_MAX || size_bytes.is_none_or(|sum| sum > ADDRESS_BYTES) {
            return Err(MessageError::Layout("size"));
        }
        let count: U32 = reader.next()?;
        let allocations =
            reader.list(count.get(), size_of::<AllocationHead>(), |reader| reader.allocation(&segments))?;
        reader.end()?;
        let digest = Digest { ops: head.ops.get(), value: head.digest.get() };
        Ok(Layout { pid: head.pid.get(), pool: PoolId(head.pool.get()), digest, kind, segments, allocations })
    }

    /// Returns every chunk with the index of its segment, in the order in which handles are sent.
    pub(super) fn chunks(&self) -> impl Iterator<Item = (usize, &Range<u64>)> {
        let of = |(index, segment): (usize, _)| {
            let segment: &SharedSegment = segment;
            segment.chunks.iter().map(move |chunk| (index, chunk))
        };
        self.segments.iter().enumerate().flat_map(of)
    }

    pub(super) fn mapped_bytes(&self) -> u64 {
        self.chunks().map(|(_, chunk)| chunk.end - chunk.start).sum()
    }
}

impl SharedSegment {
    /// Returns `true` if chunks cover a part without a gap.
    fn covers(&self, part: &Range<u64>) -> bool {
        let first = self.chunks.partition_point(|chunk| chunk.end <= part.start);
        let mut end = part.start;
        for chunk in &self.chunks[first..] {
            if chunk.start > end || end >= part.end {
                break;
            }
            end = chunk.end;
        }
        end >= part.end
    }
}

/// Parses the fabric handles in the body of a batch.
pub(super) fn fabric_handles(body: &[u8], count: usize) -> Result<Vec<[u8; FABRIC_BYTES]>, MessageError> {
    match body.as_chunks() {
        (handles, []) if handles.len() == count => Ok(handles.to_vec()),
        _ => Err(MessageError::Length),
    }
}

/// The remaining bytes of a layout.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Returns the next struct.
    fn next<T: FromBytes>(&mut self) -> Result<T, MessageError> {
        let (read, rest) = T::read_from_prefix(self.0).map_err(|_| MessageError::Length)?;
        self.0 = rest;
        Ok(read)
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], MessageError> {
        let (read, rest) = self.0.split_at_checked(count).ok_or(MessageError::Length)?;
        self.0 = rest;
        Ok(read)
    }

    fn end(&self) -> Result<(), MessageError> {
        if self.0.is_empty() { Ok(()) } else { Err(MessageError::Length) }
    }

    /// Reads `count` entries of at least `least_bytes` each. Before it allocates memory, rejects a count that the remaining bytes cannot
    /// hold.
    fn list<T>(
        &mut self,
        count: u32,
        least_bytes: usize,
        read: impl Fn(&mut Self) -> Result<T, MessageError>,
    ) -> Result<Vec<T>, MessageError> {
        if count as usize > self.0.len() / least_bytes {
            return Err(MessageError::Length);
        }
        (0..count).map(|_| read(self)).collect()
    }

    fn segment(&mut self, granularity_bytes: u64) -> Result<SharedSegment, MessageError> {
        let SegmentHead { size_bytes, chunks } = self.next()?;
        let size_bytes = size_bytes.get();
        let chunks = self.list(chunks.get(), size_of::<ChunkMessage>(), |reader| {
            let ChunkMessage { start, end } = reader.next()?;
            Ok(start.get()..end.get())
        })?;
        let mut end = 0;
        for chunk in &chunks {
            let is_whole = chunk.start.is_multiple_of(granularity_bytes) && chunk.end.is_multiple_of(granularity_bytes);
            if chunk.start < end || chunk.end <= chunk.start || !is_whole {
                return Err(MessageError::Layout("chunks"));
            }
            end = chunk.end;
        }
        if chunks.is_empty() || end != size_bytes || size_bytes > ADDRESS_BYTES {
            return Err(MessageError::Layout("segments"));
        }
        Ok(SharedSegment { size_bytes, chunks })
    }

    fn allocation(&mut self, segments: &[SharedSegment]) -> Result<SharedAllocation, MessageError> {
        let wrong = MessageError::Layout("allocations");
        let head: AllocationHead = self.next()?;
        let (segment, offset_bytes, size_bytes) = (head.segment.get(), head.offset_bytes.get(), head.size_bytes.get());
        let name = match head.name.get() as usize {
            0 => None,
            length if length > NAME_BYTES_MAX + 1 => return Err(MessageError::Layout("names")),
            length => {
                let text = std::str::from_utf8(self.bytes(length - 1)?);
                Some(Box::from(text.map_err(|_| MessageError::Layout("names"))?))
            }
        };
        let stream = StreamId(u16::try_from(head.stream.get()).map_err(|_| wrong.clone())?);
        let end = offset_bytes.checked_add(size_bytes).ok_or(wrong.clone())?;
        let is_inside = segments.get(segment as usize).is_some_and(|of| of.covers(&(offset_bytes..end)));
        if size_bytes == 0 || !is_inside {
            return Err(wrong);
        }
        Ok(SharedAllocation { segment, stream, offset_bytes, size_bytes, name })
    }
}

/// Truncates a name to the maximum length that a message can carry.
pub(super) fn short(name: &str) -> &str {
    let mut end = name.len().min(NAME_BYTES_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of chunks, some with a single element")]
mod tests;
