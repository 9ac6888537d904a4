//! The interface between the stubs of libcuda and libnccl, which share this file.

use std::ffi::c_int;

/// The memory at an address: the answers of `cuMemGetAddressRange` and `cuMemRetainAllocationHandle`, and further details.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Region {
    /// First byte of the mapping or allocation.
    pub base: u64,
    /// Its size in bytes.
    pub size: u64,
    /// First byte of the enclosing reserved range; 0 for whole allocations.
    pub range_base: u64,
    /// End of the contiguous run of mappings around it.
    pub run_end: u64,
    /// Start of that run.
    pub run_base: u64,
    /// Handle of its physical memory; 0 for whole allocations.
    pub handle: u64,
    /// Handle types that it can be exported as, combined by bitwise or: 1 is a file descriptor, 8 is fabric.
    pub handle_types: u32,
    /// Its device; -1 is the host.
    pub device: c_int,
}

/// Callbacks of a library that submits its own work to the stub of libcuda.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Hooks {
    /// Work `template` was submitted to a stream as `instance`. Called in the order of submission.
    pub submitted: extern "C" fn(template: u64, instance: u64),
    /// All work before `instance` on its stream has taken effect.
    pub arrived: extern "C" fn(instance: u64),
    /// Memory under a guard was unmapped or freed.
    pub unmapped: extern "C" fn(guard: u64),
}
