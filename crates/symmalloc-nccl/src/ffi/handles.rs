//! Opaque handles of NCCL and the driver.

use cudarc::driver::CudaStream;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

macro_rules! handles {
    ($($(#[$doc:meta])* $vis:vis struct $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $vis struct $name(*mut c_void);

        // SAFETY: this process never dereferences the handle itself. NCCL allows any thread to use it, one at a time, which the
        // communicator's call lock ensures.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:p})", stringify!($name), self.0)
            }
        }
    )*};
}

handles! {
    /// `ncclComm_t`.
    pub(crate) struct CommHandle;
    /// NCCL's `ncclWindow_t`: an address that has a meaning only to NCCL and to kernels.
    pub struct WindowHandle;
    /// A registration handle of `ncclCommRegister`.
    pub(crate) struct RegistrationHandle;
    /// `CUstream`.
    pub(crate) struct StreamHandle;
}

impl CommHandle {
    /// The null handle.
    pub(crate) const NULL: CommHandle = CommHandle(null_mut());

    pub(crate) fn new(comm: *mut c_void) -> Self {
        CommHandle(comm)
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn as_ptr(self) -> *mut c_void {
        self.0
    }
}

impl WindowHandle {
    /// Returns the `ncclWindow_t`, for kernels and for NCCL's own calls.
    pub fn as_ptr(self) -> *mut c_void {
        self.0
    }
}

impl RegistrationHandle {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn as_ptr(self) -> *mut c_void {
        self.0
    }
}

impl StreamHandle {
    /// The default stream.
    #[cfg(test)]
    pub(crate) const NULL: StreamHandle = StreamHandle(null_mut());

    pub(crate) fn of(stream: &CudaStream) -> Self {
        StreamHandle(stream.cu_stream().cast())
    }

    pub(crate) fn as_ptr(self) -> *mut c_void {
        self.0
    }
}

/// Storage for a new handle, which NCCL writes, and for the communicator's name, which NCCL refers to. NCCL's threads may write to it
/// after the call has returned, so it must be kept until no operation is in progress.
#[derive(Debug)]
pub(crate) struct NewHandle {
    handle: AtomicPtr<c_void>,
    name: Option<Arc<CStr>>,
}

impl NewHandle {
    /// Creates storage for a window or a registration.
    pub(crate) fn unnamed() -> Arc<Self> {
        Arc::new(NewHandle { handle: AtomicPtr::new(null_mut()), name: None })
    }

    /// Creates storage for a communicator.
    pub(crate) fn named(name: &Arc<CStr>) -> Arc<Self> {
        Arc::new(NewHandle { handle: AtomicPtr::new(null_mut()), name: Some(Arc::clone(name)) })
    }

    /// Returns the address that NCCL writes to.
    pub(crate) fn out(&self) -> *mut *mut c_void {
        self.handle.as_ptr()
    }

    pub(crate) fn name(&self) -> Option<&CStr> {
        self.name.as_deref()
    }

    /// Returns the communicator, if NCCL has created it.
    pub(crate) fn comm(&self) -> Option<CommHandle> {
        Some(CommHandle(self.handle.load(Ordering::Acquire))).filter(|comm| !comm.is_null())
    }

    /// Returns the window, or `None` if the ranks cannot access each other's memory.
    pub(crate) fn window(&self) -> Option<WindowHandle> {
        let window = self.handle.load(Ordering::Acquire);
        (!window.is_null()).then_some(WindowHandle(window))
    }

    /// Returns the registration's handle; null if NCCL did not register the memory.
    pub(crate) fn registration(&self) -> RegistrationHandle {
        RegistrationHandle(self.handle.load(Ordering::Acquire))
    }
}
