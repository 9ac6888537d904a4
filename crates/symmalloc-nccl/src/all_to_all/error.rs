//! Why an all-to-all-v was not made.

use crate::error::CommError;
use crate::registrar::error::LookupError;
use crate::splits::{Side, SplitsError};
use symmalloc_agreement::TransportError;
use symmalloc_cuda::DriverError;
use thiserror::Error;

/// Why rows were not exchanged, or not the splits. Unless it says otherwise, nothing was submitted on this rank; what the
/// others do then is said at [`AllToAll`](crate::AllToAll).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AllToAllError {
    /// The splits are for another number of ranks.
    #[error("splits for {given} ranks on a communicator of {ranks}: give every rank a part, 0 where there is nothing")]
    SplitCount {
        /// Parts given.
        given: usize,
        /// Ranks of the communicator.
        ranks: usize,
    },
    /// The numbers of rows do not make splits.
    #[error(transparent)]
    Splits(#[from] SplitsError),
    /// What a rank keeps for itself differs between its sides.
    #[error("rank {rank} sends itself {sent} rows and expects {received}: its own part must be equal on both sides")]
    OwnPart {
        /// This rank.
        rank: usize,
        /// Rows by the input's splits.
        sent: u64,
        /// Rows by the output's splits.
        received: u64,
    },
    /// A row has more bytes than can be addressed.
    #[error("a row of {row_elements} elements is larger than can be addressed")]
    RowTooLarge {
        /// Elements of a row.
        row_elements: usize,
    },
    /// A buffer has no room for its rows.
    #[error("the {side} has {len} elements, and its splits need {rows} rows of {row_elements}: give a longer buffer")]
    BufferTooShort {
        /// Which buffer.
        side: Side,
        /// Rows of all its parts.
        rows: u64,
        /// Elements of a row.
        row_elements: usize,
        /// Elements that it has.
        len: usize,
    },
    /// Without splits, the buffers must be as long as each other and have as many rows for every rank.
    #[error(
        "an input of {input_len} elements and an output of {output_len} do not split equally into rows of {row_elements} \
         for {ranks} ranks: give splits, or whole rows for every rank"
    )]
    Uneven {
        /// Elements of the input.
        input_len: usize,
        /// Elements of the output.
        output_len: usize,
        /// Ranks of the communicator.
        ranks: usize,
        /// Elements of a row.
        row_elements: usize,
    },
    /// The output would overwrite the input before it is sent.
    #[error(
        "input ({input_bytes} bytes at {input:#x}) and output ({output_bytes} bytes at {output:#x}) overlap: use two buffers"
    )]
    Overlap {
        /// The input's first byte.
        input: u64,
        /// Bytes of it that are sent.
        input_bytes: u64,
        /// The output's first byte.
        output: u64,
        /// Bytes of it that are written.
        output_bytes: u64,
    },
    /// A buffer belongs to another device or context than the communicator.
    #[error(
        "the {side} belongs to another context (device {ordinal}) than the communicator (device {expected}): use a buffer of \
         the communicator's CudaDevice"
    )]
    OtherContext {
        /// Which buffer.
        side: Side,
        /// Its device.
        ordinal: usize,
        /// The communicator's device.
        expected: usize,
    },
    /// Registered memory was demanded, and a buffer is not registered on this communicator.
    #[error("the {side} is not in registered memory: {error}")]
    NotRegistered {
        /// Which buffer.
        side: Side,
        /// What the registrar says.
        error: LookupError,
    },
    /// A rank could not take part. No rank submitted anything.
    #[error("rank {rank} could not take part: its own error says why. Nothing was sent on any rank")]
    Refused {
        /// The rank.
        rank: usize,
    },
    /// Ranks made different calls. No rank submitted anything.
    #[error("rank {rank} made another call on this communicator: all ranks must make the same calls in the same order")]
    DifferentCalls {
        /// The first rank that did.
        rank: usize,
    },
    /// A rank is about to send something else than its receiver expects; every rank is told. No rank submitted anything.
    #[error(
        "rank {from} sends {sent_rows} rows of {sent_row_bytes} bytes to rank {to}, which expects {expected_rows} of \
         {expected_row_bytes}: the splits changed on some ranks only, exchange them again. Nothing was sent on any rank"
    )]
    Disagreement {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Rows that the sender sends.
        sent_rows: u64,
        /// Bytes of the sender's rows.
        sent_row_bytes: u64,
        /// Rows that the receiver expects.
        expected_rows: u64,
        /// Bytes of the receiver's rows.
        expected_row_bytes: u64,
    },
    /// Splits cannot be exchanged while a graph is captured on the device: the host needs the answer.
    #[error(
        "splits cannot be exchanged while a graph is captured: exchange them before, and capture calls that use them"
    )]
    Capturing,
    /// The communicator or NCCL refused. If it happened while the rows were submitted, the communicator is lost.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The ranks could not hear each other.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The driver refused to copy this rank's own part; the others' parts are under way.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
