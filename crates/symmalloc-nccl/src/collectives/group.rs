//! Groups of collectives that are submitted together.
//!
//! NCCL's own groups are state of the calling thread, and they take pointers long before the work is in the stream. A [`Group`] is a value
//! that borrows the buffers until it is submitted. If it is dropped without being submitted, NCCL is never called.

use crate::collectives::data_type::{DataType, NcclType, ReduceOp};
use crate::communicator::Communicator;
use crate::communicator::buffers::{Buffers, Elements, Uses};
use crate::communicator::error::CommError;
use crate::communicator::operation::NcclCall;
use crate::communicator::submit::{Submission, submit};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

/// Collectives that are collected and then submitted to NCCL at once: sends and receives that depend on each other, or the same collective
/// on communicators of several devices that one thread drives.
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
    /// The `count` elements at `address` must be memory of the communicator's device until the stream has completed the group. The work
    /// that wrote them must precede the group on the stream, and nothing else may write them until the group completes.
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
    /// Same as [`send_raw`](Self::send_raw). In addition, nothing else may read or write the memory until the group completes.
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
