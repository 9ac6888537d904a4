//! One collective, as it goes to NCCL: addresses and numbers.

use crate::calls::{Calls, Progress, RawComm};
use crate::data_type::DataType;
use crate::error::NcclError;
use cudarc::driver::sys::CUstream;
use std::ffi::{c_int, c_void};

/// A collective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    /// Where this rank's elements are; 0 for a receive.
    pub(crate) send: u64,
    /// Where the result goes; 0 for a send.
    pub(crate) receive: u64,
    /// Number of elements, as the NCCL call of this kind counts them.
    pub(crate) count: usize,
    pub(crate) data_type: DataType,
    pub(crate) stream: CUstream,
}

// SAFETY: addresses that only the device follows, and a stream, which any thread may use.
unsafe impl Send for Operation {}

/// Which collective, with its reduction, root or peer as NCCL numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce { op: c_int },
    AllGather,
    ReduceScatter { op: c_int },
    Broadcast { root: c_int },
    Reduce { op: c_int, root: c_int },
    Send { peer: c_int },
    Receive { peer: c_int },
}

impl Operation {
    /// Gives it to NCCL.
    ///
    /// # Safety
    /// The communicator lives and no other thread uses it. The memory is of its device, long enough, and left alone by others
    /// until the stream is past the collective; the stream lives and is of the device.
    pub(crate) unsafe fn issue(&self, calls: &Calls, comm: RawComm) -> Result<Progress, NcclError> {
        let (send, receive) = (self.send as *const c_void, self.receive as *mut c_void);
        let (count, data_type, stream) = (self.count, self.data_type.raw(), self.stream);
        // SAFETY: the caller's contract, for every call below.
        unsafe {
            match self.kind {
                Kind::AllReduce { op } => calls.all_reduce(send, receive, count, data_type, op, comm, stream),
                Kind::AllGather => calls.all_gather(send, receive, count, data_type, comm, stream),
                Kind::ReduceScatter { op } => calls.reduce_scatter(send, receive, count, data_type, op, comm, stream),
                Kind::Broadcast { root } => calls.broadcast(send, receive, count, data_type, root, comm, stream),
                Kind::Reduce { op, root } => calls.reduce(send, receive, count, data_type, op, root, comm, stream),
                Kind::Send { peer } => calls.send(send, count, data_type, peer, comm, stream),
                Kind::Receive { peer } => calls.receive(receive, count, data_type, peer, comm, stream),
            }
        }
    }

    /// What NCCL connects ranks for when it meets it first.
    pub(crate) fn shape(&self) -> Shape {
        let bytes = self.count.saturating_mul(self.data_type.size_bytes());
        let magnitude = bytes.checked_ilog2().map_or(0, |log| log + 1);
        let collective = |kind, op| Shape::Collective { kind, op, data_type: self.data_type, magnitude };
        match self.kind {
            Kind::AllReduce { op } => collective(0, op),
            Kind::AllGather => collective(1, 0),
            Kind::ReduceScatter { op } => collective(2, op),
            Kind::Broadcast { .. } => collective(3, 0),
            Kind::Reduce { op, .. } => collective(4, op),
            Kind::Send { peer } => Shape::Send { peer: peer as u32 },
            Kind::Receive { peer } => Shape::Receive { peer: peer as u32 },
        }
    }
}

/// What NCCL chooses an algorithm by, and so connects ranks for: a collective's kind, reduction, type and order of magnitude;
/// for a send or receive the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Collective { kind: u8, op: c_int, data_type: DataType, magnitude: u32 },
    Send { peer: u32 },
    Receive { peer: u32 },
}

/// The shapes that have run on a communicator: what NCCL connects for them is connected.
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    /// Magnitudes as bits, for every combination of kind, reduction and type.
    collectives: Vec<(u8, c_int, DataType, u128)>,
    /// Peers as bits.
    sent: Vec<u64>,
    /// Peers as bits.
    received: Vec<u64>,
}

impl Shapes {
    /// Whether this shape has run.
    pub(crate) fn contains(&self, shape: Shape) -> bool {
        let has =
            |peers: &[u64], peer: u32| peers.get(peer as usize / 64).is_some_and(|bits| bits & (1 << (peer % 64)) != 0);
        match shape {
            Shape::Collective { kind, op, data_type, magnitude } => self
                .collectives
                .iter()
                .any(|known| (known.0, known.1, known.2) == (kind, op, data_type) && known.3 & (1 << magnitude) != 0),
            Shape::Send { peer } => has(&self.sent, peer),
            Shape::Receive { peer } => has(&self.received, peer),
        }
    }

    /// Notes that it has.
    pub(crate) fn insert(&mut self, shape: Shape) {
        let add = |peers: &mut Vec<u64>, peer: u32| {
            let word = peer as usize / 64;
            peers.resize(peers.len().max(word + 1), 0);
            peers[word] |= 1 << (peer % 64);
        };
        match shape {
            Shape::Collective { kind, op, data_type, magnitude } => {
                let is_it =
                    |known: &&mut (u8, c_int, DataType, u128)| (known.0, known.1, known.2) == (kind, op, data_type);
                match self.collectives.iter_mut().find(is_it) {
                    Some(known) => known.3 |= 1 << magnitude,
                    None => self.collectives.push((kind, op, data_type, 1 << magnitude)),
                }
            }
            Shape::Send { peer } => add(&mut self.sent, peer),
            Shape::Receive { peer } => add(&mut self.received, peer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce(count: usize) -> Shape {
        operation(Kind::AllReduce { op: 0 }, count).shape()
    }

    fn operation(kind: Kind, count: usize) -> Operation {
        Operation { kind, send: 0, receive: 0, count, data_type: DataType::Float32, stream: std::ptr::null_mut() }
    }

    #[test]
    fn a_shape_is_seen_for_its_kind_type_and_magnitude_only() {
        let mut shapes = Shapes::default();
        assert!(!shapes.contains(all_reduce(1000)));
        shapes.insert(all_reduce(1000));
        assert!(shapes.contains(all_reduce(1000)) && shapes.contains(all_reduce(600)));
        assert!(!shapes.contains(all_reduce(2000)) && !shapes.contains(all_reduce(0)));
        assert!(!shapes.contains(operation(Kind::AllReduce { op: 1 }, 1000).shape()));
        assert!(!shapes.contains(operation(Kind::AllGather, 1000).shape()));
        shapes.insert(all_reduce(2000));
        assert!(shapes.contains(all_reduce(2000)));
    }

    #[test]
    fn every_peer_is_a_connection_of_its_own_and_a_root_is_not() {
        let mut shapes = Shapes::default();
        shapes.insert(operation(Kind::Send { peer: 100 }, 8).shape());
        assert!(shapes.contains(operation(Kind::Send { peer: 100 }, 1 << 20).shape()), "whatever its size");
        assert!(!shapes.contains(operation(Kind::Send { peer: 2 }, 8).shape()));
        assert!(!shapes.contains(operation(Kind::Receive { peer: 100 }, 8).shape()));
        shapes.insert(operation(Kind::Broadcast { root: 0 }, 8).shape());
        assert!(shapes.contains(operation(Kind::Broadcast { root: 3 }, 8).shape()));
    }

    #[test]
    fn the_largest_size_has_a_magnitude() {
        let mut shapes = Shapes::default();
        shapes.insert(all_reduce(usize::MAX));
        assert!(shapes.contains(all_reduce(usize::MAX)));
    }
}
