//! Scopes: what is taken inside is registered at the end, as in sglang's `use_symmetric_memory`.

use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::registrar::error::SyncError;
use crate::registrar::settings::Registration;
use symmalloc_cuda::{CudaAllocator, CudaBackend, Pool};

impl Registrar {
    /// Runs `work` with an allocator that takes memory from `pool`, and syncs the communicators when it returns: what it
    /// returned is in windows then. Every rank does the same.
    ///
    /// The sync comes also when the work's own result is an error, since the other ranks come to it. When the work panics
    /// there is none: nothing is registered, and the other ranks learn of it by the deadline.
    ///
    /// # Errors
    /// [`SyncError::NotAttached`], before anything is done, when the pool is not attached to all of the communicators for
    /// windows; else as [`sync`](Self::sync). The work's result is dropped then.
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
