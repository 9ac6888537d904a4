//! What can go wrong with a registrar, an enum per operation, and what to do about it.

use crate::communicator::CommState;
use crate::error::CommError;
use crate::registrar::offset_difference::OffsetDifference;
use crate::registrar::plan_summary::PlanDifference;
use crate::registrar::segment_key::SegmentKey;
use crate::version::NcclVersion;
use std::sync::Arc;
use symmalloc_agreement::{Disagreement, ProtocolError, TransportError};
use symmalloc_core::PoolId;
use symmalloc_core::errors::{HandleError, UnknownError};
use symmalloc_cuda::CudaError;
use thiserror::Error;

/// Why a pool could not be attached to a communicator. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The communicator is gone, or its library cannot register.
    #[error(transparent)]
    Communicator(#[from] CommError),
    /// Windows rely on equal offsets, which only symmetric pools promise.
    #[error(
        "{pool} is not symmetric, so its offsets may differ between ranks: configure symmetric:true, or attach it with \
         Registration::Buffers"
    )]
    NotSymmetric {
        /// The pool.
        pool: PoolId,
    },
    /// The allocator's memory cannot be shown to other ranks.
    #[error(
        "the allocator's memory has no file descriptors, which windows need: use a device with virtual memory and do not \
         configure CudaBackend::builder().plain(), or attach with Registration::Buffers"
    )]
    NotShareable,
    /// The pool's segments grow, and this NCCL takes the first part of a window for the whole.
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
    /// The pool is attached to this communicator already.
    #[error(
        "{pool} is attached to communicator \"{communicator}\" already: detach it and sync before you attach it in another way"
    )]
    Already {
        /// The pool.
        pool: PoolId,
        /// The communicator.
        communicator: String,
    },
    /// The communicator is on another device than the allocator's memory.
    #[error(
        "communicator \"{communicator}\" is on device {actual}, the allocator on device {expected}: use a registrar per device"
    )]
    OtherDevice {
        /// The communicator.
        communicator: String,
        /// The allocator's device.
        expected: usize,
        /// The communicator's.
        actual: usize,
    },
}

/// Why a sync did not end well on one communicator.
///
/// After [`Disagreed`](SyncError::Disagreed), [`PlansDiffer`](SyncError::PlansDiffer),
/// [`SymmetricSpace`](SyncError::SymmetricSpace) and [`Capturing`](SyncError::Capturing) nothing was registered or deregistered,
/// and the communicator is as it was. After any other error of a collective it is aborted, its windows are gone, and its
/// segments are let go; the allocator and all other communicators go on.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SyncError {
    /// The ranks' histories or configurations differ, and here is where. The same on every rank.
    #[error("communicator \"{communicator}\": {disagreement}")]
    Disagreed {
        /// The communicator.
        communicator: String,
        /// The core's report.
        disagreement: Box<Disagreement>,
    },
    /// The ranks' histories are equal, or were not compared, and they want to do different things. The same on every rank.
    #[error(
        "communicator \"{communicator}\": {difference}: configure the registrars alike, attach the same pools, and sync at \
         the same points of the program on every rank"
    )]
    PlansDiffer {
        /// The communicator.
        communicator: String,
        /// What differs, and on which ranks.
        difference: Box<PlanDifference>,
    },
    /// Offsets or sizes differ between ranks in one collective call, which has not been made. The same on every rank.
    #[error("communicator \"{communicator}\": {difference}")]
    OffsetsDiffer {
        /// The communicator.
        communicator: String,
        /// What differs, and on which ranks.
        difference: Box<OffsetDifference>,
    },
    /// The windows would not fit into the communicator's symmetric address space. The same on every rank.
    #[error(
        "communicator \"{communicator}\": a window of {needed_bytes} bytes finds no place in its symmetric address space ({used_bytes} \
         of {budget_bytes} bytes are taken): attach fewer or smaller pools, trim before the sync, or set NCCL_WIN_STRIDE to \
         more bytes on every rank"
    )]
    SymmetricSpace {
        /// The communicator.
        communicator: String,
        /// Bytes of the window that finds no place.
        needed_bytes: u64,
        /// Bytes that are taken, by other windows and by NCCL itself.
        used_bytes: u64,
        /// Bytes that there are.
        budget_bytes: u64,
    },
    /// The ranks could not hear each other: one died, is stuck, or does not sync here.
    #[error("communicator \"{communicator}\": {error}; it is ended, connect a new one")]
    Transport {
        /// The communicator.
        communicator: String,
        /// Why.
        error: TransportError,
    },
    /// What a rank said means nothing.
    #[error("communicator \"{communicator}\": {error}")]
    Protocol {
        /// The communicator.
        communicator: String,
        /// Why.
        error: ProtocolError,
    },
    /// NCCL failed, or something took longer than the communicator's deadline.
    #[error("communicator \"{communicator}\": {error}")]
    Communicator {
        /// The communicator.
        communicator: String,
        /// What it said.
        error: CommError,
    },
    /// The driver failed while work on the device was waited for.
    #[error("communicator \"{communicator}\": {error}")]
    Cuda {
        /// The communicator.
        communicator: String,
        /// What it said.
        error: CudaError,
    },
    /// A graph is being captured: NCCL registers nothing then, and the ranks' talk would become part of the graph.
    #[error(
        "a graph is being captured: sync before the capture begins, after reserving (core().reserve) what will be allocated in it"
    )]
    Capturing,
    /// No pool was attached to this communicator, or not this one.
    #[error("{} not attached to communicator \"{communicator}\": call attach on every rank", .pool.map_or_else(|| "nothing is".to_owned(), |pool| format!("{pool} is")))]
    NotAttached {
        /// The communicator.
        communicator: String,
        /// The pool, if it is about one.
        pool: Option<PoolId>,
    },
    /// The communicator was destroyed, aborted or lost: its windows are gone and its segments let go.
    #[error(
        "communicator \"{communicator}\" is {state}{}, its windows are gone: connect a new one, attach the pools to it, and sync",
        .cause.as_ref().map_or_else(String::new, |cause| format!(" because of this: {cause}"))
    )]
    Gone {
        /// The communicator.
        communicator: String,
        /// What became of it.
        state: CommState,
        /// The error that ended it, if one did.
        cause: Option<Arc<CommError>>,
    },
}

/// Why there is no window or key for a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LookupError {
    /// The buffer is not of the registrar's allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// No live segment of the allocator is at this address.
    #[error("no segment of the allocator is at {address:#x}: it was freed, or is other memory")]
    UnknownAddress {
        /// The address.
        address: u64,
    },
    /// A buffer without bytes lies in no segment.
    #[error("the buffer has no bytes, so it lies in no segment")]
    Empty,
    /// No pool was attached to this communicator.
    #[error("nothing is attached to communicator \"{communicator}\": call attach on every rank, then sync")]
    NotAttached {
        /// The communicator.
        communicator: String,
    },
    /// The segment, or the part of it that the buffer lies in, has no window yet.
    #[error(
        "{segment} has no window over the buffer on communicator \"{communicator}\": attach its pool and call sync on every \
         rank after allocating"
    )]
    NotRegistered {
        /// The segment.
        segment: SegmentKey,
        /// The communicator.
        communicator: String,
    },
    /// As [`NotRegistered`](LookupError::NotRegistered), while a graph is being captured.
    #[error(
        "{segment} has no window over the buffer on communicator \"{communicator}\", and none can be made while a graph is \
         captured: reserve (core().reserve) and sync before the capture begins"
    )]
    Capturing {
        /// The segment.
        segment: SegmentKey,
        /// The communicator.
        communicator: String,
    },
    /// Its pool sleeps, and has no windows until it wakes.
    #[error("{segment} sleeps, so it has no window on communicator \"{communicator}\": wake its pool on every rank")]
    Asleep {
        /// The segment.
        segment: SegmentKey,
        /// The communicator.
        communicator: String,
    },
    /// The segment is registered, but not as a window: the ranks cannot reach each other's memory, or it was attached with
    /// [`Registration::Buffers`](crate::Registration::Buffers).
    #[error(
        "{segment} is registered on communicator \"{communicator}\" for this rank alone: there is no window to address peers by"
    )]
    Plain {
        /// The segment.
        segment: SegmentKey,
        /// The communicator.
        communicator: String,
    },
}

impl SyncError {
    /// Whether the communicator ends with it.
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
