//! Several collectives as one.

use crate::communicator::Communicator;
use crate::data_type::{DataType, NcclType, ReduceOp};
use crate::error::CommError;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

/// Collectives that are collected and then given to NCCL at once: sends and receives that need each other, or the same collective
/// on communicators of several devices that one thread drives.
///
/// Nothing is called before [`submit`](Self::submit). Dropped without it, nothing happened.
pub struct Group<'a> {
    guards: Vec<SyncOnDrop<'a>>,
}

impl<'a> Group<'a> {
    /// An empty group.
    pub fn new() -> Self {
        Group { guards: vec![] }
    }

    /// Adds a [`Communicator::send`].
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn send<T: NcclType, S: DevicePtr<T> + ?Sized>(
        &mut self,
        comm: &Communicator,
        buffer: &'a S,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let _ = (comm, buffer, peer, stream);
        todo!()
    }

    /// Adds a [`Communicator::receive`].
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn receive<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &mut self,
        comm: &Communicator,
        buffer: &'a mut R,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let _ = (comm, buffer, peer, stream);
        todo!()
    }

    /// Adds a [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn all_reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &mut self,
        comm: &Communicator,
        send: &'a S,
        receive: &'a mut R,
        op: ReduceOp,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let _ = (comm, send, receive, op, stream);
        todo!()
    }

    /// Adds a send of memory that is known by its address.
    ///
    /// # Safety
    /// `count` elements at `address` are memory of the communicator's device until the stream is past the group, written
    /// before on the stream, and written by nothing until then.
    ///
    /// # Errors
    /// See [`CommError`].
    pub unsafe fn send_raw(
        &mut self,
        comm: &Communicator,
        address: u64,
        count: usize,
        data_type: DataType,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let _ = (comm, address, count, data_type, peer, stream);
        todo!()
    }

    /// Adds a receive into memory that is known by its address.
    ///
    /// # Safety
    /// As [`send_raw`](Self::send_raw), and nothing else reads or writes it until then.
    ///
    /// # Errors
    /// See [`CommError`].
    pub unsafe fn receive_raw(
        &mut self,
        comm: &Communicator,
        address: u64,
        count: usize,
        data_type: DataType,
        peer: u32,
        stream: &'a CudaStream,
    ) -> Result<&mut Self, CommError> {
        let _ = (comm, address, count, data_type, peer, stream);
        todo!()
    }

    /// Gives all of it to NCCL. Returns when the work is in the streams.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn submit(self) -> Result<(), CommError> {
        let _ = self.guards;
        todo!()
    }
}

impl Default for Group<'_> {
    fn default() -> Self {
        Self::new()
    }
}
