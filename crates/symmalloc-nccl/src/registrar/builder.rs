//! How a registrar is configured.

use crate::registrar::Registrar;
use crate::registrar::settings::Settings;
use crate::registrar::stats::Counters;
use crate::registrar::symmetric_space::wanted_bytes;
use std::sync::RwLock;
use symmalloc_agreement::Mode;
use symmalloc_cuda::{CudaAllocator, CudaError};

/// Makes a [`Registrar`]. All ranks configure theirs alike.
#[derive(Clone, Debug)]
#[must_use]
pub struct RegistrarBuilder {
    allocator: CudaAllocator,
    mode: Mode,
    check_offsets: bool,
    symmetric_space_bytes: Option<u64>,
}

impl Registrar {
    /// Starts from the defaults: agreement at every sync, no offset checks.
    pub fn builder(allocator: &CudaAllocator) -> RegistrarBuilder {
        let allocator = allocator.clone();
        RegistrarBuilder { allocator, mode: Mode::default(), check_offsets: false, symmetric_space_bytes: None }
    }
}

impl RegistrarBuilder {
    /// When ranks compare the histories of the pools that are attached to a communicator for windows. [`Mode::AtSync`] by
    /// default: at every sync, for one small collective. With
    /// [`Mode::Off`] a sync with nothing new returns at once, and ranks that differ in *whether* there is something new are
    /// noticed by the deadline only. The other modes sync as `AtSync` does.
    pub fn agreement(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Whether [`Registrar::checked`] compares offsets over all ranks before each collective: to find a bug. Off by default.
    pub fn check_offsets(mut self, check_offsets: bool) -> Self {
        self.check_offsets = check_offsets;
        self
    }

    /// Bytes of the symmetric address space of each communicator, where NCCL's own rule (`NCCL_WIN_STRIDE`, else the memory of
    /// the largest device) is not what it uses. Rounded up to 4 GiB; ranks take the largest.
    pub fn symmetric_space_bytes(mut self, bytes: u64) -> Self {
        self.symmetric_space_bytes = Some(bytes);
        self
    }

    /// The registrar.
    ///
    /// # Errors
    /// When the driver does not say how much memory the device has.
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
            ended: std::sync::Mutex::default(),
        })
    }
}
