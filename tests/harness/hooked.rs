//! A backend with a hook on every call, with which a test can compare the calls of ranks, yield to other threads inside of calls, or panic
//! there.

use symmalloc_core::backend::{
    Backend, BackendError, Bytes, Compared, Comparison, DeviceAddress, Event, Image, Part, Range, RangeOffset,
};
use symmalloc_core::base::{Base, BaseError, SLOT_BYTES};
use symmalloc_core::{PoolId, StreamId};

/// A call of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the calls of the trait")]
pub enum DeviceCall {
    Reserve { size_bytes: u64 },
    Map { offset_bytes: u64, size_bytes: u64 },
    Alias { offset_bytes: u64, piece_bytes: u64 },
    Unmap { offset_bytes: u64, size_bytes: u64 },
    Release,
    Record { stream: StreamId },
    Wait { stream: StreamId },
    Query,
    Recycle,
    Synchronize { stream: StreamId },
    Save { parts: usize },
    Load { parts: usize },
    Zero { parts: usize },
    Discard,
    Fill { stream: StreamId },
    Compare { stream: StreamId },
}

/// A backend that notifies `hook` and then forwards the call to `inner`.
#[derive(Debug)]
pub struct Hooked<B, F> {
    /// The backend that executes the calls.
    pub inner: B,
    /// The hook.
    pub hook: F,
}

impl<B: Backend, F: Fn(DeviceCall)> Hooked<B, F> {
    fn pass<T>(&self, call: DeviceCall, to: impl FnOnce(&B) -> T) -> T {
        (self.hook)(call);
        to(&self.inner)
    }
}

impl<B: Backend, F: Fn(DeviceCall)> Backend for Hooked<B, F> {
    fn granularity_bytes(&self) -> u64 {
        self.inner.granularity_bytes()
    }
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        self.pass(DeviceCall::Reserve { size_bytes }, |inner| inner.reserve(size_bytes))
    }
    fn reserve_at(&self, base: Base, pool: PoolId) -> Result<Range, BaseError> {
        self.pass(DeviceCall::Reserve { size_bytes: SLOT_BYTES }, |inner| inner.reserve_at(base, pool))
    }
    fn carve(&self, space: Range, part: Range) -> Result<(), BackendError> {
        self.inner.carve(space, part)
    }
    fn release_space(&self, space: Range) -> Result<(), BackendError> {
        self.pass(DeviceCall::Release, |inner| inner.release_space(space))
    }
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.pass(DeviceCall::Map { offset_bytes, size_bytes }, |inner| inner.map(range, offset_bytes, size_bytes))
    }
    fn map_pieces(&self, at: RangeOffset, size_bytes: u64, piece_bytes: u64) -> Result<(), BackendError> {
        let map = |inner: &B| inner.map_pieces(at, size_bytes, piece_bytes);
        self.pass(DeviceCall::Map { offset_bytes: at.1, size_bytes }, map)
    }
    fn can_alias(&self) -> bool {
        self.inner.can_alias()
    }
    fn alias(&self, at: RangeOffset, source: RangeOffset, piece_bytes: u64) -> Result<(), BackendError> {
        let alias = |inner: &B| inner.alias(at, source, piece_bytes);
        self.pass(DeviceCall::Alias { offset_bytes: at.1, piece_bytes }, alias)
    }
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.pass(DeviceCall::Unmap { offset_bytes, size_bytes }, |inner| inner.unmap(range, offset_bytes, size_bytes))
    }
    fn release(&self, range: Range) -> Result<(), BackendError> {
        self.pass(DeviceCall::Release, |inner| inner.release(range))
    }
    fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        self.pass(DeviceCall::Record { stream }, |inner| inner.record(stream))
    }
    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        self.pass(DeviceCall::Wait { stream }, |inner| inner.wait(stream, event))
    }
    fn query(&self, event: Event) -> Result<bool, BackendError> {
        self.pass(DeviceCall::Query, |inner| inner.query(event))
    }
    fn recycle(&self, event: Event) {
        self.pass(DeviceCall::Recycle, |inner| inner.recycle(event));
    }
    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        self.pass(DeviceCall::Synchronize { stream }, |inner| inner.synchronize(stream))
    }
    fn reports_blocks(&self) -> bool {
        self.inner.reports_blocks()
    }
    fn block_allocated(&self, stream: StreamId, bytes: Bytes, name: Option<&str>) {
        self.inner.block_allocated(stream, bytes, name);
    }
    fn block_freed(&self, address: DeviceAddress) {
        self.inner.block_freed(address);
    }
    fn is_captured(&self, stream: StreamId) -> bool {
        self.inner.is_captured(stream)
    }
    fn fill(&self, stream: StreamId, bytes: Bytes, pattern: u32) -> Result<(), BackendError> {
        self.pass(DeviceCall::Fill { stream }, |inner| inner.fill(stream, bytes, pattern))
    }
    fn compare(&self, stream: StreamId, bytes: Bytes, pattern: u32) -> Result<Option<Comparison>, BackendError> {
        self.pass(DeviceCall::Compare { stream }, |inner| inner.compare(stream, bytes, pattern))
    }
    fn compared(&self, comparison: Comparison) -> Result<Compared, BackendError> {
        self.inner.compared(comparison)
    }
    fn save(&self, pool: PoolId, parts: &[Part]) -> Result<Image, BackendError> {
        self.pass(DeviceCall::Save { parts: parts.len() }, |inner| inner.save(pool, parts))
    }
    fn load(&self, image: Image, parts: &[Part]) -> Result<(), BackendError> {
        self.pass(DeviceCall::Load { parts: parts.len() }, |inner| inner.load(image, parts))
    }
    fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        self.pass(DeviceCall::Zero { parts: parts.len() }, |inner| inner.zero(parts))
    }
    fn discard(&self, image: Image) {
        self.pass(DeviceCall::Discard, |inner| inner.discard(image));
    }
    fn forget_pool(&self, pool: PoolId) {
        self.inner.forget_pool(pool);
    }
}
