//! Offsets compared over all ranks before a collective runs: to find a bug that would corrupt data.
//!
//! NCCL's symmetric kernels address a peer's buffer by this rank's own offset. The core's agreement compares what the ranks
//! *allocated*; which of two equal buffers a rank then *gives to a collective* it cannot see:
//!
//! ```text
//!   rank 0: all_reduce(gradients)       both allocated both buffers alike, and the histories agree
//!   rank 1: all_reduce(weights)         wrong numbers on both, and ncclSuccess
//! ```
//!
//! With [`check_offsets`](crate::RegistrarBuilder::check_offsets) each call through [`CheckedCollectives`] is preceded by one
//! all-gather of where its buffers lie. It costs a wait of the host per call, so it is for finding bugs.

use crate::communicator::Communicator;
use crate::data_type::{NcclType, ReduceOp};
use crate::registrar::Registrar;
use crate::registrar::error::SyncError;
use crate::registrar::plan::SegmentName;
use crate::registrar::plan_summary::groups;
use crate::registrar::window::{Entry, Kind};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::fmt;
use symmalloc_agreement::{RankSet, Transport};
use symmalloc_core::{SegmentId, StreamId};

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u64)]
pub enum Collective {
    /// [`Communicator::all_reduce`] and [`Communicator::all_reduce_in_place`]
    AllReduce = 1,
    /// [`Communicator::all_gather`]
    AllGather = 2,
    /// [`Communicator::reduce_scatter`]
    ReduceScatter = 3,
    /// [`Communicator::broadcast`]
    Broadcast = 4,
    /// [`Communicator::reduce`]
    Reduce = 5,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::AllReduce => "all-reduce",
            Collective::AllGather => "all-gather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
        })
    }
}

/// Where a buffer of a collective lies, as all ranks name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum BufferPlace {
    /// In a window.
    Window {
        /// The segment.
        segment: SegmentName,
        /// Bytes from its start.
        offset_bytes: u64,
    },
    /// In no window of the communicator.
    NoWindow,
}

/// One rank's call of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct CollectiveCall {
    /// Which one.
    pub collective: Collective,
    /// Bytes of the buffer that this rank sends.
    pub send_bytes: u64,
    /// Bytes of the buffer that this rank receives into.
    pub receive_bytes: u64,
    /// Where the send buffer lies.
    pub send: BufferPlace,
    /// Where the receive buffer lies.
    pub receive: BufferPlace,
}

/// How the calls of ranks differ: the same report on every rank. The collective was not made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffsetDifference {
    /// Which ranks made which call.
    pub groups: Vec<(RankSet, CollectiveCall)>,
}

impl fmt::Display for BufferPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BufferPlace::Window { segment, offset_bytes } => write!(f, "{segment}, offset {offset_bytes}"),
            BufferPlace::NoWindow => f.write_str("no window"),
        }
    }
}

impl fmt::Display for CollectiveCall {
    /// `all-reduce of 1024 bytes at segment 0 of symmetric pool 0, offset 512`, and where the result goes if elsewhere.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CollectiveCall { collective, send_bytes, receive_bytes, send, receive } = self;
        write!(f, "{collective} of {send_bytes} bytes at {send}")?;
        if (send, send_bytes) == (receive, receive_bytes) {
            return Ok(());
        }
        write!(f, " into {receive_bytes} bytes at {receive}")
    }
}

impl fmt::Display for OffsetDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ranks give different buffers to one collective, which was not made")?;
        self.groups.iter().try_for_each(|(ranks, call)| write!(f, "; ranks {ranks}: {call}"))?;
        f.write_str(": give the same allocation on every rank")
    }
}

impl BufferPlace {
    fn of(entry: Option<&Entry>, address: u64) -> Self {
        match entry {
            Some(Entry { segment, name: Some(name), kind: Kind::Window(_) }) => {
                BufferPlace::Window { segment: *name, offset_bytes: address - segment.base }
            }
            _ => BufferPlace::NoWindow,
        }
    }

    fn words(self) -> [u64; 3] {
        match self {
            BufferPlace::Window { segment: SegmentName { pool, stream, segment }, offset_bytes } => {
                let stream = stream.map_or(u32::MAX, |stream| stream.0.into());
                [(u64::from(pool) << 32) | u64::from(stream), (u64::from(segment.0) << 1) | 1, offset_bytes]
            }
            BufferPlace::NoWindow => [0; 3],
        }
    }

    fn from_words([heap, segment, offset_bytes]: [u64; 3]) -> Self {
        if segment & 1 == 0 {
            return BufferPlace::NoWindow;
        }
        BufferPlace::Window {
            segment: SegmentName {
                pool: (heap >> 32) as u32,
                stream: u16::try_from(heap as u32).ok().map(StreamId),
                segment: SegmentId((segment >> 1) as u32),
            },
            offset_bytes,
        }
    }
}

const WORDS: usize = 9;

impl CollectiveCall {
    fn to_message(self) -> Vec<u8> {
        let [send, receive] = [self.send.words(), self.receive.words()];
        let head = [self.collective as u64, self.send_bytes, self.receive_bytes];
        head.into_iter().chain(send).chain(receive).flat_map(u64::to_le_bytes).collect()
    }

    /// `None` when the message is no call: its rank is elsewhere in the program.
    fn from_message(message: &[u8]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(message.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let [collective, send_bytes, receive_bytes, s0, s1, s2, r0, r1, r2] = words;
        let all = [
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::Broadcast,
            Collective::Reduce,
        ];
        Some(CollectiveCall {
            collective: all.into_iter().find(|one| *one as u64 == collective)?,
            send_bytes,
            receive_bytes,
            send: BufferPlace::from_words([s0, s1, s2]),
            receive: BufferPlace::from_words([r0, r1, r2]),
        })
    }
}

/// Collectives of one communicator whose buffers are compared over all ranks first, if the registrar was made so. All ranks
/// call through it, or none.
#[derive(Clone, Copy, Debug)]
pub struct CheckedCollectives<'a> {
    registrar: &'a Registrar,
    comm: &'a Communicator,
}

impl Registrar {
    /// The collectives of a communicator, with the offsets of their buffers compared over all ranks before each call where
    /// [`check_offsets`](crate::RegistrarBuilder::check_offsets) says so; the plain ones otherwise.
    pub fn checked<'a>(&'a self, comm: &'a Communicator) -> CheckedCollectives<'a> {
        CheckedCollectives { registrar: self, comm }
    }
}

impl CheckedCollectives<'_> {
    /// As [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// [`SyncError::OffsetsDiffer`] on every rank when they do, and as [`Communicator::all_reduce`].
    pub fn all_reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), SyncError> {
        self.check(Collective::AllReduce, || [read::<T, S>(send, stream), written::<T, R>(receive, stream)])?;
        self.made(self.comm.all_reduce(send, receive, op, stream))
    }

    /// As [`Communicator::all_reduce_in_place`].
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_in_place<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), SyncError> {
        self.check(Collective::AllReduce, || [written::<T, R>(buffer, stream); 2])?;
        self.made(self.comm.all_reduce_in_place(buffer, op, stream))
    }

    /// As [`Communicator::all_gather`].
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        stream: &CudaStream,
    ) -> Result<(), SyncError> {
        self.check(Collective::AllGather, || [read::<T, S>(send, stream), written::<T, R>(receive, stream)])?;
        self.made(self.comm.all_gather(send, receive, stream))
    }

    /// As [`Communicator::reduce_scatter`].
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        stream: &CudaStream,
    ) -> Result<(), SyncError> {
        self.check(Collective::ReduceScatter, || [read::<T, S>(send, stream), written::<T, R>(receive, stream)])?;
        self.made(self.comm.reduce_scatter(send, receive, op, stream))
    }

    /// As [`Communicator::broadcast`].
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn broadcast<T: NcclType, R: DevicePtrMut<T> + ?Sized>(
        &self,
        buffer: &mut R,
        root: u32,
        stream: &CudaStream,
    ) -> Result<(), SyncError> {
        self.check(Collective::Broadcast, || [written::<T, R>(buffer, stream); 2])?;
        self.made(self.comm.broadcast(buffer, root, stream))
    }

    /// As [`Communicator::reduce`].
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce<T: NcclType, S: DevicePtr<T> + ?Sized, R: DevicePtrMut<T> + ?Sized>(
        &self,
        send: &S,
        receive: &mut R,
        op: ReduceOp,
        root: u32,
        stream: &CudaStream,
    ) -> Result<(), SyncError> {
        self.check(Collective::Reduce, || [read::<T, S>(send, stream), written::<T, R>(receive, stream)])?;
        self.made(self.comm.reduce(send, receive, op, root, stream))
    }

    fn made(&self, outcome: Result<(), crate::error::CommError>) -> Result<(), SyncError> {
        outcome.map_err(|error| SyncError::Communicator { communicator: self.comm.name().to_owned(), error })
    }

    /// Compares where the buffers lie, given as (address, bytes).
    fn check(&self, collective: Collective, buffers: impl FnOnce() -> [(u64, u64); 2]) -> Result<(), SyncError> {
        if !self.registrar.settings().check_offsets {
            return Ok(());
        }
        let attachment = self.registrar.attachment(self.comm)?;
        let [(send, send_bytes), (receive, receive_bytes)] = buffers();
        let place = |address, bytes| BufferPlace::of(attachment.view().windows.find(address, bytes), address);
        let call = CollectiveCall {
            collective,
            send_bytes,
            receive_bytes,
            send: place(send, send_bytes),
            receive: place(receive, receive_bytes),
        };
        let gathered = attachment.converse(self.registrar.allocator(), |transport| {
            let lost = |error| SyncError::Transport { communicator: self.comm.name().to_owned(), error };
            transport.all_gather(&call.to_message()).map_err(lost)
        })?;
        // What cannot be read is taken for this rank's own collective, of no bytes.
        let nothing = CollectiveCall {
            send_bytes: 0,
            receive_bytes: 0,
            send: BufferPlace::NoWindow,
            receive: BufferPlace::NoWindow,
            ..call
        };
        let calls = gathered.iter().map(|message| CollectiveCall::from_message(message).unwrap_or(nothing));
        let groups = groups(calls);
        if groups.len() < 2 {
            return Ok(());
        }
        let difference = OffsetDifference { groups: groups.into_iter().map(|(call, ranks)| (ranks, call)).collect() };
        tracing::error!(name: "offsets.diverged", target: "symmalloc", communicator = self.comm.name(), %difference);
        Err(SyncError::OffsetsDiffer { communicator: self.comm.name().to_owned(), difference: Box::new(difference) })
    }
}

/// Address and bytes of a buffer that is read on the stream.
fn read<T: NcclType, S: DevicePtr<T> + ?Sized>(buffer: &S, stream: &CudaStream) -> (u64, u64) {
    (buffer.device_ptr(stream).0, (buffer.len() * size_of::<T>()) as u64)
}

/// Address and bytes of a buffer that is written on the stream.
fn written<T: NcclType, R: DevicePtrMut<T> + ?Sized>(buffer: &mut R, stream: &CudaStream) -> (u64, u64) {
    let size_bytes = (buffer.len() * size_of::<T>()) as u64;
    (buffer.device_ptr_mut(stream).0, size_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(offset_bytes: u64) -> CollectiveCall {
        let segment = SegmentName { pool: 1, stream: Some(StreamId(2)), segment: SegmentId(3) };
        let place = BufferPlace::Window { segment, offset_bytes };
        let collective = Collective::AllReduce;
        CollectiveCall { collective, send_bytes: 1024, receive_bytes: 1024, send: place, receive: place }
    }

    #[test]
    fn a_call_survives_its_message() {
        let elsewhere = CollectiveCall { receive: BufferPlace::NoWindow, ..call(512) };
        for call in [call(0), call(512), elsewhere] {
            assert_eq!(CollectiveCall::from_message(&call.to_message()), Some(call));
        }
        assert_eq!(CollectiveCall::from_message(&[0; 8 * WORDS]), None);
    }

    #[test]
    fn a_difference_names_ranks_and_offsets() {
        let groups = groups([call(0), call(512), call(0)].into_iter());
        let difference = OffsetDifference { groups: groups.into_iter().map(|(call, ranks)| (ranks, call)).collect() };
        assert_eq!(
            difference.to_string(),
            "the ranks give different buffers to one collective, which was not made; \
             ranks 0,2: all-reduce of 1024 bytes at segment 3 of symmetric pool 1, stream 2, offset 0; \
             ranks 1: all-reduce of 1024 bytes at segment 3 of symmetric pool 1, stream 2, offset 512: \
             give the same allocation on every rank"
        );
    }
}
