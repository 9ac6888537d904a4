//! Collectives over anything that cudarc takes a device pointer from.
//!
//! All ranks of a communicator call the same collectives in the same order. Each returns when the work is in the stream.

use crate::communicator::Communicator;
use crate::data_type::{NcclType, ReduceOp};
use crate::error::CommError;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

impl Communicator {
    /// Reduces the elements of all ranks; all get the result. Both buffers have the same length, on all ranks.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn all_reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (send, receive, op, stream);
        todo!()
    }

    /// As [`all_reduce`](Self::all_reduce), with the result in place.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn all_reduce_in_place<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (buffer, op, stream);
        todo!()
    }

    /// Puts the elements of all ranks end to end, in rank order; all get them. `receive` is `ranks` times as long as `send`.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn all_gather<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (send, receive, stream);
        todo!()
    }

    /// Reduces the elements of all ranks; rank i gets the i-th part. `send` is `ranks` times as long as `receive`.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn reduce_scatter<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (send, receive, op, stream);
        todo!()
    }

    /// Gives the root's elements to all ranks, in place.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn broadcast<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        root: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (buffer, root, stream);
        todo!()
    }

    /// Reduces the elements of all ranks; the root gets the result. The others' `receive` is left as it is.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        root: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (send, receive, op, root, stream);
        todo!()
    }

    /// Sends to a rank, which receives as many elements. To send and receive at once, use a [`Group`](crate::Group).
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn send<T: NcclType, S: DevicePtr<T> + ?Sized>(
        &self,
        buffer: &S,
        peer: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (buffer, peer, stream);
        todo!()
    }

    /// Receives from a rank, which sends as many elements.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn receive<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        peer: u32,
        stream: &CudaStream,
    ) -> Result<(), CommError> {
        let _ = (buffer, peer, stream);
        todo!()
    }
}
