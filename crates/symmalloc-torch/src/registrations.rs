//! Registrations: NCCL windows over pools, on communicators that another library owns (PyTorch's `ProcessGroupNCCL`).
//!
//! One registrar of `symmalloc-nccl` per allocator, with an attachment for each communicator.

use crate::error::Error;
use crate::streams::RawStream;
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use symmalloc_core::PoolId;
use symmalloc_cuda::CudaAllocator;
use symmalloc_nccl::{Announcement, Communicator, CommunicatorBuilder, Registrar, Registration, SyncError, Synced};

/// The registrar of one allocator, made when the first communicator comes.
pub(crate) struct Registrations {
    allocator: CudaAllocator,
    registrar: OnceLock<Arc<Registrar>>,
}

impl Registrations {
    pub(crate) fn new(allocator: &CudaAllocator) -> Self {
        Registrations { allocator: allocator.clone(), registrar: OnceLock::new() }
    }

    fn registrar(&self) -> Result<&Arc<Registrar>, Error> {
        if let Some(registrar) = self.registrar.get() {
            return Ok(registrar);
        }
        let registrar = Arc::new(Registrar::builder(&self.allocator).build()?);
        Ok(self.registrar.get_or_init(|| registrar))
    }
}

/// Work that the program gives to a stream by itself, until this is dropped.
pub struct RankAnnouncement {
    _open: Announcement,
}

/// One pool on one communicator.
pub struct PoolRegistration {
    registrar: Arc<Registrar>,
    communicator: Communicator,
    pool: PoolId,
}

impl PoolRegistration {
    /// Attaches a pool. Nothing is registered before the first sync.
    ///
    /// # Safety
    /// `communicator` is a live `ncclComm_t` of the NCCL library of this process, ready, and on the allocator's device. It
    /// lives as long as the answer, and nobody else calls NCCL with it while this does.
    pub(crate) unsafe fn new(
        registrations: &Registrations,
        pool: PoolId,
        communicator: *mut c_void,
        deadline: Duration,
        rendezvous: Option<&str>,
    ) -> Result<Self, Error> {
        let builder = Communicator::builder(registrations.allocator.device()).name("borrowed").deadline(deadline);
        let builder = rendezvous.into_iter().fold(builder, CommunicatorBuilder::rendezvous);
        // SAFETY: the caller's contract.
        let communicator = unsafe { builder.borrow(communicator) }?;
        let registrar = Arc::clone(registrations.registrar()?);
        registrar.attach(&communicator, &[pool], Registration::Windows)?;
        Ok(PoolRegistration { registrar, communicator, pool })
    }

    /// Brings the windows up to date, on every rank of the communicator.
    pub(crate) fn sync(&self) -> Result<Synced, Error> {
        Ok(self.registrar.sync(&[&self.communicator])?)
    }

    /// Tells the watchdog of work that the program gives to the stream while it holds the answer.
    ///
    /// # Safety
    /// `stream` is one of the allocator's device, and lives as long as the communicator is watched.
    pub(crate) unsafe fn announce(
        &self,
        kind: &str,
        elements: Option<u64>,
        stream: *mut c_void,
    ) -> Result<RankAnnouncement, Error> {
        let raw = RawStream::new(stream).handle();
        // SAFETY: the caller's contract. Nothing is given to it but events.
        let stream = unsafe { self.communicator.device().context().wrap_borrowed_stream(raw.cast()) };
        Ok(RankAnnouncement { _open: self.communicator.announcement(kind.to_owned(), elements, &stream)? })
    }

    /// Deregisters everything, on every rank of the communicator.
    pub(crate) fn end(self) -> Result<(), Error> {
        match self.registrar.detach(&self.communicator, &[self.pool]) {
            Ok(()) => self.registrar.sync(&[&self.communicator]).map(|_| ()).map_err(Error::from),
            // The communicator is gone, and its windows with it.
            Err(SyncError::NotAttached { .. } | SyncError::Gone { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
