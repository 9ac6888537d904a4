//! The shapes of calls for which NCCL has connected ranks. The first call of a shape waits for other ranks.

use crate::ffi::operation::{Collective, DataType, NcclCall, Operation, ReduceOp};

/// The properties by which NCCL selects an algorithm and connects ranks. For a collective, these are its kind, reduction, type and order of
/// magnitude. For a send or receive, it is the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionShape {
    Collective { algorithm: Algorithm, magnitude: u32 },
    Send { peer: u32 },
    Receive { peer: u32 },
}

impl ConnectionShape {
    /// Returns the shape for which NCCL establishes connections on first use.
    pub(super) fn of(operation: &Operation) -> Self {
        let bytes = operation.count.saturating_mul(operation.data_type.size_bytes());
        let magnitude = bytes.checked_ilog2().map_or(0, |log| log + 1);
        match (operation.call, operation.call.collective()) {
            (NcclCall::Send { peer }, _) => ConnectionShape::Send { peer },
            (NcclCall::Receive { peer }, _) => ConnectionShape::Receive { peer },
            (call, collective) => {
                let algorithm = (collective, call.reduction(), operation.data_type);
                ConnectionShape::Collective { algorithm, magnitude }
            }
        }
    }
}

/// Collective, reduction and type.
type Algorithm = (Option<Collective>, Option<ReduceOp>, DataType);

/// The shapes that have run on a communicator, whose connections therefore exist.
#[derive(Debug, Default)]
pub(super) struct KnownShapes {
    /// For every combination of kind, reduction and type: the magnitudes that have run, as a bit set.
    collectives: Vec<(Algorithm, u128)>,
    /// The peers that this rank has sent to, as a bit set.
    sent: Vec<u64>,
    /// The peers that this rank has received from, as a bit set.
    received: Vec<u64>,
}

impl KnownShapes {
    /// Returns `true` if this shape has run.
    pub(super) fn contains(&self, shape: ConnectionShape) -> bool {
        let has =
            |peers: &[u64], peer: u32| peers.get(peer as usize / 64).is_some_and(|bits| bits & (1 << (peer % 64)) != 0);
        match shape {
            ConnectionShape::Collective { algorithm, magnitude } => {
                self.collectives.iter().any(|known| known.0 == algorithm && known.1 & (1 << magnitude) != 0)
            }
            ConnectionShape::Send { peer } => has(&self.sent, peer),
            ConnectionShape::Receive { peer } => has(&self.received, peer),
        }
    }

    /// Records that this shape has run.
    pub(super) fn insert(&mut self, shape: ConnectionShape) {
        let add = |peers: &mut Vec<u64>, peer: u32| {
            let word = peer as usize / 64;
            peers.resize(peers.len().max(word + 1), 0);
            peers[word] |= 1 << (peer % 64);
        };
        match shape {
            ConnectionShape::Collective { algorithm, magnitude } => {
                match self.collectives.iter_mut().find(|known| known.0 == algorithm) {
                    Some(known) => known.1 |= 1 << magnitude,
                    None => self.collectives.push((algorithm, 1 << magnitude)),
                }
            }
            ConnectionShape::Send { peer } => add(&mut self.sent, peer),
            ConnectionShape::Receive { peer } => add(&mut self.received, peer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::handles::StreamHandle;

    fn all_reduce(count: usize) -> ConnectionShape {
        shape_of(NcclCall::AllReduce { op: ReduceOp::Sum }, count)
    }

    fn shape_of(call: NcclCall, count: usize) -> ConnectionShape {
        let (data_type, stream) = (DataType::Float32, StreamHandle::NULL);
        ConnectionShape::of(&Operation { call, send: 0, receive: 0, count, data_type, stream })
    }

    #[test]
    fn a_known_shape_covers_its_kind_type_and_magnitude_only() {
        let mut shapes = KnownShapes::default();
        assert!(!shapes.contains(all_reduce(1000)));
        shapes.insert(all_reduce(1000));
        assert!(shapes.contains(all_reduce(1000)) && shapes.contains(all_reduce(600)));
        assert!(!shapes.contains(all_reduce(2000)) && !shapes.contains(all_reduce(0)));
        assert!(!shapes.contains(shape_of(NcclCall::AllReduce { op: ReduceOp::Max }, 1000)));
        assert!(!shapes.contains(shape_of(NcclCall::AllGather, 1000)));
        shapes.insert(all_reduce(2000));
        assert!(shapes.contains(all_reduce(2000)));
    }

    #[test]
    fn every_peer_has_its_own_connection_and_a_root_has_none() {
        let mut shapes = KnownShapes::default();
        shapes.insert(shape_of(NcclCall::Send { peer: 100 }, 8));
        assert!(shapes.contains(shape_of(NcclCall::Send { peer: 100 }, 1 << 20)), "whatever its size");
        assert!(!shapes.contains(shape_of(NcclCall::Send { peer: 2 }, 8)));
        assert!(!shapes.contains(shape_of(NcclCall::Receive { peer: 100 }, 8)));
        shapes.insert(shape_of(NcclCall::Broadcast { root: 0 }, 8));
        assert!(shapes.contains(shape_of(NcclCall::Broadcast { root: 3 }, 8)));
    }

    #[test]
    fn the_largest_size_has_a_magnitude() {
        let mut shapes = KnownShapes::default();
        shapes.insert(all_reduce(usize::MAX));
        assert!(shapes.contains(all_reduce(usize::MAX)));
    }
}
