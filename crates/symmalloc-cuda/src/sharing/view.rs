//! Views of imported memory, which copies and kernels accept as arguments.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// A read-only view of another process's allocation. It can be used wherever a `CudaSlice` is read. Work that uses it is not ordered after
/// the other process's work.
pub struct ImportedView<'a, T> {
    pointer: CUdeviceptr,
    len: usize,
    stream: &'a Arc<CudaStream>,
    elements: PhantomData<fn() -> T>,
}

/// A writable view of another process's allocation.
pub struct ImportedViewMut<'a, T>(ImportedView<'a, T>);

impl<'a, T> ImportedView<'a, T> {
    /// Creates a view. The pointer must stay mapped for `'a`, and until the device has finished all work that uses it.
    pub(super) fn new(pointer: CUdeviceptr, len: usize, stream: &'a Arc<CudaStream>) -> Self {
        ImportedView { pointer, len, stream, elements: PhantomData }
    }
}

impl<'a, T> ImportedViewMut<'a, T> {
    pub(super) fn of(view: ImportedView<'a, T>) -> Self {
        ImportedViewMut(view)
    }
}

impl<T> DeviceSlice<T> for ImportedView<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.stream
    }
}

impl<T> DeviceSlice<T> for ImportedViewMut<'_, T> {
    fn len(&self) -> usize {
        self.0.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.0.stream
    }
}

impl<T> DevicePtr<T> for ImportedView<'_, T> {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.pointer, SyncOnDrop::Record(None))
    }
}

impl<T> DevicePtr<T> for ImportedViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.0.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for ImportedViewMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.0.pointer, SyncOnDrop::Record(None))
    }
}

// SAFETY: pushes the address of a pointer that lives as long as the arguments; kernels take pointers by value.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b ImportedView<'_, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b ImportedView<'_, T>) -> &mut Self {
        self.arg(&arg.pointer)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut ImportedViewMut<'_, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut ImportedViewMut<'_, T>) -> &mut Self {
        self.arg(&arg.0.pointer)
    }
}

impl<T> fmt::Debug for ImportedView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportedView")
            .field("pointer", &format_args!("{:#x}", self.pointer))
            .field("len", &self.len)
            .finish()
    }
}

impl<T> fmt::Debug for ImportedViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ImportedViewMut").field(&self.0).finish()
    }
}
