//! Scopes that register the memory allocated inside them when they end, as in sglang's `use_symmetric_memory`.

use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::registrar::settings::Registration;
use crate::sync::error::SyncError;
use symmalloc_cuda::{CudaAllocator, CudaBackend, Pool};

impl Registrar {
    /// Runs `work` with an allocator that allocates from `pool`, and syncs the communicators when it returns, so that the returned buffers
    /// are in windows. Every rank must call this function.
    ///
    /// The sync also runs if the result of `work` is an error, because the other ranks wait for it. It does not run if `work` panics:
    /// nothing is registered, and the other ranks fail at the deadline.
    ///
    /// # Errors
    /// [`SyncError::NotAttached`], before `work` runs, if the pool is not attached to all of the communicators for windows; otherwise the
    /// errors of [`sync`](Self::sync). The result of `work` is then dropped.
    pub fn with_symmetric<R>(
        &self,
        comms: &[&Communicator],
        pool: &Pool<CudaBackend>,
        work: impl FnOnce(&CudaAllocator) -> R,
    ) -> Result<R, SyncError> {
        for comm in comms {
            if self.attachment(comm)?.registration_of(pool.id()) != Some(Registration::Windows) {
                return Err(SyncError::NotAttached { communicator: comm.name().to_owned(), pool: Some(pool.id()) });
            }
        }
        let result = work(&self.allocator().with_pool(pool));
        self.sync(comms)?;
        Ok(result)
    }
}
