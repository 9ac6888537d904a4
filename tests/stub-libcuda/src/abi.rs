//! The interface between the stubs of libcuda and libnccl, which share this file.

use std::ffi::c_int;

/// The memory at an address, as `cuMemGetAddressRange` and `cuMemRetainAllocationHandle` report it, and further details.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Region {
    /// First byte of the mapping or allocation.
    pub base: u64,
    /// Size of the mapping or allocation in bytes.
    pub size: u64,
    /// First byte of the enclosing reserved range; 0 for whole allocations.
    pub range_base: u64,
    /// End of the contiguous run of mappings that contains this one.
    pub run_end: u64,
    /// Start of the contiguous run of mappings that contains this one.
    pub run_base: u64,
    /// Handle of the physical memory; 0 for whole allocations.
    pub handle: u64,
    /// Handle types that the memory can be exported as, combined by bitwise OR: 1 is a file descriptor, 8 is fabric.
    pub handle_types: u32,
    /// Device of the memory; -1 is the host.
    pub device: c_int,
}

/// Callbacks of a library that submits its own work to the stub of libcuda.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Hooks {
    /// Called when work `template` is submitted to a stream as `instance`, in the order of submission.
    pub submitted: extern "C" fn(template: u64, instance: u64),
    /// Called when all work before `instance` on its stream has taken effect.
    pub arrived: extern "C" fn(instance: u64),
    /// Called when memory under a guard is unmapped or freed.
    pub unmapped: extern "C" fn(guard: u64),
}
