//! A communicator: ranks that call the same collectives in the same order.

mod builder;
mod order;
mod state;

pub use builder::CommunicatorBuilder;
pub use order::CommOrder;
pub use state::{CommState, Stage};

use crate::error::CommError;
use crate::library::Nccl;
use crate::registration::{BufferRegistration, Registered, Window};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_cuda::CudaDevice;

/// Our own safe type over `ncclComm_t`. Cloning it is cheap and gives another name of the same communicator.
#[derive(Clone)]
pub struct Communicator {
    shared: Arc<Shared>,
}

struct Shared {
    name: Arc<str>,
}

impl Communicator {
    /// How long a communicator waits for other ranks unless it is told otherwise.
    pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

    /// A builder of communicators on this device.
    pub fn builder(device: &Arc<CudaDevice>) -> CommunicatorBuilder {
        CommunicatorBuilder::new(device)
    }

    /// This process's (or thread's) number in it.
    pub fn rank(&self) -> u32 {
        todo!()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        todo!()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its device.
    pub fn device(&self) -> &Arc<CudaDevice> {
        todo!()
    }

    /// The library it is of.
    pub fn nccl(&self) -> &'static Nccl {
        todo!()
    }

    /// How long it waits for other ranks, each time.
    pub fn deadline(&self) -> Duration {
        todo!()
    }

    /// Whether NCCL's calls block the host.
    pub fn is_blocking(&self) -> bool {
        todo!()
    }

    /// Its place among all communicators of the job.
    pub fn order(&self) -> &CommOrder {
        todo!()
    }

    /// What became of it.
    pub fn state(&self) -> CommState {
        todo!()
    }

    /// Refuses unless it is ready and NCCL reports no error.
    ///
    /// # Errors
    /// [`CommError::Gone`], or the error that NCCL found meanwhile, which ends it.
    pub fn check(&self) -> Result<(), CommError> {
        todo!()
    }

    /// NCCL's communicator, for calls that this type does not offer; null when it is gone.
    pub fn raw(&self) -> *mut c_void {
        todo!()
    }

    /// Splits it: ranks with the same color are together in a new one, ordered by key and then by rank. All ranks call it.
    /// `None` for a rank without a color.
    ///
    /// # Errors
    /// As [`connect`](CommunicatorBuilder::connect).
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Communicator>, CommError> {
        let _ = (color, key);
        todo!()
    }

    /// Makes a window of a whole segment, together with all other ranks, which give segments of the same size.
    ///
    /// # Errors
    /// When it is gone, the library has no windows, a capture is under way, or NCCL refuses: fatal to the communicator then.
    pub fn register_window(&self, base: u64, size_bytes: u64) -> Result<Registered, CommError> {
        let _ = (base, size_bytes);
        todo!()
    }

    /// Gives a window back.
    ///
    /// # Errors
    /// When the communicator is gone, and the window with it, or NCCL refuses.
    pub fn deregister_window(&self, window: Window) -> Result<(), CommError> {
        let _ = window;
        todo!()
    }

    /// Registers memory of this rank's. Local and cheap.
    ///
    /// # Errors
    /// When it is gone, the library is too old, or NCCL refuses.
    pub fn register_buffer(&self, base: u64, size_bytes: u64) -> Result<BufferRegistration, CommError> {
        let _ = (base, size_bytes);
        todo!()
    }

    /// Gives a registration back.
    ///
    /// # Errors
    /// When the communicator is gone, and the registration with it, or NCCL refuses.
    pub fn deregister_buffer(&self, registration: BufferRegistration) -> Result<(), CommError> {
        let _ = registration;
        todo!()
    }

    /// Destroys it in order, when all its work is done. The last clone does so when it is dropped.
    ///
    /// # Errors
    /// When its work does not end within the deadline: it is aborted then.
    pub fn destroy(&self) -> Result<(), CommError> {
        todo!()
    }

    /// Ends it and whatever it does, on the device as well. Other ranks learn of it by their deadlines.
    ///
    /// # Errors
    /// When NCCL cannot end it within the deadline.
    pub fn abort(&self) -> Result<(), CommError> {
        todo!()
    }

    /// A number that no other communicator of this process has.
    pub(crate) fn serial(&self) -> u64 {
        todo!()
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("name", &self.shared.name).finish_non_exhaustive()
    }
}
