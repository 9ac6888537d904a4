//! The driver's calls as a program makes them, looked up with `dlsym`.

use std::ffi::{CString, c_int, c_void};

pub(crate) const MIB: usize = 1 << 20;

/// Looks up a call by name. Does not cache the result, so it returns the function that a program would get now.
fn call<F: Copy>(name: &str) -> F {
    let name = CString::new(name).expect("no null byte");
    // SAFETY: C strings; the stub has no initializers.
    let found = unsafe {
        let library = libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "the stub is on the library path");
        libc::dlsym(library, name.as_ptr())
    };
    assert!(!found.is_null() && size_of::<F>() == size_of_val(&found), "{name:?} is not in the stub");
    // SAFETY: the functions below declare the calls' types.
    unsafe { std::mem::transmute_copy(&found) }
}

macro_rules! driver {
    ($($name:ident = $symbol:literal($($arg:ident: $type:ty),*);)*) => {
        $(
            pub(crate) fn $name($($arg: $type),*) -> c_int {
                // SAFETY: the type matches the call; tests pass valid arguments, or arguments that the call rejects.
                unsafe { call::<unsafe extern "C" fn($($type),*) -> c_int>($symbol)($($arg),*) }
            }
        )*
    };
}

driver! {
    init = "cuInit"(flags: u32);
    retain = "cuDevicePrimaryCtxRetain"(context: *mut usize, device: c_int);
    release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
    reset = "cuDevicePrimaryCtxReset_v2"(device: c_int);
    get_current = "cuCtxGetCurrent"(context: *mut usize);
    create_context = "cuCtxCreate_v2"(context: *mut usize, flags: u32, device: c_int);
    set_current = "cuCtxSetCurrent"(context: usize);
    context_synchronize = "cuCtxSynchronize"();
    enable_peer = "cuCtxEnablePeerAccess"(context: usize, flags: u32);
    mem_alloc = "cuMemAlloc_v2"(address: *mut u64, size: usize);
    mem_alloc_pitch = "cuMemAllocPitch_v2"(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32);
    mem_alloc_managed = "cuMemAllocManaged"(address: *mut u64, size: usize, flags: u32);
    mem_free = "cuMemFree_v2"(address: u64);
    mem_alloc_async = "cuMemAllocAsync"(address: *mut u64, size: usize, stream: u64);
    mem_alloc_async_ptsz = "cuMemAllocAsync_ptsz"(address: *mut u64, size: usize, stream: u64);
    mem_alloc_from_pool = "cuMemAllocFromPoolAsync"(address: *mut u64, size: usize, pool: u64, stream: u64);
    mem_free_async = "cuMemFreeAsync"(address: u64, stream: u64);
    mem_free_async_ptsz = "cuMemFreeAsync_ptsz"(address: u64, stream: u64);
    mem_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    address_range = "cuMemGetAddressRange_v2"(base: *mut u64, size: *mut usize, address: u64);
    pointer_attribute = "cuPointerGetAttribute"(value: *mut c_void, attribute: c_int, address: u64);
    pointer_attributes = "cuPointerGetAttributes"(count: u32, attributes: *const c_int, values: *const *mut c_void, address: u64);
    ipc_handle = "cuIpcGetMemHandle"(handle: *mut c_void, address: u64);
    memset_async = "cuMemsetD8Async"(address: u64, value: u8, count: usize, stream: u64);
    stream_create = "cuStreamCreate"(stream: *mut u64, flags: u32);
    stream_destroy = "cuStreamDestroy_v2"(stream: u64);
    stream_synchronize = "cuStreamSynchronize"(stream: u64);
    begin_capture = "cuStreamBeginCapture_v2"(stream: u64, mode: c_int);
    end_capture = "cuStreamEndCapture"(stream: u64, graph: *mut u64);
    graph_destroy = "cuGraphDestroy"(graph: u64);
    default_pool = "cuDeviceGetDefaultMemPool"(pool: *mut u64, device: c_int);
    set_pool = "cuDeviceSetMemPool"(device: c_int, pool: u64);
    pool_create = "cuMemPoolCreate"(pool: *mut u64, properties: *const c_void);
    pool_destroy = "cuMemPoolDestroy"(pool: u64);
    pool_attribute = "cuMemPoolGetAttribute"(pool: u64, attribute: c_int, value: *mut c_void);
    set_pool_attribute = "cuMemPoolSetAttribute"(pool: u64, attribute: c_int, value: *mut c_void);
    pool_trim = "cuMemPoolTrimTo"(pool: u64, keep: usize);
    pool_access = "cuMemPoolSetAccess"(pool: u64, access: *const [c_int; 3], count: usize);
}

/// Makes a device's primary context current.
pub(crate) fn begin(device: c_int) -> usize {
    let mut context = 0;
    assert_eq!([init(0), retain(&raw mut context, device), set_current(context)], [0; 3]);
    context
}

/// Creates a stream of the current context.
pub(crate) fn stream() -> u64 {
    let mut stream = 0;
    assert_eq!(stream_create(&raw mut stream, 1), 0);
    stream
}

/// Calls `cuMemAlloc`, and returns the address or the error code.
pub(crate) fn alloc(size: usize) -> Result<u64, c_int> {
    let mut address = 0;
    match mem_alloc(&raw mut address, size) {
        0 => Ok(address),
        code => Err(code),
    }
}

/// Calls `cuMemAllocAsync`, and returns the address or the error code.
pub(crate) fn alloc_async(size: usize, stream: u64) -> Result<u64, c_int> {
    let mut address = 0;
    match mem_alloc_async(&raw mut address, size, stream) {
        0 => Ok(address),
        code => Err(code),
    }
}

/// Returns the byte at an address of the stub's memory.
pub(crate) fn byte(address: u64) -> u8 {
    // SAFETY: the stub's device memory is memory of this process, and the test allocated it.
    unsafe { (address as *const u8).read_volatile() }
}
