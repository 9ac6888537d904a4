//! NCCL for symmalloc.

mod calls;
mod collectives;
mod communicator;
mod data_type;
mod error;
mod group;
mod launch;
mod library;
mod registration;
mod rendezvous;
mod transport;
mod unique_id;

pub use communicator::{CommOrder, CommState, Communicator, CommunicatorBuilder, Stage};
pub use data_type::{DataType, NcclType, ReduceOp};
pub use error::{CommError, LoadError, NcclError};
pub use group::Group;
pub use launch::{Launch, LaunchError, Launcher};
pub use library::{Capability, Nccl, NcclVersion};
pub use registration::{BufferRegistration, Registered, WINDOW_ALIGNMENT, Window, WindowHandle};
pub use rendezvous::RendezvousError;
pub use transport::NcclTransport;
pub use unique_id::UniqueId;
