//! The C interface of `libsymmalloc_torch.so`, loaded at run time: raw pointers, as PyTorch and other languages use it.

use crate::cuda::Cuda;
use crate::subject::{Memory, Subject};
use serde_json::Value;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::Arc;

/// `symmalloc_status`; 0 is success.
type Status = c_int;

/// The functions of `symmalloc.h` that are measured.
pub(crate) struct Library {
    create: unsafe extern "C" fn(i32, *const c_char, *mut *mut c_void) -> Status,
    destroy: unsafe extern "C" fn(*mut c_void) -> Status,
    allocate: unsafe extern "C" fn(*mut c_void, u32, *mut c_void, usize, *mut *mut c_void) -> Status,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void) -> Status,
    record_use: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> Status,
    stats_json: unsafe extern "C" fn(*mut c_void, *mut *mut c_char) -> Status,
    release_bytes: unsafe extern "C" fn(*mut c_void),
    error_message: unsafe extern "C" fn() -> *const c_char,
    /// The library that contains the functions. It must stay loaded.
    _library: libloading::Library,
}

impl Library {
    /// Loads the library.
    ///
    /// # Errors
    /// Returns an error if it cannot be loaded or lacks a function.
    pub(crate) fn open(path: &Path) -> Result<Self, Box<dyn Error>> {
        // SAFETY: the caller names our own library, whose initializers do nothing.
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
        // SAFETY: a C string with this thread's last failure, valid until the thread's next call.
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

// SAFETY: `symmalloc.h` allows all functions to be called from all threads.
unsafe impl Sync for Pointers {}

/// A CUDA device pointer or stream, as in C.
pub(crate) struct Raw(*mut c_void);

// SAFETY: the host treats the value as a number and never dereferences it.
unsafe impl Send for Raw {}

impl Pointers {
    pub(crate) fn new(library: &Arc<Library>, cuda: &Cuda, conf: &str) -> Self {
        let conf = CString::new(conf).expect("the text should contain no zero byte");
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
        // SAFETY: a C string that we own until it is released.
        let stats = serde_json::from_slice(unsafe { CStr::from_ptr(text) }.to_bytes()).ok();
        // SAFETY: returned by the call above, and not used afterward.
        unsafe { (self.library.release_bytes)(text.cast()) };
        stats
    }
}

impl Drop for Pointers {
    fn drop(&mut self) {
        // SAFETY: a live allocator that is not used afterward.
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
        let status = unsafe { (self.library.allocate)(self.raw, 0, stream.0, size_bytes as usize, &raw mut pointer) };
        self.library.check(status);
        Raw(pointer)
    }

    #[inline]
    fn free(&self, _: &Raw, block: Raw) {
        // SAFETY: a live allocator, and a pointer that it returned.
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
