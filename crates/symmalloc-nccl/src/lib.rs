//! NCCL registration that is always right: memory in the same places on every rank, windows made in the same order by all, and
//! a deadline on everything that waits.
//!
//! NCCL's symmetric kernels find a peer's buffer by window and offset, and do not check that the ranks agree: where they do not,
//! every element is wrong and the return code is `ncclSuccess`. `symmalloc-core` places the n-th allocation alike on every rank;
//! this crate registers the segments, and compares what the ranks did before it does.
//!
//! # Examples
//! Started with `torchrun --no-python`, mpirun, mpiexec or srun, one process per GPU:
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
//! # What there is
//! | type | what it is |
//! |---|---|
//! | [`Nccl`] | the libnccl of this process: found, opened, its version and what it can do |
//! | [`Launch`], [`UniqueId`] | which rank this is, and an id for all ranks, without a side channel |
//! | [`Communicator`] | ranks that call the same collectives: connect, split, register, destroy, abort |
//! | [`Group`] | several collectives as one |
//! | [`Registrar`] | windows over the segments of pools, in step on all ranks |
//! | [`Window`], [`WindowSpan`], [`SegmentKey`] | a window, a buffer's place in it, and what to cache by |
//! | [`NcclTransport`] | the core's agreement over NCCL |
//! | [`CheckedCollectives`] | a debug mode: are the offsets of this call equal on all ranks? |
//! | [`AllToAll`] | all-to-all-v on registered memory |
//!
//! # Deadlines and errors
//! Anything that waits for other ranks ends at the communicator's deadline, with an error that says what was waited for. The
//! communicator is gone then; the allocator and other communicators go on. NCCL does not tell who is missing, and its symmetric
//! kernels cannot be stopped: see [`Communicator`]. Errors are typed and say what to do; no call panics because of NCCL.
//!
//! # libnccl
//! It is opened when it is first needed, so everything builds and runs without it up to then. NCCL 2.18 is the oldest that works,
//! 2.27 the oldest with windows ([`Capability`]). The library that the process has already, PyTorch's or cudarc's, is shared.
//! `SYMMALLOC_NCCL_LIBRARY` names another one. CUDA versions are chosen as in `symmalloc-cuda`.
//!
//! # Implementation
//! `calls.rs` has a function for each NCCL call and names the contract under which it is safe; `driver.rs` has the few calls of the
//! driver. `communicator/call.rs` says on which thread NCCL is called and for how long, `communicator/ending.rs` what happens
//! when a call does not come back. `collectives.rs` describes the collectives once, for plain and checked ones. `registrar.rs`
//! follows the segment log of the allocator, `registrar/plan.rs` says what one sync does, `registrar/round.rs` compares the plans
//! of the ranks in one collective. `unsafe` blocks stand in `calls.rs`, `driver.rs` and `library.rs` alone.

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
pub use registrar::plan::{PlanStep, SegmentName, StepKind};
pub use registrar::plan_summary::{PlanDifference, PlanField, PlanGroup, StepDifference};
pub use registrar::segment_key::{Generation, SegmentKey};
pub use registrar::settings::{Registration, Synced};
pub use registrar::sleep_error::{
    Obstacle, RankObstacle, SleepDifference, SleepError, SleepField, SleepStep, Slept, Woken,
};
pub use registrar::stats::{CommunicatorStats, RegistrarStats};
pub use registrar::window::WindowSpan;
pub use registrar::{Registrar, RegistrarBuilder};
pub use rendezvous::error::RendezvousError;
pub use splits::{Sending, Side, Split, Splits, SplitsError};
pub use transport::NcclTransport;
pub use unique_id::UniqueId;
pub use version::{Capability, NcclVersion};
pub use watch::{FAILURE_EXIT_CODE, Failure, FailureCause, WatchdogMode, flight_record, write_flight_record};

/// What threads may share.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Communicator>();
    shared::<NcclTransport>();
    shared::<Window>();
    shared::<BufferRegistration>();
};
