//! The C interface of `libsymmalloc_torch.so`, opened at run time: by raw pointer, as PyTorch and every other language calls us.

use crate::cuda::Cuda;
use crate::subject::{Memory, Subject};
use serde_json::Value;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::Arc;

/// `symmalloc_status`: 0 is success.
type Status = c_int;

/// The calls of `symmalloc.h` that are measured.
pub(crate) struct Library {
    create: unsafe extern "C" fn(i32, *const c_char, *mut *mut c_void) -> Status,
    destroy: unsafe extern "C" fn(*mut c_void) -> Status,
    allocate: unsafe extern "C" fn(*mut c_void, u32, usize, *mut c_void, *mut *mut c_void) -> Status,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void) -> Status,
    record_use: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> Status,
    stats_json: unsafe extern "C" fn(*mut c_void, *mut *mut c_char) -> Status,
    release_bytes: unsafe extern "C" fn(*mut c_void),
    error_message: unsafe extern "C" fn() -> *const c_char,
    /// The functions are its own.
    _library: libloading::Library,
}

impl Library {
    /// Opens the library.
    ///
    /// # Errors
    /// When it cannot be loaded, or lacks a call.
    pub(crate) fn open(path: &Path) -> Result<Self, Box<dyn Error>> {
        // SAFETY: the caller names our own library, whose initialisers do nothing.
        let library = unsafe { libloading::Library::new(path) };
        let library = library.map_err(|error| format!("{} cannot be loaded: {error}", path.display()))?;
        // SAFETY: the types are those of `symmalloc.h`.
        unsafe {
            Ok(Library {
                create: *library.get(b"symmalloc_create")?,
                destroy: *library.get(b"symmalloc_destroy")?,
                allocate: *library.get(b"symmalloc_allocate")?,
                free: *library.get(b"symmalloc_free")?,
                record_use: *library.get(b"symmalloc_record_use")?,
                stats_json: *library.get(b"symmalloc_stats_json")?,
                release_bytes: *library.get(b"symmalloc_release_bytes")?,
                error_message: *library.get(b"symmalloc_error_message")?,
                _library: library,
            })
        }
    }

    #[inline]
    fn check(&self, status: Status) {
        if status != 0 {
            self.refuse();
        }
    }

    #[cold]
    fn refuse(&self) -> ! {
        // SAFETY: a C string of this thread's last failure, until its next call.
        let message = unsafe { CStr::from_ptr((self.error_message)()) };
        panic!("{}", message.to_string_lossy())
    }
}

/// An allocator behind the C interface.
pub(crate) struct Pointers {
    library: Arc<Library>,
    raw: *mut c_void,
    cuda: Cuda,
}

// SAFETY: `symmalloc.h`: all functions may be called by all threads.
unsafe impl Sync for Pointers {}

/// A device pointer or a stream of CUDA's, as C has them.
pub(crate) struct Raw(*mut c_void);

// SAFETY: numbers to the host, which never reads through them.
unsafe impl Send for Raw {}

impl Pointers {
    pub(crate) fn new(library: &Arc<Library>, cuda: &Cuda, conf: &str) -> Self {
        let conf = CString::new(conf).expect("no zero byte");
        let mut raw = std::ptr::null_mut();
        let conf = if conf.is_empty() { std::ptr::null() } else { conf.as_ptr() };
        // SAFETY: a C string or null, and a place for the result.
        library.check(unsafe { (library.create)(0, conf, &raw mut raw) });
        Pointers { library: Arc::clone(library), raw, cuda: cuda.clone() }
    }

    fn stats(&self) -> Option<Value> {
        let mut text = std::ptr::null_mut();
        // SAFETY: a live allocator, and a place for the result.
        self.library.check(unsafe { (self.library.stats_json)(self.raw, &raw mut text) });
        // SAFETY: a C string that is ours until it is released.
        let stats = serde_json::from_slice(unsafe { CStr::from_ptr(text) }.to_bytes()).ok();
        // SAFETY: handed out by the call above, and not used any more.
        unsafe { (self.library.release_bytes)(text.cast()) };
        stats
    }
}

impl Drop for Pointers {
    fn drop(&mut self) {
        // SAFETY: a live allocator that nobody uses after this.
        self.library.check(unsafe { (self.library.destroy)(self.raw) });
    }
}

impl Subject for Pointers {
    type Stream<'a> = Raw;
    type Block<'a> = Raw;

    fn stream(&self, number: usize) -> Raw {
        Raw(self.cuda.streams[number].cu_stream().cast())
    }

    #[inline]
    fn allocate(&self, stream: &Raw, size_bytes: u64) -> Raw {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: a live allocator, a stream of its device, and a place for the result.
        let status = unsafe { (self.library.allocate)(self.raw, 0, size_bytes as usize, stream.0, &raw mut pointer) };
        self.library.check(status);
        Raw(pointer)
    }

    #[inline]
    fn free(&self, _: &Raw, block: Raw) {
        // SAFETY: a live allocator, and a pointer of its own.
        self.library.check(unsafe { (self.library.free)(self.raw, block.0) });
    }

    fn record_use(&self, block: &Raw, stream: &Raw) {
        // SAFETY: as above, and a stream of the allocator's device.
        self.library.check(unsafe { (self.library.record_use)(self.raw, block.0, stream.0) });
    }

    fn synchronize(&self) {
        self.cuda.synchronize();
    }

    fn memory(&self) -> Option<Memory> {
        let stats = self.stats()?;
        let of = |path: &str| stats.pointer(path)?.as_u64();
        Some(Memory {
            reserved_peak_bytes: of("/total/reserved_bytes/all/peak")?,
            segments: of("/total/segment/all/current")?,
        })
    }

    fn driver_calls(&self) -> Option<u64> {
        self.stats()?.pointer("/driver_calls")?.as_u64()
    }
}
