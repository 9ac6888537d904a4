//! Mempools and their scopes.

use crate::c_interface::arguments::{not_null, write};
use crate::error::Error;
use crate::guard::{call_back, enter, not_in_callback, release, release_or_defer, report};
use crate::pool_memory::has_captured;
use crate::process;
use crate::scopes::{StreamFilter, symmalloc_destroy_fn, symmalloc_filter_fn};
use crate::status::symmalloc_status;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use symmalloc_cuda::MemorySource;
use symmalloc_files::is_forked;

/// Callbacks that provide a pool's memory. They run under locks, so calls of this library inside them return an error,
/// except for frees, which take effect later.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct symmalloc_source {
    /// Returns device memory; NULL if there is none.
    pub allocate: Option<unsafe extern "C" fn(context: *mut c_void, bytes: usize) -> *mut c_void>,
    /// Frees memory of `allocate`.
    pub free: Option<unsafe extern "C" fn(context: *mut c_void, pointer: *mut c_void)>,
    /// The first argument of both callbacks.
    pub context: *mut c_void,
    /// Destroys the context after the pool and its memory were released.
    pub destroy: symmalloc_destroy_fn,
}

/// A memory source over the callbacks of a [`symmalloc_source`].
struct Source(symmalloc_source);

// SAFETY: the contract of `symmalloc_torch_retain_pool`.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

impl MemorySource for Source {
    fn allocate(&self, size_bytes: u64) -> Option<u64> {
        let allocate = self.0.allocate?;
        // SAFETY: the contract of `symmalloc_torch_retain_pool`.
        let pointer = call_back(|| unsafe { allocate(self.0.context, size_bytes as usize) });
        (!pointer.is_null()).then_some(pointer as u64)
    }

    fn free(&self, address: u64) {
        if let Some(free) = self.0.free {
            // SAFETY: the contract of `symmalloc_torch_retain_pool`, and the pointer came from `allocate`.
            call_back(|| unsafe { free(self.0.context, address as *mut c_void) });
        }
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(destroy) = self.0.destroy {
            // SAFETY: the contract of `symmalloc_torch_retain_pool`; the functions are not called after this.
            call_back(|| unsafe { destroy(self.0.context) });
        }
    }
}

/// Directs later allocations on the streams that the filter accepts to the mempool with this id, and creates the pool if necessary.
/// Writes the number of the scope, which is above 0. `destroy` runs when the scope ends, or if the call fails.
///
/// # Safety
/// The filter may be called with its context on any thread until `destroy` runs; `number` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symmalloc_torch_begin_scope(
    device: i32,
    id_first: u64,
    id_second: u64,
    filter: symmalloc_filter_fn,
    context: *mut c_void,
    destroy: symmalloc_destroy_fn,
    number: *mut u64,
) -> symmalloc_status {
    // SAFETY: the caller's contract.
    let filter = unsafe { StreamFilter::new(filter, context, destroy) };
    if number.is_null() {
        return report(|| not_null(number, "number"));
    }
    // Not guarded, because the filter may throw. A panic unwinds as an exception that ends the process.
    let allocator = enter().and_then(|()| process::allocator(device));
    let begun = allocator.and_then(|allocator| allocator.begin_mempool((id_first, id_second), filter));
    // SAFETY: the caller's contract.
    report(|| unsafe { write(number, "number", begun?) })
}

/// Returns `true` if PyTorch may have captured a graph in this process: if a scope began whose filter accepted no known stream.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_has_captured() -> bool {
    has_captured()
}

/// Ends the last scope of the mempool with this id.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn symmalloc_torch_end_scope(device: i32, id_first: u64, id_second: u64) -> symmalloc_status {
    release(|| process::allocator(device)?.end_mempool((id_first, id_second)))
}

/// Adds a use to the mempool with this id, as PyTorch's `MemPool` does. A new pool takes its memory from the source, if there is one.
///
/// # Safety
/// `source` is NULL or valid for reading, and its functions may be called with its context on any thread until `destroy` runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_retain_pool(
    device: i32,
    id_first: u64,
    id_second: u64,
    source: *const symmalloc_source,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let source = unsafe { source.as_ref() }.map(|source| Arc::new(Source(*source)) as Arc<dyn MemorySource>);
        process::allocator(device)?.mempools().retain((id_first, id_second), source);
        Ok(())
    })
}

/// Releases one use of the mempool with this id. After the last one, the next trim releases its memory, or an allocation that would fail
/// otherwise. Failures are counted, and standard error shows the first one, because PyTorch calls it in destructors.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_release_use(device: i32, id_first: u64, id_second: u64) -> symmalloc_status {
    let act = move || {
        let allocator = process::allocator(device)?;
        allocator.release_mempool((id_first, id_second)).inspect_err(|error| allocator.note(error))
    };
    release_or_defer(act)
}

/// Returns the number of uses of the mempool with this id, or 0 inside a callback.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_pool_uses(device: i32, id_first: u64, id_second: u64) -> u32 {
    if not_in_callback().is_err() {
        return 0;
    }
    process::existing(device).map_or(0, |allocator| allocator.mempools().uses((id_first, id_second)))
}

/// Sets whether allocations outside of the mempool with this id may use its free memory before they fail. PyTorch calls it with `false`
/// in destructors.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_pool_helps_out(
    device: i32,
    id_first: u64,
    id_second: u64,
    helps_out: bool,
) -> symmalloc_status {
    if !helps_out && is_forked() {
        return symmalloc_status::SYMMALLOC_OK;
    }
    wish(device, (id_first, id_second), |wishes| wishes.helps_out = helps_out)
}

/// Gives every allocation in the mempool with this id a separate segment. Call it before the first allocation.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_pool_unsplit(device: i32, id_first: u64, id_second: u64) -> symmalloc_status {
    wish(device, (id_first, id_second), |wishes| wishes.is_unsplit = true)
}

fn wish(device: i32, id: (u64, u64), change: impl FnOnce(&mut crate::mempools::PoolWishes)) -> symmalloc_status {
    report(|| {
        let allocator = process::allocator(device)?;
        let scope = "mempool with this id";
        let missing = Error::NoScope { device: allocator.ordinal(), scope };
        if allocator.mempools().wish(id, change) { Ok(()) } else { Err(missing) }
    })
}
