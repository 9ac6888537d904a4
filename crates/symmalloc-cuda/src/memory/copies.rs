//! Copies between device memory and pinned chunks, on a dedicated stream.

use crate::device::CudaDevice;
use crate::driver::STREAM_NON_BLOCKING;
use crate::error::DriverError;
use cudarc::driver::sys::CUstream;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use symmalloc_core::backend::Part;

/// Size in bytes of a pinned chunk: large enough to reach the full bus bandwidth.
pub(super) const CHUNK_BYTES: usize = 32 << 20;

/// A chunk of [`CHUNK_BYTES`] bytes of pinned memory.
#[derive(Clone, Copy)]
pub(super) struct Chunk(pub(super) u64);

impl Chunk {
    pub(super) fn at(self, offset: usize) -> *mut c_void {
        (self.0 as usize + offset) as *mut c_void
    }
}

/// A subrange of a [`Part`] that lies in one chunk.
pub(super) struct Piece {
    pub(super) address: u64,
    /// Index of the chunk in the image.
    pub(super) chunk: usize,
    /// Offset in the chunk in bytes.
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Piece {
    pub(super) fn addresses(&self) -> Range<u64> {
        self.address..self.address + self.len as u64
    }
}

/// Splits the parts of an image into pieces, each of which lies in one chunk. The image fills consecutive chunks.
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

/// A stream for copies. The copies must be finished before it is dropped.
pub(super) struct Copies {
    device: Arc<CudaDevice>,
    stream: CUstream,
}

// SAFETY: any thread on which the stream's context is current may use the stream.
unsafe impl Send for Copies {}

impl Copies {
    /// Creates the stream. A context must be current.
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DriverError> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is valid for writing, and a context is current.
        unsafe { device.driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING) }?;
        Ok(Copies { device: Arc::clone(device), stream })
    }

    pub(super) fn submit(&self, piece: &Piece, chunk: Chunk, direction: Direction) -> Result<(), DriverError> {
        let (driver, host) = (self.device.driver(), chunk.at(piece.at));
        match direction {
            // SAFETY: the piece is mapped, the chunk has room for it, and both remain valid until the copy has been waited for.
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
        // SAFETY: this value owns the stream, which is alive.
        unsafe { self.device.driver().stream_synchronize(self.stream) }
    }

    /// Waits for all copies, even if `outcome` is an error, because the caller may release the memory afterwards. Returns `outcome` if it
    /// is an error, and the result of the wait otherwise.
    pub(super) fn end<E: From<DriverError>>(&self, outcome: Result<(), E>) -> Result<(), E> {
        let waited = self.wait();
        outcome?;
        Ok(waited?)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // SAFETY: this value owns the stream, which is not used afterwards. Work can still be running only if the wait failed, and after
        // such an error the context is unusable.
        let _destroyed = unsafe { self.device.driver().stream_destroy(self.stream) };
    }
}
