//! `symmalloc diff`: a comparison of two ranks' recordings of one job, or of the flight records of all its ranks.
//!
//! ```text
//! A  records ──► calls: ids by order of birth ──┐     compared call by call, up to the first difference:
//! B  records ──► calls                        ──┴───► same op? for allocation n, same placement?
//! ```
//!
//! A call is an op whose allocation is identified by its ordinal, so the ids in the recordings do not matter. A PyTorch snapshot shows a
//! use by another stream only if the free was not completed immediately, which depends on event polling. Ranks that make the same calls may
//! therefore have different records, and a stream may be registered only because of such a use. Uses by other streams and registrations of
//! streams are therefore left out of the comparison, unless our allocator made both recordings, so that both contain its configuration.
//!
//! The module `flights` compares the flight records of any number of ranks. The module `files` distinguishes flight records from
//! recordings.

mod calls;
mod files;
mod flights;
mod late;
mod report;

pub(crate) use files::run;
pub use late::LateBeginning;
pub(crate) use report::position_without_size;

use calls::{ComparedOps, ProgramCall, calls};
use late::{Correspondence, Window, is_late};
use std::borrow::Borrow;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::ids::Placement;
use symmalloc_core::op::Op;
use symmalloc_import::Recording;

/// Comparison of two recordings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Diff {
    /// The first call that differs; `None` if both recordings make the same calls.
    pub first_op: Option<OpDifference>,
    /// Number of compared ops: all ops of both recordings, or those before the first difference.
    pub compared_ops: usize,
    /// Number of uses by other streams in A and in B; `None` if uses are compared.
    pub uses_left_out: Option<[u64; 2]>,
    /// Number of compared allocations: all allocations, or those before the first call that differs.
    pub allocations: usize,
    /// Number of allocations whose placements differ. `None` if one of the recordings has no placements.
    pub differing_placements: Option<usize>,
    /// The first allocation whose placements differ.
    pub first: Option<PlacementDifference>,
    /// The beginnings of the recordings, if one of them begins in the middle of the job.
    pub late: Option<LateBeginning>,
    /// Number of ops of A, and of B, after the end of the other recording. They do not count as a difference, because the other recording
    /// is known to be incomplete: it begins late, or its end is cut off.
    pub ops_after: [usize; 2],
    /// For A and for B: `true` if the recording contains placements, or has no allocations that would need them.
    pub with_placements: [bool; 2],
    /// Number of requests whose sizes differ, if nothing else differs. `None` if other ops differ, or a recording begins late.
    pub differing_sizes: Option<usize>,
}

/// A call that differs between the recordings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpDifference {
    /// A's op, in which an allocation is identified by its ordinal, and the index of the op, counted from 0. `None` if A has ended.
    pub a: Option<(usize, Op)>,
    /// B's op, in the same form.
    pub b: Option<(usize, Op)>,
    /// Name of the allocation of A's op, and of B's, if the program named it.
    pub names: [Option<Box<str>>; 2],
}

impl OpDifference {
    fn of(a: Option<&ProgramCall<'_>>, b: Option<&ProgramCall<'_>>) -> Self {
        let number_and_op = |call: Option<&ProgramCall<'_>>| call.map(|call| (call.number, call.op.clone()));
        let name = |call: Option<&ProgramCall<'_>>| call.and_then(|call| call.name).map(Into::into);
        OpDifference { a: number_and_op(a), b: number_and_op(b), names: [name(a), name(b)] }
    }
}

/// An allocation whose placements differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlacementDifference {
    /// Ordinal of the allocation, counted from 0.
    pub allocation: usize,
    /// Index in A of the op that makes the allocation, counted from 0.
    pub op: usize,
    /// Name of the allocation, if the program named it.
    pub name: Option<Box<str>>,
    /// Placement in A.
    pub a: Placement,
    /// Placement in B.
    pub b: Placement,
}

impl Diff {
    /// Compares two recordings. If one of them begins in the middle of the job, they are compared from their first common op on, up to the
    /// earlier end.
    pub fn new(a: &Recording, b: &Recording) -> Self {
        if is_late(a) || is_late(b) {
            return Diff::of_late(a, b);
        }
        let mut diff = Diff::empty(a, b);
        let detail = if diff.uses_left_out.is_none() { ComparedOps::Everything } else { ComparedOps::WithoutUses };
        let calls = [a, b].map(|one| calls(&one.records, detail));
        let is_partial = [a, b].map(|one| one.summary.torn_at_line.is_some());
        diff.compare(calls, is_partial, |one, other| one == other);
        diff.differing_sizes = differing_sizes(a, b);
        diff
    }

    /// Compares two recordings, of which at least one begins late.
    fn of_late(a: &Recording, b: &Recording) -> Self {
        let windows = [a, b].map(Window::of);
        let late = late::aligned([a, b].map(is_late), &windows);
        let mut diff = Diff::empty(a, b);
        diff.late = Some(late);
        if late.ops_before != [0, 0] {
            // Each recording numbers segments from its own beginning, so placements cannot be compared.
            diff.differing_placements = None;
        }
        let mut same = Correspondence::default();
        let [calls_a, calls_b] = windows.each_ref().map(|window| window.calls.as_slice());
        let calls = [&calls_a[late.ops_before[0]..], &calls_b[late.ops_before[1]..]].map(|calls| calls.iter());
        diff.compare(calls, [true, true], |one, other| same.admits(&windows, one, other));
        diff
    }

    /// Compares calls up to the first difference, or up to the end of a recording that is partial.
    fn compare<'a, C: Borrow<ProgramCall<'a>>>(
        &mut self,
        [mut calls_a, mut calls_b]: [impl Iterator<Item = C>; 2],
        is_partial: [bool; 2],
        mut is_same: impl FnMut(&Op, &Op) -> bool,
    ) {
        loop {
            let (one, other) = match (calls_a.next(), calls_b.next()) {
                (None, None) => return,
                (Some(_), None) if is_partial[1] => {
                    self.ops_after[0] = 1 + calls_a.count();
                    return;
                }
                (None, Some(_)) if is_partial[0] => {
                    self.ops_after[1] = 1 + calls_b.count();
                    return;
                }
                (Some(one), Some(other)) if is_same(&one.borrow().op, &other.borrow().op) => (one, other),
                (one, other) => {
                    let [one, other] = [&one, &other].map(|call| call.as_ref().map(Borrow::borrow));
                    self.first_op = Some(OpDifference::of(one, other));
                    return;
                }
            };
            let (one, other) = (one.borrow(), other.borrow());
            self.compared_ops += 1;
            if matches!(one.op, Op::Allocate { .. }) {
                self.compare_placements(one, other);
                self.allocations += 1;
            }
        }
    }

    /// Returns a comparison that has not compared any ops yet.
    fn empty(a: &Recording, b: &Recording) -> Self {
        let decided_by_us = a.config.is_some() && b.config.is_some();
        Diff {
            first_op: None,
            compared_ops: 0,
            uses_left_out: (!decided_by_us).then(|| [a, b].map(|one| one.summary.record_uses)),
            allocations: 0,
            differing_placements: (has_placements(a) && has_placements(b)).then_some(0),
            first: None,
            late: None,
            ops_after: [0, 0],
            with_placements: [has_placements(a), has_placements(b)],
            differing_sizes: None,
        }
    }

    /// Returns `true` if both recordings make the same calls.
    pub fn same_ops(&self) -> bool {
        self.first_op.is_none()
    }

    /// Returns `true` if both recordings make the same calls and no known placement differs.
    pub fn is_same(&self) -> bool {
        self.same_ops() && self.differing_placements.unwrap_or(0) == 0
    }

    /// Compares two placements. A placement that is unknown in one of the recordings, as for an empty allocation, does not count as a
    /// difference.
    fn compare_placements(&mut self, one: &ProgramCall<'_>, other: &ProgramCall<'_>) {
        let (Some(a), Some(b)) = (one.record.placement, other.record.placement) else { return };
        if a == b {
            return;
        }
        self.differing_placements = self.differing_placements.map(|differing| differing + 1);
        self.first.get_or_insert_with(|| PlacementDifference {
            allocation: self.allocations,
            op: one.number,
            name: one.record.name.as_deref().map(Into::into),
            a,
            b,
        });
    }
}

fn has_placements(recording: &Recording) -> bool {
    recording.summary.allocations == 0 || recording.summary.placements > 0
}

/// Returns the number of requests whose sizes differ. `None` if anything else differs.
fn differing_sizes(a: &Recording, b: &Recording) -> Option<usize> {
    let with_size = |mut call: ProgramCall<'_>| {
        let size_bytes = match &mut call.op {
            Op::Allocate { size_bytes, .. } | Op::Reserve { size_bytes, .. } => std::mem::take(size_bytes),
            _ => 0,
        };
        (call.op, size_bytes)
    };
    let [mut calls_a, mut calls_b] = [a, b].map(|one| calls(&one.records, ComparedOps::WithoutUses).map(with_size));
    let mut differing = 0;
    loop {
        match (calls_a.next(), calls_b.next()) {
            (None, None) => return Some(differing),
            (Some((one, size_a)), Some((other, size_b))) if one == other => differing += usize::from(size_a != size_b),
            _ => return None,
        }
    }
}

/// Returns the first call that differs, ignoring sizes and settings of pools. Returns `None` if the recordings can be from ranks of one
/// job.
pub(crate) fn other_job(a: &Recording, b: &Recording) -> Option<OpDifference> {
    let without_size = |mut call: ProgramCall<'_>| {
        let number = call.number;
        if let Op::Allocate { size_bytes, .. } | Op::Reserve { size_bytes, .. } = &mut call.op {
            *size_bytes = 0;
        }
        if let Op::CreatePool { config, .. } = &mut call.op {
            **config = PoolConfig::default();
        }
        (number, call.op)
    };
    let [mut calls_a, mut calls_b] = [a, b].map(|one| calls(&one.records, ComparedOps::WithoutUses).map(without_size));
    loop {
        match (calls_a.next(), calls_b.next()) {
            (None, None) => return None,
            (Some(one), Some(other)) if one.1 == other.1 => {}
            (one, other) => return Some(OpDifference { a: one, b: other, names: [None, None] }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_import::{ReadOptions, read_bytes};
    use symmalloc_sim::SplitMix64;

    fn recording(lines: &[&str]) -> Recording {
        let records = lines.iter().filter(|line| !line.starts_with("config")).count();
        let text = format!("symmalloc-trace 1\n{}\nend {records}\n", lines.join("\n"));
        read_bytes(text.as_bytes(), &ReadOptions::default()).unwrap()
    }

    /// A line of a program, whose allocations are numbered in order of creation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Line {
        Allocate { number: u64, size: u64, stream: u64 },
        Use { number: u64, stream: u64 },
        Free { number: u64 },
    }

    impl Line {
        /// Returns the text of the line. `id` returns the id of an allocation, and `place` its page.
        fn text(self, id: impl Fn(u64) -> u64, place: impl Fn(u64) -> u64) -> String {
            match self {
                Line::Allocate { number, size, stream } => {
                    format!("a {} {size} s{stream} -> 0@{}", id(number), 4096 * place(number))
                }
                Line::Use { number, stream } => format!("u {} s{stream}", id(number)),
                Line::Free { number } => format!("f {}", id(number)),
            }
        }

        /// Returns lines that differ from this one in one argument. `live` are the live allocations before it.
        fn changed(self, live: &[u64]) -> Vec<Line> {
            let others = |number: u64| live.iter().copied().filter(move |other| *other != number);
            match self {
                Line::Allocate { number, size, stream } => vec![
                    Line::Allocate { number, size: size + 512, stream },
                    Line::Allocate { number, size, stream: 1 - stream },
                ],
                Line::Use { number, stream } => others(number)
                    .map(|number| Line::Use { number, stream })
                    .chain([Line::Use { number, stream: 1 - stream }, Line::Free { number }])
                    .collect(),
                Line::Free { number } => others(number)
                    .map(|number| Line::Free { number })
                    .chain([Line::Use { number, stream: 0 }])
                    .collect(),
            }
        }
    }

    /// Returns a program, and the live allocations before each line.
    fn program(seed: u64) -> Vec<(Line, Vec<u64>)> {
        let (mut random, mut live, mut made, mut lines) = (SplitMix64::new(seed), Vec::new(), 0, Vec::new());
        for _ in 0..24 {
            let before = live.clone();
            let line = match random.below(3) {
                kind if live.is_empty() || kind == 0 => {
                    live.push(made);
                    made += 1;
                    Line::Allocate { number: made - 1, size: 512 * (1 + random.below(4)), stream: random.below(2) }
                }
                1 => Line::Use { number: live[random.below(live.len() as u64) as usize], stream: random.below(2) },
                _ => Line::Free { number: live.swap_remove(random.below(live.len() as u64) as usize) },
            };
            lines.push((line, before));
        }
        lines
    }

    fn recorded(lines: &[Line], is_ours: bool, id: impl Fn(u64) -> u64) -> Recording {
        recorded_at(lines, is_ours, id, |number| number)
    }

    fn recorded_at(lines: &[Line], is_ours: bool, id: impl Fn(u64) -> u64, place: impl Fn(u64) -> u64) -> Recording {
        let header = if is_ours { "config segments:fixed\n" } else { "" };
        let mut text: Vec<String> = vec![format!("{header}stream s0"), "stream s1".to_owned()];
        text.extend(lines.iter().map(|line| line.text(&id, &place)));
        recording(&text.iter().flat_map(|text| text.lines()).collect::<Vec<_>>())
    }

    /// The ids in recordings do not matter, and everything else does: each changed argument of each call is the first difference.
    #[test]
    fn calls_are_compared_by_the_ordinals_of_their_allocations() {
        // Two records register the streams.
        const BEFORE: usize = 2;
        for seed in 0..40 {
            let program = program(seed);
            let lines: Vec<Line> = program.iter().map(|(line, _)| *line).collect();
            let ids: [fn(u64) -> u64; 3] = [|number| 1000 - number, |number| number ^ 5, |number| 7 * number + 3];
            for is_ours in [true, false] {
                let original = recorded(&lines, is_ours, |number| number);
                for id in ids {
                    let renumbered = recorded(&lines, is_ours, id);
                    let diff = Diff::new(&original, &renumbered);
                    assert!(diff.is_same(), "seed {seed}: {:?}", diff.first_op);
                    assert_eq!(other_job(&original, &renumbered), None, "seed {seed}");
                }
                for (at, (line, live)) in program.iter().enumerate() {
                    if let Line::Allocate { number, .. } = *line {
                        // The placement of this allocation alone is different.
                        let moved =
                            recorded_at(&lines, is_ours, ids[0], |other| other + u64::from(other == number) * 99);
                        let diff = Diff::new(&original, &moved);
                        let first = diff.first.as_ref().map(|first| (first.allocation, first.op));
                        assert!(diff.same_ops() && !diff.is_same(), "seed {seed}: {line:?}");
                        assert_eq!((diff.differing_placements, first), (Some(1), Some((number as usize, BEFORE + at))));
                    }
                    for changed in line.changed(live) {
                        let one = recorded(&lines[..=at], is_ours, |number| number);
                        let mut other = lines[..at].to_vec();
                        other.push(changed);
                        let first = Diff::new(&one, &recorded(&other, is_ours, ids[0])).first_op;
                        let is_use = |line: &Line| matches!(line, Line::Use { .. });
                        let number = |line: &Line| (is_ours || !is_use(line)).then_some(BEFORE + at);
                        let found = first.map_or((None, None), |it| (it.a.map(|a| a.0), it.b.map(|b| b.0)));
                        assert_eq!(found, (number(line), number(&changed)), "seed {seed}: {line:?} became {changed:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn placements_are_compared_up_to_the_first_call_that_differs() {
        let a = recording(&["stream s0", "a 0 512 s0 -> 0@0", "a 1 512 s0 -> 0@512"]);
        let b = recording(&["stream s0", "a 0 512 s0 -> 3@0"]);
        let diff = Diff::new(&a, &b);
        assert_eq!((diff.allocations, diff.differing_placements), (1, Some(1)));
        let difference = diff.first_op.unwrap();
        assert!(difference.a.is_some() && difference.b.is_none());
    }

    #[test]
    fn placements_are_not_compared_if_one_recording_has_none() {
        let a = recording(&["stream s0", "a 0 512 s0"]);
        let b = recording(&["stream s0", "a 0 512 s0 -> 3@0"]);
        let diff = Diff::new(&a, &b);
        assert_eq!((diff.differing_placements, diff.is_same()), (None, true));
    }
}
