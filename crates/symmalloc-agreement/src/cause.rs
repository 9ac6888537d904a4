//! Heuristics that guess, from the ops around the first difference, why ranks differ.
//!
//! Two histories that diverge usually look alike again a little later, possibly shifted. The alignment with the longest
//! run of equal ops indicates what happened:
//!
//! ```text
//!   a: x y z w     a: x y z w     a: x y z w
//!   b: q y z w     b:   y z w     b: y x z w
//!   different      only a did x   different
//!   request                       order
//! ```

use super::found::{Answered, Found, is_memory_moved};
use super::message::WINDOW;
use super::question::{Answer, Step};
use super::report::Cause;
use symmalloc_core::histories::{Mark, unpack_op};
use symmalloc_core::ids::StreamId;

/// Returns the likely cause of a difference, given all differences that were found.
pub(crate) fn cause(found: &Found, all: &[Found]) -> Cause {
    // The largest group is assumed to be correct. Among equally large groups, it is the first.
    let Some(most) = found.answers.iter().rev().max_by_key(|answered| answered.ranks.len()) else {
        return Cause::Unknown;
    };
    let others = found.answers.iter().filter(|other| other.ranks != most.ranks);
    let cause = others.map(|other| between(most, other)).next().unwrap_or(Cause::OlderThanHistory);
    let is_movable = matches!(cause, Cause::OpOnSomeRanks | Cause::DifferentRequest | Cause::DifferentOrder);
    if is_movable && all.iter().any(|other| is_other_stream(found, other)) { Cause::DifferentStream } else { cause }
}

/// Returns `true` if some ranks made a request in the heap of `one`, and others made the same request in a different
/// heap of the pool, that of `other`, at the same position in program order.
fn is_other_stream(one: &Found, other: &Found) -> bool {
    let requests = |found: &Found| {
        let firsts = found.answers.iter().filter_map(|answered| unpack_op(answered.window.first()?.op));
        let requests =
            firsts.filter(|(mark, _, _)| matches!(mark, Mark::Allocate | Mark::AllocateNothing | Mark::Reserve));
        requests.map(|(mark, _, amount_bytes)| (mark, amount_bytes)).collect::<Vec<_>>()
    };
    one.heap != other.heap
        && one.heap.pool == other.heap.pool
        && one.order().is_some()
        && one.order() == other.order()
        && requests(one).iter().any(|request| requests(other).contains(request))
}

/// Returns the likely cause of a difference between two groups of ranks.
fn between(one: &Answered, other: &Answered) -> Cause {
    match (one.answer, other.answer) {
        (Answer::Forgotten { .. }, _) | (_, Answer::Forgotten { .. }) => Cause::OlderThanHistory,
        (Answer::Op { op, decision, .. }, Answer::Op { op: other_op, decision: other_decision, .. }) => {
            if is_obtained(op) || is_obtained(other_op) {
                Cause::DifferentGrowth
            } else if concerns_plan(op) && concerns_plan(other_op) {
                Cause::DifferentPlan
            } else if op == other_op && Step::new(op, decision) == Step::new(other_op, other_decision) {
                Cause::DifferentDecision
            } else if is_refusal_of_the_same(op, other_op) {
                Cause::RefusedMemory
            } else {
                between_windows(&one.window, &other.window)
            }
        }
        (Answer::Op { op, .. }, _) => only_one_did(op, one.window.len()),
        (_, Answer::Op { op, .. }) => only_one_did(op, other.window.len()),
        (Answer::Ended, Answer::Ended) => Cause::Unknown,
    }
}

/// Returns `true` if the op records memory acquired for the preceding op.
fn is_obtained(op: u64) -> bool {
    matches!(unpack_op(op), Some((Mark::Obtain | Mark::Carve, _, _)))
}

/// Returns `true` if the op adopts a plan or begins a step.
fn concerns_plan(op: u64) -> bool {
    matches!(unpack_op(op), Some((Mark::Adopt | Mark::BeginStep, _, _)))
}

/// Returns the cause if one history ends here and the other continues for at least `window` ops.
fn only_one_did(op: u64, window: usize) -> Cause {
    match window {
        _ if is_obtained(op) => Cause::DifferentGrowth,
        1 => missing(op),
        _ => Cause::OpOnSomeRanks,
    }
}

/// Returns the cause if only some ranks did this op.
fn missing(op: u64) -> Cause {
    match unpack_op(op) {
        Some((Mark::Free | Mark::FreeNothing, _, _)) => Cause::MissingFree,
        Some((Mark::RecordUse, _, _)) => Cause::MissingRecordUse,
        _ => Cause::OpOnSomeRanks,
    }
}

/// Returns the cause that corresponds to the best alignment of two windows.
fn between_windows(window: &[Step], other_window: &[Step]) -> Cause {
    let (Some(first), Some(other_first)) = (window.first(), other_window.first()) else {
        let first = window.first().or(other_window.first());
        return first.map_or(Cause::OpOnSomeRanks, |first| missing(first.op));
    };
    if window == other_window {
        // The requests are equal, so the ranks differ only in released memory.
        return Cause::OpOnSomeRanks;
    }
    let (rest, other_rest) = (&window[1..], &other_window[1..]);
    let is_same_kind = first.op >> 58 == other_first.op >> 58;
    // The alignments are in order of preference, for equal scores.
    let candidates = [
        (likeness(rest, other_rest) + usize::from(is_same_kind), other_request(first.op, other_first.op)),
        (likeness(rest, other_window), missing(first.op)),
        (likeness(window, other_rest), missing(other_first.op)),
        (moved(window, other_window).max(moved(other_window, window)), Cause::DifferentOrder),
    ];
    let best = candidates.iter().map(|(likeness, _)| *likeness).max().unwrap_or(0);
    let found = candidates.into_iter().find(|(likeness, _)| *likeness == best);
    found.map_or(Cause::Unknown, |(_, cause)| cause)
}

/// Returns `true` if the driver refused the request of only one of two ranks, or if the ranks made the same request and
/// at least one of them was refused memory.
fn is_refusal_of_the_same(op: u64, other: u64) -> bool {
    let (Some((mark, stream, amount)), Some((other_mark, other_stream, other_amount))) =
        (unpack_op(op), unpack_op(other))
    else {
        return false;
    };
    let is_by_driver = |mark| mark == Mark::RefusedByDriver;
    let is_refused = |mark| matches!(mark, Mark::RefusedByDriver | Mark::RefusedByLimit | Mark::RefusedBySegment);
    let is_same = (stream, amount) == (other_stream, other_amount);
    is_by_driver(mark) != is_by_driver(other_mark) || is_same && (is_refused(mark) || is_refused(other_mark))
}

/// The likelihood that a difference is a consequence of another difference at the same position in program order.
///
/// A difference looks like a consequence if the outcomes differ although the ranks are not known to have made different
/// requests: memory was acquired or released at that point or later, or a limit refused a request on only some ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Consequence {
    Unlikely,
    Likely,
    Certain,
}

pub(crate) fn consequence(found: &Found) -> Consequence {
    let words = found.answers.iter().filter_map(|answered| match answered.answer {
        Answer::Op { op, .. } => Some(op),
        _ => None,
    });
    let words: Vec<u64> = words.collect();
    let ops: Vec<(Mark, StreamId, u64)> = words.iter().filter_map(|op| unpack_op(*op)).collect();
    let is_any = |mark: Mark| ops.iter().any(|(other, _, _)| *other == mark);
    let is_request_equal = ops.iter().all(|(_, stream, amount)| (*stream, *amount) == (ops[0].1, ops[0].2));
    if is_any(Mark::RefusedByDriver) {
        Consequence::Unlikely
    } else if found.earliest.is_some_and(|earliest| earliest.is_memory_moved) {
        Consequence::Certain
    } else if words.iter().any(|op| is_memory_moved(*op)) || is_request_equal && is_any(Mark::RefusedByLimit) {
        Consequence::Likely
    } else {
        Consequence::Unlikely
    }
}

/// Returns the cause of two different requests: [`Cause::DifferentStream`] if only their streams differ (except for frees),
/// and [`Cause::DifferentRequest`] otherwise.
fn other_request(op: u64, other: u64) -> Cause {
    match (unpack_op(op), unpack_op(other)) {
        (Some((mark, stream, amount)), Some((other_mark, other_stream, other_amount)))
            if (mark, amount) == (other_mark, other_amount) && stream != other_stream && mark != Mark::Free =>
        {
            Cause::DifferentStream
        }
        _ => Cause::DifferentRequest,
    }
}

/// Returns a score for the similarity of two windows from their start: 2 for each equal step, 1 for each step with the
/// same op but a different placement, and 3 more if both windows end at the same step.
fn likeness(one: &[Step], other: &[Step]) -> usize {
    let pairs = || one.iter().zip(other);
    let same = pairs().take_while(|(one, other)| one.op == other.op).count();
    let likeness: usize = pairs().take(same).map(|(one, other)| 1 + usize::from(one == other)).sum();
    let ends_together = same == one.len() && same == other.len() && same + 1 < WINDOW;
    likeness + if ends_together { 3 } else { 0 }
}

/// Returns the score of two windows under the assumption that `early` contains the first op of `late` at a later position.
fn moved(early: &[Step], late: &[Step]) -> usize {
    let Some(at) = late.first().and_then(|first| early.iter().position(|step| step == first)) else { return 0 };
    let mut without = early.to_vec();
    without.remove(at);
    // The run of equal ops must extend past the position from which the op was moved.
    let same = without.iter().zip(&late[1..]).take_while(|(one, other)| one.op == other.op).count();
    if same >= at { 2 + likeness(&without, &late[1..]) } else { 0 }
}
