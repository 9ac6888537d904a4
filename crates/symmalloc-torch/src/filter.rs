//! Filters that select the streams whose allocations a scope covers.
//!
//! PyTorch's class for pluggable allocators passes a `std::function`. The compiled class passes a C function and its context.

use crate::cxx_abi::FunctionFilter;
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
pub(crate) enum StreamFilter {
    Function(FunctionFilter),
    Calls(CallFilter),
}

/// A C function with its context.
pub(crate) struct CallFilter {
    accepts: symmalloc_filter_fn,
    context: *mut c_void,
    destroy: symmalloc_destroy_fn,
}

// SAFETY: PyTorch's own allocator keeps and calls its filters on any thread.
unsafe impl Send for CallFilter {}
// SAFETY: as above; a filter mutates nothing.
unsafe impl Sync for CallFilter {}

impl CallFilter {
    /// # Safety
    /// The functions may be called with the context on any thread until the destructor has run.
    pub(crate) unsafe fn new(
        accepts: symmalloc_filter_fn,
        context: *mut c_void,
        destroy: symmalloc_destroy_fn,
    ) -> Self {
        CallFilter { accepts, context, destroy }
    }
}

impl StreamFilter {
    /// Returns `true` if the filter accepts the stream. An empty filter accepts all. Propagates exceptions of the filter.
    pub(crate) fn accepts(&self, stream: *mut c_void) -> bool {
        call_back(|| match self {
            StreamFilter::Function(function) => function.accepts(stream),
            StreamFilter::Calls(CallFilter { accepts: Some(accepts), context, .. }) => {
                // SAFETY: the contract of `CallFilter::new`.
                unsafe { accepts(*context, stream) }
            }
            StreamFilter::Calls(_) => true,
        })
    }
}

impl Drop for CallFilter {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the contract of `new`; the filter is not called after this.
            call_back(|| unsafe { destroy(self.context) });
        }
    }
}
