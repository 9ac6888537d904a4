//! The pool and the name of a thread's allocations.

use crate::c_interface::arguments::required_text;
use crate::guard::{release, report};
use crate::process;
use crate::status::symmalloc_status;
use std::ffi::c_char;

/// Until `symmalloc_torch_pop_pool`, directs the allocations that this thread makes on the device without an explicit pool to this pool.
/// Calls nest. As with PyTorch's own allocator, the innermost scope applies: a pool pushed within a capture takes precedence over the
/// capture's pool, and a capture within a pushed pool's scope uses the capture's pool.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_push_pool(device: i32, pool: u32) -> symmalloc_status {
    report(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().push_pool(allocator.known_pool(pool)?);
        Ok(())
    })
}

/// Pops the pool that this thread pushed last on the device.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_pop_pool(device: i32) -> symmalloc_status {
    release(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().pop_pool(allocator.ordinal())
    })
}

/// Names this thread's allocations on the device through PyTorch, for snapshots, traces and reports, until `symmalloc_torch_pop_name`.
/// Calls nest: the innermost name applies. Names do not affect placements or digests.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_push_name(device: i32, name: *const c_char) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let name = unsafe { required_text(name, "name") }?;
        process::allocator(device)?.scopes().push_name(name);
        Ok(())
    })
}

/// Pops the name that this thread pushed last on the device.
#[unsafe(no_mangle)]
pub extern "C" fn symmalloc_torch_pop_name(device: i32) -> symmalloc_status {
    release(|| {
        let allocator = process::allocator(device)?;
        allocator.scopes().pop_name(allocator.ordinal())
    })
}
