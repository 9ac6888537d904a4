//! The core's agreement over NCCL itself.

use crate::communicator::Communicator;
use crate::error::CommError;
use symmalloc_core::agreement::{Gathered, Transport, TransportError};

/// A [`Transport`] over a communicator's all-gather, with buffers and a stream of its own.
pub struct NcclTransport {
    comm: Communicator,
}

impl NcclTransport {
    /// A transport over this communicator. All ranks make one, and use it at the same points.
    ///
    /// # Errors
    /// When a stream or staging memory cannot be made.
    pub fn new(comm: &Communicator) -> Result<Self, CommError> {
        Ok(NcclTransport { comm: comm.clone() })
    }
}

impl Transport for NcclTransport {
    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn ranks(&self) -> u32 {
        self.comm.ranks()
    }

    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
        let _ = message;
        todo!()
    }
}
