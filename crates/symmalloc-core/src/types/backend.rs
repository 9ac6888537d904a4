//! The contract between the allocator and the source of device memory.
//!
//! A backend hands out address ranges, backs them with memory, and orders work on streams. Two kinds exist: the
//! simulator (the crate `symmalloc-sim`) and CUDA. One conformance suite, the crate `symmalloc-conformance`, runs against
//! every implementation.
//!
//! ```text
//! reserve ──► map ──► (the program uses the bytes) ──► unmap ──► release
//!             map more granules at the end, or into a hole
//! map_pieces ──► alias, from another range, any number of times ──► unmap the aliases ──► unmap
//! reserve_at ──► carve, a part at a time ──► (as after reserve) ──► release the parts ──► release_space
//! record(stream) ──► wait(other stream, event) any number of times ──► recycle(event)
//! fill ──► compare ──► compared, until it returns a result
//! save ──► unmap ──► map, at the same addresses ──► load or zero ──► discard
//! ```
//!
//! The allocator guarantees:
//! - Offsets and sizes are multiples of [`Backend::granularity_bytes`], and sizes are not zero.
//! - It maps a granule at most once.
//! - It unmaps everything in a range before it releases the range, and all aliases of memory before the memory itself.
//! - It carves disjoint parts out of a space, and releases all of them before the space.
//! - Before `unmap`, it calls `synchronize` for every stream that may still use the bytes.
//! - It recycles an event once and does not use it afterwards.
//! - It never calls the backend for the same range from two threads at once.
//!
//! A backend guarantees:
//! - A call that returns an error has changed nothing.
//! - Only [`Backend::synchronize`] and the calls that copy block on device work.
//! - Any thread can call it.
//!
//! No result of a backend call decides a placement (rule D1): addresses are only passed on to the program, and a failed
//! call becomes a typed error.

use crate::types::base::{Base, BaseError};
use crate::types::ids::{PoolId, StreamId};

/// A device address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// Returns this address plus `offset_bytes`.
    #[inline]
    pub(crate) fn plus(self, offset_bytes: u64) -> Self {
        DeviceAddress(self.0 + offset_bytes)
    }
}

/// A reserved range of device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address; a multiple of the granularity.
    pub base: DeviceAddress,
    /// Length in bytes; a multiple of the granularity.
    pub size_bytes: u64,
}

/// A range and an offset in it, in bytes.
pub type RangeOffset = (Range, u64);

/// A part of live memory and the position of its copy in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First address. The part lies in one range and is mapped.
    pub address: DeviceAddress,
    /// Its length in bytes; a multiple of 512.
    pub size_bytes: u64,
    /// Offset of its copy in the image, in bytes.
    pub image_offset_bytes: u64,
}

/// The backend's identifier of bytes that it keeps while their memory is unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image(pub u64);

/// The maximum number of bytes that one comparison covers.
pub const COMPARED_BYTES_MAX: u64 = 64 << 10;

/// The backend's identifier of a comparison in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison(pub u64);

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// The stream has not reached the comparison yet.
    Pending,
    /// All bytes hold the pattern.
    Equal,
    /// Some bytes do not.
    Different {
        /// Offset of the first of them.
        offset_bytes: u64,
    },
}

/// Bytes of live memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// First address. Not necessarily aligned. The bytes lie in one range and are mapped.
    pub address: DeviceAddress,
    /// Their number; not 0.
    pub size_bytes: u64,
}

/// The backend's identifier of a recorded event. It has no meaning outside that backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// A failed backend call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {code} ({reason})")]
#[non_exhaustive]
pub struct BackendError {
    /// The driver call, for example `cuMemCreate`.
    pub call: &'static str,
    /// The driver's code.
    pub code: i32,
    /// The meaning of the code for the allocator.
    pub reason: Reason,
}

/// The meaning of a failed backend call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The device is out of memory. A later attempt may succeed after memory is released.
    #[error("out of device memory")]
    OutOfMemory,
    /// The device or its context is lost. No further call can succeed.
    #[error("the device is lost")]
    DeviceLost,
    /// The backend returned a range that overlaps a live one, is unaligned, has another length than requested, or
    /// exceeds the address space. The backend violates its contract, and the allocator uses no part of the range.
    #[error("the backend returned a range that cannot be used")]
    BadRange,
    /// Any other failure of a driver call.
    #[error("refused by the driver")]
    Refused,
    /// An operation on the file of an image failed. The code is the system's `errno`.
    #[error("the backup file failed: check the folder, and the free space of its disk")]
    File,
    /// The file of an image differs from what was written to it.
    #[error("the backup file was modified: its contents are lost, so drop them or restart")]
    Modified,
}

impl BackendError {
    /// Creates an error of `call` with the driver's `code`.
    pub fn new(call: &'static str, code: i32, reason: Reason) -> Self {
        BackendError { call, code, reason }
    }
}

/// A source of device memory that also orders work on streams. See the [module documentation](self) for the contract.
#[auto_impl::auto_impl(&)]
pub trait Backend {
    /// Returns the unit of mapping in bytes: a power of two, at least 512, constant for the life of the backend.
    fn granularity_bytes(&self) -> u64;

    /// Reserves a range of exactly `size_bytes` addresses without memory. Its base and its size are multiples of the
    /// granularity.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; nothing is reserved then.
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError>;

    /// Reserves the addresses of a pool with this base: exactly [`SLOT_BYTES`](crate::base::SLOT_BYTES) from the base
    /// on, or none. The pool only names the owner in the errors of others.
    ///
    /// # Errors
    /// Returns an error if the backend cannot choose addresses, something else uses one of them, or a driver call
    /// fails; nothing is reserved then.
    fn reserve_at(&self, _base: Base, _pool: PoolId) -> Result<Range, BaseError> {
        Err(BaseError::Unsupported)
    }

    /// Turns a part of a space of [`reserve_at`](Self::reserve_at) into a range like those of
    /// [`reserve`](Self::reserve). [`release`](Self::release) returns the part to the space. Makes no driver call.
    ///
    /// # Errors
    /// Returns an error if the backend cannot choose addresses.
    fn carve(&self, _space: Range, _part: Range) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::carve", 0, Reason::Refused))
    }

    /// Releases a space of which no part is a range anymore.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; the space stays reserved then.
    fn release_space(&self, _space: Range) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::release_space", 0, Reason::Refused))
    }

    /// Backs `size_bytes` of the range, starting at `offset_bytes`, with device memory that the device may access.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; nothing is mapped then.
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;

    /// Maps memory like [`map`](Self::map) and prepares it for [`alias`](Self::alias) in pieces of `piece_bytes`.
    /// The offset is a multiple of `piece_bytes`. If the size is not, the last piece is smaller, and is never aliased.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; nothing is mapped then.
    fn map_pieces(&self, at: RangeOffset, size_bytes: u64, _piece_bytes: u64) -> Result<(), BackendError> {
        self.map(at.0, at.1, size_bytes)
    }

    /// Returns `true` if the backend supports [`alias`](Self::alias). The answer is constant for the life of the
    /// backend and, like the granularity, an input of every decision.
    fn can_alias(&self) -> bool {
        false
    }

    /// Maps one whole piece of [`map_pieces`](Self::map_pieces), which is mapped in another range, a second time. This
    /// takes no memory. Both addresses access the same bytes until one of them is unmapped, and unmapping an alias
    /// releases no memory.
    ///
    /// # Errors
    /// Returns an error if a driver call fails or the backend cannot alias; nothing is mapped then.
    fn alias(&self, _at: RangeOffset, _source: RangeOffset, _piece_bytes: u64) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::alias", 0, Reason::Refused))
    }

    /// Returns the memory behind a part of the range to the device. The part may span several `map` calls and may begin
    /// or end inside of one. A backend that cannot split a mapping maps granule by granule.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; the part stays mapped then.
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;

    /// Releases a range in which nothing is mapped.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; the range stays reserved then.
    fn release(&self, range: Range) -> Result<(), BackendError>;

    /// Records an event after all work submitted to `stream` so far.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; no event exists then.
    fn record(&self, stream: StreamId) -> Result<Event, BackendError>;

    /// Makes later work on `stream` wait, on the device, for `event`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; the stream does not wait then.
    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError>;

    /// Returns `true` if the work before `event` has completed. Used to drop fences early, never to decide a placement.
    ///
    /// # Errors
    /// Returns an error if the driver cannot answer.
    fn query(&self, event: Event) -> Result<bool, BackendError>;

    /// Takes an event back for reuse. Streams that wait for it still do. This cannot fail: a backend keeps events that
    /// it cannot reuse until it is dropped.
    fn recycle(&self, event: Event);

    /// Blocks the host until all work submitted to `stream` so far is done.
    ///
    /// # Errors
    /// Returns an error if a driver call fails or reports a failure of that work.
    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError>;

    /// Copies parts of a pool to an image that outlives their memory, and blocks until the copy is complete. The offsets
    /// of the parts ascend from 0 without gaps, and no stream uses the bytes during the call. The pool only selects the
    /// place of the image.
    ///
    /// # Errors
    /// Returns an error if there is no memory for the copy, a driver call fails, or the backend cannot save; nothing is
    /// kept then.
    fn save(&self, _pool: PoolId, _parts: &[Part]) -> Result<Image, BackendError> {
        Err(BackendError::new("Backend::save", 0, Reason::Refused))
    }

    /// Announces a later [`load`](Self::load) of the same parts. From then on the backend may copy memory as soon as it
    /// is mapped, while it maps more. Copies that have begun complete before their memory is unmapped. A second
    /// announcement restarts them.
    fn expect_load(&self, _image: Image, _parts: &[Part]) {}

    /// Copies bytes of an image back to their original addresses, and blocks until the copy is complete. The parts are
    /// some of those that were saved, in the same order. The image stays.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; some bytes may have been copied.
    fn load(&self, _image: Image, _parts: &[Part]) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::load", 0, Reason::Refused))
    }

    /// Discards an image that is no longer needed. Cannot fail.
    fn discard(&self, _image: Image) {}

    /// Notifies the backend that a pool was destroyed. Its id is not used again. Cannot fail.
    fn forget_pool(&self, _pool: PoolId) {}

    /// Returns `true` if the backend reports blocks to a tool: [`block_allocated`](Self::block_allocated) and
    /// [`block_freed`](Self::block_freed) are then called. The answer is constant for the life of the backend.
    fn reports_blocks(&self) -> bool {
        false
    }

    /// Notifies the backend that the program may use these bytes, which it allocated for `stream`, with its name for them.
    fn block_allocated(&self, _stream: StreamId, _bytes: Bytes, _name: Option<&str>) {}

    /// Notifies the backend that the program no longer uses the block that starts at an address. Called before the memory
    /// can be reused, when the free can no longer fail.
    fn block_freed(&self, _address: DeviceAddress) {}

    /// Returns `true` if work that is submitted to `stream` now becomes part of a graph instead of being executed. The
    /// allocator then neither fills nor compares bytes on the stream. No placement depends on it.
    fn is_captured(&self, _stream: StreamId) -> bool {
        false
    }

    /// Fills bytes with a pattern, in the order of `stream`. The byte at an address `a` gets the byte `a % 4` of
    /// `pattern` in little-endian order. A backend without accessible memory does nothing.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; some bytes may have been filled.
    fn fill(&self, _stream: StreamId, _bytes: Bytes, _pattern: u32) -> Result<(), BackendError> {
        Ok(())
    }

    /// Starts to compare bytes with the pattern of [`fill`](Self::fill), in the order of `stream`. The host does not wait.
    /// At most [`COMPARED_BYTES_MAX`] bytes. Returns `None` if the backend has no accessible
    /// memory.
    ///
    /// # Errors
    /// Returns an error if a driver call fails; nothing is compared then.
    fn compare(&self, _stream: StreamId, _bytes: Bytes, _pattern: u32) -> Result<Option<Comparison>, BackendError> {
        Ok(None)
    }

    /// Returns the result of a comparison. Unless it is [`Compared::Pending`], or an error, the comparison has ended, and
    /// its identifier is not used again.
    ///
    /// # Errors
    /// Returns an error if the driver cannot answer. The comparison has ended then.
    fn compared(&self, _comparison: Comparison) -> Result<Compared, BackendError> {
        Ok(Compared::Equal)
    }

    /// Sets the bytes of the parts to zero, and blocks until this is complete.
    ///
    /// # Errors
    /// Returns an error if a driver call fails or the backend cannot; some bytes may be zero.
    fn zero(&self, _parts: &[Part]) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::zero", 0, Reason::Refused))
    }
}
