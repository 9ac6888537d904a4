//! A device together with the context that the allocator uses.
//!
//! The context is either supplied by the program ([`CudaDevice::with_context`]) or the device's primary context ([`CudaDevice::new`]).
//! Every driver call that needs a current context is made under a [`CurrentContext`] guard, which restores the thread's current context
//! afterwards.

use crate::driver::{Driver, RelaxedCapture, attribute};
use crate::error::{CudaError, DriverError, INVALID_CONTEXT, INVALID_HANDLE, LoadError, NOT_INITIALIZED};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUcontext, CUdevice, CUstream};
use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use symmalloc_files::watch_forks;

/// A device and the context in which its memory is allocated.
pub struct CudaDevice {
    driver: &'static Driver,
    /// Number of captures in progress, see [`is_capturing`](Self::is_capturing).
    captures: AtomicUsize,
    context: HeldContext,
    features: DeviceFeatures,
}

/// A context whose release leaves the thread's current context unchanged. cudarc makes a context current before it releases it. If a stream or
/// another clone of the context is dropped later, cudarc does so then.
struct HeldContext {
    driver: &'static Driver,
    /// `None` only while it is dropped.
    context: Option<Arc<CudaContext>>,
}

impl Deref for HeldContext {
    type Target = Arc<CudaContext>;

    fn deref(&self) -> &Arc<CudaContext> {
        self.context.as_ref().expect("the context is held until the drop")
    }
}

impl Drop for HeldContext {
    fn drop(&mut self) {
        let _restore = RestoreCurrent::of(self.driver).ok().filter(|restore| restore.before != self.cu_ctx());
        self.context = None;
    }
}

/// Device capabilities that matter to an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFeatures {
    /// Address ranges can be reserved and backed in pieces. Without this capability, memory comes from `cuMemAlloc`.
    pub virtual_memory: bool,
    /// Memory can be shared with other processes as a file descriptor.
    pub posix_fd: bool,
    /// Memory can be shared with other machines of an NVLink fabric.
    pub fabric: bool,
    /// Network cards can reach memory directly.
    pub gpu_direct_rdma: bool,
    /// Memory can be passed to network cards and other devices as a dma-buf.
    pub dma_buf: bool,
}

/// Free and total device memory as reported by the driver, including the memory of other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// Free memory in bytes.
    pub free_bytes: u64,
    /// Total memory in bytes.
    pub total_bytes: u64,
}

impl CudaDevice {
    /// Opens the device with this ordinal and its primary context (the one that CUDA's runtime API uses).
    ///
    /// # Errors
    /// Returns an error if libcuda or the device is missing, or the context cannot be created. See [`CudaError`].
    pub fn new(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let devices = Self::count()?;
        if ordinal >= devices {
            return Err(CudaError::NoSuchDevice { ordinal, devices });
        }
        let driver = Driver::load()?;
        let restore = RestoreCurrent::of(driver)?;
        let context = CudaContext::new(ordinal);
        drop(restore);
        let context =
            context.map_err(|error| DriverError { call: "cuDevicePrimaryCtxRetain", code: error.0 as i32 })?;
        Self::with_context(context)
    }

    /// Creates a device from an existing context.
    ///
    /// # Errors
    /// Returns an error if the driver lacks a required call, or a driver call fails.
    pub fn with_context(context: Arc<CudaContext>) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::load()?;
        let has = |attribute| has_attribute(driver, context.cu_device(), attribute);
        let features = DeviceFeatures {
            virtual_memory: has(attribute::VIRTUAL_MEMORY),
            posix_fd: has(attribute::POSIX_FD),
            fabric: has(attribute::FABRIC),
            gpu_direct_rdma: has(attribute::GPU_DIRECT_RDMA),
            dma_buf: has(attribute::DMA_BUF) && driver.has_dma_buf(),
        };
        // From here on, objects exist that a forked child must not release.
        watch_forks();
        let context = HeldContext { driver, context: Some(context) };
        Ok(Arc::new(CudaDevice { driver, captures: AtomicUsize::new(0), context, features }))
    }

    /// Opens the device of a rank by the rank's number on this machine. With more ranks than devices, ranks share devices in turn. NCCL
    /// rejects ranks that share a device, unless it is version 2.30 or later and `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
    ///
    /// # Errors
    /// As [`new`](Self::new). Without a device, the error is that of device 0.
    pub fn for_local_rank(local_rank: u32) -> Result<Arc<Self>, CudaError> {
        Self::new(local_rank as usize % Self::count()?.max(1))
    }

    /// Returns the path of the libcuda of this process. If no earlier call has needed libcuda, this function opens the library and resolves
    /// every driver function that this crate uses, without calling any of them.
    ///
    /// If the environment variable `SYMMALLOC_CUDA_LIBRARY` is set, only the file that it names is tried. Otherwise, the search order is: a
    /// libcuda that the process has already opened, `libcuda.so`, `libcuda.so.1`.
    ///
    /// # Errors
    /// Returns an error if no library can be opened, or the library lacks a required call. The result does not change within a process.
    pub fn library() -> Result<&'static Path, LoadError> {
        Driver::load().map(Driver::path)
    }

    /// Returns the number of devices that the driver reports.
    ///
    /// # Errors
    /// Returns an error if libcuda is missing or cannot be initialized.
    pub fn count() -> Result<usize, CudaError> {
        let driver = Driver::load()?;
        // SAFETY: takes no pointers; may be called any number of times.
        unsafe { driver.init(0) }?;
        let mut count = 0;
        // SAFETY: `count` is valid for writing.
        unsafe { driver.device_count(&raw mut count) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns the ordinal of the device whose context is current on this thread, or `None` if no context is current.
    ///
    /// # Errors
    /// Returns an error if libcuda is missing, or a driver call fails.
    pub fn current() -> Result<Option<usize>, CudaError> {
        let driver = Driver::load()?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: `context` is valid for writing.
        match unsafe { driver.context_current(&raw mut context) } {
            Err(error) if error.code == NOT_INITIALIZED => return Ok(None),
            outcome => outcome?,
        }
        if context.is_null() {
            return Ok(None);
        }
        let mut current: CUdevice = 0;
        // SAFETY: `current` is valid for writing, and a context is current.
        unsafe { driver.context_device(&raw mut current) }?;
        let is_current = |ordinal: c_int| -> Result<bool, CudaError> {
            let mut device: CUdevice = 0;
            // SAFETY: `device` is valid for writing.
            unsafe { driver.device_get(&raw mut device, ordinal) }?;
            Ok(device == current)
        };
        // Drivers use ordinals as device handles in practice, but nothing guarantees it.
        if matches!(is_current(current), Ok(true)) {
            return Ok(usize::try_from(current).ok());
        }
        for ordinal in 0..Self::count()? {
            if is_current(ordinal as c_int)? {
                return Ok(Some(ordinal));
            }
        }
        Ok(None)
    }

    #[inline]
    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Returns the context with which the device was opened.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Returns the device's ordinal, as CUDA numbers the devices that are visible to this process.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Returns the capabilities that were queried when the device was opened.
    pub fn features(&self) -> DeviceFeatures {
        self.features
    }

    /// Returns free and total memory as reported by the driver. The allocator itself never reads these values, because they differ between
    /// ranks (rule D4 in `docs/determinism.md`).
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn memory_info(&self) -> Result<MemoryInfo, DriverError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for writing, and a context is current.
        unsafe { self.driver.memory_info(&raw mut free, &raw mut total) }?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    /// Blocks the host until all work submitted to the context so far is done.
    ///
    /// # Errors
    /// Returns an error if a driver call fails or reports that work failed. While a stream of the context is being captured, the call fails
    /// and invalidates the capture.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // Other devices may have captures in progress.
        let _relaxed = self.relax_capture();
        // SAFETY: takes no pointers, and the context is current.
        unsafe { self.driver.context_synchronize() }
    }

    /// Returns the number of driver calls that this crate has made in this process, over all devices and threads. A difference of zero
    /// around an allocation shows that it was served from the cache.
    pub fn driver_calls() -> u64 {
        Driver::calls()
    }

    /// Returns the device's UUID, which is the same in every process.
    pub(crate) fn uuid(&self) -> Result<[u8; 16], DriverError> {
        let mut uuid = [0; 16];
        // SAFETY: `uuid` is valid for writing.
        unsafe { self.driver.device_uuid(&raw mut uuid, self.raw_device()) }?;
        Ok(uuid)
    }

    pub(crate) fn raw_device(&self) -> CUdevice {
        self.context.cu_device()
    }

    /// Returns the driver's handle of device `peer` if the peer's kernels can access this device's memory. Returns `None` if they cannot,
    /// or if the peer does not exist.
    pub(crate) fn can_be_accessed_by(&self, peer: usize) -> Result<Option<CUdevice>, DriverError> {
        let mut count = 0;
        // SAFETY: `count` is valid for writing.
        unsafe { self.driver.device_count(&raw mut count) }?;
        let Some(ordinal) = c_int::try_from(peer).ok().filter(|ordinal| *ordinal < count) else { return Ok(None) };
        let (mut device, mut can): (CUdevice, c_int) = (0, 0);
        // SAFETY: `device` is valid for writing.
        unsafe { self.driver.device_get(&raw mut device, ordinal) }?;
        // SAFETY: `can` is valid for writing, both devices exist.
        unsafe { self.driver.device_can_access_peer(&raw mut can, device, self.raw_device()) }?;
        Ok((can != 0).then_some(device))
    }

    /// Returns `true` if a stream of the device may be under capture: a capture that [`GraphPool::begin`](crate::GraphPool::begin) started
    /// is in progress, or a [`CaptureWatch`](crate::CaptureWatch) is alive.
    #[inline]
    pub fn is_capturing(&self) -> bool {
        self.captures.load(Ordering::Acquire) > 0
    }

    pub(crate) fn begin_capture(&self) {
        self.captures.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end_capture(&self) {
        self.captures.fetch_sub(1, Ordering::AcqRel);
    }

    /// Puts this thread into the relaxed capture mode until the guard is dropped. The default mode of every thread is the global mode:
    /// while any thread captures in that mode, calls that are not stream work (such as allocating memory, or querying or waiting for an
    /// event) fail and invalidate the capture. Use the relaxed mode only for calls that are unrelated to the captured work.
    pub fn relax_capture(&self) -> RelaxedCapture {
        self.driver.relax_capture()
    }

    /// Makes the context current on this thread until the guard is dropped, for calls of other libraries that use the current context.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn enter(&self) -> Result<CurrentContext<'_>, DriverError> {
        let mut before: CUcontext = std::ptr::null_mut();
        // SAFETY: `before` is valid for writing.
        unsafe { self.driver.context_current(&raw mut before) }?;
        let pushed = before != self.context.cu_ctx();
        if pushed {
            // SAFETY: the context lives as long as `self`, which the guard borrows.
            unsafe { self.driver.context_push(self.context.cu_ctx()) }?;
        }
        Ok(CurrentContext { driver: self.driver, pushed, thread: PhantomData })
    }
}

/// Codes that a driver may return for streams and events whose context is not current.
const NOT_HERE: [i32; 2] = [INVALID_CONTEXT, INVALID_HANDLE];

impl CudaDevice {
    /// Makes a driver call on a stream of the device or on its events. These handles identify their context, so the call is tried first
    /// without making the context current, which would cost an extra driver call. If the driver needs the context, it is made current and
    /// the call is repeated.
    #[inline]
    pub(crate) fn call_about(
        &self,
        stream: CUstream,
        call: impl Fn() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        // The default streams have the same handles, 0 to 2, in all contexts, and refer to the current context.
        if stream as usize > 2 {
            match call() {
                Err(error) if NOT_HERE.contains(&error.code) => {}
                outcome => return outcome,
            }
        }
        self.call_inside(call)
    }

    #[cold]
    #[inline(never)]
    fn call_inside(&self, call: impl Fn() -> Result<(), DriverError>) -> Result<(), DriverError> {
        let _current = self.enter()?;
        call()
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("ordinal", &self.ordinal()).field("features", &self.features).finish()
    }
}

fn has_attribute(driver: &Driver, device: CUdevice, attribute: c_int) -> bool {
    let mut value = 0;
    // SAFETY: `value` is valid for writing; the driver returns an error for an unknown attribute.
    unsafe { driver.device_attribute(&raw mut value, attribute, device) }.is_ok() && value != 0
}

/// Guard that keeps the device's context current on this thread. Dropping it restores the previous context. See [`CudaDevice::enter`].
#[must_use = "the context is current only while the guard is alive"]
pub struct CurrentContext<'a> {
    driver: &'a Driver,
    pushed: bool,
    /// Makes the guard `!Send`, because it affects the current context of one thread.
    thread: PhantomData<*mut ()>,
}

impl fmt::Debug for CurrentContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CurrentContext").field("pushed", &self.pushed).finish_non_exhaustive()
    }
}

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = std::ptr::null_mut();
            // SAFETY: `popped` is valid for writing. Fails only if other code popped in between, and then there is nothing to restore.
            let _popped = unsafe { self.driver.context_pop(&raw mut popped) };
        }
    }
}

/// Guard that restores the thread's current context when it is dropped. Used around cudarc's calls, which change the current context.
pub(crate) struct RestoreCurrent {
    driver: &'static Driver,
    before: CUcontext,
}

impl RestoreCurrent {
    pub(crate) fn of(driver: &'static Driver) -> Result<Self, DriverError> {
        let mut before: CUcontext = std::ptr::null_mut();
        // SAFETY: `before` is valid for writing.
        unsafe { driver.context_current(&raw mut before) }?;
        Ok(RestoreCurrent { driver, before })
    }
}

impl Drop for RestoreCurrent {
    fn drop(&mut self) {
        // SAFETY: the context was current when this guard was created. If the context has been destroyed since then, the call fails, and
        // the thread is left without a live context.
        let _restored = unsafe { self.driver.context_set(self.before) };
    }
}
