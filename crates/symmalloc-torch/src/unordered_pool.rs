//! The pool for memory without a stream, see `unordered.rs`.

use crate::error::Error;
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::PoolId;

/// The pool, created at the first allocation.
#[derive(Default)]
pub(crate) struct UnorderedPool(Mutex<Option<PoolId>>);

impl UnorderedPool {
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Result<PoolId, Error>) -> Result<PoolId, Error> {
        let mut pool = self.pool();
        match *pool {
            Some(pool) => Ok(pool),
            None => Ok(*pool.insert(make()?)),
        }
    }

    pub(crate) fn is(&self, pool: PoolId) -> bool {
        *self.pool() == Some(pool)
    }

    fn pool(&self) -> MutexGuard<'_, Option<PoolId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
