//! The buffers of one collective while they are in use on its stream.

use crate::collectives::data_type::{DataType, NcclType};
use crate::communicator::Communicator;
use crate::communicator::error::CommError;
use crate::communicator::operation::{NcclCall, Operation};
use crate::ffi::handles::StreamHandle;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use smallvec::SmallVec;
use std::sync::Arc;

/// Elements in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elements {
    pub(crate) address: u64,
    pub(crate) count: usize,
}

/// The memory that a collective reads and writes. After a drop, later uses of the memory wait for the stream.
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
