//! Comparison of recordings that contain only a part of a job.
//!
//! Ranks may begin to record at different ops, and a recorder that keeps only the last entries keeps a different part of the job on each
//! rank. The recordings are therefore aligned by the ops that they have in common, and compared up to the earlier end. Each recording has
//! its own numbers for streams, pools, and allocations from before the first common op. These numbers count as equal if one mapping of A's
//! numbers to B's explains all common ops.
//!
//! ```text
//! A   live before │ f a a f a f a a f ...
//! B           live before │ a f a a f ...      B begins 4 ops after A
//! ```
//!
//! Recordings of a job that repeats itself fit at several alignments. An alignment at which both recordings end together is preferred,
//! because ranks usually save their recordings at the same point. The other alignments are counted, so that the output can state their
//! number.

use super::calls::{ComparedOps, ProgramCall, calls};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::mem::take;
use symmalloc_core::ids::{AllocationId, ObserverId, PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_import::Recording;

/// Minimum number of common ops of an alignment; for a short recording, half of its ops. Fewer ops can be equal by chance.
const COMMON_OPS_MIN: usize = 8;

/// A sequence of ops that occurs more often than this in a recording is ignored, because it fits at too many alignments.
const PLACES_MAX: usize = 4;

/// If another alignment has more than this many times as many equal ops as the longest run, the run is accidental, and the other alignment
/// is better.
const MISLEADING_RATIO: usize = 4;

/// Approximate maximum number of ops that are compared to find the alignment. Comparing one op takes tens of nanoseconds.
const OPS_COMPARED_MAX: usize = 8_000_000;

/// The beginnings and ends of two recordings, of which at least one begins in the middle of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LateBeginning {
    /// For A and for B: `true` if the recording begins in the middle of the job.
    pub is_late: [bool; 2],
    /// Number of ops of A, and of B, before the first op that both recordings have.
    pub ops_before: [usize; 2],
    /// Number of other alignments at which the recordings also agree.
    pub other_alignments: usize,
    /// The nearest of the other alignments: the number of ops of A, and of B, before the first common op.
    pub nearest_alignment: Option<[usize; 2]>,
    /// `false` if the recordings have no part in common that is long enough to align them.
    pub is_aligned: bool,
}

/// Returns `true` if the recording begins in the middle of a job.
pub(super) fn is_late(recording: &Recording) -> bool {
    recording.summary.lived_before > 0 || recording.summary.is_overwritten
}

/// The recorded part of a job.
pub(super) struct Window<'a> {
    pub(super) calls: Vec<ProgramCall<'a>>,
    /// Kind of each call, and the bytes that it requests or frees.
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

/// A one-to-one mapping of A's ids to B's.
#[derive(Default)]
pub(super) struct Correspondence {
    allocations: Pairs<AllocationId>,
    streams: Pairs<StreamId>,
    pools: Pairs<PoolId>,
    observers: Pairs<ObserverId>,
}

impl Correspondence {
    /// Returns `true` if two ops are equal under the mapping. Adds their ids to the mapping.
    pub(super) fn admits(&mut self, windows: &[Window<'_>; 2], a: &Op, b: &Op) -> bool {
        let ((op_a, one), (op_b, other)) = (split(a), split(b));
        if op_a != op_b || !self.admits_numbers(&one, &other) {
            return false;
        }
        let of = |rank: usize, id: AllocationId| windows[rank].allocations.get(id.index()).copied();
        match (a, b) {
            // The allocation may be from before the first common op, so its size, stream and pool are compared here.
            (Op::Free { id } | Op::RecordUse { id, .. }, Op::Free { id: id_b } | Op::RecordUse { id: id_b, .. }) => {
                match (of(0, *id), of(1, *id_b)) {
                    (Some(one), Some(other)) => {
                        one.size_bytes == other.size_bytes
                            && self.streams.admit(one.stream, other.stream)
                            && self.pools.admit(one.pool, other.pool)
                    }
                    (one, other) => one.is_none() && other.is_none(),
                }
            }
            _ => true,
        }
    }

    fn admits_numbers(&mut self, one: &Numbers, other: &Numbers) -> bool {
        let Numbers { allocation, streams: [stream, on], pool, observer } = one;
        self.streams.admit(*stream, other.streams[0])
            && self.streams.admit(*on, other.streams[1])
            && self.pools.admit(*pool, other.pool)
            && self.allocations.admit(*allocation, other.allocation)
            && self.observers.admit(*observer, other.observer)
    }
}

/// The ids in an op; `None` for each kind of id that the op does not have.
#[derive(Default)]
struct Numbers {
    allocation: Option<AllocationId>,
    streams: [Option<StreamId>; 2],
    pool: Option<PoolId>,
    observer: Option<ObserverId>,
}

/// Splits an op into the op without its ids, and the ids.
fn split(op: &Op) -> (Op, Numbers) {
    let (mut op, mut numbers) = (op.clone(), Numbers::default());
    match &mut op {
        Op::RegisterStream { stream, group } => numbers.streams = [Some(take(stream)), Some(take(group))],
        Op::Synchronize { stream } => numbers.streams[0] = Some(take(stream)),
        Op::CreatePool { pool, .. }
        | Op::DestroyPool { pool }
        | Op::ResetPool { pool }
        | Op::Trim { pool: Some(pool) }
        | Op::BeginStep { pool, .. }
        | Op::EndStep { pool }
        | Op::Sleep { pool, .. }
        | Op::Wake { pool }
        | Op::Stay { pool, .. } => numbers.pool = Some(take(pool)),
        Op::Allocate { id, pool, stream, .. } => {
            numbers.allocation = Some(take(id));
            (numbers.pool, numbers.streams[0]) = (Some(take(pool)), Some(take(stream)));
        }
        Op::Reserve { pool, stream, .. } | Op::Reclaim { pool, stream, .. } | Op::Refuse { pool, stream, .. } => {
            (numbers.pool, numbers.streams[0]) = (Some(take(pool)), Some(take(stream)));
        }
        Op::Free { id } => numbers.allocation = Some(take(id)),
        Op::RecordUse { id, stream } => {
            (numbers.allocation, numbers.streams[0]) = (Some(take(id)), Some(take(stream)));
        }
        Op::Wait { stream, on } => numbers.streams = [Some(take(stream)), Some(take(on))],
        Op::Observe { observer, pool } => {
            (numbers.observer, numbers.pool) = (Some(take(observer)), Some(take(pool)));
        }
        Op::Acknowledge { observer } | Op::Forget { observer } => numbers.observer = Some(take(observer)),
        Op::Trim { pool: None } | Op::Sync => {}
    }
    (op, numbers)
}

/// Pairs of ids, in which each id occurs at most once. The maps are never iterated, so their order has no effect.
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
    /// Returns `true` if the ids are a pair, or if neither op has an id. Two ids without a pair become one.
    fn admit(&mut self, a: impl Into<Option<T>>, b: impl Into<Option<T>>) -> bool {
        let (a, b) = match (a.into(), b.into()) {
            (Some(a), Some(b)) => (a, b),
            (a, b) => return a.is_none() && b.is_none(),
        };
        *self.of_a.entry(a).or_insert(b) == b && *self.of_b.entry(b).or_insert(a) == a
    }
}

/// An alignment of two recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Alignment {
    /// Number of ops of A, and of B, before the first common one. One of them is 0.
    skipped: [usize; 2],
    /// Number of consecutive equal ops from there on.
    run: usize,
    /// Number of ops that both recordings have from there on.
    overlap: usize,
    /// `true` if both recordings end together.
    has_equal_ends: bool,
}

impl Alignment {
    /// Returns `true` if the recordings agree up to the end of one of them.
    fn fits(&self) -> bool {
        self.run == self.overlap
    }

    /// Returns a key that is greater for better alignments. An alignment at which the ranks agree up to a common end is best; then the
    /// length of the run decides. Among equal runs, one that ends at a difference is better than one that ends with a recording, so that a
    /// difference is not hidden.
    fn merit(&self) -> (bool, usize, bool, usize, Reverse<usize>) {
        let [a, b] = self.skipped;
        (self.fits() && self.has_equal_ends, self.run, self.has_equal_ends, self.overlap, Reverse(a + b))
    }

    /// Returns the position of B's first op, relative to A's first op.
    fn shift(&self) -> isize {
        self.skipped[0] as isize - self.skipped[1] as isize
    }
}

/// Aligns two recordings, of which at least one begins late.
pub(super) fn aligned(is_late: [bool; 2], windows: &[Window<'_>; 2]) -> LateBeginning {
    let lengths = [0, 1].map(|rank| windows[rank].shapes.len());
    let shorter = lengths[0].min(lengths[1]);
    let candidates = alignments(&windows[0].shapes, &windows[1].shapes);
    // Ops of equal shapes can free different allocations, so the best candidates are compared exactly.
    let mut found: Vec<Alignment> = Vec::new();
    let mut compared = 0;
    for candidate in &candidates {
        let best_run = found.iter().map(|it| it.run).max().unwrap_or(0);
        if compared > OPS_COMPARED_MAX || 2 * candidate.run < best_run {
            break;
        }
        let run = common(windows, candidate.skipped);
        compared += run + 1;
        found.push(Alignment { run, ..*candidate });
    }
    let least = COMMON_OPS_MIN.min(shorter.div_ceil(2));
    let voted = most_voted(&windows[0].shapes, &windows[1].shapes).filter(|(_, equal)| *equal >= least);
    let votes = voted.map_or(0, |(_, equal)| equal);
    let best = found.iter().max_by_key(|it| it.merit()).copied();
    let Some(best) = best.filter(|best| best.run >= least && MISLEADING_RATIO * best.run >= votes) else {
        return LateBeginning {
            is_late,
            ops_before: voted.map_or([0, 0], |(skipped, _)| skipped),
            other_alignments: 0,
            nearest_alignment: None,
            is_aligned: voted.is_some(),
        };
    };
    let agrees = |other: &&Alignment| {
        other.skipped != best.skipped && (other.fits() && 2 * other.run >= best.run || other.run >= best.run)
    };
    // The remaining candidates are known only by the shapes of their ops.
    let others: Vec<&Alignment> = found.iter().chain(&candidates[found.len()..]).filter(agrees).collect();
    let nearest = others.iter().min_by_key(|other| (other.shift() - best.shift()).unsigned_abs());
    LateBeginning {
        is_late,
        ops_before: best.skipped,
        other_alignments: others.len(),
        nearest_alignment: nearest.map(|other| other.skipped),
        is_aligned: true,
    }
}

/// Returns all alignments whose first common ops are equal, the longest runs first.
fn alignments<T: Copy + Eq>(a: &[T], b: &[T]) -> Vec<Alignment> {
    let of = |skipped: [usize; 2], run: usize| {
        let rest = [a.len() - skipped[0], b.len() - skipped[1]];
        Alignment { skipped, run, overlap: rest[0].min(rest[1]), has_equal_ends: rest[0] == rest[1] }
    };
    let of_a = runs(b, a).into_iter().enumerate().map(|(skipped, run)| of([skipped, 0], run));
    let of_b = runs(a, b).into_iter().enumerate().skip(1).map(|(skipped, run)| of([0, skipped], run));
    let mut alignments: Vec<Alignment> = of_a.chain(of_b).filter(|it| it.run > 0).collect();
    alignments.sort_by_key(|it| Reverse((it.run, it.merit())));
    alignments
}

/// Returns the alignment that the largest number of short sequences of ops supports, and the number of equal ops at this alignment. It
/// finds the common part even if the recordings differ near its beginning. Returns `None` if no sequence occurs in both recordings.
fn most_voted<T: Copy + Eq + Hash>(a: &[T], b: &[T]) -> Option<([usize; 2], usize)> {
    let mut places: HashMap<&[T], Vec<usize>> = HashMap::new();
    for (at, sequence) in a.windows(COMMON_OPS_MIN).enumerate() {
        let places = places.entry(sequence).or_default();
        if places.len() <= PLACES_MAX {
            places.push(at);
        }
    }
    let mut votes: BTreeMap<isize, usize> = BTreeMap::new();
    for (at, sequence) in b.windows(COMMON_OPS_MIN).enumerate() {
        // Sequences that occur often say little about the alignment.
        for place in places.get(sequence).into_iter().filter(|places| places.len() <= PLACES_MAX).flatten() {
            *votes.entry(*place as isize - at as isize).or_default() += 1;
        }
    }
    let (shift, _) = votes.into_iter().max_by_key(|(shift, votes)| (*votes, Reverse(shift.unsigned_abs())))?;
    let skipped = [shift.max(0), (-shift).max(0)].map(isize::unsigned_abs);
    let equal = a[skipped[0]..].iter().zip(&b[skipped[1]..]).filter(|(one, other)| one == other).count();
    Some((skipped, equal))
}

/// Returns the number of consecutive equal ops after the skipped ones.
fn common(windows: &[Window<'_>; 2], skipped: [usize; 2]) -> usize {
    let mut same = Correspondence::default();
    let [one, other] = [0, 1].map(|rank| &windows[rank].calls[skipped[rank]..]);
    one.iter().zip(other).take_while(|(one, other)| same.admits(windows, &one.op, &other.op)).count()
}

/// Returns, for each position of `text`, how many items from there equal the beginning of `pattern`. This is the Z-algorithm, which takes
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

    /// Returns the best alignment of two texts by their letters alone.
    fn alignment(a: &str, b: &str) -> [usize; 2] {
        let alignments = alignments(a.as_bytes(), b.as_bytes());
        alignments.iter().max_by_key(|it| it.merit()).map_or([0, 0], |best| best.skipped)
    }

    #[test]
    fn the_ends_decide_and_otherwise_the_longest_common_run() {
        for (a, b, expected) in [
            ("xyzabc", "abc", [3, 0]),
            ("abc", "xyzabc", [0, 3]),
            ("abcabcabc", "abc", [6, 0]),
            ("abcabcabc", "bcabcx", [1, 0]),
            ("xxabcdef", "abcdeg", [2, 0]),
            ("xxabcdef", "abcdefgh", [2, 0]),
            ("abcdefgh", "xxabcdef", [0, 2]),
            ("abc", "abx", [0, 0]),
            ("abc", "xyz", [0, 0]),
            ("", "xyz", [0, 0]),
        ] {
            assert_eq!(alignment(a, b), expected, "{a} {b}");
        }
    }

    /// The search finds the same alignments, with the same lengths of runs, as a naive comparison.
    #[test]
    fn alignments_are_those_of_the_definition() {
        let mut random = SplitMix64::new(2);
        for _ in 0..300 {
            let mut some = || (0..random.below(9)).map(|_| random.below(2)).collect::<Vec<_>>();
            let (a, b) = (some(), some());
            let mut found: Vec<([usize; 2], usize)> =
                alignments(&a, &b).into_iter().map(|it| (it.skipped, it.run)).collect();
            found.sort_unstable();
            let skips = (0..a.len()).map(|skip| [skip, 0]).chain((1..b.len()).map(|skip| [0, skip]));
            let run = |[skip, skip_b]: [usize; 2]| {
                a[skip..].iter().zip(&b[skip_b..]).take_while(|(one, other)| one == other).count()
            };
            let mut expected: Vec<_> = skips.map(|skip| (skip, run(skip))).filter(|(_, run)| *run > 0).collect();
            expected.sort_unstable();
            assert_eq!(found, expected, "{a:?} {b:?}");
        }
    }

    /// `split` leaves none of an op's ids in the op, and `admits` accepts each op only with an equal op.
    #[test]
    fn every_number_of_an_op_is_mapped() {
        let (stream, on, pool, observer) = (StreamId(3), StreamId(4), PoolId(5), ObserverId(6));
        let id = AllocationId(7);
        let contents = symmalloc_core::op::Contents::Keep;
        let refusal = symmalloc_core::op::Refusal::Driver;
        let ops = [
            Op::RegisterStream { stream, group: on },
            Op::CreatePool { pool, config: Box::default() },
            Op::DestroyPool { pool },
            Op::ResetPool { pool },
            Op::Allocate { id, pool, stream, size_bytes: 512 },
            Op::Free { id },
            Op::RecordUse { id, stream },
            Op::Wait { stream, on },
            Op::Synchronize { stream },
            Op::Reserve { pool, stream, size_bytes: 512 },
            Op::Trim { pool: Some(pool) },
            Op::Trim { pool: None },
            Op::Sync,
            Op::BeginStep { pool, key: 9 },
            Op::EndStep { pool },
            Op::Sleep { pool, contents },
            Op::Wake { pool },
            Op::Stay { pool, asked: None },
            Op::Observe { observer, pool },
            Op::Acknowledge { observer },
            Op::Forget { observer },
            Op::Reclaim { pool, stream, size_bytes: 512 },
            Op::Refuse { pool, stream, size_bytes: 512, refusal },
        ];
        let is_number = |word: &str| ["3", "4", "5", "6", "7"].contains(&word);
        for op in &ops {
            let (without, _) = split(op);
            let text = format!("{without:?}");
            let words: Vec<&str> = text.split(|c: char| !c.is_alphanumeric()).collect();
            assert!(!words.iter().any(|word| is_number(word)), "a number is left in {text}");
        }
        for (at, op) in ops.iter().enumerate() {
            for (other_at, other) in ops.iter().enumerate() {
                let windows = [0, 1].map(|_| Window { calls: Vec::new(), shapes: Vec::new(), allocations: Vec::new() });
                assert_eq!(Correspondence::default().admits(&windows, op, other), at == other_at, "{op:?} {other:?}");
            }
        }
    }
}
