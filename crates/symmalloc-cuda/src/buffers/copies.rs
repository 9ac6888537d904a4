//! Constructors of buffers with contents, with the same names as cudarc's functions on `CudaStream` and `CudaSlice`.

use super::device_buffer::DeviceBuffer;
use crate::allocator::CudaAllocator;
use crate::backend::CudaBackend;
use crate::device::RestoreCurrent;
use crate::driver::Driver;
use crate::error::{CudaError, DriverError};
use crate::pools::{StreamAllocator, StreamAllocatorRef};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DeviceRepr, DeviceSlice, HostSlice, ValidAsZeroBits, result};
use std::sync::Arc;

/// Counterparts of the `CudaStream` functions that create a `CudaSlice`. They take the stream as their first argument.
impl CudaAllocator {
    /// Returns a buffer with no elements. Counterpart of `CudaStream::null`.
    ///
    /// # Errors
    /// Returns an error if the stream cannot be registered.
    pub fn null<T>(&self, stream: &Arc<CudaStream>) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate(self.for_stream(stream)?, 0, None)
    }

    /// Allocates a buffer of zeros. Counterpart of `CudaStream::alloc_zeros`; same as [`alloc_zeroed`](Self::alloc_zeroed).
    ///
    /// # Errors
    /// See [`alloc_zeroed`](Self::alloc_zeroed).
    pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        self.alloc_zeroed(stream, len)
    }

    /// Copies a `[T]`, `Vec<T>`, `PinnedHostSlice<T>` or [`PinnedBuffer<T>`](crate::PinnedBuffer) into a new buffer, on the stream.
    /// Counterpart of `CudaStream::clone_htod`.
    ///
    /// # Errors
    /// Returns an error if the stream cannot be registered, or the allocation or a driver call fails.
    ///
    /// # Examples
    /// ```no_run
    /// # use symmalloc_cuda::{CudaAllocator, CudaDevice};
    /// # let device = CudaDevice::new(0)?;
    /// # let allocator = CudaAllocator::new(&device, Default::default())?;
    /// let stream = device.context().new_stream()?;
    /// let weights = allocator.clone_htod(&stream, &vec![1.0_f32; 4096])?; // stream.clone_htod(&vec![..])
    /// let copy = weights.try_clone()?;
    /// let host: Vec<f32> = stream.clone_dtoh(&copy.slice(..16))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn clone_htod<T: DeviceRepr, Src: HostSlice<T> + ?Sized>(
        &self,
        stream: &Arc<CudaStream>,
        src: &Src,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::from_host(self.for_stream(stream)?, src)
    }

    /// Copies a buffer, a part of one, or a `CudaSlice` into a new buffer, on the stream. Counterpart of `CudaStream::clone_dtod`.
    ///
    /// # Errors
    /// Returns an error if the stream cannot be registered, or the allocation or a driver call fails.
    pub fn clone_dtod<T: DeviceRepr, Src: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        src: &Src,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::from_device(self.for_stream(stream)?, src)
    }
}

/// Counterparts of the `CudaStream` functions that create a `CudaSlice`, for the stream of this allocator. The buffers borrow the
/// allocator.
impl StreamAllocator {
    /// Like [`CudaAllocator::null`].
    ///
    /// # Errors
    /// Returns an error if the pool no longer exists.
    pub fn null<T>(&self) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate(&self, 0, None)
    }

    /// Like [`CudaAllocator::alloc_zeros`].
    ///
    /// # Errors
    /// Returns an error if the allocation or a driver call fails.
    pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        self.alloc_zeroed(len)
    }

    /// Like [`CudaAllocator::clone_htod`].
    ///
    /// # Errors
    /// Returns an error if the allocation or a driver call fails.
    pub fn clone_htod<T: DeviceRepr, Src: HostSlice<T> + ?Sized>(
        &self,
        src: &Src,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::from_host(&self, src)
    }

    /// Like [`CudaAllocator::clone_dtod`].
    ///
    /// # Errors
    /// Returns an error if the allocation or a driver call fails.
    pub fn clone_dtod<T: DeviceRepr, Src: DevicePtr<T>>(&self, src: &Src) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::from_device(&self, src)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// Returns the size in bytes.
    pub fn num_bytes(&self) -> usize {
        DeviceSlice::num_bytes(self)
    }

    /// Returns the device's ordinal, as CUDA numbers the devices that are visible to this process.
    pub fn ordinal(&self) -> usize {
        self.context().ordinal()
    }

    /// Returns the context of the buffer's stream.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.stream().context()
    }

    /// Returns the stream that the buffer was allocated on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        DeviceSlice::stream(self)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    fn driver(&self) -> &'static Driver {
        self.allocator().stream_allocator().state().device().driver()
    }
}

impl<T: DeviceRepr, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// Copies the contents, on the buffer's stream, into a new buffer of the same stream and pool. There is no `Clone` implementation,
    /// because it could not report an out-of-memory error.
    ///
    /// # Errors
    /// Returns an error if the allocation or a driver call fails.
    pub fn try_clone(&self) -> Result<Self, CudaError> {
        Self::from_device(self.allocator(), self)
    }

    fn from_host<Src: HostSlice<T> + ?Sized>(allocator: &A, src: &Src) -> Result<Self, CudaError> {
        let mut buffer = Self::allocate(allocator, src.len(), None)?;
        let stream = Arc::clone(buffer.stream());
        buffer.fill("cuMemcpyHtoDAsync_v2", |buffer| stream.memcpy_htod(src, buffer))?;
        Ok(buffer)
    }

    fn from_device<Src: DevicePtr<T>>(allocator: &A, src: &Src) -> Result<Self, CudaError> {
        let mut buffer = Self::allocate(allocator, src.len(), None)?;
        let stream = Arc::clone(buffer.stream());
        buffer.fill("cuMemcpyDtoDAsync_v2", |buffer| stream.memcpy_dtod(src, buffer))?;
        Ok(buffer)
    }

    /// Fills the buffer with a cudarc call. Restores the current context afterwards, because cudarc's calls change it.
    fn fill(
        &mut self,
        call: &'static str,
        copy: impl FnOnce(&mut Self) -> Result<(), result::DriverError>,
    ) -> Result<(), CudaError> {
        if self.num_bytes() == 0 {
            return Ok(());
        }
        let _restore = RestoreCurrent::of(self.driver())?;
        Ok(copy(self).map_err(|error| DriverError { call, code: error.0 as i32 })?)
    }
}

impl<T: DeviceRepr, A: StreamAllocatorRef<Memory = CudaBackend>> TryFrom<DeviceBuffer<T, A>> for Vec<T> {
    type Error = CudaError;

    /// Copies the contents to the host, after the earlier work on the buffer's stream. Blocks until the copy is done.
    fn try_from(buffer: DeviceBuffer<T, A>) -> Result<Self, CudaError> {
        let _restore = RestoreCurrent::of(buffer.driver())?;
        let copied = buffer.stream().clone_dtoh(&buffer);
        Ok(copied.map_err(|error| DriverError { call: "cuMemcpyDtoHAsync_v2", code: error.0 as i32 })?)
    }
}
