//! The encoding of messages: little-endian words in sequence, padded with zeros.
//!
//! All messages of a round have the same length, determined by the question, so any all-gather can carry them. Received
//! bytes are untrusted: decoding never panics and returns an error for malformed input.

use super::protocol::ProtocolError;
use super::transport::Gathered;

/// Size of a message in bytes, except in the first round.
pub(crate) const MESSAGE_BYTES: usize = 1024;

/// Size in bytes of a message of the first round, which is the only round if the ranks agree.
pub(crate) const COMPARE_BYTES: usize = 64;

/// Encodes one message. Dropping it pads the message with zeros.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    end: usize,
}

impl<'a> Writer<'a> {
    /// Starts a message of `bytes` bytes at the end of `out`.
    pub(crate) fn new(out: &'a mut Vec<u8>, bytes: usize) -> Self {
        let end = out.len() + bytes;
        Writer { out, end }
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends a string with its length, truncated at a character boundary to `bytes_max` bytes, which must be below
    /// 2^16.
    pub(crate) fn text(&mut self, text: &str, bytes_max: usize) -> &mut Self {
        let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        self.bytes(&(end as u16).to_le_bytes()).bytes(&text.as_bytes()[..end])
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.out.extend_from_slice(bytes);
        assert!(self.out.len() <= self.end, "an answer exceeds its message");
        self
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.out.resize(self.end, 0);
    }
}

/// Decodes one rank's message.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rank: u32,
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(rank: u32, bytes: &'a [u8]) -> Self {
        Reader { rank, bytes }
    }

    /// Returns the error for a malformed message from this rank.
    pub(crate) fn garbled(&self) -> ProtocolError {
        ProtocolError::Garbled { rank: self.rank }
    }

    pub(crate) fn other_version(&self, version: u32) -> ProtocolError {
        ProtocolError::OtherVersion { rank: self.rank, version }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], ProtocolError> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or(ProtocolError::Garbled { rank: self.rank })?;
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, ProtocolError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, ProtocolError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, ProtocolError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, ProtocolError> {
        let len = self.array().map(u16::from_le_bytes)?;
        let bytes = self.take(len.into())?;
        std::str::from_utf8(bytes).map_err(|_| self.garbled())
    }

    /// Reads a count, which must be at most `max`.
    pub(crate) fn count(&mut self, max: usize) -> Result<usize, ProtocolError> {
        let count = self.u32()? as usize;
        if count <= max { Ok(count) } else { Err(self.garbled()) }
    }
}

/// Returns a reader for each message together with its rank.
pub(crate) fn readers(gathered: &Gathered) -> impl Iterator<Item = (u32, Reader<'_>)> {
    (0..).zip(gathered.iter()).map(|(rank, message)| (rank, Reader::new(rank, message)))
}
