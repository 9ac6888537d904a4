//! Buffers that are made with their content, by the names that cudarc gives the same on `CudaStream` and `CudaSlice`.

use super::device_buffer::DeviceBuffer;
use crate::allocator::CudaAllocator;
use crate::backend::CudaBackend;
use crate::device::RestoreCurrent;
use crate::driver::Driver;
use crate::error::{CudaError, DriverError};
use crate::pools::{StreamAllocator, StreamAllocatorRef};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DeviceRepr, DeviceSlice, HostSlice, ValidAsZeroBits, result};
use std::sync::Arc;

/// `CudaStream`'s functions that make a `CudaSlice`, with the stream as the first argument.
impl CudaAllocator {
    /// `CudaStream::null`: a buffer of no elements.
    ///
    /// # Errors
    /// When the stream cannot be registered.
    pub fn null<T>(&self, stream: &Arc<CudaStream>) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate(self.for_stream(stream)?, 0, None)
    }

    /// `CudaStream::alloc_zeros`, another name of [`alloc_zeroed`](Self::alloc_zeroed).
    ///
    /// # Errors
    /// As [`alloc_zeroed`](Self::alloc_zeroed).
    pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        self.alloc_zeroed(stream, len)
    }

    /// `CudaStream::clone_htod`: a buffer with what a `[T]`, `Vec<T>`, `PinnedHostSlice<T>` or
    /// [`PinnedBuffer<T>`](crate::PinnedBuffer) holds, copied on the stream.
    ///
    /// # Errors
    /// When the stream cannot be registered, or the allocator or the driver refuses.
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

    /// `CudaStream::clone_dtod`: a buffer with what a buffer, a part of one, or a `CudaSlice` holds, copied on the stream.
    ///
    /// # Errors
    /// When the stream cannot be registered, or the allocator or the driver refuses.
    pub fn clone_dtod<T: DeviceRepr, Src: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        src: &Src,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::from_device(self.for_stream(stream)?, src)
    }
}

/// `CudaStream`'s functions that make a `CudaSlice`, on this stream. The buffers borrow.
impl StreamAllocator {
    /// As [`CudaAllocator::null`].
    ///
    /// # Errors
    /// When the pool is gone.
    pub fn null<T>(&self) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate(&self, 0, None)
    }

    /// As [`CudaAllocator::alloc_zeros`].
    ///
    /// # Errors
    /// When the allocator or the driver refuses.
    pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        self.alloc_zeroed(len)
    }

    /// As [`CudaAllocator::clone_htod`].
    ///
    /// # Errors
    /// When the allocator or the driver refuses.
    pub fn clone_htod<T: DeviceRepr, Src: HostSlice<T> + ?Sized>(
        &self,
        src: &Src,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::from_host(&self, src)
    }

    /// As [`CudaAllocator::clone_dtod`].
    ///
    /// # Errors
    /// When the allocator or the driver refuses.
    pub fn clone_dtod<T: DeviceRepr, Src: DevicePtr<T>>(&self, src: &Src) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::from_device(&self, src)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// Size in bytes.
    pub fn num_bytes(&self) -> usize {
        DeviceSlice::num_bytes(self)
    }

    /// The device's number.
    pub fn ordinal(&self) -> usize {
        self.context().ordinal()
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.stream().context()
    }

    /// The stream that it was allocated on.
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
    /// A buffer of the same stream and pool with a copy of the content, made on that stream. There is no `Clone`: it could not say
    /// that memory is short.
    ///
    /// # Errors
    /// When the allocator or the driver refuses.
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

    /// Gives the buffer its content by a call of cudarc's, which makes the context current: it is what it was afterwards.
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

    /// The content, as the buffer's stream has it. Blocks until the copy is done.
    fn try_from(buffer: DeviceBuffer<T, A>) -> Result<Self, CudaError> {
        let _restore = RestoreCurrent::of(buffer.driver())?;
        let copied = buffer.stream().clone_dtoh(&buffer);
        Ok(copied.map_err(|error| DriverError { call: "cuMemcpyDtoHAsync_v2", code: error.0 as i32 })?)
    }
}
