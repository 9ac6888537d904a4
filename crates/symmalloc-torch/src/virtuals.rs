//! Virtual functions that PyTorch's class for pluggable allocators does not support, and has no setters for.
//!
//! | function | the class | here |
//! |---|---|---|
//! | `cacheInfo` | throws; cuDNN's benchmark mode queries it for the maximal workspace | the largest possible block |
//! | `enablePeerAccess` | for memory of `cudaMalloc` only | for this allocator's memory as well: copies between GPUs of one process work |
//!
//! The object that PyTorch uses gets a separate table of virtual functions, a copy of its class's table with these replaced:
//!
//! ```text
//!  before   c10::cuda::CUDACachingAllocator::allocator ──► object ──► class's table: ..., cacheInfo (throws), ...
//!  after                                               ──► object ──► our copy:      ..., cacheInfo (ours), ...
//! ```
//!
//! # Assumptions
//! - The Itanium C++ ABI: an object with virtual functions begins with a pointer to the first entry of a table of function addresses, which
//!   two words precede. A member function takes the object as its first argument.
//! - PyTorch: the names and types of the symbols below.
//!
//! A function is found in the table by its exported address, so the order of the functions does not matter. If a symbol or its table entry
//! is missing, the class keeps its own function.

use crate::c_interface::arguments::{not_null, write};
use crate::class::largest_block;
use crate::cxx_abi::symbol;
use crate::error::Error;
use crate::guard::{guarded, report};
use crate::process;
use crate::status::symmalloc_status;
use crate::torch_entry::raise;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// `std::atomic<CUDAAllocator*> c10::cuda::CUDACachingAllocator::allocator`.
const CURRENT_ALLOCATOR: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
/// `CUDAPluggableAllocator::cacheInfo(c10::DeviceIndex, size_t*)`. A `DeviceIndex` is an `int8_t`.
const CACHE_INFO: &CStr = c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoEaPm";
/// `CUDAPluggableAllocator::enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex)`.
const ENABLE_PEER_ACCESS: &CStr =
    c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator16enablePeerAccessEaa";

/// Words before the first function: the offset to the top, and the type.
const HEADER_WORDS: usize = 2;
/// The class has about 50 virtual functions. The word after the last belongs to another table, and is no function.
const FUNCTIONS_MAX: usize = 128;

type EnablePeerAccess = unsafe extern "C-unwind" fn(*mut c_void, i8, i8);

/// The class's own function, which handles memory of `cudaMalloc`.
static CLASS_ENABLE_PEER_ACCESS: OnceLock<EnablePeerAccess> = OnceLock::new();

/// Replaces the functions that the class of PyTorch's current allocator does not support. Call it once, after the allocator became the
/// current one and before it is used. Writes the number of replaced functions: 2, or fewer if PyTorch's class has a different layout.
///
/// # Safety
/// PyTorch's current allocator is its `CUDAPluggableAllocator` with this library's functions, and no thread uses it. `replaced`
/// is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_torch_complete(replaced: *mut u32) -> symmalloc_status {
    report(|| {
        not_null(replaced, "replaced")?;
        // SAFETY: the caller's contract.
        let count = unsafe { complete() }.unwrap_or(0);
        // SAFETY: the caller's contract.
        unsafe { write(replaced, "replaced", count) }
    })
}

/// # Safety
/// As [`symmalloc_torch_complete`].
unsafe fn complete() -> Option<u32> {
    let current = symbol(CURRENT_ALLOCATOR)?.cast::<AtomicPtr<*const *const c_void>>();
    // SAFETY: the symbol is an atomic pointer to an object with virtual functions, whose first word is the pointer to them.
    let object = unsafe { (*current).load(Ordering::Acquire) };
    if object.is_null() {
        return None;
    }
    // SAFETY: as above.
    let functions = unsafe { *object };
    // SAFETY: the table's words up to its end, and the one behind it, lie in one library's constant data.
    let count = (0..FUNCTIONS_MAX).take_while(|at| is_in_a_library(unsafe { *functions.add(*at) })).count();
    // SAFETY: the header precedes the functions.
    let mut table = unsafe { std::slice::from_raw_parts(functions.sub(HEADER_WORDS), HEADER_WORDS + count) }.to_vec();
    let mut replaced = 0;
    for (name, ours) in
        [(CACHE_INFO, cache_info as *const c_void), (ENABLE_PEER_ACCESS, enable_peer_access as *const c_void)]
    {
        let Some(theirs) = symbol(name) else { continue };
        let Some(place) = table[HEADER_WORDS..].iter().position(|function| *function == theirs) else { continue };
        if name == ENABLE_PEER_ACCESS {
            // SAFETY: the symbol is a function of this type.
            let _first =
                CLASS_ENABLE_PEER_ACCESS.set(unsafe { std::mem::transmute::<*const c_void, EnablePeerAccess>(theirs) });
        }
        table[HEADER_WORDS + place] = ours;
        replaced += 1;
    }
    // The object lives as long as the process.
    let table: &'static [*const c_void] = Box::leak(table.into_boxed_slice());
    // SAFETY: the object's first word, which no other thread uses now.
    unsafe { object.write(table[HEADER_WORDS..].as_ptr()) };
    Some(replaced)
}

/// Raises `largest` to the size of the largest block that could be allocated now: `cacheInfo`. The value depends on the program's ops and
/// the device's size, and never on the memory that other processes leave free (rule D4).
///
/// # Safety
/// `largest` is valid for reading and writing.
unsafe extern "C-unwind" fn cache_info(_this: *mut c_void, device: i8, largest: *mut usize) {
    let bytes = guarded(|| largest_block(device.into()));
    match bytes {
        // SAFETY: the caller's contract.
        Ok(bytes) => unsafe { *largest = (*largest).max(bytes as usize) },
        // SAFETY: outside of any `catch_unwind`.
        Err(error) => unsafe { raise(error) },
    }
}

/// Grants `device` read and write access to the memory of `owner`: `enablePeerAccess`. PyTorch calls it before the first copy between the
/// two, if the devices support it.
///
/// # Safety
/// The contract of the class's function.
unsafe extern "C-unwind" fn enable_peer_access(this: *mut c_void, device: i8, owner: i8) {
    if let Some(for_cuda_malloc) = CLASS_ENABLE_PEER_ACCESS.get() {
        // SAFETY: the caller's contract.
        unsafe { for_cuda_malloc(this, device, owner) };
    }
    let peer = usize::try_from(device);
    let granted = guarded(|| match peer {
        Ok(peer) => process::allocator(owner.into())?.grant_access(peer),
        Err(_) => Err(Error::Argument { argument: "device", value: device.into(), expected: "a device number" }),
    });
    if let Err(error) = granted {
        // SAFETY: outside of any `catch_unwind`.
        unsafe { raise(error) };
    }
}

/// Returns `true` if an address is in a library, as functions are. The word after a table is zero.
fn is_in_a_library(address: *const c_void) -> bool {
    let mut found = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: any address is valid; the result is not dereferenced.
    unsafe { libc::dladdr(address, found.as_mut_ptr()) != 0 }
}
