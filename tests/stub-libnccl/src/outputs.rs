//! Outputs that NCCL has not written yet: their memory must not be freed.
//!
//! A test's global allocator asks [`refuse_free`] about every block that it frees.

use crate::ledger::violate;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Addresses of the outputs, one entry for each call.
static PENDING: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<usize>> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds an output that NCCL may write to.
pub fn add(address: usize) {
    lock().push(address);
}

/// Removes an output.
pub fn remove(address: usize) {
    let mut pending = lock();
    if let Some(at) = pending.iter().position(|known| *known == address) {
        pending.swap_remove(at);
    }
}

/// An output of a call that is in progress, until dropped.
#[derive(Debug)]
pub struct Pending(usize);

impl Pending {
    /// Adds the output.
    pub fn new<T>(out: *mut T) -> Self {
        add(out as usize);
        Pending(out as usize)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        remove(self.0);
    }
}

/// Records a violation if a block of memory that is about to be freed contains an output.
pub fn refuse_free(from: usize, size: usize) {
    let is_inside = |address: &usize| (from..from + size).contains(address);
    let found = lock().iter().copied().find(is_inside);
    if let Some(address) = found {
        // Reported once.
        remove(address);
        violate(format!("{address:#x} is freed, and NCCL may still write to it"));
    }
}
