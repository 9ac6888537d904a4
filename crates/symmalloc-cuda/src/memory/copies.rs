//! Copies between device memory and pinned chunks, over a stream of their own.

use crate::device::CudaDevice;
use crate::driver::STREAM_NON_BLOCKING;
use crate::error::DriverError;
use cudarc::driver::sys::CUstream;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use symmalloc_core::backend::Part;

/// Large enough for the full speed of the bus.
pub(super) const CHUNK_BYTES: usize = 32 << 20;

/// [`CHUNK_BYTES`] of pinned memory.
#[derive(Clone, Copy)]
pub(super) struct Chunk(pub(super) u64);

impl Chunk {
    pub(super) fn at(self, offset: usize) -> *mut c_void {
        (self.0 as usize + offset) as *mut c_void
    }
}

/// A part of a part that lies in one chunk.
pub(super) struct Piece {
    pub(super) address: u64,
    /// Which chunk of the image.
    pub(super) chunk: usize,
    /// Offset in the chunk.
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Piece {
    pub(super) fn addresses(&self) -> Range<u64> {
        self.address..self.address + self.len as u64
    }

    pub(super) fn image_offset(&self) -> u64 {
        (self.chunk * CHUNK_BYTES + self.at) as u64
    }
}

/// The pieces of parts that lie in chunks one after the other.
pub(super) fn pieces(parts: &[Part]) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(parts.len());
    for part in parts {
        let (mut address, mut offset) = (part.address.0, part.image_offset_bytes as usize);
        let end = offset + part.size_bytes as usize;
        while offset < end {
            let (chunk, at) = (offset / CHUNK_BYTES, offset % CHUNK_BYTES);
            let len = (end - offset).min(CHUNK_BYTES - at);
            pieces.push(Piece { address, chunk, at, len });
            address += len as u64;
            offset += len;
        }
    }
    pieces
}

#[derive(Clone, Copy)]
pub(super) enum Direction {
    ToHost,
    ToDevice,
}

/// A stream for copies, which are over when this is gone.
pub(super) struct Copies {
    device: Arc<CudaDevice>,
    stream: CUstream,
}

// SAFETY: a stream may be used from every thread on which its context is current.
unsafe impl Send for Copies {}

impl Copies {
    /// A context is current.
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DriverError> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is valid for writing, and a context is current.
        unsafe { device.driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING) }?;
        Ok(Copies { device: Arc::clone(device), stream })
    }

    pub(super) fn submit(&self, piece: &Piece, chunk: Chunk, direction: Direction) -> Result<(), DriverError> {
        let (driver, host) = (self.device.driver(), chunk.at(piece.at));
        match direction {
            // SAFETY: the piece is mapped, the chunk has room for it, and both stay until the copy was waited for.
            Direction::ToHost => unsafe { driver.copy_to_host(host, piece.address, piece.len, self.stream) },
            // SAFETY: as above.
            Direction::ToDevice => unsafe { driver.copy_to_device(piece.address, host, piece.len, self.stream) },
        }
    }

    pub(super) fn zero(&self, part: &Part) -> Result<(), DriverError> {
        // SAFETY: the part is mapped, and by the contract of `Backend` no stream uses it.
        unsafe { self.device.driver().memset_async(part.address.0, 0, part.size_bytes as usize, self.stream) }
    }

    pub(super) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is ours, and alive.
        unsafe { self.device.driver().stream_synchronize(self.stream) }
    }

    /// Waits for all of it, also after an error: the memory may go afterwards.
    pub(super) fn end<E: From<DriverError>>(&self, outcome: Result<(), E>) -> Result<(), E> {
        let waited = self.wait();
        outcome?;
        Ok(waited?)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // SAFETY: the stream is ours, and not used any more. Its work goes on if it was not waited for, and that only after an error
        // of the wait, after which nothing works.
        let _destroyed = unsafe { self.device.driver().stream_destroy(self.stream) };
    }
}
