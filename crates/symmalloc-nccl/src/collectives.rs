//! Collectives over anything that cudarc takes a device pointer from: buffers of this library, their views, `CudaSlice`.
//!
//! All ranks of a communicator call the same collectives in the same order. Each returns when the work is in the stream; uses of
//! a [`DeviceBuffer`](symmalloc_cuda::DeviceBuffer) by other streams are waited for on the device, as everywhere. Lengths are
//! checked on this rank. That the ranks agree on them is not: use the agreement.
//!
//! What only moves elements (gather, broadcast, send) can be used for any type as its bytes.

use crate::communicator::operation::{Kind, Operation};
use crate::communicator::{Communicator, submit};
use crate::data_type::{NcclType, ReduceOp};
use crate::error::CommError;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::ffi::c_int;
use std::sync::Arc;

impl Communicator {
    /// Reduces the elements of all ranks; all get the result. Both buffers have the same length, on all ranks.
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn all_reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let count = self.check_length("ncclAllReduce", stream, ("receive", receive.len()), send.len())?;
        self.submit_pair::<T, _, _>(Kind::AllReduce { op: op.raw() }, count, send, receive, stream)
    }

    /// As [`all_reduce`](Self::all_reduce), with the result in place.
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn all_reduce_in_place<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let count = self.check_length("ncclAllReduce", stream, ("only", buffer.len()), buffer.len())?;
        self.submit_in_place::<T, _>(Kind::AllReduce { op: op.raw() }, count, buffer, stream)
    }

    /// Puts the elements of all ranks end to end, in rank order; all get them. `receive` is `ranks` times as long as `send`.
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn all_gather<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let all = send.len().saturating_mul(self.ranks() as usize);
        self.check_length("ncclAllGather", stream, ("receive", receive.len()), all)?;
        self.submit_pair::<T, _, _>(Kind::AllGather, send.len(), send, receive, stream)
    }

    /// Reduces the elements of all ranks; rank i gets the i-th part. `send` is `ranks` times as long as `receive`.
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn reduce_scatter<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let all = receive.len().saturating_mul(self.ranks() as usize);
        self.check_length("ncclReduceScatter", stream, ("send", send.len()), all)?;
        self.submit_pair::<T, _, _>(Kind::ReduceScatter { op: op.raw() }, receive.len(), send, receive, stream)
    }

    /// Gives the root's elements to all ranks, in place. All buffers have the same length.
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn broadcast<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        root: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let root = self.check_rank(root)?;
        let count = self.check_length("ncclBroadcast", stream, ("only", buffer.len()), buffer.len())?;
        self.submit_in_place::<T, _>(Kind::Broadcast { root }, count, buffer, stream)
    }

    /// Reduces the elements of all ranks; the root gets the result. Both buffers have the same length, on all ranks; the
    /// others' `receive` is left as it is.
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        root: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let (op, root) = (op.raw(), self.check_rank(root)?);
        let count = self.check_length("ncclReduce", stream, ("receive", receive.len()), send.len())?;
        self.submit_pair::<T, _, _>(Kind::Reduce { op, root }, count, send, receive, stream)
    }

    /// Sends to a rank, which receives as many elements. To send and receive at once, use a [`Group`](crate::Group).
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn send<T: NcclType, S: DevicePtr<T> + ?Sized>(
        &self,
        buffer: &S,
        peer: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let mut group = crate::Group::new();
        group.send::<T, _>(self, buffer, peer, stream)?;
        group.submit()
    }

    /// Receives from a rank, which sends as many elements. To send and receive at once, use a [`Group`](crate::Group).
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn receive<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        peer: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let mut group = crate::Group::new();
        group.receive::<T, _>(self, buffer, peer, stream)?;
        group.submit()
    }

    fn submit_pair<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        kind: Kind,
        count: usize,
        send: &S,
        receive: &mut R,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let (send, _read) = send.device_ptr(stream);
        let (receive, _written) = receive.device_ptr_mut(stream);
        let operation = Operation { kind, send, receive, count, data_type: T::DATA_TYPE, stream: stream.cu_stream() };
        // SAFETY: the lengths were checked; the guards outlive the call and order later uses of the memory behind it.
        unsafe { submit(&[(self, operation)]) }
    }

    fn submit_in_place<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        kind: Kind,
        count: usize,
        buffer: &mut R,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let (address, _written) = buffer.device_ptr_mut(stream);
        let (data_type, stream) = (T::DATA_TYPE, stream.cu_stream());
        let operation = Operation { kind, send: address, receive: address, count, data_type, stream };
        // SAFETY: as above.
        unsafe { submit(&[(self, operation)]) }
    }

    /// Refuses a stream of another device and a buffer of the wrong length; gives the length.
    fn check_length(
        &self,
        collective: &'static str,
        stream: &CudaStream,
        (role, actual): (&'static str, usize),
        expected: usize,
    ) -> Result<usize, CommError> {
        self.check_stream(stream)?;
        if actual != expected {
            return Err(CommError::Length { collective, role, actual, expected });
        }
        Ok(actual)
    }

    pub(crate) fn check_stream(&self, stream: &CudaStream) -> Result<(), CommError> {
        if stream.context().cu_ctx() == self.device().context().cu_ctx() {
            return Ok(());
        }
        Err(CommError::ForeignStream { name: Arc::from(self.name()) })
    }

    pub(crate) fn check_rank(&self, rank: u32) -> Result<c_int, CommError> {
        if rank < self.ranks() {
            return Ok(rank as c_int);
        }
        Err(CommError::NoSuchRank { rank, ranks: self.ranks() })
    }
}
