//! Buffered input for a pickle, which tracks its offset.
//!
//! The reader takes some 40 million tiny pieces from a file of 100 MB. This type therefore has its own buffer and accesses the source only
//! to refill it. It never trusts lengths in the file: [`Input::skip`] walks over the data, and no memory is allocated for a stated length.

use std::io::{self, Read};

use super::error::PickleError;

const BUFFER_BYTES: usize = 64 << 10;

/// A source of bytes with its current offset.
pub(super) struct Input<R> {
    source: R,
    buffer: Box<[u8]>,
    /// Index in the buffer of the next byte to return. `next <= end <= buffer.len()`.
    next: usize,
    /// End of the data in the buffer.
    end: usize,
    /// Offset of `buffer[0]` in the source.
    buffer_offset: u64,
}

impl<R: Read> Input<R> {
    pub(super) fn new(source: R) -> Self {
        Input { source, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), next: 0, end: 0, buffer_offset: 0 }
    }

    /// Returns the offset of the next byte, from the start of the (decompressed) pickle.
    #[inline]
    pub(super) fn offset(&self) -> u64 {
        self.buffer_offset + self.next as u64
    }

    /// Refills the empty buffer. Returns `false` at the end of the source.
    #[cold]
    fn refill(&mut self) -> Result<bool, PickleError> {
        debug_assert_eq!(self.next, self.end);
        self.buffer_offset += self.end as u64;
        (self.next, self.end) = (0, 0);
        loop {
            match self.source.read(&mut self.buffer) {
                Ok(bytes) => {
                    self.end = bytes;
                    return Ok(bytes > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(PickleError::Read { offset: self.offset(), source }),
            }
        }
    }

    /// Returns `true` if the source has no more bytes.
    pub(super) fn at_end(&mut self) -> Result<bool, PickleError> {
        Ok(self.next == self.end && !self.refill()?)
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8, PickleError> {
        if self.next == self.end && !self.refill()? {
            return Err(PickleError::Torn { offset: self.offset() });
        }
        let byte = self.buffer[self.next];
        self.next += 1;
        Ok(byte)
    }

    /// Fills `out` with the next bytes.
    #[inline]
    pub(super) fn fill(&mut self, out: &mut [u8]) -> Result<(), PickleError> {
        if let Some(bytes) = self.buffer[self.next..self.end].get(..out.len()) {
            out.copy_from_slice(bytes);
            self.next += out.len();
            return Ok(());
        }
        for slot in out {
            *slot = self.byte()?;
        }
        Ok(())
    }

    /// Returns the next N bytes.
    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Skips `count` bytes.
    pub(super) fn skip(&mut self, mut count: u64) -> Result<(), PickleError> {
        loop {
            let here = (self.end - self.next) as u64;
            if count <= here {
                self.next += count as usize;
                return Ok(());
            }
            count -= here;
            self.next = self.end;
            if !self.refill()? {
                return Err(PickleError::Torn { offset: self.offset() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that returns one byte at a time, so that every piece requires a refill.
    struct Trickle<'a>(&'a [u8]);

    impl Read for Trickle<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.0.len().min(buffer.len()).min(1);
            self.0.read(&mut buffer[..count])
        }
    }

    #[test]
    fn values_that_cross_a_refill_are_read_whole() {
        let bytes: Vec<u8> = (0..=255).collect();
        let mut input = Input::new(Trickle(&bytes));
        assert_eq!(input.byte().unwrap(), 0);
        assert_eq!(input.array().unwrap(), [1, 2, 3, 4]);
        input.skip(245).unwrap();
        assert_eq!(input.offset(), 250);
        assert_eq!(input.array().unwrap(), [250, 251, 252, 253, 254, 255]);
        assert!(input.at_end().unwrap());
    }

    #[test]
    fn the_end_of_the_source_is_named_by_its_offset() {
        for ends in [
            Input::new(&b"abc"[..]).array::<4>().err(),
            Input::new(&b"abc"[..]).skip(4).err(),
            Input::new(&b"abc"[..]).skip(u64::MAX).err(),
        ] {
            assert!(matches!(ends, Some(PickleError::Torn { offset: 3 })), "{ends:?}");
        }
    }
}
