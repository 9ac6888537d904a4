//! Allocations that free themselves.

use super::Allocator;
use crate::config::errors::{AllocateError, FreeError};
use crate::sync::lock::Lock;
use crate::types::backend::Backend;
use crate::types::handle::Allocation;
use crate::types::ids::{PoolId, StreamId};
use std::fmt;
use std::ops::Deref;

/// A guard that frees its allocation when it is dropped.
///
/// If a driver call fails during the drop, the allocation stays live, and the event `free.failed` is logged. To receive
/// the error instead, call [`free`](Self::free).
#[must_use = "the allocation is freed when this is dropped"]
pub struct AllocationGuard<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    allocation: Allocation,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Allocates like [`allocate`](Self::allocate), and returns a guard that frees the allocation.
    ///
    /// # Errors
    /// See [`allocate`](Self::allocate).
    ///
    /// # Examples
    /// ```
    /// use symmalloc::{Allocator, Config, PoolId};
    /// use symmalloc::sim::SimBackend;
    ///
    /// let allocator = Allocator::new(SimBackend::builder().build(), Config::default())?;
    /// let stream = allocator.register_stream()?;
    /// let scratch = allocator.allocate_guard(PoolId::DEFAULT, stream, 3 << 20)?;
    /// println!("scratch memory at {:#x}", scratch.address.0);
    /// drop(scratch); // or the end of the scope
    /// assert_eq!(allocator.stats().usage.all.allocated_bytes.current, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn allocate_guard(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
    ) -> Result<AllocationGuard<'_, B, L>, AllocateError> {
        let allocation = self.allocate(pool, stream, size_bytes)?;
        Ok(AllocationGuard { allocator: self, allocation })
    }
}

impl<B: Backend, L: Lock> AllocationGuard<'_, B, L> {
    /// Frees the allocation.
    ///
    /// # Errors
    /// Returns an error if the allocation was already freed by its handle, or if a driver call fails. If a driver call
    /// fails, the allocation is still live, and the guard, which is returned with the error, can free it later.
    pub fn free(self) -> Result<(), (Self, FreeError)> {
        match self.allocator.free(self.allocation.handle) {
            Ok(()) => {
                let _freed = self.into_allocation();
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Returns the allocation without freeing it. The program then frees it by its handle.
    pub fn into_allocation(self) -> Allocation {
        let allocation = self.allocation;
        std::mem::forget(self);
        allocation
    }
}

impl<B: Backend, L: Lock> Deref for AllocationGuard<'_, B, L> {
    type Target = Allocation;

    fn deref(&self) -> &Allocation {
        &self.allocation
    }
}

impl<B: Backend, L: Lock> Drop for AllocationGuard<'_, B, L> {
    fn drop(&mut self) {
        if let Err(error) = self.allocator.free(self.allocation.handle) {
            tracing::warn!(name: "free.failed", target: "symmalloc", handle = %self.allocation.handle, %error);
        }
    }
}

impl<B: Backend, L: Lock> fmt::Debug for AllocationGuard<'_, B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AllocationGuard").field(&self.allocation).finish()
    }
}
