//! The data movement of collectives, between the memory files of the ranks' processes.
//!
//! A symmetric kernel of rank `i` finds the other ranks' buffers by **its own** window and offset:
//!
//! ```text
//!  rank 0: window of round 7, offset 64     its kernel reads and writes (round 7, 64) on every rank
//!  rank 1: window of round 7, offset 96     its kernel reads and writes (round 7, 96) on every rank
//! ```
//!
//! Rank `i` of `n` computes the `i`-th part of an all-reduce for all ranks. If the offsets differ, every element is therefore wrong, and no
//! rank gets an error.

use crate::arithmetic::{element_bytes, reduce};
use crate::ledger::violate;
use crate::messages::{Collective, Extent, Kind, Signature, WindowPlace};
use std::collections::BTreeMap;

/// The value that a kernel reads beyond a window.
const POISON: u8 = 0xee;

/// The address at which the memory file of a rank's process is mapped in this process.
pub type Base = u64;

/// The memory of each rank, by the round in which it was registered.
pub type Rounds = BTreeMap<u64, Vec<Vec<Extent>>>;

/// Reads a part of some extents.
pub fn read(base: Base, extents: &[Extent], from: u64, length: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length as usize);
    walk(extents, from, length, |offset, part| {
        // SAFETY: extents are parts of a memory file that is mapped completely at `base` and stays mapped.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts((base + offset) as *const u8, part as usize) });
    });
    if bytes.len() < length as usize {
        violate(format!("a kernel read {} bytes beyond its memory", length as usize - bytes.len()));
        bytes.resize(length as usize, POISON);
    }
    bytes
}

/// Writes a part of some extents.
pub fn write(base: Base, extents: &[Extent], from: u64, bytes: &[u8]) {
    let mut done = 0;
    walk(extents, from, bytes.len() as u64, |offset, part| {
        // SAFETY: see `read`; the source is memory of this library.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes[done..].as_ptr(), (base + offset) as *mut u8, part as usize);
        }
        done += part as usize;
    });
    if done < bytes.len() {
        violate(format!("a kernel wrote {} bytes beyond its memory", bytes.len() - done));
    }
}

fn walk(extents: &[Extent], from: u64, length: u64, mut visit: impl FnMut(u64, u64)) {
    let (mut skip, mut left) = (from, length);
    for (offset, size) in extents {
        let start = skip.min(*size);
        let part = (size - start).min(left);
        if part > 0 {
            visit(offset + start, part);
        }
        skip -= start;
        left -= part;
    }
}

/// The buffers of a collective's ranks.
struct View<'a> {
    bases: &'a [Base],
    rounds: &'a Rounds,
    parts: &'a [Collective],
}

impl View<'_> {
    fn send(&self, rank: usize, from: usize, length: usize) -> Vec<u8> {
        let extents = self.parts[rank].send.as_deref().unwrap_or_default();
        read(self.bases[rank], extents, from as u64, length as u64)
    }

    fn receive(&self, rank: usize, from: usize, bytes: &[u8]) {
        write(self.bases[rank], self.parts[rank].receive.as_deref().unwrap_or_default(), from as u64, bytes);
    }

    /// Returns the memory of `rank` in the window that another rank uses.
    fn peer(&self, rank: usize, place: WindowPlace) -> &[Extent] {
        match self.rounds.get(&place.round) {
            Some(memory) => &memory[rank],
            None => {
                violate("a kernel used a window after all ranks had deregistered it".to_owned());
                &[]
            }
        }
    }

    fn reduced(&self, signature: Signature, from: usize, length: usize) -> Vec<u8> {
        let inputs: Vec<_> = (0..self.parts.len()).map(|rank| self.send(rank, from, length)).collect();
        reduce(signature.data_type, signature.op, &inputs)
    }
}

/// Runs a collective whose parts, one per rank, agree.
pub fn run(bases: &[Base], rounds: &Rounds, parts: &[Collective]) {
    let view = View { bases, rounds, parts };
    let signature = parts[0].signature;
    let bytes = signature.count * element_bytes(signature.data_type).expect("the call checked the type");
    let root = signature.root as usize;
    let ranks = parts.len();
    if parts.iter().all(|part| part.symmetric.is_some()) {
        return run_symmetric(&view, signature, bytes);
    }
    match signature.kind {
        Kind::AllReduce => {
            let reduced = view.reduced(signature, 0, bytes);
            (0..ranks).for_each(|rank| view.receive(rank, 0, &reduced));
        }
        Kind::Reduce => {
            let reduced = view.reduced(signature, 0, bytes);
            view.receive(root, 0, &reduced);
        }
        Kind::ReduceScatter => {
            let reduced: Vec<_> = (0..ranks).map(|rank| view.reduced(signature, rank * bytes, bytes)).collect();
            (0..ranks).for_each(|rank| view.receive(rank, 0, &reduced[rank]));
        }
        Kind::Broadcast => {
            let sent = view.send(root, 0, bytes);
            (0..ranks).for_each(|rank| view.receive(rank, 0, &sent));
        }
        Kind::AllGather => {
            let sent: Vec<_> = (0..ranks).map(|rank| view.send(rank, 0, bytes)).collect();
            (0..ranks).for_each(|rank| view.receive(rank, 0, &sent.concat()));
        }
        Kind::Gather => {
            let sent: Vec<_> = (0..ranks).map(|rank| view.send(rank, 0, bytes)).collect();
            view.receive(root, 0, &sent.concat());
        }
        Kind::Scatter => {
            let sent: Vec<_> = (0..ranks).map(|rank| view.send(root, rank * bytes, bytes)).collect();
            (0..ranks).for_each(|rank| view.receive(rank, 0, &sent[rank]));
        }
        Kind::AllToAll => {
            let sent: Vec<_> = (0..ranks).map(|rank| view.send(rank, 0, bytes * ranks)).collect();
            for rank in 0..ranks {
                let part = rank * bytes..(rank + 1) * bytes;
                let received: Vec<_> = sent.iter().map(|sent| &sent[part.clone()]).collect();
                view.receive(rank, 0, &received.concat());
            }
        }
    }
}

/// Runs a collective like the symmetric kernels: each rank uses its own offsets. All inputs are read before any output is written.
fn run_symmetric(view: &View<'_>, signature: Signature, bytes: usize) {
    let ranks = view.parts.len();
    let places = |rank: usize| view.parts[rank].symmetric.expect("all are symmetric");
    let element = element_bytes(signature.data_type).expect("the call checked the type");
    let part = |rank: usize| (rank * signature.count / ranks * element, (rank + 1) * signature.count / ranks * element);
    let reduce_at = |rank: usize, from: usize, length: usize| {
        let (send, _) = places(rank);
        let inputs: Vec<_> = (0..ranks)
            .map(|peer| read(view.bases[peer], view.peer(peer, send), send.offset + from as u64, length as u64))
            .collect();
        reduce(signature.data_type, signature.op, &inputs)
    };
    let write_at = |rank: usize, to: usize, bytes: &[u8]| {
        let (_, receive) = places(rank);
        for peer in 0..ranks {
            write(view.bases[peer], view.peer(peer, receive), receive.offset + to as u64, bytes);
        }
    };
    match signature.kind {
        Kind::AllReduce => {
            let reduced: Vec<_> =
                (0..ranks).map(|rank| reduce_at(rank, part(rank).0, part(rank).1 - part(rank).0)).collect();
            (0..ranks).for_each(|rank| write_at(rank, part(rank).0, &reduced[rank]));
        }
        Kind::ReduceScatter => {
            let reduced: Vec<_> = (0..ranks).map(|rank| reduce_at(rank, rank * bytes, bytes)).collect();
            (0..ranks).for_each(|rank| view.receive(rank, 0, &reduced[rank]));
        }
        Kind::AllGather => {
            let sent: Vec<_> = (0..ranks).map(|rank| view.send(rank, 0, bytes)).collect();
            (0..ranks).for_each(|rank| write_at(rank, rank * bytes, &sent[rank]));
        }
        kind => unreachable!("there is no symmetric kernel for {kind:?}"),
    }
}
