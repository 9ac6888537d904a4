//! Buffers of pinned host memory, from a pool of page-locked memory with the same deterministic placement rules as device memory.

use super::block::OwnedBlock;
use super::uses::wait_for_context;
use crate::allocator::CachingAllocator;
use crate::backend::PinnedBackend;
use crate::device::CudaDevice;
use crate::error::{CudaError, DriverError, DropError};
use crate::pools::StreamAllocator;
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr, HostSlice, SyncOnDrop, ValidAsZeroBits};
use smallvec::SmallVec;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use symmalloc_core::config::Config;
use symmalloc_core::{Handle, StreamId};
use symmalloc_files::is_forked;

/// An allocator of pinned host memory.
///
/// The allocator registers the host as a stream, and allocates the buffers on this stream. Before memory is reused, the host waits for
/// copies that still use it. Outside of captures, the reuse of memory blocks the host only in this case: when the host itself is the
/// memory's next user.
pub type PinnedAllocator = CachingAllocator<PinnedBackend>;

/// Stream id of the host, which every [`PinnedAllocator`] registers first.
const HOST: StreamId = StreamId(0);

impl PinnedAllocator {
    /// Creates an allocator of pinned host memory. Expandable segments become fixed segments, because host memory cannot be mapped in
    /// pieces.
    ///
    /// # Errors
    /// Returns an error if the configuration is not valid for host memory.
    pub fn pinned(device: &Arc<CudaDevice>, config: Config) -> Result<Self, CudaError> {
        let allocator = Self::with_backend(PinnedBackend::new(device), config)?;
        let host = allocator.state().register_host()?;
        assert_eq!(host, HOST, "the host must be the first stream");
        Ok(allocator)
    }

    /// Allocates a buffer of zeros.
    ///
    /// # Errors
    /// Returns an error if the allocation or a driver call fails.
    pub fn alloc_host_zeroed<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<PinnedBuffer<T>, CudaError> {
        let block = OwnedBlock::allocate::<T>(self.lease().registered_stream(HOST), len, None)?;
        let buffer = PinnedBuffer { block, len, pending: Mutex::default(), elements: PhantomData };
        let start = buffer.start();
        // SAFETY: the block has room for `len` elements, this buffer owns it exclusively, and the host waited for earlier uses.
        unsafe { std::ptr::write_bytes(start, 0, len) };
        Ok(buffer)
    }
}

/// A buffer of `len` elements of pinned host memory, freed when it is dropped.
///
/// The type implements cudarc's [`HostSlice`], so copies accept it and run asynchronously. The host waits for them at its next access to
/// the elements.
///
/// # Examples
/// ```no_run
/// use symmalloc_core::Config;
/// use symmalloc_cuda::{CudaDevice, PinnedAllocator};
///
/// let device = CudaDevice::new(0)?;
/// let pinned = PinnedAllocator::pinned(&device, Config::default())?;
/// let mut input = pinned.alloc_host_zeroed::<f32>(4096)?;
/// input.as_mut_slice()?.fill(1.0); // waits for copies that use the buffer
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PinnedBuffer<T> {
    block: OwnedBlock<Arc<StreamAllocator<PinnedBackend>>>,
    len: usize,
    /// Submitted work that may use the elements, since the host last waited for such work.
    pending: Mutex<SmallVec<[PendingUse; 2]>>,
    elements: PhantomData<T>,
}

/// Submitted work that may use a buffer.
#[derive(Clone, Debug)]
enum PendingUse {
    /// Work of a registered stream. The allocator also tracks this work, so the next user of the freed memory waits for it.
    Stream(StreamId),
    /// Work of an unregistered stream of this context. The guard of the use waits for the work, unless the program leaked the guard with
    /// `mem::forget`.
    Unwatched(Arc<CudaContext>),
}

// SAFETY: owns its elements like a `Vec`.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: as above; state that changes through a shared reference is behind a lock.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T> PinnedBuffer<T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the handle of the allocation, for the core's reports.
    pub fn handle(&self) -> Handle {
        self.block.handle()
    }

    /// Returns the elements. Blocks until work that uses them is done.
    ///
    /// # Errors
    /// Returns an error if the driver reports that the work failed.
    pub fn as_slice(&self) -> Result<&[T], CudaError> {
        self.wait_for_pending()?;
        // SAFETY: the block holds `len` initialized elements. No work uses them, and new work that writes them must borrow the buffer
        // mutably.
        Ok(unsafe { std::slice::from_raw_parts(self.start(), self.len) })
    }

    /// Returns the elements for writing. Blocks until work that uses them is done.
    ///
    /// # Errors
    /// Returns an error if the driver reports that the work failed.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], CudaError> {
        self.wait_for_pending()?;
        // SAFETY: as above, and borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) })
    }

    fn start(&self) -> *mut T {
        // Address 0 means an empty buffer.
        if self.block.address() == 0 { std::ptr::dangling_mut() } else { self.block.address() as *mut T }
    }

    fn wait_for_pending(&self) -> Result<(), CudaError> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(last) = pending.last() {
            match last {
                PendingUse::Stream(stream) => self.block.state().synchronize(*stream).map_err(DriverError::from)?,
                PendingUse::Unwatched(context) => wait_for_context(self.block.state().device(), context)?,
            }
            pending.pop();
        }
        Ok(())
    }

    /// Records a use by work that is submitted to the stream while the guard is alive.
    fn begin<'a>(&self, stream: &'a CudaStream) -> SyncOnDrop<'a> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(id) = self.block.state().streams().find(stream) else {
            let context = stream.context();
            let is_same =
                |one: &PendingUse| matches!(one, PendingUse::Unwatched(it) if it.cu_ctx() == context.cu_ctx());
            if !pending.iter().any(is_same) {
                pending.push(PendingUse::Unwatched(Arc::clone(context)));
            }
            // The allocator cannot record an event on an unregistered stream later, so the guard waits for the work when it is dropped.
            return SyncOnDrop::sync_stream(stream);
        };
        self.block.allocator().record_use(self.block.handle(), id);
        if !pending.iter().any(|one| matches!(one, PendingUse::Stream(stream) if *stream == id)) {
            pending.push(PendingUse::Stream(id));
        }
        SyncOnDrop::Record(None)
    }
}

impl<T> Drop for PinnedBuffer<T> {
    /// Leaves the memory allocated if work of an unregistered stream may still use it and the driver cannot wait for that work.
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        let pending = self.pending.get_mut().unwrap_or_else(PoisonError::into_inner);
        for one in pending.drain(..) {
            if let PendingUse::Unwatched(context) = one
                && let Err(error) = wait_for_context(self.block.state().device(), &context)
            {
                self.block.state().note_drop_error(DropError::Order(error.into()));
                self.block.disown();
                return;
            }
        }
    }
}

impl<T> HostSlice<T> for PinnedBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        // SAFETY: the block holds `len` initialized elements. By the caller's contract, only `stream` uses them.
        let elements = unsafe { std::slice::from_raw_parts(self.start(), self.len) };
        (elements, self.begin(stream))
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        let guard = self.begin(stream);
        // SAFETY: as above, and borrowed mutably.
        let elements = unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) };
        (elements, guard)
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}
