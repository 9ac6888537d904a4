//! How a communicator comes to be.

use super::Communicator;
use crate::error::CommError;
use crate::library::Nccl;
use crate::unique_id::UniqueId;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_cuda::CudaDevice;

/// Makes a [`Communicator`].
#[derive(Clone, Debug)]
pub struct CommunicatorBuilder {
    device: Arc<CudaDevice>,
    nccl: Option<&'static Nccl>,
    deadline: Duration,
    blocking: bool,
    name: String,
}

impl CommunicatorBuilder {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Self {
        CommunicatorBuilder {
            device: Arc::clone(device),
            nccl: None,
            deadline: Communicator::DEFAULT_DEADLINE,
            blocking: false,
            name: "world".to_owned(),
        }
    }

    /// How long anything that depends on other ranks may take, each time: [`Communicator::DEFAULT_DEADLINE`] by default.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Lets NCCL's calls block the host.
    #[must_use]
    pub fn blocking(mut self) -> Self {
        self.blocking = true;
        self
    }

    /// The name in errors, in NCCL's log, and first in the [`order`](Communicator::order): the same on all ranks of the
    /// communicator. "world" by default.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// The library to use in place of [`Nccl::load`]'s.
    #[must_use]
    pub fn library(mut self, nccl: &'static Nccl) -> Self {
        self.nccl = Some(nccl);
        self
    }

    /// Connects with the other ranks, which call it with the same id and number of ranks. Blocks until all have come.
    ///
    /// # Errors
    /// When ranks do not come within the deadline, or NCCL or the driver refuses. Nothing is left then.
    pub fn connect(self, id: UniqueId, rank: u32, ranks: u32) -> Result<Communicator, CommError> {
        let _ = (id, rank, ranks);
        todo!()
    }

    /// Connects all ranks of the job, as the launcher's variables say: see [`Launch`](crate::Launch) and
    /// [`Rendezvous`](crate::Rendezvous).
    ///
    /// # Errors
    /// When the environment does not say enough, and as [`connect`](Self::connect).
    pub fn connect_env(self) -> Result<Communicator, CommError> {
        todo!()
    }

    /// A communicator that other code made and destroys, under this builder's name. All ranks give the same name.
    ///
    /// # Safety
    /// `comm` is a live `ncclComm_t` of this library, ready, and of this device. It lives, and nobody else calls NCCL with it
    /// at the same time, until the last clone of the returned name is gone.
    ///
    /// # Errors
    /// When NCCL does not know it or it is on another device.
    pub unsafe fn borrow(self, comm: *mut c_void) -> Result<Communicator, CommError> {
        let _ = comm;
        todo!()
    }
}
