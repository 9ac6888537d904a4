//! All-to-all-v: every rank sends any number of rows to every other rank.
//!
//! ```text
//!            rank 0              rank 1              rank 2
//!  input   │a a│b b b│c│      │d│e│f f f f│      │g g│h│i i│       parts by receiver: the input's splits
//!  output  │a a│d│g g│        │b b b│e│h│        │c│f f f f│i i│   parts by sender: the output's splits
//! ```
//! The operation is PyTorch's `all_to_all_single`. A part can have any number of rows, including none. If no splits are given, all parts
//! are equal. Elements can have any type, because they are only moved. Unlike in PyTorch, a buffer can be longer than its rows: the rest of
//! the buffer is not touched, so one buffer serves steps of different sizes.
//!
//! A call consists of one NCCL group of sends and receives, and a copy on the device for the part that a rank keeps. A call does not
//! allocate device memory, register memory or block the host, so it can be captured in a graph.
//!
//! # The program decides when to exchange splits
//! A rank alone cannot know whether another rank's splits changed. The functions therefore never decide whether to exchange them:
//! [`AllToAll::exchange_splits`] always exchanges splits, and [`AllToAll::run`] never does. The program keeps a [`Splits`] value and reuses
//! it as long as the splits do not change. As for any collective, every rank must call the same functions in the same order. A program that
//! already knows its input and output splits, or reuses earlier splits, does not need an exchange.
//!
//! There is no call that exchanges splits "if they changed". Every rank would have to exchange a message to learn whether another rank's
//! splits changed. Gathering even a single byte from all ranks requires the same wait as gathering all row counts, which are eight bytes
//! per pair of ranks. If ranks with unchanged counts skipped the wait, the ranks with changed counts would block indefinitely.
//!
//! # State
//! If calls require registered memory, the segments that are known to be registered are cached by their [`SegmentKey`](crate::SegmentKey).
//! The key does not depend on the sizes of tensors and splits. A key is dropped only when the registrar reports it as invalid. The cache
//! holds lookup results and no resources, so dropping an entry never affects work in flight. The registrar owns memory and windows, and
//! waits for work in flight before it releases them. The exchange has one staging buffer in pinned memory, which is created once and not
//! written while a copy of it is in progress.

mod error;
mod message;
mod registered;
pub(crate) mod splits;
mod transfers;

pub use error::AllToAllError;

use crate::all_to_all::message::Messages;
use crate::all_to_all::registered::RegisteredSegments;
use crate::all_to_all::splits::{Side, Split, Splits};
use crate::all_to_all::transfers::{CallShape, Region, Transfers};
use crate::collectives::transport::NcclTransport;
use crate::communicator::Communicator;
use crate::communicator::error::CommError;
use crate::communicator::submission::{Elements, Group, Uses};
use crate::ffi::driver;
use crate::ffi::operation::{DataType, NcclCall};
use crate::registrar::Registrar;
use crate::windows::keys::SegmentKey;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use std::fmt;
use std::sync::Arc;
use symmalloc_agreement::Transport;
use symmalloc_cuda::DriverError;

/// An exchange of rows among the ranks of a communicator: PyTorch's `all_to_all_single`, with splits that are exchanged only on request.
/// Threads can share an instance if all ranks make the calls in the same order.
///
/// A rank alone cannot know whether another rank's splits changed, so the program decides when to exchange them:
/// [`exchange_splits`](Self::exchange_splits) always exchanges them, and [`run`](Self::run) never does. A program that already knows its
/// input and output splits, or reuses earlier splits, does not need an exchange.
///
/// # Examples
/// ```no_run
/// use cudarc::driver::CudaStream;
/// use std::{error::Error, sync::Arc};
/// use symmalloc_cuda::{CudaAllocator, DeviceBuffer};
/// use symmalloc_nccl::AllToAll;
///
/// /// Sends tokens to the ranks of their experts, and back.
/// fn layer(
///     all_to_all: &AllToAll,
///     allocator: &CudaAllocator,
///     stream: &Arc<CudaStream>,
///     tokens: &DeviceBuffer<f32>,
///     rows_by_rank: &[u64],
///     hidden: usize,
/// ) -> Result<DeviceBuffer<f32>, Box<dyn Error>> {
///     let splits = all_to_all.exchange_splits(rows_by_rank)?;
///     // The same size on every rank, as symmetric memory requires.
///     let rows_max = splits.output_rows_max().expect("they were exchanged") as usize;
///     let mut received = allocator.alloc_zeroed(stream, rows_max * hidden)?;
///     all_to_all.run(stream, tokens, &mut received, hidden, &splits)?;
///     // ... the experts change what was received ...
///     let mut combined = allocator.alloc_zeroed(stream, tokens.len())?;
///     all_to_all.run(stream, &received, &mut combined, hidden, &splits.reversed())?;
///     Ok(combined)
/// }
/// ```
///
/// # Errors
/// A call that fails before it submits work has no effect on its rank. Other ranks are not notified. As with any collective that one rank
/// omits, their streams wait for rows that never arrive, until [`Communicator::abort`]. With [checks](AllToAllBuilder::check_calls), all
/// ranks get an error and none submits anything.
pub struct AllToAll {
    comm: Communicator,
    messages: Messages,
    transport: NcclTransport,
    /// Registered segments, if calls require registered memory.
    registered: Option<RegisteredSegments>,
}

/// A builder of an [`AllToAll`]. All ranks must set the same options.
#[derive(Clone, Debug)]
#[must_use]
pub struct AllToAllBuilder {
    comm: Communicator,
    registrar: Option<Arc<Registrar>>,
    is_checked: bool,
}

/// A call that is ready to be submitted.
struct ReadyCall<'a> {
    transfers: Transfers<'a>,
    input: Region,
    output: Region,
    /// Guards of both buffers, held while the work is submitted.
    _uses: Uses<'a>,
}

impl AllToAllBuilder {
    /// Makes calls fail if this registrar has not registered their buffers on the communicator. Both kinds of registration count: windows,
    /// and buffers that each rank registers independently. By default, NCCL moves unregistered memory as well, through its own buffers.
    /// With NCCL 2.30.7, keep both buffers in windows, or neither: `torch.distributed.all_to_all_single`, which also sends and receives,
    /// never completes if only its input is in a window.
    pub fn require_registered(mut self, registrar: &Arc<Registrar>) -> Self {
        self.registrar = Some(Arc::clone(registrar));
        self
    }

    /// Compares the splits of all ranks before each [`run`](AllToAll::run). If ranks disagree, they get an error that states the numbers of
    /// rows, instead of hanging or receiving wrong rows. Use this for debugging: every call costs an exchange, for which the host blocks.
    /// Calls that are captured in a graph are not compared, so make the same calls once before the capture.
    pub fn check_calls(mut self) -> Self {
        self.is_checked = true;
        self
    }

    /// Creates the staging buffers of the exchange. Does not communicate.
    ///
    /// # Errors
    /// Returns an error if the communicator has ended or the staging buffers cannot be allocated.
    pub fn build(self) -> Result<AllToAll, CommError> {
        let AllToAllBuilder { comm, registrar, is_checked } = self;
        let registered = registrar.as_ref().map(RegisteredSegments::new);
        let messages = Messages { rank: comm.rank() as usize, ranks: comm.ranks() as usize, is_checked };
        Ok(AllToAll { transport: NcclTransport::new(&comm)?, messages, registered, comm })
    }
}

impl AllToAll {
    /// Creates an instance with the default options: any memory, no checks.
    ///
    /// # Errors
    /// See [`build`](AllToAllBuilder::build).
    pub fn new(comm: &Communicator) -> Result<Self, CommError> {
        Self::builder(comm).build()
    }

    /// Returns a builder for this communicator.
    pub fn builder(comm: &Communicator) -> AllToAllBuilder {
        AllToAllBuilder { comm: comm.clone(), registrar: None, is_checked: false }
    }

    /// Returns the communicator whose ranks exchange rows.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Returns the keys of the segments that calls have used so far, in ascending order of addresses. Empty unless registered memory is
    /// [required](AllToAllBuilder::require_registered).
    pub fn segments(&self) -> Vec<SegmentKey> {
        self.registered.as_ref().map(RegisteredSegments::keys).unwrap_or_default()
    }

    /// Exchanges the numbers of rows with all ranks, and returns the splits of both sides. `rows[i]` is the number of rows that this rank
    /// sends to rank i. All ranks must make this call when the splits of any rank have changed. The host blocks until the messages arrive.
    ///
    /// # Errors
    /// Returns an error if `rows` does not have one entry per rank, or if the sum of its entries overflows; all other ranks then get
    /// [`AllToAllError::Refused`]. Also returns an error if a capture is in progress, a rank misses the communicator's deadline, or NCCL
    /// fails.
    pub fn exchange_splits(&self, rows: &[u64]) -> Result<Splits, AllToAllError> {
        if self.comm.device().is_capturing() {
            return Err(AllToAllError::Capturing);
        }
        let Messages { ranks, .. } = self.messages;
        let sent = if rows.len() == ranks {
            Split::new(rows.iter().copied(), Side::Input).map_err(AllToAllError::from)
        } else {
            Err(AllToAllError::SplitCount { given: rows.len(), ranks })
        };
        let message = sent.as_ref().map_or_else(|_| self.messages.refusal(), |_| self.messages.exchange(rows));
        let gathered = self.transport.all_gather(&message)?;
        sent?;
        self.messages.read_exchange(&gathered)
    }

    /// Sends each part of the input to its rank, and receives the parts of all ranks into the output. A row is `row_elements` elements.
    /// `splits` is `&Splits`, or `None` to divide each buffer into equal parts. All ranks must make this call. Returns when the work is in
    /// the stream. The buffers can then be dropped.
    ///
    /// All ranks must use the same type of elements.
    ///
    /// # Errors
    /// Returns an error before anything is submitted if the splits are for a different number of ranks, or if the buffers are too short,
    /// overlap, belong to another context, or are not registered as required. With [checks](AllToAllBuilder::check_calls), returns an error
    /// if the ranks disagree. Also returns an error if NCCL or the driver fails.
    pub fn run<'s, T, I, O>(
        &self,
        stream: &Arc<CudaStream>,
        input: &I,
        output: &mut O,
        row_elements: usize,
        splits: impl Into<Option<&'s Splits>>,
    ) -> Result<(), AllToAllError>
    where
        T: DeviceRepr,
        I: DevicePtr<T>,
        O: DevicePtrMut<T>,
    {
        let call = self.prepare(stream, input, output, row_elements, splits.into());
        self.submit_checked(stream, call)
    }

    /// Exchanges rows like [`run`](Self::run), in memory that is given by address. A row is `row_bytes` bytes, and the lengths of both
    /// regions are in bytes.
    ///
    /// # Safety
    /// Both regions must lie in memory of the communicator's device that stays allocated until the stream has completed the call. Earlier
    /// writes to them must precede the call on the stream. Until the call completes, nothing else may write the input or access the output.
    ///
    /// # Errors
    /// See [`run`](Self::run).
    pub unsafe fn run_raw<'s>(
        &self,
        stream: &Arc<CudaStream>,
        (input, input_bytes): (u64, usize),
        (output, output_bytes): (u64, usize),
        row_bytes: usize,
        splits: impl Into<Option<&'s Splits>>,
    ) -> Result<(), AllToAllError> {
        let Messages { rank, ranks, .. } = self.messages;
        let shape =
            CallShape { input_len: input_bytes, output_len: output_bytes, element_bytes: 1, row_elements: row_bytes };
        let call = Transfers::new(rank, ranks, splits.into(), shape).and_then(|transfers| {
            self.comm.check_stream(stream)?;
            self.ready(transfers, input, output, Uses::new())
        });
        self.submit_checked(stream, call)
    }

    /// Submits the call. If calls are checked, first compares it with the calls of the other ranks.
    fn submit_checked(
        &self,
        stream: &Arc<CudaStream>,
        call: Result<ReadyCall<'_>, AllToAllError>,
    ) -> Result<(), AllToAllError> {
        if self.messages.is_checked && !self.is_captured(stream)? {
            let message =
                call.as_ref().map_or_else(|_| self.messages.refusal(), |call| self.messages.check(&call.transfers));
            let gathered = self.transport.all_gather(&message)?;
            let call = call?;
            self.messages.read_check(&gathered)?;
            return self.submit(stream, &call);
        }
        self.submit(stream, &call?)
    }

    /// Checks everything that can be checked without other ranks.
    fn prepare<'a, T, I, O>(
        &self,
        stream: &'a Arc<CudaStream>,
        input: &'a I,
        output: &'a mut O,
        row_elements: usize,
        splits: Option<&'a Splits>,
    ) -> Result<ReadyCall<'a>, AllToAllError>
    where
        T: DeviceRepr,
        I: DevicePtr<T>,
        O: DevicePtrMut<T>,
    {
        let Messages { rank, ranks, .. } = self.messages;
        let (input_len, output_len) = (input.len(), output.len());
        let shape = CallShape { input_len, output_len, element_bytes: size_of::<T>(), row_elements };
        let transfers = Transfers::new(rank, ranks, splits, shape)?;
        let context = self.comm.device().context();
        for (side, other) in [(Side::Input, input.stream().context()), (Side::Output, output.stream().context())] {
            if other.cu_ctx() != context.cu_ctx() {
                let (ordinal, expected) = (other.ordinal(), context.ordinal());
                return Err(AllToAllError::ContextMismatch { side, ordinal, expected });
            }
        }
        self.comm.check_stream(stream)?;
        let (input_address, reading) = input.device_ptr(stream);
        let (output_address, writing) = output.device_ptr_mut(stream);
        self.ready(transfers, input_address, output_address, smallvec::smallvec![reading, writing])
    }

    /// Checks the addresses, and returns the call on these addresses, ready to be submitted.
    fn ready<'a>(
        &self,
        transfers: Transfers<'a>,
        input: u64,
        output: u64,
        uses: Uses<'a>,
    ) -> Result<ReadyCall<'a>, AllToAllError> {
        let input = Region { address: input, size_bytes: transfers.input_bytes };
        let output = Region { address: output, size_bytes: transfers.output_bytes };
        if input.overlaps(&output) {
            return Err(AllToAllError::Overlap {
                input: input.address,
                input_bytes: input.size_bytes,
                output: output.address,
                output_bytes: output.size_bytes,
            });
        }
        if let Some(registered) = &self.registered {
            registered.check(&self.comm, Side::Input, input)?;
            registered.check(&self.comm, Side::Output, output)?;
        }
        Ok(ReadyCall { transfers, input, output, _uses: uses })
    }

    fn submit(&self, stream: &Arc<CudaStream>, call: &ReadyCall<'_>) -> Result<(), AllToAllError> {
        let Messages { rank, ranks, .. } = self.messages;
        let part = |side, peer| match side {
            Side::Input => call.transfers.part(side, call.input.address, peer),
            Side::Output => call.transfers.part(side, call.output.address, peer),
        };
        let mut group = Group::new();
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            let peer_rank = peer as u32;
            // The parts lie within the buffers, which are borrowed and in use on the stream as long as the call's guards are held.
            for (nccl_call, part) in [
                (NcclCall::Send { peer: peer_rank }, part(Side::Input, peer)),
                (NcclCall::Receive { peer: peer_rank }, part(Side::Output, peer)),
            ] {
                if let Some(Region { address, size_bytes }) = part {
                    let bytes = Elements { address, count: size_bytes as usize };
                    group.add_raw(&self.comm, nccl_call, bytes, DataType::Uint8, stream)?;
                }
            }
        }
        // The call counts as one collective of all ranks, even if some have no rows for each other.
        self.comm.announce("all_to_all", None, stream, || group.submit_announced())??;
        match (part(Side::Input, rank), part(Side::Output, rank)) {
            (Some(from), Some(to)) => self.copy(stream, from, to),
            _ => Ok(()),
        }
    }

    fn is_captured(&self, stream: &CudaStream) -> Result<bool, DriverError> {
        let _current = self.comm.device().enter()?;
        driver::is_captured(stream)
    }

    fn copy(&self, stream: &CudaStream, from: Region, to: Region) -> Result<(), AllToAllError> {
        let _current = self.comm.device().enter()?;
        Ok(driver::copy(stream, from.address, to.address, from.size_bytes)?)
    }
}

impl fmt::Debug for AllToAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllToAll")
            .field("comm", &self.comm)
            .field("is_checked", &self.messages.is_checked)
            .finish_non_exhaustive()
    }
}
