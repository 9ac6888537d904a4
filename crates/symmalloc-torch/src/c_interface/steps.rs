//! Steps, and the plans that they follow.

use super::arguments::{living, required_text, write};
use crate::device::DeviceAllocator;
use crate::guard::report;
use crate::status::symmalloc_status;
use std::ffi::c_char;

/// The result of a step.
#[allow(non_camel_case_types, reason = "C's names")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct symmalloc_step_report {
    /// Allocations in the step.
    pub allocations: u64,
    /// The number of allocations that were placed by a plan.
    pub planned: u64,
    /// Bytes of memory reserved for the pool's plans.
    pub plan_bytes: u64,
    /// The number of the first allocation that differed from the plan; `UINT64_MAX` if none differed or if there was no plan.
    pub differs_at: u64,
}

/// Begins a step of a pool: a repeated part of the program, such as a training step. A pool with `plan:learn` plans a step after two equal
/// runs, at the end of the second run. Later runs follow the plan. `key` identifies the step: pass equal keys for steps that make the same
/// allocations, and 0 if all steps do. Call it at the same point on every rank, while no other thread uses the pool and no stream is
/// captured.
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

/// Ends the open step of a pool. `out` may be NULL.
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

/// Loads the plans for a pool from a file that `symmalloc plan -o FILE` wrote, plain or compressed. Later steps follow the plan that has
/// their key. Plans refer to streams by number, and streams are numbered in the order of their first use, so use each stream once before
/// this call. Writes the number of plans to `count`, which may be NULL.
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

/// Drops the plans of a pool. Live allocations that the plans placed stay in place.
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
