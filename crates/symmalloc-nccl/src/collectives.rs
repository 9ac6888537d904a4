//! Collectives over anything that cudarc takes a device pointer from: buffers of this library, their views, `CudaSlice`.
//!
//! All ranks of a communicator call the same collectives in the same order. Each returns when the work is in the stream; uses of
//! a [`DeviceBuffer`](symmalloc_cuda::DeviceBuffer) by other streams are waited for on the device, as everywhere. Lengths are
//! checked on this rank. That the ranks agree on them is not: use the agreement.
//!
//! What only moves elements (gather, broadcast, send) can be used for any type as its bytes.

use crate::communicator::buffers::Buffers;
use crate::communicator::operation::NcclCall;
use crate::communicator::{Communicator, submit};
use crate::data_type::{NcclType, ReduceOp};
use crate::error::CommError;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::sync::Arc;

/// The collectives of a type, which has a method `collective` that makes any of them.
macro_rules! collectives {
    ($(#[$errors:meta])* impl $owner:ty, $error:ty) => {
        impl $owner {
            /// Reduces the elements of all ranks; all get the result. Both buffers have the same length, on all ranks.
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

            /// As [`all_reduce`](Self::all_reduce), with the result in place.
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

            /// Puts the elements of all ranks end to end, in rank order; all get them. `receive` is `ranks` times as long as
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

            /// Reduces the elements of all ranks; rank i gets the i-th part. `send` is `ranks` times as long as `receive`.
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

            /// Gives the root's elements to all ranks, in place. All buffers have the same length.
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

            /// Reduces the elements of all ranks; the root gets the result. Both buffers have the same length, on all ranks;
            /// the others' `receive` is left as it is.
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
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    impl Communicator, CommError
}

impl Communicator {
    /// Sends to a rank, which receives as many elements. To send and receive at once, use a [`Group`](crate::Group).
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn send<T: NcclType, S: DevicePtr<T> + ?Sized>(
        &self,
        buffer: &S,
        peer: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CommError> {
        self.collective(NcclCall::Send { peer }, |comm| Buffers::read::<T, S>(comm, buffer, stream))
    }

    /// Receives from a rank, which sends as many elements. To send and receive at once, use a [`Group`](crate::Group).
    ///
    /// # Errors
    /// See [`CommError`]. Where it does not end the communicator, nothing was submitted.
    pub fn receive<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        peer: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CommError> {
        self.collective(NcclCall::Receive { peer }, |comm| Buffers::written::<T, R>(comm, buffer, stream))
    }

    /// Makes any collective over the buffers that are given for this communicator.
    pub(crate) fn collective<'a>(
        &self,
        call: NcclCall,
        buffers: impl FnOnce(&Self) -> Result<Buffers<'a>, CommError>,
    ) -> Result<(), CommError> {
        let (operation, stream, _uses) = buffers(self)?.operation(call, self.ranks())?;
        submit(&[(self, operation, stream)], true)
    }
}
