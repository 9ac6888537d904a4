//! Several collectives as one.
//!
//! NCCL's own groups are a state of the calling thread, in which pointers are taken long before the work is in the stream. Here a
//! group is a value: it borrows the buffers until it is submitted, and an abandoned one has called nothing.

use crate::communicator::buffers::{Buffers, Elements, Uses};
use crate::communicator::operation::NcclCall;
use crate::communicator::{Communicator, Submission, submit};
use crate::data_type::{DataType, NcclType, ReduceOp};
use crate::error::CommError;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

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
    operations: SmallVec<[Submission<'a>; 4]>,
    /// Order later uses of the buffers behind the group, when they are dropped.
    uses: Uses<'a>,
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
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add(comm, NcclCall::Send { peer }, Buffers::read(comm, buffer, stream)?)
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
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add(comm, NcclCall::Receive { peer }, Buffers::written(comm, buffer, stream)?)
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
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add(comm, NcclCall::AllReduce { op }, Buffers::pair(comm, send, receive, stream)?)
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
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add_raw(comm, NcclCall::Send { peer }, Elements { address, count }, data_type, stream)
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
        stream: &'a Arc<CudaStream>,
    ) -> Result<&mut Self, CommError> {
        self.add_raw(comm, NcclCall::Receive { peer }, Elements { address, count }, data_type, stream)
    }

    /// Gives all of it to NCCL. Returns when the work is in the streams. An empty group is nothing.
    ///
    /// # Errors
    /// See [`CommError`]. Either all of it is submitted or nothing; where an error ends a communicator, it ends all of the
    /// group's.
    pub fn submit(self) -> Result<(), CommError> {
        submit(&self.operations, true)
    }

    /// As [`submit`](Self::submit), of what was announced as a whole.
    pub(crate) fn submit_announced(self) -> Result<(), CommError> {
        submit(&self.operations, false)
    }

    /// Adds a send or receive of memory by its address, for which the caller vouches as [`send_raw`](Self::send_raw) says.
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
