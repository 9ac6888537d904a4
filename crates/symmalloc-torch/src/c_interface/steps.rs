//! Steps, and the plans that they follow.

use super::arguments::{living, required_text, write};
use crate::device::DeviceAllocator;
use crate::guard::report;
use crate::status::symmalloc_status;
use std::ffi::c_char;

/// What became of a step.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_step_report {
    /// Allocations in the step.
    pub allocations: u64,
    /// How many of them went where a plan says.
    pub planned: u64,
    /// Bytes of memory that the pool's plans hold.
    pub plan_bytes: u64,
    /// The number of the first allocation that was not as planned; `UINT64_MAX` when all were, or there is no plan.
    pub differs_at: u64,
}

/// A step of a pool begins: what the program repeats, such as a training step. In a pool with `plan:learn` a step that comes twice
/// alike is planned when it ends, and later ones follow the plan. `key` says which steps are alike; 0 when all are. Call it at the
/// same point on every rank, while no other thread uses the pool and no stream is captured.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_step_begin(
    allocator: *mut DeviceAllocator,
    pool: u32,
    key: u64,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        Ok(allocator.core().begin_step(allocator.known_pool(pool)?, key)?)
    })
}

/// The step of a pool ends. `out` may be NULL.
///
/// # Safety
/// `allocator` is live; `out` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_step_end(
    allocator: *mut DeviceAllocator,
    pool: u32,
    out: *mut symmalloc_step_report,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        let step = allocator.core().end_step(allocator.known_pool(pool)?)?;
        if out.is_null() {
            return Ok(());
        }
        let differs_at = step.difference.map_or(u64::MAX, |difference| difference.number.into());
        let (allocations, planned, plan_bytes) = (step.allocations, step.planned, step.plan_bytes);
        let step = symmalloc_step_report { allocations, planned, plan_bytes, differs_at };
        // SAFETY: the caller's contract.
        unsafe { write(out, "out", step) }
    })
}

/// Adopts the plans that a file of `symmalloc plan -o FILE` has for a pool, plain or compressed. Later steps of their keys follow
/// them. Streams have the numbers of their first use, so use each stream once before. `count` may be NULL; it says how many plans
/// there are.
///
/// # Safety
/// `allocator` is live; `path` is a C string; `count` is NULL or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_plans_adopt(
    allocator: *mut DeviceAllocator,
    pool: u32,
    path: *const c_char,
    count: *mut u32,
) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let (allocator, path) = unsafe { (living(allocator)?, required_text(path, "path")?) };
        let adopted = allocator.adopt_plans(allocator.known_pool(pool)?, path)?;
        if count.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { write(count, "count", adopted) }
    })
}

/// Gives the plans of a pool up. What they placed stays where it is.
///
/// # Safety
/// `allocator` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmalloc_plans_drop(allocator: *mut DeviceAllocator, pool: u32) -> symmalloc_status {
    report(|| {
        // SAFETY: the caller's contract.
        let allocator = unsafe { living(allocator) }?;
        Ok(allocator.core().drop_plans(allocator.known_pool(pool)?)?)
    })
}
