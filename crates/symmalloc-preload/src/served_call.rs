//! A served driver call: its names, our function, and the driver's function.

use crate::libc_symbols;
use crate::libcuda::Library;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A driver call that this library serves instead of the driver.
pub(crate) struct ServedCall {
    /// The name under which libcuda exports the call.
    symbol: &'static CStr,
    /// The name that `cuGetProcAddress` accepts.
    base: &'static str,
    /// The CUDA version from which on `base` refers to this call.
    since: i32,
    /// `true` if stream 0 is the calling thread's default stream.
    is_per_thread: bool,
    /// Our function.
    served: *const (),
    /// The driver's function; null until it is looked up.
    driver: AtomicPtr<c_void>,
}

// SAFETY: `served` is the address of a function.
unsafe impl Sync for ServedCall {}

impl ServedCall {
    pub(crate) const fn new(symbol: &'static CStr, base: &'static str, since: i32, served: *const ()) -> Self {
        let (bytes, suffix) = (symbol.to_bytes(), b"_ptsz");
        let mut is_per_thread = bytes.len() > suffix.len();
        let mut at = 0;
        while is_per_thread && at < suffix.len() {
            is_per_thread = bytes[bytes.len() - suffix.len() + at] == suffix[at];
            at += 1;
        }
        ServedCall { symbol, base, since, is_per_thread, served, driver: AtomicPtr::new(std::ptr::null_mut()) }
    }

    pub(crate) fn symbol(&self) -> &'static CStr {
        self.symbol
    }

    /// Returns our function.
    pub(crate) fn served(&self) -> *mut c_void {
        self.served as *mut c_void
    }

    /// Returns the driver's function, or null if this driver has none.
    #[inline]
    pub(crate) fn driver(&self, library: Library) -> *mut c_void {
        let known = self.driver.load(Ordering::Relaxed);
        if known.is_null() { self.look_up(library) } else { known }
    }

    #[cold]
    fn look_up(&self, library: Library) -> *mut c_void {
        // SAFETY: libcuda is never closed.
        let found = unsafe { libc_symbols::look_up(library.handle(), self.symbol) };
        self.driver.store(found, Ordering::Relaxed);
        found
    }
}

/// Returns the served call that libcuda exports under a name.
pub(crate) fn by_symbol(all: &[&'static ServedCall], name: &[u8]) -> Option<&'static ServedCall> {
    if !name.starts_with(b"cu") {
        return None;
    }
    all.iter().copied().find(|call| call.symbol.to_bytes() == name)
}

/// The `cuGetProcAddress` flag for calls with a per-thread default stream.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// Returns the served call for a request to `cuGetProcAddress` that the driver answered with `found`.
///
/// Usually `found` is the address of a function that the driver exports. Otherwise the name, the version and the flags determine the call.
pub(crate) fn by_request(
    all: &[&'static ServedCall],
    library: Library,
    name: &str,
    version: i32,
    flags: u64,
    found: *mut c_void,
) -> Option<&'static ServedCall> {
    let named = || all.iter().copied().filter(|call| call.base == name || call.symbol.to_bytes() == name.as_bytes());
    if let Some(call) = named().find(|call| call.driver(library) == found) {
        return Some(call);
    }
    if let Some(exact) = named().find(|call| call.symbol.to_bytes() == name.as_bytes() && call.base != name) {
        return Some(exact);
    }
    let per_thread = flags & PER_THREAD_DEFAULT_STREAM != 0 && named().any(|call| call.is_per_thread);
    let fitting = named().filter(|call| call.since <= version && call.is_per_thread == per_thread);
    let call = fitting.max_by_key(|call| call.since)?;
    let is_unknown_version = (2..10).any(|number| {
        let newer = std::ffi::CString::new(format!("{name}_v{number}{}", if per_thread { "_ptsz" } else { "" }));
        // SAFETY: libcuda is never closed.
        newer.is_ok_and(|newer| unsafe { libc_symbols::look_up(library.handle(), &newer) } == found)
    });
    (!call.driver(library).is_null() && !is_unknown_version).then_some(call)
}
