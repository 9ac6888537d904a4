//! Which streams' allocations a scope takes: PyTorch says it with a function.
//!
//! The class for pluggable allocators passes a `std::function`, our own class a C function and what it is called with.

use crate::cxx_abi::FunctionFilter;
use std::ffi::c_void;

/// Returns `true` if the scope covers allocations on a stream. May throw a C++ exception.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_filter_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Destroys the context of a callback.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_destroy_fn = Option<unsafe extern "C-unwind" fn(context: *mut c_void)>;

/// A filter, until the scope ends.
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
// SAFETY: as above; a filter changes nothing.
unsafe impl Sync for CallFilter {}

impl CallFilter {
    /// # Safety
    /// The functions may be called with the context, on any thread, until the destructor was.
    pub(crate) unsafe fn new(
        accepts: symmalloc_filter_fn,
        context: *mut c_void,
        destroy: symmalloc_destroy_fn,
    ) -> Self {
        CallFilter { accepts, context, destroy }
    }
}

impl StreamFilter {
    /// Whether the filter takes the stream. An empty one takes all. May throw what the filter throws.
    pub(crate) fn accepts(&self, stream: *mut c_void) -> bool {
        match self {
            StreamFilter::Function(function) => function.accepts(stream),
            StreamFilter::Calls(CallFilter { accepts: Some(accepts), context, .. }) => {
                // SAFETY: the contract of `CallFilter::new`.
                unsafe { accepts(*context, stream) }
            }
            StreamFilter::Calls(_) => true,
        }
    }
}

impl Drop for CallFilter {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the contract of `new`; nobody calls the filter after this.
            unsafe { destroy(self.context) };
        }
    }
}
