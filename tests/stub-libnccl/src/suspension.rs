//! Suspension of communicators: the ranks release NCCL's memory and restore it, each time together.
//!
//! The stub holds no device memory for a communicator. It reports `STUB_NCCL_SUSPENDABLE_MB` as memory that a suspension releases, 0 by
//! default. A call other than those of `ALLOWED` on a suspended communicator is a violation.

use crate::calls::{ask, on};
use crate::codes::{INVALID_ARGUMENT, INVALID_USAGE, SUCCESS};
use crate::group::{self, Action};
use crate::ledger::violate;
use crate::member::{Member, Step};
use crate::messages::Round;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `NCCL_SUSPEND_MEM`.
const MEMORY: c_int = 1;
/// Calls that a suspended communicator accepts.
const ALLOWED: [&str; 4] = ["ncclCommSuspend", "ncclCommResume", "ncclCommDestroy", "ncclCommFinalize"];

/// Handles of the suspended communicators.
static SUSPENDED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn suspended() -> MutexGuard<'static, BTreeSet<u64>> {
    SUSPENDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records a violation if a suspended communicator does not accept the call.
pub fn check(call: &str, member: &Member) {
    if !ALLOWED.contains(&call) && suspended().contains(&member.handle) {
        violate(format!("{call} on a communicator of rank {} that is suspended", member.world));
    }
}

fn meet(member: &Arc<Member>, is_hung: bool) -> c_int {
    group::submit(Arc::clone(member), Action::Step(Step::Meet, (!is_hung).then_some(Round::Meet)))
}

/// See nccl.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSuspend(comm: u64, flags: c_int) -> c_int {
    on("ncclCommSuspend", comm, |member, is_hung| {
        if flags != MEMORY {
            return INVALID_ARGUMENT;
        }
        if member.lock().windows.counts()[0] > 0 {
            violate(format!("a communicator of rank {} is suspended with windows", member.world));
        }
        if !suspended().insert(comm) {
            return INVALID_USAGE;
        }
        meet(member, is_hung)
    })
}

/// See nccl.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommResume(comm: u64) -> c_int {
    on("ncclCommResume", comm, |member, is_hung| {
        if !suspended().remove(&comm) {
            return INVALID_USAGE;
        }
        meet(member, is_hung)
    })
}

/// See nccl.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommMemStats(comm: u64, stat: c_int, value: *mut u64) -> c_int {
    ask("ncclCommMemStats", comm, |member| {
        let mib = std::env::var("STUB_NCCL_SUSPENDABLE_MB").ok().and_then(|text| text.parse::<u64>().ok());
        let suspendable_bytes = mib.unwrap_or(0) << 20;
        let number = match stat {
            0 | 3 => suspendable_bytes,
            1 => u64::from(suspended().contains(&member.handle)),
            2 => 0,
            _ => return INVALID_ARGUMENT,
        };
        // SAFETY: the caller meets the contract of nccl.h: the pointer is valid for writing.
        unsafe { value.write(number) };
        SUCCESS
    })
}
