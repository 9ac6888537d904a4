//! Filters that select the streams whose allocations a scope covers: a C function and its context.

use crate::guard::call_back;
use std::ffi::c_void;

/// Returns `true` if the scope covers allocations on a stream. May throw a C++ exception. Allocations call it, so calls of this
/// library inside it return an error.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_filter_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Destroys the context of a callback.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_destroy_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void)>;

/// The filter of an open scope.
pub(crate) struct StreamFilter {
    accepts: symmalloc_filter_fn,
    context: *mut c_void,
    destroy: symmalloc_destroy_fn,
}

// SAFETY: PyTorch's own allocator keeps and calls its filters on any thread.
unsafe impl Send for StreamFilter {}
// SAFETY: as above; a filter mutates nothing.
unsafe impl Sync for StreamFilter {}

impl StreamFilter {
    /// # Safety
    /// The functions may be called with the context on any thread until the destructor has run.
    pub(crate) unsafe fn new(
        accepts: symmalloc_filter_fn,
        context: *mut c_void,
        destroy: symmalloc_destroy_fn,
    ) -> Self {
        StreamFilter { accepts, context, destroy }
    }

    /// Returns `true` if the filter accepts the stream. Without a function, it accepts all. Propagates exceptions of the filter.
    pub(crate) fn accepts(&self, stream: *mut c_void) -> bool {
        // SAFETY: the contract of `new`.
        self.accepts.is_none_or(|accepts| call_back(|| unsafe { accepts(self.context, stream) }))
    }
}

impl Drop for StreamFilter {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the contract of `new`; the filter is not called after this.
            call_back(|| unsafe { destroy(self.context) });
        }
    }
}
