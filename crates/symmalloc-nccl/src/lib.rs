//! NCCL window registration that is correct by construction: memory is placed identically on every rank, all ranks register windows in the
//! same order, and every wait has a deadline.
//!
//! NCCL's symmetric kernels address a peer's buffer by window and offset and do not check that the ranks agree. If they disagree, every
//! element is wrong and the return code is still `ncclSuccess`. `symmalloc-core` places the n-th allocation identically on every rank.
//! This crate compares the ranks' histories and then registers the segments.
//!
//! # Examples
//! Start one process per GPU with `torchrun --no-python`, mpirun, mpiexec or srun:
//! ```no_run
//! use symmalloc_core::Config;
//! use symmalloc_cuda::{CudaAllocator, CudaDevice};
//! use symmalloc_nccl::{Communicator, Launch, ReduceOp};
//!
//! let launch = Launch::from_env()?;
//! let device = CudaDevice::new(launch.local_rank as usize)?;
//! let world = Communicator::builder(&device).connect_env()?;
//!
//! let allocator = CudaAllocator::new(&device, Config::default())?;
//! let stream = device.context().new_stream()?;
//! let mut gradients = allocator.alloc_zeroed::<f32>(&stream, 1 << 20)?;
//! world.all_reduce_in_place(&mut gradients, ReduceOp::Sum, &stream)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Main types
//! | type | purpose |
//! |---|---|
//! | [`Nccl`] | the process's libnccl: its path, version and capabilities |
//! | [`Launch`], [`UniqueId`] | this process's rank, and an id shared by all ranks without a side channel |
//! | [`Communicator`] | a group of ranks that call the same collectives: connect, split, register, destroy, abort |
//! | [`Group`] | several collectives that are submitted together |
//! | [`Registrar`] | windows over the segments of pools, synchronized across ranks |
//! | [`Window`], [`WindowSpan`], [`SegmentKey`] | a window, a buffer's offset in it, and a cache key |
//! | [`NcclTransport`] | transport of the core's agreement protocol over NCCL |
//! | [`CheckedCollectives`] | a debug mode that compares the offsets of each call across ranks |
//! | [`AllToAll`] | all-to-all-v on registered memory |
//!
//! # Deadlines and errors
//! Every operation that waits for other ranks fails at the communicator's deadline, with an error that names the wait. The communicator is
//! then unusable; the allocator and other communicators continue to work. NCCL does not report which rank is missing, and its symmetric
//! kernels cannot be stopped: see [`Communicator`]. Errors are typed and state a remedy. NCCL failures never cause a panic.
//!
//! # libnccl
//! The library is opened on first use, so programs build and start without it. The minimum version is NCCL 2.18; windows require 2.27
//! ([`Capability`]). If the process has already loaded a libnccl, such as PyTorch's or cudarc's, that copy is shared.
//! `SYMMALLOC_NCCL_LIBRARY` selects another one. CUDA versions are selected as in `symmalloc-cuda`.
//!
//! # Implementation
//! `calls.rs` has one function per NCCL call and states their safety contract; `driver.rs` has the driver calls that cudarc lacks.
//! `communicator/call.rs` selects the thread and the deadline of each NCCL call, and `communicator/ending.rs` handles calls that do not
//! return. `collectives.rs` defines the collectives once, for plain and checked use. `registrar.rs` follows the segment log of the
//! allocator, `registrar/sync_actions.rs` computes the actions of one sync, and `registrar/round.rs` compares the plans of all ranks in one
//! collective. `unsafe` blocks occur only in `calls.rs`, `driver.rs` and `library.rs`.

mod all_to_all;
mod backoff;
mod calls;
mod collectives;
mod communicator;
mod data_type;
mod driver;
mod error;
mod group;
mod handles;
mod launch;
mod library;
#[cfg(feature = "metrics")]
pub mod metrics;
mod nccl_error;
mod registrar;
mod rendezvous;
mod sequence_counter;
mod splits;
mod transport;
mod unique_id;
mod version;
mod watch;

pub use all_to_all::{AllToAll, AllToAllBuilder, AllToAllError};
pub use communicator::operation::Collective;
pub use communicator::registration::{BufferRegistration, Registered, WINDOW_ALIGNMENT, Window};
pub use communicator::watching::Announcement;
pub use communicator::{CommOrder, CommState, Communicator, CommunicatorBuilder, Stage};
pub use data_type::{DataType, NcclType, ReduceOp};
pub use error::CommError;
pub use group::Group;
pub use handles::WindowHandle;
pub use launch::{Launch, LaunchError, Launcher};
pub use library::Nccl;
pub use nccl_error::{LoadError, NcclError};
pub use registrar::checked::CheckedCollectives;
pub use registrar::error::{AttachError, LookupError, SyncError};
pub use registrar::invalidation::{Invalidated, InvalidationCursor};
pub use registrar::offset_difference::{BufferPlace, CollectiveCall, OffsetDifference};
pub use registrar::segment_key::{Generation, SegmentKey};
pub use registrar::settings::{Registration, Synced};
pub use registrar::sleep_error::{
    Obstacle, RankObstacle, SleepDifference, SleepError, SleepField, SleepStep, Slept, Woken,
};
pub use registrar::stats::{CommunicatorStats, RegistrarStats};
pub use registrar::sync_actions::{PlanStep, SegmentName, StepKind};
pub use registrar::sync_summary::{PlanDifference, PlanField, PlanGroup, StepDifference};
pub use registrar::window::WindowSpan;
pub use registrar::{Registrar, RegistrarBuilder};
pub use rendezvous::error::RendezvousError;
pub use splits::{Sending, Side, Split, Splits, SplitsError};
pub use transport::NcclTransport;
pub use unique_id::UniqueId;
pub use version::{Capability, NcclVersion};
pub use watch::{FAILURE_EXIT_CODE, Failure, FailureCause, WatchdogMode, flight_record, write_flight_record};

/// Types that must be usable from several threads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Communicator>();
    shared::<NcclTransport>();
    shared::<Window>();
    shared::<BufferRegistration>();
};
