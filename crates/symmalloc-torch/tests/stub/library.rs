//! The library's calls as Rust methods, and streams that other code owns.

use cudarc::driver::CudaStream;
use serde_json::Value;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
pub(crate) use stub_process::cuda::{all_calls, calls, fail, heal, live};
pub(crate) use stub_process::{steady, stub_test};
use symmalloc_cuda::CudaDevice;
use symmalloc_torch::*;

pub(crate) use symmalloc_torch::symmalloc_status::*;

pub(crate) const MIB: usize = 1 << 20;

/// A pointer as a number, which can be compared, sent and stored.
pub(crate) type Pointer = usize;

/// Returns the thread's last message.
pub(crate) fn message() -> String {
    // SAFETY: a C string that stays until the next failure of this thread.
    unsafe { CStr::from_ptr(symmalloc_error_message()) }.to_string_lossy().into_owned()
}

#[track_caller]
pub(crate) fn done(status: symmalloc_status) {
    assert_eq!(status, SYMMALLOC_OK, "{}", message());
}

pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text).expect("no zero byte")
}

/// Copies and releases a text of the library.
pub(crate) fn taken(text: *mut c_char) -> String {
    // SAFETY: a C string of the library.
    let copy = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: from the library, and not used after this.
    unsafe { symmalloc_release_bytes(text.cast()) };
    copy
}

/// An allocator through its C functions.
#[derive(Clone, Copy)]
pub(crate) struct Allocator(pub(crate) *mut DeviceAllocator);

// SAFETY: all functions are thread-safe.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    pub(crate) fn new(conf: &str) -> Self {
        let (conf, mut out) = (c_text(conf), null_mut());
        // SAFETY: a C string, and an output pointer.
        done(unsafe { symmalloc_create(0, conf.as_ptr(), &raw mut out) });
        Allocator(out)
    }

    /// Returns the allocator behind PyTorch's entry points.
    pub(crate) fn of_torch() -> Self {
        let mut out = null_mut();
        // SAFETY: an output pointer.
        done(unsafe { symmalloc_process_allocator(0, &raw mut out) });
        Allocator(out)
    }

    pub(crate) fn try_allocate(
        self,
        pool: u32,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<Pointer, symmalloc_status> {
        let mut out = null_mut();
        // SAFETY: a live allocator and stream, and an output pointer.
        match unsafe { symmalloc_allocate(self.0, pool, stream, bytes, &raw mut out) } {
            SYMMALLOC_OK => Ok(out as Pointer),
            status => Err(status),
        }
    }

    #[track_caller]
    pub(crate) fn allocate(self, pool: u32, bytes: usize, stream: *mut c_void) -> Pointer {
        self.try_allocate(pool, bytes, stream).unwrap_or_else(|status| panic!("{status:?}: {}", message()))
    }

    pub(crate) fn try_free(self, pointer: Pointer) -> symmalloc_status {
        // SAFETY: a live allocator.
        unsafe { symmalloc_free(self.0, pointer as *mut c_void) }
    }

    #[track_caller]
    pub(crate) fn free(self, pointer: Pointer) {
        done(self.try_free(pointer));
    }

    pub(crate) fn try_record_use(self, pointer: Pointer, stream: *mut c_void) -> symmalloc_status {
        // SAFETY: a live allocator and stream.
        unsafe { symmalloc_record_use(self.0, pointer as *mut c_void, stream) }
    }

    #[track_caller]
    pub(crate) fn create_pool(self, conf: Option<&str>) -> u32 {
        let (conf, mut out) = (conf.map(c_text), 0);
        let conf = conf.as_ref().map_or(null(), |conf| conf.as_ptr());
        // SAFETY: a live allocator, a C string or null, and an output pointer.
        done(unsafe { symmalloc_pool_create(self.0, conf, &raw mut out) });
        out
    }

    pub(crate) fn destroy_pool(self, pool: u32) -> symmalloc_status {
        // SAFETY: a live allocator.
        unsafe { symmalloc_pool_destroy(self.0, pool) }
    }

    #[track_caller]
    pub(crate) fn trim_private(self) -> u64 {
        let mut out = 0;
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_trim_private(self.0, &raw mut out) });
        out
    }

    #[track_caller]
    pub(crate) fn trim(self) -> u64 {
        let mut out = 0;
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_trim(self.0, &raw mut out) });
        out
    }

    pub(crate) fn try_placement(self, pointer: Pointer) -> Result<symmalloc_placement, symmalloc_status> {
        let mut out = symmalloc_placement::default();
        // SAFETY: a live allocator, and an output pointer.
        match unsafe { symmalloc_placement_of(self.0, pointer as *const c_void, &raw mut out) } {
            SYMMALLOC_OK => Ok(out),
            status => Err(status),
        }
    }

    #[track_caller]
    pub(crate) fn placement(self, pointer: Pointer) -> symmalloc_placement {
        self.try_placement(pointer).unwrap_or_else(|status| panic!("{status:?}: {}", message()))
    }

    pub(crate) fn stats(self) -> Value {
        let mut out = null_mut();
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_stats_json(self.0, &raw mut out) });
        serde_json::from_str(&taken(out)).expect("JSON")
    }

    /// Returns a number from the totals by its path, such as `allocated_bytes/all/current`.
    pub(crate) fn total(self, path: &str) -> u64 {
        let stats = self.stats();
        stats.pointer(&format!("/total/{path}")).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} in {stats}"))
    }

    pub(crate) fn digest(self, pool: u32) -> u64 {
        let mut out = 0;
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_digest(self.0, pool, &raw mut out) });
        out
    }

    #[track_caller]
    pub(crate) fn destroy(self) {
        // SAFETY: not used after this.
        done(unsafe { symmalloc_destroy(self.0) });
    }
}

/// Everything that must be equal after every round of a program that repeats itself.
#[derive(Debug, PartialEq)]
pub(crate) struct Held {
    live: stub_process::cuda::Live,
    descriptors: usize,
    /// Current values and peaks in the statistics, by path.
    levels: Vec<(String, u64)>,
    addresses: Vec<Pointer>,
}

impl Held {
    /// Removes events and pinned memory, which other threads release at some later time.
    pub(crate) fn without_threads(mut self) -> Self {
        (self.live.events, self.live.host_bytes) = (0, 0);
        self
    }

    /// Removes the peaks, because those of destroyed pools add up.
    pub(crate) fn without_peaks(mut self) -> Self {
        self.levels.retain(|(path, _)| !path.ends_with("peak"));
        self
    }
}

impl Allocator {
    /// Returns what the allocator and the driver hold, and these addresses.
    pub(crate) fn held(self, addresses: &[Pointer]) -> Held {
        let mut levels = Vec::new();
        add_levels(&self.stats()["total"], "total", &mut levels);
        assert!(levels.len() > 20, "{levels:?}");
        Held { live: live(), descriptors: stub_process::descriptors(), levels, addresses: addresses.to_vec() }
    }
}

fn add_levels(stats: &Value, path: &str, levels: &mut Vec<(String, u64)>) {
    for (name, value) in stats.as_object().into_iter().flatten() {
        let path = format!("{path}/{name}");
        match value.as_u64() {
            Some(level) if ["current", "peak"].contains(&name.as_str()) => levels.push((path, level)),
            _ => add_levels(value, &path, levels),
        }
    }
}

/// Streams of another library, which live as long as this object.
pub(crate) struct Streams(Vec<Arc<CudaStream>>);

/// Returns two streams that are never destroyed, for programs that share PyTorch's allocator: it keeps the streams that it knows.
pub(crate) fn lasting_streams() -> &'static Streams {
    static STREAMS: std::sync::OnceLock<Streams> = std::sync::OnceLock::new();
    STREAMS.get_or_init(|| Streams::new(2))
}

impl Streams {
    pub(crate) fn new(count: usize) -> Self {
        let device = CudaDevice::new(0).expect("the stub has a device");
        Streams((0..count).map(|_| device.context().new_stream().expect("a stream")).collect())
    }

    pub(crate) fn get(&self, index: usize) -> *mut c_void {
        self.0[index].cu_stream().cast()
    }

    /// Returns a stream as a cudarc object, for PyTorch's operations on it.
    pub(crate) fn stream(&self, index: usize) -> &Arc<CudaStream> {
        &self.0[index]
    }
}

/// PyTorch's calls.
pub(crate) mod torch {
    use super::*;
    use std::ptr::null;

    pub(crate) fn try_allocate(device: usize, bytes: usize, stream: *mut c_void) -> Result<Pointer, symmalloc_status> {
        let mut out = null_mut();
        // SAFETY: a live stream, no name, and an output pointer.
        let status = unsafe { symmalloc_torch_allocate(device as i32, stream, bytes, 0, null(), &raw mut out) };
        if status == SYMMALLOC_OK { Ok(out as Pointer) } else { Err(status) }
    }

    #[track_caller]
    pub(crate) fn allocate(bytes: usize, stream: *mut c_void) -> Pointer {
        try_allocate(0, bytes, stream).unwrap_or_else(|status| panic!("{status:?}: {}", message()))
    }

    /// Frees an allocation, as the class does in destructors: the library counts failures.
    pub(crate) fn free(pointer: Pointer) {
        // SAFETY: any pointer is valid.
        let _status = unsafe { symmalloc_torch_deallocate(0, pointer as *mut c_void, null_mut()) };
    }

    #[track_caller]
    pub(crate) fn record_use(pointer: Pointer, stream: *mut c_void) {
        // SAFETY: a live stream.
        done(unsafe { symmalloc_torch_record_use(pointer as *mut c_void, stream) });
    }

    /// Begins a scope without a filter, which accepts all streams.
    #[track_caller]
    pub(crate) fn begin(id: (u64, u64)) {
        let mut number = 0;
        // SAFETY: no filter, and an output pointer.
        done(unsafe { symmalloc_torch_begin_scope(0, id.0, id.1, None, null_mut(), None, &raw mut number) });
    }

    #[track_caller]
    pub(crate) fn end(id: (u64, u64)) {
        done(symmalloc_torch_end_scope(0, id.0, id.1));
    }

    #[track_caller]
    pub(crate) fn release(id: (u64, u64)) {
        done(symmalloc_torch_release_use(0, id.0, id.1));
    }

    #[track_caller]
    pub(crate) fn empty_cache() {
        done(symmalloc_torch_trim(0, 0));
    }

    pub(crate) fn base(pointer: Pointer) -> (Pointer, usize) {
        let mut size = 0;
        // SAFETY: an output pointer.
        let base = unsafe { symmalloc_torch_base_alloc(pointer as *mut c_void, &raw mut size) };
        (base as Pointer, size)
    }
}
