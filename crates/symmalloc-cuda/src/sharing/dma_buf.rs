//! Dma-bufs: descriptors of device memory for network cards and other devices of this machine.

use super::error::ShareError;
use crate::allocator::CudaAllocator;
use crate::backend::sealed::BackendParts;
use crate::memory::{DmaBufRefusal, ExportState, ExportedMemory, SharePage};
use std::ffi::c_ulonglong;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use symmalloc_core::report::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot};
use symmalloc_files::is_forked;

/// A dma-buf of a range of an allocator's memory, which RDMA transports register (`ibv_reg_dmabuf_mr`).
///
/// While this value is alive, the physical memory of the range does not return to the device, even if the pool is trimmed, sleeps or is
/// destroyed. A dma-buf neither prevents these operations nor affects any placement. After such an operation, the descriptor refers to
/// memory that the pool no longer uses, and [`state`](Self::state) reports this. Different memory may then be mapped at the addresses, so
/// deregister the dma-buf and create a new one.
///
/// Deregister the dma-buf before this value is dropped, and before the program frees the allocations in the range: the allocator reuses
/// freed memory immediately.
///
/// # Examples
/// ```no_run
/// use std::os::fd::{AsFd, AsRawFd};
/// use symmalloc_core::config::PoolConfig;
/// use symmalloc_cuda::{CudaAllocator, CudaDevice};
///
/// let device = CudaDevice::new(0)?;
/// let allocator = CudaAllocator::new(&device, Default::default())?;
/// let pool = allocator.create_pool(PoolConfig::builder().reserved(4 << 30).build()?)?; // one physical chunk
/// let stream = device.context().new_stream()?;
/// let cache = allocator.with_pool(&pool).allocate(&stream, 1 << 30)?;
///
/// let dma_buf = allocator.dma_buf(cache.address.0, cache.size_bytes)?;
/// let (fd, offset) = (dma_buf.as_fd().as_raw_fd(), dma_buf.offset_bytes());
/// // ibv_reg_dmabuf_mr(pd, offset, cache.size_bytes, cache.address.0, fd, access)
/// # let _ = (fd, offset);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DmaBuf {
    /// Allocator that keeps the addresses and the driver alive.
    allocator: CudaAllocator,
    memory: Arc<ExportedMemory>,
    file: OwnedFd,
    /// Handles that keep the physical memory allocated.
    handles: Vec<c_ulonglong>,
    offset_bytes: u64,
    size_bytes: u64,
}

impl CudaAllocator {
    /// Creates a dma-buf of a range of addresses, in any pool of this allocator. The range can be a whole allocation, a part of an
    /// allocation, or any mapped part of a single segment.
    ///
    /// The driver creates dma-bufs of whole host pages, so the range is rounded out to pages: [`DmaBuf::offset_bytes`] is the position of
    /// `address` in the dma-buf, and a device that registers the whole dma-buf can also access neighboring allocations in the first and
    /// last page.
    ///
    /// # Errors
    /// Returns an error if the device does not support dma-bufs ([`ShareError::NoDmaBuf`]), the memory comes from `cuMemAlloc`
    /// ([`ShareError::NotExportable`]), memory is missing at an address ([`ShareError::NotMapped`]), the driver refuses a range across
    /// several physical chunks ([`ShareError::ManyChunks`]), or another driver call fails. Nothing is held in that case, and no descriptor
    /// is open.
    pub fn dma_buf(&self, address: u64, size_bytes: u64) -> Result<DmaBuf, ShareError> {
        DmaBuf::of(self, address, size_bytes)
    }
}

impl DmaBuf {
    fn of(allocator: &CudaAllocator, address: u64, size_bytes: u64) -> Result<Self, ShareError> {
        let backend = allocator.core().backend();
        if !backend.traits().virtual_memory {
            return Err(ShareError::NotExportable);
        }
        let device = allocator.device();
        if !device.features().dma_buf {
            return Err(ShareError::NoDmaBuf { ordinal: device.ordinal() });
        }
        let not_mapped = ShareError::NotMapped { address, size_bytes };
        let Some(end) = address.checked_add(size_bytes).filter(|end| *end > address) else { return Err(not_mapped) };
        let segments = allocator.core().snapshot().segments;
        let holds =
            |segment: &&SegmentSnapshot| segment.base.0 <= address && address - segment.base.0 < segment.size_bytes;
        let Some(segment) = segments.iter().find(holds) else { return Err(not_mapped) };
        let page_bytes = rustix::param::page_size() as u64;
        let start = address / page_bytes * page_bytes;
        let Some(page_end) = end.checked_next_multiple_of(page_bytes) else { return Err(not_mapped) };
        let part = start..page_end;

        let memory = ExportedMemory::held(segment.heap.pool, SharePage::create()?, live_inside(segment, address..end));
        // Frees are detected from here on.
        allocator.state().exported().add(&memory);
        let held = backend.memory().hold_dma_buf(&part, &memory);
        let held = held.map_err(|refusal| match refusal {
            DmaBufRefusal::NotMapped => not_mapped,
            DmaBufRefusal::Driver { chunks, error } if chunks > 1 => ShareError::ManyChunks { chunks, error },
            DmaBufRefusal::Driver { error, .. } => error.into(),
        });
        let held = held.inspect_err(|_| allocator.state().exported().end(&memory))?;
        memory.set_chunks(held.chunks);
        Ok(DmaBuf {
            allocator: allocator.clone(),
            memory,
            file: held.file,
            handles: held.handles,
            offset_bytes: address - start,
            size_bytes: part.end - part.start,
        })
    }

    /// Returns the position of the first requested byte in the dma-buf, in bytes.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Returns the size of the dma-buf in bytes: the requested range, rounded out to host pages.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the number of physical chunks behind the range.
    pub fn chunk_count(&self) -> usize {
        self.handles.len()
    }

    /// Returns the state of the memory. It is [`Live`](ExportState::Live) as long as the pool still uses the memory that the descriptor
    /// refers to, and no allocation that existed in the range when the dma-buf was created has been freed. Frees are detected if they go
    /// through this crate, as for [`Export`](crate::Export).
    pub fn state(&self) -> ExportState {
        self.memory.state()
    }
}

/// Returns the address of each live allocation that overlaps a range of addresses of the segment.
fn live_inside(segment: &SegmentSnapshot, range: std::ops::Range<u64>) -> Vec<u64> {
    let address = |block: &BlockSnapshot| segment.base.0 + block.offset_bytes;
    let is_inside = |block: &&BlockSnapshot| {
        let is_live = matches!(block.state, BlockStateSnapshot::Allocated { .. });
        is_live && address(block) < range.end && range.start < address(block) + block.size_bytes
    };
    segment.blocks.iter().filter(is_inside).map(address).collect()
}

/// The descriptor. It is closed when the [`DmaBuf`] is dropped.
impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        self.allocator.state().exported().end(&self.memory);
        self.allocator.core().backend().memory().release_held(&self.handles);
    }
}

impl fmt::Debug for DmaBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaBuf")
            .field("file", &self.file)
            .field("offset_bytes", &self.offset_bytes)
            .field("size_bytes", &self.size_bytes)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
