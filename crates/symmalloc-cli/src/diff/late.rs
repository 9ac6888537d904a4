//! Comparison of recordings that begin in the middle of a job.
//!
//! Ranks do not begin to record at the same op, and a ring of entries keeps another part of the job on each rank. The recordings are
//! therefore aligned by the ops that they have in common. Streams, pools, and allocations from before the first common op are numbered
//! by each recording on its own. They are equal if one mapping of A's numbers to B's explains all common ops.
//!
//! ```text
//! A   live before │ f a a f a f a a f ...
//! B           live before │ a f a a f ...      B begins 4 ops after A
//! ```

use super::calls::{ComparedOps, ProgramCall, calls};
use std::collections::HashMap;
use std::hash::Hash;
use symmalloc_core::ids::{AllocationId, PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_import::Recording;

/// The beginnings of two recordings, of which at least one begins in the middle of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LateBeginning {
    /// `true` for each of A and B that begins in the middle of the job.
    pub is_late: [bool; 2],
    /// Number of ops of A, and of B, before the first op that both recordings have.
    pub ops_before: [usize; 2],
}

/// Returns `true` if the recording begins in the middle of a job.
pub(super) fn is_late(recording: &Recording) -> bool {
    recording.summary.lived_before > 0 || recording.summary.is_overwritten
}

/// The recorded part of a job.
pub(super) struct Window<'a> {
    pub(super) calls: Vec<ProgramCall<'a>>,
    /// Kind of each call, and the bytes that it is about.
    shapes: Vec<(u8, u64)>,
    /// Each allocation, by ordinal.
    allocations: Vec<Allocation>,
}

#[derive(Clone, Copy)]
struct Allocation {
    size_bytes: u64,
    stream: StreamId,
    pool: PoolId,
}

impl<'a> Window<'a> {
    pub(super) fn of(recording: &'a Recording) -> Self {
        let mut window = Window { calls: Vec::new(), shapes: Vec::new(), allocations: Vec::new() };
        for call in calls(&recording.records, ComparedOps::WithoutUses) {
            let size_of = |id: AllocationId| window.allocations.get(id.index()).map_or(0, |it| it.size_bytes);
            let shape = match call.op {
                Op::CreatePool { .. } => continue,
                Op::Allocate { pool, stream, size_bytes, .. } => {
                    window.allocations.push(Allocation { size_bytes, stream, pool });
                    if window.allocations.len() as u64 <= recording.summary.lived_before {
                        continue;
                    }
                    (0, size_bytes)
                }
                Op::Free { id } => (1, size_of(id)),
                Op::Refuse { size_bytes, .. } => (2, size_bytes),
                Op::Reserve { size_bytes, .. } => (3, size_bytes),
                _ => (4, 0),
            };
            window.shapes.push(shape);
            window.calls.push(call);
        }
        window
    }
}

/// A mapping of A's numbers to B's.
#[derive(Default)]
pub(super) struct Correspondence {
    allocations: Pairs<AllocationId>,
    streams: Pairs<StreamId>,
    pools: Pairs<PoolId>,
}

impl Correspondence {
    /// Returns `true` if two ops are the same under the mapping, which grows by their numbers.
    pub(super) fn admits(&mut self, windows: &[Window<'_>; 2], a: &Op, b: &Op) -> bool {
        match (a, b) {
            (
                Op::Allocate { id, pool, stream, size_bytes },
                Op::Allocate { id: id_b, pool: pool_b, stream: stream_b, size_bytes: size_b },
            ) => {
                size_bytes == size_b
                    && self.streams.admit(*stream, *stream_b)
                    && self.pools.admit(*pool, *pool_b)
                    && self.allocations.admit(*id, *id_b)
            }
            (Op::Free { id }, Op::Free { id: id_b }) => {
                let of = |rank: usize, id: AllocationId| windows[rank].allocations.get(id.index()).copied();
                let (Some(one), Some(other)) = (of(0, *id), of(1, *id_b)) else { return a == b };
                one.size_bytes == other.size_bytes
                    && self.streams.admit(one.stream, other.stream)
                    && self.pools.admit(one.pool, other.pool)
                    && self.allocations.admit(*id, *id_b)
            }
            (
                Op::Refuse { pool, stream, size_bytes, .. } | Op::Reserve { pool, stream, size_bytes },
                Op::Refuse { pool: pool_b, stream: stream_b, size_bytes: size_b, .. }
                | Op::Reserve { pool: pool_b, stream: stream_b, size_bytes: size_b },
            ) => {
                std::mem::discriminant(a) == std::mem::discriminant(b)
                    && size_bytes == size_b
                    && self.streams.admit(*stream, *stream_b)
                    && self.pools.admit(*pool, *pool_b)
            }
            _ => a == b,
        }
    }
}

/// Pairs of numbers, none of which is in two pairs. Looked up only.
struct Pairs<T> {
    of_a: HashMap<T, T>,
    of_b: HashMap<T, T>,
}

impl<T> Default for Pairs<T> {
    fn default() -> Self {
        Pairs { of_a: HashMap::new(), of_b: HashMap::new() }
    }
}

impl<T: Copy + Eq + Hash> Pairs<T> {
    fn admit(&mut self, a: T, b: T) -> bool {
        *self.of_a.entry(a).or_insert(b) == b && *self.of_b.entry(b).or_insert(a) == a
    }
}

/// Returns the number of ops of A, and of B, before the first op that both recordings have.
pub(super) fn ops_before(windows: &[Window<'_>; 2]) -> [usize; 2] {
    alignment(&windows[0].shapes, &windows[1].shapes)
}

/// Returns the number of items of A, and of B, before the first common one. One of them is 0. Recordings that are the same up to the end of
/// both are aligned at their ends, because ranks save them at the same time. Otherwise, the longest run of common ops decides, and among
/// equal runs the earliest.
fn alignment(a: &[(u8, u64)], b: &[(u8, u64)]) -> [usize; 2] {
    let (longer, shorter) = if a.len() >= b.len() { (a, b) } else { (b, a) };
    let surplus = longer.len() - shorter.len();
    if longer[surplus..] == *shorter {
        return if a.len() >= b.len() { [surplus, 0] } else { [0, surplus] };
    }
    let best = |runs: &[usize]| {
        let longest = runs.iter().copied().max().unwrap_or(0);
        (longest, runs.iter().position(|run| *run == longest).unwrap_or(0))
    };
    let ((of_a, skipped_a), (of_b, skipped_b)) = (best(&runs(b, a)), best(&runs(a, b)));
    match (of_a, of_b) {
        (0, 0) => [0, 0],
        _ if of_a >= of_b => [skipped_a, 0],
        _ => [0, skipped_b],
    }
}

/// Returns, for each position of `text`, the length of the run from there that equals the beginning of `pattern`: the Z-algorithm, in
/// linear time.
fn runs<T: Copy + Eq>(pattern: &[T], text: &[T]) -> Vec<usize> {
    let joined: Vec<Option<T>> =
        pattern.iter().copied().map(Some).chain([None]).chain(text.iter().copied().map(Some)).collect();
    let mut lengths = vec![0; joined.len()];
    let (mut start, mut end) = (0, 0);
    for at in 1..joined.len() {
        let mut length = if at < end { lengths[at - start].min(end - at) } else { 0 };
        while joined.get(at + length).is_some_and(|item| *item == joined[length]) {
            length += 1;
        }
        lengths[at] = length;
        if at + length > end {
            (start, end) = (at, at + length);
        }
    }
    lengths.split_off(pattern.len() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_sim::SplitMix64;

    #[test]
    fn runs_are_those_of_the_definition() {
        let mut random = SplitMix64::new(1);
        for _ in 0..500 {
            let mut some = |below| (0..random.below(below)).map(|_| random.below(2)).collect::<Vec<_>>();
            let (pattern, text) = (some(6), some(12));
            let run = |at: usize| text[at..].iter().zip(&pattern).take_while(|(one, other)| one == other).count();
            assert_eq!(runs(&pattern, &text), (0..text.len()).map(run).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_ends_decide_and_otherwise_the_longest_common_run() {
        let shapes = |text: &str| text.bytes().map(|letter| (letter, 0)).collect::<Vec<_>>();
        for (a, b, expected) in [
            ("xyzabc", "abc", [3, 0]),
            ("abc", "xyzabc", [0, 3]),
            ("abcabcabc", "abc", [6, 0]),
            ("abcabcabc", "bcabcx", [1, 0]),
            ("xxabcdef", "abcdeg", [2, 0]),
            ("abc", "abx", [0, 0]),
            ("abc", "xyz", [0, 0]),
            ("", "xyz", [0, 3]),
        ] {
            assert_eq!(alignment(&shapes(a), &shapes(b)), expected, "{a} {b}");
        }
    }
}
