//! Several collectives as one.
//!
//! NCCL's own groups are a state of the calling thread, in which pointers are taken long before the work is in the stream. Here a
//! group is a value: it borrows the buffers until it is submitted, and an abandoned one has called nothing.

use crate::communicator::operation::{Kind, Operation};
use crate::communicator::{Communicator, submit};
use crate::data_type::{DataType, NcclType, ReduceOp};
use crate::error::CommError;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use smallvec::SmallVec;
use std::fmt;

/// Collectives that are collected and then given to NCCL at once: sends and receives that need each other, or the same
/// collective on communicators of several devices that one thread drives.
///
/// Nothing is called before [`submit`](Self::submit). Dropped without it, nothing happened.
///
/// # Examples
/// ```no_run
/// # use cudarc::driver::CudaStream;
/// # use std::sync::Arc;
/// # use symmalloc_cuda::CudaAllocator;
/// use symmalloc_nccl::{CommError, Communicator, Group};
///
/// /// Everybody's part to the right, and the left one's in.
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
#[must_use = "nothing is called before submit"]
pub struct Group<'a> {
    operations: SmallVec<[(&'a Communicator, Operation); 4]>,
    /// Order later uses of the buffers behind the group, when they are dropped.
    guards: SmallVec<[SyncOnDrop<'a>; 4]>,
}

impl<'a> Group<'a> {
    /// An empty group.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a [`Communicator::send`].
    ///
    /// # Errors
    /// When the peer does not exist or the stream is of another device. The group is as it was then.
    pub fn send<T: NcclType, S: DevicePtr<T> + ?Sized>(
        &mut self,
        comm: &'a Communicator,
        buffer: &'a S,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let kind = Kind::Send { peer: comm.check_rank(peer)? };
        comm.check_stream(stream)?;
        let count = buffer.len();
        let (address, guard) = buffer.device_ptr(stream);
        self.guards.push(guard);
        self.push(comm, kind, (address, 0), count, T::DATA_TYPE, stream);
        Ok(self)
    }

    /// Adds a [`Communicator::receive`].
    ///
    /// # Errors
    /// When the peer does not exist or the stream is of another device. The group is as it was then.
    pub fn receive<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &mut self,
        comm: &'a Communicator,
        buffer: &'a mut R,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let kind = Kind::Receive { peer: comm.check_rank(peer)? };
        comm.check_stream(stream)?;
        let count = buffer.len();
        let (address, guard) = buffer.device_ptr_mut(stream);
        self.guards.push(guard);
        self.push(comm, kind, (0, address), count, T::DATA_TYPE, stream);
        Ok(self)
    }

    /// Adds a [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// When the lengths differ or the stream is of another device. The group is as it was then.
    pub fn all_reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &mut self,
        comm: &'a Communicator,
        send: &'a S,
        receive: &'a mut R,
        op: ReduceOp,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        comm.check_stream(stream)?;
        let (actual, expected) = (receive.len(), send.len());
        if actual != expected {
            return Err(CommError::Length { collective: "ncclAllReduce", role: "receive", actual, expected });
        }
        let (from, read) = send.device_ptr(stream);
        let (to, written) = receive.device_ptr_mut(stream);
        self.guards.extend([read, written]);
        self.push(comm, Kind::AllReduce { op: op.raw() }, (from, to), expected, T::DATA_TYPE, stream);
        Ok(self)
    }

    /// Adds a send of memory that is known by its address.
    ///
    /// # Safety
    /// `count` elements at `address` are memory of the communicator's device until the stream is past the group; what wrote
    /// them is before it on the stream, and nothing else writes them until then.
    ///
    /// # Errors
    /// When the peer does not exist or the stream is of another device. The group is as it was then.
    pub unsafe fn send_raw(
        &mut self,
        comm: &'a Communicator,
        address: u64,
        count: usize,
        data_type: DataType,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let kind = Kind::Send { peer: comm.check_rank(peer)? };
        comm.check_stream(stream)?;
        self.push(comm, kind, (address, 0), count, data_type, stream);
        Ok(self)
    }

    /// Adds a receive into memory that is known by its address.
    ///
    /// # Safety
    /// As [`send_raw`](Self::send_raw), and nothing else reads or writes it until then.
    ///
    /// # Errors
    /// When the peer does not exist or the stream is of another device. The group is as it was then.
    pub unsafe fn receive_raw(
        &mut self,
        comm: &'a Communicator,
        address: u64,
        count: usize,
        data_type: DataType,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let kind = Kind::Receive { peer: comm.check_rank(peer)? };
        comm.check_stream(stream)?;
        self.push(comm, kind, (0, address), count, data_type, stream);
        Ok(self)
    }

    /// Gives all of it to NCCL. Returns when the work is in the streams. An empty group is nothing.
    ///
    /// # Errors
    /// See [`CommError`]. Either all of it is submitted or nothing; where an error ends a communicator, it ends all of the
    /// group's.
    pub fn submit(self) -> Result<(), CommError> {
        // SAFETY: lengths are those of the buffers, which are borrowed; the guards outlive the call and order later uses of the
        // memory behind it. For raw addresses, whoever added them promised as much.
        unsafe { submit(&self.operations) }
    }

    fn push(
        &mut self,
        comm: &'a Communicator,
        kind: Kind,
        (send, receive): (u64, u64),
        count: usize,
        data_type: DataType,
        stream: &CudaStream,
    ) {
        let stream = stream.cu_stream();
        self.operations.push((comm, Operation { kind, send, receive, count, data_type, stream }));
    }
}

impl fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("operations", &self.operations.len()).finish_non_exhaustive()
    }
}
