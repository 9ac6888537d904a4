//! The messages between exporter and importer, as bytes. All numbers are little-endian.
//!
//! ```text
//!  importer                                exporter
//!  hello: version, access, device ───────►
//!                                 ◄─────── offer: layout; descriptors of the page and of the lease      or a refusal
//!  next: first chunk, number of chunks ──►
//!                                 ◄─────── batch: that many descriptors, or fabric handles               or a refusal
//!  ...
//!  attached ─────────────────────────────► counts the importer as a peer
//! ```
//! A reader does not trust its input: sizes are limited before memory is allocated for them, and a layout must be one that a pool can have.

use crate::memory::{Access, FABRIC_BYTES, HandleKind};
use std::ops::Range;
use symmalloc_core::{Digest, PoolId, StreamId};
use thiserror::Error;

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
        /// The kind.
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
        /// Number of received descriptors.
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

impl Hello {
    pub(super) const BYTES: usize = 36;

    pub(super) fn write(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..16].copy_from_slice(&code_of(self.access).to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pid.to_le_bytes());
        bytes[20..].copy_from_slice(&self.uuid);
        bytes
    }

    pub(super) fn read(bytes: &[u8; Self::BYTES]) -> Result<Self, MessageError> {
        let mut reader = Reader(bytes);
        reader.magic()?;
        let [version, access, pid] = [reader.u32()?, reader.u32()?, reader.u32()?];
        Ok(Hello { version, access: access_of(access)?, pid, uuid: reader.array()? })
    }
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

pub(super) const OFFER: u32 = 1;
pub(super) const BATCH_OF_HANDLES: u32 = 2;
pub(super) const REFUSAL: u32 = 3;

impl Header {
    pub(super) const BYTES: usize = 32;

    pub(super) fn new(kind: u32, handles: usize, body: &[u8]) -> Self {
        let (handles, length) = (handles as u32, body.len() as u32);
        Header { version: VERSION, kind, handles, length, checksum: checksum(body) }
    }

    pub(super) fn write(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        for (at, number) in [self.version, self.kind, self.handles, self.length].into_iter().enumerate() {
            bytes[8 + 4 * at..12 + 4 * at].copy_from_slice(&number.to_le_bytes());
        }
        bytes[24..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    pub(super) fn read(bytes: &[u8; Self::BYTES]) -> Result<Self, MessageError> {
        let mut reader = Reader(bytes);
        reader.magic()?;
        let [version, kind, handles, length] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        if length as usize > BODY_BYTES_MAX {
            return Err(MessageError::TooLong { bytes: u64::from(length), most: BODY_BYTES_MAX });
        }
        Ok(Header { version, kind, handles, length, checksum: reader.u64()? })
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

impl Step {
    pub(super) const BYTES: usize = 12;

    pub(super) fn write(self) -> [u8; Self::BYTES] {
        let words = match self {
            Step::Next { first, count } => [1, first, count],
            Step::Attached => [2, 0, 0],
            Step::GaveUp { code } => [3, code as u32, 0],
        };
        let mut bytes = [0; Self::BYTES];
        words.iter().enumerate().for_each(|(at, word)| bytes[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    pub(super) fn read(bytes: &[u8; Self::BYTES]) -> Result<Self, MessageError> {
        let mut reader = Reader(bytes);
        match [reader.u32()?, reader.u32()?, reader.u32()?] {
            [1, first, count] => Ok(Step::Next { first, count }),
            [2, ..] => Ok(Step::Attached),
            [3, code, _] => Ok(Step::GaveUp { code: code as i32 }),
            [kind, ..] => Err(MessageError::Unexpected { kind }),
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

impl Refusal {
    pub(super) fn write(self) -> Vec<u8> {
        let (kind, number, uuid) = match self {
            Refusal::Version => (1_u32, 0, [0; 16]),
            Refusal::Device { uuid } => (2, 0, uuid),
            Refusal::Access { given } => (3, u64::from(code_of(given)), [0; 16]),
            Refusal::Stale { word } => (4, word, [0; 16]),
            Refusal::Failed { code } => (5, u64::from(code as u32), [0; 16]),
        };
        [&kind.to_le_bytes()[..], &number.to_le_bytes(), &uuid].concat()
    }

    pub(super) fn read(body: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader(body);
        let (kind, number, uuid) = (reader.u32()?, reader.u64()?, reader.array()?);
        reader.end()?;
        match kind {
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
    /// End of the last chunk.
    pub(super) size_bytes: u64,
    /// Offsets in the segment, in order.
    pub(super) chunks: Vec<Range<u64>>,
}

/// An allocation in shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedAllocation {
    /// Index of the segment.
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

impl Layout {
    pub(super) fn write(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let u32s = |body: &mut Vec<u8>, number: u32| body.extend(number.to_le_bytes());
        let u64s = |body: &mut Vec<u8>, number: u64| body.extend(number.to_le_bytes());
        u32s(&mut body, self.pid);
        u32s(&mut body, self.pool.0);
        u64s(&mut body, self.digest.ops);
        u64s(&mut body, self.digest.value);
        u32s(&mut body, self.kind.flag());
        u32s(&mut body, self.segments.len() as u32);
        for segment in &self.segments {
            u64s(&mut body, segment.size_bytes);
            u32s(&mut body, segment.chunks.len() as u32);
            for chunk in &segment.chunks {
                u64s(&mut body, chunk.start);
                u64s(&mut body, chunk.end);
            }
        }
        u32s(&mut body, self.allocations.len() as u32);
        for allocation in &self.allocations {
            u32s(&mut body, allocation.segment);
            u32s(&mut body, u32::from(allocation.stream.0));
            u64s(&mut body, allocation.offset_bytes);
            u64s(&mut body, allocation.size_bytes);
            // The length plus 1; 0 means no name.
            u32s(&mut body, allocation.name.as_ref().map_or(0, |name| name.len() as u32 + 1));
            body.extend(allocation.name.iter().flat_map(|name| name.bytes()));
        }
        body
    }

    /// Parses and validates a layout.
    ///
    /// # Errors
    /// Returns an error if the bytes are not a layout, or not one that memory with this granularity can have.
    pub(super) fn read(body: &[u8], granularity_bytes: u64) -> Result<Self, MessageError> {
        let mut reader = Reader(body);
        let (pid, pool) = (reader.u32()?, PoolId(reader.u32()?));
        let digest = Digest { ops: reader.u64()?, value: reader.u64()? };
        let kind = match reader.u32()? {
            1 => HandleKind::FileDescriptor,
            8 => HandleKind::Fabric,
            _ => return Err(MessageError::Layout("kind of handles")),
        };
        let segments = reader.list(12, |reader| reader.segment(granularity_bytes))?;
        let chunks: usize = segments.iter().map(|segment| segment.chunks.len()).sum();
        let size_bytes = segments.iter().try_fold(0_u64, |sum, segment| sum.checked_add(segment.size_bytes));
        if chunks > CHUNKS_MAX || size_bytes.is_none_or(|sum| sum > ADDRESS_BYTES) {
            return Err(MessageError::Layout("size"));
        }
        let allocations = reader.list(28, |reader| reader.allocation(&segments))?;
        reader.end()?;
        Ok(Layout { pid, pool, digest, kind, segments, allocations })
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
    if body.len() != count * FABRIC_BYTES {
        return Err(MessageError::Length);
    }
    let mut reader = Reader(body);
    (0..count).map(|_| reader.array()).collect()
}

/// The remaining bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], MessageError> {
        let (read, rest) = self.0.split_at_checked(count).ok_or(MessageError::Length)?;
        self.0 = rest;
        Ok(read)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        Ok(self.bytes(N)?.try_into().expect("`bytes` returns N bytes"))
    }

    fn u32(&mut self) -> Result<u32, MessageError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, MessageError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn magic(&mut self) -> Result<(), MessageError> {
        if self.array()? == MAGIC { Ok(()) } else { Err(MessageError::Foreign) }
    }

    fn end(&self) -> Result<(), MessageError> {
        if self.0.is_empty() { Ok(()) } else { Err(MessageError::Length) }
    }

    /// Reads a count and that many entries of at least `least_bytes` each. Rejects a count that the remaining
    /// bytes cannot hold before it allocates memory.
    fn list<T>(
        &mut self,
        least_bytes: usize,
        read: impl Fn(&mut Self) -> Result<T, MessageError>,
    ) -> Result<Vec<T>, MessageError> {
        let count = self.u32()? as usize;
        if count > self.0.len() / least_bytes {
            return Err(MessageError::Length);
        }
        (0..count).map(|_| read(self)).collect()
    }

    fn segment(&mut self, granularity_bytes: u64) -> Result<SharedSegment, MessageError> {
        let size_bytes = self.u64()?;
        let chunks = self.list(16, |reader| Ok(reader.u64()?..reader.u64()?))?;
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
        let (segment, stream) = (self.u32()?, self.u32()?);
        let (offset_bytes, size_bytes) = (self.u64()?, self.u64()?);
        let name = match self.u32()? as usize {
            0 => None,
            length if length > NAME_BYTES_MAX + 1 => return Err(MessageError::Layout("names")),
            length => {
                let text = std::str::from_utf8(self.bytes(length - 1)?);
                Some(Box::from(text.map_err(|_| MessageError::Layout("names"))?))
            }
        };
        let stream = StreamId(u16::try_from(stream).map_err(|_| wrong.clone())?);
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
