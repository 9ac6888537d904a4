//! Errors of an all-to-all-v.

use crate::all_to_all::splits::{Side, SplitsError};
use crate::communicator::error::CommError;
use crate::sync::error::LookupError;
use symmalloc_agreement::TransportError;
use symmalloc_cuda::DriverError;
use thiserror::Error;

/// An error returned by an exchange of rows or splits. Unless noted otherwise, nothing was submitted on this rank.
/// [`AllToAll`](crate::AllToAll) describes the effect on other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AllToAllError {
    /// The splits are for a different number of ranks than the communicator has.
    #[error("splits for {given} ranks on a communicator of {ranks}: specify a part for every rank, possibly 0")]
    SplitCount {
        /// Number of given parts.
        given: usize,
        /// Number of ranks of the communicator.
        ranks: usize,
    },
    /// The numbers of rows are not valid splits.
    #[error(transparent)]
    Splits(#[from] SplitsError),
    /// The part that a rank sends to itself differs between the input's and the output's splits.
    #[error("rank {rank} sends itself {sent} rows and expects {received}: its own part must be equal on both sides")]
    OwnPart {
        /// This rank.
        rank: usize,
        /// Rows in the input's splits.
        sent: u64,
        /// Rows in the output's splits.
        received: u64,
    },
    /// The size of a row overflows.
    #[error("a row of {row_elements} elements exceeds the address space")]
    RowTooLarge {
        /// Elements per row.
        row_elements: usize,
    },
    /// A buffer is too short for its rows.
    #[error("the {side} has {len} elements, and its splits need {rows} rows of {row_elements}: pass a longer buffer")]
    BufferTooShort {
        /// The buffer: input or output.
        side: Side,
        /// Total number of rows in the buffer's parts.
        rows: u64,
        /// Elements per row.
        row_elements: usize,
        /// The buffer's length in elements.
        len: usize,
    },
    /// Without splits, both buffers must have the same length and the same number of rows for every rank.
    #[error(
        "an input of {input_len} elements and an output of {output_len} do not split equally into rows of {row_elements} \
         for {ranks} ranks: pass splits, or whole rows for every rank"
    )]
    Uneven {
        /// Elements of the input.
        input_len: usize,
        /// Elements of the output.
        output_len: usize,
        /// Number of ranks of the communicator.
        ranks: usize,
        /// Elements per row.
        row_elements: usize,
    },
    /// The buffers overlap, so the output would overwrite the input before it is sent.
    #[error(
        "input ({input_bytes} bytes at {input:#x}) and output ({output_bytes} bytes at {output:#x}) overlap: use two buffers"
    )]
    Overlap {
        /// Address of the input.
        input: u64,
        /// Number of bytes sent from the input.
        input_bytes: u64,
        /// Address of the output.
        output: u64,
        /// Number of bytes written to the output.
        output_bytes: u64,
    },
    /// A buffer and the communicator belong to different devices or contexts.
    #[error(
        "the {side} belongs to another context (device {ordinal}) than the communicator (device {expected}): use a buffer of \
         the communicator's CudaDevice"
    )]
    ContextMismatch {
        /// The buffer: input or output.
        side: Side,
        /// The buffer's device.
        ordinal: usize,
        /// The communicator's device.
        expected: usize,
    },
    /// Registered memory is required, but a buffer is not registered on this communicator.
    #[error("the {side} is not in registered memory: {error}")]
    NotRegistered {
        /// The buffer: input or output.
        side: Side,
        /// The registrar's error.
        error: LookupError,
    },
    /// A rank could not take part in the exchange. No rank submitted anything.
    #[error("rank {rank} could not take part: its own error states the reason. Nothing was sent on any rank")]
    Refused {
        /// The rank.
        rank: usize,
    },
    /// Ranks made different calls. No rank submitted anything.
    #[error("rank {rank} made another call on this communicator: all ranks must make the same calls in the same order")]
    DifferentCalls {
        /// The first rank whose call differs.
        rank: usize,
    },
    /// A rank runs a different version of this library. No rank submitted anything.
    #[error(
        "rank {rank} uses version {version} of the exchange of splits and this rank {expected}: run the same symmalloc version on every \
         rank"
    )]
    VersionMismatch {
        /// The rank.
        rank: usize,
        /// The version that the rank uses.
        version: u32,
        /// The version that this rank uses.
        expected: u32,
    },
    /// The rows that a rank is about to send differ from the rows that the receiver expects. All ranks get this error, and none submitted
    /// anything.
    #[error(
        "rank {from} sends {sent_rows} rows of {sent_row_bytes} bytes to rank {to}, which expects {expected_rows} of \
         {expected_row_bytes}: the splits changed on some ranks only, exchange them again. Nothing was sent on any rank"
    )]
    Disagreement {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Rows that the sender would send.
        sent_rows: u64,
        /// Bytes per row of the sender.
        sent_row_bytes: u64,
        /// Rows that the receiver expects.
        expected_rows: u64,
        /// Bytes per row of the receiver.
        expected_row_bytes: u64,
    },
    /// Splits cannot be exchanged while a graph is captured on the device, because the host waits for their result.
    #[error(
        "splits cannot be exchanged while a graph is captured: exchange them before, and capture calls that use them"
    )]
    Capturing,
    /// The communicator has ended, or an NCCL call failed. If the call failed while the rows were being submitted, the communicator is
    /// lost.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The exchange between the ranks failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The driver failed to copy this rank's own part. The other parts have been submitted.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
