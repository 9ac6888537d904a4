//! Access to the process's libcuda, and the driver calls that this library makes for itself.
//!
//! `symmalloc-cuda` makes the allocator's own calls. The few calls here query the state on which the result of a served call depends: the
//! current context, the context of a stream, and whether a stream is captured.

use crate::libc_symbols;
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A handle of libcuda, which is never closed.
#[derive(Clone, Copy)]
pub(crate) struct Library(*mut c_void);

static LIBRARY: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

impl Library {
    pub(crate) fn handle(self) -> *mut c_void {
        self.0
    }
}

/// Returns libcuda, if the process has loaded it. Does not load it.
#[inline]
pub(crate) fn if_loaded() -> Option<Library> {
    let known = LIBRARY.load(Ordering::Relaxed);
    if known.is_null() { look_for() } else { Some(Library(known)) }
}

#[cold]
fn look_for() -> Option<Library> {
    let open = |name: &CStr| {
        // SAFETY: the name is a C string. `RTLD_NOLOAD` loads nothing, so no initializer runs.
        unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
    };
    let handle = [c"libcuda.so.1", c"libcuda.so"].into_iter().map(open).find(|handle| !handle.is_null())?;
    LIBRARY.store(handle, Ordering::Relaxed);
    Some(Library(handle))
}

macro_rules! driver_calls {
    ($($name:ident = $symbol:literal ($($arg:ident: $type:ty),*);)*) => {
        /// The driver calls that this library makes.
        pub(crate) struct Driver {
            $($name: Option<unsafe extern "C" fn($($type),*) -> c_int>,)*
        }

        impl Driver {
            fn of(library: Library) -> Self {
                Driver {
                    $($name: {
                        // SAFETY: libcuda is never closed.
                        let found = unsafe { libc_symbols::look_up(library.handle(), $symbol) };
                        (!found.is_null()).then(|| {
                            // SAFETY: the type is the signature in cuda.h, with integers for enums and handles.
                            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(found) }
                        })
                    },)*
                }
            }

            $(
                /// # Safety
                /// See the call of this name in the CUDA driver API.
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> Result<(), c_int> {
                    let call = self.$name.ok_or(NOT_FOUND)?;
                    // SAFETY: the caller's contract.
                    match unsafe { call($($arg),*) } {
                        0 => Ok(()),
                        code => Err(code),
                    }
                }
            )*
        }
    };
}

driver_calls! {
    context_current = c"cuCtxGetCurrent"(context: *mut usize);
    context_device = c"cuCtxGetDevice"(device: *mut c_int);
    context_push = c"cuCtxPushCurrent_v2"(context: usize);
    context_pop = c"cuCtxPopCurrent_v2"(context: *mut usize);
    primary_state = c"cuDevicePrimaryCtxGetState"(device: c_int, flags: *mut u32, active: *mut c_int);
    primary_retain = c"cuDevicePrimaryCtxRetain"(context: *mut usize, device: c_int);
    primary_release = c"cuDevicePrimaryCtxRelease_v2"(device: c_int);
    stream_context = c"cuStreamGetCtx"(stream: usize, context: *mut usize);
    stream_captured = c"cuStreamIsCapturing"(stream: usize, status: *mut c_int);
    stream_synchronize = c"cuStreamSynchronize"(stream: usize);
    default_pool = c"cuDeviceGetDefaultMemPool"(pool: *mut usize, device: c_int);
    current_pool = c"cuDeviceGetMemPool"(pool: *mut usize, device: c_int);
}

/// `CUDA_ERROR_NOT_FOUND`.
pub(crate) const NOT_FOUND: c_int = 500;

/// Returns the driver's calls, if libcuda is loaded.
pub(crate) fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    match DRIVER.get() {
        Some(driver) => Some(driver),
        None => if_loaded().map(|library| DRIVER.get_or_init(|| Driver::of(library))),
    }
}

impl Driver {
    /// Returns the current context of this thread, if there is one.
    pub(crate) fn current(&self) -> Option<usize> {
        let mut context = 0;
        // SAFETY: the pointer is valid for writing.
        unsafe { self.context_current(&raw mut context) }.ok()?;
        (context != 0).then_some(context)
    }

    /// Returns the device of this thread's current context, if there is one.
    pub(crate) fn current_device(&self) -> Option<c_int> {
        let mut device = 0;
        // SAFETY: the pointer is valid for writing.
        unsafe { self.context_device(&raw mut device) }.ok().map(|()| device)
    }

    /// Returns the device of a context.
    pub(crate) fn device_of(&self, context: usize) -> Option<c_int> {
        let mut device = 0;
        if self.current() == Some(context) {
            return self.current_device();
        }
        // SAFETY: the driver returned this context, which is current until it is popped.
        unsafe {
            self.context_push(context).ok()?;
            let found = self.context_device(&raw mut device);
            let mut popped = 0;
            let _popped = self.context_pop(&raw mut popped);
            found.ok().map(|()| device)
        }
    }

    /// Returns the primary context of a device, which must be active.
    pub(crate) fn primary_of(&self, device: c_int) -> Option<usize> {
        let mut context = 0;
        // SAFETY: the pointer is valid for writing. The release ends only what this call retained.
        unsafe {
            self.primary_retain(&raw mut context, device).ok()?;
            self.primary_release(device).ok()?;
        }
        Some(context)
    }

    /// Returns `true` if a stream is part of a capture, even an invalidated one.
    pub(crate) fn is_captured(&self, stream: usize) -> bool {
        let mut status = 0;
        // SAFETY: the pointer is valid for writing; the driver checks handles.
        unsafe { self.stream_captured(stream, &raw mut status) }.is_ok() && status != 0
    }
}
