//! NCCL's and the driver's handles: names for things that only their library looks behind.

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

        // SAFETY: a name, which this process never follows itself. NCCL lets any thread use it, one at a time; the call lock of
        // the communicator sees to that.
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
    /// NCCL's `ncclWindow_t`: an address that only NCCL and kernels understand.
    pub struct WindowHandle;
    /// What `ncclCommRegister` gave.
    pub(crate) struct RegistrationHandle;
    /// `CUstream`.
    pub(crate) struct StreamHandle;
}

impl CommHandle {
    /// No communicator.
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
    /// The `ncclWindow_t`, for kernels and for NCCL's own calls.
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

/// What NCCL writes a new handle to, and the name that it points to for as long as the communicator lives. NCCL's threads may
/// still write to it after the call has returned, so it is kept until nothing is under way.
#[derive(Debug)]
pub(crate) struct NewHandle {
    handle: AtomicPtr<c_void>,
    name: Option<Arc<CStr>>,
}

impl NewHandle {
    /// Room for a window or a registration.
    pub(crate) fn unnamed() -> Arc<Self> {
        Arc::new(NewHandle { handle: AtomicPtr::new(null_mut()), name: None })
    }

    /// Room for a communicator.
    pub(crate) fn named(name: &Arc<CStr>) -> Arc<Self> {
        Arc::new(NewHandle { handle: AtomicPtr::new(null_mut()), name: Some(Arc::clone(name)) })
    }

    /// Where NCCL writes.
    pub(crate) fn out(&self) -> *mut *mut c_void {
        self.handle.as_ptr()
    }

    pub(crate) fn name(&self) -> Option<&CStr> {
        self.name.as_deref()
    }

    /// The communicator that NCCL made, if it has.
    pub(crate) fn comm(&self) -> Option<CommHandle> {
        Some(CommHandle(self.handle.load(Ordering::Acquire))).filter(|comm| !comm.is_null())
    }

    /// The window that NCCL made; `None` where the ranks cannot reach each other's memory.
    pub(crate) fn window(&self) -> Option<WindowHandle> {
        let window = self.handle.load(Ordering::Acquire);
        (!window.is_null()).then_some(WindowHandle(window))
    }

    /// The registration that NCCL made; null where it keeps none.
    pub(crate) fn registration(&self) -> RegistrationHandle {
        RegistrationHandle(self.handle.load(Ordering::Acquire))
    }
}
