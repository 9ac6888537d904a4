//! Submission of collectives to streams: their buffers, and groups of them.
//!
//! NCCL's own groups are thread-local state, and they take pointers long before the work is in the stream. In contrast, a [`Group`] is a
//! value that borrows the buffers until it is submitted. If a group is dropped without being submitted, NCCL is never called.

use crate::communicator::Communicator;
use crate::communicator::call::{CallThread, perform};
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::shapes::ConnectionShape;
use crate::communicator::shared::{Access, Mode};
use crate::ffi::handles::{CommHandle, StreamHandle};
use crate::ffi::operation::{DataType, NcclCall, NcclType, Operation, ReduceOp};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use symmalloc_watchdog::{EntryNumber, Tick};

/// A collective with its communicator and its stream.
pub(crate) type Submission<'a> = (&'a Communicator, Operation, &'a Arc<CudaStream>);

/// Submits collectives to NCCL: a single one directly, several as a group. Returns when they are in their streams. The guards of their
/// buffers must live until then. If `is_noted` is set, each collective is recorded for the watchdog; otherwise the caller announces them as
/// a whole.
pub(crate) fn submit(operations: &[Submission<'_>], is_noted: bool) -> Result<(), CommError> {
    let mut accesses = access_all(operations)?;
    let mut issues: SmallVec<[(CommHandle, Operation); 2]> = SmallVec::with_capacity(operations.len());
    let mut has_run = true;
    for (comm, operation, _) in operations {
        let access = find(&mut accesses, comm);
        has_run &= access.inner.shapes.contains(ConnectionShape::of(operation));
        issues.push((access.comm, *operation));
    }
    let Some(first) = accesses.first() else { return Ok(()) };
    let route =
        if has_run { CallThread::Current } else { CallThread::when_blocking(first.shared.mode, CallThread::Separate) };
    let entries = if is_noted { begin(operations) } else { Entries::new() };
    let issued = perform(&mut accesses, Stage::Submit, route, &None, move |calls| calls.issue(&issues));
    note(operations, &entries, issued.is_ok());
    issued?;
    if !has_run {
        for (comm, operation, _) in operations {
            find(&mut accesses, comm).inner.shapes.insert(ConnectionShape::of(operation));
        }
    }
    Ok(())
}

/// Entries of the operations in the flight records of their communicators.
type Entries = SmallVec<[EntryNumber; 2]>;

fn begin(operations: &[Submission<'_>]) -> Entries {
    let now = Tick::now();
    let entry = |(comm, operation, stream): &Submission<'_>| comm.watched().begin(operation, stream, now);
    operations.iter().map(entry).collect()
}

fn note(operations: &[Submission<'_>], entries: &Entries, is_issued: bool) {
    if is_issued {
        for ((comm, _, stream), entry) in operations.iter().zip(entries) {
            comm.note_submitted(*entry, stream);
        }
        return;
    }
    // Undo the newest first, because only the newest collective can give its number back.
    for ((comm, ..), entry) in operations.iter().zip(entries.iter()).rev() {
        if comm.state() == CommState::Ready {
            // The call was rejected.
            comm.watched().flight().rejected(*entry, Tick::now());
        } else {
            comm.watched().flight().call_failed(*entry, Tick::now());
        }
    }
}

/// Acquires access to every communicator once, in an order that is the same for all threads.
fn access_all<'a>(operations: &[Submission<'a>]) -> Result<SmallVec<[Access<'a>; 1]>, CommError> {
    let mut comms: SmallVec<[&Communicator; 1]> = operations.iter().map(|(comm, ..)| *comm).collect();
    comms.sort_unstable_by_key(|comm| comm.serial());
    comms.dedup_by_key(|comm| comm.serial());
    let name_of = |mode| comms.iter().find(|comm| comm.shared.mode == mode).map(|comm| Arc::clone(&comm.shared.name));
    if let (Some(blocking), Some(nonblocking)) = (name_of(Mode::Blocking), name_of(Mode::Nonblocking)) {
        return Err(CommError::MixedGroup { blocking, nonblocking });
    }
    comms.into_iter().map(|comm| comm.shared.access_active()).collect()
}

fn find<'a, 'b>(accesses: &'b mut [Access<'a>], comm: &Communicator) -> &'b mut Access<'a> {
    let place = accesses.iter().position(|access| access.shared.serial == comm.serial());
    &mut accesses[place.expect("every communicator was accessed")]
}

/// Elements in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elements {
    pub(crate) address: u64,
    pub(crate) count: usize,
}

/// The memory that a collective reads and writes. Once this value is dropped, later uses of the memory wait for the stream.
pub(crate) struct Buffers<'a> {
    pub(crate) send: Elements,
    pub(crate) receive: Elements,
    pub(crate) data_type: DataType,
    stream: &'a Arc<CudaStream>,
    uses: Uses<'a>,
}

/// Guards that make later uses of buffers wait for the stream.
pub(crate) type Uses<'a> = SmallVec<[SyncOnDrop<'a>; 2]>;

impl<'a> Buffers<'a> {
    /// Creates the buffers of a call that reads `send` and writes another buffer.
    pub(crate) fn pair<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        comm: &Communicator,
        send: &'a S,
        receive: &'a mut R,
        stream: &'a Arc<CudaStream>,
    ) -> Result<Self, CommError> {
        let mut buffers = Self::read(comm, send, stream)?;
        let written = Self::written(comm, receive, stream)?;
        buffers.receive = written.receive;
        buffers.uses.extend(written.uses);
        Ok(buffers)
    }

    /// Creates the buffers of a call that only reads.
    pub(crate) fn read<T: NcclType, S: DevicePtr<T> + ?Sized>(
        comm: &Communicator,
        buffer: &'a S,
        stream: &'a Arc<CudaStream>,
    ) -> Result<Self, CommError> {
        comm.check_stream(stream)?;
        let (address, guard) = buffer.device_ptr(stream);
        let elements = Elements { address, count: buffer.len() };
        Ok(Self::new(elements, elements, T::DATA_TYPE, stream, smallvec::smallvec![guard]))
    }

    /// Creates the buffers of a call that writes one buffer, or updates it in place.
    pub(crate) fn written<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        comm: &Communicator,
        buffer: &'a mut R,
        stream: &'a Arc<CudaStream>,
    ) -> Result<Self, CommError> {
        comm.check_stream(stream)?;
        let count = buffer.len();
        let (address, guard) = buffer.device_ptr_mut(stream);
        let elements = Elements { address, count };
        Ok(Self::new(elements, elements, T::DATA_TYPE, stream, smallvec::smallvec![guard]))
    }

    /// Creates buffers from addresses. The caller must ensure that the memory belongs to the communicator's device and remains valid and in
    /// use on the stream until the collective has completed.
    pub(crate) fn raw(
        comm: &Communicator,
        send: Elements,
        receive: Elements,
        data_type: DataType,
        stream: &'a Arc<CudaStream>,
    ) -> Result<Self, CommError> {
        comm.check_stream(stream)?;
        Ok(Self::new(send, receive, data_type, stream, Uses::new()))
    }

    fn new(
        send: Elements,
        receive: Elements,
        data_type: DataType,
        stream: &'a Arc<CudaStream>,
        uses: Uses<'a>,
    ) -> Self {
        Buffers { send, receive, data_type, stream, uses }
    }

    /// Checks the lengths, and returns the operation on these buffers, its stream, and the guards that must outlive the submission.
    pub(crate) fn operation(
        self,
        call: NcclCall,
        ranks: u32,
    ) -> Result<(Operation, &'a Arc<CudaStream>, Uses<'a>), CommError> {
        if let Some(rank) = call.named_rank().filter(|rank| *rank >= ranks) {
            return Err(CommError::NoSuchRank { rank, ranks });
        }
        let (sent, received) = (self.send.count, self.receive.count);
        let of_all = |count: usize| count.saturating_mul(ranks as usize);
        let (count, role, actual, expected) = match call {
            NcclCall::AllGather => (sent, "receive", received, of_all(sent)),
            NcclCall::ReduceScatter { .. } => (received, "send", sent, of_all(received)),
            _ => (sent, "receive", received, sent),
        };
        if actual != expected {
            return Err(CommError::Length { collective: call.symbol(), role, actual, expected });
        }
        let Buffers { send, receive, data_type, stream, uses } = self;
        let (send, receive) = (send.address, receive.address);
        let operation = Operation { call, send, receive, count, data_type, stream: StreamHandle::of(stream) };
        Ok((operation, stream, uses))
    }
}

/// Operations that are collected and then submitted to NCCL together: for example, sends and receives that depend on each other, or the
/// same collective on the communicators of several devices that one thread drives.
///
/// NCCL is not called before [`submit`](Self::submit). Dropping a group that was not submitted has no effect.
///
/// # Examples
/// ```no_run
/// # use cudarc::driver::CudaStream;
/// # use std::sync::Arc;
/// # use symmalloc_cuda::CudaAllocator;
/// use symmalloc_nccl::{CommError, Communicator, Group};
///
/// /// Sends this rank's part to the right neighbor, and receives that of the left one.
/// # fn shift(comm: &Communicator, allocator: &CudaAllocator, stream: &Arc<CudaStream>) -> Result<(), CommError> {
/// let mine = allocator.alloc_zeroed::<f32>(stream, 1 << 20)?;
/// let mut theirs = allocator.alloc_zeroed::<f32>(stream, 1 << 20)?;
/// let (rank, ranks) = (comm.rank(), comm.ranks());
/// let mut group = Group::new();
/// group.send(comm, &mine, (rank + 1) % ranks, stream)?;
/// group.receive(comm, &mut theirs, (rank + ranks - 1) % ranks, stream)?;
/// group.submit()
/// # }
/// ```
#[derive(Default)]
#[must_use = "a group does nothing until it is submitted"]
pub struct Group<'a> {
    operations: SmallVec<[Submission<'a>; 4]>,
    /// Guards that make later uses of the buffers wait for the group.
    uses: Uses<'a>,
}

impl<'a> Group<'a> {
    /// Creates an empty group.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a [`Communicator::send`].
    ///
    /// # Errors
    /// Returns an error if the peer does not exist or the stream belongs to another device. The group is then unchanged.
    pub fn send<T: NcclType, S: DevicePtr<T> + ?Sized>(
        &mut self,
        comm: &'a Communicator,
        buffer: &'a S,
        peer: u32,
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add(comm, NcclCall::Send { peer }, Buffers::read(comm, buffer, stream)?)
    }

    /// Adds a [`Communicator::receive`].
    ///
    /// # Errors
    /// Returns an error if the peer does not exist or the stream belongs to another device. The group is then unchanged.
    pub fn receive<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &mut self,
        comm: &'a Communicator,
        buffer: &'a mut R,
        peer: u32,
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add(comm, NcclCall::Receive { peer }, Buffers::written(comm, buffer, stream)?)
    }

    /// Adds a [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Returns an error if the lengths differ or the stream belongs to another device. The group is then unchanged.
    pub fn all_reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &mut self,
        comm: &'a Communicator,
        send: &'a S,
        receive: &'a mut R,
        op: ReduceOp,
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add(comm, NcclCall::AllReduce { op }, Buffers::pair(comm, send, receive, stream)?)
    }

    /// Adds a send of memory that is given by its address.
    ///
    /// # Safety
    /// The `count` elements at `address` must lie in memory of the communicator's device. The memory must stay allocated until the stream
    /// has completed the group. The work that writes the elements must precede the group on the stream, and no other work may write them
    /// before the group completes.
    ///
    /// # Errors
    /// Returns an error if the peer does not exist or the stream belongs to another device. The group is then unchanged.
    pub unsafe fn send_raw(
        &mut self,
        comm: &'a Communicator,
        address: u64,
        count: usize,
        data_type: DataType,
        peer: u32,
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add_raw(comm, NcclCall::Send { peer }, Elements { address, count }, data_type, stream)
    }

    /// Adds a receive into memory that is given by its address.
    ///
    /// # Safety
    /// Same as [`send_raw`](Self::send_raw). In addition, no other work may read or write the memory until the group completes.
    ///
    /// # Errors
    /// Returns an error if the peer does not exist or the stream belongs to another device. The group is then unchanged.
    pub unsafe fn receive_raw(
        &mut self,
        comm: &'a Communicator,
        address: u64,
        count: usize,
        data_type: DataType,
        peer: u32,
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add_raw(comm, NcclCall::Receive { peer }, Elements { address, count }, data_type, stream)
    }

    /// Submits all operations to NCCL. Returns when the work is in the streams. An empty group has no effect.
    ///
    /// # Errors
    /// See [`CommError`]. Either all operations are submitted or none. An error that ends a communicator ends all communicators of the
    /// group.
    pub fn submit(self) -> Result<(), CommError> {
        submit(&self.operations, true)
    }

    /// Like [`submit`](Self::submit), for a group that was announced to the watchdog as a whole.
    pub(crate) fn submit_announced(self) -> Result<(), CommError> {
        submit(&self.operations, false)
    }

    /// Adds a send or receive of memory that is given by its address. The caller must uphold the contract of [`send_raw`](Self::send_raw).
    pub(crate) fn add_raw(
        &mut self,
        comm: &'a Communicator,
        call: NcclCall,
        elements: Elements,
        data_type: DataType,
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add(comm, call, Buffers::raw(comm, elements, elements, data_type, stream)?)
    }

    fn add(&mut self, comm: &'a Communicator, call: NcclCall, buffers: Buffers<'a>) -> Result<&mut Self, CommError> {
        let (operation, stream, uses) = buffers.operation(call, comm.ranks())?;
        self.uses.extend(uses);
        self.operations.push((comm, operation, stream));
        Ok(self)
    }
}

impl fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("operations", &self.operations.len()).finish_non_exhaustive()
    }
}
