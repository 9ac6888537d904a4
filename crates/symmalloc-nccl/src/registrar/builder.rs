//! Configuration of a registrar.

use crate::registrar::Registrar;
use crate::registrar::ended_comms::EndedComms;
use crate::registrar::settings::Settings;
use crate::registrar::stats::Counters;
use crate::windows::symmetric_space::wanted_bytes;
use std::sync::RwLock;
use symmalloc_agreement::Mode;
use symmalloc_cuda::{CudaAllocator, CudaError};

/// Builds a [`Registrar`]. All ranks must use the same configuration.
#[derive(Clone, Debug)]
#[must_use]
pub struct RegistrarBuilder {
    allocator: CudaAllocator,
    mode: Mode,
    check_offsets: bool,
    symmetric_space_bytes: Option<u64>,
}

impl Registrar {
    /// Returns a builder with the default configuration: agreement at every sync, no offset checks.
    pub fn builder(allocator: &CudaAllocator) -> RegistrarBuilder {
        let allocator = allocator.clone();
        RegistrarBuilder { allocator, mode: Mode::default(), check_offsets: false, symmetric_space_bytes: None }
    }
}

impl RegistrarBuilder {
    /// Sets when ranks compare the histories of the pools that are attached to a communicator for windows. The default, [`Mode::AtSync`],
    /// compares them at every sync and costs one small collective. With [`Mode::Off`], a sync without changes returns immediately, and a
    /// disagreement on *whether* there is a change is detected only by the deadline. The other modes sync like `AtSync`.
    pub fn agreement(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets whether [`Registrar::checked`] compares offsets across all ranks before each collective. This is a debugging aid and off by
    /// default.
    pub fn check_offsets(mut self, check_offsets: bool) -> Self {
        self.check_offsets = check_offsets;
        self
    }

    /// Overrides the size in bytes of each communicator's symmetric address space. Use it if NCCL does not follow its documented rule
    /// (`NCCL_WIN_STRIDE`, otherwise the memory of the largest device). The size is rounded up to 4 GiB, and ranks use the largest value.
    pub fn symmetric_space_bytes(mut self, bytes: u64) -> Self {
        self.symmetric_space_bytes = Some(bytes);
        self
    }

    /// Builds the registrar.
    ///
    /// # Errors
    /// Returns an error if the driver does not report the size of the device's memory.
    pub fn build(self) -> Result<Registrar, CudaError> {
        let space_bytes = match self.symmetric_space_bytes {
            Some(bytes) => bytes,
            None => {
                let stride = std::env::var("NCCL_WIN_STRIDE").ok();
                wanted_bytes(self.allocator.device().memory_info()?.total_bytes, stride.as_deref())
            }
        };
        Ok(Registrar {
            settings: Settings { mode: self.mode, check_offsets: self.check_offsets, space_bytes },
            allocator: self.allocator,
            attachments: RwLock::default(),
            counters: Counters::default(),
            ended: EndedComms::default(),
        })
    }
}
