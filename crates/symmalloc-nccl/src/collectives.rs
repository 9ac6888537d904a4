//! Collectives over any type from which cudarc obtains a device pointer: this library's buffers, their views, `CudaSlice`.
//!
//! All ranks of a communicator must call the same collectives in the same order. Each call returns when the work is in the stream. If other
//! streams used a [`DeviceBuffer`](symmalloc_cuda::DeviceBuffer), the stream first waits for these uses, as with every use of such a
//! buffer. Each rank checks the lengths of its own buffers. Use the agreement to check that lengths are equal on all ranks.
//!
//! Collectives that only move elements (gather, broadcast, send) support every element type, because they move bytes.

pub(crate) mod transport;

use crate::communicator::Communicator;
use crate::communicator::error::CommError;
use crate::communicator::submission::{Buffers, submit};
use crate::ffi::operation::{NcclCall, NcclType, ReduceOp};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::sync::Arc;

/// Defines the collectives of a type in terms of its method `collective`.
macro_rules! collectives {
    ($(#[$errors:meta])* impl $owner:ty, $error:ty) => {
        impl $owner {
            /// Reduces the elements of all ranks; all ranks receive the result. Both buffers must have the same length, on all ranks.
            ///
            $(#[$errors])*
            pub fn all_reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
                &self,
                send: &S,
                receive: &mut R,
                op: ReduceOp,
                stream: &Arc<CudaStream>,
            ) -> Result<(), $error> {
                self.collective(NcclCall::AllReduce { op }, |comm| Buffers::pair::<T, S, R>(comm, send, receive, stream))
            }

            /// Like [`all_reduce`](Self::all_reduce), in place.
            ///
            $(#[$errors])*
            pub fn all_reduce_in_place<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
                &self,
                buffer: &mut R,
                op: ReduceOp,
                stream: &Arc<CudaStream>,
            ) -> Result<(), $error> {
                self.collective(NcclCall::AllReduce { op }, |comm| Buffers::written::<T, R>(comm, buffer, stream))
            }

            /// Concatenates the elements of all ranks in rank order; all ranks receive them. `receive` must be `ranks` times as long as
            /// `send`.
            ///
            $(#[$errors])*
            pub fn all_gather<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
                &self,
                send: &S,
                receive: &mut R,
                stream: &Arc<CudaStream>,
            ) -> Result<(), $error> {
                self.collective(NcclCall::AllGather, |comm| Buffers::pair::<T, S, R>(comm, send, receive, stream))
            }

            /// Reduces the elements of all ranks; rank i receives the i-th part. `send` must be `ranks` times as long as `receive`.
            ///
            $(#[$errors])*
            pub fn reduce_scatter<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
                &self,
                send: &S,
                receive: &mut R,
                op: ReduceOp,
                stream: &Arc<CudaStream>,
            ) -> Result<(), $error> {
                self.collective(NcclCall::ReduceScatter { op }, |comm| {
                    Buffers::pair::<T, S, R>(comm, send, receive, stream)
                })
            }

            /// Copies the root's elements to all ranks, in place. All buffers must have the same length.
            ///
            $(#[$errors])*
            pub fn broadcast<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
                &self,
                buffer: &mut R,
                root: u32,
                stream: &Arc<CudaStream>,
            ) -> Result<(), $error> {
                self.collective(NcclCall::Broadcast { root }, |comm| Buffers::written::<T, R>(comm, buffer, stream))
            }

            /// Reduces the elements of all ranks; the root receives the result. Both buffers must have the same length, on all ranks.
            /// `receive` is unchanged on the other ranks.
            ///
            $(#[$errors])*
            pub fn reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
                &self,
                send: &S,
                receive: &mut R,
                op: ReduceOp,
                root: u32,
                stream: &Arc<CudaStream>,
            ) -> Result<(), $error> {
                self.collective(NcclCall::Reduce { op, root }, |comm| {
                    Buffers::pair::<T, S, R>(comm, send, receive, stream)
                })
            }
        }
    };
}
pub(crate) use collectives;

collectives! {
    /// # Errors
    /// See [`CommError`]. Unless the error ends the communicator, nothing was submitted.
    impl Communicator, CommError
}

impl Communicator {
    /// Sends to a rank, which must receive the same number of elements. To send and receive concurrently, use a [`Group`](crate::Group).
    ///
    /// # Errors
    /// See [`CommError`]. Unless the error ends the communicator, nothing was submitted.
    pub fn send<T: NcclType, S: DevicePtr<T> + ?Sized>(
        &self,
        buffer: &S,
        peer: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CommError> {
        self.collective(NcclCall::Send { peer }, |comm| Buffers::read::<T, S>(comm, buffer, stream))
    }

    /// Receives from a rank, which must send the same number of elements. To send and receive concurrently, use a [`Group`](crate::Group).
    ///
    /// # Errors
    /// See [`CommError`]. Unless the error ends the communicator, nothing was submitted.
    pub fn receive<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        peer: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CommError> {
        self.collective(NcclCall::Receive { peer }, |comm| Buffers::written::<T, R>(comm, buffer, stream))
    }

    /// Runs any collective over the buffers that `buffers` returns for this communicator.
    pub(crate) fn collective<'a>(
        &self,
        call: NcclCall,
        buffers: impl FnOnce(&Self) -> Result<Buffers<'a>, CommError>,
    ) -> Result<(), CommError> {
        let (operation, stream, _uses) = buffers(self)?.operation(call, self.ranks())?;
        submit(&[(self, operation, stream)], true)
    }
}
