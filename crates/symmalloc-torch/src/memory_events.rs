//! Notifications of mapped and unmapped memory, for histories and for PyTorch's trace trackers, which register it.

use crate::guard::call_back;
use crate::shared_chunks;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use symmalloc_cuda::MemoryChange;

/// Called after memory is mapped (`is_mapped` 1), and before it is unmapped (0). Runs under a heap's lock, so calls of this
/// library inside it return an error, except for frees, which take effect later.
#[allow(non_camel_case_types, reason = "C's names")]
pub type symmalloc_memory_fn = Option<unsafe extern "C" fn(device: i32, is_mapped: u32, address: u64, bytes: u64)>;

static LISTENER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Reports later mappings of memory to a listener; NULL removes it.
///
/// # Safety
/// The function may be called on any thread for the rest of the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_on_memory(listener: symmalloc_memory_fn) {
    let address = listener.map_or(std::ptr::null_mut(), |listener| listener as *mut c_void);
    LISTENER.store(address, Ordering::Release);
}

pub(crate) fn notify(device: usize, change: MemoryChange) {
    if !change.is_mapped {
        shared_chunks::forget(device, change.address, change.size_bytes);
    }
    let listener = LISTENER.load(Ordering::Acquire);
    if !listener.is_null() {
        // SAFETY: stored by `symmalloc_torch_on_memory` from a function of this type.
        let listener =
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(i32, u32, u64, u64)>(listener) };
        // SAFETY: the contract of `symmalloc_torch_on_memory`.
        call_back(|| unsafe { listener(device as i32, change.is_mapped.into(), change.address, change.size_bytes) });
    }
}
