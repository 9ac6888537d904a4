//! The driver calls of this crate, resolved once.
//!
//! cudarc resolves a symbol at its first call and panics if it is missing. Its `CUresult` is a Rust enum, so a code that is newer than the
//! bindings has no valid value. An allocator must survive both cases, so this crate's calls go through a table: every symbol is resolved
//! before anything is called, a missing symbol is a [`LoadError`], and codes are plain integers. Only the call for dma-bufs is optional.
//!
//! ```text
//!  Driver::load ── Libcuda::find ── every symbol there? ── Driver ── method per call ── Result<(), DriverError>
//! ```
//! After `Driver::load` no more symbols are resolved. A library that interposes libcuda and itself uses this crate only needs to exclude
//! this one call from interposition.

use crate::error::{DriverError, LoadError, NOT_SUPPORTED};
use crate::error_names::{self, GetErrorName};
use crate::library::Libcuda;
use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUgraph, CUgraphExec, CUstream};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// `CUmemLocation` of a device. The layout is the same in all versions of CUDA.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct MemLocation {
    /// 1: a device.
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

impl MemLocation {
    pub(crate) fn device(device: CUdevice) -> Self {
        MemLocation { kind: 1, id: device }
    }
}

/// `CUmemAllocationProp`. The layout is the same in all versions of CUDA.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemProperties {
    /// 1: pinned, the only kind.
    pub(crate) kind: c_int,
    /// Bitwise OR of [`HANDLE_POSIX_FD`] and [`HANDLE_FABRIC`].
    pub(crate) handle_types: c_uint,
    pub(crate) location: MemLocation,
    pub(crate) win32: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) gpu_direct_rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

impl MemProperties {
    pub(crate) fn of(location: MemLocation, handle_types: c_uint, gpu_direct_rdma: u8) -> Self {
        MemProperties {
            kind: 1,
            handle_types,
            location,
            win32: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

pub(crate) const HANDLE_POSIX_FD: c_uint = 1;
pub(crate) const HANDLE_FABRIC: c_uint = 8;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const RANGE_DMA_BUF: c_int = 1;

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemAccess {
    pub(crate) location: MemLocation,
    /// [`ACCESS_READ`] or [`ACCESS_READ_WRITE`].
    pub(crate) flags: c_int,
}

pub(crate) const ACCESS_READ: c_int = 1;
pub(crate) const ACCESS_READ_WRITE: c_int = 3;

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
pub(crate) const HOST_PORTABLE: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const CAPTURE_RELAXED: c_int = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(crate) const CAPTURE_NONE: c_int = 0;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
pub(crate) const CAPTURE_ACTIVE: c_int = 1;

/// Device attributes by number: the numbers never change, and older headers lack some of the names.
pub(crate) mod attribute {
    use std::ffi::c_int;
    pub(crate) const VIRTUAL_MEMORY: c_int = 102;
    pub(crate) const POSIX_FD: c_int = 103;
    pub(crate) const GPU_DIRECT_RDMA: c_int = 110;
    pub(crate) const DMA_BUF: c_int = 124;
    pub(crate) const FABRIC: c_int = 128;
}

/// Number of driver calls that this crate made in this process.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Symbols that cudarc itself calls in code paths of this crate and of `symmalloc-nccl`. cudarc would panic without them.
const USED_BY_CUDARC: [&str; 14] = [
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuGraphInstantiateWithFlags",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuGetErrorString",
];

/// `cuMemGetHandleForAddressRange`, which drivers before CUDA 11.7 lack.
type RangeHandle = unsafe extern "C" fn(*mut c_void, CUdeviceptr, usize, c_int, c_ulonglong) -> c_int;

macro_rules! driver_calls {
    ($($name:ident = $symbol:ident ($($arg:ident: $type:ty),*);)*) => {
        /// libcuda, with every call resolved.
        pub(crate) struct Driver {
            path: PathBuf,
            range_handle: Option<RangeHandle>,
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Driver {
            fn resolve(library: &Libcuda) -> Result<Driver, LoadError> {
                Ok(Driver {
                    path: library.path().to_owned(),
                    // SAFETY: the type is the symbol's signature in cuda.h, with an integer for the enum.
                    range_handle: unsafe { library.symbol("cuMemGetHandleForAddressRange") }.ok(),
                    $($name: {
                        // SAFETY: the type is the symbol's signature in cuda.h, with integers for enums.
                        unsafe { library.symbol::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($symbol)) }?
                    },)*
                })
            }

            $(
                /// # Safety
                /// See the call of this name in the CUDA driver API: handles must be live and pointers valid.
                #[allow(clippy::too_many_arguments, reason = "the driver's signature")]
                #[inline]
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> Result<(), DriverError> {
                    CALLS.fetch_add(1, Ordering::Relaxed);
                    // SAFETY: the caller's contract.
                    let code = unsafe { (self.$name)($($arg),*) };
                    if code == 0 { Ok(()) } else { Err(DriverError { call: stringify!($symbol), code }) }
                }
            )*
        }
    };
}

driver_calls! {
    init = cuInit(flags: c_uint);
    device_count = cuDeviceGetCount(count: *mut c_int);
    device_attribute = cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
    device_can_access_peer = cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
    device_uuid = cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice);
    device_get = cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    context_current = cuCtxGetCurrent(context: *mut CUcontext);
    context_device = cuCtxGetDevice(device: *mut CUdevice);
    context_set = cuCtxSetCurrent(context: CUcontext);
    context_push = cuCtxPushCurrent_v2(context: CUcontext);
    context_pop = cuCtxPopCurrent_v2(context: *mut CUcontext);
    context_synchronize = cuCtxSynchronize();
    memory_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    granularity = cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const MemProperties, option: c_int);
    address_reserve = cuMemAddressReserve(base: *mut CUdeviceptr, size: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong);
    address_free = cuMemAddressFree(base: CUdeviceptr, size: usize);
    create = cuMemCreate(handle: *mut c_ulonglong, size: usize, properties: *const MemProperties, flags: c_ulonglong);
    release = cuMemRelease(handle: c_ulonglong);
    retain = cuMemRetainAllocationHandle(handle: *mut c_ulonglong, address: *mut c_void);
    map = cuMemMap(address: CUdeviceptr, size: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong);
    export_handle = cuMemExportToShareableHandle(shareable: *mut c_void, handle: c_ulonglong, kind: c_uint, flags: c_ulonglong);
    import_handle = cuMemImportFromShareableHandle(handle: *mut c_ulonglong, shareable: *mut c_void, kind: c_uint);
    handle_properties = cuMemGetAllocationPropertiesFromHandle(properties: *mut MemProperties, handle: c_ulonglong);
    unmap = cuMemUnmap(address: CUdeviceptr, size: usize);
    set_access = cuMemSetAccess(address: CUdeviceptr, size: usize, access: *const MemAccess, count: usize);
    allocate = cuMemAlloc_v2(address: *mut CUdeviceptr, size: usize);
    free = cuMemFree_v2(address: CUdeviceptr);
    host_allocate = cuMemHostAlloc(address: *mut *mut c_void, size: usize, flags: c_uint);
    host_free = cuMemFreeHost(address: *mut c_void);
    copy_to_host = cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, count: usize, stream: CUstream);
    copy_to_device = cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, count: usize, stream: CUstream);
    memset_async = cuMemsetD8Async(address: CUdeviceptr, value: u8, count: usize, stream: CUstream);
    memset32_async = cuMemsetD32Async(address: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
    event_create = cuEventCreate(event: *mut CUevent, flags: c_uint);
    event_destroy = cuEventDestroy_v2(event: CUevent);
    event_record = cuEventRecord(event: CUevent, stream: CUstream);
    event_query = cuEventQuery(event: CUevent);
    event_synchronize = cuEventSynchronize(event: CUevent);
    event_elapsed = cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    stream_create = cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    stream_destroy = cuStreamDestroy_v2(stream: CUstream);
    stream_wait = cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    stream_synchronize = cuStreamSynchronize(stream: CUstream);
    capture_info = cuStreamGetCaptureInfo_v2(stream: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph, dependencies: *mut *const c_void, count: *mut usize);
    exchange_capture_mode = cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    graph_launch = cuGraphLaunch(graph: CUgraphExec, stream: CUstream);
}

impl Driver {
    /// Returns the driver of this process.
    pub(crate) fn load() -> Result<&'static Driver, LoadError> {
        static DRIVER: OnceLock<Result<Driver, LoadError>> = OnceLock::new();
        DRIVER.get_or_init(Driver::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Driver, LoadError> {
        let library = Libcuda::find()?;
        for name in USED_BY_CUDARC {
            // SAFETY: only resolved, never called through this type.
            unsafe { library.symbol::<unsafe extern "C" fn()>(name) }?;
        }
        let driver = Driver::resolve(&library)?;
        // SAFETY: the type is the symbol's signature in cuda.h, with an integer for the enum.
        if let Ok(call) = unsafe { library.symbol::<GetErrorName>("cuGetErrorName") } {
            // SAFETY: libcuda stays loaded.
            unsafe { error_names::set_call(call) };
        }
        tracing::debug!(name: "cuda.loaded", target: "symmalloc", path = %driver.path.display());
        Ok(driver)
    }

    /// Returns the path of the library that the calls were resolved from.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns `true` if the driver has [`dma_buf`](Self::dma_buf).
    pub(crate) fn has_dma_buf(&self) -> bool {
        self.range_handle.is_some()
    }

    /// Creates a dma-buf of an address range with `cuMemGetHandleForAddressRange`, and writes its descriptor to `file`.
    ///
    /// # Safety
    /// `file` is valid for writing. The range starts and ends at host pages, and memory is mapped at all of its addresses.
    pub(crate) unsafe fn dma_buf(
        &self,
        file: *mut c_int,
        address: CUdeviceptr,
        size: usize,
    ) -> Result<(), DriverError> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        let Some(range_handle) = self.range_handle else {
            return Err(DriverError { call: CALL, code: NOT_SUPPORTED });
        };
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        let code = unsafe { range_handle(file.cast(), address, size, RANGE_DMA_BUF, 0) };
        if code == 0 { Ok(()) } else { Err(DriverError { call: CALL, code }) }
    }

    /// Returns the number of driver calls that this crate has made in this process.
    pub(crate) fn calls() -> u64 {
        CALLS.load(Ordering::Relaxed)
    }

    /// See [`CudaDevice::relax_capture`](crate::CudaDevice::relax_capture).
    pub(crate) fn relax_capture(&'static self) -> RelaxedCapture {
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: `mode` is valid for reading and writing.
        let exchanged = unsafe { self.exchange_capture_mode(&raw mut mode) };
        // If this call fails, the driver has failed entirely, and the next calls report the error.
        RelaxedCapture { driver: self, before: exchanged.ok().map(|()| mode), thread: PhantomData }
    }
}

/// Guard that lets this thread make calls that stream captures would otherwise forbid. Dropping it restores the previous mode. See
/// [`CudaDevice::relax_capture`](crate::CudaDevice::relax_capture).
#[must_use = "the mode is relaxed only while the guard is alive"]
pub struct RelaxedCapture {
    driver: &'static Driver,
    /// The thread's previous mode; `None` if it could not be changed.
    before: Option<c_int>,
    /// Not `Send`: the guard concerns this thread.
    thread: PhantomData<*mut ()>,
}

impl fmt::Debug for RelaxedCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelaxedCapture").field("before", &self.before).finish_non_exhaustive()
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(mut mode) = self.before {
            // SAFETY: `mode` is valid for reading and writing, and the driver returned this mode, so the call cannot fail.
            let _restored = unsafe { self.driver.exchange_capture_mode(&raw mut mode) };
        }
    }
}
