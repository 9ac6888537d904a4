//! NCCL window registration that is correct by construction: memory is placed identically on every rank, all ranks register windows in the
//! same order, and every wait has a deadline.
//!
//! NCCL's symmetric kernels address a peer's buffer by window and offset, and do not check that the ranks use equal offsets. If the offsets
//! differ, every element of the result is wrong and the return code is still `ncclSuccess`. `symmalloc-core` places the n-th allocation
//! identically on every rank. This crate compares the ranks' histories and then registers the segments.
//!
//! # Examples
//! Start one process per GPU with `torchrun --no-python`, mpirun, mpiexec or srun:
//! ```no_run
//! use symmalloc_core::Config;
//! use symmalloc_cuda::{CudaAllocator, CudaDevice};
//! use symmalloc_nccl::{Communicator, Launch, ReduceOp};
//!
//! let launch = Launch::from_env()?;
//! let device = CudaDevice::for_local_rank(launch.local_rank)?;
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
//! | [`Launch`], [`UniqueId`] | this process's rank, and an id that all ranks obtain without a side channel |
//! | [`Communicator`] | a group of ranks that call the same collectives: connect, split, shrink, grow, register, destroy, revoke, abort |
//! | [`Group`] | several collectives that are submitted together |
//! | [`Registrar`], [`Attachment`] | windows over the segments of pools, synchronized across ranks |
//! | [`Window`], [`WindowSpan`], [`SegmentKey`] | a window, a buffer's offset in it, and a cache key |
//! | [`NcclTransport`] | transport of the core's agreement protocol over NCCL |
//! | [`CheckedCollectives`] | a debug mode that compares the offsets of each call across ranks |
//! | [`AllToAll`] | all-to-all-v on registered memory |
//!
//! # Deadlines and errors
//! If an operation waits for other ranks longer than the communicator's deadline, it fails with an error that names the operation. The
//! communicator is then unusable, but the allocator and other communicators continue to work. NCCL does not report which rank is missing,
//! and its symmetric kernels cannot be stopped: see [`Communicator`]. Errors are typed and state a remedy. NCCL failures never cause a
//! panic.
//!
//! # libnccl
//! The library is opened on first use, so programs build and start without it. The minimum version is NCCL 2.18; windows require 2.27
//! ([`Capability`]). If the process has already loaded a libnccl, such as PyTorch's or cudarc's, this crate uses that copy.
//! `SYMMALLOC_NCCL_LIBRARY` selects a different library. CUDA versions are selected as in `symmalloc-cuda`.
//!
//! # Implementation
//! | folder | contents |
//! |---|---|
//! | `ffi` | the calls of libnccl and the driver, each with its safety contract |
//! | `communicator` | communicators; `submission.rs` submits collectives and groups, `call.rs` selects the thread and the deadline of an NCCL call, `ending.rs` handles calls that do not return |
//! | `collectives` | the collectives, defined once for plain and checked use, and the transport of messages between ranks |
//! | `windows` | the names of segments, cache keys, a map of windows, and NCCL's symmetric address space |
//! | `sync` | changes to segments, the actions that follow from the changes, and the comparison of actions across ranks |
//! | `registrar` | the [`Registrar`]: its state per communicator, syncs and lookups |
//! | `sleep` | sleep and wake of a pool on all ranks |
//! | `watchdog` | the part of the watchdog (`symmalloc-watchdog`) that calls the driver and NCCL: `marker.rs` polls the progress of the device; `at_exit.rs` delays the end of the process while threads of this crate still work |
//! | `all_to_all` | all-to-all-v |
//!
//! To follow one sync from a segment's birth to its window, read:
//! 1. `registrar.rs`, `sync_all`: the communicators in their global order.
//! 2. `registrar/attached_comm/sync.rs`, `sync_ready`: the steps of one communicator.
//! 3. `sync/observed.rs`: the events since the last sync. `windows/table.rs`: what each event changes.
//! 4. `sync/actions.rs`: the actions that follow. `sync/agreement.rs`: the comparison of actions across ranks.
//! 5. `windows/registrations.rs`: the registered segments. `communicator/registration.rs` and `call.rs`: the call to NCCL.
//!
//! A segment that grows takes the same path: its change has a larger extent, and the action replaces the window. If a registration fails,
//! `communicator/call.rs` ends the communicator, and `AttachedComm::sync` drops the communicator's windows.

mod all_to_all;
mod backoff;
mod collectives;
mod communicator;
mod ffi;
mod logging;
mod registrar;
mod sleep;
mod sync;
mod unique_id;
mod watchdog;
mod windows;

pub use all_to_all::splits::{Sending, Side, Split, Splits, SplitsError};
pub use all_to_all::{AllToAll, AllToAllBuilder, AllToAllError};
pub use collectives::transport::NcclTransport;
pub use communicator::error::CommError;
pub use communicator::registration::{BufferRegistration, Registered, Window};
pub use communicator::submission::Group;
pub use communicator::watching::Announcement;
pub use communicator::{CommMemory, CommOrder, CommState, Communicator, CommunicatorBuilder, GrowIdObstacle, Stage};
pub use ffi::calls::WINDOW_ALIGNMENT;
pub use ffi::error::{LoadError, NcclError};
pub use ffi::handles::WindowHandle;
pub use ffi::library::Nccl;
pub use ffi::operation::Collective;
pub use ffi::operation::{DataType, NcclType, ReduceOp};
pub use ffi::version::{Capability, NcclVersion};
pub use ffi::window_flags::WindowFlags;
pub use registrar::checked::CheckedCollectives;
#[cfg(feature = "metrics")]
pub use registrar::metrics;
pub use registrar::stats::{CommunicatorStats, RegistrarStats};
pub use registrar::{Registrar, RegistrarBuilder};
pub use sleep::error::{
    CollectiveSleepError, Obstacle, RankObstacle, SleepDifference, SleepField, SleepStep, Slept, Woken,
};
pub use symmalloc_rendezvous::{EndpointAnswer, Launch, LaunchError, Launcher, RendezvousError};
pub use symmalloc_watchdog::{
    FAILURE_EXIT_CODE, Failure, FailureCause, LocalError, WatchdogMode, flight_record, write_flight_record,
};
pub use sync::actions::{ChangeKind, WindowChange};
pub use sync::error::{AttachError, LookupError, SyncError};
pub use sync::message::{ChangeDifference, SyncDifference, SyncField};
pub use sync::offset_difference::{BufferPlace, CollectiveCall, OffsetDifference};
pub use sync::settings::{Attachment, Registration, Synced};
pub use unique_id::UniqueId;
pub use windows::keys::SegmentKey;
pub use windows::keys::{Invalidated, InvalidationCursor};
pub use windows::registrations::WindowSpan;
pub use windows::segment::{HeapSegment, SymmetricSegment};

/// Checks at compile time that these types can be shared between threads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Communicator>();
    shared::<NcclTransport>();
    shared::<Window>();
    shared::<BufferRegistration>();
};
