//! What the stub of libcuda tells the stub of libnccl: the same file in both.

use std::ffi::c_int;

/// What lies at an address, as `cuMemGetAddressRange` and `cuMemRetainAllocationHandle` would say, and more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Region {
    /// First byte of the mapping or allocation.
    pub base: u64,
    /// Its size in bytes.
    pub size: u64,
    /// First byte of the reserved range around it; 0 for whole allocations.
    pub range_base: u64,
    /// End of the run of mappings around it that touch each other.
    pub run_end: u64,
    /// Start of that run.
    pub run_base: u64,
    /// Handle of its physical memory; 0 for whole allocations.
    pub handle: u64,
    /// Kinds of handles that it can be exported as, or-ed: 1 a file descriptor, 8 fabric.
    pub handle_types: u32,
    /// Its device; -1 is the host.
    pub device: c_int,
}

/// What libcuda calls in a library that submits work of its own.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Hooks {
    /// Work `template` stands on a stream as `instance`. In the order of submission.
    pub submitted: extern "C" fn(template: u64, instance: u64),
    /// All that stood before `instance` on its stream took effect.
    pub arrived: extern "C" fn(instance: u64),
    /// Memory under a guard was unmapped or freed.
    pub unmapped: extern "C" fn(guard: u64),
}
