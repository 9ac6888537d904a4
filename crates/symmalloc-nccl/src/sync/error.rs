//! Errors of the registrar, one enum per operation.

use crate::communicator::CommState;
use crate::communicator::error::CommError;
use crate::ffi::version::NcclVersion;
use crate::sync::message::SyncDifference;
use crate::sync::offset_difference::OffsetDifference;
use crate::windows::keys::SegmentKey;
use std::sync::Arc;
use symmalloc_agreement::{AgreementError, Disagreement, ProtocolError, TransportError};
use symmalloc_core::PoolId;
use symmalloc_core::errors::{HandleError, UnknownError};
use symmalloc_cuda::CudaError;
use thiserror::Error;

/// An error returned by [`Registrar::attach`](crate::Registrar::attach). Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The communicator has ended, or its library does not support the registration.
    #[error(transparent)]
    Communicator(#[from] CommError),
    /// Windows rely on equal offsets, which only symmetric pools guarantee.
    #[error(
        "{pool} is not symmetric, so its offsets may differ between ranks: configure symmetric:true, or attach it with \
         Registration::Buffers"
    )]
    NotSymmetric {
        /// The pool.
        pool: PoolId,
    },
    /// The allocator's memory cannot be shared with other ranks.
    #[error(
        "the allocator's memory has no file descriptors, which windows need: use a device with virtual memory and do not \
         configure CudaBackend::builder().plain(), or attach with Registration::Buffers"
    )]
    NotShareable,
    /// The pool has expandable segments, and this version of NCCL treats the first part of a grown segment as the whole segment.
    #[error(
        "{pool} has expandable segments and NCCL {version} cannot put a window on memory that grew (2.30.3 can): configure \
         reserved or fixed segments, or attach it with Registration::Buffers"
    )]
    Growing {
        /// The pool.
        pool: PoolId,
        /// The library's version.
        version: NcclVersion,
    },
    /// The pool is already attached to this communicator.
    #[error(
        "{pool} is already attached to communicator \"{communicator}\": detach it and sync before you attach it in another way"
    )]
    Already {
        /// The pool.
        pool: PoolId,
        /// Name of the communicator.
        communicator: String,
    },
    /// The communicator and the allocator's memory are on different devices.
    #[error(
        "communicator \"{communicator}\" is on device {actual}, the allocator on device {expected}: use one registrar per device"
    )]
    DeviceMismatch {
        /// Name of the communicator.
        communicator: String,
        /// The allocator's device.
        expected: usize,
        /// The communicator's device.
        actual: usize,
    },
}

/// An error that a sync returns about one communicator.
///
/// After [`Disagreed`](SyncError::Disagreed), [`Differ`](SyncError::Differ), [`SymmetricSpace`](SyncError::SymmetricSpace) and
/// [`Capturing`](SyncError::Capturing), nothing was registered or deregistered, and the communicator is unchanged. After an error of NCCL,
/// the driver or the exchange of messages, the communicator is aborted, its windows are gone, and its segments are released. The allocator
/// and all other communicators continue to work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SyncError {
    /// The ranks' histories or configurations differ. The report locates the difference and is the same on every rank.
    #[error("communicator \"{communicator}\": {disagreement}")]
    Disagreed {
        /// Name of the communicator.
        communicator: String,
        /// The core's report.
        disagreement: Box<Disagreement>,
    },
    /// The ranks' histories are equal, or were not compared, but their syncs differ. Every rank returns the same error.
    #[error(
        "communicator \"{communicator}\": {difference}: configure the registrars alike, attach the same pools, and sync at \
         the same points of the program on every rank"
    )]
    Differ {
        /// Name of the communicator.
        communicator: String,
        /// The differences and their ranks.
        difference: Box<SyncDifference>,
    },
    /// Offsets or sizes of one collective call differ between ranks. The call was not submitted. Every rank returns the same error.
    #[error("communicator \"{communicator}\": {difference}")]
    OffsetsDiffer {
        /// Name of the communicator.
        communicator: String,
        /// The differences and their ranks.
        difference: Box<OffsetDifference>,
    },
    /// The windows would not fit into the communicator's symmetric address space. Every rank returns the same error.
    #[error(
        "communicator \"{communicator}\": a window of {needed_bytes} bytes does not fit into its symmetric address space ({used_bytes} \
         of {budget_bytes} bytes are in use): attach fewer or smaller pools, trim before the sync, or set NCCL_WIN_STRIDE to \
         more bytes on every rank"
    )]
    SymmetricSpace {
        /// Name of the communicator.
        communicator: String,
        /// Size in bytes of the window that does not fit.
        needed_bytes: u64,
        /// Bytes in use by other windows and by NCCL itself.
        used_bytes: u64,
        /// Total bytes of the address space.
        budget_bytes: u64,
    },
    /// The ranks could not communicate: a rank has ended, is stuck, or does not sync at this point.
    #[error("communicator \"{communicator}\": {error}; it has ended, connect a new one")]
    Transport {
        /// Name of the communicator.
        communicator: String,
        /// The cause.
        error: TransportError,
    },
    /// A rank sent an invalid message.
    #[error("communicator \"{communicator}\": {error}")]
    Protocol {
        /// Name of the communicator.
        communicator: String,
        /// The cause.
        error: ProtocolError,
    },
    /// NCCL failed, or an operation exceeded the communicator's deadline.
    #[error("communicator \"{communicator}\": {error}")]
    Communicator {
        /// Name of the communicator.
        communicator: String,
        /// The cause.
        error: CommError,
    },
    /// The driver failed during a wait for work on the device.
    #[error("communicator \"{communicator}\": {error}")]
    Cuda {
        /// Name of the communicator.
        communicator: String,
        /// The driver's error.
        error: CudaError,
    },
    /// A graph is being captured. NCCL cannot register during a capture, and the ranks' messages would become part of the graph.
    #[error(
        "a graph is being captured: sync before the capture begins, after reserving (core().reserve) what will be allocated in it"
    )]
    Capturing,
    /// The communicator is suspended. Nothing was changed.
    #[error(
        "communicator \"{communicator}\" is suspended: wake a pool with windows on it first, or leave it out of the sync on every rank"
    )]
    Suspended {
        /// Name of the communicator.
        communicator: String,
    },
    /// The pool is not attached to the communicator, or no pool is attached to it.
    #[error("{} not attached to communicator \"{communicator}\": call attach on every rank", .pool.map_or_else(|| "nothing is".to_owned(), |pool| format!("{pool} is")))]
    NotAttached {
        /// Name of the communicator.
        communicator: String,
        /// The pool that is not attached; `None` if no pool is attached.
        pool: Option<PoolId>,
    },
    /// The communicator was destroyed, aborted or lost: its windows are gone and its segments are released.
    #[error(
        "communicator \"{communicator}\" is {state}{}, its windows are gone: connect a new one, attach the pools to it, and sync",
        .cause.as_ref().map_or_else(String::new, |cause| format!(" because of this: {cause}"))
    )]
    Gone {
        /// Name of the communicator.
        communicator: String,
        /// The communicator's state.
        state: CommState,
        /// The error that ended it, if any.
        cause: Option<Arc<CommError>>,
    },
}

/// An error returned by the lookup of a window or a key.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LookupError {
    /// The buffer does not belong to the registrar's allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// No live segment of the allocator is at this address.
    #[error(
        "no segment of the allocator is at {address:#x}: the memory was released, or does not belong to the allocator"
    )]
    UnknownAddress {
        /// The address.
        address: u64,
    },
    /// The buffer is empty and therefore lies in no segment.
    #[error("the buffer is empty, so it lies in no segment")]
    Empty,
    /// No pool is attached to this communicator.
    #[error("nothing is attached to communicator \"{communicator}\": call attach on every rank, then sync")]
    NotAttached {
        /// Name of the communicator.
        communicator: String,
    },
    /// The segment, or the part of it that contains the buffer, has no window yet.
    #[error(
        "{segment} has no window over the buffer on communicator \"{communicator}\": attach its pool and call sync on every \
         rank after allocating"
    )]
    NotRegistered {
        /// The segment.
        segment: SegmentKey,
        /// Name of the communicator.
        communicator: String,
    },
    /// Like [`NotRegistered`](LookupError::NotRegistered), but during a graph capture, when a sync cannot register windows.
    #[error(
        "{segment} has no window over the buffer on communicator \"{communicator}\", and none can be made while a graph is \
         captured: reserve (core().reserve) and sync before the capture begins"
    )]
    Capturing {
        /// The segment.
        segment: SegmentKey,
        /// Name of the communicator.
        communicator: String,
    },
    /// The pool is asleep and has no windows until it wakes.
    #[error("{segment} sleeps, so it has no window on communicator \"{communicator}\": wake its pool on every rank")]
    Asleep {
        /// The segment.
        segment: SegmentKey,
        /// Name of the communicator.
        communicator: String,
    },
    /// The segment is registered, but not as a window: the ranks cannot access each other's memory, or the pool was attached with
    /// [`Registration::Buffers`](crate::Registration::Buffers).
    #[error(
        "{segment} is registered on communicator \"{communicator}\" for this rank alone: attach its pool with \
         Registration::Windows, on GPUs that can access each other's memory"
    )]
    Plain {
        /// The segment.
        segment: SegmentKey,
        /// Name of the communicator.
        communicator: String,
    },
}

impl SyncError {
    /// Returns the error of an exchange over a communicator.
    pub(crate) fn of_exchange(communicator: &str, error: AgreementError) -> Self {
        let communicator = communicator.to_owned();
        match error {
            AgreementError::Disagreed(disagreement) => SyncError::Disagreed { communicator, disagreement },
            AgreementError::Transport(error) => SyncError::Transport { communicator, error },
            AgreementError::Protocol(error) => SyncError::Protocol { communicator, error },
        }
    }

    /// Returns `true` if the error ends the communicator.
    pub(crate) fn is_fatal(&self) -> bool {
        matches!(
            self,
            SyncError::Transport { .. }
                | SyncError::Protocol { .. }
                | SyncError::Communicator { .. }
                | SyncError::Cuda { .. }
        )
    }
}
