//! The contract between the allocator and whatever gives it device memory.
//!
//! A backend hands out address ranges, backs them with memory, and orders work on streams. Two kinds exist: the
//! simulator (the crate `symmalloc-sim`) and CUDA. One conformance suite runs against every implementation.
//!
//! ```text
//! reserve ──► map ──► (the program uses the bytes) ──► unmap ──► release
//!             map more granules at the end, or into a hole
//! map_pieces ──► alias, from another range, any number of times ──► unmap the aliases ──► unmap
//! record(stream) ──► wait(other stream, event) any number of times ──► recycle(event)
//! save ──► unmap ──► map, at the same addresses ──► load or zero ──► discard
//! ```
//!
//! The allocator promises: offsets and sizes are multiples of [`Backend::granularity_bytes`], sizes not zero; a granule
//! is mapped at most once; everything is unmapped before its range is released; memory is unmapped after all of its aliases; before `unmap` it has called
//! `synchronize` for every stream that may still use the bytes; an event is recycled once and not used afterwards.
//!
//! A backend promises: a call that returns an error changed nothing; no call blocks on device work, but
//! [`Backend::synchronize`] and what copies; it may be called from any thread, but never for the same range from two at once.
//!
//! No answer of a backend decides a placement (rule D1): addresses are only handed on to the program, and a refusal
//! becomes a typed error.

use crate::types::ids::StreamId;

/// A device address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The address so many bytes further.
    #[inline]
    pub(crate) fn plus(self, offset_bytes: u64) -> Self {
        DeviceAddress(self.0 + offset_bytes)
    }
}

/// A reserved address range, as the backend names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address; a multiple of the granularity.
    pub base: DeviceAddress,
    /// Length in bytes; a multiple of the granularity.
    pub size_bytes: u64,
}

/// A range, and an offset in it, in bytes.
pub type Place = (Range, u64);

/// A part of live memory, and where its copy lies among the bytes that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its first address. The part lies in one range, and is mapped.
    pub address: DeviceAddress,
    /// Its length in bytes; a multiple of 512.
    pub size_bytes: u64,
    /// How many bytes of the image come before its copy.
    pub image_offset_bytes: u64,
}

/// Bytes that the backend keeps while their memory is gone, as it names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image(pub u64);

/// A recorded event, as the backend names it. Means nothing outside that backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// Why a backend call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {code} ({reason})")]
#[non_exhaustive]
pub struct BackendError {
    /// The driver call, for example `cuMemCreate`.
    pub call: &'static str,
    /// The driver's code.
    pub code: i32,
    /// What the code means for the allocator.
    pub reason: Reason,
}

/// What a failed backend call means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The device has not enough memory. Another attempt may succeed after memory was given back.
    #[error("out of device memory")]
    OutOfMemory,
    /// The device or its context is lost: no further call can succeed.
    #[error("the device is lost")]
    DeviceLost,
    /// The backend returned a range that overlaps a live one, is unaligned, is not as long as was asked for, or goes beyond the
    /// address space. The allocator uses none of it: the backend breaks its contract.
    #[error("the backend returned a range that cannot be used")]
    BadRange,
    /// Anything else the driver refused.
    #[error("refused by the driver")]
    Refused,
}

impl BackendError {
    /// An error of `call` with the driver's `code`.
    pub fn new(call: &'static str, code: i32, reason: Reason) -> Self {
        BackendError { call, code, reason }
    }
}

/// Gives device memory and orders streams. See the [module documentation](self) for the contract.
#[auto_impl::auto_impl(&)]
pub trait Backend {
    /// The unit of mapping, in bytes: a power of two, at least 512, the same for the life of the backend.
    fn granularity_bytes(&self) -> u64;

    /// Reserves a range of addresses without memory, at a multiple of the granularity and of exactly this size, which is one
    /// too.
    ///
    /// # Errors
    /// When the driver refuses; nothing is reserved then.
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError>;

    /// Backs `size_bytes` of the range, from `offset_bytes` on, with device memory the device may access.
    ///
    /// # Errors
    /// When the driver refuses; nothing is mapped then.
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;

    /// As [`map`](Self::map), for memory that [`alias`](Self::alias) will map in pieces of `piece_bytes`: offset and size are
    /// multiples of it.
    ///
    /// # Errors
    /// When the driver refuses; nothing is mapped then.
    fn map_pieces(&self, at: Place, size_bytes: u64, _piece_bytes: u64) -> Result<(), BackendError> {
        self.map(at.0, at.1, size_bytes)
    }

    /// Whether [`alias`](Self::alias) works. The same for the life of the backend, and an input of every decision, as the
    /// granularity is.
    fn can_alias(&self) -> bool {
        false
    }

    /// Backs a part of a range with memory that is mapped already: one whole piece of [`map_pieces`](Self::map_pieces), in
    /// another range. It takes no memory. Both addresses name the same bytes until one of them is unmapped, and unmapping an
    /// alias gives no memory back.
    ///
    /// # Errors
    /// When the driver refuses, or the backend cannot; nothing is mapped then.
    fn alias(&self, _at: Place, _source: Place, _piece_bytes: u64) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::alias", 0, Reason::Refused))
    }

    /// Gives the memory behind a part of the range back to the device. The part may cover several `map` calls, and may
    /// cut one (backends that cannot cut a mapping map granule by granule).
    ///
    /// # Errors
    /// When the driver refuses; the part stays mapped then.
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;

    /// Gives up a range of which nothing is mapped.
    ///
    /// # Errors
    /// When the driver refuses; the range stays reserved then.
    fn release(&self, range: Range) -> Result<(), BackendError>;

    /// Records an event after all work submitted to `stream` so far.
    ///
    /// # Errors
    /// When the driver refuses; no event exists then.
    fn record(&self, stream: StreamId) -> Result<Event, BackendError>;

    /// Makes later work on `stream` wait, on the device, for `event`.
    ///
    /// # Errors
    /// When the driver refuses; the stream does not wait then.
    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError>;

    /// Whether the work before `event` is done. Used to drop fences early, never to decide a placement.
    ///
    /// # Errors
    /// When the driver refuses to say.
    fn query(&self, event: Event) -> Result<bool, BackendError>;

    /// Takes an event back for reuse. Streams that were told to wait for it still do. Cannot fail: a backend keeps
    /// what it cannot reuse until it is dropped.
    fn recycle(&self, event: Event);

    /// Blocks the host until all work submitted to `stream` so far is done.
    ///
    /// # Errors
    /// When the driver refuses or reports a failure of that work.
    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError>;

    /// Copies the bytes of parts to where they outlive their memory. Blocks until that is done. The offsets of the parts ascend, and
    /// follow each other without gaps from 0 on; no stream uses the bytes meanwhile.
    ///
    /// # Errors
    /// When there is no room for the copy, the driver refuses, or the backend cannot; nothing is kept then.
    fn save(&self, _parts: &[Part]) -> Result<Image, BackendError> {
        Err(BackendError::new("Backend::save", 0, Reason::Refused))
    }

    /// Says what [`load`](Self::load) will be asked for, the same parts, when they are mapped. A backend may copy what it maps from now on
    /// while it maps more. What it has begun is over before that memory is unmapped, and begins anew when it is said again.
    fn expect_load(&self, _image: Image, _parts: &[Part]) {}

    /// Copies bytes of an image back, to the addresses that they came from: parts of those that were saved, in their order. Blocks
    /// until that is done. The image stays.
    ///
    /// # Errors
    /// When the driver refuses; some bytes may have been copied.
    fn load(&self, _image: Image, _parts: &[Part]) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::load", 0, Reason::Refused))
    }

    /// The image is not needed any more. Cannot fail.
    fn discard(&self, _image: Image) {}

    /// Makes the bytes of parts zero. Blocks until that is done.
    ///
    /// # Errors
    /// When the driver refuses, or the backend cannot; some bytes may be zero.
    fn zero(&self, _parts: &[Part]) -> Result<(), BackendError> {
        Err(BackendError::new("Backend::zero", 0, Reason::Refused))
    }
}
